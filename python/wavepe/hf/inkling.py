"""Relative logits [I] of Inkling and Inkling 2 themselves, by `wavepe.ops.attention`.

The model's module makes a tensor of queries x keys of them. In a patched model it returns the
queries of the table, which take the same way through the layer, its scaling included. The attention
function gives them to the kernel with the module's table.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..encodings import Encoding, Table
from ..encodings.base import combine
from ..positions import LearnedTerms, Scores

OWN = "relative"  # the name of the part that the model has, and its spec: it has no options
# The modules of Inkling's and Inkling 2's layers that have the table.
MODULES = ("rel_logits_proj", "relative_position_bias")
BLOCKS = "Inkling2BlockAttentionResidual"  # its attention to earlier blocks of layers, not tokens
DISTANCE = "get_relative_distance"  # a global of Inkling 2's modelling file
_running = threading.local()  # its `patched` is true during a pass of a patched Inkling 2


def without_own(encoding: Encoding) -> Encoding | None:
    """Return the encoding without the model's own part; None if nothing is left."""
    kept = [(part, place) for part, place in encoding.parts_with_layers if str(part) != OWN]
    return combine(kept) if kept else None


def _with_table(attention: Any) -> Any:
    """Return the module of a layer that has the table; None in other families."""
    return next((getattr(attention, name) for name in MODULES if hasattr(attention, name)), None)


def keep_queries(attention: Any, score: Scores | None) -> None:
    """Let an Inkling layer keep the queries of its table; none if the encoding has another."""
    if (module := _with_table(attention)) is None:
        return
    module.forward = _nothing
    if score is not None and OWN in map(str, score.encoding.parts):
        # a partial, because a copy or a pickle of the model takes it along
        is_second = hasattr(module, "linear")
        module.forward = functools.partial(_own_queries, module) if is_second else _queries


def restore(attention: Any) -> None:
    """Undo `keep_queries`."""
    if (module := _with_table(attention)) is not None:
        module.__dict__.pop("forward", None)


def own_terms(attention: Any, queries: Tensor) -> LearnedTerms:
    """Return the model's own term, for the queries (B, H, m, rank) that its layer has kept."""
    return LearnedTerms(Table(_with_table(attention).proj.mT, 0), input_query=queries)


def hide_distances(base: nn.Module) -> list[RemovableHandle]:
    """Let passes of an Inkling 2 make no distances of queries x keys; return the hooks."""
    if DISTANCE not in inspect.unwrap(type(base).forward).__globals__:
        return []
    return [
        base.register_forward_pre_hook(_begin),
        base.register_forward_hook(_end, always_call=True),
    ]


def _begin(base: nn.Module, *_: Any) -> None:
    names = inspect.unwrap(type(base).forward).__globals__
    if getattr(names[DISTANCE], "func", None) is not _distances:
        names[DISTANCE] = functools.partial(_distances, names[DISTANCE])
    _running.patched = True


def _end(*_: Any) -> None:
    _running.patched = False


def _distances(make: Callable[..., Tensor], states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for `make`, the function that makes the distances; stock models still get them."""
    patched = getattr(_running, "patched", False)
    return states.new_empty(0) if patched else make(states, *args, **kwargs)


def _queries(states: Tensor, *_: Tensor) -> Tensor:
    return states.transpose(1, 2)


def _own_queries(module: Any, x: Tensor, _: Tensor, position_ids: Tensor) -> Tensor:
    states = module.linear(x).unflatten(-1, (module.num_heads, -1))
    queries: Tensor = module.norm(states, position_ids).transpose(1, 2)
    return queries


def _nothing(states: Tensor, *_: Tensor) -> Tensor:
    return states.new_empty(0)
