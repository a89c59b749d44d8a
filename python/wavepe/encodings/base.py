"""What every encoding is, and the register of those known by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks, _wavelet_registered
from .options import checked
from .spec import Value, is_word, write_spec

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1

# Where an encoding enters a model, and the method that serves it there.
ENTRY_METHODS = {
    "absolute": "absolute",
    "rotary": "rope_table",
    "relative": "table",
    "slope": "slopes",
    "bias": "bias",
    "none": None,
}

E = TypeVar("E", bound="Encoding")
_known: dict[str, type[Encoding]] = {}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A position encoding: a name, an entry point into the model, and checked options.

    Objects are immutable, hashable and pickle-able; equal options make equal objects.
    `dataclasses.replace(encoding, option=value)` gives a changed copy. The methods of other entry
    points raise NotImplementedError.

    Attributes
    ----------
    name : str
        The name in specs (of the class).
    entry : str
        "absolute" (added to the token embedding), "rotary" (rotates q and k), "relative" (q.p is
        added to q.k), "slope" (a slope times the distance is taken from the score), "bias" (a
        number for each distance is added to the score) or "none" (of the class).
    learned : bool
        Whether a model trains parameters of it: `parameters` names them, and `learned_table` or
        `learned_bias` reads them. An option or a property may tell.
    inference_only : tuple of str
        Options that change a trained model's evaluation only (of the class).
    """

    name: ClassVar[str]
    entry: ClassVar[str]
    inference_only: ClassVar[tuple[str, ...]] = ()
    learned = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            label = f"{self.name} {field.name}"
            value = checked(label, getattr(self, field.name), field)
            object.__setattr__(self, field.name, value)

    def __str__(self) -> str:
        return write_spec(self.name, self.options())

    def options(self) -> dict[str, Value]:
        """Return the options that differ from their defaults, in the order of the class."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        }

    def to_dict(self) -> dict[str, Any]:
        """Return version, name and the options that differ from their defaults, for JSON."""
        options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.options().items()
        }
        return {"version": VERSION, "name": self.name, **options}

    @classmethod
    def from_dict(cls: type[E], data: Mapping[str, Any]) -> E:
        """Read what `to_dict` wrote; one written by hand may leave the version out.

        Raises
        ------
        ValueError
            Unknown version, name or option, wrong value, or another encoding than `cls`.
        TypeError
            Not a mapping, or an option of a wrong type.
        """
        name, options = read_dict(data)
        found = build(name, options)
        if not isinstance(found, cls):
            raise ValueError(f"{cls.__name__}.from_dict needs a {cls.name}, got {name!r}")
        return found

    def trained_as(self: E) -> E:
        """Return the encoding that training sees: inference-only options at their defaults.

        Encodings with equal `trained_as()` can share one checkpoint.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{key: defaults[key] for key in self.inference_only})

    def absolute(
        self,
        positions: ArrayLike,
        dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:
        """Return the vectors to add to the token embeddings, float64 (..., dim).

        Parameters
        ----------
        positions : array (...) or scalar of integers
            From 0.
        dim : int
            Size of the token embedding.
        length : int, optional
            Of the current sequence, by default the largest position + 1.
        trained_length : int, optional
            Of the sequences in training. An encoding may read neither length.

        Raises
        ------
        ValueError
            A position or a size that the encoding does not have.
        TypeError
            Positions of a wrong type.
        """
        self._raise_other_entry("absolute")

    def rope_table(
        self,
        positions: ArrayLike,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of the pairs, as inference uses them, float32 (..., pairs).

        `length`, by default the largest position + 1, and `trained_length` serve encodings that
        follow the length. A cached decoding step passes the length of the whole sequence.
        """
        self._raise_other_entry("rope_table")

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        """Return the table p, its first delta, and what lies beyond it ("zero" or "edge").

        p is float32 (w, head_dim) with a row for each delta from `first` on: 0..length-1, or
        1-length..length-1 where `causal` is False. It may end before. That of a learned encoding
        has the initial values.
        """
        self._raise_other_entry("table")

    def slopes(self, heads: int) -> np.ndarray:
        """Return the slope of each head, float64 (heads,); the score loses slope * abs(delta)."""
        self._raise_other_entry("slopes")

    def bias(self, length: int, heads: int, *, causal: bool = True) -> tuple[np.ndarray, int, str]:
        """Return the bias, its first delta, and what lies beyond it ("zero" or "edge").

        bias is float64 (heads, w) with a number for each delta, as `table` has a row. It is added
        to the score and not scaled.
        """
        self._raise_other_entry("bias")

    def parameters(self, head_dim: int, heads: int) -> dict[str, np.ndarray]:
        """Return what a learned encoding learns: names and initial values, float64.

        The front end owns the tensors. NotImplementedError where nothing is learned.
        """
        self._raise_learns_nothing("parameters")

    def learned_table(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        """Return `table` for trained parameters, differentiable in them (needs torch).

        Parameters
        ----------
        length : int
            The sequence length.
        parameters : mapping
            Tensors as `parameters` begins them.
        causal : bool
            Rows for delta = 0..length-1; otherwise for 1-length..length-1.

        Returns
        -------
        p : Tensor (w, head_dim), or (heads, w, head_dim) with a table for each head
            Of the parameters' dtype.
        first : int
        beyond : str
        """
        self._raise_learns_nothing("learned_table")

    def learned_bias(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        """Return `bias` for trained parameters, a Tensor (heads, w) of their dtype.

        Takes what `learned_table` takes, and is differentiable in the parameters (needs torch).
        """
        self._raise_learns_nothing("learned_bias")

    def query_biases(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return u and v (heads, head_dim) of a score (q + u).k + (q + v).p; None without."""
        return None

    def _raise_other_entry(self, method: str) -> NoReturn:
        own = ENTRY_METHODS[self.entry]
        raise NotImplementedError(
            f"{method}() does not apply to the encoding {self.name!r}: its entry point is "
            f"{self.entry!r}, served by {own + '()' if own else 'no method'}"
        )

    def _raise_learns_nothing(self, method: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() does not apply to the encoding '{self}': it learns nothing"
        )


def register_encoding(cls: type[E]) -> type[E]:
    """Make a class of your own known by its `name`; usable as a decorator.

    Parameters
    ----------
    cls : type
        A frozen dataclass derived from `Encoding` (or from a known encoding) with `name`, `entry`
        and the method of that entry. A rotary one derives from `RoPE` and overrides `frequencies`.
        Its fields are its options; each needs a default, whose type is checked (`option` declares
        another check). Defining the same class again replaces it.

    Raises
    ------
    TypeError
        Where the class is not of that form.
    ValueError
        Where the name is taken, or no word (it holds no blank, ``: , = +``).

    Examples
    --------
    >>> import dataclasses
    >>> import numpy as np
    >>> import wavepe
    >>> from wavepe.encodings import Encoding
    >>> @wavepe.register_encoding
    ... @dataclasses.dataclass(frozen=True)
    ... class Even(Encoding):
    ...     name = "even"
    ...     entry = "slope"
    ...     slope: float = 0.1
    ...     def slopes(self, heads):
    ...         return np.full(heads, self.slope)
    >>> wavepe.encoding("even:slope=0.5").slopes(2)
    array([0.5, 0.5])
    """
    _check_class(cls)
    old = _known.get(cls.name)
    if old and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"encoding name {cls.name!r} is taken by {old.__module__}; choose another")
    _known[cls.name] = cls
    _wavelet_registered.note_registration()
    return cls


def known_encodings() -> tuple[str, ...]:
    """Return the names that `encoding` knows, in the order of their registration."""
    return tuple(_known)


def read_dict(data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of a dict as `Encoding.to_dict` writes it."""
    if not isinstance(data, Mapping):
        raise TypeError(f"an encoding's dict must be a mapping, got {type(data).__name__}")
    options = dict(data)
    version = options.pop("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"an encoding's dict has version {VERSION} here, got {version!r}")
    if "name" not in options:
        raise ValueError(f"an encoding's dict needs a 'name', got the keys {list(data)}")
    return options.pop("name"), options


def build(name: str, options: Mapping[str, Any]) -> Encoding:
    """Return the encoding of that name with these options."""
    cls = _known.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(
            f"unknown encoding {name!r}{_meant(name, _known)}; known: {', '.join(_known)}"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in known:
            listed = f"known: {', '.join(known)}" if known else "it has none"
            raise ValueError(
                f"unknown option {key!r} of encoding {name!r}{_meant(key, known)}; {listed}"
            )
    return cls(**options)


def _meant(given: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def sequence_length(encoding: Encoding, positions: ArrayLike, length: int | None) -> int:
    """Return `length`, checked; where it is None the largest of `positions` + 1."""
    positions = _checks.real_array(f"{encoding.name} positions", positions)
    if length is not None:
        return _checks.integer(f"{encoding.name} length", length, 1)
    if positions.size == 0:
        return 1
    largest = _checks.finite(f"{encoding.name} positions: the largest", positions.max())
    return max(int(largest) + 1, 1)


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register_encoding needs a class derived from Encoding, got {cls!r}")
    if "__dataclass_params__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} needs the decorator @dataclasses.dataclass(frozen=True)")
    name, entry = getattr(cls, "name", None), getattr(cls, "entry", None)
    if not is_word(name):
        raise ValueError(f"{cls.__name__}.name must hold no blank and no : , = +; got {name!r}")
    if entry not in ENTRY_METHODS:
        entries = ", ".join(ENTRY_METHODS)
        raise ValueError(f"{cls.__name__}.entry must be one of {entries}; got {entry!r}")
    method = ENTRY_METHODS[entry]
    if method and getattr(cls, method) is getattr(Encoding, method):
        raise TypeError(f"{cls.__name__} has the entry point {entry!r} and needs {method}()")
    if entry == "rotary" and not (hasattr(cls, "frequencies") and hasattr(cls, "interleaved")):
        raise TypeError(f"{cls.__name__} is rotary: derive it from RoPE, override frequencies()")
    fields = dataclasses.fields(cls)
    if entry in ("relative", "bias") and not any(field.name == "learned" for field in fields):
        needed = ("parameters", "learned_bias" if entry == "bias" else "learned_table")
        own = [key for key in needed if getattr(cls, key) is not getattr(Encoding, key)]
        if own and cls.learned is False:
            raise TypeError(f"{cls.__name__} has {own[0]}() and needs learned = True")
        if cls.learned is True and len(own) < len(needed):
            raise TypeError(f"{cls.__name__} is learned and needs {needed[0]}() and {needed[1]}()")
    for field in fields:
        if field.default is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}: option {field.name} needs a default value")
        taken = hasattr(Encoding, field.name) and field.name != "learned"
        if taken or field.name in ("name", "entry", "version", "spec"):
            raise TypeError(f"{cls.__name__}: an option may not be called {field.name}")
    cls()  # the defaults must pass their own checks
