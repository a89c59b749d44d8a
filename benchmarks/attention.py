"""Measure attention: python -m benchmarks.attention NAME [--json FILE]

decode      few queries against a cache of keys, as in generation
kernels     registers, spills and shared memory of the GPU's kernels, by Triton (attention_kernels)
memory      peak memory, forward and backward, over the bytes of q, k and v (attention_memory)
overhead    what a call costs beside its kernel, and what `import wavepe.ops` costs
profile     where the time goes, and how fast the matrix products are, by perf (attention_profile)
requests    several requests in one call, and keys in pages (attention_requests)
tails       what the tails of wavelets, subnormal numbers, cost
terms       what each kind of term costs: tables of few columns, sinks, encodings
threads     the speed-up of one head by a second thread

The studies that time calls are here. The calls of a row take turns in one process, and a quotient
of times is that of the fastest. docs/internals/attention-speed.md shows what is kept of --json.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import attention_kernels, attention_memory, attention_profile, attention_requests
from .attention_inputs import Inputs, module_of, sdpa
from .attention_inputs import table as wavelets
from .bench_attention import trained, with_gradients
from .command import measuring_command
from .command import table as markdown
from .machine import surroundings
from .memory import prepared
from .timing import Timing, take_turns

Calls = dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
PHASES = ("forward", "with gradients")
turns = functools.partial(take_turns, warm_up=2)


class Study(NamedTuple):
    """`measure` takes the numbers of `options`, and with --quick also the arguments `quick`."""

    measure: Callable[..., dict]
    table: Callable[[dict], str]
    quick: dict[str, Any] | None = None
    options: dict[str, int] = {}  # noqa: RUF012
    wrong: Callable[[dict], bool] = lambda results: False


def about(**more: Any) -> dict:
    return {**surroundings("wavepe", "torch"), **more}


def fastest(one: Timing, other: Timing) -> float:
    return min(one.seconds) / min(other.seconds)


def with_threads(calls: dict[str, Callable], counts: Sequence[int], **options: Any) -> dict:
    """Time calls with each number of threads; return the timings by (name, threads)."""
    keyed = {(name, count): call for name, call in calls.items() for count in counts}
    return turns(keyed, before=lambda key: torch.set_num_threads(key[1]), **options)


# ------------------------------------------------------------------ decode


class Size(NamedTuple):
    """The shape of a call; `dtype` is a name of torch."""

    heads: int
    key_heads: int
    keys: int
    head_size: int = 128
    queries: int = 1
    dtype: str = "float32"

    def __str__(self) -> str:
        heads = f"{self.heads} / {self.key_heads}"
        return f"{heads} x {self.keys} x {self.head_size}, {self.queries}, {self.dtype}"


GROUPED = (32, 8)
ALONE = (8, 8)  # no head shares keys
DECODED = (
    *(Size(*GROUPED, n, d) for d in (64, 128) for n in (256, 1024, 2048, 4096, 8192, 32768)),
    *(Size(*GROUPED, n, queries=m) for n in (1024, 8192) for m in (2, 4, 8, 16)),
    *(Size(*GROUPED, n, dtype="bfloat16") for n in (1024, 8192)),
    *(Size(*ALONE, n, d) for d in (64, 128) for n in (256, 1024, 2048, 8192)),
    *(Size(*ALONE, 1024, 64, m) for m in (2, 4, 16)),
    *(Size(*ALONE, 1024, d) for d in (72, 80)),
    *(Size(32, 32, n) for n in (1024, 8192)),
)
WAYS = ("plain", "wavelets", "learned")


def decode_calls(size: Size) -> dict[str, Callable]:
    """Return the calls by name.

    PyTorch has two ways: `enable_gqa`, or keys and values repeated for each query head, as models
    of transformers do.
    """
    heads, key_heads, n, d, m, name = size
    dtype = getattr(torch, name)
    random = torch.Generator().manual_seed(0)
    shapes = ((heads, m), (key_heads, n), (key_heads, n))
    q, k, v = (torch.randn(1, *rows, d, generator=random).to(dtype) for rows in shapes)
    known = ops.relative_table(torch.from_numpy(wavelets(n, d)))
    learned = torch.randn(512, d, generator=random).to(dtype)
    # The last query sees all keys. An earlier one does not see the last keys.
    mask = None if m == 1 else torch.ones(m, n, dtype=torch.bool).tril(n - m)
    group = heads // key_heads

    def repeated():
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        return scaled_dot_product_attention(q, keys, values, mask)

    calls = {
        "plain": lambda: ops.attention(q, k, v),
        "wavelets": lambda: ops.attention(q, k, v, p=known),
        "learned": lambda: ops.attention(q, k, v, p=learned),
        "repeated": repeated,
    }
    if group > 1:
        calls["enable_gqa"] = lambda: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return calls


def decode(repeats: int, sizes: Sequence[Size] = DECODED) -> dict:
    """Measure all sizes with one thread and with two."""
    environment, counts, rows = about(), (1, 2), []
    with prepared(1):
        for size in sizes:
            batch = max(1, 2**21 // (2 * size.key_heads * size.keys * size.head_size))
            options = {"repeats": repeats, "batch": batch, "budget": 4.0}
            timings = with_threads(decode_calls(size), counts, **options)
            seconds: dict[str, dict] = {}
            for (name, count), timing in timings.items():
                seconds.setdefault(name, {})[str(count)] = timing.summary()
            rows.append({"size": size._asdict(), "seconds": seconds})
    return {"environment": environment, "threads": list(counts), "rows": rows}


def decode_table(results: dict) -> str:
    """Return wavepe's times over PyTorch's faster way, with each number of threads."""
    rows = []
    for row in results["rows"]:
        least = {
            name: [by_threads[str(count)]["min"] for count in results["threads"]]
            for name, by_threads in row["seconds"].items()
        }
        rivals = [times for name, times in least.items() if name not in WAYS]
        theirs = [min(pair) for pair in zip(*rivals, strict=True)]
        cells = [str(Size(**row["size"])), " / ".join(f"{1e3 * x:.2f}" for x in theirs) + " ms"]
        for way in WAYS:
            pairs = zip(least[way], theirs, strict=True)
            cells.append(" / ".join(f"{mine / other:.2f}" for mine, other in pairs))
        rows.append(cells)
    heads = ("heads / key heads x keys x head size, queries, dtype", "PyTorch", *WAYS)
    return markdown(heads, rows)


# ------------------------------------------------------------------ tails

# Far from its centre a wavelet is a subnormal number. An operation on such a number costs an Intel
# CPU about 150 cycles. wavepe's kernels count subnormals as zero, so their time should not depend
# on the tails: one table has them, and another has zeros where an element is below SMALLEST.
TAILED = ((8, 128, 32), (8, 128, 64), (8, 512, 64), (4, 1024, 64))
SMALLEST = 2.0**-100
AIM = 1.1


def tails_calls(x: Inputs) -> dict[tuple[str, bool, str], Callable | None]:
    """Return the calls by (kind, gradients, which table); PyTorch's attention is "sdpa"."""
    q, k, v = x.q, x.k, x.v
    leaves = trained(x, "q", "k", "v")
    calls: dict[tuple[str, bool, str], Callable | None] = {}
    zeros = x.p.where(x.p.abs() >= SMALLEST, 0.0)
    for which, p in (("tails", x.p.clone()), ("zeros", zeros)):
        known, learned = ops.relative_table(p), p.clone().requires_grad_()
        for kind, table in (("constant table", known), ("tensor", p)):

            def attend(q, k, v, table=table):
                return ops.attention(q, k, v, p=table)

            calls[kind, False, which] = lambda attend=attend: attend(q, k, v)
            calls[kind, True, which] = with_gradients(attend, leaves, x.grad)
        calls["tensor, with its gradient", True, which] = with_gradients(
            lambda q, k, v, p: ops.attention(q, k, v, p=p), (*leaves, learned), x.grad
        )
        calls["relative_bias", False, which] = lambda p=p: ops.relative_bias(q, p, x.length)
    calls["sdpa", False, ""] = lambda: sdpa(q, k, v)
    calls["sdpa", True, ""] = with_gradients(sdpa, leaves, x.grad)
    return calls


def tails_rows(x: Inputs, repeats: int) -> list[dict]:
    """Return one row for each kind, forward and with gradients."""
    timings = turns(tails_calls(x), repeats=repeats, budget=20)
    rows = []
    for kind, gradients, which in timings:
        if which != "tails":
            continue
        tails, zeros = (timings[kind, gradients, of] for of in ("tails", "zeros"))
        rows.append(
            {
                "kind": kind,
                "gradients": gradients,
                "size": x.size,
                "seconds": {"tails": tails.summary(), "zeros": zeros.summary()},
                "ratio": fastest(tails, zeros),
                "rounds": tails.over(zeros).median,
                "over_sdpa": fastest(tails, timings["sdpa", gradients, ""]),
            }
        )
    return rows


def tails(repeats: int, sizes: Sequence[tuple[int, int, int]] = TAILED) -> dict:
    """Measure all sizes with one thread."""
    environment = about(threads=1)
    with prepared(1):
        rows = [row for size in sizes for row in tails_rows(Inputs.make(*size), repeats)]
    return {"environment": environment, "aim": AIM, "rows": rows}


def tails_table(results: dict) -> str:
    """Return the time with tails over that without, as Markdown."""
    ratios = {(row["size"], row["kind"], row["gradients"]): row["ratio"] for row in results["rows"]}
    columns = list(dict.fromkeys(key[1:] for key in ratios))
    heads = [f"{kind}, {PHASES[gradients]}" for kind, gradients in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for size in dict.fromkeys(key[0] for key in ratios):
        cells = [f"{ratios[(size, *column)]:.2f}" for column in columns]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ------------------------------------------------------------------ threads

# One head is the hard case, because the threads cannot share out the heads.
ONE_HEAD = tuple((length, d) for d in (64, 128) for length in (1024, 2048, 4096, 8192))
SPEED_UP = 1.85  # the least of wavelets, from length 2048 on
THREADS = 2


def threads_rows(x: Inputs, gradients: bool, repeats: int) -> list[dict]:
    """Return one row for each call."""
    forwards = {
        "wavelets": lambda q, k, v, known=x.relative_table: ops.attention(q, k, v, p=known),
        "plain": ops.attention,
        "sdpa": sdpa,
    }
    calls: dict[str, Callable] = {
        name: with_gradients(call, trained(x, "q", "k", "v"), x.grad)
        if gradients
        else functools.partial(call, x.q, x.k, x.v)
        for name, call in forwards.items()
    }
    timings = with_threads(calls, (1, THREADS), repeats=repeats)
    rows = []
    for name in calls:
        one, several = timings[name, 1], timings[name, THREADS]
        rows.append(
            {
                "who": name,
                "gradients": gradients,
                "length": x.length,
                "head_size": x.k.shape[-1],
                "seconds": {"1": one.summary(), str(THREADS): several.summary()},
                "speed_up": fastest(one, several),
                "rounds": one.over(several).median,
            }
        )
    return rows


def threads(repeats: int, sizes: Sequence[tuple[int, int]] = ONE_HEAD) -> dict:
    """Measure all sizes, forward and with gradients."""
    environment, rows = about(), []
    with prepared(THREADS):
        for length, d in sizes:
            x = Inputs.make(1, length, d)
            for gradients in (False, True):
                rows += threads_rows(x, gradients, repeats)
    return {"environment": environment, "threads": THREADS, "bar": SPEED_UP, "rows": rows}


def threads_table(results: dict) -> str:
    """Return the speed-ups as Markdown, with a row for each size."""
    names = list(dict.fromkeys(row["who"] for row in results["rows"]))
    by_size: dict[tuple[int, int], dict] = {}
    for row in results["rows"]:
        cells = by_size.setdefault((row["length"], row["head_size"]), {})
        cells[row["gradients"], row["who"]] = f"{row['speed_up']:.2f}"
    order = [(gradients, name) for gradients in (False, True) for name in names]
    heads = ("length x head size", *(f"{name}, {PHASES[gradients]}" for gradients, name in order))
    rows = [(f"{n} x {d}", *(cells[key] for key in order)) for (n, d), cells in by_size.items()]
    return markdown(heads, rows)


# ------------------------------------------------------------------ terms

TERMS = (8, 2048, 64)  # heads, length, head size
ROWS = 1024  # of each learned table
COLUMNS = (8, 16, 24, 64)
BAR = {"16 columns": 1.15}  # asked of them
SPECS = (
    "relative:extent=1024,rank=16",
    "wavelet",
    "wavelet:biases=true",
    "wavelet:biases=true,projection=true",
    "wavelet:biases=true,projection=true+kerple",
    "wavelet+alibi",
    "kerple",
    "wavelet:rank=8",
    "wavelet:rank=24,from_input=true",
    "rope+wavelet",
    "transformer_xl",
    "rope",
    "rope+sink",
    "rope+window:size=512",
    "rope+temperature:kind=llama4",
    "rope:self_extend=8,neighbors=512",
    "fox",
    "pope",
    "xpos",
)
PLAIN = "none"
VARIANTS = wavepe.variants()[1:] or wavepe.variants()  # the portable one takes minutes


def term_calls(x: Inputs) -> Calls:
    """Return each function with its arguments beside q, k and v; the first is the plain one."""
    _, heads, length, d = x.q.shape
    random = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).requires_grad_()

    calls: Calls = {
        PLAIN: (ops.attention, ()),
        "sinks": (lambda q, k, v, sinks: ops.attention(q, k, v, sinks=sinks), (values(heads),)),
        f"{d} columns, read by q": (
            lambda q, k, v, p: ops.attention(q, k, v, p=p),
            (values(min(ROWS, length), d),),
        ),
    }
    for columns in COLUMNS:
        calls[f"{columns} columns"] = (
            lambda q, k, v, p, r: ops.attention(q, k, v, p=p, q_rel=r),
            (values(min(ROWS, length), columns), values(1, heads, length, columns)),
        )
    return {**calls, "PyTorch's attention": (sdpa, ())}


def encoding_calls(x: Inputs) -> Calls:
    """Return the same for a module of each encoding; its parameters have gradients, too."""
    _, heads, length, d = x.q.shape
    torch.manual_seed(2)
    inputs = torch.randn(1, length, d)
    calls: Calls = {}
    for spec in (PLAIN, *SPECS):
        module = module_of(spec, d, heads)

        def call(q, k, v, *parameters, module=module):
            return module(q, k, v, x=inputs)

        calls[spec] = (call, tuple(module.parameters()))
    return calls


def terms_rows(calls: Calls, x: Inputs, repeats: int) -> list[dict]:
    """Return a row for each name and variant."""
    leaves, timed = trained(x, "q", "k", "v"), {}
    for name, (function, more) in calls.items():

        def forward(function=function, more=more):
            with torch.no_grad():
                return function(x.q, x.k, x.v, *more)

        for variant in VARIANTS:
            timed[name, variant, "forward"] = forward
            if "self_extend" not in name:  # it is for inference
                call = with_gradients(function, (*leaves, *more), x.grad)
                timed[name, variant, "with gradients"] = call

    def use(key):
        wavepe.use_variant(key[1])

    timings = turns(timed, before=use, repeats=repeats, budget=240)
    rows: dict[tuple[str, str], dict] = {}
    for (name, variant, phase), timing in timings.items():
        plain = timings[PLAIN, variant, phase]
        row = rows.setdefault((name, variant), {"name": name, "variant": variant, "over_plain": {}})
        row["over_plain"][phase] = fastest(timing, plain)
    return list(rows.values())


def terms(repeats: int, size: tuple[int, int, int] = TERMS) -> dict:
    """Measure both tables with one thread.

    Figures are times over the same call without the term: causal, float32. A table of c columns has
    its own queries (q_rel); the gradients include those of the table and its queries.
    """
    environment, before = about(threads=1), wavepe.variant()
    x = Inputs.make(*size)
    try:
        with prepared(1):
            tables = {
                "ops.attention": terms_rows(term_calls(x), x, repeats),
                "nn.Attention": terms_rows(encoding_calls(x), x, repeats),
            }
    finally:
        wavepe.use_variant(before)
    return {"environment": environment, "bar": BAR, "size": x.size, "tables": tables}


def terms_table(results: dict) -> str:
    """Return the ratios as two tables of Markdown, with a column for each variant."""
    return "\n\n".join(_terms(title, rows) for title, rows in results["tables"].items())


def _terms(title: str, rows: list[dict]) -> str:
    cells: dict[str, list[str]] = {}
    for row in rows:
        ratios = (f"{ratio:.2f}" for ratio in row["over_plain"].values())
        cells.setdefault(row["name"], [row["name"]]).append(" / ".join(ratios))
    cells.pop(PLAIN)
    return markdown((f"`{title}`", *dict.fromkeys(row["variant"] for row in rows)), cells.values())


# ------------------------------------------------------------------ overhead

BATCH = 400  # calls that are timed together
IMPORT = """
import time, torch
begin = time.perf_counter()
import wavepe.ops
print(time.perf_counter() - begin)
"""


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def overhead_calls() -> dict[tuple[str, str], Callable | None]:
    """Return calls on inputs so small that the kernels take a fraction of the time, by name."""
    x = Inputs.make(1, 8, 8)
    q, k, v = x.q, x.k, x.v
    leaves, known = trained(x, "q", "k", "v"), ops.relative_table(x.p)
    step = torch.randn(1, 32, 1, 64), torch.randn(1, 8, 16, 64), torch.randn(1, 8, 16, 64)
    cos, sin = ops.rope_table(torch.arange(8), torch.ones(4))
    calls = {
        "attention": (lambda: ops.attention(q, k, v), lambda: sdpa(q, k, v)),
        "attention, wavelets": (lambda: ops.attention(q, k, v, p=known),),
        "attention, recorded by autograd": (lambda: ops.attention(*leaves), lambda: sdpa(*leaves)),
        "attention with gradients": (
            with_gradients(ops.attention, leaves, x.grad),
            with_gradients(sdpa, leaves, x.grad),
        ),
        "attention, one query of 32 heads, 16 keys of 8 heads": (
            lambda: ops.attention(*step),
            lambda: grouped(*step),
        ),
        "rope": (lambda: ops.rope(q, cos, sin),),
        "rope_qk": (lambda: ops.rope_qk(q, k, cos, sin),),
        "relative_bias": (lambda: ops.relative_bias(q, x.p, 8),),
    }
    who = ("wavepe", "torch")
    return {(n, w): call for n, of in calls.items() for w, call in zip(who, of, strict=False)}


def overhead(repeats: int, batch: int = BATCH) -> dict:
    """Measure the least times, with one thread; imports are timed in processes that have torch."""
    environment, count = about(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        timings = turns(overhead_calls(), repeats=repeats, budget=60, batch=batch)
    finally:
        torch.set_num_threads(count)
    rows: dict[str, dict[str, float]] = {}
    for (name, who), timing in timings.items():
        rows.setdefault(name, {})[who] = min(timing.seconds)
    command = [sys.executable, "-c", IMPORT]
    seconds = min(float(subprocess.check_output(command)) for _ in range(min(repeats, 5)))
    return {"environment": environment, "rows": rows, "import": seconds}


def overhead_table(results: dict) -> str:
    """Return the times as Markdown; kept results may have those of an earlier commit, "before"."""
    before = results.get("before")
    heads = ["", *["before"] * bool(before), "wavepe", "PyTorch's attention"]
    rows = []
    for name, row in results["rows"].items():
        times = [before["rows"][name]["wavepe"]] if before else []
        times += [row["wavepe"], *([row["torch"]] if "torch" in row else [])]
        cells = [name, *(f"{seconds * 1e6:.1f} µs" for seconds in times)]
        rows.append(cells + [""] * (len(heads) - len(cells)))
    times = [run["import"] for run in (before, results) if run]
    lines = [markdown(heads, rows), "| `import wavepe.ops` after `import torch` |"]
    return "\n".join(lines) + f" {' | '.join(f'{seconds:.2f} s' for seconds in times)} | |"


# ------------------------------------------------------------------ all studies

TINY = (48, 16)  # length and head size
STUDIES = {
    "decode": Study(decode, decode_table, {"sizes": (Size(4, 2, 48, 16, 2),)}, {"repeats": 15}),
    "kernels": Study(attention_kernels.measure_all, attention_kernels.table),
    "memory": Study(
        attention_memory.measure,
        attention_memory.table,
        {"quick": True},
        wrong=attention_memory.too_much,
    ),
    "overhead": Study(overhead, overhead_table, {"batch": 2}, {"repeats": 25}),
    "profile": Study(
        attention_profile.measure,
        attention_profile.table,
        {"sizes": (TINY,), "seconds": 0.5},
        {"seconds": 4},
    ),
    "requests": Study(
        attention_requests.measure,
        attention_requests.table,
        {"sizes": ((3, 1, 32, "float32"),)},
        {"repeats": 15},
    ),
    "tails": Study(tails, tails_table, {"sizes": ((2, *TINY),)}, {"repeats": 41}),
    "terms": Study(terms, terms_table, {"size": (2, *TINY)}, {"repeats": 25}),
    "threads": Study(threads, threads_table, {"sizes": (TINY,)}, {"repeats": 15}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return 0, or 1 if a tool is missing or memory is over its bar."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in STUDIES:
        print(__doc__)
        return 0 if name in ("-h", "--help") else 2
    study = STUDIES[name]
    return measuring_command(
        f"The study {name}.",
        study.measure,
        study.table,
        words,
        quick=study.quick,
        wrong=study.wrong,
        **study.options,
    )


if __name__ == "__main__":
    sys.exit(main())
