"""Convert a checkpoint folder to one of the type wavepe_<family>, without loading its weights.

A wavepe_llama has the tensors of a Llama, under the same names. So the weight files are copied and
config.json is edited. A learned encoding adds one shard with its parameters.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..common.files import inside, leading_names, leads_out, new_folder, read_object, write_object
from ..common.spec import TYPE_PREFIX
from ..positions import Learned
from .config import CLASS_PREFIX, CONFIGS, MODELS, ON_DISK
from .families import FAMILIES
from .folder import MODULE, auto_map, is_ours, write_beside
from .layers import LayerEncodings, Spec, StoredSpec
from .learned import MODULE_NAME
from .model_types import stored_as_named
from .patching import warn_of_misfits

# Weights in other formats, and training states: they belong to the source model alone.
OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data",
    ".index.json",
)  # fmt: skip
# Old checkpoints of Llama and GPT-NeoX hold buffers that no model reads any more.
UNREAD = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")


@dataclass(frozen=True)
class Conversion:
    """Describe a new checkpoint: the return value of `convert`.

    Attributes
    ----------
    folder : Path
        Folder of the new checkpoint.
    encoding : str or dict
        Its position encoding: a spec, or a spec for each range of layers.
    model : str
        Name of the class that loads it.
    tensors, bytes : int
        Number of tensors in the checkpoint, and their size in bytes.
    added : tuple of str
        Names of the new encoding's parameters.
    dropped : tuple of str
        Names of tensors that the new model does not have: parameters of the former encoding, and
        buffers that no model reads.
    left_out : tuple of str
        Files of the source that were not copied: weights in other formats, training states, and
        symbolic links that lead out of the folder.
    """

    folder: Path
    encoding: StoredSpec
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
    """Write a copy of a checkpoint folder whose model has another position encoding.

    The new folder loads with `AutoModelForCausalLM.from_pretrained`, once `wavepe.hf` is imported.
    The weights are copied and never loaded, so the memory in use does not depend on the size of the
    model. Tokenizer and generation settings are copied too. The target folder appears when it is
    complete.

    Parameters
    ----------
    source_folder : path
        Folder with a config.json and safetensors, sharded or not. The model is of a family that
        `patch` takes, or of its type wavepe_<family>.
    target_folder : path
        Folder to create. It may exist if it is empty.
    encoding : str, dict or Encoding
        The new encoding, in any form that `wavepe.encoding` takes. Or a dict of layer ranges, as
        `wavepe.hf.patch` takes it; layers that it does not name keep the model's RoPE. A "rope"
        without theta keeps the base of the model, and without a type its scaling too. The
        parameters of a learned encoding start at their initial values, in float32.
    link : bool
        Hard-link the weight files instead of copying them. Both folders then share these files: a
        program that changes one in place changes both.
    **options
        Options of the encoding.

    Returns
    -------
    Conversion
        Names, sizes and encoding of the new checkpoint.

    Raises
    ------
    ValueError
        The folder, the model family, the checkpoint or the encoding cannot be converted; or
        config.json or weights are links that lead out of the folder. Nothing has been written.
    TypeError
        The encoding has a type that `wavepe.encoding` does not accept.
    OSError
        The system cannot write: no space, no permission, no hard links. Nothing is left behind.

    Examples
    --------
    >>> import wavepe.hf
    >>> wavepe.hf.convert("llama", "llama-alibi", "alibi")  # doctest: +SKIP
    """
    chosen = LayerEncodings(encoding, **options)
    source, target = Path(source_folder), Path(target_folder).resolve()
    if target == Path.cwd() or os.path.ismount(target):
        raise ValueError(
            f"the target must not be the current folder or a mount point, got {target}"
        )
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"the target must be a new or an empty folder, but {target} is not empty")
    config = _new_config(source, chosen)
    model = empty_model(str(source / CONFIG_NAME), config, chosen)
    files = _read_weights(source)
    stored = {name: x for tensors in files.values() for name, x in tensors.items()}
    dropped = {name for name in stored if MODULE_NAME in name.split(".") or name.endswith(UNREAD)}
    warn_of_misfits(model, chosen)
    added = {  # the parameters of a learned encoding
        f"{place}.{name}": value.float()
        for place, module in model.named_modules()
        if isinstance(module, Learned)
        for name, value in module.initial().items()
    }
    tensors = {name: x for name, x in stored.items() if name not in dropped} | added
    _check_fit(source, model, tensors)
    others, left_out = _other_files(source, files)
    with new_folder(target) as part:
        write_object(part / CONFIG_NAME, config)
        for path in others:
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(inside(source, path), part / path)
        loaded = {**model.config.to_dict(), "architectures": config["architectures"]}
        write_beside(part, loaded, str(source))
        _write_weights(source, part, files, dropped, added, link)
    return Conversion(
        folder=Path(target_folder),
        encoding=chosen.stored(),
        model=type(model).__name__,
        tensors=len(tensors),
        bytes=sum(x.nbytes for x in tensors.values()),
        added=tuple(added),
        dropped=tuple(sorted(dropped)),
        left_out=tuple(left_out),
    )


def _new_config(source: Path, chosen: LayerEncodings) -> dict[str, Any]:
    """Return the edited config.json of the source; ValueError for an unsupported model."""
    if (source / "adapter_config.json").exists():
        raise ValueError(
            f"{source} holds an adapter: merge it into its model first, and convert the saved model"
        )
    if not (source / CONFIG_NAME).is_file():
        raise ValueError(
            f"{source} has no {CONFIG_NAME}: the source must be a local checkpoint folder "
            "(download a model of the Hub first)"
        )
    config = read_object(source, CONFIG_NAME)
    for key, needed in (("architectures", list), ("auto_map", dict)):
        if not isinstance(config.get(key) or needed(), needed):
            raise ValueError(f"{source} has {key} {config[key]!r}, needs a {needed.__name__}")
    kind = str(config.get("model_type")).removeprefix(TYPE_PREFIX)
    own_type = TYPE_PREFIX + kind
    if own_type not in CONFIGS:
        raise ValueError(f"{source} has model_type {kind!r}, needs one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ValueError(
            f"{source} is quantised: convert the model before quantisation, and quantise the result"
        )
    present = config.get("auto_map") or {}
    if any("Tokenizer" not in key and not is_ours(value) for key, value in present.items()):
        raise ValueError(f"{source} has custom code (auto_map): convert cannot convert code")
    if config.get("transformers_weights"):
        raise ValueError(
            f"{source} names its weight files by transformers_weights: convert supports "
            f"{SAFE_WEIGHTS_NAME} only"
        )
    stock_names = [
        name.removeprefix(CLASS_PREFIX)
        for name, model in MODELS.items()
        if model.config_class is CONFIGS[own_type]
    ]
    causal = [name for name in stock_names if name.endswith("ForCausalLM")]
    name = str((config.get("architectures") or causal)[0]).removeprefix(CLASS_PREFIX)
    if name not in stock_names:
        raise ValueError(f"{source} is a {name}, needs one of {', '.join(stock_names)}")
    if config["model_type"] == own_type and config.get("position_encoding") == chosen.stored():
        raise ValueError(f"{source} has the position encoding {str(chosen)!r} already")
    return {
        **config,
        "model_type": own_type,
        "architectures": [CLASS_PREFIX + name],
        "position_encoding": chosen.stored(),
        **ON_DISK,
        "auto_map": auto_map(own_type, present),
    }


def empty_model(source: str, config: dict[str, Any], chosen: LayerEncodings) -> Any:
    """Build the new model on the meta device; ValueError if the encoding does not fit."""
    try:
        with torch.device("meta"):  # copied, because transformers changes scalings in place
            model_config = CONFIGS[config["model_type"]].from_dict(copy.deepcopy(config))
            model = MODELS[config["architectures"][0]](model_config)
            model.tie_weights()  # transformers 5.0 does not do it on the meta device
            return model
    except Exception as error:  # raised by the encoding, or by transformers' own checks
        raise ValueError(f"{chosen} and {source} do not fit: {error}") from error


def _read_weights(source: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each weight file."""
    if (source / SAFE_WEIGHTS_NAME).is_file():
        return {SAFE_WEIGHTS_NAME: _mapped(source, SAFE_WEIGHTS_NAME)}
    index = source / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise ValueError(
            f"{source} has no {SAFE_WEIGHTS_NAME}, nor shards of it: load a model with other "
            "weights by from_pretrained, save it by save_pretrained, and convert that folder"
        )
    weight_map = read_object(source, index.name).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    if not files or not all(isinstance(file, str) for file in files):
        raise ValueError(f"{index} needs a weight_map from names of tensors to files")
    shards = sorted(set(files))
    beside = [path.name for path in source.iterdir() if path.is_file()]
    if missing := [shard for shard in shards if shard not in beside]:
        raise ValueError(f"{index} lists shards that are not beside it: {leading_names(missing)}")
    return {shard: _mapped(source, shard) for shard in shards}


def _mapped(source: Path, name: str) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a file: values stay on disk until they are used."""
    path = inside(source, name)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except Exception as error:  # raised by safetensors
        raise ValueError(
            f"{source / name} cannot be read as weights (was it downloaded in full?): {error}"
        ) from error
    return tensors


def _check_fit(source: Path, model: Any, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless names and shapes of the tensors are those of the model."""
    if not stored_as_named(model):
        return
    expected = model.state_dict()
    needed = dict(model.named_parameters())  # does not list a tied tensor twice
    misfits = {
        "missing": sorted(needed.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of another shape": [
            f"{name} {tuple(x.shape)} instead of {tuple(expected[name].shape)}"
            for name, x in tensors.items()
            if name in expected and x.shape != expected[name].shape
        ],
    }
    lists = [f"{what}: {leading_names(names)}" for what, names in misfits.items() if names]
    if lists:
        raise ValueError(
            f"the weights in {source} do not fit its {CONFIG_NAME}: {'; '.join(lists)}"
        )


def _other_files(source: Path, weights: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the other files, those to be copied and those to be left out, without
    those that are hidden or in folders that are hidden or checkpoints themselves."""
    rewritten = {CONFIG_NAME, f"{MODULE}.py", SAFE_WEIGHTS_INDEX_NAME, *weights}
    copied: set[str] = set()
    left_out: set[str] = set()
    for folder, folders, names in os.walk(source, onerror=_raise):
        names += [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not Path(folder, name, CONFIG_NAME).exists()
        ]
        shown = (name for name in names if name == ".gitattributes" or not name.startswith("."))
        for path in (Path(folder, name) for name in shown):
            name = str(path.relative_to(source))
            stale = name.endswith(OTHER_WEIGHTS) or not path.is_file()
            (left_out if stale or leads_out(source, name) else copied).add(name)
    return sorted(copied - rewritten), sorted(left_out - rewritten)


def _raise(error: OSError) -> None:
    raise error  # os.walk would skip a folder that it cannot read


def _write_weights(
    source: Path,
    part: Path,
    files: dict[str, dict[str, Tensor]],
    dropped: set[str],
    added: dict[str, Tensor],
    link: bool,
) -> None:
    """Copy or link the weight files, rewrite those that lose tensors, and add the new shard."""
    stem, suffix = os.path.splitext(SAFE_WEIGHTS_NAME)
    tensors = dict(added)
    weight_map: dict[str, str] = {}
    for file, stored in files.items():
        kept = {name: x for name, x in stored.items() if name not in dropped}
        # from_pretrained ignores an index beside a single file, so that file becomes a shard.
        name = f"{stem}-00001-of-00001{suffix}" if file == SAFE_WEIGHTS_NAME and added else file
        if kept and len(kept) < len(stored):
            _save(part / name, kept)
        elif kept:
            (os.link if link else shutil.copy)(inside(source, file), part / name)
        tensors |= kept
        weight_map |= dict.fromkeys(kept, name)
    if added:
        name = f"{stem}-{MODULE_NAME.replace('_', '-')}{suffix}"
        _save(part / name, added)
        weight_map |= dict.fromkeys(added, name)
    if SAFE_WEIGHTS_NAME not in weight_map.values():
        metadata = {
            "total_parameters": sum(x.numel() for x in tensors.values()),
            "total_size": sum(x.nbytes for x in tensors.values()),
        }
        index = {"metadata": metadata, "weight_map": weight_map}
        write_object(part / SAFE_WEIGHTS_INDEX_NAME, index)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    # safetensors 0.8 and later write files that only the owner may read.
    shutil.copymode(path.with_name(CONFIG_NAME), path)
