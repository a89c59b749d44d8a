"""Measure the cost of the multi-scale rotation, which wavepe dropped, against RoPE and wavelets.

`python -m benchmarks.multiscale_rope` measures and prints; `--json FILE` keeps the figures, for
docs/internals/rope-speed.md. There is one thread, and the dtype is float32. The calls take turns,
and the fastest of each counts.

The ways to give attention the positions of q and k
    none         attention alone
    rope         the rotation (interleaved pairs), then attention
    wavelet      attention with a table of wavelets
    matrices     analysis.multiscale_rope_matrix: a d x d matrix for each position of q and k
    prefix sums  the same numbers, computed faster. The blocks (i, j) with j <= i are all the
                 rotation of pair i, so their sum is the rotation of the sum of the pairs 0 to i
The results are compared to the matrices in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor
from wavepe.analysis import multiscale_rope_matrix

from .attention_inputs import Inputs
from .bench_attention import trained, with_gradients
from .command import measuring_command
from .command import table as markdown
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

HEADS, HEAD_SIZE, LENGTHS = 8, 64, (256, 512, 1024, 2048)
WAYS = ("none", "rope", "wavelet", "matrices", "prefix sums")

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def turns(length: int, d: int) -> tuple[dict[str, Turn], dict[str, int]]:
    """Return what each way does to q and k, (1, heads, length, d), and the bytes of its tables."""
    matrices = np.empty((length, d, d), np.float32)
    for position in range(length):
        matrices[position] = multiscale_rope_matrix(position, d)
    held = torch.from_numpy(matrices)
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(d)[0])
    cos, sin = ops.rope_table(torch.arange(length), inv_freq)

    def rope(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rope_qk(q, k, cos, sin, interleaved=True)

    def by_matrices(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply (d, d) by (d, heads) for each position."""
        q, k = ((held @ x[0].permute(1, 2, 0)).permute(2, 0, 1)[None] for x in (q, k))
        return q, k

    def by_prefix_sums(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.unflatten(-1, (-1, 2)).cumsum(-2).flatten(-2) for x in (q, k))
        return rope(q, k)

    tables = cos.nbytes + sin.nbytes
    functions = {"rope": rope, "matrices": by_matrices, "prefix sums": by_prefix_sums}
    return functions, {"rope": tables, "matrices": held.nbytes, "prefix sums": tables}


def error(turn: Turn, x: Inputs) -> float:
    """Return the largest error of q and k, over the largest exact number, at 64 positions."""
    few = slice(min(64, x.length))
    exact = np.stack([multiscale_rope_matrix(m, x.q.shape[-1]) for m in range(few.stop)])
    worst = 0.0
    for got, source in zip(turn(x.q, x.k), (x.q, x.k), strict=True):
        right = np.einsum("nij,hnj->hni", exact, source[0, :, few].double().numpy())
        apart = np.abs(got[0, :, few].double().numpy() - right).max()
        worst = max(worst, float(apart / np.abs(right).max()))
    return worst


def row(heads: int, length: int, d: int, repeats: int) -> dict:
    """Measure every way at one length; return the row."""
    x = Inputs.make(heads, length, d)
    functions, held = turns(length, d)
    known = ops.relative_table(x.p)
    attend: dict[str, Callable] = {"none": ops.attention}
    attend["wavelet"] = lambda q, k, v: ops.attention(q, k, v, p=known)
    for name, turn in functions.items():
        attend[name] = lambda q, k, v, turn=turn: ops.attention(*turn(q, k), v)
    leaves = trained(x, "q", "k", "v")
    calls: dict[tuple[str, str], Callable] = {}
    for name in WAYS:
        calls["forward", name] = lambda call=attend[name]: call(x.q, x.k, x.v)
        calls["with gradients", name] = with_gradients(attend[name], leaves, x.grad)
    for name, turn in functions.items():
        calls["q and k alone", name] = lambda turn=turn: turn(x.q, x.k)
    timings = take_turns(calls, repeats=repeats, budget=120, warm_up=2)
    return {
        "heads": heads,
        "length": length,
        "head_size": d,
        "bytes": {**held, "none": 0, "wavelet": x.p.nbytes},
        "seconds": {
            kind: {name: timings[kind, name].summary() for k, name in timings if k == kind}
            for kind in dict.fromkeys(kind for kind, _ in timings)
        },
        "errors": {name: error(functions[name], x) for name in ("matrices", "prefix sums")},
    }


def measure(
    repeats: int, heads: int = HEADS, d: int = HEAD_SIZE, lengths: Sequence[int] = LENGTHS
) -> dict:
    """Measure all rows with one thread; return them ready for JSON."""
    about = {**surroundings("wavepe", "torch"), "threads": 1}
    with prepared(1):
        rows = [row(heads, length, d, repeats) for length in lengths]
    return {"environment": about, "rows": rows}


def table(results: dict) -> str:
    """Return the times over RoPE's as Markdown."""
    columns = {
        "q and k alone": ("matrices", "prefix sums"),
        "forward": ("matrices", "prefix sums", "wavelet"),
        "with gradients": ("matrices", "prefix sums", "wavelet"),
    }
    chosen = [(kind, name) for kind, names in columns.items() for name in names]
    rows = []
    for one in results["rows"]:
        fastest = {
            (kind, name): timing["min"]
            for kind, names in one["seconds"].items()
            for name, timing in names.items()
        }
        ratios = [f"{fastest[kind, name] / fastest[kind, 'rope']:.2f}" for kind, name in chosen]
        held, beside = one["bytes"]["matrices"], one["bytes"]["rope"]
        size = f"{held / 2**20:.0f} MiB, {held / beside:.0f} times RoPE's"
        rows.append((str(one["length"]), *ratios, size))
    heads = ("length", *(f"{kind}: {name}" for kind, name in chosen), "held: matrices")
    return markdown(heads, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    return measuring_command(__doc__, measure, table, argv, repeats=41)


if __name__ == "__main__":
    sys.exit(main())
