"""Swap the position encoding of a trained model, and train it until it has recovered."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import CONFIG_NAME

from .. import _checks
from .._files import new_file, writing
from .._runtime import command_for
from ..analysis._perplexity import perplexity
from ..encodings import Encoding
from . import families, recipes
from .conversion import convert
from .folder import note_perplexities
from .layers import Choice
from .learned import MODULE_NAME, learned_ids
from .patching import encoding_of, patch, warn_of_scales

RESULTS = "results.json"
CHECKPOINTS = "checkpoints"
HELD_OUT = 16384  # tokens, if the data has four times as many
LEARNED_FACTOR = 10  # rate of what an encoding learns, relative to that of the weights
TRANSFER_FACTOR = 3  # rate of a step of transfer, likewise
WARM_UP = 0.05  # of the steps of each kind

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass
class Adapted:
    """What `adapt` returns.

    Attributes
    ----------
    model : PreTrainedModel
        The adapted model; with `lora` its adapters are merged.
    encoding : str
        The encoding that it has, with the parts of the stock rotation that were kept.
    why : str
        What the recipe chose, and why.
    perplexity : dict of str to dict of int to float
        The perplexity by length of the held-out tokens: of the "stock" model, of the "swapped" one
        before training, of the "adapted" one, and of the "control".
    settings : dict
        The arguments.
    seconds : float
        Duration of its training, without evaluations.
    """

    model: Any
    encoding: str
    why: str
    perplexity: dict[str, dict[int, float]]
    settings: dict[str, Any]
    seconds: float


def adapt(
    model: Any,
    encoding: Any,
    data: Any,
    *,
    tokens: int,
    length: int = 512,
    recipe: str = "auto",
    folder: Any = None,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    held_out: int | None = None,
    batch_size: int = 1,
    learning_rate: float = 1e-4,
    lora: int | None = None,
    control: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    **training: Any,
) -> Adapted:
    """Swap the position encoding of a trained model, and train it until it has recovered.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal model of a family that `patch` takes, stock or with another encoding. A stock model
        is changed in place.
    encoding : str or Encoding
        The new encoding.
    data : iterable of str, datasets.Dataset, or integer Tensor (n,)
        Texts, rows with "text" or "input_ids", or token ids.
    tokens : int
        The number of tokens to train on. Data with fewer tokens is read again, in another order.
    length : int
        Tokens of a sequence in training. Take the length at which the model is used, if memory and
        time allow it.
    recipe : "auto", "plain" or "transfer"
        "plain" trains on the next token. "transfer" lets each attention layer first learn the
        output of the stock layer, in a third of the steps, but no more than 30. "auto" does so too.
        If `encoding` rotates nothing, it also keeps the fast pairs of the stock rotation, and gives
        wavelets biases and a projection.
    folder : path, optional
        Where the model, its tokenizer and results are written, and checkpoints meanwhile. The same
        call with the same folder goes on where an interrupted one stopped.
    tokenizer : PreTrainedTokenizer, optional
        Needed for texts.
    lengths : sequence of int, optional
        Lengths of the perplexities; `length` and twice `length` if not given.
    held_out : int, optional
        Tokens at the end of the data that are not trained on, and give the perplexities: 16384 if
        not given, or a quarter of the data if that is less, but at least the largest of `lengths`.
    batch_size : int
        Sequences of a step, in each process.
    learning_rate : float
        Of the weights. What an encoding learns has ten times that rate, steps of transfer three
        times.
    lora : int, optional
        The rank of LoRA adapters (needs PEFT). The weights stay fixed, and get the adapters' sum at
        the end. What an encoding learns is trained as it is.
    control : bool
        Train a copy of the stock model on the same tokens, too, at half the rate.
    seed : int
        Of the order of the data, and of torch.
    progress : callable, optional
        Called as progress(what, done, total) with steps or tokens.
    **training
        Further arguments of ``transformers.TrainingArguments``, such as bf16=True,
        gradient_checkpointing=True or gradient_accumulation_steps=8.

    Returns
    -------
    Adapted

    Raises
    ------
    ImportError
        transformers' Trainer needs accelerate; `lora` needs PEFT.
    TypeError, ValueError
        An argument is wrong or does not fit the model; there are too few tokens; or `folder` holds
        another adaptation.

    Notes
    -----
    A full recovery takes some percent of the tokens that a model was trained on. To use a model
    with RoPE beyond its trained length, try ``rope:type=yarn`` first, which needs no training.

    References
    ----------
    Transfer: Zhang et al., "LoLCATs", 2024, arXiv 2410.10254.
    """
    _need_accelerate()
    source = encoding_of(model)
    base = families.decoder(model)
    length = _checks.integer("length", length, 2)
    batch_size = _checks.integer("batch_size", batch_size, 1)
    lora = None if lora is None else _checks.integer("lora", lora, 1)
    rows_of_step = batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    rows_of_step *= training.get("gradient_accumulation_steps", 1)
    steps = _checks.integer("tokens", tokens, 1) // (length * rows_of_step)
    if not steps:
        raise ValueError(
            f"tokens must be at least those of one step, {length * rows_of_step}, got {tokens}"
        )
    lengths = [_checks.integer("lengths", n, 2) for n in lengths or (length, 2 * length)]
    chosen = recipes.choose(recipe, encoding, base, length, source)
    ids = _token_ids(data, tokenizer)
    size = base.get_input_embeddings().num_embeddings
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(f"data has ids {ids.min()}..{ids.max()}, and the model has {size} tokens")
    if held_out is None:
        held_out = max(*lengths, min(HELD_OUT, len(ids) // 4))
    count = _checks.integer("held_out", held_out, max(lengths))
    test, rows = _split(ids, length, count)
    rows = rows[_order(len(rows), steps * rows_of_step, seed)]
    settings = {
        "encoding": str(chosen.encoding), "recipe": recipe, "tokens": tokens, "length": length,
        "batch_size": batch_size, "learning_rate": learning_rate, "lora": lora, "seed": seed,
        "lengths": lengths, "held_out": len(test), "model": str(model.config._name_or_path),
        "data": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "training": sorted(map(str, training.items())),
    }  # fmt: skip
    transfer = chosen.transfer(steps)
    plan = _Plan(steps, transfer, learning_rate, batch_size, seed, training)
    with _Run.opened(folder, settings) as run:
        if run.finished:
            model = AutoModelForCausalLM.from_pretrained(folder)
            return Adapted(model, **run.facts, why=chosen.why)
        if not hasattr(model, "hf_device_map"):  # else it has its places already
            model.to(_arguments(plan, run.folder).device)
        run.measure("stock", model, test, lengths, progress)
        if control:
            stock = copy.deepcopy(model)
            other = dataclasses.replace(plan, transfer=0, rate=learning_rate / 2)
            run.train("control", stock, None, rows, other, progress)
            run.measure("control", stock, test, lengths, progress)
            del stock
        teacher = recipes.Teacher(copy.deepcopy(model)) if transfer else None
        torch.manual_seed(seed)
        model = _swapped(model, chosen.encoding)
        warn_of_scales(model, Choice(chosen.encoding), length)
        run.measure("swapped", model, test, lengths, progress)
        trained = model if lora is None else _with_adapters(model, lora)
        run.train("adapted", trained, teacher, rows, plan, progress)
        if lora is not None:
            model = trained.merge_and_unload()
        run.measure("adapted", model, test, lengths, progress)
        run.finish(model, tokenizer)
        return Adapted(model.eval(), **run.facts, why=chosen.why)


def _swapped(model: Any, encoding: Encoding) -> Any:
    """Return the model with another encoding; only a stock model can change in place."""
    before = encoding_of(model)
    if before is None:
        return patch(model, encoding)
    if before == str(encoding):
        return model
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(f"{place}/before")
        convert(f"{place}/before", f"{place}/after", encoding)
        found = AutoModelForCausalLM.from_pretrained(f"{place}/after", dtype=model.dtype)
    found.config._name_or_path = model.config._name_or_path
    return found.to(model.device)


def _need_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise ImportError("wavepe.hf.adapt needs accelerate: " + command_for("examples")) from error


# ---- data ---------------------------------------------------------------------------------------


def _token_ids(data: Any, tokenizer: Any) -> Tensor:
    """Return all token ids, int64 of shape (n,). A text ends with the end-of-text token."""
    if isinstance(data, Tensor):
        if data.dim() != 1 or data.is_floating_point():
            raise TypeError(f"data must be 1-D and of integers, got {data.dtype} {data.dim()}-D")
        return data.to("cpu", torch.int64)
    rows: Iterable[Any] = [data] if isinstance(data, str) else data
    parts, end = [], getattr(tokenizer, "eos_token_id", None)
    for row in rows:
        found = row if isinstance(row, str) else row.get("input_ids", row.get("text"))
        if isinstance(found, str):
            if tokenizer is None:
                raise ValueError("data holds texts, so adapt needs the model's tokenizer=")
            found = tokenizer(found, add_special_tokens=False, verbose=False)["input_ids"]
            found = [*found, *([] if end is None else [end])]
        if found is None:
            raise ValueError(f"rows of data need 'input_ids' or 'text', got {sorted(row)}")
        parts.append(torch.as_tensor(found, dtype=torch.int64))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _split(ids: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` tokens (count,), and rows of `length` tokens to train on."""
    if len(ids) < count + length:
        raise ValueError(
            f"data has {len(ids)} tokens; needs {count} to measure and {length} to train on"
        )
    ids, held_out = ids[:-count], ids[-count:]
    return held_out, ids[: len(ids) // length * length].view(-1, length)


def _order(rows: int, count: int, seed: int) -> Tensor:
    """Return `count` indices of rows: each row once in a random order, then again in another."""
    generator = torch.Generator().manual_seed(seed)
    times = -(-count // rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(times)])[:count]


# ---- training -----------------------------------------------------------------------------------


def _with_adapters(model: Any, rank: int) -> Any:
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
    return get_peft_model(model, config)


@dataclasses.dataclass(frozen=True)
class _Plan:
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
    name: str, model: Any, teacher: Any, rows: Tensor, plan: _Plan, folder: Path, progress: Any
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
    arguments = _arguments(plan, folder)
    trainer = AdaptTrainer(model, arguments, train_dataset=items, callbacks=[Report()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _arguments(plan: _Plan, folder: Path) -> Any:
    """Return the TrainingArguments, which also know the device."""
    from transformers import TrainingArguments

    given = {
        "output_dir": str(folder), "max_steps": plan.steps, "seed": plan.seed,
        "per_device_train_batch_size": plan.batch_size, "report_to": "none", "disable_tqdm": True,
        "save_steps": max(1, plan.steps // 20), "save_total_limit": 2, "logging_steps": 10,
        "ddp_find_unused_parameters": plan.transfer > 0,
        "dataloader_pin_memory": torch.cuda.is_available(), **plan.training,
    }  # fmt: skip
    return TrainingArguments(**given)


# ---- the folder ---------------------------------------------------------------------------------


class _Run:
    """The folder of an adaptation: what is done is not done again."""

    def __init__(self, folder: Path, kept: bool, settings: dict[str, Any]) -> None:
        self.folder, self.kept, self.settings = folder, kept, settings
        self.perplexity: dict[str, dict[int, float]] = {}
        self.seconds: dict[str, float] = {}
        file = folder / RESULTS
        if not file.exists():
            return
        found = json.loads(file.read_text("utf-8"))
        other = {key: value for key, value in found["settings"].items() if settings[key] != value}
        if other:
            raise ValueError(
                f"{folder} holds an adaptation with {other}, and this call has "
                f"{ {key: settings[key] for key in other} }: give another folder"
            )
        numbers = found["perplexity"].items()
        self.perplexity = {k: {int(n): x for n, x in v.items()} for k, v in numbers}
        self.seconds = found["seconds"]

    @classmethod
    @contextmanager
    def opened(cls, folder: Any, settings: dict[str, Any]) -> Iterator[_Run]:
        """Yield the run, in a temporary folder if none is given."""
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:
                yield cls(Path(temporary), False, settings)
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            yield cls(Path(folder), True, settings)

    @property
    def facts(self) -> dict[str, Any]:
        """Return attributes of `Adapted`."""
        given = {"perplexity": self.perplexity, "settings": self.settings}
        return given | {"encoding": self.settings["encoding"], "seconds": self.seconds["adapted"]}

    @property
    def finished(self) -> bool:
        return (self.folder / CONFIG_NAME).exists() and not (self.folder / CHECKPOINTS).exists()

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
        self, name: str, model: Any, teacher: Any, rows: Tensor, plan: _Plan, progress: Any
    ) -> None:
        """Train a model, from its last whole checkpoint if there is one."""
        folder = self.folder / CHECKPOINTS / name
        trainer = _trainer(name, model, teacher, rows, plan, folder, progress)
        if _is_first_process():
            folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with writing(self.folder):  # a full disk has its name
            trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.write()

    def finish(self, model: Any, tokenizer: Any) -> None:
        """Write the model, and remove the checkpoints."""
        state = {}
        if self.kept:  # FSDP2 shards parameters: all processes must gather them
            state = {name: _whole(x) for name, x in model.state_dict().items()}
        if not (self.kept and _is_first_process()):
            return
        with writing(self.folder):
            model.save_pretrained(self.folder, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.folder)
        found = {str(n): x for n, x in self.perplexity["adapted"].items()}
        note_perplexities(self.folder, self.settings["encoding"], found)
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)


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
