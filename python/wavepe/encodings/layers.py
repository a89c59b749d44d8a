"""The layers of a part, as a spec names them after @: indices or slices of Python, joined by dots.

``0``, ``-1``, ``0.3.5``, ``::2``, ``1::2``, ``-4:`` and ``:4.-1`` are examples.
"""

from __future__ import annotations

import re
from typing import Any

_ITEM = re.compile(r"-?[0-9]+|(-?[0-9]+)?:(-?[0-9]+)?(:(-?[0-9]+)?)?")


def layers_of(place: str, layers: int) -> frozenset[int]:
    """Return the indices that `place` names in a model of so many layers; ValueError for others."""
    indices: set[int] = set()
    for item in place.split("."):
        if ":" not in item:
            index = _read_item(place, item)
            if not -layers <= index < layers:
                raise ValueError(
                    f"@{place} names layer {index}, but the model has the layers 0..{layers - 1}"
                )
            indices.add(index % layers)
        else:
            indices.update(range(layers)[_read_item(place, item)])
    return frozenset(indices)


def check_layers(place: str) -> str:
    """Return the text if it names layers; ValueError if it has another form."""
    if not isinstance(place, str):
        raise TypeError(f"layers must be text such as '::2', got {place!r}")
    for item in place.split("."):
        _read_item(place, item)
    return place


def _read_item(place: str, item: str) -> Any:
    """Return the index or the slice that an item of `place` stands for."""
    numbers = [int(x) if x else None for x in item.split(":")] if _ITEM.fullmatch(item) else []
    if not numbers or numbers[2:] == [0]:  # a step of 0
        raise ValueError(
            f"@{place} must name layers by indices or slices with a step other than 0, joined by "
            f"dots, such as @0.3, @::2 or @-4:; got {item!r}"
        )
    return slice(*numbers) if ":" in item else numbers[0]
