"""Check the CUDA kernels, on a GPU or emulated, in every dtype, and time rope.

The results are compared to those of the CPU's operators on the same numbers; the tests bound the
errors of these. The bounds are multiples of one rounding of the result. A copy of the same bytes in
the same run shows the bandwidth of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor
from wavepe.ops._relative_bias import by_product

from .bench_rope import half_split
from .gpu_measure import UNITS, Check, Place, Triple, short, time_calls, worst

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
LENGTHS = (128, 2048, 16384)


# ---- right ---------------------------------------------------------------------------------------


def check(place: Place) -> Iterator[Check]:
    """Check every kernel, on odd and even sizes, in every dtype and layout."""
    generator = torch.Generator().manual_seed(1)
    for dtype in FLOATS:
        yield worst("rope, rope_, rope_qk", dtype, _rope(place, dtype, generator))
        yield worst("wavelet_table", dtype, _wavelets(place, dtype))
        yield worst("rope_table", dtype, _rope_table(place, dtype))
        yield worst("relative_bias, gradients", dtype, _bias(place, dtype, generator))
    yield worst("wavelet_table, gradients", torch.float64, _gradients(place, generator))
    if not place.emulated:
        yield worst("streams and graphs", torch.float32, _streams(place))
        yield Check("tensors on two devices", 0.0 if _mixed_are_refused() else math.inf, 0.0)


def _rope(place: Place, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Triple]:
    shapes = (((2, 5, 33, 128), 64), ((1, 3, 7, 80), 20), ((2, 2, 9, 37), 17), ((2, 6, 5, 128), 32))
    for shape, h in shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        positions = torch.randint(1 << 20, (shape[0], shape[2]), generator=generator)
        inv_freq = torch.rand(h, generator=generator).double()
        exact = dtype if dtype == torch.float64 else torch.float32
        cos, sin = ops.rope_table(positions, inv_freq, dtype=exact)
        # the roundings of the two products and their sum, then that of the result
        bound = (4 * UNITS[exact] + 2 * UNITS[dtype]) * x.double().abs().max().item()
        y, c, s = place.to(x, cos, sin)
        one_off = torch.empty(y.numel() + 1, dtype=dtype, device=y.device)[1:].view(shape)
        one_off.copy_(y)
        strided = y.transpose(1, 2).contiguous().transpose(1, 2)
        for layout in (False, True):
            for inverse in (False, True):
                options = {"interleaved": layout, "inverse": inverse}
                want = ops.rope(x.double(), cos, sin, **options)
                with place.kernels_in_use():
                    got = [ops.rope(z, c, s, **options) for z in (y, one_off)]
                    got += ops.rope_qk(strided, y[:, :1], c, s, **options)
                    got.append(ops.rope_(y.clone(), c, s, **options))
                for result, wanted in zip(got, (want, want, want, want[:, :1], want), strict=True):
                    yield result, wanted, bound


def _rope_table(place: Place, dtype: torch.dtype) -> Iterator[Triple]:
    positions = torch.cat([torch.arange(100), 10 ** torch.arange(2, 10), torch.tensor([2**31])])
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(128, 5e5)[0])
    several: tuple[dict[str, Any], ...] = ({}, {"precision": "hf"}, {"attention_factor": 1.25})
    for options in several:
        with place.kernels_in_use():
            got = ops.rope_table(*place.to(positions, inv_freq), dtype=dtype, **options)
        want = ops.rope_table(positions, inv_freq, dtype=torch.float64, **options)
        bound = {torch.float32: 1.2e-7, torch.float64: 1e-15}.get(dtype, UNITS[dtype])
        for result, wanted in zip(got, want, strict=True):
            yield result, wanted, bound * options.get("attention_factor", 1)


def _wavelets(place: Place, dtype: torch.dtype) -> Iterator[Triple]:
    offsets = torch.arange(-50, 200)
    for kind in ("ricker", "gaussian", "morlet", "haar"):
        scale, shift = (torch.from_numpy(a).to(dtype) for a in wavepe.wavelet_grid(64))
        with place.kernels_in_use():
            got = ops.wavelet_table(*place.to(offsets, scale, shift), kind=kind)
        want = ops.wavelet_table(offsets, scale.double(), shift.double(), kind=kind)
        yield got, want, max(UNITS[dtype], 1e-15)


def _gradients(place: Place, generator: torch.Generator) -> Iterator[Triple]:
    offsets, grad = torch.arange(300), torch.randn(300, 24, generator=generator).double()
    for kind in ("ricker", "gaussian", "morlet"):
        leaves = [torch.from_numpy(a).requires_grad_() for a in wavepe.wavelet_grid(24)]
        want = torch.autograd.grad(ops.wavelet_table(offsets, *leaves, kind=kind), leaves, grad)
        with place.kernels_in_use():
            there = [t.detach().requires_grad_() for t in place.to(*leaves)]
            table = ops.wavelet_table(*place.to(offsets), *there, kind=kind)
            got = torch.autograd.grad(table, there, place.to(grad)[0])
        for result, wanted in zip(got, want, strict=True):
            yield result, wanted, 1e-12


def _bias(place: Place, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Triple]:
    def bias(q: Tensor, p: Tensor, keys: int, beyond: str) -> Tensor:
        if place.emulated:  # the function that is registered for CUDA
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            return by_product(q.to(wide), p.to(wide), keys, -3, beyond).to(q.dtype)
        return ops.relative_bias(q, p, keys, first=-3, beyond=beyond)

    # Rows of 70 keys are whole words of 16 bytes in float64, rows of 69 are in no dtype.
    for beyond, keys in (("zero", 70), ("edge", 69)):
        q = torch.randn(2, 3, 65, 32, generator=generator).to(dtype)
        p = torch.randn(40, 32, generator=generator).to(dtype)
        grad = torch.randn(2, 3, 65, keys, generator=generator).to(dtype)
        leaves = [t.double().requires_grad_() for t in (q, p)]
        out = ops.relative_bias(*leaves, keys, first=-3, beyond=beyond)
        want = (out, *torch.autograd.grad(out, leaves, grad.double()))
        with place.kernels_in_use():
            there = [t.requires_grad_() for t in place.to(q, p)]
            made = bias(*there, keys, beyond)
            got = (made, *torch.autograd.grad(made, there, place.to(grad)[0]))
        for result, wanted in zip(got, want, strict=True):
            size = wanted.abs().max().item()  # sums of up to 2000 products
            unit = UNITS[torch.float64 if dtype == torch.float64 else torch.float32]
            yield result.detach(), wanted.detach(), (64 * unit + 4 * UNITS[dtype]) * size


def _streams(place: Place) -> Iterator[Triple]:
    """Check a stream with work before the kernel, and a graph that is captured and replayed."""
    x = torch.randn(1, 4, 64, 128)
    cos, sin = ops.rope_table(torch.arange(64), torch.rand(64).double())
    want = ops.rope(x, cos, sin)
    there, c, s = place.to(x, cos, sin)
    late, stream = torch.zeros_like(there), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(there)
        got = ops.rope(late, c, s)
    stream.synchronize()
    yield got, want, 1e-6
    graph, source = torch.cuda.CUDAGraph(), torch.zeros_like(there)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = ops.rope(source, c, s)
    source.copy_(there)
    graph.replay()
    torch.cuda.synchronize()
    yield captured, want, 1e-6


def _mixed_are_refused() -> bool:
    x, table = torch.randn(1, 2, 5, 8, device="cuda"), torch.ones(5, 4)
    refused = 0
    for call in (
        lambda: ops.rope(x, table, table),
        lambda: ops.rope_qk(x, x.cpu(), table.cuda(), table.cuda()),
        lambda: ops.rope_table(torch.arange(5, device="cuda"), table[0]),
        lambda: ops.wavelet_table(torch.arange(5), table[0].cuda(), table[0].cuda()),
    ):
        try:
            call()
        except RuntimeError as error:
            refused += "one device" in str(error)
    return refused == 4


# ---- fast ----------------------------------------------------------------------------------------


def rivals(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Callable[[], Any]]:
    """Return calls that rotate q and k (half-split) into new tensors, and a copy."""
    calls: dict[str, Callable[[], Any]] = {
        "wavepe": lambda: ops.rope_qk(q, k, cos, sin),
        "copy": lambda: (q.clone(), k.clone()),
        "eager": lambda: (half_split(q, cos, sin), half_split(k, cos, sin)),
    }
    try:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    except ImportError:
        return calls
    wide_cos, wide_sin = (torch.cat([t, t], -1)[None].to(q.dtype) for t in (cos, sin))
    calls["Hugging Face"] = lambda: apply_rotary_pos_emb(q, k, wide_cos, wide_sin)
    torch._dynamo.reset()  # compile for this length, and not for any length
    compiled = torch.compile(apply_rotary_pos_emb, dynamic=False)
    calls["Hugging Face, compiled"] = lambda: compiled(q, k, wide_cos, wide_sin)
    try:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb
    except ImportError:
        return calls
    calls["Liger"] = lambda: liger_rotary_pos_emb(q, k, wide_cos, wide_sin)
    return calls


def time_rope() -> Iterator[dict[str, Any]]:
    """Yield rows with the seconds of each way, and the least bytes that it moves."""
    for dtype in FLOATS[:2]:
        for length in LENGTHS:
            q = torch.randn(1, HEADS, length, HEAD_SIZE, device="cuda", dtype=dtype)
            k = torch.randn(1, KEY_HEADS, length, HEAD_SIZE, device="cuda", dtype=dtype)
            inv_freq = torch.from_numpy(wavepe.rope_frequencies(HEAD_SIZE)[0]).cuda()
            cos, sin = ops.rope_table(torch.arange(length, device="cuda"), inv_freq)
            moved = 2 * (q.numel() + k.numel()) * q.element_size()
            seconds = time_calls(rivals(q, k, cos, sin))
            yield {
                "dtype": short(dtype),
                "length": length,
                "bytes": moved,
                "seconds": seconds,
                "of_copy": seconds["copy"] / seconds["wavepe"],
            }
