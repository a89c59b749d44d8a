"""The tokens that a model is measured on."""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .data import evaluation_bytes, load_text, walk
from .errors import UsageError
from .model import Model

if TYPE_CHECKING:
    import torch

TOKENS = 65536
_CHUNK = 1 << 18
_BYTES_A_TOKEN = 16  # more than a token of any text has on average


@dataclass(frozen=True)
class Tokens:
    """Token ids, int64 of shape (n,), and a description of their text."""

    ids: torch.Tensor
    description: str


def check_data(data: str | Path | None) -> None:
    """Raise UsageError if --data does not exist, before a model is loaded."""
    if data is not None and not (str(data) and Path(data).exists()):
        raise UsageError(f"--data {str(data)!r}: no such file or folder")


def tokens_for(
    model: Model, data: str | None, lengths: Sequence[int], budget: int | None = None
) -> Tokens:
    """Return about `budget` tokens, and at least the longest of `lengths`.

    If `wavepe compare` trained the model on this text, the tokens are from its held-out part. If
    also the lengths are those of the comparison and there is no budget, they are exactly the bytes
    that it evaluated. From another text, the function reads the first tokens and no more.
    """
    import torch

    held_out = _held_out(model, data, lengths, own=budget is None)
    longest = max(lengths)
    if held_out is not None:
        content, description, lengths = held_out
        budget = budget or (model.comparison or {}).get("eval_bytes", TOKENS)
        chunks: Iterator[bytes] = iter([content])
        wanted = len(content) if model.tokenizer is None else max(budget, longest)
    else:
        assert data is not None
        budget = budget or TOKENS
        chunks, description, wanted = _chunks(Path(data)), data, max(budget, longest)
    ids = _first(model, chunks, wanted)
    if len(ids) < longest:
        raise UsageError(
            f"text too short: {description} has {len(ids)} {model.unit}s; needs at least {longest}"
        )
    ids = evaluation_bytes(ids, lengths, budget)
    description = f"{len(ids)} {model.unit}s of {description}"
    return Tokens(torch.from_numpy(ids.astype(np.int64)), description)


def first_and_last_tokens(model: Model, data: str | Path, first: int, last: int) -> torch.Tensor:
    """Return the first and the last tokens of a text, or all of a text that is not long, int64."""
    import torch

    chunks = _chunks(Path(data))
    begun: list[bytes] = []

    def noted() -> Iterator[bytes]:
        for chunk in chunks:
            begun.append(chunk)
            yield chunk

    most = _BYTES_A_TOKEN * last
    ids = _first(model, noted(), first)
    read, rest, size = b"".join(begun), b"", 0
    for chunk in chunks:
        rest, size = (rest + chunk)[-most:], size + len(chunk)
    if size < most:  # the whole text, which may have no more tokens than are wanted
        ids = _first(model, iter([read, rest]), len(read) + size)
    else:
        ids = np.concatenate([ids, _first(model, iter([rest]), most)[-last:]])
    return torch.from_numpy(ids.astype(np.int64))


def _held_out(
    model: Model, data: str | None, lengths: Sequence[int], own: bool
) -> tuple[bytes, str, Sequence[int]] | None:
    """Return the held-out text, its description, and the lengths that choose its bytes.

    None means that `data` is another text. If `own`, the lengths of the comparison choose the
    bytes, if possible.
    """
    settings = model.comparison
    if settings is None:
        if data is not None:
            return None
        longest = max(lengths) if model.tokenizer is None else 1
        text = load_text(None, longest, 1)
        return bytes(text.held_out), f"the held-out part of {text.description}", lengths
    known = settings["lengths"]
    if data is not None and not _may_be_text_of(settings, Path(data)):
        return None
    try:
        split = settings.get("split", "test")
        text = load_text(data, max(*known, *lengths), settings["train_length"], split)
    except UsageError:
        if data is None:
            raise
        return None
    if data is not None and text.sha256 != settings["text_sha256"]:
        return None
    chosen = known if own and set(lengths) <= set(known) else lengths
    return bytes(text.held_out), f"the held-out part of {text.description}", chosen


def _may_be_text_of(settings: dict[str, Any], data: Path) -> bool:
    """Return whether `data` may be the text of training, so that reading all of it makes sense.

    A pipe can be read only once, and a far larger text cannot be it.
    """
    if not (data.is_file() or data.is_dir()):
        return False
    files = [file for _, file in walk(data)] if data.is_dir() else [data]
    most = 2 * settings.get("text_bytes", math.inf)  # text_bytes does not count the validation text
    return sum(file.stat().st_size for file in files) <= most


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the text of a file, or of the text files in a folder, in pieces."""
    if not path.is_dir():
        for content in _pieces(path):
            if b"\0" in content:
                raise UsageError(f"--data {path}: needs a text, but this file holds NUL bytes")
            yield content
        return
    for _, file in walk(path):
        for content in _pieces(file):
            if b"\0" in content:
                break
            yield content


def _pieces(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while content := stream.read(_CHUNK):
                yield content
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(file)}: {error.strerror}") from None


def _first(model: Model, chunks: Iterator[bytes], count: int) -> np.ndarray:
    """Return the first `count` tokens of a text, or all of them; do not read more than needed."""
    read = _as_bytes(chunks) if model.tokenizer is None else _tokenized(model.tokenizer, chunks)
    parts, there = [], 0
    for part in read:
        parts.append(part)
        there += len(part)
        if there >= count:
            break
    return np.concatenate([np.zeros(0, np.int64), *parts])[:count]


def _as_bytes(chunks: Iterator[bytes]) -> Iterator[np.ndarray]:
    return (np.frombuffer(chunk, np.uint8) for chunk in chunks)


def _tokenized(tokenizer: Any, chunks: Iterator[bytes]) -> Iterator[np.ndarray]:
    """Yield tokens of whole lines, so that no word is cut (unless a line exceeds a chunk)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for chunk in chunks:
        text = rest + decoder.decode(chunk)
        end = text.rfind("\n") + 1 or len(text)
        rest = text[end:]
        yield _ids(tokenizer, text[:end])
    yield _ids(tokenizer, rest + decoder.decode(b"", final=True))


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return np.array(ids, np.int64)


def text_of(data: str, most: int) -> str:
    """Return the beginning of the text of --data, about `most` bytes."""
    found, size = [], 0
    for chunk in _chunks(Path(data)):
        found.append(chunk)
        size += len(chunk)
        if size >= most:
            break
    if not size:
        raise UsageError(f"--data {data}: holds no text")
    return b"".join(found)[:most].decode("utf-8", "replace")
