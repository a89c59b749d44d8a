"""Inkling's own relative logits [I], by `wavepe.ops.attention`.

The model's module makes a tensor of queries x keys of them. In a patched model it returns the
queries of the table, which take the same way through the layer, its scaling included. The attention
function gives them to the kernel with the module's table.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..encodings import Encoding, Table
from ..encodings.base import combine
from ..positions import LearnedTerms, Scores

OWN = "relative"  # the spec, and the part's name, of what the model has


def is_own(part: Encoding) -> bool:
    """Return whether a part is the model's own: a bare `relative`."""
    return str(part) == OWN


def without_own(encoding: Encoding) -> Encoding | None:
    """Return the encoding without the model's own part; None if nothing is left."""
    kept = [(part, place) for part, place in encoding.parts_with_layers if not is_own(part)]
    return combine(kept) if kept else None


def keep_queries(attention: Any, score: Scores | None) -> None:
    """Let an Inkling layer keep the queries of its table; none if the encoding has another."""
    if (logits := getattr(attention, "rel_logits_proj", None)) is not None:
        keeps_table = score is not None and any(map(is_own, score.encoding.parts))
        logits.forward = _queries if keeps_table else _nothing


def restore(attention: Any) -> None:
    """Undo `keep_queries`."""
    if hasattr(attention, "rel_logits_proj"):
        attention.rel_logits_proj.__dict__.pop("forward", None)


def own_terms(attention: Any, queries: Tensor) -> LearnedTerms:
    """Return the model's own term, for the queries (B, H, m, rank) that its layer has kept."""
    return LearnedTerms(Table(attention.rel_logits_proj.proj.mT, 0), input_query=queries)


def _queries(states: Tensor, *_: Tensor) -> Tensor:
    return states.transpose(1, 2)


def _nothing(states: Tensor, *_: Tensor) -> Tensor:
    return states[..., :0].transpose(1, 2)
