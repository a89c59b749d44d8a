"""The encoding of each layer of a model: one for all layers, or a hybrid by ranges of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..encodings.base import combine

Spec = str | Mapping[str, Any] | Encoding
# The form in configurations and files: a spec, or a spec for each range of layers.
StoredSpec = str | dict[str, str]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class LayerEncodings:
    """The encodings that a user chose for the layers of a model."""

    def __init__(self, spec: Spec, **options: Any) -> None:
        self.everywhere: Encoding | None = None  # its parts may name layers
        # Without it, first and last layers; other layers keep their own encoding.
        self.ranges: dict[tuple[int, int], Encoding] = {}
        if not is_hybrid(spec):
            self.everywhere = read_encoding(spec, **options)
            return
        if options:
            raise ValueError(
                f"options ({', '.join(options)}) do not go with a dict of layer ranges: write them "
                "into the specs of the dict"
            )
        assert isinstance(spec, Mapping)
        if not spec:
            raise ValueError("a dict of encodings must name at least one layer, got {}")
        for key, value in spec.items():
            place = _layer_range(key)
            if place in self.ranges:
                raise ValueError(f"layers {_written_range(place)} are named twice, got {key!r}")
            self.ranges[place] = read_encoding(value)
        for encoding in self.encodings:
            if encoding.adds:
                raise ValueError(
                    f"{encoding} is an absolute encoding: it is added to the token embeddings "
                    "before the first layer, so it cannot differ by layer"
                )
            if any(encoding.layers):
                raise ValueError(f"a dict of layer ranges takes specs without @, got '{encoding}'")
        learned = {str(encoding) for encoding in self.encodings if encoding.learns}
        if len(learned) > 1:
            raise ValueError(
                "a dict of layer ranges can have at most one learned encoding, got "
                f"{' and '.join(sorted(learned))}"
            )

    @property
    def encodings(self) -> list[Encoding]:
        """Return the different encodings of the choice."""
        named = [self.everywhere] if self.everywhere is not None else self.ranges.values()
        return list({str(encoding): encoding for encoding in named}.values())

    def stored(self) -> StoredSpec:
        """Return the specs in the form that configurations store."""
        if self.everywhere is not None:
            return str(self.everywhere)
        return {_written_range(key): str(value) for key, value in self.ranges.items()}

    @property
    def learned(self) -> Encoding | None:
        """Return the encoding that learns, with all its parts; None if none learns."""
        return next((encoding for encoding in self.encodings if encoding.learns), None)

    def by_layer(self, has_positions: Sequence[bool]) -> list[Encoding | None]:
        """Return the encoding of each layer; None for a layer that keeps its own.

        A layer to which the family gives no positions has only the parts that name it.
        """
        count = len(has_positions)
        if self.everywhere is not None:
            whole = self.everywhere
            naming = [(part, place) for part, place in whole.parts_with_layers if place is not None]
            bare: list[Encoding | None] = [None] * count
            if naming:
                named = [combine(naming).at(layer, count) for layer in range(count)]
                bare = [encoding if encoding.in_attention else None for encoding in named]
            return [
                whole.at(layer, count) if has else bare[layer]
                for layer, has in enumerate(has_positions)
            ]
        encodings: list[Encoding | None] = [None] * count
        for (first, last), encoding in self.ranges.items():
            name = _written_range((first, last))
            if last >= count:
                raise ValueError(
                    f"got encodings for the layers {name}, but this model has the layers "
                    f"0-{count - 1}"
                )
            if any(present is not None for present in encodings[first : last + 1]):
                raise ValueError(f"layers {name} are named twice: ranges must not overlap")
            encodings[first : last + 1] = [encoding] * (last + 1 - first)
        return encodings

    def __str__(self) -> str:
        return spec_text(self.stored())


def is_hybrid(spec: Any) -> bool:
    """Return whether `spec` is a dict of layer ranges, not the dict of one encoding."""
    return isinstance(spec, Mapping) and not {"name", "parts"} & set(spec)


def spec_text(stored: StoredSpec) -> str:
    """Write a spec, or the specs of a hybrid, on one line."""
    if isinstance(stored, str):
        return stored
    return "; ".join(f"{key}: {value}" for key, value in stored.items())


def _layer_range(key: Any) -> tuple[int, int]:
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key, key
    match = _RANGE.fullmatch(key) if isinstance(key, str) else None
    first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
    if last < first:
        raise ValueError(
            f"a dict of encodings names layers as '4' or '0-3', the first one first; got {key!r}"
        )
    return first, last


def _written_range(key: tuple[int, int]) -> str:
    first, last = key
    return str(first) if first == last else f"{first}-{last}"
