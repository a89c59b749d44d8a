"""FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

The formulas count what the definition multiplies and adds, as PyTorch's own do: two FLOPs for each
product, of all queries and keys, whatever a mask hides. Of a table they count the distances that
queries and keys have. A rotation has six FLOPs a pair. Tables of cosines, sines and wavelets count
nothing, because PyTorch counts no elementwise functions.
"""

from __future__ import annotations

import functools
import math
import sys
from importlib.util import find_spec
from typing import Any

import torch

from ._attention_checks import Arguments

_Q_REL = Arguments._fields.index("q_rel")
_NAME = len(Arguments._fields)  # place of the name of a table in `attention_in_graph`
_ALL = math.inf  # rows of a table that has one for each distance


def _attention(q: Any, k: Any, v: Any, p: Any = None, *_: Any, **__: Any) -> int:
    each, relative = _of_pairs(q, k, p)
    return each * (q[-1] + v[-1]) + relative


def _attention_backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, *given: Any, **__: Any
) -> int:
    q, k, v, p = (*given, None)[:4]
    wants_table = len(given) > len(Arguments._fields) and given[len(Arguments._fields)]
    return _gradients(q, k, v, p, 3 if wants_table else 2)


def _attention_in_graph(q: Any, k: Any, v: Any, p: Any = None, *rest: Any, **_: Any) -> int:
    return _attention(q, k, v, _table(q, p, rest))


def _attention_in_graph_backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, p_grad: Any, bias_grad: Any, *given: Any, **_: Any
) -> int:
    q, k, v, p = (*given, None)[:4]
    return _gradients(q, k, v, _table(q, p, given[4:]), 3 if p_grad else 2)


def _table(q: Any, p: Any, after_p: Any) -> Any:
    """Return the shape of the table: that of p, or of the one whose name is among the arguments."""
    if not any(after_p[_NAME - 4 :][:1]):
        return p
    q_rel = after_p[_Q_REL - 4]
    return _ALL, (q if q_rel is None else q_rel)[-1]


def _gradients(q: Any, k: Any, v: Any, p: Any, relatives: int) -> int:
    """Return the FLOPs of the scores, once more, and of all gradients.

    `relatives` is how many products have the size of q p^T.
    """
    each, relative = _of_pairs(q, k, p)
    return each * (3 * q[-1] + 2 * v[-1]) + relatives * relative


def _of_pairs(q: Any, k: Any, p: Any) -> tuple[int, int]:
    """Return the FLOPs of q k^T for one element of the head, and those of r p^T."""
    batch, heads, m, _ = q
    n = k[2]
    rows, size = (0, 0) if p is None else p[-2:]
    read = int(min(rows, max(m + n - 1, 0)))
    return 2 * batch * heads * m * n, 2 * batch * heads * m * read * size


def _relative_bias(q: Any, p: Any, keys: int, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q) * min(p[-2], max(q[-2] + keys - 1, 0))


def _rope(x: Any, cos: Any, *_: Any, **__: Any) -> int:
    return 6 * math.prod(x[:-1]) * cos[-1]


def _rope_qk(q: Any, k: Any, cos: Any, *_: Any, **__: Any) -> int:
    return _rope(q, cos) + _rope(k, cos)


_FORMULAS: dict[str, Any] = {
    "attention_forward": _attention,
    "attention_backward": _attention_backward,
    "attention_in_graph": _attention_in_graph,
    "attention_in_graph_backward": _attention_in_graph_backward,
    "relative_bias": _relative_bias,
    "rope": _rope,
    "rope_": _rope,
    "rope_qk": _rope_qk,
}


@functools.cache
def register() -> None:
    """Register the formulas with torch, once."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(torch.ops.wavepe, name))(formula)


def register_cheaply() -> None:
    """Call `register`, unless it would import Triton, which takes a third of a second."""
    if "triton" in sys.modules or find_spec("triton") is None:
        register()
