"""The base class of all encodings, and the register of their names."""

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

# The entry points, where an encoding enters a model, and the method for each.
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
    """Hold a position encoding: its name, its entry point into a model, and its checked options.

    Objects are immutable and hashable, and they can be pickled. Two encodings with equal options
    are equal. `dataclasses.replace(encoding, option=value)` returns a changed copy.

    An encoding has the method of its entry point: `absolute`, `rope_table`, `table`, `slopes` or
    `bias`. The methods of other entry points raise NotImplementedError.

    Attributes
    ----------
    name : str
        The name in specs (a class attribute).
    entry : str
        Where the encoding enters a model (a class attribute). "absolute": vectors are added to
        the token embeddings. "rotary": q and k are rotated. "relative": q.p is added to q.k, with
        a row of p for each distance. "slope": a slope times the distance is subtracted from the
        score. "bias": a number for each distance is added to the score. "none": nothing happens.
    learned : bool
        Whether a model trains parameters of the encoding. `parameters` returns their names and
        initial values; `learned_table` or `learned_bias` uses them. A subclass may make it an
        option or a property.
    inference_only : tuple of str
        Options that change the evaluation of a trained model and not its training (a class
        attribute).
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
        """Return the options that differ from their defaults.

        Returns
        -------
        options : dict of str to value
            In the order of the class. Lists are tuples.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the encoding as a dict for JSON, which `from_dict` reads.

        Returns
        -------
        data : dict
            "version", "name" and the options that differ from their defaults.
        """
        options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.options().items()
        }
        return {"version": VERSION, "name": self.name, **options}

    @classmethod
    def from_dict(cls: type[E], data: Mapping[str, Any]) -> E:
        """Return the encoding that `to_dict` wrote.

        Parameters
        ----------
        data : mapping
            "name" and options. "version" may be missing.

        Returns
        -------
        encoding : Encoding

        Raises
        ------
        ValueError
            If the version, the name or an option is unknown, if a value is wrong, or if the dict
            holds another encoding than this class.
        TypeError
            If `data` is not a mapping, or an option has a wrong type.
        """
        name, options = read_dict(data)
        found = build(name, options)
        if not isinstance(found, cls):
            raise ValueError(f"{cls.__name__}.from_dict needs a {cls.name}, got {name!r}")
        return found

    def trained_as(self: E) -> E:
        """Return the encoding as training sees it, with inference-only options at their defaults.

        Two encodings with equal `trained_as()` can use one checkpoint.

        Returns
        -------
        encoding : Encoding
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
        """Return the vectors to add to the token embeddings.

        Parameters
        ----------
        positions : integer array (...) or scalar
            Positions of tokens, counted from 0.
        dim : int
            Size of the token embeddings.
        length : int, optional
            Length of the current sequence; None is the largest position + 1. Many encodings do
            not depend on it.
        trained_length : int, optional
            Length of the sequences in training. Many encodings do not depend on it.

        Returns
        -------
        vectors : array (..., dim), float64

        Raises
        ------
        NotImplementedError
            If the entry point is not "absolute".
        ValueError
            If the encoding has no vector for a position, or does not fit `dim`.
        TypeError
            If an argument has a wrong type.
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
        """Return the cosines and sines that rotate q and k at inference.

        Parameters
        ----------
        positions : integer array (...) or scalar
            Positions of tokens.
        head_dim : int
            Head size.
        length : int, optional
            Length of the whole current sequence; None is the largest position + 1. It matters
            only for encodings whose frequencies follow the length. A decoding step with a cache
            must give it.
        trained_length : int, optional
            Length of the sequences in training, for the encodings that need it.

        Returns
        -------
        cos, sin : arrays (..., pairs), float32

        Raises
        ------
        NotImplementedError
            If the entry point is not "rotary".
        ValueError
            If a needed length is missing, or a value is out of range.
        TypeError
            If an argument has a wrong type.
        """
        self._raise_other_entry("rope_table")

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        """Return the table p of a relative encoding, a row for each distance.

        Parameters
        ----------
        length : int
            Length of the sequence.
        head_dim : int
            Head size.
        causal : bool
            True needs the distances delta = 0..length-1 only. False also needs the negative ones,
            from 1-length.

        Returns
        -------
        p : array (w, head_dim), float32
            The rows of delta = first..first+w-1. There may be fewer rows than distances. A learned
            encoding returns its initial values.
        first : int
            The delta of the first row.
        beyond : str
            What stands for rows outside the table: "zero" or "edge" (the nearest row).

        Raises
        ------
        NotImplementedError
            If the entry point is not "relative".
        ValueError
            If the encoding does not fit `head_dim`, or `length` is below 1.
        TypeError
            If an argument has a wrong type.
        """
        self._raise_other_entry("table")

    def slopes(self, heads: int) -> np.ndarray:
        """Return the slope of each head; the score loses slope * abs(delta).

        Parameters
        ----------
        heads : int
            Number of query heads.

        Returns
        -------
        slopes : array (heads,), float64

        Raises
        ------
        NotImplementedError
            If the entry point is not "slope".
        ValueError
            If `heads` is below 1.
        TypeError
            If `heads` is not an integer.
        """
        self._raise_other_entry("slopes")

    def bias(self, length: int, heads: int, *, causal: bool = True) -> tuple[np.ndarray, int, str]:
        """Return the bias of each head and distance; it is added to the score and not scaled.

        Parameters
        ----------
        length : int
            Length of the sequence.
        heads : int
            Number of query heads.
        causal : bool
            As in `table`.

        Returns
        -------
        bias : array (heads, w), float64
            The numbers of delta = first..first+w-1. A learned encoding returns its initial values.
        first : int
            The delta of the first number.
        beyond : str
            What stands for numbers outside the bias: "zero" or "edge" (the nearest number).

        Raises
        ------
        NotImplementedError
            If the entry point is not "bias".
        ValueError
            If `length` or `heads` is below 1.
        TypeError
            If an argument has a wrong type.
        """
        self._raise_other_entry("bias")

    def parameters(self, head_dim: int, heads: int) -> dict[str, np.ndarray]:
        """Return the names and initial values of what a learned encoding learns.

        The front end makes tensors of them, owns them and trains them.

        Parameters
        ----------
        head_dim : int
            Head size.
        heads : int
            Number of query heads.

        Returns
        -------
        parameters : dict of str to array, float64

        Raises
        ------
        NotImplementedError
            If the encoding learns nothing.
        """
        self._raise_not_learned("parameters", "nothing")

    def learned_table(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        """Return the table of a learned encoding for its parameters. It needs torch.

        Parameters
        ----------
        length : int
            Length of the sequence.
        parameters : mapping of str to Tensor
            Tensors with the names and shapes of `parameters`.
        causal : bool
            As in `table`.

        Returns
        -------
        p : Tensor (w, head_dim), or (heads, w, head_dim) with a table for each head
            In the dtype of the parameters, and differentiable in them.
        first : int
            As in `table`.
        beyond : str
            As in `table`.

        Raises
        ------
        NotImplementedError
            If the encoding learns no table.
        """
        self._raise_not_learned("learned_table", "no table")

    def learned_bias(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        """Return the bias of a learned encoding for its parameters. It needs torch.

        Parameters
        ----------
        length, parameters, causal
            As in `learned_table`.

        Returns
        -------
        bias : Tensor (heads, w)
            In the dtype of the parameters, and differentiable in them.
        first : int
            As in `bias`.
        beyond : str
            As in `bias`.

        Raises
        ------
        NotImplementedError
            If the encoding learns no bias.
        """
        self._raise_not_learned("learned_bias", "no bias")

    def query_biases(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return what a learned encoding adds to the queries: score = (q + u).k + (q + v).p.

        Parameters
        ----------
        parameters : mapping of str to Tensor
            Tensors with the names and shapes of `parameters`.

        Returns
        -------
        biases : tuple of Tensor or None
            u and v, each (heads, head_dim). None if the encoding adds nothing to the queries.
        """
        return None

    def _raise_other_entry(self, method: str) -> NoReturn:
        own = ENTRY_METHODS[self.entry]
        raise NotImplementedError(
            f"{method}() does not apply to the encoding {self.name!r}: its entry point is "
            f"{self.entry!r}, served by {own + '()' if own else 'no method'}"
        )

    def _raise_not_learned(self, method: str, learned: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() does not apply to the encoding '{self}': it learns {learned}"
        )


def register_encoding(cls: type[E]) -> type[E]:
    """Register your own encoding class under its `name`; it can be used as a decorator.

    Then `wavepe.encoding`, the modules, Hugging Face models, fairseq and ``wavepe compare`` accept
    the name.

    Parameters
    ----------
    cls : type
        A frozen dataclass derived from `Encoding` or from a known encoding. It has `name`, `entry`
        and the method of that entry point. A rotary class derives from `RoPE` and overrides
        `frequencies`. The fields of the class are its options. Each needs a default, and values
        must have its type; `option` declares another check. A class that is defined a second time
        replaces the first.

    Returns
    -------
    cls : type
        The same class.

    Raises
    ------
    TypeError
        If the class does not have this form.
    ValueError
        If another class has the name, or if the name holds a blank or one of ``: , = +``.

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
    """Return the names that `encoding` knows, in the order of their registration.

    Returns
    -------
    names : tuple of str

    Examples
    --------
    >>> from wavepe.encodings import known_encodings
    >>> "wavelet" in known_encodings()
    True
    """
    return tuple(_known)


def read_dict(data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of a dict as `Encoding.to_dict` writes it."""
    if not isinstance(data, Mapping):
        raise TypeError(f"the dict of an encoding must be a mapping, got {type(data).__name__}")
    options = dict(data)
    version = options.pop("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"the dict of an encoding needs version {VERSION}, got {version!r}: a newer wavepe may "
            "have written it"
        )
    if "name" not in options:
        raise ValueError(f"the dict of an encoding needs a 'name', got the keys {list(data)}")
    return options.pop("name"), options


def build(name: str, options: Mapping[str, Any]) -> Encoding:
    """Return the encoding of that name with these options."""
    cls = _known.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(
            f"unknown encoding {name!r}{_suggestion(name, _known)}; known: {', '.join(_known)}"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in known:
            listed = f"known: {', '.join(known)}" if known else "it has none"
            raise ValueError(
                f"unknown option {key!r} of encoding {name!r}{_suggestion(key, known)}; {listed}"
            )
    return cls(**options)


def _suggestion(given: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def sequence_length(encoding: Encoding, positions: ArrayLike, length: int | None) -> int:
    """Return the checked `length`; None gives the largest of `positions` + 1."""
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
        present = [key for key in needed if getattr(cls, key) is not getattr(Encoding, key)]
        if present and cls.learned is False:
            raise TypeError(f"{cls.__name__} has {present[0]}() and needs learned = True")
        if cls.learned is True and len(present) < len(needed):
            raise TypeError(f"{cls.__name__} is learned and needs {needed[0]}() and {needed[1]}()")
    for field in fields:
        if field.default is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}: option {field.name} needs a default value")
        taken = hasattr(Encoding, field.name) and field.name != "learned"
        if taken or field.name in ("name", "entry", "version", "spec"):
            raise TypeError(f"{cls.__name__}: an option may not be called {field.name}")
    cls()  # raises if a default does not pass its check
