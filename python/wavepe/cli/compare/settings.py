"""The settings of ``wavepe compare``: checked before anything runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import wavepe

from ..errors import UsageError

DEFAULT_ENCODINGS = (
    "none",
    "sinusoidal",
    "rope",
    "rope:theta=128",
    "rope:theta=128,inference_theta=scaled",
    "rope:theta=10000,inference_theta=scaled",
    "alibi",
    "wavelet:scales=6",
)
DEFAULT_FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Settings:
    """All that decides the figures, besides the text and the number of threads."""

    encodings: tuple[str, ...]
    lengths: tuple[int, ...]
    train_length: int
    steps: int
    seeds: int
    batch: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float
    eval_bytes: int
    imports: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def manifest(self, text_sha256: str) -> dict[str, Any]:
        """What a run folder keeps to recognise its own settings, as JSON gives it back."""
        settings = asdict(self)
        if not self.imports:  # as folders of comparisons without them have it
            del settings["imports"]
        return json.loads(json.dumps({**settings, "text_sha256": text_sha256}))


def settings_from(args: argparse.Namespace, imports: tuple[str, ...] = ()) -> Settings:
    """The parsed arguments as Settings; UsageError names the first one that is wrong.

    `imports` are what `import_all` gave for the files that were imported.
    """
    train_length = _integer("--train-length", args.train_length, 2)
    heads = _integer("--heads", args.heads, 1)
    head_dim = _integer("--head-dim", args.head_dim, 2)
    if head_dim % 2:
        raise UsageError(f"--head-dim {head_dim}: needs an even number")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        raise UsageError(f"--lr {args.lr:g}: needs a positive number")
    lengths = args.lengths or [str(train_length * factor) for factor in DEFAULT_FACTORS]
    settings = Settings(
        encodings=_encodings(args.encodings or DEFAULT_ENCODINGS),
        lengths=_lengths(lengths),
        train_length=train_length,
        steps=_integer("--steps", args.steps, 1),
        seeds=_integer("--seeds", args.seeds, 1),
        batch=_integer("--batch", args.batch, 1),
        layers=_integer("--layers", args.layers, 1),
        heads=heads,
        head_dim=head_dim,
        learning_rate=args.lr,
        eval_bytes=_integer("--eval-bytes", args.eval_bytes, 1),
        imports=imports,
    )
    for spec in settings.encodings:
        _try_encoding(spec, settings)
    return settings


def digest(manifest: dict[str, Any]) -> str:
    """Eight hexadecimal digits that name a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:8]


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings two manifests differ in, in words."""
    words = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            words.append(f"{key} {_plain(old.get(key))} there, {_plain(new.get(key))} here")
    return "; ".join(words)


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_TOO_MANY = 2**31


def _integer(name: str, value: int, least: int) -> int:
    if not least <= value < _TOO_MANY:
        raise UsageError(f"{name} {value}: needs {least} to {_TOO_MANY - 1}")
    return value


def _lengths(words: Sequence[str]) -> tuple[int, ...]:
    lengths = []
    for word in ",".join(words).replace(",", " ").split():
        try:
            length = int(word)
        except ValueError:
            raise UsageError(f"--lengths {word}: needs integers") from None
        lengths.append(_integer("--lengths", length, 2))
    if not lengths:
        raise UsageError("--lengths: needs at least one integer")
    _no_duplicates("--lengths", lengths)
    return tuple(lengths)


def _encodings(specs: Sequence[str]) -> tuple[str, ...]:
    names = []
    for spec in specs:
        try:
            names.append(str(wavepe.encoding(spec)))
        except (ValueError, TypeError) as error:
            raise UsageError(f"--encodings {spec}: {error}") from None
    _no_duplicates("--encodings", names)
    return tuple(names)


def _no_duplicates(option: str, values: Iterable[Any]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise UsageError(f"{option} {value}: given twice")
        seen.add(value)


def _try_encoding(spec: str, settings: Settings) -> None:
    """Ask the encoding for the numbers it will be asked for, so that a misfit shows now."""
    encoding = wavepe.encoding(spec)
    longest = max(settings.train_length, *settings.lengths)
    ends = np.array([0, longest - 1])
    around = {"length": longest, "trained_length": settings.train_length}
    try:
        if encoding.entry == "absolute":
            encoding.absolute(ends, settings.hidden, **around)
        elif encoding.entry == "rotary":
            encoding.rope_table(ends, settings.head_dim, **around)
        elif encoding.entry == "relative":
            encoding.table(2, settings.head_dim)  # the head size decides; the whole may be large
        elif encoding.entry == "slope":
            encoding.slopes(settings.heads)
        elif encoding.entry == "bias":
            encoding.bias(2, settings.heads)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--encodings {spec}: {error}") from None
