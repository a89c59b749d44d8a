"""Position encodings: one object for every front end.

`wavepe.encoding(spec)` reads a spec ("wavelet:scales=6"), a dict or an encoding, and returns an
immutable object. Its methods return the arrays that a model needs. Each encoding has a module of
its own here, the only place that declares its options and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arrays.relative_bias import Bias, Table
from ..common.spec import read_spec, split_spec
from .alibi import ALiBi
from .base import Combination, Encoding, build, combine, read_dict
from .binary import Binary
from .fox import FoX
from .integer import Integer
from .kerple import Kerple
from .layers import check_layers
from .methods import Query
from .none import NoPE
from .normalised import Normalised
from .options import option
from .pope import PoPE
from .register import known_encodings, register_encoding
from .relative import Relative
from .rope import RoPE
from .sandwich import Sandwich
from .shaw import Shaw
from .sink import Sink
from .sinusoidal import Sinusoidal
from .t5 import T5
from .temperature import Temperature
from .transformer_xl import TransformerXL
from .wavelet import Wavelet
from .window import Window
from .xpos import XPos

__all__ = [
    "T5", "ALiBi", "Bias", "Binary", "Encoding", "FoX", "Integer", "Kerple", "NoPE", "Normalised",
    "PoPE", "Query", "Relative", "RoPE", "Sandwich", "Shaw", "Sink", "Sinusoidal", "Table",
    "Temperature", "TransformerXL", "Wavelet", "Window", "XPos", "encoding", "known_encodings",
    "option", "register_encoding",
]  # fmt: skip


def encoding(spec: str | Mapping[str, Any] | Encoding, **options: Any) -> Encoding:
    """Return the position encoding that `spec` describes.

    Parameters
    ----------
    spec : str, mapping or Encoding
        One of: a name; a text "name:key=value,key=value"; such texts joined by ``+``; a dict as
        `Encoding.to_dict` returns it; an encoding. In a text, a value is an integer, a number,
        true, false, a word, or a list such as ``1+2+8``, and blanks around ``: , = + @`` do not
        count. ``PART@LAYERS`` is a part for some layers: LAYERS are indices or slices of Python,
        joined by dots.
    **options
        Options that `spec` does not set.

    Returns
    -------
    encoding : Encoding
        An immutable object. `str` of it is its spec.

    Raises
    ------
    ValueError
        If the name or an option is unknown (the message lists the known ones), if a value is
        wrong, if the spec is malformed, if `spec` and `options` give an option two values, or if
        parts do not go together: two of them rotate or have one name.
    TypeError
        If `spec` or an option has a wrong type.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.encoding("rope:theta=128")
    RoPE(theta=128.0)
    >>> str(wavepe.encoding("wavelet", scales=[1, 2, 8], kind="haar"))
    'wavelet:kind=haar,scales=1+2+8'
    >>> wavepe.encoding("rope:fraction=.25+alibi").parts
    (RoPE(fraction=0.25), ALiBi())
    >>> str(wavepe.encoding("rope@::2+wavelet@1::2").at(3, layers=4))
    'wavelet'
    """
    described = spec if isinstance(spec, Encoding) else _read(spec)
    if not options:
        return described
    if isinstance(described, Combination):
        raise ValueError(
            f"options ({', '.join(options)}) do not go with the parts of '{described}': write them "
            "into the part that has them"
        )
    spec_options = described.options()
    complete = build(described.name, {**spec_options, **options})
    for key in spec_options:
        before, after = getattr(described, key), getattr(complete, key)
        if before != after:
            raise ValueError(
                f"{described.name}: {key} is given twice, as {before!r} and as {after!r}; "
                "dataclasses.replace(encoding, ...) changes an option"
            )
    return complete


def _read(spec: Any) -> Encoding:
    if isinstance(spec, Mapping):
        return read_dict(spec)
    if not isinstance(spec, str):
        raise TypeError(f"encoding needs a spec, a dict or an Encoding, got {spec!r}")
    parts, texts = [], split_spec(spec)
    for text, place in texts:
        try:
            part = build(*read_spec(text))
        except (TypeError, ValueError) as error:
            if isinstance(error, ValueError) and len(texts) == 1:
                raise
            # in a text every value is text: call it a wrong value
            raise ValueError(f"spec {spec!r}: {error}") from error
        parts.append((part, None if place is None else check_layers(place)))
    return combine(parts)
