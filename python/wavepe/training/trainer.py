"""The training of `adapt`, and the folder that keeps what is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME

from ..analysis._perplexity import perplexity
from ..common.files import lock_folder, new_file, writing
from ..common.labels import suggestion
from ..common.runtime import command_for
from ..hf.folder import note_perplexities
from ..hf.learned import MODULE_NAME, learned_ids
from ..hf.patching import encoding_of
from .folder import results_of_adapt

RESULTS = "results.json"
CHECKPOINTS = "checkpoints"
LEARNED_FACTOR = 10  # rate of what an encoding learns, relative to that of the weights
TRANSFER_FACTOR = 3  # rate of a step of transfer, likewise
WARM_UP = 0.05  # of the steps of each kind

Progress = Callable[[str, int, int], None]


def with_adapters(model: Any, rank: int) -> Any:
    """Return PEFT's model with LoRA adapters; what an encoding learns is trained as it is."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("adapt(lora=...) needs PEFT: " + command_for("examples")) from error
    learned = any(MODULE_NAME in name for name, _ in model.named_parameters())
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=[MODULE_NAME] if learned else None,
        task_type="CAUSAL_LM",
    )
    made = get_peft_model(model, config)
    # By a name PEFT looks for the model at each checkpoint; a patched one is at no place.
    made.peft_config["default"].base_model_name_or_path = ""
    return made


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one model is trained: `transfer` of the `steps` are of transfer."""

    steps: int
    transfer: int
    rate: float
    batch_size: int
    seed: int
    training: dict[str, Any]

    def factor(self, step: int) -> float:
        """Return the factor on the rates at a step: warm-up, then constant or a cosine."""
        if step < self.transfer:
            return TRANSFER_FACTOR * self._warm(step, self.transfer)
        step, steps = step - self.transfer, self.steps - self.transfer
        return self._warm(step, steps) * (1 + math.cos(math.pi * step / steps)) / 2

    @staticmethod
    def _warm(step: int, steps: int) -> float:
        return min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return AdamW without decay; what encodings learn has its own rate."""
    learned = learned_ids(model)
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in learned].append(parameter)
    given: list[dict[str, Any]] = [
        {"params": groups[False]},
        {"params": groups[True], "lr": rate * LEARNED_FACTOR},
    ]
    return torch.optim.AdamW(given, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def _trainer(
    name: str, model: Any, teacher: Any, rows: Tensor, plan: Plan, folder: Path, progress: Any
) -> Any:
    import transformers
    from torch.utils.data import SequentialSampler

    class AdaptTrainer(transformers.Trainer):
        """The rows are in their order already, and the loss follows the step."""

        optimizer: Any  # for type checkers
        lr_scheduler: Any

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(rows)

        def create_optimizer(self, *_: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = _optimizer(self.model, plan.rate)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                made = torch.optim.lr_scheduler.LambdaLR
                self.lr_scheduler = made(self.optimizer, plan.factor)
            return self.lr_scheduler

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            if self.state.global_step >= plan.transfer:
                return super().compute_loss(model, inputs, *args, **options)
            bare = self.accelerator.unwrap_model(model)
            bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare  # PEFT
            with self.accelerator.autocast():  # else the teacher computes in float32
                loss = teacher.loss(model, bare, inputs)
            if self.model_accepts_loss_kwargs:  # else Trainer divides it
                loss = loss / self.current_gradient_accumulation_steps
            return (loss, None) if options.get("return_outputs") else loss

    class Report(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if progress is not None:
                progress(name, state.global_step, plan.steps)

    items = [{"input_ids": row, "labels": row} for row in rows]
    given = training_arguments(plan, folder)
    trainer = AdaptTrainer(model, given, train_dataset=items, callbacks=[Report()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# Arguments of TrainingArguments, and short names, that are other arguments of `adapt`.
_NAMES = {
    "batch": "batch_size", "per_device_train_batch_size": "batch_size", "lr": "learning_rate",
    "max_steps": "tokens", "num_train_epochs": "tokens", "output_dir": "folder",
    "resume_from_checkpoint": "folder",
}  # fmt: skip
_UNREAD = ("adam_", "lr_scheduler", "optim", "warmup", "weight_decay")


def check_training(training: Iterable[str]) -> None:
    """Raise TypeError for a name that is no argument of the training."""
    known = _training_names() - _NAMES.keys()
    names = sorted(known.union(_NAMES.values()))
    for name in training:
        if name.startswith(_UNREAD):
            raise TypeError(f"adapt has its own optimizer and schedule, got the argument {name!r}")
        if name not in known:
            raise TypeError(f"unknown argument {name!r}{suggestion(name, names, _NAMES)}")


def _training_names() -> set[str]:
    from transformers import TrainingArguments

    return {field.name for field in dataclasses.fields(TrainingArguments)}


def training_arguments(plan: Plan, folder: Path) -> Any:
    """Return the TrainingArguments, which also know the device."""
    from transformers import TrainingArguments

    old, new = "gradient_checkpointing", "activation_checkpointing"  # from transformers 5.24 on
    renamed = new in _training_names()
    training = {k.replace(old, new) if renamed else k: x for k, x in plan.training.items()}
    given = {
        "output_dir": str(folder), "max_steps": plan.steps, "seed": plan.seed,
        "per_device_train_batch_size": plan.batch_size, "report_to": "none", "disable_tqdm": True,
        "save_steps": max(1, plan.steps // 20), "save_total_limit": 2, "logging_steps": 10,
        "ddp_find_unused_parameters": plan.transfer > 0,
        "dataloader_pin_memory": torch.cuda.is_available(), **training,
    }  # fmt: skip
    return TrainingArguments(**given)


# ---- the folder ---------------------------------------------------------------------------------

# Settings of which only the beginning of a digest is shown.
_DIGESTS = ("data", "weights")
# What follows from other settings, and is not named beside them.
_FOLLOWS = {
    "encoding": {"recipe", "length"},
    "lengths": {"length"},
    "held_out": {"tokens", "length", "lengths"},
    "data": {"tokens", "length", "lengths", "held_out"},
}


class OtherSettings(ValueError):
    """A folder holds an adaptation with other settings: name -> (there, in this call)."""

    def __init__(self, folder: Path, changes: dict[str, tuple[Any, Any]], finished: bool) -> None:
        self.folder, self.changes, self.finished = folder, changes, finished
        names = {name: name for name in changes}
        super().__init__(self.told(names, "give its model to adapt"))

    def told(self, names: Mapping[str, str], how: str) -> str:
        """Return the message; a setting that `names` lacks is an option. `how` trains on."""
        found = [
            f"{names.get(key, f'--{key}'.replace('_', '-'))} {old} there, {new} here"
            for key, (old, new) in self.changes.items()
        ]
        return (
            f"{self.folder} holds an adaptation with other settings ({'; '.join(found)}): give "
            f"another folder{f', or train its model on: {how}' * self.finished}"
        )


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    if "weights" not in before:  # of an earlier version: a model is known by its name alone
        now = {key: x for key, x in now.items() if key != "weights"}
    else:
        before, now = ({**x, "model": None} for x in (before, now))
    there, here = map(_told, (before, now))
    keys = (there | here).keys()
    pairs = {key: (there.get(key, "not given"), here.get(key, "not given")) for key in keys}
    other = {key for key, (old, new) in pairs.items() if old != new}
    return {k: x for k, x in pairs.items() if k in other and not _FOLLOWS.get(k, set()) & other}


def _told(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is given of the settings, as a user reads it."""
    found = {key: x for key, x in settings.items() if key != "training" and x is not None}
    found |= {key: f"sha256:{found[key][:16]}" for key in _DIGESTS if key in found}
    for pair in settings["training"]:  # "('bf16', True)"
        name, _, value = pair[2:-1].partition("', ")
        found[name] = value
    return found


class Run:
    """The folder of an adaptation: what is done is not done again."""

    def __init__(self, folder: Path, kept: bool, settings: dict[str, Any]) -> None:
        self.folder, self.kept, self.settings = folder, kept, settings
        self.perplexity: dict[str, dict[int, float]] = {}
        self.seconds: dict[str, float] = {}
        found = results_of_adapt(folder)
        if found is None:
            # The first process alone, which may be writing the file.
            for name in (RESULTS, CONFIG_NAME) if _is_first_process() else ():
                if (folder / name).exists():
                    raise ValueError(f"adapt did not write {folder / name}: give another folder")
            return
        numbers = found["perplexity"].items()
        self.perplexity = {k: {int(n): x for n, x in v.items()} for k, v in numbers}
        self.seconds = found["seconds"]
        # FSDP may load the weights in the first process alone.
        if _is_first_process() and (changes := _changes(found["settings"], settings)):
            raise OtherSettings(folder, changes, self.finished)

    @classmethod
    @contextmanager
    def opened(cls, folder: Any, settings: dict[str, Any]) -> Iterator[Run]:
        """Yield the run, in a temporary folder if none is given; the first process locks it.

        OSError if another run works there.
        """
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:
                yield cls(Path(temporary), False, settings)
            return
        lock = lock_folder(Path(folder)) if _is_first_process() else None
        try:
            run = cls(Path(folder), True, settings)
            if not (run.folder / RESULTS).exists():
                run.write()
            yield run
        finally:
            if lock is not None:
                os.close(lock)

    @property
    def facts(self) -> dict[str, Any]:
        """Return attributes of `Adapted`."""
        given = {"perplexity": self.perplexity, "settings": self.settings}
        return given | {"encoding": self.settings["encoding"], "seconds": self.seconds["adapted"]}

    @property
    def finished(self) -> bool:
        """Whether the model is written; a control may be trained after it."""
        written = "adapted" in self.perplexity and (self.folder / CONFIG_NAME).exists()
        return written and not (self.folder / CHECKPOINTS / "adapted").exists()

    def discard_checkpoints(self) -> None:
        """Remove the checkpoints; first they get a hidden name, so that no run finds half of them.

        Another process may have been killed while it did so.
        """
        if self.kept and _is_first_process():
            hidden = self.folder / f".{CHECKPOINTS}"
            shutil.rmtree(hidden, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(self.folder / CHECKPOINTS, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def write(self) -> None:
        if not (self.kept and _is_first_process()):
            return
        content = {
            "settings": self.settings,
            "perplexity": self.perplexity,
            "seconds": self.seconds,
        }
        with new_file(self.folder / RESULTS) as part:
            part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def measure(
        self, name: str, model: Any, ids: Tensor, lengths: list[int], progress: Progress | None
    ) -> None:
        """Measure the perplexities of a model, unless they are known."""
        if name in self.perplexity:
            return
        self.perplexity[name] = {}
        for length in lengths:
            report = None
            if progress is not None:
                what = f"{name}, {length} tokens"
                report = lambda done, total, what=what: progress(what, done, total)  # noqa: E731
            self.perplexity[name][length] = perplexity(model, ids, length, progress=report)
        self.write()

    def train(
        self, name: str, model: Any, teacher: Any, rows: Tensor, plan: Plan, progress: Any
    ) -> None:
        """Train a model, from its last whole checkpoint if there is one."""
        folder = self.folder / CHECKPOINTS / name
        if _is_first_process():
            folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with writing(self.folder), without_bars(), _restored(model):  # a full disk has its name
            trainer = _trainer(name, model, teacher, rows, plan, folder, progress)
            trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    def finish(self, model: Any, tokenizer: Any) -> None:
        """Write the model, and remove the checkpoints."""
        if not self.kept:
            return
        # FSDP2 shards parameters: all processes must gather them
        state = {name: _whole(x) for name, x in model.state_dict().items()}
        if not _is_first_process():
            return
        with writing(self.folder), without_bars():
            model.save_pretrained(self.folder, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.folder)
        found = {str(n): x for n, x in self.perplexity["adapted"].items()}
        note_perplexities(self.folder, self.settings["encoding"], found)
        self.discard_checkpoints()


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Undo what Trainer does to a model: accelerate's forward in autocast, and no cache."""
    names, use_cache = ("forward", "_original_forward"), model.config.use_cache
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)
        model.config.use_cache = use_cache


@contextmanager
def without_bars() -> Iterator[None]:
    """Leave out transformers' bars, one for each checkpoint; `progress` shows the progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_digest(model: Any) -> str:
    """Return the SHA-256 of weights and rotation, by which a folder knows the model it began with.

    All bytes count, because a sample would miss a row that was trained. A GB takes a second.
    """
    config = model.config.to_dict().items()
    rotation = {key: value for key, value in config if "rope" in key or "rotary" in key}
    digest = hashlib.sha256(f"{encoding_of(model)} {json.dumps(rotation, sort_keys=True)}".encode())
    for name, x in model.state_dict().items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if not x.is_meta:  # weights on disk, of accelerate
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that is whole: Trainer writes its state last."""
    found = []
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        try:
            found.append((json.loads(state.read_text("utf-8"))["global_step"], state.parent))
        except (ValueError, KeyError):
            continue
    return str(max(found)[1]) if found else None
