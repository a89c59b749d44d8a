"""Specs, the text form of an encoding: ``name`` or ``name:key=value,key=value``.

A ``+`` before a letter joins parts: ``rope+alibi``. A part may name its layers: ``rope@::2``.

A value is an integer, a decimal number, ``true`` or ``false`` (or ``True``, ``False``), a word, or
a list of these. Items of a list are joined by ``+`` (``1+2+8``), and a list of one ends in ``+``.
So exponents are written without ``+``. Blanks may surround the marks ``: , = + @``, and nothing
else. Empty values and repeated keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]
TYPE_PREFIX = "wavepe_"  # the model types whose checkpoints keep a spec begin so

_INTEGER = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[^\s:,=+@]+")
_JOINT = re.compile(r"\+(?=[^\W\d_])")  # a plus before a letter
_MARK = re.compile(r"\s*([:,=+@])\s*")
_TRUTH = {"true": True, "True": True, "false": False, "False": False}


def is_word(text: object) -> bool:
    """Tell whether `text` may be a name: not empty, no blank and none of ``: , = + @``."""
    return isinstance(text, str) and _WORD.fullmatch(text) is not None


def split_spec(spec: str) -> list[tuple[str, str | None]]:
    """Split a spec into the specs of its parts without blanks, each with its layers, or None."""
    parts = []
    for part in _JOINT.split(_MARK.sub(r"\1", spec.strip())):
        one, at, layers = part.partition("@")
        parts.append((one, layers if at else None))
    return parts


def read_spec(spec: str) -> tuple[str, dict[str, Value]]:
    """Split a spec into its name and its options; ValueError for other texts."""
    name, colon, rest = spec.partition(":")
    if not is_word(name):
        raise ValueError(
            f"spec {spec!r} needs a name first: 'name' or 'name:key=value,key=value'"
            + "; several specs are separated by blanks" * ("," in name)
        )
    options: dict[str, Value] = {}
    for part in rest.split(",") if colon else ():
        key, _, text = part.partition("=")
        if not (is_word(key) and text):
            raise ValueError(f"spec {spec!r} needs key=value after the colon, got {part!r}")
        if key in options:
            raise ValueError(f"spec {spec!r} gives {key} twice; give it once")
        try:
            options[key] = read_value(text)
        except ValueError as error:
            raise ValueError(f"spec {spec!r}: {key}: {error}") from None
    return name, options


def write_spec(name: str, options: Mapping[str, Value]) -> str:
    """Return the spec of a name and its options, in the given order."""
    text = ",".join(f"{key}={write_value(value)}" for key, value in options.items())
    return f"{name}:{text}" if text else name


def read_value(text: str) -> Value:
    """Return the value that `text` stands for; ValueError for other texts."""
    if "+" not in text or _DECIMAL.fullmatch(text):  # 1e+20 is a number, not a list
        return _read_scalar(text)
    first, _, rest = text.partition("+")
    items = [first, *rest.split("+")] if rest else [first]
    return tuple(_read_scalar(item) for item in items)


def write_value(value: Value) -> str:
    """Return the text that `read_value` reads back as `value`."""
    if isinstance(value, tuple):
        return "+".join(map(_write_scalar, value)) + "+" * (len(value) == 1)
    return _write_scalar(value)


def fits_spec(value: Value) -> bool:
    """Tell whether a spec can hold the value: written and read, it is the same."""
    text = write_value(value)
    try:
        return read_value(text) == value and not _JOINT.search(text)
    except ValueError:
        return False


def _read_scalar(text: str) -> Scalar:
    if text in _TRUTH:
        return _TRUTH[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if not is_word(text):
        raise ValueError(f"a value must not be empty or hold a blank, : , = + or @; got {text!r}")
    return text


def _write_scalar(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        short = value.is_integer() and abs(value) < 1e16
        return str(int(value)) if short else repr(value).replace("e+", "e")
    return str(value)
