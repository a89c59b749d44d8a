"""A forward of attention by descriptors of tensors (TMA), with specialised warps, to be measured.

`gpu_window why` compares it with the shipped kernel, and no call of wavepe reaches it. It knows
contiguous tensors without a term, causal or not, and no masks. Descriptors copy whole tiles to
shared memory, without an address for each row. With `specialized` some warps only copy, and the
others multiply.

`python -m benchmarks.gpu_forward_tma` compiles it without a GPU and prints registers, shared
memory, and instructions of the loop over whole blocks of keys.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import attention_kernels
from .command import new_parser, table

_LOG2E = 1 / math.log(2)


class Variant(NamedTuple):
    rows: int  # queries of a program
    keys: int  # of a step
    warps: int
    stages: int
    specialized: bool

    def __str__(self) -> str:
        words = f"{self.rows} x {self.keys}, {self.warps} warps, {self.stages} stages"
        return words + ", specialised" * self.specialized


VARIANTS = (
    Variant(128, 64, 8, 3, False),
    Variant(128, 128, 8, 2, False),
    Variant(128, 64, 4, 3, True),
    Variant(128, 128, 4, 2, True),
    Variant(128, 64, 4, 2, True),
)


@triton.jit
def _attend(
    acc, peak, total, queries, keys, values, low, high, limit, factor,
    KEYS: tl.constexpr, MASKED: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Return acc, peak and total with keys low..high - 1; a query sees those below its limit."""
    for start in tl.range(low, high, KEYS, warp_specialize=SPECIALIZED):
        s = tl.dot(queries, keys.load([start, 0]).T, input_precision="ieee")
        if MASKED:
            seen = tl.arange(0, KEYS)[None, :] < (limit - start)[:, None]
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1) * factor)
        weights = tl.exp2(s * factor - new[:, None])
        shrink = tl.exp2(peak - new)
        total = total * shrink + tl.sum(weights, 1)
        v = values.load([start, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new
    return acc, peak, total


@triton.jit
def forward_tma(
    q, k, v, out, lse, m, n, group, factor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Write out and lse; `factor` is scale * log2(e). The last queries start first."""
    blocks = tl.cdiv(m, ROWS)
    pair, row = tl.program_id(0) // blocks, (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    of_queries, of_keys = pair.to(tl.int64) * m * SIZE, (pair // group).to(tl.int64) * n * SIZE
    queries = tl.make_tensor_descriptor(q + of_queries, [m, SIZE], [SIZE, 1], [ROWS, SIZE])
    keys = tl.make_tensor_descriptor(k + of_keys, [n, SIZE], [SIZE, 1], [KEYS, SIZE])
    values = tl.make_tensor_descriptor(v + of_keys, [n, SIZE], [SIZE, 1], [KEYS, SIZE])
    results = tl.make_tensor_descriptor(out + of_queries, [m, SIZE], [SIZE, 1], [ROWS, SIZE])
    i = row + tl.arange(0, ROWS)
    limit, whole, high = tl.zeros((ROWS,), tl.int32) + n, n // KEYS * KEYS, n
    if CAUSAL:
        after = n - m + 1  # the first query sees so many keys
        limit = tl.minimum(limit, i + after)
        whole = tl.minimum(whole, (row + after) // KEYS * KEYS)
        high = tl.minimum(n, row + n - m + ROWS)
    x = queries.load([row, 0])
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    # Triton 3.6 to 3.9 specialise the warps of an sm_90 only if no other product of matrices comes
    # before or after the loop, and nothing in it branches. So there all blocks of keys are masked.
    if SPECIALIZED:
        acc, peak, total = _attend(
            acc, peak, total, x, keys, values, 0, high, limit, factor, KEYS, True, True
        )
    else:
        acc, peak, total = _attend(
            acc, peak, total, x, keys, values, 0, whole, limit, factor, KEYS, False, False
        )
        acc, peak, total = _attend(
            acc, peak, total, x, keys, values, whole, high, limit, factor, KEYS, True, False
        )
    results.store([row, 0], (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(lse + pair * m + i, (peak + tl.log2(total)) * 0.6931471805599453, i < m)


def forward(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Return out and lse of q (B, H, m, d), k and v (B, Hk, n, d), where m <= n."""
    _, _, m, d = q.shape
    n = k.shape[2]
    if not 0 < m <= n or d not in (16, 32, 64, 128, 256) or v.shape != k.shape:
        raise ValueError(
            "the forward by descriptors needs 1 <= m <= n, a head size of 16, 32, 64, 128 or 256, "
            f"and v like k; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch(forward_tma, q, k, v, out, lse, variant, causal)
    return out, lse


def _launch(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, variant: Variant,
    causal: bool, compile_only: bool = False,
) -> Any:  # fmt: skip
    """Launch the kernel, or only compile it; return what was compiled."""
    batch, heads, m, d = q.shape
    grid = (batch * heads * -(-m // variant.rows),)
    arguments = (q, k, v, out, lse, m, k.shape[2], heads // k.shape[1], _LOG2E / math.sqrt(d))
    options = {
        "SIZE": d, "ROWS": variant.rows, "KEYS": variant.keys, "CAUSAL": causal,
        "SPECIALIZED": variant.specialized, "num_warps": variant.warps,
        "num_stages": variant.stages,
    }  # fmt: skip
    if compile_only:
        return kernel.warmup(*arguments, grid=grid, **options)
    # A program makes its descriptors in memory that Triton asks for.
    triton.set_allocator(lambda size, alignment, stream: q.new_empty(size, dtype=torch.int8))
    return kernel[grid](*arguments, **options)


# ---- compiled ------------------------------------------------------------------------------------


def measure(arch: int, d: int, variant: Variant, causal: bool = True) -> dict[str, Any]:
    """Compile for an architecture; return registers, spills, shared memory, and the loop's size."""
    from triton.runtime.driver import driver

    driver.set_active(attention_kernels._Driver(arch))
    q = torch.empty(1, 4, 1024, d, dtype=torch.bfloat16)
    forward_tma.device_caches.clear()  # its key does not name the architecture
    compiled = _launch(forward_tma, q, q, q, q, q[..., 0].float(), variant, causal, True)
    return attention_kernels.properties(compiled) | loops(attention_kernels.sass(compiled))


def loops(code: str) -> dict[str, int]:
    """Return the instructions of the shortest loop with tensor cores, and its copies of tiles.

    The loop with a mask is longer. With specialised warps, those that copy have their own loop.
    """
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.M)
    places = {int(place, 16): number for number, (place, _) in enumerate(lines)}
    sizes = []
    for number, (_, words) in enumerate(lines):
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", words)
        start = places.get(int(target[1], 16), number) if target else number
        body = " ".join(words for _, words in lines[start : number + 1])
        if start < number and attention_kernels.TENSOR_CORE.search(body):
            sizes.append(number + 1 - start)
    return {"loop": min(sizes, default=0), "tile copies": code.count("UTMALDG")}


def main(argv: Sequence[str] | None = None) -> int:
    new_parser(__doc__).parse_args(argv)
    rows = []
    for arch in (90, 100, 120):
        for d in (64, 128):
            for variant in VARIANTS:
                try:
                    row = measure(arch, d, variant)
                except Exception as error:  # a shape that Triton cannot compile for this GPU
                    reason = str(error).strip().splitlines()[:1] or [""]
                    rows.append((f"sm_{arch}", str(d), str(variant), reason[0][:50]))
                    continue
                cells = (row[x] for x in ("registers", "spilled", "warps", "loop", "tile copies"))
                kilobytes = f"{-(-row['shared'] // 1024)}"
                rows.append((f"sm_{arch}", str(d), str(variant), *map(str, cells), kilobytes))
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ("", "d", "variant", "registers", "spilled, B", "warps", "loop", "copies", "shared, KB")
    print(table(head, [row + ("",) * (len(head) - len(row)) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
