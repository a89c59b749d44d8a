"""Swap the position encoding of a trained model, and fine-tune it.

This module imports no torch, so that the command line can show the arguments of `adapt`.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import checks

if TYPE_CHECKING:
    from .recipes import Recipe
    from .trainer import Progress

HELD_OUT = 16384  # tokens, if the data has four times as many
WARM_UP = 0.05  # of the transfer steps, and of the others
LEARNED_RATE = 10  # of the parameters of an encoding, relative to that of the weights
# The least value of each argument that is a count.
_LEAST = {
    "tokens": 1, "length": 2, "batch_size": 1, "held_out": 2, "lora": 1, "seed": 0,
    "gradient_accumulation_steps": 1,
}  # fmt: skip


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
        "control"; beyond the trained length also of the stock model by "yarn" and "self-extend".
    settings : dict
        The arguments of `adapt`.
    seconds : float
        The duration of the training, without evaluations.
    tokens : int
        The tokens of all steps of the training.
    passes : float
        Number of passes over the training data.
    untrained : dict of str to str
        The specs of "yarn" and "self-extend", with YaRN's factor; none within the trained length.
    """

    model: Any
    encoding: str
    why: str
    perplexity: dict[str, dict[int, float]]
    settings: dict[str, Any]
    seconds: float
    tokens: int
    passes: float
    untrained: dict[str, str]


def adapt(
    model: Any, encoding: Any, data: Any, *, tokens: int = 1_000_000, length: int = 512,
    recipe: str | Recipe = "auto", folder: Any = None, tokenizer: Any = None,
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
        If the encoding only adds to the scores, as wavelets and ALiBi do, "auto" also keeps the
        fast pairs of the stock rotation, or all pairs of a model that rotates a fraction. Then it
        gives wavelets biases and a projection. A number of scales of which the largest is above a
        quarter of `length` becomes smaller.
    folder : path, optional
        Where the model, its tokenizer and results are written, and checkpoints meanwhile. The same
        call with the same folder goes on where an interrupted one stopped.
    tokenizer : PreTrainedTokenizer, optional
        Needed for texts.
    lengths : sequence of int, optional
        Lengths of the perplexities, in tokens. The default is `length`, twice that, and the model's
        max_position_embeddings if the held-out tokens are so many.
    held_out : int, optional
        Tokens at the end of the data that measure perplexity, and that training does not see. The
        default is 16384, or a quarter of shorter data, but at least the largest of `lengths`.
    batch_size : int
        Sequences of a step, on each device.
    learning_rate : float
        The rate of the weights; parameters of an encoding have ten times, transfer steps three
        times that rate.
    lora : int, optional
        The rank of LoRA adapters (needs PEFT), which are merged at the end. The weights stay fixed;
        parameters of an encoding are trained without adapters.
    control : bool
        Also train a copy of the stock model on the same tokens at half the rate. A finished folder
        that has no control gets one.
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
    import torch
    from transformers import AutoModelForCausalLM

    from ..hf import encoding_of, families, patched
    from . import recipes, trainer
    from .folder import results_of_adapt
    from .plan import Plan

    trainer.check_training(training)
    base = families.decoder(model)
    settings = checked({
        "encoding": encoding, "recipe": recipe, "tokens": tokens, "length": length,
        "batch_size": batch_size, "learning_rate": learning_rate, "lora": lora, "seed": seed,
        "lengths": lengths, "held_out": held_out,
    })  # fmt: skip
    tokens, length, batch_size, rate, seed = (
        settings[name] for name in ("tokens", "length", "batch_size", "learning_rate", "seed")
    )
    lengths, training = settings["lengths"] or [length, 2 * length], checked(training)
    arguments = trainer.training_arguments(
        training, seed=seed, per_device_train_batch_size=batch_size
    )
    rows_of_step = trainer.rows_of(model, arguments)
    if tokens < (least := length * rows_of_step):
        raise ValueError(f"tokens must be at least those of one step, {least}, got {tokens}")
    steps = tokens // least
    chosen: Any = recipe  # that of `experiments` is chosen already
    if not isinstance(recipe, recipes.Recipe):
        chosen = recipes.choose(recipe, encoding, base, length, encoding_of(model))
    ids = trainer.token_ids(data, tokenizer, base.get_input_embeddings().num_embeddings)
    if held_out is None:
        held_out = max(*lengths, min(HELD_OUT, len(ids) // 4))
    held_out = checks.integer("held_out", held_out, max(lengths))
    trained = base.config.max_position_embeddings or 0
    before = results_of_adapt(Path(folder)) if folder else None
    kept = settings["lengths"] or (before and before["settings"].get("lengths") == lengths)
    if not kept and 1 < trained <= held_out:  # earlier versions left it out
        lengths = sorted({*lengths, trained})
    held_out_ids, rows = trainer.held_out_and_rows(ids, length, held_out)
    passes = steps * rows_of_step / len(rows)
    rows = rows[trainer.order(len(rows), steps * rows_of_step, seed)]
    recipes.check_fit(model, chosen.encoding)
    settings |= {
        "encoding": str(chosen.encoding), "recipe": chosen.name, "lengths": lengths,
        "held_out": held_out, "model": str(model.config._name_or_path),
        "weights": trainer.model_digest(model),
        "data": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "training": sorted(map(str, training.items())),
    }  # fmt: skip
    plan = Plan(
        "adapted", seed, steps, batch_size, length, rate, warm_up=WARM_UP, last_rate=0,
        decay=0, learned_rate=LEARNED_RATE, transfer=chosen.transfer(steps),
    )  # fmt: skip
    untrained = recipes.untrained(model, max(lengths))
    with trainer.Run.opened(folder, settings, is_first=arguments.process_index == 0) as run:

        def measure(name: str, model: Any) -> None:
            run.measure(name, model, held_out_ids, lengths, progress)

        control = control and "control" not in run.perplexity
        if control or not run.finished:
            if not hasattr(model, "hf_device_map"):  # else it has its places already
                model.to(arguments.device)
            measure("stock", model)
            for name, spec in untrained.items():
                with patched(model, spec):
                    measure(name, model)
        if control:
            stock = copy.deepcopy(model)
            halved = dataclasses.replace(plan, name="control", transfer=0, rate=rate / 2)
            run.train(stock, None, rows, halved, training, progress)
            measure("control", stock)
            del stock
        if run.finished:
            run.discard_checkpoints()
            model = AutoModelForCausalLM.from_pretrained(folder)
        else:
            teacher = recipes.Teacher(copy.deepcopy(model)) if plan.transfer else None
            torch.manual_seed(seed)
            model = recipes.swapped(model, chosen.encoding)
            measure("swapped", model)
            trained = model if lora is None else trainer.with_adapters(model, lora)
            run.train(trained, teacher, rows, plan, training, progress)
            if lora is not None:
                model = trained.merge_and_unload()
            measure("adapted", model)
            run.finish(model, tokenizer)
        return Adapted(
            model.eval(), str(chosen.encoding), chosen.why, run.perplexity, settings,
            run.seconds["adapted"], rows.numel(), passes, untrained,
        )  # fmt: skip


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as plain values; TypeError or ValueError if a number is wrong."""
    plain = {k: x.item() if isinstance(x, np.generic) else x for k, x in options.items()}
    for name, least in _LEAST.items():
        if plain.get(name) is not None:
            plain[name] = checks.integer(name, plain[name], least)
    if "learning_rate" in plain:
        plain["learning_rate"] = checks.positive("learning_rate", plain["learning_rate"])
    if plain.get("lengths"):
        plain["lengths"] = [checks.integer("lengths", n, 2) for n in plain["lengths"]]
    return plain
