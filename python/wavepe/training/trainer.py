"""The training of a swapped model by transformers' Trainer, and the folder that keeps it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers.utils import CONFIG_NAME

from ..analysis import perplexity
from ..common.errors import require
from ..common.files import locked, writing
from ..hf.learned import MODULE_NAME
from ..hf.patching import encoding_of
from .device import without_bars
from .folder import RESULTS, check_adaptation, refuse_changes, results_of_adapt, write_json
from .plan import Plan

CHECKPOINTS = "checkpoints"
BUSY = (
    "another process is writing there, and accelerate has not joined it with this one: start both "
    "by torchrun or accelerate launch, or give another folder"
)

Progress = Callable[[str, int, int], None]


def with_adapters(model: Any, rank: int) -> Any:
    """Return PEFT's model with LoRA adapters; the parameters of an encoding have no adapters."""
    require("adapt(lora=...)", peft="examples")
    from peft import LoraConfig, get_peft_model

    learned = any(MODULE_NAME in name for name, _ in model.named_parameters())
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM",
        modules_to_save=[MODULE_NAME] if learned else None,
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    # At every checkpoint, PEFT would look up this name; a patched model exists only in memory.
    adapted.peft_config["default"].base_model_name_or_path = ""
    return adapted


def _trainer(
    model: Any, teacher: Any, rows: Tensor, plan: Plan, arguments: Any, progress: Any
) -> Any:
    """Return a Trainer that takes the rows in their order, and follows the plan."""

    class AdaptTrainer(transformers.Trainer):
        optimizer: Any  # for type checkers
        lr_scheduler: Any

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(rows)

        def create_optimizer(self, *_: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = plan.optimizer(self.model)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                scheduler = torch.optim.lr_scheduler.LambdaLR
                self.lr_scheduler = scheduler(self.optimizer, plan.factor)
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
        def on_train_begin(
            self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any
        ) -> None:
            of_step = train_dataloader.total_batch_size * args.gradient_accumulation_steps
            if of_step * plan.steps != len(rows):
                raise ValueError(
                    f"Trainer reads {of_step} sequences in a step, and adapt counts "
                    f"{len(rows) // plan.steps}: give no split_batches and no parallelism of models"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if progress is not None:
                progress(plan.name, state.global_step, plan.steps)

    items = [{"input_ids": row, "labels": row} for row in rows]
    trainer = AdaptTrainer(model, arguments, train_dataset=items, callbacks=[Report()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# How arguments of TrainingArguments begin that `adapt` sets, or would not read.
_OURS = (
    "adam_", "lr_scheduler", "max_steps", "num_train_epochs", "optim", "output_dir",
    "per_device_train_batch_size", "resume_from_checkpoint", "warmup", "weight_decay",
)  # fmt: skip


def check_training(training: Iterable[str]) -> None:
    """Raise TypeError for an argument of TrainingArguments that `adapt` replaces."""
    require("wavepe.hf.adapt", accelerate="hf")
    for name in training:
        if name.startswith(_OURS):
            raise TypeError(
                f"adapt has its own optimizer and schedule, and takes tokens, batch_size and "
                f"folder; got the argument {name!r}"
            )


def training_arguments(training: Mapping[str, Any], **ours: Any) -> Any:
    """Return the TrainingArguments, which know device and processes; `training` are the user's."""
    old, new = "gradient_checkpointing", "activation_checkpointing"  # from transformers 5.24 on
    if new in transformers.TrainingArguments.__dataclass_fields__:
        training = {key.replace(old, new): value for key, value in training.items()}
    arguments = {
        "report_to": "none", "disable_tqdm": True, "save_total_limit": 2, "logging_steps": 10,
        "dataloader_pin_memory": torch.cuda.is_available(), **ours, **training,
    }  # fmt: skip
    return transformers.TrainingArguments(**arguments)


def rows_of(model: Any, arguments: Any) -> int:
    """Return the sequences of a step, of all devices and of all processes that accelerate joins."""
    places = set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"}
    if len(places) > 1 or any(torch.device(place) != arguments.device for place in places):
        arguments._n_gpu = 1  # as in Trainer: its GPUs share a sequence
    joined, started = arguments.world_size, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        started = torch.distributed.get_world_size()
    if joined == 1 < started:  # each would train the whole model, and write the same folder
        raise ValueError(
            f"a launcher started {started} processes, and accelerate does not join them on "
            f"{arguments.device.type}: start them by torchrun or accelerate launch, and to "
            "train on the CPU give use_cpu=True"
        )
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * joined


class Run:
    """An adaptation and its folder: what is done is not done again.

    Of several processes only the first locks, checks and writes the folder: the others could see a
    file half-written, or weights that FSDP left out.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], *, is_kept: bool, is_first: bool
    ) -> None:
        self.folder, self.settings, self.writes = folder, settings, is_kept and is_first
        results = check_adaptation(folder) if is_first else results_of_adapt(folder)
        figures = (results or {}).get("perplexity", {})
        self.perplexity = {k: {int(n): x for n, x in v.items()} for k, v in figures.items()}
        self.seconds: dict[str, float] = (results or {}).get("seconds", {})
        if results is None:
            self._write()
        elif is_first:
            before, now = ({**x, "model": None} for x in (results["settings"], settings))
            advice = ", or give its model to adapt, which trains it on" * self.finished
            refuse_changes(folder, "an adaptation", before, now, advice)

    @classmethod
    @contextmanager
    def opened(cls, folder: Any, settings: dict[str, Any], *, is_first: bool) -> Iterator[Run]:
        """Yield the run, in a temporary folder for None; OSError if another run works there."""
        with ExitStack() as stack:
            path = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
            if folder is not None and is_first:
                stack.enter_context(locked(path, BUSY))
            yield cls(path, settings, is_kept=folder is not None, is_first=is_first)

    @property
    def finished(self) -> bool:
        """Whether the model is written; a control may be trained after it."""
        written = "adapted" in self.perplexity and (self.folder / CONFIG_NAME).exists()
        return written and not (self.folder / CHECKPOINTS / "adapted").exists()

    def _write(self) -> None:
        if self.writes:
            results = {name: getattr(self, name) for name in ("settings", "perplexity", "seconds")}
            write_json(self.folder / RESULTS, results)

    def measure(
        self, name: str, model: Any, ids: Tensor, lengths: list[int], progress: Progress | None
    ) -> None:
        """Measure the perplexities of a model, unless they are known."""
        if name in self.perplexity:
            return
        self.perplexity[name] = {}
        for length in lengths:
            report = progress and partial(progress, f"{name}, {length} tokens")
            self.perplexity[name][length] = perplexity(model, ids, length, progress=report)
        self._write()

    def train(
        self, model: Any, teacher: Any, rows: Tensor, plan: Plan, training: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:  # fmt: skip
        """Train a model, from its last whole checkpoint if there is one."""
        folder = self.folder / CHECKPOINTS / plan.name
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        arguments = training_arguments(
            training, output_dir=str(folder), max_steps=plan.steps, seed=plan.seed,
            per_device_train_batch_size=plan.batch, save_steps=max(1, plan.steps // 20),
            ddp_find_unused_parameters=plan.transfer > 0,
        )  # fmt: skip
        with writing(self.folder), without_bars(), _restored(model):  # a full disk has its name
            trainer = _trainer(model, teacher, rows, plan, arguments, progress)
            trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
        seconds = time.perf_counter() - start
        self.seconds[plan.name] = self.seconds.get(plan.name, 0.0) + seconds
        self._write()

    def finish(self, model: Any, tokenizer: Any) -> None:
        """Write the model, and remove the checkpoints."""
        weights = model.state_dict()
        for name, x in weights.items():
            if hasattr(x, "full_tensor"):  # FSDP2 shards: all processes must gather them
                weights[name] = x.full_tensor()
        if not self.writes:
            return
        with writing(self.folder), without_bars():
            model.save_pretrained(self.folder, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.folder)
        self.discard_checkpoints()

    def discard_checkpoints(self) -> None:
        """Remove the checkpoints, under a hidden name, so that no run finds half of them."""
        if self.writes:
            hidden = self.folder / f".{CHECKPOINTS}"
            shutil.rmtree(hidden, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(self.folder / CHECKPOINTS, hidden)
            shutil.rmtree(hidden, ignore_errors=True)


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


def model_digest(model: Any) -> str:
    """Return the SHA-256 of weights and rotation, by which a folder knows the model it began with.

    A sample of the bytes would miss a row that was trained. A GB takes a second.
    """
    config = model.config.to_dict().items()
    rotation = {key: value for key, value in config if "rope" in key or "rotary" in key}
    digest = hashlib.sha256(f"{encoding_of(model)} {json.dumps(rotation, sort_keys=True)}".encode())
    for name, x in model.state_dict().items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if not x.is_meta:  # weights on disk, of accelerate
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that is whole: Trainer writes its state last."""
    steps = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        with suppress(ValueError, KeyError):
            steps[json.loads(state.read_text("utf-8"))["global_step"]] = str(state.parent)
    return steps[max(steps)] if steps else None


def token_ids(data: Any, tokenizer: Any, known: int) -> Tensor:
    """Return all token ids, int64 of shape (n,), below `known`."""
    if not isinstance(data, Tensor):
        data = _ids_of_rows(data, tokenizer)
    elif data.dim() != 1 or data.is_floating_point():
        raise TypeError(f"data must be 1-D and of integers, got {data.dtype} {data.dim()}-D")
    ids = data.to("cpu", torch.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise ValueError(f"data has ids {ids.min()}..{ids.max()}, and the model has {known} tokens")
    return ids


def _ids_of_rows(data: Any, tokenizer: Any) -> Tensor:
    """Return the ids of texts, each with the end-of-text token, or of rows of ids."""
    if isinstance(data, str | os.PathLike) and os.path.exists(data):
        raise ValueError(
            f"data is the path {os.fspath(data)!r}, and adapt takes texts: give its text, or call "
            "wavepe.experiments.adapt, which reads files"
        )
    rows: Iterable[Any] = [data] if isinstance(data, str) else data
    parts, end = [], getattr(tokenizer, "eos_token_id", None)
    for row in rows:
        if not isinstance(row, str | Mapping):
            raise TypeError(f"rows of data must be texts or dicts, got {type(row).__name__}")
        ids = row if isinstance(row, str) else row.get("input_ids", row.get("text"))
        if isinstance(ids, str):
            if tokenizer is None:
                raise ValueError("data holds texts, so adapt needs the model's tokenizer=")
            ids = tokenizer(ids, add_special_tokens=False, verbose=False)["input_ids"]
            ids = [*ids, *([] if end is None else [end])]
        if ids is None:
            raise ValueError(f"rows of data need 'input_ids' or 'text', got {sorted(row)}")
        parts.append(torch.as_tensor(ids, dtype=torch.int64))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def held_out_and_rows(ids: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` tokens (count,), and rows of `length` tokens to train on."""
    needs = f"{count} to measure and {length} to train on"
    if len(ids) < count + length:
        raise ValueError(f"data has {len(ids)} tokens; needs {needs}")
    ids, held_out = ids[:-count], ids[-count:]
    return held_out, ids[: len(ids) // length * length].view(-1, length)


def order(rows: int, count: int, seed: int) -> Tensor:
    """Return `count` indices of rows: each row once in a random order, then again in another."""
    generator = torch.Generator().manual_seed(seed)
    times = -(-count // rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(times)])[:count]
