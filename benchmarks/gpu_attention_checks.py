"""Check attention on a GPU against the CPU's operator in float64, on the same numbers.

float16 and bfloat16 can represent the numbers exactly. So one float64 result serves every dtype,
and all errors are those of the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .gpu_measure import UNITS, Check, Place, Triple, worst

SEED = 5
DIFFERENTIABLE = ("q", "k", "v", "p", "q_rel", "bias")
# Bounds. FLOAT32 is relative to the largest value: scores of up to 50 are rounded, by 3e-6 each.
# LOW_ROW and LOW are for the other dtypes, in which the table, the weights, their gradients and the
# result are rounded once. LOW_ROW is relative to the norm of a row plus a tenth of the usual norm.
# LOW is relative to the norm of all rows. It is for gradients of queries, whose sums may cancel.
FLOAT32, LOW_ROW, LOW = 6e-6, 6.0, 2.0


class Size(NamedTuple):
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    m: int = 200
    n: int = 200
    d: int = 64


TOY = Size(1, 2, 1, 65, 65, 16)
TOY_NAMES = ("wavelet", "learned table", "bias", "dropout", "bits")


def numbers(*shape: int, generator: torch.Generator, size: float = 1.0) -> Tensor:
    """Return float64 numbers that bfloat16 and float16 can represent."""
    drawn = size * torch.randn(shape, generator=generator)
    return drawn.bfloat16().half().double()


def wavelets(size: Size, causal: bool = True) -> ops.RelativeTable:
    table = wavepe.encoding("wavelet").table(max(size.n, 64), size.d, causal=causal)
    return ops.relative_table(*table)


def _edge(s: Size, g: torch.Generator) -> dict[str, Any]:
    p = numbers(s.heads, 40, s.d, generator=g, size=0.3)
    q_rel = numbers(s.batch, s.heads, s.m, s.d, generator=g)
    return {"p": p, "first": 2, "beyond": "edge", "q_rel": q_rel}


def _mask(s: Size, g: torch.Generator) -> dict[str, Any]:
    seen = torch.rand(s.batch, s.n, generator=g) > 0.2
    seen[:, s.n // 3 : s.n // 2] = False
    return {"key_mask": seen, "p": wavelets(s)}


def _segments(s: Size, g: torch.Generator) -> dict[str, Any]:
    return {"segments": torch.arange(s.n).expand(s.batch, -1) * 3 // s.n, "p": wavelets(s)}


Options = Callable[[Size, torch.Generator], dict[str, Any]]
CASES: dict[str, Options] = {
    "wavelet": lambda s, g: {"p": wavelets(s)},
    "learned table": lambda s, g: {"p": numbers(90, s.d, generator=g, size=0.3)},
    "no table": lambda s, g: {},
    "wavelet, not causal": lambda s, g: {"p": wavelets(s, False), "causal": False},
    "edge, per head, q_rel": _edge,
    "bias": lambda s, g: {
        "bias": torch.randn(s.heads, 70, generator=g).double(),
        "bias_beyond": "edge",
    },
    "slopes": lambda s, g: {"slopes": 2.0 ** -torch.arange(1.0, s.heads + 1).double()},
    "key_mask": _mask,
    "segments": _segments,
    "window": lambda s, g: {"window": s.n // 3, "p": wavelets(s)},
    "offsets": lambda s, g: {"offset": torch.arange(s.batch) * 7 - 2, "p": wavelets(s)},
    "softcap": lambda s, g: {"softcap": 5.0, "p": wavelets(s)},
    "dropout": lambda s, g: {"dropout_p": 0.3, "p": wavelets(s)},
    "decode": lambda s, g: {"p": wavelets(s)},
}
# The tasks whose sizes are not Size(), and their sizes.
SIZES: dict[str, list[Size]] = {
    f"wavelet, d {d}": [Size(1, 4, 2, 300, 300, d)] for d in (80, 128, 256)
}
SIZES |= {f"learned table, d {d}": [Size(1, 4, 2, 300, 300, d)] for d in (80, 128, 256)}
SIZES["wavelet, lengths"] = [Size(m=n, n=n) for n in (1, 127, 128, 1000)]
SIZES["learned table, lengths"] = SIZES["wavelet, lengths"]
SIZES["offsets"] = [Size(m=50, n=201)]
SIZES["decode"] = [Size(1, 8, 2, 1, 300), Size(3, 8, 2, 1, 1000, 128), Size(2, 8, 1, 5, 129)]
SIZES |= {f"{name}, decode": SIZES["decode"] for name in ("learned table", "key_mask", "softcap")}
# Tasks for a GPU only, except "bits", "compile" and "large".
ALONE = ("bits", "graph", "compile", "stream", "reduce-overhead", "first call in a graph", "large")
NAMES = (*dict.fromkeys((*CASES, *SIZES)), *ALONE)


def judged(
    q: Tensor, k: Tensor, v: Tensor, *, p: Any, seed: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the CPU's operator, differentiable; `seed` is that of dropout."""
    from wavepe.ops._attention_checks import Arguments

    if isinstance(p, ops.RelativeTable):
        options["beyond"] = p.beyond
        p, options["first"], _ = p.tensors(q.dtype, q.device)
    call = Arguments(q, k, v, p=p, seed=seed, **options)
    return torch.ops.wavepe.attention_forward(*call)


def outputs(
    function: Callable[..., Any], tensors: dict[str, Any], grads: list[Tensor]
) -> dict[str, Tensor]:
    """Return out, lse and every gradient, by name."""
    tensors = dict(tensors)
    leaves = {
        name: tensors[name].detach().requires_grad_()
        for name in DIFFERENTIABLE
        if isinstance(tensors.get(name), Tensor)
    }
    out, lse = function(**tensors | leaves)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(place: Place, name: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[Check]:
    """Run the task `name`, one of NAMES; yield a check for each dtype."""
    if name in ALONE:
        checks = (_bits, _graph, _compiled, _stream, _reduced, _first_in_a_graph, _large)
        check_alone = dict(zip(ALONE, checks, strict=True))[name]
        yield worst(f"attention: {name}", _alone_dtype(place), check_alone(place))
        return
    if name.endswith("d 256"):  # which has no kernels for float32
        dtypes = tuple(dtype for dtype in dtypes if dtype != torch.float32)
    by_dtype: dict[torch.dtype, list[Triple]] = {dtype: [] for dtype in dtypes}
    for size in [TOY] if place.emulated else SIZES.get(name, [Size()]):
        for dtype, triples in _case(place, name, size, dtypes):
            by_dtype[dtype] += triples
    for dtype in dtypes:
        yield worst(f"attention: {name}", dtype, by_dtype[dtype])


def draw(name: str, size: Size) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments of a case, and the incoming gradients of out and lse."""
    s, generator = size, torch.Generator().manual_seed(SEED)
    shapes = {"q": (s.heads, s.m), "k": (s.key_heads, s.n), "v": (s.key_heads, s.n)}
    tensors: dict[str, Any] = {
        which: numbers(s.batch, *shape, s.d, generator=generator) for which, shape in shapes.items()
    }
    grads = [numbers(s.batch, s.heads, s.m, s.d, generator=generator)]
    grads.append(torch.randn(s.batch, s.heads, s.m, generator=generator).double())
    build = CASES[name] if name in CASES else CASES[name.split(",")[0]]
    return {"p": None, **tensors, **build(s, generator)}, grads


def kernel_argument(place: Place, name: str, x: Any, dtype: torch.dtype) -> Any:
    """Return an argument on the GPU, in the dtype that the kernels take."""
    if not isinstance(x, Tensor):
        return x
    wide = name in ("bias", "slopes", "lse")
    return x.to(place.device, (torch.float32 if wide else dtype) if x.is_floating_point() else None)


def _case(
    place: Place, name: str, size: Size, dtypes: tuple[torch.dtype, ...]
) -> Iterator[tuple[torch.dtype, list[Triple]]]:
    tensors, grads = draw(name, size)
    torch.manual_seed(SEED)
    seed = torch.randint(2**62, (), device=place.device).cpu()
    exact = outputs(lambda **options: judged(seed=seed, **options), tensors, grads)
    attention = place.attention()
    for dtype in dtypes:
        options = {n: kernel_argument(place, n, x, dtype) for n, x in tensors.items()}
        incoming = [
            kernel_argument(place, n, x, dtype) for n, x in zip(("out", "lse"), grads, strict=True)
        ]
        place.needs_kernel(options["q"])
        torch.manual_seed(SEED)
        results = outputs(lambda **o: attention(**o, return_lse=True), options, incoming)
        yield dtype, [_triple(n, x, exact[n], dtype) for n, x in results.items()]


def _triple(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> Triple:
    """Return the result, the exact values and the bound, or an error, 0 and its bound.

    The lse of a row that sees no key is -inf in both; equal values of lse are ignored.
    """
    got, want = got.cpu().double(), want.double()
    same = got == want  # -inf - -inf would be NaN
    got, want = (x.masked_fill(same, 0.0) if name == "lse" else x for x in (got, want))
    if dtype == torch.float32:
        return got, want, FLOAT32 * max(want.abs().max().item(), 1e-3)
    if name in ("q", "q_rel"):
        error, size, units = (got - want).norm(), want.norm(), LOW
    else:
        error, size, units = (got - want).norm(dim=-1), want.norm(dim=-1), LOW_ROW
        size = size + 0.1 * size.square().mean().sqrt()
    return error / size.clamp(min=1e-3), torch.zeros(()), units * UNITS[dtype]


# ---- the same bits -------------------------------------------------------------------------------


def _alone_dtype(place: Place) -> torch.dtype:
    return torch.float32 if place.emulated else torch.bfloat16


def _problem(place: Place) -> tuple[Callable[..., Any], dict[str, Any], list[Tensor]]:
    """Return a function that calls attention with a learned table, then with wavelets."""
    dtype = _alone_dtype(place)
    size = TOY._replace(m=5, n=5) if place.emulated else Size(n=500, m=500)
    tensors, grads = draw("learned table", size)
    attention, table = place.attention(), wavelets(size)

    def function(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Any:
        first = attention(q, k, v, p=p)
        return attention(first, k, v, p=table, return_lse=True)

    options = {n: kernel_argument(place, n, tensors[n], dtype) for n in ("q", "k", "v", "p")}
    incoming = [
        kernel_argument(place, n, x, dtype) for n, x in zip(("out", "lse"), grads, strict=True)
    ]
    place.needs_kernel(options["q"])
    return function, options, incoming


def _differing(results: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Triple]:
    """Yield the number of elements that differ, which must be 0."""
    for name, x in results.items():  # != also counts NaN
        yield (x != want[name]).sum().double(), torch.zeros(()), 0.5


def _bits(place: Place) -> Iterator[Triple]:
    problem = _problem(place)
    first = outputs(*problem)
    for _ in range(1 if place.emulated else 5):
        yield from _differing(outputs(*problem), first)


def _graph(place: Place) -> Iterator[Triple]:
    """Capture forward and backward in a CUDA graph on zeros, and replay it on the numbers."""
    function, tensors, grads = _problem(place)
    want = outputs(function, tensors, grads)
    static = {name: x.clone().zero_() for name, x in tensors.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            outputs(function, static, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(function, static, grads)
    for name, x in tensors.items():
        static[name].copy_(x)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        yield from _differing(captured, want)


def _compiled(place: Place) -> Iterator[Triple]:
    """Compare a compiled function with the eager one."""
    function, tensors, grads = _problem(place)
    want = outputs(function, tensors, grads)
    yield from _differing(outputs(torch.compile(function, fullgraph=True), tensors, grads), want)


def _stream(place: Place) -> Iterator[Triple]:
    """Run on another stream, behind work that fills the inputs late."""
    function, tensors, grads = _problem(place)
    want = outputs(function, tensors, grads)
    late, stream = {name: torch.zeros_like(x) for name, x in tensors.items()}, torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name, x in tensors.items():
            late[name].copy_(x)
        results = outputs(function, late, grads)
    stream.synchronize()
    yield from _differing(results, want)


def _reduced(place: Place) -> Iterator[Triple]:
    """Compare a function that torch.compile captures in CUDA graphs with the eager one."""
    function, tensors, grads = _problem(place)
    want = outputs(function, tensors, grads)
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):  # it warms up, captures, and replays
        torch.compiler.cudagraph_mark_step_begin()
        results = {name: x.clone() for name, x in outputs(compiled, tensors, grads).items()}
    yield from _differing(results, want)


def _first_in_a_graph(place: Place) -> Iterator[Triple]:
    """Capture a call whose kernels were never launched: it is an error, or the replay is right."""
    function, tensors, _ = _problem(place)
    q, k, v, p = (tensors[name] for name in ("q", "k", "v", "p"))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = function(q, k, v, p)[0]
    except RuntimeError:
        return
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        yield from _differing({"out": captured}, {"out": function(q, k, v, p)[0]})


def _large(place: Place) -> Iterator[Triple]:
    """Compare the last head of more than 2^31 elements with a call of this head alone."""
    heads, length, d = (2, 17, 16) if place.emulated else (64, 270_000, 128)
    attention, dtype = place.attention(), _alone_dtype(place)
    draw = functools.partial(torch.randn, device=place.device, dtype=dtype)
    q, grad = draw(1, heads, length, d), draw(1, heads, length, d)
    k, v = draw(1, 1, length, d), draw(1, 1, length, d)
    table = ops.relative_table(*wavepe.encoding("wavelet").table(min(length, 1024), d))

    def of(q: Tensor, grad: Tensor) -> dict[str, Tensor]:
        leaf = q.detach().requires_grad_()
        out = attention(leaf, k, v, p=table, window=512)
        return {"out": out.detach(), "q": torch.autograd.grad(out, leaf, grad)[0]}

    last = {name: x[:, -1:].clone() for name, x in of(q, grad).items()}
    yield from _differing(last, of(q[:, -1:], grad[:, -1:]))
