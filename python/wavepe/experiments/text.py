"""The text on which commands measure or adapt a model, as tokens."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.errors import UsageError
from .data import Text, evaluation_bytes, load_text, walk
from .model import Model

if TYPE_CHECKING:
    import torch

TOKENS = 65536
_PIECE = 1 << 18  # bytes
_BYTES_A_TOKEN = 16  # more than a token of any text has on average


class Tokens(NamedTuple):
    ids: torch.Tensor  # int64, (n,)
    description: str


def check_data(data: str | Path | None) -> None:
    """Raise UsageError if `data` does not exist, before a model is loaded."""
    if data is not None and not (str(data) and Path(data).exists()):
        raise UsageError(f"`data` {str(data)!r}: no such file or folder")


def tokens_for(
    model: Model, data: str | None, lengths: Sequence[int], budget: int | None = None
) -> Tokens:
    """Return about `budget` tokens, and at least the longest of `lengths`.

    If `wavepe compare` trained the model on this text, they are held out; with the comparison's
    lengths and no budget, exactly the bytes that it evaluated. Of another text, only the first
    tokens are read.
    """
    import torch

    settings, longest = model.comparison or {}, max(lengths)
    text = _held_out_of(model, data, longest)
    if text is None:
        assert data is not None
        pieces, description = _pieces(Path(data)), data
    else:
        pieces = iter([bytes(text.held_out)])
        description = f"the held-out part of {text.description}"
        if model.comparison is None:  # the model may know it
            description = f"{text.description}, the part that wavepe compare holds out"
        if budget is None and set(lengths) <= set(settings.get("lengths", ())):
            lengths = settings["lengths"]
        budget = budget or settings.get("eval_bytes")
    budget = budget or TOKENS
    wanted = max(budget, longest)
    if text is not None and model.tokenizer is None:  # choose among all of the held-out bytes
        wanted = len(text.held_out)
    ids = _first(model.tokenizer, pieces, wanted)[:wanted]
    if len(ids) < longest:
        raise UsageError(
            f"text too short: {description} has {len(ids)} {model.unit}s; needs at least {longest}"
        )
    ids = evaluation_bytes(ids, lengths, budget)
    return Tokens(torch.from_numpy(ids), f"{len(ids)} {model.unit}s of {description}")


def first_and_last_tokens(model: Model, data: str | Path, first: int, last: int) -> torch.Tensor:
    """Return the first and the last tokens of a text, or all if there are no more, int64."""
    import torch

    pieces = _pieces(Path(data))
    begin = _first(model.tokenizer, pieces, first)
    end, spare = deque[bytes](), -_BYTES_A_TOKEN * last
    for piece in pieces:
        end.append(piece)
        spare += len(piece)
        while spare >= len(end[0]):
            spare -= len(end.popleft())
    ids = np.concatenate([begin, _first(model.tokenizer, end)])
    if len(ids) > first + last:
        ids = np.concatenate([ids[:first], ids[-last:]])
    return torch.from_numpy(ids)


def text_of(data: str, most: int) -> str:
    """Return the beginning of the text of `data`, at most `most` bytes."""
    content = _first(None, _pieces(Path(data)), most)[:most].astype(np.uint8).tobytes()
    if not content:
        raise UsageError(f"`data` {data}: holds no text")
    return content.decode("utf-8", "replace")


def _held_out_of(model: Model, data: str | None, longest: int) -> Text | None:
    """Return the text with its held-out part; None if `data` is not a training text."""
    if (settings := model.comparison) is None:
        longest = longest if model.tokenizer is None else 1
        return load_text(None, longest, 1) if data is None else None
    if data is not None:  # a pipe, or a far larger text, is not the training text
        files, before = _files(Path(data)), settings.get("text", {})
        most = 2 * (before.get("read_bytes") or before.get("train_bytes", math.inf))
        if not all(map(Path.is_file, files)) or sum(x.stat().st_size for x in files) > most:
            return None
    # Old results do not tell what decided the split. Another text may be too short for it.
    longest = settings.get("text", {}).get("longest") or max(settings["lengths"])
    try:
        text = load_text(data, longest, settings["train_length"], settings.get("split", "test"))
    except UsageError:
        if data is None:
            raise
        return None
    return text if data is None or text.sha256 == settings["text_sha256"] else None


def _files(data: Path) -> list[Path]:
    return [file for _, file in walk(data)] if data.is_dir() else [data]


def _pieces(data: Path) -> Iterator[bytes]:
    """Yield the text of a file, or of the text files in a folder, in pieces of lines."""
    for file in _files(data):
        try:
            with file.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
                while text := stream.read(_PIECE) + stream.readline(_PIECE):
                    if "\0" in text:
                        break
                    yield text.encode("utf-8", "surrogateescape")
        except OSError as error:
            raise UsageError(f"cannot read {os.fspath(file)}: {error.strerror}") from None
        if "\0" in text and file is data:
            raise UsageError(f"`data` {data}: needs a text, but this file holds NUL bytes")


def _first(tokenizer: Any, pieces: Iterable[bytes], count: float = math.inf) -> np.ndarray:
    """Return at least the first `count` tokens of a text; without a tokenizer, tokens are bytes."""
    parts, read = [np.zeros(0, np.int64)], 0
    for piece in pieces:
        ids = np.frombuffer(piece, np.uint8)
        if tokenizer is not None:
            text = piece.decode("utf-8", "replace")
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.array(ids, np.int64))
        read += len(ids)
        if read >= count:
            break
    return np.concatenate(parts)
