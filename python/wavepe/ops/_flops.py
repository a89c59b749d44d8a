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


def _attention(q: Any, k: Any, v: Any, *more: Any, p: Any = None, **_: Any) -> int:
    each, relative = _of_pairs(*_shapes((q, k, v, *more, *([] if more else [p]))))
    return each * (q[-1] + v[-1]) + relative


def _attention_ragged(q_starts: Any, k_starts: Any, _: Any, *call: Any, **named: Any) -> int:
    """Sum the FLOPs of the requests; without values, all tokens count as those of one."""
    q, k, v, p = [getattr(x, "shape", x) for x in (*call, named.get("p"))][:4]
    counts: Any = (q[2],), (k[2],)
    if type(q_starts) is torch.Tensor and not q_starts.is_meta:
        counts = q_starts.diff().tolist(), k_starts.diff().tolist()
    pairs = zip(*counts, strict=True)
    return sum(_attention((*q[:2], m, q[3]), (*k[:2], n), v, p=p) for m, n in pairs)


def _shapes(call: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return the shapes of q, k and the table: that of p, or of the one with a name."""
    q, k, _, p = (*call, None)[:4]
    name, q_rel = (*call[_NAME:], None)[0], (*call[_Q_REL:], None)[0]
    if isinstance(name, str) and name:
        p = _ALL, (q if q_rel is None else q_rel)[-1]
    return q, k, p


def _gradients(p_grad: bool, *call: Any) -> int:
    """Return the FLOPs of the scores, once more, and of all gradients."""
    each, relative = _of_pairs(*_shapes(call))
    q, _, v = call[:3]
    return each * (3 * q[-1] + 2 * v[-1]) + (3 if p_grad else 2) * relative


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


_FORMULAS: dict[str, Any] = {
    "attention_forward": _attention,
    "attention_backward": lambda *x, **_: _gradients(any(x[4:][_NAME : _NAME + 1]), *x[4:]),
    "attention_in_graph": _attention,
    "attention_in_graph_backward": lambda *x, **_: _gradients(x[4], *x[6:]),
    "relative_bias": _relative_bias,
    "rope": _rope,
    "rope_": _rope,
    "rope_qk": lambda q, k, cos, *_, **__: _rope(q, cos) + _rope(k, cos),
}


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.wavepe.attention_ragged, get_raw=True)(_attention_ragged)
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
    """Register the formulas when torch's counter is imported; it imports Triton, which is slow."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder)
