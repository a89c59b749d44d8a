"""Time attention with the wavelet's relative term on a GPU, against other implementations.

All ways get the same numbers, and take turns in one process. "Flex" is torch's flex_attention: it
computes the products of the queries and the table first, and its score_mod reads them. "Flex, band
and rest" is a faster form of it: one call has the term, for the distances with a row in the table,
another has the other distances, and the results are merged. The other ways have no term, which
shows its cost, or they hold all scores in memory.
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
from wavepe.positions.tables import table_on

from .gpu_measure import ROUNDS, Place, extra_memory, time_calls

ROWS = 65536  # heads (of all sequences) x length, the same in all rows
MOST_HEADS = 32  # in a sequence
OURS, PLAIN, FLEX = "wavepe", "wavepe, no term", "Flex"
BAND, FLEX_PLAIN = "Flex, band and rest", "Flex, no term"
CUDNN, FLASH = "SDPA cuDNN, no term", "SDPA flash, no term"
EAGER, DENSE = "PyTorch's operators", "SDPA, dense bias"
WITH_TERM = (OURS, FLEX, BAND, EAGER, DENSE)
WAYS = (OURS, PLAIN, FLEX, CUDNN, FLASH, FLEX_PLAIN, BAND, DENSE, EAGER)
LONGEST = {EAGER: 2048, DENSE: 4096}
PHASES = ("forward", "forward and backward")
RATIOS = {  # name -> numerator and denominator
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
    table: Any  # a RelativeTable, if there is one


def problem(place: Place, d: int, length: int) -> Problem:
    heads = max(ROWS // length, 1) if not place.emulated else 2
    batch = max(heads // MOST_HEADS, 1)
    dtype = torch.float32 if place.emulated else torch.bfloat16
    generator = torch.Generator(place.device).manual_seed(0)
    shape = (batch, heads // batch, length, d)
    q, k, v, grad = (
        torch.randn(shape, generator=generator, device=place.device, dtype=dtype) for _ in range(4)
    )
    table = table_on(torch.device(place.device), length, wavepe.encoding("wavelet"), d, True)
    return Problem(q, k, v, grad, table)


# ---- ways ----------------------------------------------------------------------------------------


def ways(place: Place, inputs: Problem) -> dict[str, Callable[[], Way]]:
    """Return, by name, what makes each function of q, k and v that can run at this length."""
    attention, table, length = place.attention(), inputs.table, inputs.q.shape[2]
    makers = {
        OURS: lambda: functools.partial(attention, p=table),
        PLAIN: lambda: attention,
        FLEX: lambda: _flex(place, inputs),
        CUDNN: lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
        FLASH: lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
        FLEX_PLAIN: lambda: _flex_plain(place, length),
        BAND: lambda: _flex_band(place, inputs),
        DENSE: lambda: _dense(inputs),
        EAGER: lambda: _eager(inputs),
    }
    chosen = {name: makers[name] for name in WAYS if length <= LONGEST.get(name, length)}
    if length <= _rows(inputs).shape[0]:
        chosen.pop(BAND)  # no distance is beyond the table
    return chosen


def _rows(inputs: Problem) -> Tensor:
    """Return the rows of the table that the queries can reach, in q's dtype."""
    return inputs.table.tensors(inputs.q.dtype, inputs.q.device)[0][: inputs.q.shape[2]]


def _scaled(inputs: Problem) -> Tensor:
    """Return the rows of the table, scaled like the scores.

    Scaling the products instead is not possible: torch 2.13 cannot compile it for the CPU.
    """
    return _rows(inputs) / math.sqrt(inputs.q.shape[-1])


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
    """Silence the warning of flex_attention that it is not compiled."""

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
    """Return a score_mod that adds the term. It reads scaled scores, so p must be scaled."""
    products, last = q @ p.mT, p.shape[0] - 1

    def score(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        delta = m - n
        inside = (delta >= 0) & (delta <= last)
        return s + torch.where(inside, products[b, h, m, delta.clamp(0, last)], 0.0)

    return score


def _flex(place: Place, inputs: Problem) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p, length = _scaled(inputs), inputs.q.shape[2]
    mask = create_block_mask(_causal, None, None, length, length, device=place.device)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=_term(q, p), block_mask=mask)

    return _compiled(place, way)


def _flex_band(place: Place, inputs: Problem) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p, length = _scaled(inputs), inputs.q.shape[2]
    count = p.shape[0]
    sizes = (None, None, length, length)

    def in_band(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (m >= n) & (m - n < count)

    def beyond(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return m - n >= count

    masks = [create_block_mask(each, *sizes, device=place.device) for each in (in_band, beyond)]

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        band, band_lse = flex_attention(
            q, k, v, score_mod=_term(q, p), block_mask=masks[0], return_lse=True
        )
        rest, rest_lse = flex_attention(q, k, v, block_mask=masks[1], return_lse=True)
        band_weight = torch.sigmoid(band_lse - rest_lse)[..., None]  # rest_lse may be -inf
        return (band_weight * band + (1 - band_weight) * rest).to(q.dtype)

    return _compiled(place, way)


def _dense(inputs: Problem) -> Way:
    p, length = _rows(inputs), inputs.q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=p.device).triu(1)

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        term = ops.relative_bias(q, p, length) / math.sqrt(q.shape[-1])
        mask = term.masked_fill(hidden, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return way


def _eager(inputs: Problem) -> Way:
    from wavepe.ops._attention_checks import Arguments
    from wavepe.ops._attention_composed import composed

    p = _rows(inputs)
    return lambda q, k, v: composed(Arguments(q, k, v, p))[0]


# ---- a row ---------------------------------------------------------------------------------------


def row(
    place: Place, d: int, length: int, once: bool = False, only: Sequence[str] = WAYS
) -> dict[str, Any]:
    """Return seconds, extra memory and differences, by phase and way.

    A difference is the distance of out or dq from wavepe's. A way that fails has an error instead
    of figures. With `once` every way runs once without timing, to fill the compilers' caches.
    """
    inputs = problem(place, d, length)
    place.needs_kernel(inputs.q)
    figures: dict[str, Any] = {
        "d": d,
        "length": length,
        "shape": list(inputs.q.shape),
        "errors": {},
    }
    calls: dict[str, dict[str, Callable[[], Any]]] = {phase: {} for phase in PHASES}
    differs: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    ours: dict[str, Tensor] = {}
    for name, make in ways(place, inputs).items():
        if name not in only:
            continue
        try:
            for phase, call in zip(PHASES, _calls(make(), inputs), strict=True):
                result = call()[0]
                if name == OURS:
                    ours[phase] = result
                if name in WITH_TERM and phase in ours:
                    differs[phase][name] = _distance(result, ours[phase])
                calls[phase][name] = call
        except Exception as error:  # torch or the GPU may not support a rival; the others go on
            figures["errors"][name] = brief(error)
        result = None  # so that it does not count in the memory of another way
    if once:
        return figures
    figures |= {"differs": differs, "seconds": {}, "memory": {}, "ratios": {}}
    rounds = 1 if place.emulated else ROUNDS
    for phase, phase_calls in calls.items():
        seconds = time_calls(phase_calls, place.device, rounds)
        figures["seconds"][phase] = seconds
        figures["memory"][phase] = {
            n: extra_memory(call, place.device) for n, call in phase_calls.items()
        }
        figures["ratios"][phase] = {
            name: seconds[over] / seconds[under]
            for name, (over, under) in RATIOS.items()
            if over in seconds and under in seconds
        }
    return figures


def _distance(x: Tensor, y: Tensor) -> float:
    return ((x - y).float().norm() / y.float().norm()).item()


def _calls(way: Way, inputs: Problem) -> list[Callable[[], Any]]:
    """Return the call of each phase: one returns (out,), the other (dq, dk, dv)."""
    q, k, v, grad, _ = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> tuple[Tensor]:
        with torch.no_grad():
            return (way(q, k, v),)

    def both() -> Any:
        return torch.autograd.grad(way(*leaves), leaves, grad)

    return [forward, both]


def brief(error: Exception) -> str:
    """Return the type of an error and the first line of its message that is not empty."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
