"""Checkpoint folders of a Llama rewritten as wavepe_llama, without loading their weights.

A wavepe_llama has a Llama's tensors under a Llama's names. So files of weights are copied byte for
byte; new are the configuration and, for an encoding that is trained, one file with its parameters.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from .._files import new_folder, some
from .checkpoint_files import (
    CONFIG,
    INDEX,
    Contents,
    Weights,
    copy_without,
    other_files,
    read_json,
    read_weights,
    save,
    write_json,
)
from .config import CLASS_PREFIX, CONFIGS, ON_DISK
from .config import MODELS as CLASSES
from .layers import Choice, Spec, Written, text
from .learned import MODULE

MODEL_TYPE = "wavepe_llama"
WavePELlamaConfig: Any = CONFIGS[MODEL_TYPE]
FAMILIES = ("llama", MODEL_TYPE)
STOCK_CLASSES = [name.removeprefix(CLASS_PREFIX) for name in CLASSES if "Llama" in name]
# Old Llamas stored the frequencies of each layer; transformers leaves them unread.
OLD_FREQUENCIES = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Conversion:
    """What `convert` made: its return value.

    Attributes
    ----------
    folder : Path
        The new checkpoint.
    encoding : str or dict
        Its position encoding, as a spec or a spec for each range of layers.
    model : str
        The class that loads it.
    tensors, bytes : int
        How many tensors the checkpoint has, and their size.
    added, dropped : tuple of str
        Parameters of the new encoding, and tensors that only the former one had.
    left_out : tuple of str
        Files of the source that are not in the new folder: weights in other forms, states of a
        training.
    """

    folder: Path
    encoding: Written
    model: str
    tensors: int
    bytes: int
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    source_folder: str | os.PathLike,
    target_folder: str | os.PathLike,
    encoding: Spec,
    *,
    link: bool = False,
    **options: Any,
) -> Conversion:
    """Write the checkpoint of a Llama anew under another position encoding.

    The weights are copied, never loaded: memory does not grow with the model. Whatever else the
    folder holds (tokenizer, generation settings) comes along. The target appears at the end, whole.

    Parameters
    ----------
    source_folder : path
        config.json of a "llama" or "wavepe_llama", and its weights: safetensors or pytorch_model
        files, one or sharded.
    target_folder : path
        A new folder, or an empty one.
    encoding : str, dict or Encoding
        As `wavepe.encoding` reads it, or a dict of layer ranges as `wavepe.hf.patch` takes it. A
        "rope" without theta keeps the model's own base, and without a type its scaling too;
        layers that a dict does not name rotate so. Parameters of an encoding that is trained begin
        at their initial values, in float32.
    link : bool
        Hard-link files of weights instead of copying them. Both folders then share them: what
        writes one in place changes the other.
    **options
        Options of the encoding.

    Returns
    -------
    Conversion

    Raises
    ------
    ValueError
        A folder, a family of models, a checkpoint or an encoding that cannot be served, found
        before anything is written.
    TypeError
        Where `wavepe.encoding` raises it.
    OSError
        From the system: no room, no permission, no hard links there. Nothing is left behind.
    RuntimeError
        What was written is not what was planned (the source changed meanwhile). Nothing is left.

    Examples
    --------
    >>> import wavepe.hf
    >>> wavepe.hf.convert("llama", "llama-alibi", "alibi")  # doctest: +SKIP
    """
    chosen = Choice(encoding, **options)
    source, target = _folders(source_folder, target_folder)
    plan = _plan(source, chosen)
    _check_room(plan, target, link)
    with new_folder(target) as part:
        _write(plan, part, link)
        _check_written(plan, part)
    return Conversion(
        folder=Path(target_folder),
        encoding=chosen.written(),
        model=plan.model,
        tensors=len(plan.tensors),
        bytes=sum(size for _, size in plan.tensors.values()),
        added=tuple(plan.added),
        dropped=tuple(sorted(plan.dropped)),
        left_out=plan.left_out,
    )


# ------------------------------------------------------------------ what there is


def _folders(source: str | os.PathLike, target: str | os.PathLike) -> tuple[Path, Path]:
    old, new = Path(source), Path(target).resolve()
    if not old.is_dir():
        what = "is a file" if old.exists() else "does not exist (download a model of the Hub first)"
        raise ValueError(f"the source must be a folder with {CONFIG} and weights: {old} {what}")
    if old.resolve() == new:
        raise ValueError(f"source and target are the same folder, {old}: give another target")
    if new == Path.cwd() or os.path.ismount(new):
        what = "the current folder" if new == Path.cwd() else "a mount point"
        raise ValueError(f"the target must be a folder that can be replaced: {target} is {what}")
    if new.exists() and not (new.is_dir() and not any(new.iterdir())):
        what = "is not empty" if new.is_dir() else "is a file"
        raise ValueError(f"the target must be a new or an empty folder: {target} {what}")
    return old, new


def _read_config(source: Path) -> dict[str, Any]:
    """config.json, of a model that can be converted."""
    if (source / "adapter_config.json").exists():
        raise ValueError(f"{source} holds an adapter: merge it into its model and save that first")
    if not (source / CONFIG).is_file():
        raise ValueError(f"{source} has no {CONFIG}: the source must be a folder of transformers")
    config = read_json(source / CONFIG)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{source} has model_type {family!r}: only Llamas have a form with another position "
            f"encoding; model_type must be one of {', '.join(FAMILIES)}"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise ValueError(
                f"{source} is quantised ({key} in {CONFIG}): convert the checkpoint it was made "
                "of, then quantise the result"
            )
    for key, kind in (("auto_map", dict), ("architectures", list)):
        if not isinstance(config.get(key) or kind(), kind):
            given = type(config[key]).__name__
            raise ValueError(f"{source / CONFIG}: {key} must be a {kind.__name__}, got {given}")
    own_code = [key for key in config.get("auto_map") or () if "Tokenizer" not in key]
    if own_code or config.get("transformers_weights"):
        key = "auto_map" if own_code else "transformers_weights"
        raise ValueError(
            f"{source} has {key} in {CONFIG}: a model with code of its own, or weights under a "
            "name of its own, is not supported"
        )
    return config


# ------------------------------------------------------------------ what there will be


@dataclass(frozen=True)
class _Plan:
    """All that decides the result; made before anything is written."""

    source: Path
    config: dict[str, Any]
    model: str
    weights: Weights
    dropped: frozenset[str]
    added: dict[str, Tensor]
    others: list[Path]
    left_out: tuple[str, ...]

    @property
    def tensors(self) -> Contents:
        """Those of the new checkpoint."""
        kept = {k: v for k, v in self.weights.tensors.items() if k not in self.dropped}
        return kept | {name: (tuple(x.shape), x.nbytes) for name, x in self.added.items()}

    def kept_of(self, file: str) -> Contents:
        """The tensors of a file that stay."""
        held = self.weights.files[file]
        return {name: entry for name, entry in held.items() if name not in self.dropped}


def _plan(source: Path, chosen: Choice) -> _Plan:
    old = _read_config(source)
    if old["model_type"] == MODEL_TYPE and old.get("position_encoding") == chosen.written():
        raise ValueError(f"{source} has the position encoding {str(chosen)!r} already")
    weights = read_weights(source)
    layers = old.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(weights.tensors):
        raise ValueError(
            f"the weights in {source} do not fit its {CONFIG}: {layers} layers, and "
            f"{len(weights.tensors)} tensors"
        )
    model = _model_name(source, old, weights.tensors)
    new = {
        **old,
        "model_type": MODEL_TYPE,
        "architectures": [model],
        "position_encoding": chosen.written(),
        **ON_DISK,
    }
    try:  # a copy: transformers rewrites scalings in place
        wanted = _Wanted(model, WavePELlamaConfig.from_dict(copy.deepcopy(new)))
    except Exception as error:  # of the encoding, of transformers' own checks and assumptions
        raise ValueError(f"{chosen} and {source / CONFIG} do not fit: {error}") from error
    dropped = {
        name
        for name in weights.tensors
        if MODULE in name.split(".") or name.endswith(OLD_FREQUENCIES)
    }
    others, left_out = other_files(source, weights)
    plan = _Plan(
        source, new, model, weights, frozenset(dropped), wanted.learned, others, left_out
    )  # fmt: skip
    if misfits := wanted.misfits(plan.tensors):
        raise ValueError(f"the weights in {source} do not fit its {CONFIG}: {misfits}")
    return plan


def _model_name(source: Path, config: dict[str, Any], tensors: Iterable[str]) -> str:
    """The class of the result."""
    names = config.get("architectures") or ()
    if not names:  # as the tensors have it: those of a LlamaModel begin with "layers."
        whole = any(name.startswith("model.") for name in tensors)
        return "WavePELlamaForCausalLM" if whole else "WavePELlamaModel"
    stock = str(names[0]).removeprefix(CLASS_PREFIX)
    if stock not in STOCK_CLASSES:
        raise ValueError(
            f"{source} is a {names[0]} (architectures in {CONFIG}): there is a {MODEL_TYPE} form "
            f"of {', '.join(STOCK_CLASSES)} only"
        )
    return CLASS_PREFIX + stock


class _Wanted:
    """What a class expects of a checkpoint, seen on a model without memory.

    Attributes
    ----------
    shapes : dict of str to tuple
        Of every tensor.
    tied : dict of str to str
        Tensors that are another one, where a checkpoint lacks them.
    learned : dict of str to Tensor
        The parameters of an encoding that is trained, at their initial values.
    """

    def __init__(self, model: str, config: WavePELlamaConfig) -> None:
        with torch.device("meta"):
            made = CLASSES[model](config)
        self.shapes = {name: tuple(x.shape) for name, x in made.state_dict().items()}
        self.tied = _tied(made)
        table: Any = getattr(made.base_model, MODULE, None)
        own = [name for name in self.shapes if MODULE in name.split(".")]
        initial = {} if table is None else table.initial()
        self.learned = {name: initial[name.rpartition(".")[2]].float() for name in own}

    def misfits(self, tensors: Contents) -> str:
        """Where `tensors` are not what is expected, in words; empty where they are."""
        missing = self.shapes.keys() - tensors.keys()
        for pair in self.tied.items():
            if not missing.issuperset(pair):
                missing -= set(pair)
        other = [
            f"{name} {tensors[name][0]} instead of {shape}"
            for name, shape in self.shapes.items()
            if name in tensors and tensors[name][0] != shape
        ]
        found = {
            "missing": sorted(missing),
            "unknown": sorted(tensors.keys() - self.shapes.keys()),
            "of another shape": other,
        }
        return "; ".join(f"{what}: {some(names)}" for what, names in found.items() if names)


def _tied(model: Any) -> dict[str, str]:
    """Names of tensors that are another one."""
    if hasattr(model, "all_tied_weights_keys"):
        return model.all_tied_weights_keys
    # transformers < 5; of Llamas only the causal one has such a tensor
    tied = model.config.tie_word_embeddings and hasattr(model, "lm_head")
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}


# ------------------------------------------------------------------ writing


def _check_room(plan: _Plan, target: Path, link: bool) -> None:
    """OSError where the disk is too small; a copy of hours would end the same way."""
    files = [plan.source / name for name in plan.others]
    if not link:
        files += [plan.source / name for name in plan.weights.files]
    needed = sum(path.stat().st_size for path in files)
    needed += sum(x.nbytes for x in plan.added.values())
    there = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        message = f"{needed} bytes are needed and {free} are free"
        raise OSError(errno.ENOSPC, message, str(target))


def _write(plan: _Plan, part: Path, link: bool) -> None:
    write_json(part / CONFIG, plan.config)
    for relative in plan.others:
        (part / relative).parent.mkdir(parents=True, exist_ok=True)
        _copy(plan.source / relative, part / relative)
    weights, sharded = plan.weights, plan.weights.index is not None or bool(plan.added)
    weight_map: dict[str, str] = {}
    for file in weights.files:
        kept = plan.kept_of(file)
        if not kept:
            continue
        # Beside a model.safetensors from_pretrained reads no index.
        name = weights.beside("00001-of-00001") if sharded and weights.index is None else file
        weight_map |= dict.fromkeys(kept, name)
        if len(kept) < len(weights.files[file]):
            copy_without(plan.source / file, part / name, plan.dropped)
        elif link:  # of the file itself: folders of the Hub's cache hold symbolic links
            os.link((plan.source / file).resolve(), part / name)
        else:
            _copy(plan.source / file, part / name)
    if plan.added:
        name = weights.beside(MODULE.replace("_", "-"))
        weight_map |= dict.fromkeys(plan.added, name)
        save(part / name, plan.added)
    if sharded:
        write_json(part / (weights.name + INDEX), _new_index(plan, weight_map))


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    shutil.copymode(source, target)


def _new_index(plan: _Plan, weight_map: dict[str, str]) -> dict[str, Any]:
    index = plan.weights.index or {}
    if "metadata" in index and not plan.added and not plan.dropped:
        return index
    metadata = dict(index.get("metadata") or {})
    metadata["total_size"] = sum(size for _, size in plan.tensors.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(shape) for shape, _ in plan.tensors.values())
    return {**index, "metadata": metadata, "weight_map": weight_map}


def _check_written(plan: _Plan, part: Path) -> None:
    """Read the result as from_pretrained will, all but the values."""
    config = AutoConfig.from_pretrained(part)
    spec = plan.config["position_encoding"]
    kept = isinstance(config, WavePELlamaConfig) and config.position_encoding == spec
    try:
        tensors = read_weights(part).tensors
    except ValueError as error:
        raise RuntimeError(f"what was written cannot be read: {error}") from error
    misfits = _Wanted(plan.model, config).misfits(tensors)
    if misfits or not kept or tensors != plan.tensors:
        reason = misfits or f"the encoding or the tensors are not those of {plan.source} any more"
        raise RuntimeError(f"what was written is not a {plan.model} with {text(spec)}: {reason}")
