"""FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

The formulas count what the definition multiplies and adds, as PyTorch's own do: two FLOPs for each
product, of all queries and keys, whatever a mask hides. Of a table they count the distances that
queries and keys have. A rotation has six FLOPs a pair. Tables of cosines, sines and wavelets count
nothing, because PyTorch counts no elementwise functions.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import PathFinder
from typing import Any

import torch

from ._attention_checks import Arguments

_COUNTER = "torch.utils.flop_counter"
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


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(torch.ops.wavepe, name))(formula)


class _Finder:
    """A finder of modules that registers the formulas as soon as torch's counter is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_counter() -> None:
    """Register the formulas, at the latest when torch's counter is imported.

    That module imports Triton, which takes a third of a second, so it is not imported here.
    """
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder)
