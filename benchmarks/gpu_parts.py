"""Where the time of attention on a GPU goes: the host, each kernel, its tiles, decoding.

A measurement is a generator of lines. On a CPU each runs at a toy size, to try the code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from wavepe import ops

from . import gpu_attention
from .gpu_measure import Place, time_calls

CALLS = 50  # of a call that the host limits
# The options of launches that are tried for each kernel, beside those that are shipped.
TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": (
        *((128, 128, 8, 2), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3)),
        *((128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 8, 3)),
    ),
    "queries": (
        *((64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((128, 64, 8, 2), (64, 64, 8, 2), (32, 64, 4, 3)),
    ),
    "keys": (
        *((64, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3), (32, 64, 4, 2)),
        *((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3)),
    ),
}
# The products of matrices of a kernel, each of 2 d operations for a query and a key that it sees.
PRODUCTS = {"attention_forward": 2, "attention_backward_queries": 3, "attention_backward_keys": 4}
HEADS, KEY_HEADS = 32, 8
PROGRAM = """
import os, sys, torch
from wavepe import ops
q = torch.randn(1, 2, 64, 64, device=sys.argv[1], requires_grad=True)
ops.attention(q, q, q).sum().backward()
sys.stdout.flush()
if sys.argv[2] == "at once":
    os._exit(0)
"""


class Line(NamedTuple):
    name: str
    value: float | None  # None: the name says it
    unit: str


# ---- the machine ---------------------------------------------------------------------------------


def probe(place: Place) -> Iterator[Line]:
    """Yield the ceilings: a copy, and a product of matrices. Without them no rate says much."""
    on_gpu = not place.emulated
    source = torch.empty(1 << (30 if on_gpu else 20), dtype=torch.uint8, device=place.device)
    n = 8192 if on_gpu else 64
    a, b = torch.randn(2, n, n, device=place.device, dtype=torch.bfloat16)
    calls = {"copy": source.clone, "matmul": lambda: a @ b}
    seconds = time_calls(calls, place.device, 5 if on_gpu else 1)
    yield Line("copy", 2e-9 * source.numel() / seconds["copy"], "GB/s")
    yield Line("matmul, bfloat16", 2e-12 * n**3 / seconds["matmul"], "TFLOP/s")
    yield from cache()


def cache() -> Iterator[Line]:
    """Yield what tells whether kernels that were compiled elsewhere can serve here."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    count = sum(1 for _ in folder.rglob("*.cubin")) if folder.is_dir() else 0
    yield Line("compiled kernels in the cache", count, "")
    import triton

    library = Path(triton.__file__).parent / "_C" / "libtriton.so"
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    yield Line(f"libtriton {triton.__version__}, {digest[:12]}", None, "")


# ---- the host ------------------------------------------------------------------------------------


def host(place: Place) -> Iterator[Line]:
    """Yield the microseconds of short calls, which the host limits, in several ways."""
    from wavepe.ops._attention_gpu import plans

    from . import gpu_host

    with contextlib.ExitStack() as stack:
        if place.emulated:
            gpu_host._stub()
            stack.enter_context(gpu_host.on_a_gpu())
        for case in ("wavelets", "plain"):
            leaves, options = gpu_host.inputs(case, *((16, 16) if place.emulated else (128, 128)))
            inputs = gpu_attention.Problem(*place.to(*leaves, leaves[0].detach()), None)
            way_of = functools.partial(ops.attention, **options)
            planned = gpu_attention._calls(way_of, inputs)
            anew = gpu_attention._calls(functools.partial(way_of, scale=0.5), inputs)
            for phase, *calls in zip(gpu_host.PHASES, planned, anew, strict=True):
                for way in ("plan", "dispatcher", "no plan", "plan, one thread"):
                    call = calls[way == "no plan"]  # another scale has no plan yet
                    with _way(way, plans, gpu_host.take, place):
                        yield Line(f"{case}, {phase}, {way}", _host_time(call, place), "us")
        yield from _host_of_others(place)


@contextlib.contextmanager
def _way(way: str, plans: Any, take: Callable[[str], None], place: Place) -> Iterator[None]:
    """Let calls go one way: by a plan, through the dispatcher, or worked out anew each time."""
    if place.emulated or way == "dispatcher":
        take("plan" if way.startswith("plan") else "operator")
    if way == "no plan":
        plans.RECORDS = False
    threads = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(way != "plan, one thread")
    try:
        yield
    finally:
        plans.RECORDS = True
        torch.autograd.set_multithreading_enabled(threads)
        if way == "dispatcher" and not place.emulated:
            from wavepe.ops import _attention, _attention_gpu

            _attention.serves = _attention_gpu.serves


def _host_time(call: Callable[[], Any], place: Place) -> float:
    """Return the least microseconds of a call, with the wait for the last one."""
    count = 2 if place.emulated else CALLS
    best = math.inf
    for _ in range(2 if place.emulated else 7):
        call()
        _wait(place)
        began = time.perf_counter()
        for _ in range(count):
            call()
        _wait(place)
        best = min(best, (time.perf_counter() - began) / count)
    return 1e6 * best


def _wait(place: Place) -> None:
    if not place.emulated:
        torch.cuda.synchronize()


def _host_of_others(place: Place) -> Iterator[Line]:
    shape = (1, 4, 128, 128) if not place.emulated else (1, 2, 16, 16)
    tensors = torch.randn(4, *shape, dtype=torch.bfloat16, device=place.device)
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for backend in (SDPBackend.MATH,) if place.emulated else backends:
        way = gpu_attention._sdpa(backend)
        calls = gpu_attention._calls(way, gpu_attention.Problem(*tensors, None))
        for phase, call in zip(("forward", "forward + backward"), calls, strict=True):
            name = backend.name.split("_")[0].lower()
            yield Line(f"SDPA {name}, {phase}", _host_time(call, place), "us")


# ---- kernels -------------------------------------------------------------------------------------


def steps(place: Place, d: int, length: int) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of attention, without a table, with a constant and a learned."""
    inputs = gpu_attention.problem(place, d, length)
    place.needs_kernel(inputs.q)
    attention = place.attention()
    tables = {"plain": None, "wavelet": inputs.table, "learned": gpu_attention._rows(inputs)}
    calls: dict[str, Callable[[], Any]] = {}
    for table, p in tables.items():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        if table == "learned":
            leaves.append(p.requires_grad_())

        def step(scale: float | None = None, p: Any = p, leaves: list[Tensor] = leaves) -> Any:
            out = attention(*leaves[:3], p=p, scale=scale)
            return torch.autograd.grad(out, leaves, inputs.grad)

        calls[table] = step
    return calls


def kernels(place: Place, d: int, length: int) -> Iterator[Line]:
    """Yield the time of each kernel of a training step of attention, and its rate."""
    pairs = (2 if place.emulated else gpu_attention.ROWS // length) * length * (length + 1) / 2
    for table, both in steps(place, d, length).items():
        total = 0.0
        for kernel, seconds in kernel_seconds(both, place).items():
            total += seconds
            yield Line(f"{table}, {kernel}", 1e6 * seconds, "us")
            products = [count for name, count in PRODUCTS.items() if kernel.startswith(name)]
            if products:
                flops = 2 * d * pairs * products[0]
                yield Line(f"{table}, {kernel}, rate", 1e-12 * flops / seconds, "TFLOP/s")
        yield Line(f"{table}, all kernels", 1e6 * total, "us")


def kernel_seconds(call: Callable[[], Any], place: Place, count: int = 5) -> dict[str, float]:
    """Return the seconds that each kernel of a call takes on the GPU, the slowest first."""
    from torch.profiler import ProfilerActivity, profile

    count = 1 if place.emulated else count
    call()
    activity = ProfilerActivity.CPU if place.emulated else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        for _ in range(count):
            call()
        _wait(place)
    seconds = {}
    for event in profiler.key_averages():
        used = event.self_cpu_time_total if place.emulated else event.self_device_time_total
        if used > 0:
            seconds[event.key[:60]] = 1e-6 * used / count
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:8])


# ---- tiles ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def tile(role: str, rows: int, keys: int, warps: int, stages: int) -> Iterator[None]:
    """Let the launches of a role have these options, in calls that have no plan yet."""
    from wavepe.ops._attention_gpu import launches

    def tuned(of: str, *arguments: Any) -> dict[str, int]:
        options = shipped(of, *arguments)
        if of != role:
            return options
        tile = {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": stages}
        return options | tile

    shipped = launches.tuning
    launches.tuning = tuned
    try:
        yield
    finally:
        launches.tuning = shipped


def next_scale(d: int) -> float:
    """Return about the default scale of head size d, another one each time, so no plan has it."""
    return (1 + 1e-6 * next(_number)) / math.sqrt(d)


_number = itertools.count(1)


def tiles(place: Place, d: int, length: int) -> Iterator[Line]:
    """Yield the time of each kernel with other tiles, if the results are as near as before."""
    inputs = gpu_attention.problem(place, d, length)
    attention = functools.partial(place.attention(), p=inputs.table)
    want = [x.float() for each in gpu_attention._calls(attention, inputs) for x in each()]
    names = dict(zip(("forward", "queries", "keys"), PRODUCTS, strict=True))
    for role, options in TILES.items():
        for option in options[:1] if place.emulated else options:
            name = f"{role} {' '.join(map(str, option))}"
            way = functools.partial(attention, scale=next_scale(d))
            calls = gpu_attention._calls(way, inputs)
            call = calls[role != "forward"]
            with tile(role, *((16, *option[1:]) if place.emulated else option)):
                line = _tried(name, names[role], call, calls, want, place)
            yield line


def _tried(
    name: str, kernel: str, call: Any, calls: Sequence[Any], want: list[Tensor], place: Place
) -> Line:
    """Return the time of a kernel in a call, unless the results of `calls` are not those wanted."""
    try:
        results = [x for each in calls for x in each()]
        seconds = kernel_seconds(call, place, 3)
    except Exception as error:  # such as too much shared memory
        return Line(f"{name}: {gpu_attention.brief(error)[:50]}", None, "us")
    pairs = zip(results, want, strict=True)
    off = max((((x.float() - y).norm() / y.norm()).item() for x, y in pairs), default=0.0)
    wrong = "" if off < 0.01 else f", WRONG by {off:.1g}"
    of_kernel = [s for each, s in seconds.items() if each.startswith(kernel)]
    return Line(f"{name}{wrong}", 1e6 * max(of_kernel or seconds.values()), "us")


def variants(place: Place, d: int, length: int) -> Iterator[Line]:
    """Yield the times of the forward by descriptors of tensors, beside the shipped kernel."""
    from . import gpu_forward_tma as tma

    inputs, attention = gpu_attention.problem(place, d, length)[:3], place.attention()
    chosen = [tma.Variant(16, 16, 4, 2, each) for each in (False, True)]
    for causal in (True, False):
        kind = "causal" if causal else "not causal"
        shipped = functools.partial(attention, *inputs, causal=causal, return_lse=True)
        with torch.no_grad():
            want = [x.float() for x in shipped()]
            yield _tried(f"{kind}, shipped", "attention_forward", shipped, [], [], place)
        for variant in chosen if place.emulated else tma.VARIANTS:
            call = functools.partial(tma.forward, *inputs, variant, causal)
            yield _tried(f"{kind}, {variant}", "forward_tma", call, [call], want, place)


# ---- decoding ------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a module have another value, in calls that have no plan yet."""
    shipped = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, shipped)


def decode(place: Place, n: int, batch: int) -> Iterator[Line]:
    """Yield the times of one query over n keys: eager, in a graph, and of others."""
    d, dtype = (16, torch.float32) if place.emulated else (128, torch.bfloat16)
    heads, key_heads = (4, 2) if place.emulated else (HEADS, KEY_HEADS)
    draw = functools.partial(torch.randn, device=place.device, dtype=dtype)
    q = draw(batch, heads, 1, d)
    k, v = draw(batch, key_heads, n, d), draw(batch, key_heads, n, d)
    import wavepe
    from wavepe.ops._attention_gpu import decode as few
    from wavepe.ops._attention_gpu import launches

    table = ops.relative_table(*wavepe.encoding("wavelet").table(n, d))
    attention = place.attention()
    calls: dict[str, Callable[[], Tensor]] = {
        "wavelet": lambda: attention(q, k, v, p=table),
        "plain": lambda: attention(q, k, v),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    with torch.no_grad():
        want, got = calls["SDPA"](), calls["plain"]()
        yield Line("plain, off SDPA", ((got - want).norm() / want.norm()).item(), "relative")
        for name, seconds in time_calls(calls, place.device, 1 if place.emulated else 5).items():
            yield Line(f"{name}, eager", 1e6 * seconds, "us")
        for name, call in calls.items():
            total = sum(kernel_seconds(call, place).values())
            yield Line(f"{name}, kernels", 1e6 * total, "us")
        ways = {"over tiles": (few, "MOST", 0)}
        shipped = launches.multiprocessors(q.device)
        for each in (1, 3, 4):  # two are shipped
            number = functools.cache(lambda device, each=each: shipped * each // 2)
            ways[f"{each} programs"] = launches, "multiprocessors", number
        for name, way in ways.items():
            call = functools.partial(attention, q, k, v, p=table, scale=next_scale(d))
            with changed(*way):
                total = sum(kernel_seconds(call, place).values())
            yield Line(f"wavelet, {name}, kernels", 1e6 * total, "us")
        if not place.emulated:
            graphs = {name: _replay(call) for name, call in calls.items()}
            for name, seconds in time_calls(graphs, place.device, 5).items():
                yield Line(f"{name}, graph", 1e6 * seconds, "us")
        bytes_read = 2 * k.numel() * k.element_size()
        yield Line("keys and values at 4.3 TB/s", bytes_read / 4.3e6, "us")
        for more in (1, 15):  # the second length is a multiple of 16
            longer = draw(batch, key_heads, n + more, d)
            began = time.perf_counter()
            attention(q, longer, longer)
            _wait(place)
            yield Line(f"the first call with {more} keys more", time.perf_counter() - began, "s")


def _replay(call: Callable[[], Any]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- the operators in CUDA C ---------------------------------------------------------------------


def tables(place: Place) -> Iterator[Line]:
    """Yield the times of the small operators, and of skew beside a copy of its result."""
    import wavepe

    m, heads = (64, 1) if place.emulated else (4096, 8)
    rounds = 1 if place.emulated else 5
    where = {"device": place.device}
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(128)[0]).to(place.device)
    positions = torch.arange(m, **where)
    scale, shift = (torch.from_numpy(x).to(**where).float() for x in wavepe.wavelet_grid(128))
    leaves = [x.requires_grad_() for x in (scale, shift)]
    grad = torch.randn(m, 128, **where)
    wavelets = functools.partial(ops.wavelet_table, positions)
    calls: dict[str, Callable[[], Any]] = {
        "rope_table": lambda: ops.rope_table(positions, inv_freq),
        "wavelet_table": lambda: wavelets(scale.detach(), shift.detach()),
        "wavelet_table, with gradients": lambda: torch.autograd.grad(
            wavelets(*leaves), leaves, grad
        ),
    }
    t, skewed = torch.randn(heads, m, 832, **where), torch.randn(heads, m, m, **where)
    raw = torch.ops.wavepe
    calls |= {"copy of scores": skewed.clone}
    for beyond in ("zero", "edge"):
        calls[f"skew, {beyond}"] = functools.partial(raw.relative_bias_skew, t, m, 0, beyond)
        calls[f"unskew, {beyond}"] = functools.partial(
            raw.relative_bias_unskew, skewed, 832, 0, beyond
        )
    with place.kernels_in_use() if place.emulated else contextlib.nullcontext():
        seconds = time_calls(calls, place.device, rounds)
    for name, each in seconds.items():
        yield Line(name, 1e6 * each, "us")
    for name in calls:
        if "skew" in name:
            share = 100 * seconds["copy of scores"] / seconds[name]
            yield Line(f"{name}, of a copy of the scores", share, "%")


# ---- processes -----------------------------------------------------------------------------------


def exits(place: Place) -> Iterator[Line]:
    """Yield how many short processes are aborted at their end, by how they end."""
    count, together = (1, 2) if place.emulated else (12, 8)
    ways = [way for _ in range(count) for way in ("as usual", "at once")]

    def code(way: str) -> int:
        command = [sys.executable, "-c", PROGRAM, place.device, way]
        return subprocess.run(command, capture_output=True, timeout=120).returncode

    with ThreadPoolExecutor(together) as pool:
        codes = list(pool.map(code, ways))
    for way in ("as usual", "at once"):
        of_way = [c for c, each in zip(codes, ways, strict=True) if each == way]
        yield Line(f"ended {way}: aborted of {len(of_way)}", sum(map(bool, of_way)), "")


def sanitizer(place: Place, tool: str, seconds: float) -> Iterator[Line]:
    """Yield the hazards that compute-sanitizer sees in attention and in the kernels of CUDA C."""
    checks = ("check wavelet", "check learned table", "check bias", "check dropout")
    task = [sys.executable, "-m", f"{__package__}.gpu_tasks", str(seconds - 5), *checks]
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *task]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, errors="replace")
    lines = (done.stdout + done.stderr).splitlines()
    reports = [line for line in lines if "=========" in line]
    bad = [x for x in reports if "hazard" in x.lower() or "Invalid" in x or "ERROR SUMMARY" in x]
    for line in itertools.islice(dict.fromkeys(bad), 6):
        yield Line(line.strip("= ")[:90], None, "")
    rows = sum(line.startswith("{") and '"checks"' in line for line in lines)
    yield Line(f"checks that ended, of {len(checks)}", rows, "")
    yield Line("exit code", done.returncode, "")
