"""The base class of all encodings, combinations of them, and the classes by their names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import mul
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.relative_bias import Bias, Table, rows_at
from ..arrays.rope_frequencies import ROPE_TYPES
from ..common import checks
from ..common.labels import suggestion
from ..common.spec import Value, write_spec
from .layers import check_layers, layers_of
from .methods import TERMS, Arrays, Methods, initial_parameters, once
from .options import checked

VERSION = 1

# A plus joins parts before a letter only, and torch takes no dot in the name of a module.
_PART = re.compile(r"[^\W\d_][^.]*")

E = TypeVar("E", bound="Encoding")
known: dict[str, type[Encoding]] = {}


@dataclasses.dataclass(frozen=True)
class Encoding(Methods):
    """Hold a position encoding: its name and its checked options.

    Objects are immutable and hashable, and they can be pickled. Two encodings with equal options
    are equal. `dataclasses.replace(encoding, option=value)` returns a changed copy.

    The methods say what the encoding does: `absolute` adds vectors to token embeddings,
    `rope_table` rotates q and k, and `table`, `slopes` and `bias` add a term to the score. A method
    that does not apply raises NotImplementedError. Wrong values and sizes, of options as well,
    raise ValueError, and wrong types TypeError.

    Attributes
    ----------
    name : str
        The name in specs (a class attribute).
    learned : bool
        True in a class that a model trains: `parameters` returns names and initial values, and
        `learned_table`, `learned_bias` and `learned_query` use them. It may be an option or a
        property. `learns` says what is trained.
    per_layer : tuple of str
        The parameters that each layer has for itself. All layers share the others.
    inference_only : tuple of str
        Options that change the evaluation of a trained model and not its training (a class
        attribute).
    """

    name: ClassVar[str]
    inference_only: ClassVar[tuple[str, ...]] = ()
    per_layer: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            label = f"{self.name} {field.name}"
            value = checked(label, getattr(self, field.name), field)
            object.__setattr__(self, field.name, value)

    def __str__(self) -> str:
        return write_spec(self.name, self.options())

    @property
    def parts_with_layers(self) -> tuple[tuple[Encoding, str | None], ...]:
        """Each of `parts` with its item of `layers`."""
        return ((self, None),)

    @once
    def parts(self) -> tuple[Encoding, ...]:
        """The encodings that a combination consists of; any other encoding is its only part."""
        return tuple(part for part, _ in self.parts_with_layers)

    @once
    def rotary(self) -> Encoding | None:
        """The part that rotates q and k, or None."""
        return next((part for part in self.parts if part.rotates), None)

    @once
    def layers(self) -> tuple[str | None, ...]:
        """The layers of each part, as the spec names them after @; None stands for all layers."""
        return tuple(place for _, place in self.parts_with_layers)

    def with_parts(self, change: Callable[[Encoding], Encoding]) -> Encoding:
        """Return the encoding with change(part) in place of each part."""
        return combine([(change(part), place) for part, place in self.parts_with_layers])

    def at(self, layer: int, layers: int) -> Encoding:
        """Return the parts of one layer, which is counted from 0; "none" if it has no part."""
        layers = checks.integer("layers", layers, 1)
        if checks.integer("layer", layer, 0) >= layers:
            raise ValueError(f"layer must be below layers={layers}, got {layer}")
        acting = [
            (part, None)
            for part, place in self.parts_with_layers
            if place is None or layer in layers_of(place, layers)
        ]
        return combine(acting) if acting else known["none"]()

    def options(self) -> dict[str, Value]:
        """Return the options that differ from their defaults, in their order. Lists are tuples."""
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return {field.name: value for field, value in values if value != field.default}

    def to_dict(self) -> dict[str, Any]:
        """Return the encoding as a dict for JSON, which `from_dict` reads.

        It has "version", "name" and the options that differ from their defaults. That of a
        combination has "version" and "parts": such a dict for each part, with its "layers" if it
        has some.
        """
        options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.options().items()
        }
        return {"version": VERSION, "name": self.name, **options}

    @classmethod
    def from_dict(cls: type[E], data: Mapping[str, Any]) -> E:
        """Return the encoding that `to_dict` wrote; "version" may be missing.

        An unknown version, name or option, a wrong value, or the dict of another encoding than this
        class raises ValueError. Another type of `data` or of an option raises TypeError.
        """
        encoding = read_dict(data)
        if not isinstance(encoding, cls):
            raise ValueError(f"{cls.__name__}.from_dict needs a {cls.name}, got '{encoding}'")
        return encoding

    def trained_as(self: E) -> E:
        """Return the encoding as training sees it, with inference-only options at their defaults.

        Two encodings with equal `trained_as()` can use one checkpoint.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{key: defaults[key] for key in self.inference_only})


def _any_part(ability: str) -> Any:
    """Return a property of a combination: whether any part has the ability."""
    return once(lambda combination: any(getattr(part, ability) for part in combination.parts))


@dataclasses.dataclass(frozen=True, repr=False)
class Combination(Encoding):
    """Several encodings in one model, or encodings of some layers only: "rope+alibi", "rope@::2".

    `combine` makes one. Vectors are summed, at most one part rotates, and terms of the score are
    summed. The methods of a combination with layers raise; those of `at` do not.
    """

    name = "combination"

    _parts_with_layers: tuple[tuple[Encoding, str | None], ...]

    def __post_init__(self) -> None:
        for index, (part, place) in enumerate(self.parts_with_layers):
            if not _PART.fullmatch(part.name):
                raise ValueError(
                    "the name of a part must begin with a letter and hold no dot, got "
                    f"{part.name!r}"
                )
            if place is not None and part.adds:
                raise ValueError(
                    f"'{part}' is an absolute encoding: it is added to the token embeddings before "
                    f"the first layer, so it cannot differ by layer; got @{place}"
                )
            for other, elsewhere in self.parts_with_layers[:index]:
                if place is None or elsewhere is None:
                    _check_together(other, part)
                elif part.name == other.name and part.learns and other.learns:
                    raise ValueError(
                        f"'{other}' and '{part}' are learned parts of one name, so their "
                        "parameters would have the same names: write one part with all its layers"
                    )

    @property
    def parts_with_layers(self) -> tuple[tuple[Encoding, str | None], ...]:
        return self._parts_with_layers

    def __str__(self) -> str:
        return "+".join(
            f"{part}@{place}" if place else str(part) for part, place in self.parts_with_layers
        )

    def __repr__(self) -> str:
        return f"encoding({str(self)!r})"

    def options(self) -> dict[str, Value]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        parts = []
        for part, place in self.parts_with_layers:
            data = part.to_dict()
            del data["version"]
            parts.append(data | ({"layers": place} if place else {}))
        return {"version": VERSION, "parts": parts}

    def trained_as(self) -> Encoding:  # type: ignore[override]
        return combine([(part.trained_as(), place) for part, place in self.parts_with_layers])

    adds, rotates = _any_part("adds"), _any_part("rotates")
    has_temperature, has_vectors = _any_part("has_temperature"), _any_part("has_vectors")

    @once
    def window(self) -> int | None:
        windows = [part.window for part in self.parts if part.window is not None]
        return min(windows, default=None)

    @once
    def learned(self) -> bool:  # type: ignore[override]
        return bool(self.learns)

    @once
    def learns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for part in self.parts for key in part.learns))

    @once
    def terms(self) -> tuple[str, ...]:
        return tuple(term for term in TERMS if any(term in part.terms for part in self.parts))

    @property
    def per_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"{part.name}.{name}" for part in self.parts for name in part.per_layer)

    def absolute(self, positions: ArrayLike, dim: int, **lengths: Any) -> np.ndarray:
        vectors = self._of_parts("absolute", positions, dim, **lengths)
        return sum(vectors[1:], start=vectors[0])

    def rope_table(self, positions: ArrayLike, head_dim: int, **lengths: Any) -> Any:
        (cos_sin,) = self._of_parts("rope_table", positions, head_dim, **lengths)
        return cos_sin

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        tables = self._of_parts("table", length, head_dim, causal=causal)
        sizes = [p.shape[-1] for p, _, _ in tables]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the tables of '{self}' have {' and '.join(map(str, sizes))} columns, because "
                "other queries read them: call table() of the parts"
            )
        return Table(*_summed(tables, length, causal, axis=-2))

    def slopes(self, heads: int) -> np.ndarray:
        slopes = self._of_parts("slopes", heads)
        return sum(slopes[1:], start=slopes[0])

    def bias(self, length: int, heads: int, *, causal: bool = True) -> Bias:
        biases = self._of_parts("bias", length, heads, causal=causal)
        return Bias(*_summed(biases, length, causal, axis=-1))

    def temperature(self, positions: ArrayLike) -> np.ndarray:
        return reduce(mul, self._of_parts("temperature", positions))

    def parameters(self, head_dim: int, heads: int, dim: int | None = None) -> Arrays:
        if not self.learned:
            return super().parameters(head_dim, heads)
        return {
            f"{part.name}.{name}": value
            for part in self.parts
            if part.learns
            for name, value in initial_parameters(part, head_dim, heads, dim).items()
        }

    def _learns_not(self, method: str, learned: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() takes the parameters of one part: call it on those of '{self}'.parts that "
            "learn"
        )

    def _of_parts(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """Return the results of the parts to which a method applies."""
        abilities = {"absolute": "adds", "rope_table": "rotates", "temperature": "has_temperature"}
        acting = [
            (part, place)
            for part, place in self.parts_with_layers
            if (method in part.terms if method in TERMS else getattr(part, abilities[method]))
        ]
        if not acting:
            self._does_not_apply(method)
        if any(place for _, place in acting):
            raise ValueError(
                f"{method}() needs one layer, and '{self}' differs by layer: call "
                f"encoding.at(layer, layers).{method}(...)"
            )
        return [getattr(part, method)(*args, **options) for part, _ in acting]


def combine(parts: Iterable[tuple[Encoding, str | None]]) -> Encoding:
    """Return the encoding with these parts, each with its layers or None for all layers.

    Raises
    ------
    ValueError
        If two parts rotate, have the same name, or "none" stands beside another part; or if an
        absolute part has layers.
    """
    parts = tuple(parts)
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0]
    return Combination(parts)


def _check_together(part: Encoding, other: Encoding) -> None:
    """Raise ValueError if two encodings cannot act in one layer."""
    for none, beside in ((part, other), (other, part)):
        if not (none.adds or none.in_attention):
            raise ValueError(
                f"'{none}' is no position encoding, and the same layer has '{beside}': leave the "
                f"layer out of the layers that '{beside}' names after @"
            )
    if all(x.rotates or x.has_vectors for x in (part, other)):
        raise ValueError(f"at most one part can rotate, got '{part}' and '{other}'")
    if part.name == other.name:
        raise ValueError(f"a name can stand once in a combination, got '{part}' and '{other}'")


def _summed(terms: list[Any], length: int, causal: bool, axis: int) -> tuple[np.ndarray, int, str]:
    """Return the sum of tables or biases, with a row for each distance among `length` tokens."""
    if len(terms) == 1:
        return terms[0]
    low = 0 if causal else 1 - checks.integer("length", length, 1)
    deltas = np.arange(low, length)
    summands = [rows_at(deltas, rows, first, beyond, axis=axis) for rows, first, beyond in terms]
    return sum(summands[1:], start=summands[0]), low, "zero"


def read_dict(data: Mapping[str, Any]) -> Encoding:
    """Return the encoding that a dict of `Encoding.to_dict` describes."""
    if not isinstance(data, Mapping):
        raise TypeError(f"the dict of an encoding must be a mapping, got {type(data).__name__}")
    options = dict(data)
    version = options.pop("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"the dict of an encoding needs version {VERSION}, got {version!r}: a newer wavepe may "
            "have written it"
        )
    if "name" in options:
        return build(options.pop("name"), options)
    parts = options.pop("parts", None)
    if not isinstance(parts, list | tuple) or not parts or options:
        raise ValueError(
            "the dict of an encoding needs a 'name' and options, or a list of 'parts'; got the "
            f"keys {list(data)}"
        )
    parts_with_layers = []
    for part in parts:
        data = dict(part) if isinstance(part, Mapping) else part
        place = data.pop("layers", None) if isinstance(data, dict) else None
        if isinstance(data, dict) and "parts" in data:
            raise ValueError("a part is one encoding with a 'name', got one with 'parts'")
        parts_with_layers.append((read_dict(data), None if place is None else check_layers(place)))
    return combine(parts_with_layers)


def build(name: str, options: Mapping[str, Any]) -> Encoding:
    """Return the encoding of that name with these options."""
    cls = known.get(name) if isinstance(name, str) else None
    if cls is None:
        kind = str(name).lower()
        scaling = f", did you mean 'rope:type={kind},...'?" if kind in ROPE_TYPES else ""
        raise ValueError(
            f"unknown encoding {name!r}{scaling or suggestion(name, known)}; known: "
            f"{', '.join(known)}; an encoding of your own must be registered first"
        )
    names = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in names:
            listed = f"known: {', '.join(names)}" if names else "it has none"
            close = suggestion(key, names)
            raise ValueError(f"unknown option {key!r} of encoding {name!r}{close}; {listed}")
    return cls(**options)


def sequence_length(encoding: Encoding, positions: ArrayLike, length: int | None) -> int:
    """Return the checked `length`; None gives the largest of `positions` + 1."""
    positions = checks.real_array(f"{encoding.name} positions", positions)
    if length is not None:
        return checks.integer(f"{encoding.name} length", length, 1)
    if positions.size == 0:
        return 1
    largest = checks.finite(f"{encoding.name} positions: the largest", positions.max())
    return max(int(largest) + 1, 1)
