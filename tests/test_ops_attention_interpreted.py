"""The GPU's kernels of attention, interpreted on the CPU, against the oracle: outputs and every
gradient. What else is known of them without a GPU is in test_ops_attention_gpu.py."""

import os
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from cases import generator, needs, soon

needs("triton")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("TRITON_INTERPRET=0 lets Triton compile", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent.parent))  # no part of the installed package

import wavepe
from attention_cases import (
    F32,
    OPTIONS,
    Shape,
    array,
    check,
    draw,
    grid,
    incoming,
    judge,
    run,
    same,
    tensor,
    torch,
)
from attention_options import everything, relative
from encoding_cases import COMBINED
from nn_cases import made, tokens
from torch.utils._pytree import tree_leaves
from traffic import Traffic, tensors
from triton.runtime import interpreter
from wavepe.ops import _attention, _attention_gpu, _attention_in_graph, relative_table
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_gpu import call, chunk, decode, launches, plans
from wavepe.positions import tables

from benchmarks.gpu_forward_tma import Variant, forward
from benchmarks.interpreted import interpreted

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# Each call takes the interpreter a second, so most options are left to the long tail.
# Beyond 2^29 rows the kernels say that they cannot.
FAR = [option for option in OPTIONS if "offset" in option and "far" in option]
SHAPE = Shape(1, 2, 1, 66, 97, 12, 8)  # two blocks of queries and of keys, the second cut


# The products with a table take the interpreter seconds. So these have few queries.
TABLES = (
    "bias, table",
    "table, q_rel",
    "table from -3",
    "table, both sides, edge",
    "edge from 2, per head",
    "edge far below",
    "offset of rows, edge",
    "segments, both sides",
    "packed training",
    "batched decoding",
    "everything",
    "everything, both sides",
)
OTHERS = tuple(o for o in OPTIONS if "p" not in OPTIONS[o](generator(o), SHAPE) and o not in FAR)
SOON = ("window of nothing", "mask", "dropout", "bias, both sides, edge")


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Let the kernels over tiles serve few queries, too: they are what most tests are about.

    New memory holds NaN, so that results show what reads it.
    """
    monkeypatch.setattr(decode, "MOST", 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch):
    """Let Triton prepare its language once in a launch, and not in every call within a kernel,
    which takes a third of the time."""
    prepare, prepared = interpreter._patch_lang, set()

    def prepare_once(function):
        place, outer = id(function.__globals__), not prepared
        if place in prepared:
            return interpreter._LangPatchScope()
        prepared.add(place)
        scope = prepare(function)
        restore = scope.restore
        scope.restore = lambda: (outer and prepared.clear(), restore())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)


@pytest.fixture
def of_keys(monkeypatch):
    """Return a function that gives tiles of float32 a number of keys."""
    return lambda keys: monkeypatch.setattr(launches, "_FLOAT32", {64: (32, keys, 8, 1)})


@pytest.mark.parametrize("option", soon(OTHERS, *SOON))
def test_options_interpreted(option):
    grid(interpreted, option, [SHAPE])


@pytest.mark.parametrize("option", soon(TABLES, "everything"))
def test_tables_interpreted(option):
    grid(interpreted, option, [SHAPE._replace(m=10)])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["table, both sides, per head", "everything"])
def test_tables_of_many_blocks_interpreted(option):
    grid(interpreted, option, [Shape(1, 1, 1, 130, 97, 12, 8)])


@pytest.mark.parametrize("option", FAR)
def test_tables_too_far_are_refused(option):
    arguments = draw(generator("far"), SHAPE, OPTIONS[option])
    with pytest.raises(RuntimeError, match=r"must lie within \+-2\^29, got \d+ rows from -?\d+ on"):
        interpreted(**arguments)


LENGTHS = [
    (m, n) for n in (1, 2, 63, 64, 65, 127, 128, 129, 200) for m in sorted({1, n, max(n - 63, 1)})
]


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize(("m", "n"), soon(LENGTHS, (66, 129)))
def test_lengths_around_the_blocks_interpreted(m, n, keys, of_keys):
    of_keys(keys)
    rng = generator("lengths", str(n))
    check(interpreted, rng, Shape(1, 2, 2, m, n, 16, 16), {"window": 70})
    check(interpreted, rng, Shape(1, 1, 1, n, m, 8, 4), {"causal": False})


@pytest.mark.parametrize("d", soon([1, 3, 16, 17, 64, 80, 128], 17, 80))
def test_head_sizes_interpreted(d):
    rng = generator("sizes", str(d))
    check(interpreted, rng, Shape(1, 1, 1, 40, 50, d, d), {})
    check(interpreted, rng, Shape(1, 3, 1, 9, 20, 20, d), {"softcap": 2.0})


@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 1, 5, 6, 8, 8),
        (1, 0, 2, 5, 6, 8, 8),
        (1, 2, 2, 0, 6, 8, 8),
        (1, 2, 1, 5, 0, 8, 8),
        (1, 2, 1, 0, 0, 8, 8),
        (1, 1, 1, 3, 4, 8, 0),
        (1, 1, 1, 3, 4, 0, 8),
    ],
)
@pytest.mark.parametrize("option", soon(["plain", "edge", "bias", "everything"], "everything"))
def test_empty_interpreted(shape, option):
    check(interpreted, generator("empty"), shape, OPTIONS[option])


def test_a_table_without_rows_interpreted():
    given = relative(generator("no rows"), SHAPE, 0, q_rel=True)
    check(interpreted, generator("no rows"), SHAPE, given)


def assert_near(found, exact, limit):
    """In the norm: the kernels round once more than a bound of each entry allows."""
    for name, got in found.items():
        seen = np.isfinite(exact[name])
        assert (np.isfinite(array(got)) == seen).all(), name
        error = np.linalg.norm(array(got)[seen] - exact[name][seen])
        assert error <= limit * max(np.linalg.norm(exact[name][seen]), 1e-30), name


ZONES = [
    ("ricker", True, 840, F32, 0),
    ("ricker", False, 300, F32, 0),
    ("morlet", True, 37, F32, 0),
    ("haar", True, 840, F32, 0),
    ("ricker", True, 840, torch.float16, 0),
    ("ricker", True, 840, torch.float16, 16),
    ("ricker", False, 300, F32, 16),
    ("ricker", True, 503, F32, 0),  # 512 tokens, of which a GPU's table has more rows
]


@pytest.mark.parametrize(("kind", "causal", "offset", "dtype", "most"), soon(ZONES, ZONES[-1]))
def test_low_rank_zones_interpreted(kind, causal, offset, dtype, most, monkeypatch):
    """A relative_table against its own rows: plain tiles, low-rank ones and near ones. Of every
    row 1e-7 is neglected, and a score here is 1.5 times a sum of 32 products with about 0.8."""
    monkeypatch.setattr(decode, "MOST", most)
    rng, d = generator("zones", kind), 32
    encoding = wavepe.encoding("wavelet", kind=kind)
    m, n = (70 if offset == 37 else 9), (512 if offset == 503 else 900)
    p, first, _ = encoding.table(min(n, 700), d, causal=causal)
    table = relative_table(p, first) if n > 700 else tables.table_on(GPU, n, encoding, d, causal)
    q, k, v = (tensor(rng.normal(size=(1, 1, x, d)), dtype) for x in (m, n, n))
    arguments = {"q": q, "k": k, "v": v, "causal": causal, "scale": 1.5, "offset": offset}
    grads = incoming(rng, arguments)
    exact = judge({**arguments, "p": torch.from_numpy(p), "first": first}, *grads).values
    found = run(interpreted, arguments | {"p": table}, *grads, wanted=("q", "k", "v"))
    assert_near(found, exact, 1.5 * 32 * 0.8e-7 if dtype == F32 else 2.0**-10)


def test_where_a_table_has_more_rows_on_a_gpu(monkeypatch):
    def rows(keys, device=GPU):
        return tables.table_on(device, keys, wavepe.encoding("wavelet"), 32, True)

    assert rows(512).build_tensors(F32, CPU, gpu=True)[2]  # zones; 512 rows would have none
    of_a_graph = "wavelet", 512, 32, True
    assert _attention_in_graph._find_table(GPU, *of_a_graph) is rows(512)
    monkeypatch.setattr(tables, "constant_table", lambda keys, *rest: keys)
    assert [rows(n) for n in (128, 129, 1023, 1024, 1025)] == [128, 1024, 1024, 1024, 1025]
    assert rows(129, CPU) == 129
    few = range(600)  # positions of an encoding; `index` raises ValueError
    monkeypatch.setattr(tables, "constant_table", lambda keys, *rest: few.index(keys))
    assert rows(512) == 512


@pytest.mark.parametrize("specialized", [False, True])
@pytest.mark.parametrize(("m", "n", "causal"), [(33, 50, True), (16, 32, True), (5, 37, False)])
def test_the_forward_by_descriptors_interpreted(m, n, causal, specialized):
    variant = Variant(16, 16, 4, 2, specialized)
    attention = lambda q, k, v, **_: forward(q, k, v, variant, causal)  # noqa: E731
    shape, q = Shape(1, 2, 1, m, n, 16, 16), torch.empty(1, 1, n + 1, 16)
    check(attention, generator("tma"), shape, {"causal": causal}, backward=False)
    with pytest.raises(ValueError, match=r"needs 1 <= m <= n, .* got q \(1, 1, \d+, 16\)"):
        attention(q, q[:, :, :n], q[:, :, :n])


LONG = {
    "both sides": {},
    "window, softcap, sinks": {
        "window": 500, "softcap": 4.0, "slopes": np.array([0.01, 0.02]), "sinks": np.ones(2)
    },
    "bias, dropout": {"dropout_p": 0.2, "bias": np.linspace(-2, 2, 1000), "bias_first": -300},
    "causal, window": {"causal": True, "window": 300},
}  # fmt: skip
LONG_CASES = [(o, keys, learned) for o in LONG for keys in (64, 128) for learned in (False, True)]


@pytest.mark.parametrize(("option", "keys", "learned"), soon(LONG_CASES, LONG_CASES[2]))
def test_far_zones_on_both_sides_interpreted(option, keys, learned, of_keys):
    """A table of 1599 rows: queries see far zones before and behind the near ones, and keys without
    a row. A block of queries straddles two zones. Near zones end in the middle of 128 keys."""
    of_keys(keys)
    rng = generator("long", option)
    kind, d = ("ricker", 64) if option == "causal, window" else ("morlet", 32)  # of rank 8 and 16
    p, first, _ = wavepe.encoding("wavelet", kind=kind).table(800, d, causal=False)
    given = {"p": p, "first": first, "causal": False, "scale": 1.5, "offset": 650}
    shape = Shape(1, 2 if "slopes" in LONG[option] else 1, 1, 20, 1200, d, d)
    arguments = draw(rng, shape, given | LONG[option])
    grads = incoming(rng, arguments)
    exact = judge(arguments, *grads).values
    if not learned:
        table = relative_table(p, first)
        _, _, (left, far, _) = table.build_tensors(F32, torch.device("cpu"), gpu=True)
        assert 5 < len(left) < far.shape[1] - 5
        arguments["p"] = table
    wanted = ("q", "k", "v", "bias", "sinks", *["p"] * learned)
    assert_near(run(interpreted, arguments, *grads, wanted=wanted), exact, 1.5 * d * 0.8e-7)


@pytest.mark.parametrize("option", soon((*TABLES, *OTHERS), "everything"))
def test_tiles_of_128_keys_interpreted(option, of_keys):
    of_keys(128)
    grid(interpreted, option, [SHAPE._replace(m=10 if option in TABLES else 66, n=200)])


FLOAT16 = [("plain", Shape(1, 1, 1, 9, 20, 256, 256))]  # the largest head
FLOAT16 += [
    (option, SHAPE._replace(m=20))
    for option in ("everything", "plain", "table", "edge from 2, per head", "bias")
]


@pytest.mark.parametrize(("option", "shape"), soon(FLOAT16, FLOAT16[0]))
def test_float16_interpreted(option, shape):
    """Weights and their gradients are rounded to float16 once more than on the CPU, as in every
    fused attention: twice the error of rounding the result, in the norm."""
    rng = generator("float16", option)
    arguments = draw(rng, shape, OPTIONS[option], torch.float16)
    grads = incoming(rng, arguments)
    assert_near(run(interpreted, arguments, *grads), judge(arguments, *grads).values, 2.0**-10)


def test_products_beyond_float16_are_not_inf_interpreted():
    q = torch.full((1, 1, 3, 16), 200.0, dtype=torch.float16)
    p = torch.full((3, 16), 100.0, dtype=torch.float16)
    out = interpreted(q, q / 200, q, p=p)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("batch", soon([1, 2]))
def test_chunks_of_heads_and_strides_change_nothing_interpreted(monkeypatch, batch):
    rng = generator("chunks")
    arguments = draw(rng, Shape(batch, 2, 2, 5, 30, 8, 8), everything)
    grads = incoming(rng, arguments)
    whole = run(interpreted, arguments, *grads)
    monkeypatch.setattr(chunk, "chunk_bytes", lambda device: 1)
    turned = {
        name: x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x
        for name, x in arguments.items()
    }
    parts = run(interpreted, turned, *(g.mT.contiguous().mT for g in grads))
    summed = {name: whole.pop(name) for name in ("p", "bias")}
    same({name: parts[name] for name in whole}, whole)
    for name, x in summed.items():
        torch.testing.assert_close(parts[name], x)


# ---- few queries ---------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """Split the keys of few queries; return a function that sets the number of multiprocessors."""
    launched, launch = [], launches.launch
    monkeypatch.setattr(decode, "MOST", 16)
    monkeypatch.setattr(
        launches, "launch", lambda kernel, *rest, **more: launched.append(kernel)
        or launch(kernel, *rest, **more)
    )  # fmt: skip
    yield lambda count: monkeypatch.setattr(launches, "multiprocessors", lambda device: count)
    assert set(launched) <= {decode.attention_splits, decode.merge_splits}


def without(drawn, *names):
    return {name: x for name, x in drawn.items() if name not in names}


def everything_split(rng, s):
    return without(everything(rng, s), "mask", "dropout_p")


def agree(rng, shape, options, dtype=F32):
    """Compare out and lse to the oracle; the gradients are those of the kernels over tiles."""
    check(interpreted, rng, shape, options, dtype, backward=False)


SPLIT = [o for o in OPTIONS if o not in FAR]
SPLIT = [o for o in SPLIT if not {"mask", "dropout_p"} & OPTIONS[o](generator(o), SHAPE).keys()]


@pytest.mark.parametrize(
    "option", soon(SPLIT, "window of nothing", "edge from 2, per head", "table from -3")
)
def test_options_of_few_queries_interpreted(option, few):
    agree(generator("few", option), Shape(2, 6, 2, 3, 131, 12, 8), OPTIONS[option])
    agree(generator("few", option), Shape(1, 2, 2, 1, 97, 16, 3), OPTIONS[option])


KEYS = (1, 2, 15, 16, 17, 255, 256, 257, 1000)
SPLIT_SIZES = [(m, n, group) for group, n in enumerate(KEYS) for m in (1, 2, 3, 16)]


@pytest.mark.parametrize(("m", "n", "turn"), soon(SPLIT_SIZES, (2, 255, 5)))
def test_few_queries_of_all_sizes_interpreted(m, n, turn, few):
    """One, three and eight query heads; 16 queries of eight need two programs for their rows."""
    for group in (1, 3, 8) if m == 16 or n < 20 else ((1, 3, 8)[turn % 3],):
        agree(generator("few", str(n)), Shape(1, group, 1, m, n, 12, 20), everything_split)


@pytest.mark.parametrize("splits", soon([1, 2, 3, 5, 64], 1, 5))
def test_any_number_of_splits_interpreted(splits, few):
    few(splits)  # two programs for each, and two key heads
    for options in (everything_split, {}):
        agree(generator("splits"), Shape(1, 4, 2, 2, 300, 8, 8), options)


@pytest.mark.parametrize("d", soon([80, 256], 80))
def test_few_queries_in_float16_interpreted(d, few):
    rng = generator("few float16")
    arguments = draw(rng, Shape(1, 8, 1, 3, 70, d, d), everything_split, torch.float16)
    assert_near(run(interpreted, arguments), judge(arguments).values, 2.0**-10)


def test_few_queries_ignore_nan_interpreted(few):
    """In keys that a mask hides, behind the last key, and of queries that other rows pad."""
    rng = generator("few nan")
    arguments = draw(rng, Shape(1, 3, 1, 2, 90, 8, 8), {"sinks": np.ones(3)})
    seen = torch.ones(1, 90, dtype=torch.bool)
    seen[:, 5:80] = False
    clean = run(interpreted, arguments | {"key_mask": seen})
    for name in ("k", "v"):
        room = torch.full((1, 1, 200, 8), torch.nan)
        room[:, :, :90][:, :, seen[0]] = arguments[name][:, :, seen[0]]
        arguments[name] = room[:, :, :90]
    same(run(interpreted, arguments | {"key_mask": seen}), clean)


# ---- plans ---------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """Let attention on the CPU run the GPU's kernels, without a plan at first."""
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(_attention_gpu, "_missing_kernel", lambda *_: "")
    monkeypatch.setattr(_attention, "serves", lambda x: True)


def arguments_of(option, seed):
    arguments = draw(generator("plans", option, seed), SHAPE._replace(m=10, n=40), OPTIONS[option])
    arguments["seed"] = torch.tensor(len(seed)) if arguments.get("dropout_p") else None
    if isinstance(arguments.get("offset"), int):
        arguments["offset"] = torch.tensor(arguments["offset"])
    return Arguments(**arguments)


def both_passes(run, arguments):
    forward = run("forward", arguments)
    wanted = arguments.p is not None, arguments.bias is not None
    grads = run("backward", (forward[0].sin(), forward[1].cos(), *forward, *arguments, *wanted))
    return {str(i): x for i, x in enumerate((*forward, *grads)) if x is not None}


@pytest.mark.parametrize("most", soon([1, chunk.LEAST_BYTES], chunk.LEAST_BYTES))
@pytest.mark.parametrize(
    "option", soon([o for o in OPTIONS if o not in FAR], "bias", "table from -3")
)
def test_a_plan_repeats_a_call(option, most, planned, monkeypatch):
    """With other values in other tensors, and with no thought: `call` does not run again."""
    monkeypatch.setattr(chunk, "chunk_bytes", lambda device: most)
    other = arguments_of(option, "other")
    want = both_passes(lambda role, arguments: getattr(call, role)(*arguments), other)
    both_passes(_attention_gpu.attend, arguments_of(option, "one"))
    assert len(plans._plans) == 2
    monkeypatch.delattr(call, "forward")
    monkeypatch.delattr(call, "backward")
    for _ in range(2):
        same(both_passes(_attention_gpu.attend, other), want)


@pytest.mark.parametrize("option", soon(["batched decoding", "everything"], "batched decoding"))
def test_a_plan_of_few_queries_serves_all_lengths(option, planned, few, monkeypatch):
    """With strides that follow n, as those of torch.cat's result do, and with other tables."""

    def arguments_of(n):
        options = {"batched decoding": OPTIONS[option], "everything": everything_split}[option]
        drawn = draw(generator("lengths", str(n)), Shape(2, 2, 1, 2, n, 16, 16), options)
        sized = {name: drawn[name][..., :5, :].contiguous() for name in ("p",) if name in drawn}
        sized |= {"bias": drawn["bias"][..., :5].contiguous()} if "bias" in drawn else {}
        return Arguments(**{**drawn, **sized, "window": None})

    steps = [arguments_of(n) for n in (16, 17, 64, 130)]
    want = [call.forward(*step) for step in steps]
    _attention_gpu.attend("forward", steps[0])
    run_again = call.forward
    monkeypatch.delattr(call, "forward")
    for step, exact in zip(steps, want, strict=True):
        results = _attention_gpu.attend("forward", step)
        same(dict(zip("ol", results, strict=True)), dict(zip("ol", exact, strict=True)))
    assert len(plans._plans) == 1
    monkeypatch.setattr(call, "forward", run_again, raising=False)
    one, other = steps[2:]
    for name in ("k", "v", "key_mask"):
        if getattr(one, name) is not None:
            with pytest.raises(RuntimeError, match=r"wavepe: .* must (be|have)"):
                _attention_gpu.attend("forward", one._replace(**{name: getattr(other, name)}))


def test_a_plan_knows_its_arguments_apart(planned):
    """The first call gives one tensor three times."""
    x, *others = (tensor(generator("same", name).normal(size=(1, 1, 5, 8)), F32) for name in "qkv")
    for arguments in ((x, x, x), (x, *others), (others[0], x, x)):
        same(
            {"out": _attention_gpu.attend("forward", arguments)[0]},
            {"out": call.forward(*arguments)[0]},
        )
    assert len(plans._plans) == 1


@pytest.mark.parametrize(
    ("option", "allocated", "computed"),
    [("plain", 2 + 4, []), ("table from -3", 3 + 8, ["zeros_like", "sum", "add_"])],
)
def test_what_a_plan_allocates(planned, monkeypatch, option, allocated, computed):
    """Results, sums of rows, and with a table its products, their gradients, dq in float32 and the
    gradients of the table by head. Nothing is copied."""
    monkeypatch.setattr(launches, "bound", lambda *_: (lambda *_: None, []))  # nothing is launched
    arguments = arguments_of(option, "counted")
    both_passes(_attention_gpu.attend, arguments)
    with Traffic() as traffic:
        both_passes(_attention_gpu.attend, arguments)
    assert len(plans._plans) == 2
    ran = [name for name in traffic.ran if name not in ("sin", "cos")]
    assert sum("empty" in name for name in ran) == allocated
    assert [name for name in ran if "empty" not in name and name != "as_strided"] == computed


@pytest.mark.parametrize("option", ["table from -3"])
def test_launches_get_addresses_of_living_memory(planned, monkeypatch, option):
    """A launch knows tensors by their addresses alone, so the plan must hold them until then."""
    allocated, addresses = weakref.WeakSet(), []

    def allocate(*arguments, empty_strided=torch.empty_strided, **options):
        x = empty_strided(*arguments, **options)
        allocated.add(x)
        return x

    def launch(*values):
        held = [x.untyped_storage() for x in (*allocated, *inputs)]
        held = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in held]
        passed = {x for x in tree_leaves(values) if type(x) is int and x > 1 << 32}
        addresses.append(passed)
        assert all(any(low <= x < high for low, high in held) for x in passed)

    monkeypatch.setattr(torch, "empty_strided", allocate)
    monkeypatch.setattr(launches, "bound", lambda *_: (launch, []))
    arguments = arguments_of(option, "alive")
    for _ in range(2):
        forward = _attention_gpu.attend("forward", arguments)
        wanted = arguments.p is not None, arguments.bias is not None
        passes = (*forward, *forward, *arguments, *wanted)
        inputs = tensors(passes)
        _attention_gpu.attend("backward", passes)
    assert min(map(len, addresses)) >= 2


def test_autograd_takes_plans(planned, monkeypatch):
    """Outputs and gradients, twice, are those of the CPU's kernels."""
    arguments = draw(generator("autograd"), Shape(1, 2, 1, 5, 20, 8, 8), OPTIONS["bias"])
    grads = incoming(generator("grads"), arguments)
    for _ in range(2):
        ours = run(wavepe.ops.attention, arguments, *grads)
    assert len(plans._plans) == 2
    monkeypatch.setattr(_attention, "serves", lambda x: False)
    for name, want in run(wavepe.ops.attention, arguments, *grads).items():
        torch.testing.assert_close(ours[name], want, msg=name)


def test_plans_do_not_pile_up(planned, monkeypatch):
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="wavepe: q "):  # and is not kept
            _attention_gpu.attend("forward", (q, k, k))
    assert not plans._plans
    monkeypatch.setattr(plans, "MOST", 3)
    for n in range(1, 6):
        _attention_gpu.attend("forward", tuple(torch.ones(1, 1, x, 4) for x in (1, n, n)))
    assert 1 <= len(plans._plans) <= 3


def test_padding_of_nan_interpreted():
    """Hidden keys may hold anything; a NaN elsewhere stays out of rows of other blocks."""
    rng = generator("nan")
    arguments = draw(rng, Shape(1, 2, 2, 70, 70, 8, 8), {})
    hidden = slice(5, 9)
    arguments["key_mask"] = torch.ones(1, 70, dtype=torch.bool)
    arguments["key_mask"][:, hidden] = False
    grads = incoming(rng, arguments)
    clean = run(interpreted, arguments, *grads)
    for name in ("k", "v"):
        arguments[name][:, :, hidden] = torch.nan
    same(run(interpreted, arguments, *grads), clean)


@pytest.mark.parametrize("spec", soon(COMBINED, COMBINED[0]))
def test_combinations_interpreted(spec, monkeypatch):
    """A module's outputs and gradients are those of the CPU's kernels."""
    results = []
    for attention in (wavepe.ops.attention, interpreted):
        monkeypatch.setattr(wavepe.ops, "attention", attention)
        module = made(spec, torch.float32)
        out = module(tokens(dtype=torch.float32))
        out.sin().sum().backward()
        results.append([out.detach(), *(x.grad for x in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()
