"""Position encodings: one object for every front end.

`wavepe.encoding(spec)` reads a spec ("wavelet:scales=6"), a dict or an encoding, and returns an
immutable object. Its methods return the arrays that a model needs. Each encoding has a module of
its own here, the only place that declares its options and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .alibi import ALiBi
from .base import Encoding, build, known_encodings, read_dict, register_encoding
from .binary import Binary
from .integer import Integer
from .kerple import Kerple
from .none import NoPE
from .normalised import Normalised
from .options import option
from .rope import RoPE
from .sandwich import Sandwich
from .shaw import Shaw
from .sinusoidal import Sinusoidal
from .spec import read_spec
from .t5 import T5
from .transformer_xl import TransformerXL
from .wavelet import Wavelet

__all__ = [
    "T5",
    "ALiBi",
    "Binary",
    "Encoding",
    "Integer",
    "Kerple",
    "NoPE",
    "Normalised",
    "RoPE",
    "Sandwich",
    "Shaw",
    "Sinusoidal",
    "TransformerXL",
    "Wavelet",
    "encoding",
    "known_encodings",
    "option",
    "register_encoding",
]


def encoding(spec: str | Mapping[str, Any] | Encoding, **options: Any) -> Encoding:
    """Return the position encoding that `spec` describes.

    Parameters
    ----------
    spec : str, mapping or Encoding
        One of: a name; a text "name:key=value,key=value"; a dict as `Encoding.to_dict` returns it;
        an encoding. In a text, a value is an integer, a number, true, false, a word, or a list
        such as ``1+2+8``.
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
        wrong, if the spec is malformed, or if `spec` and `options` give an option two values.
    TypeError
        If `spec` or an option has a wrong type.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.encoding("rope:theta=128")
    RoPE(theta=128.0)
    >>> str(wavepe.encoding("wavelet", scales=[1, 2, 8], kind="haar"))
    'wavelet:kind=haar,scales=1+2+8'
    """
    if isinstance(spec, str):
        name, given = read_spec(spec)
        try:
            first = build(name, given)
        except TypeError as error:  # in a text every value is text: call it a wrong value
            raise ValueError(f"spec {spec!r}: {error}") from error
    elif isinstance(spec, Encoding):
        name, given, first = spec.name, spec.options(), spec
    elif isinstance(spec, Mapping):
        name, given = read_dict(spec)
        first = build(name, given)
    else:
        raise TypeError(f"encoding needs a spec, a dict or an Encoding, got {spec!r}")
    if not options:
        return first
    both = build(name, {**given, **options})
    for key in given:
        before, after = getattr(first, key), getattr(both, key)
        if before != after:
            raise ValueError(
                f"{name}: {key} is given twice, as {before!r} and as {after!r}; "
                "dataclasses.replace(encoding, ...) changes an option"
            )
    return both
