"""Swap the position encoding of a trained model, and fine-tune it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..common import checks
from ..encodings import Encoding
from ..hf import families
from ..hf.config import CLASS_PREFIX
from ..hf.conversion import convert, empty_model
from ..hf.families import TYPE_PREFIX
from ..hf.layers import LayerEncodings
from ..hf.patching import encoding_of, patch, warn_of_scales
from . import recipes
from .device import without_bars
from .plan import Plan
from .trainer import (
    PARTS,
    Progress,
    Run,
    check_training,
    model_digest,
    rows_of,
    training_arguments,
    with_adapters,
)  # fmt: skip

HELD_OUT = 16384  # tokens, if the data has four times as many
WARM_UP = 0.05  # of the transfer steps, and of the others
LEARNED_RATE = 10  # of the parameters of an encoding, relative to that of the weights


@dataclasses.dataclass
class Adapted:
    """Hold the results of `adapt`.

    Attributes
    ----------
    model : PreTrainedModel
        The adapted model; with `lora` its adapters are merged.
    encoding : str
        The spec of its encoding, with the parts of the stock rotation that were kept.
    why : str
        The choices of the recipe, and the reasons.
    perplexity : dict of str to dict of int to float
        Of the held-out tokens, by length, for "stock", "swapped" (before training), "adapted" and
        "control".
    settings : dict
        The arguments of `adapt`.
    seconds : float
        The duration of the training, without evaluations.
    tokens : int
        The tokens of all steps of the training.
    passes : float
        Number of passes over the training data.
    """

    model: Any
    encoding: str
    why: str
    perplexity: dict[str, dict[int, float]]
    settings: dict[str, Any]
    seconds: float
    tokens: int
    passes: float


def adapt(
    model: Any, encoding: Any, data: Any, *, tokens: int, length: int = 512,
    recipe: str = "auto", folder: Any = None, tokenizer: Any = None,
    lengths: Sequence[int] | None = None, held_out: int | None = None, batch_size: int = 1,
    learning_rate: float = 1e-4, lora: int | None = None, control: bool = False, seed: int = 0,
    progress: Progress | None = None, **training: Any,
) -> Adapted:  # fmt: skip
    """Swap the position encoding of a trained model, and fine-tune it.

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
        The number of tokens of the training. Shorter data is read again, in another order.
    length : int
        Tokens of a sequence in training; best the length at which you use the model.
    recipe : "auto", "plain" or "transfer"
        "plain" trains on the next token. "transfer" lets each attention layer first learn the
        output of the stock layer, in a third of the steps, but no more than 30. "auto" does so too.
        If `encoding` only adds to the scores, as wavelets and ALiBi do, "auto" also keeps the fast
        pairs of the stock rotation, or all pairs of a model that rotates a fraction. Then it gives
        wavelets biases and a projection.
    folder : path, optional
        Where the model, its tokenizer and results are written, and checkpoints meanwhile. The same
        call with the same folder goes on where an interrupted one stopped.
    tokenizer : PreTrainedTokenizer, optional
        Needed for texts.
    lengths : sequence of int, optional
        Lengths of the perplexities, in tokens. None takes `length` and twice `length`.
    held_out : int, optional
        Tokens at the end of the data that measure perplexity, and that training does not see. None
        takes 16384, or a quarter of shorter data, but at least the largest of `lengths`.
    batch_size : int
        Sequences of a step, on each device.
    learning_rate : float
        The rate of the weights; parameters of an encoding have ten times, transfer steps three
        times that rate.
    lora : int, optional
        The rank of LoRA adapters (needs PEFT), which are merged at the end. The weights stay fixed;
        parameters of an encoding are trained without adapters.
    control : bool
        Also train a copy of the stock model on the same tokens at half the rate. A finished
        `folder` that has no control gets one.
    seed : int
        The seed of torch, and of the order of the data.
    progress : callable, optional
        Called as progress(what, done, total) with steps or tokens.
    **training
        Further ``transformers.TrainingArguments``, such as bf16=True, gradient_checkpointing=True
        or gradient_accumulation_steps=8, but not those of optimizer, schedule and steps.

    Returns
    -------
    Adapted

    Raises
    ------
    ImportError
        accelerate is missing, or for `lora` PEFT.
    TypeError, ValueError
        An argument is wrong or does not fit the model; there are too few tokens; `folder` holds
        another adaptation; or accelerate has not joined the processes that a launcher started.
    OSError
        Another process works in `folder`, or the system cannot write there.

    Notes
    -----
    A full recovery takes some percent of the tokens of the model's own training. To use a model
    with RoPE beyond its trained length, try ``rope:type=yarn`` first, which needs no training.

    References
    ----------
    Transfer: Zhang et al., "LoLCATs", 2024, arXiv 2410.10254.
    """
    check_training(training)
    source = encoding_of(model)
    base = families.decoder(model)
    length = checks.integer("length", length, 2)
    batch_size = checks.integer("batch_size", batch_size, 1)
    lora = None if lora is None else checks.integer("lora", lora, 1)
    seed = checks.integer("seed", seed, 0)
    learning_rate = checks.positive("learning_rate", learning_rate)
    training = {k: x.item() if isinstance(x, np.generic) else x for k, x in training.items()}
    tokens = checks.integer("tokens", tokens, 1)
    checks.integer("gradient_accumulation_steps", training.get(PARTS, 1), 1)
    arguments = training_arguments(training, seed=seed, per_device_train_batch_size=batch_size)
    rows_of_step = rows_of(arguments)
    if tokens < (least := length * rows_of_step):
        raise ValueError(f"tokens must be at least those of one step, {least}, got {tokens}")
    steps = tokens // least
    lengths = [checks.integer("lengths", n, 2) for n in lengths or (length, 2 * length)]
    chosen = recipes.choose(recipe, encoding, base, length, source)
    ids = token_ids(data, tokenizer)
    known = base.get_input_embeddings().num_embeddings
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise ValueError(f"data has ids {ids.min()}..{ids.max()}, and the model has {known} tokens")
    if held_out is None:
        held_out = max(*lengths, min(HELD_OUT, len(ids) // 4))
    held_out_ids, rows = _split(ids, length, checks.integer("held_out", held_out, max(lengths)))
    passes = steps * rows_of_step / len(rows)
    rows = rows[_order(len(rows), steps * rows_of_step, seed)]
    _check_fit(model, chosen.encoding)
    settings = {
        "encoding": str(chosen.encoding), "recipe": recipe, "tokens": tokens, "length": length,
        "batch_size": batch_size, "learning_rate": learning_rate, "lora": lora, "seed": seed,
        "lengths": lengths, "held_out": len(held_out_ids),
        "model": str(model.config._name_or_path), "weights": model_digest(model),
        "data": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "training": sorted(map(str, training.items())),
    }  # fmt: skip
    plan = Plan(
        "adapted", seed, steps, batch_size, length, learning_rate, warm_up=WARM_UP, last_rate=0,
        decay=0, learned_rate=LEARNED_RATE, transfer=chosen.transfer(steps),
    )  # fmt: skip
    with Run.opened(folder, settings, is_first=arguments.process_index == 0) as run:

        def measure(name: str, model: Any) -> None:
            run.measure(name, model, held_out_ids, lengths, progress)

        control = control and "control" not in run.perplexity
        if control or not run.finished:
            if not hasattr(model, "hf_device_map"):  # else it has its places already
                model.to(arguments.device)
            measure("stock", model)
        if control:
            stock, rate = copy.deepcopy(model), learning_rate / 2
            halved = dataclasses.replace(plan, name="control", transfer=0, rate=rate)
            run.train(stock, None, rows, halved, training, progress)
            measure("control", stock)
            del stock
        if run.finished:
            run.discard_checkpoints()
            model = AutoModelForCausalLM.from_pretrained(folder)
        else:
            teacher = recipes.Teacher(copy.deepcopy(model)) if plan.transfer else None
            torch.manual_seed(seed)
            model = _swapped(model, chosen.encoding)
            warn_of_scales(model, LayerEncodings(chosen.encoding), length)
            measure("swapped", model)
            trained = model if lora is None else with_adapters(model, lora)
            run.train(trained, teacher, rows, plan, training, progress)
            if lora is not None:
                model = trained.merge_and_unload()
            measure("adapted", model)
            run.finish(model, tokenizer)
        return Adapted(
            model.eval(), str(chosen.encoding), chosen.why, run.perplexity, settings,
            run.seconds["adapted"], rows.numel(), passes,
        )  # fmt: skip


def _check_fit(model: Any, encoding: Encoding) -> None:
    """Raise ValueError if the model cannot have the encoding, before the work begins."""
    config = model.config.to_dict()
    kind = TYPE_PREFIX + str(config["model_type"]).removeprefix(TYPE_PREFIX)
    name = CLASS_PREFIX + type(model).__name__.removeprefix(CLASS_PREFIX)
    config |= {"model_type": kind, "architectures": [name], "position_encoding": str(encoding)}
    empty_model("the model", config, LayerEncodings(encoding))


def _swapped(model: Any, encoding: Encoding) -> Any:
    """Return the model with another encoding; only a stock model can change in place."""
    before = encoding_of(model)
    if before is None:
        return patch(model, encoding)
    if before == str(encoding):
        return model
    with tempfile.TemporaryDirectory() as place, without_bars():
        model.save_pretrained(f"{place}/before")
        convert(f"{place}/before", f"{place}/after", encoding)
        swapped = AutoModelForCausalLM.from_pretrained(f"{place}/after", dtype=model.dtype)
    swapped.config._name_or_path = model.config._name_or_path
    return swapped.to(model.device)


def token_ids(data: Any, tokenizer: Any) -> Tensor:
    """Return all token ids, int64 of shape (n,). A text ends with the end-of-text token."""
    if isinstance(data, Tensor):
        if data.dim() != 1 or data.is_floating_point():
            raise TypeError(f"data must be 1-D and of integers, got {data.dtype} {data.dim()}-D")
        return data.to("cpu", torch.int64)
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


def _split(ids: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` tokens (count,), and rows of `length` tokens to train on."""
    needs = f"{count} to measure and {length} to train on"
    if len(ids) < count + length:
        raise ValueError(f"data has {len(ids)} tokens; needs {needs}")
    ids, held_out = ids[:-count], ids[-count:]
    return held_out, ids[: len(ids) // length * length].view(-1, length)


def _order(rows: int, count: int, seed: int) -> Tensor:
    """Return `count` indices of rows: each row once in a random order, then again in another."""
    generator = torch.Generator().manual_seed(seed)
    times = -(-count // rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(times)])[:count]
