"""Files of a checkpoint folder: what is in those of weights, copies without some tensors, the rest.

Of weights only headers and the bytes in transit are ever in memory.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .._files import some

CONFIG = "config.json"
INDEX = ".index.json"
# In the order in which from_pretrained looks for them, each alone or as the index of its shards.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Weights in forms that are not read here, and states of a training: of the model as it was.
OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data",
)  # fmt: skip
_PIECE = 2**22  # bytes in memory at a time

Contents = dict[str, tuple[tuple[int, ...], int]]  # tensor -> its shape, its bytes


@dataclass(frozen=True)
class Weights:
    """The files that from_pretrained reads in a folder, with their tensors.

    `index` is what the file that lists the shards says; None for a single file, called `name`.
    """

    name: str
    files: dict[str, Contents]
    index: dict[str, Any] | None

    @property
    def tensors(self) -> Contents:
        return {name: entry for held in self.files.values() for name, entry in held.items()}

    def beside(self, suffix: str) -> str:
        """A file name of this format: model-SUFFIX.safetensors."""
        stem, ending = os.path.splitext(self.name)
        return f"{stem}-{suffix}{ending}"


def read_weights(folder: Path) -> Weights:
    """The names, shapes and sizes of all tensors, from the headers of their files.

    Raises
    ------
    ValueError
        No weights, shards that the index lists and the folder lacks, or a damaged file.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return Weights(name, {name: _contents(folder / name)}, None)
        if (path := folder / (name + INDEX)).is_file():
            index = read_json(path)
            listed = index.get("weight_map")
            if not (isinstance(listed, dict) and all(map(_is_file_name, listed.values()))):
                raise ValueError(f"{path} needs a weight_map from tensors to files beside it")
            shards = sorted(set(listed.values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise ValueError(f"{path} lists shards that are not there: {some(missing)}")
            files = {shard: _contents(folder / shard) for shard in shards}
            missing = [tensor for tensor, shard in listed.items() if tensor not in files[shard]]
            if missing:
                raise ValueError(f"{path} lists tensors that its shards lack: {some(missing)}")
            return Weights(name, files, index)
    raise ValueError(
        f"{folder} has no weights: needs {' or '.join(WEIGHTS)}, or their index and shards"
    )


def _is_file_name(text: Any) -> bool:
    return isinstance(text, str) and text not in ("", ".", "..") and os.path.basename(text) == text


def _contents(path: Path) -> Contents:
    if path.suffix == ".safetensors":
        entries, _, _ = _header(path)
        return {
            name: (tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in entries.items()
        }
    return {name: (tuple(x.shape), x.nbytes) for name, x in load_bin(path, "meta").items()}


def _header(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str], int]:
    """Of a safetensors file: the tensors' entries, its metadata, and where its data begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path} is no whole safetensors file: {size} bytes, with a header of {length}; "
                "was it downloaded in full?"
            )
        text = file.read(length)
    try:
        with safetensors.safe_open(path, "pt"):  # judges the header, loads nothing
            entries = json.loads(text)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file of {size} bytes: {error}") from error
    metadata = entries.pop("__metadata__", {})
    return entries, metadata, 8 + length


def load_bin(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a pytorch_model file; their values stay on disk until they are used."""
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # whose advice is to load it all the same
        reason = error.__context__ or "not a pickle of tensors"
        raise ValueError(
            f"{path} holds other things than tensors, and nothing of it was run: {reason}"
        ) from error
    except Exception as error:  # of zipfile, torch
        raise ValueError(f"{path} cannot be read as weights of PyTorch: {error}") from error
    if not (isinstance(state, dict) and all(isinstance(x, Tensor) for x in state.values())):
        raise ValueError(f"{path} holds other things than a dict of tensors")
    return state


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError for anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def other_files(source: Path, weights: Weights) -> tuple[list[Path], tuple[str, ...]]:
    """What is copied beside the weights, and what is not; paths relative to the source.

    Hidden folders, and folders that are checkpoints themselves, are passed over.
    """
    own = {CONFIG, *weights.files}
    if weights.index is not None:
        own.add(weights.name + INDEX)
    copied: list[Path] = []
    left_out: list[Path] = []
    for folder, folders, names in os.walk(source, onerror=_raise):
        links = (Path(folder, name) for name in folders if Path(folder, name).is_symlink())
        left_out += [path.relative_to(source) for path in links]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not Path(folder, name, CONFIG).exists()
        )
        for name in sorted(names):
            relative = Path(folder, name).relative_to(source)
            if str(relative) in own:
                continue
            stale = name.endswith((*OTHER_WEIGHTS, INDEX)) or not Path(folder, name).is_file()
            (left_out if stale else copied).append(relative)
    return copied, tuple(map(str, left_out))


def _raise(error: OSError) -> None:
    raise error  # os.walk would pass over a folder that it cannot read


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of weights in the format that its name ends with."""
    if path.suffix == ".safetensors":
        path.write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
        return
    with path.open("wb") as file:  # with a path, torch's errors do not tell the system's
        torch.save(tensors, file)


def copy_without(source: Path, target: Path, dropped: frozenset[str]) -> None:
    """Copy a file of weights but for some tensors; a safetensors file in pieces."""
    if source.suffix != ".safetensors":
        state = load_bin(source, "cpu")
        save(target, {name: x for name, x in state.items() if name not in dropped})
        return
    entries, metadata, data = _header(source)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    ranges, position = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if name not in dropped:
            begin, end = entry["data_offsets"]
            ranges.append((data + begin, end - begin))
            header[name] = {**entry, "data_offsets": [position, position + end - begin]}
            position += end - begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for begin, size in ranges:
            reader.seek(begin)
            _copy_bytes(reader, writer, size)


def _copy_bytes(reader: BinaryIO, writer: BinaryIO, size: int) -> None:
    while size > 0:
        piece = reader.read(min(size, _PIECE))
        if not piece:
            raise RuntimeError(f"{reader.name} became shorter while it was copied")
        writer.write(piece)
        size -= len(piece)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
