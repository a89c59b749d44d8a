"""The CUDA kernels on the GPU of this machine: right in every dtype, then how fast rope is.

`python -m benchmarks.gpu` prints both; `--json FILE` keeps them. Eight minutes at most. Without a
GPU the kernels' emulation on the CPU is judged, nothing is timed, and the last line says so.

Right means: the largest error over its bound is at most 1. The judge is the CPU's operator, whose
own errors tests/ bound, on the same numbers; bounds are units of the result's rounding. Times are
CUDA events around many calls, in turns, the least of several rounds; a copy of the same bytes in
the same run says what the memory gives.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor
from wavepe.cli.environment import version_of
from wavepe.ops._relative_bias import on_cuda

from .bench_rope import half_split
from .command import add_json, keep, new_parser
from .machine import commit
from .readme import ROOT

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What one rounding of a result may be off, of its own size or of the largest summand.
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNITS[torch.float64] = 2.0**-53
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
LENGTHS = (128, 2048, 16384)
CALLS, ROUNDS = 20, 9
EMULATED = ROOT / "build" / "emulated"


# ---- right ---------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    error: float  # over its bound; inf for a NaN
    largest: float  # absolute

    @property
    def ok(self) -> bool:
        return self.error <= 1


Triple = tuple[Tensor, Tensor, float]  # got, exact, bound of every element


class Place:
    """Where the kernels run: a GPU, or their emulation, for tensors on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.emulated = device == "cpu"

    def to(self, *tensors: Tensor) -> list[Tensor]:
        return [t.to(self.device) for t in tensors]

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the CPU's operators are the emulated kernels; outside they are the judge."""
        if self.emulated:
            torch.ops.wavepe.emulate_cuda(True)
        try:
            yield
        finally:
            if self.emulated:
                torch.ops.wavepe.emulate_cuda(False)


def check(place: Place) -> Iterator[Check]:
    """Every kernel, on odd and even sizes, in every dtype and layout."""
    generator = torch.Generator().manual_seed(1)
    for dtype in FLOATS:
        yield _worst("rope, rope_, rope_qk", dtype, _rope(place, dtype, generator))
        yield _worst("wavelet_table", dtype, _wavelets(place, dtype))
        yield _worst("rope_table", dtype, _rope_table(place, dtype))
        yield _worst("relative_bias, gradients", dtype, _bias(place, dtype, generator))
        if not place.emulated:
            yield _worst("attention", dtype, _attention(place, dtype, generator))
    yield _worst("wavelet_table, gradients", torch.float64, _gradients(place, generator))
    if not place.emulated:
        yield _worst("streams and graphs", torch.float32, _streams(place))
        yield Check("tensors on two devices", 0.0 if _mixed_are_refused() else math.inf, 0.0)


def _worst(name: str, dtype: torch.dtype, triples: Iterator[Triple]) -> Check:
    over, largest = 0.0, 0.0
    for got, want, bound in triples:
        error = (got.cpu().double() - want.double()).abs().max().item() if got.numel() else 0.0
        error = math.inf if math.isnan(error) else error
        over, largest = max(over, error / bound), max(largest, error)
    return Check(f"{name} {_short(dtype)}", over, largest)


def _rope(place: Place, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Triple]:
    shapes = (((2, 5, 33, 128), 64), ((1, 3, 7, 80), 20), ((2, 2, 9, 37), 17), ((2, 6, 5, 128), 32))
    for shape, h in shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        positions = torch.randint(1 << 20, (shape[0], shape[2]), generator=generator)
        inv_freq = torch.rand(h, generator=generator).double()
        exact = dtype if dtype == torch.float64 else torch.float32
        cos, sin = ops.rope_table(positions, inv_freq, dtype=exact)
        # a pair's two products and their sum, rounded as computed; then the result
        bound = (4 * UNITS[exact] + 2 * UNITS[dtype]) * x.double().abs().max().item()
        y, c, s = place.to(x, cos, sin)
        one_off = torch.empty(y.numel() + 1, dtype=dtype, device=y.device)[1:].view(shape)
        one_off.copy_(y)
        strided = y.transpose(1, 2).contiguous().transpose(1, 2)
        for layout in (False, True):
            for inverse in (False, True):
                options = {"interleaved": layout, "inverse": inverse}
                want = ops.rope(x.double(), cos, sin, **options)
                with place.here():
                    got = [ops.rope(z, c, s, **options) for z in (y, one_off)]
                    got += ops.rope_qk(strided, y[:, :1], c, s, **options)
                    got.append(ops.rope_(y.clone(), c, s, **options))
                for result, wanted in zip(got, (want, want, want, want[:, :1], want), strict=True):
                    yield result, wanted, bound


def _rope_table(place: Place, dtype: torch.dtype) -> Iterator[Triple]:
    positions = torch.cat([torch.arange(100), 10 ** torch.arange(2, 10), torch.tensor([2**31])])
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(128, 5e5)[0])
    given: tuple[dict[str, Any], ...] = ({}, {"precision": "hf"}, {"attention_factor": 1.25})
    for options in given:
        with place.here():
            got = ops.rope_table(*place.to(positions, inv_freq), dtype=dtype, **options)
        want = ops.rope_table(positions, inv_freq, dtype=torch.float64, **options)
        bound = {torch.float32: 1.2e-7, torch.float64: 1e-15}.get(dtype, UNITS[dtype])
        for result, wanted in zip(got, want, strict=True):
            yield result, wanted, bound * options.get("attention_factor", 1)


def _wavelets(place: Place, dtype: torch.dtype) -> Iterator[Triple]:
    offsets = torch.arange(-50, 200)
    for kind in ("ricker", "gaussian", "morlet", "haar"):
        scale, shift = (torch.from_numpy(a).to(dtype) for a in wavepe.wavelet_grid(64))
        with place.here():
            got = ops.wavelet_table(*place.to(offsets, scale, shift), kind=kind)
        want = ops.wavelet_table(offsets, scale.double(), shift.double(), kind=kind)
        yield got, want, max(UNITS[dtype], 1e-15)


def _gradients(place: Place, generator: torch.Generator) -> Iterator[Triple]:
    offsets, grad = torch.arange(300), torch.randn(300, 24, generator=generator).double()
    for kind in ("ricker", "gaussian", "morlet"):
        leaves = [torch.from_numpy(a).requires_grad_() for a in wavepe.wavelet_grid(24)]
        want = torch.autograd.grad(ops.wavelet_table(offsets, *leaves, kind=kind), leaves, grad)
        with place.here():
            there = [t.detach().requires_grad_() for t in place.to(*leaves)]
            table = ops.wavelet_table(*place.to(offsets), *there, kind=kind)
            got = torch.autograd.grad(table, there, place.to(grad)[0])
        for result, wanted in zip(got, want, strict=True):
            yield result, wanted, 1e-12


def _bias(place: Place, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Triple]:
    def bias(q: Tensor, p: Tensor, beyond: str) -> Tensor:
        if place.emulated:  # what is registered for CUDA
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            return on_cuda(q.to(wide), p.to(wide), 70, -3, beyond).to(q.dtype)
        return ops.relative_bias(q, p, 70, first=-3, beyond=beyond)

    for beyond in ("zero", "edge"):
        q = torch.randn(2, 3, 65, 32, generator=generator).to(dtype)
        p = torch.randn(40, 32, generator=generator).to(dtype)
        grad = torch.randn(2, 3, 65, 70, generator=generator).to(dtype)
        leaves = [t.double().requires_grad_() for t in (q, p)]
        out = ops.relative_bias(*leaves, 70, first=-3, beyond=beyond)
        want = (out, *torch.autograd.grad(out, leaves, grad.double()))
        with place.here():
            there = [t.requires_grad_() for t in place.to(q, p)]
            made = bias(*there, beyond)
            got = (made, *torch.autograd.grad(made, there, place.to(grad)[0]))
        for result, wanted in zip(got, want, strict=True):
            size = wanted.abs().max().item()  # of sums of up to 2000 products
            unit = UNITS[torch.float64 if dtype == torch.float64 else torch.float32]
            yield result.detach(), wanted.detach(), (64 * unit + 4 * UNITS[dtype]) * size


def _attention(place: Place, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Triple]:
    table = ops.relative_table(*wavepe.encoding("wavelet").table(100, 32))
    q, k, v = (torch.randn(2, h, 100, 32, generator=generator).to(dtype) for h in (4, 2, 2))
    want = ops.attention(q.double(), k.double(), v.double(), p=table)
    bound = (2e-5 + 2 * UNITS[dtype]) * want.abs().max().item()
    yield ops.attention(*place.to(q, k, v), p=table), want, bound


def _streams(place: Place) -> Iterator[Triple]:
    """A stream with work ahead of the kernel, and a graph that is captured and replayed."""
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
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(there)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = ops.rope(given, c, s)
    given.copy_(there)
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- fast ----------------------------------------------------------------------------------------


def rivals(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to rotate q and k, half-split, in new tensors; and a copy of the same bytes."""
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
    torch._dynamo.reset()  # a kernel for this length, not one for any
    compiled = torch.compile(apply_rotary_pos_emb, dynamic=False)
    calls["Hugging Face, compiled"] = lambda: compiled(q, k, wide_cos, wide_sin)
    try:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb
    except ImportError:
        return calls
    calls["Liger"] = lambda: liger_rotary_pos_emb(q, k, wide_cos, wide_sin)
    return calls


def time_calls(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least seconds a call of each, in turns."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            least[name] = min(least[name], begin.elapsed_time(end) / 1e3 / CALLS)
    return least


def time_rope() -> Iterator[dict[str, Any]]:
    """Rows: seconds of each way, and the bytes that it has to move."""
    for dtype in FLOATS[:2]:
        for length in LENGTHS:
            q = torch.randn(1, HEADS, length, HEAD_SIZE, device="cuda", dtype=dtype)
            k = torch.randn(1, KEY_HEADS, length, HEAD_SIZE, device="cuda", dtype=dtype)
            inv_freq = torch.from_numpy(wavepe.rope_frequencies(HEAD_SIZE)[0]).cuda()
            cos, sin = ops.rope_table(torch.arange(length, device="cuda"), inv_freq)
            moved = 2 * (q.numel() + k.numel()) * q.element_size()
            seconds = time_calls(rivals(q, k, cos, sin))
            yield {
                "dtype": _short(dtype),
                "length": length,
                "bytes": moved,
                "seconds": seconds,
                "of_copy": seconds["copy"] / seconds["wavepe"],
            }


def print_times(rows: list[dict[str, Any]]) -> None:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"\nrope_qk, half-split, {HEADS} + {KEY_HEADS} heads of {HEAD_SIZE}; microseconds:")
    for row in rows:
        times = ", ".join(f"{name} {1e6 * s:.1f}" for name, s in row["seconds"].items())
        share = f"{row['of_copy']:.2f} of a copy's speed"
        if row["bytes"] > 2 * cache:
            share += f", {row['bytes'] / row['seconds']['wavepe'] / 1e9:.0f} GB/s"
        print(f"  {row['dtype']} {row['length']}: {times}; {share}")


# ---- both ----------------------------------------------------------------------------------------


def emulate(arguments: Sequence[str]) -> int:
    """The whole command again, on a build whose CUDA kernels run on the CPU."""
    places = (f"--build-base={EMULATED}", f"--build-lib={EMULATED / 'lib'}")
    environment = {**os.environ, "WAVEPE_EMULATE_CUDA": "1"}
    build = [sys.executable, "setup.py", "--quiet", "build", *places]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"the emulation could not be built:\n{done.stderr[-4000:]}", file=sys.stderr)
        return 1
    environment |= {"PYTHONPATH": f"{EMULATED / 'lib'}{os.pathsep}{ROOT}"}
    again = [sys.executable, "-m", "benchmarks.gpu", "--emulated", *arguments]
    return subprocess.run(again, cwd=ROOT, env=environment).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if a result is wrong."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument("--emulated", action="store_true", help="this build is an emulation")
    args = parser.parse_args(argv)
    there = torch.cuda.is_available() and not args.emulated
    if not (there or args.emulated):
        return emulate(sys.argv[1:] if argv is None else argv)
    name = torch.cuda.get_device_name() if there else "none: kernels emulated on the CPU"
    print(f"GPU: {name}; torch {torch.__version__}, wavepe for {wavepe.build_info()['cuda_archs']}")
    checks = []
    for found in check(Place("cuda" if there else "cpu")):
        checks.append(found)
        error = f"{found.error:.2f} of the bound, {found.largest:.1e} absolute"
        print(f"  {'ok' if found.ok else 'WRONG':5} {found.name}: {error}", flush=True)
    rows = list(time_rope()) if there else []
    if rows:
        print_times(rows)
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": name,
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        **commit(),
    }
    kept = [{"name": c.name, "error": c.error, "largest": c.largest} for c in checks]
    keep({"environment": about, "checks": kept, "rows": rows}, args.json)
    right = all(found.ok for found in checks)
    if not there:
        left = torch.ops.wavepe.emulate_cuda(False)
        print(f"{left} kernels were never launched" if left else "every kernel was launched")
        print("no GPU: nothing was timed, and what ran was the emulation of the kernels on the CPU")
        right = right and left == 0
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
