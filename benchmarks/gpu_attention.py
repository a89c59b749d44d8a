"""How fast attention with the wavelet's relative term is on a GPU, beside what else is to be had.

Every way gets the same numbers, in one process, in turns. "Flex" is torch's flex_attention, as a
user writes the same term with it today: the products of the queries with the table, made first and
read by score_mod. "band and rest" is its stronger form: the term only where the table has rows, in
a call of its own, and both merged. The other ways have no term (the price of it shows), or hold all
scores.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import wavepe
import wavepe.ops as ops
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .gpu_measure import ROUNDS, Place, extra_memory, time_calls

ROWS = 65536  # heads x length, the same in all rows
MOST_HEADS = 32  # of a sequence
OURS, PLAIN, FLEX = "wavepe", "wavepe, no term", "Flex"
BAND, FLEX_PLAIN = "Flex, band and rest", "Flex, no term"
CUDNN, FLASH = "SDPA cuDNN, no term", "SDPA flash, no term"
EAGER, DENSE = "PyTorch's operators", "SDPA, dense bias"
WITH_TERM = (OURS, FLEX, BAND, EAGER, DENSE)
WAYS = (OURS, PLAIN, FLEX, CUDNN, FLASH, FLEX_PLAIN, BAND, DENSE, EAGER)
LONGEST = {EAGER: 2048, DENSE: 4096}
PHASES = ("forward", "forward and backward")
RATIOS = {  # name -> over and under
    "no term / with": (PLAIN, OURS),
    "cuDNN / wavepe": (CUDNN, OURS),
    "flash / wavepe": (FLASH, OURS),
    "Flex / wavepe": (FLEX, OURS),
    "Flex, band and rest / wavepe": (BAND, OURS),
}
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    table: ops.RelativeTable


def problem(place: Place, d: int, length: int) -> Problem:
    heads = max(ROWS // length, 1) if not place.emulated else 2
    batch = max(heads // MOST_HEADS, 1)
    dtype = torch.float32 if place.emulated else torch.bfloat16
    generator = torch.Generator(place.device).manual_seed(0)
    shape = (batch, heads // batch, length, d)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, device=place.device, dtype=dtype) for _ in range(4)
    )
    table = ops.relative_table(*wavepe.encoding("wavelet").table(length, d))
    return Problem(q, k, v, grad, table)


# ---- ways ----------------------------------------------------------------------------------------


def ways(place: Place, given: Problem) -> dict[str, Callable[[], Way]]:
    """name -> what makes the function of q, k, v; only those that this length lets be."""
    attention, table, length = place.attention(), given.table, given.q.shape[2]
    makers = {
        OURS: lambda: functools.partial(attention, p=table),
        PLAIN: lambda: attention,
        FLEX: lambda: _flex(place, given),
        CUDNN: lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
        FLASH: lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
        FLEX_PLAIN: lambda: _flex_plain(place, length),
        BAND: lambda: _flex_band(place, given),
        DENSE: lambda: _dense(given),
        EAGER: lambda: _eager(given),
    }
    found = {name: makers[name] for name in WAYS if length <= LONGEST.get(name, length)}
    if length <= _rows(given).shape[0]:
        found.pop(BAND)  # there is no rest
    return found


def _rows(given: Problem) -> Tensor:
    """The table as flex_attention is given it: rows from delta = 0 on, in q's dtype."""
    return given.table.tensors(given.q.dtype, given.q.device)[0]


def _scaled(given: Problem) -> Tensor:
    """The same, scaled as scores are; a product that is scaled afterwards torch 2.13 cannot compile
    for the CPU."""
    return _rows(given) / math.sqrt(given.q.shape[-1])


def _sdpa(backend: SDPBackend) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return way


def _compiled(place: Place, function: Way) -> Way:
    if place.emulated:
        return _quiet(function)
    return torch.compile(function, dynamic=False, fullgraph=True)


def _quiet(function: Way) -> Way:
    """Without the warning that it is not compiled."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(q, k, v)

    return way


def _flex_plain(place: Place, length: int) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(_causal, None, None, length, length, device=place.device)
    return _compiled(place, lambda q, k, v: flex_attention(q, k, v, block_mask=mask))


def _causal(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return m >= n


def _term(q: Tensor, p: Tensor) -> Callable[..., Tensor]:
    """score_mod; p holds the scale, for scores are scaled before it."""
    products, last = q @ p.mT, p.shape[0] - 1

    def score(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        delta = m - n
        inside = (delta >= 0) & (delta <= last)
        return s + torch.where(inside, products[b, h, m, delta.clamp(0, last)], 0.0)

    return score


def _flex(place: Place, given: Problem) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p, length = _scaled(given), given.q.shape[2]
    mask = create_block_mask(_causal, None, None, length, length, device=place.device)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=_term(q, p), block_mask=mask)

    return _compiled(place, way)


def _flex_band(place: Place, given: Problem) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p, length = _scaled(given), given.q.shape[2]
    count = p.shape[0]
    sizes = (None, None, length, length)

    def in_band(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (m >= n) & (m - n < count)

    def beyond(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return m - n >= count

    masks = [create_block_mask(each, *sizes, device=place.device) for each in (in_band, beyond)]

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near, near_lse = flex_attention(
            q, k, v, score_mod=_term(q, p), block_mask=masks[0], return_lse=True
        )
        far, far_lse = flex_attention(q, k, v, block_mask=masks[1], return_lse=True)
        share = torch.sigmoid(near_lse - far_lse)[..., None]  # far_lse may be -inf
        return (share * near + (1 - share) * far).to(q.dtype)

    return _compiled(place, way)


def _dense(given: Problem) -> Way:
    p, length = _rows(given), given.q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=p.device).triu(1)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        term = ops.relative_bias(q, p, length) / math.sqrt(q.shape[-1])
        mask = term.masked_fill(hidden, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return way


def _eager(given: Problem) -> Way:
    from wavepe.ops._attention_composed import composed

    p = _rows(given)
    return lambda q, k, v: composed(q, k, v, p)[0]


# ---- a row ---------------------------------------------------------------------------------------


def row(
    place: Place, d: int, length: int, once: bool = False, only: Sequence[str] = WAYS
) -> dict[str, Any]:
    """Seconds, extra memory and how far out and dq are from ours, by phase and way.

    A way that fails has its error in place of its figures. With `once` every way runs once: what
    compilers make is then on the disk.
    """
    given = problem(place, d, length)
    place.needs_kernel(given.q)
    found: dict[str, Any] = {"d": d, "length": length, "shape": list(given.q.shape), "errors": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {phase: {} for phase in PHASES}
    differs: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    ours: dict[str, Tensor] = {}
    for name, make in ways(place, given).items():
        if name not in only:
            continue
        try:
            for phase, call in zip(PHASES, _calls(make(), given), strict=True):
                result = call()[0]
                if name == OURS:
                    ours[phase] = result
                if name in WITH_TERM and phase in ours:
                    differs[phase][name] = _distance(result, ours[phase])
                calls[phase][name] = call
        except Exception as error:  # a rival that this torch or GPU lacks must not end the others
            found["errors"][name] = brief(error)
        result = None  # so that no other's memory counts it
    if once:
        return found
    found |= {"differs": differs, "seconds": {}, "memory": {}, "ratios": {}}
    rounds = 1 if place.emulated else ROUNDS
    for phase, some in calls.items():
        seconds = time_calls(some, place.device, rounds)
        found["seconds"][phase] = seconds
        found["memory"][phase] = {n: extra_memory(call, place.device) for n, call in some.items()}
        found["ratios"][phase] = {
            name: seconds[over] / seconds[under]
            for name, (over, under) in RATIOS.items()
            if over in seconds and under in seconds
        }
    return found


def _distance(x: Tensor, y: Tensor) -> float:
    return ((x - y).float().norm() / y.float().norm()).item()


def _calls(way: Way, given: Problem) -> list[Callable[[], Any]]:
    """Of each phase: what gives (out,) and (dq, dk, dv)."""
    q, k, v, grad, _ = given
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> tuple[Tensor]:
        with torch.no_grad():
            return (way(q, k, v),)

    def both() -> Any:
        return torch.autograd.grad(way(*leaves), leaves, grad)

    return [forward, both]


def brief(error: Exception) -> str:
    """The first line that says something, with the kind of error."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
