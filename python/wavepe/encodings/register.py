"""The register of encodings, for those of wavepe and those of users."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays import wavelet_registered
from ..common.spec import is_word
from .base import Encoding, known
from .methods import FROM_INPUT, LEARNED, TERMS

if TYPE_CHECKING:  # checkers know the options of each class by it
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        return lambda function: function


E = TypeVar("E", bound=Encoding)

_METHODS = ("absolute", "rope_table", *TERMS, "temperature", "score_vectors", "window")
_LEARNED = tuple(LEARNED.values())


@dataclass_transform(frozen_default=True)
def register_encoding(cls: type[E]) -> type[E]:
    """Register your own encoding class under its `name`; it can be used as a decorator.

    Then `wavepe.encoding`, the modules, Hugging Face models, fairseq and ``wavepe compare`` accept
    the name.

    Parameters
    ----------
    cls : type
        A class derived from `Encoding` or from a known encoding. It has a `name` and the methods
        that say what it does: one or several of `absolute`, `table`, `slopes`, `bias`,
        `temperature`, `score_vectors`, `learned_table`, `learned_bias`, `learned_query`,
        `learned_sinks`, `input_query`, `input_decay` and `input_sinks`. A rotary class derives from
        `RoPE` and overrides `frequencies`. The annotated attributes of the class are its options.
        Each needs a default, and values must have its type; `option` declares another check. The
        class becomes a frozen dataclass. A class that is defined a second time replaces the first.

    Returns
    -------
    cls : type
        The same class.

    Raises
    ------
    TypeError
        If the class does not have this form.
    ValueError
        If another class has the name, or if the name holds a blank or one of ``: , = + @``.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> from wavepe.encodings import Encoding
    >>> @wavepe.register_encoding
    ... class Even(Encoding):
    ...     name = "even"
    ...     slope: float = 0.1
    ...     def slopes(self, heads):
    ...         return np.full(heads, self.slope)
    >>> wavepe.encoding("even:slope=0.5").slopes(2)
    array([0.5, 0.5])
    """
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register_encoding needs a class derived from Encoding, got {cls!r}")
    if "__dataclass_params__" not in cls.__dict__:
        cls = dataclasses.dataclass(frozen=True)(cls)
    _check_class(cls)
    with wavelet_registered.registering:
        old = known.get(cls.name, cls)
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"encoding name {cls.name!r} is taken by {old.__module__}; choose another"
            )
        known[cls.name] = cls
        wavelet_registered.note_registration()
    return cls


def known_encodings() -> tuple[str, ...]:
    """Return the names that `encoding` knows, in the order of their registration."""
    return tuple(known.copy())  # another thread may register one meanwhile


def _check_class(cls: Any) -> None:
    name = getattr(cls, "name", None)
    if not is_word(name):
        raise ValueError(f"{cls.__name__}.name must hold no blank and no : , = + @; got {name!r}")

    def has(method: str) -> bool:
        return getattr(cls, method) is not getattr(Encoding, method)

    learned = [method for method in _LEARNED if has(method)]
    if not learned and not any(map(has, _METHODS)):
        listed = ", ".join(dict.fromkeys(_METHODS + _LEARNED))
        raise TypeError(f"{cls.__name__} needs one of the methods {listed}")
    if has("rope_table") and not (hasattr(cls, "frequencies") and hasattr(cls, "interleaved")):
        raise TypeError(f"{cls.__name__} is rotary: derive it from RoPE, override frequencies()")
    fields = dataclasses.fields(cls)
    asked = cls.learned is not False or any(field.name == "learned" for field in fields)
    using = [key for key in (*_LEARNED, "parameters") if has(key) and key not in _METHODS]
    if using and not (asked or has("learns")):
        raise TypeError(f"{cls.__name__} has {using[0]}() and needs learned = True")
    if asked and not (learned and has("parameters")):
        raise TypeError(
            f"{cls.__name__} is learned and needs parameters() and one of {', '.join(_LEARNED)}"
        )
    reads = [method for method in FROM_INPUT if has(method)]
    if reads and cls.per_layer == ():
        raise TypeError(
            f"{cls.__name__} has {reads[0]}(), which each layer calls: name its parameters in "
            "per_layer"
        )
    if has("input_query") and not (has("table") or has("learned_table")):
        raise TypeError(f"{cls.__name__} has input_query() and needs table() or learned_table()")
    for field in fields:
        if field.default is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}: option {field.name} needs a default value")
        taken = hasattr(Encoding, field.name) and field.name != "learned"
        if taken or field.name in ("name", "version", "spec"):
            raise TypeError(f"{cls.__name__}: an option may not be called {field.name}")
    if not isinstance(cls.per_layer, tuple | property):
        raise TypeError(f"{cls.__name__}.per_layer must be a tuple of names, got {cls.per_layer!r}")
    cls()  # raises if a default does not pass its check
