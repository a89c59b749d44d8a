"""Attention on a GPU, on a machine without one: which way it goes, fused, by PyTorch's attention
with a mask, or composed; that PyTorch's attention with a mask is right; what its kernels become.

What the kernels compute is in test_ops_attention_interpreted.py.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wavepe
from attention_cases import F32, OPTIONS, Shape, draw, incoming, run, torch
from cases import generator, needs
from processes import output
from traffic import DEVICE, Traffic
from wavepe import ops
from wavepe.ops import _attention, _attention_gpu
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_composed import can_mask, masked
from wavepe.ops._compiler import is_compiling
from wavepe.positions.scores import Scores

importlib.import_module("torch._dynamo.testing")  # before tests replace find_spec
FakeTensorMode = torch._subclasses.FakeTensorMode
GPU = torch.device("cuda", 0)


@pytest.fixture
def reasons(monkeypatch):
    """Return the set of reasons that were warned of; each test starts without any."""
    monkeypatch.setattr(_attention_gpu, "_warned", set())
    _attention_gpu._missing_kernel.cache_clear()
    yield _attention_gpu._warned
    _attention_gpu._missing_kernel.cache_clear()


def went(monkeypatch):
    """Record which implementation each call of attention uses."""
    ways = []

    def note(name, result):
        def way(*arguments, **options):
            ways.append(name)
            return result(arguments[0])

        return way

    monkeypatch.setattr(_attention, "masked", note("masked", lambda call: call.q))
    monkeypatch.setattr(_attention, "composed", note("composed", lambda call: (call.q,) * 3))
    monkeypatch.setattr(_attention, "_FORWARD", note("fused", lambda q: (q, q)))
    return ways


@pytest.mark.parametrize(
    ("dtype", "size", "options", "way"),
    [
        (torch.bfloat16, 64, {}, "fused"),
        (torch.float32, 128, {"softcap": 2.0, "return_lse": True}, "fused"),
        (torch.float32, 129, {}, "masked"),
        (torch.float64, 64, {}, "masked"),
        (torch.float16, 257, {}, "masked"),
        (torch.float16, 257, {"softcap": 2.0}, "composed"),
        (torch.float16, 257, {"dropout_p": 0.5}, "composed"),
        (torch.float16, 257, {"return_lse": True}, "composed"),
    ],
)
def test_ways(monkeypatch, reasons, dtype, size, options, way):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Triton need not be here
    ways = went(monkeypatch)
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(1, 2, 5, size, device="cuda", dtype=dtype)
        if way == "fused":
            ops.attention(x, x, x, **options)
        else:
            with pytest.warns(UserWarning, match=r"without its fused kernel.*\(B, H, m, n\)"):
                ops.attention(x, x, x, **options)
            ops.attention(x, x, x, **options)  # warns once
    assert set(ways) == {way}


def test_reasons(monkeypatch, reasons):
    def reason(device=GPU, dtype=F32, size=64):
        _attention_gpu._missing_kernel.cache_clear()
        return _attention_gpu._missing_kernel(device, dtype, size)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert reason() == ""
    assert reason(torch.device("mps")) == "there is none for mps"
    assert reason(dtype=torch.float64) == "there is none for float64"
    assert reason(size=130) == "there is none for head sizes above 128 in torch.float32, got 130"
    assert reason(dtype=torch.float16, size=256) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert reason() == ""
    assert "above 64 in torch.float32" in reason(size=65)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason() == "it needs compute capability 8.0 or higher, the GPU has 7.5"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason() == "it needs Triton: pip install triton"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert reason() == "there is none for ROCm"


def test_a_compiler_does_not_trace_the_warning(reasons):
    def function(x):
        is_compiling()  # as `attention` does first
        _attention_gpu.warn_of_memory("a reason")
        return x + 1

    with pytest.warns(UserWarning, match="a reason"):
        out = torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(3))
    assert out.tolist() == [1, 1, 1]


def test_fused_on_fake_tensors_of_a_gpu(reasons, monkeypatch):
    """A compiler sees one operator, with the CPU's shapes and dtypes."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(1, h, 5, 8, device="cuda", dtype=torch.float16) for h in (4, 2))
        out, lse = ops.attention(q, k, k, return_lse=True, slopes=torch.ones(4, device="cuda"))
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
    assert (lse.shape, lse.dtype) == (q.shape[:3], F32)


WAVELETS = Scores(wavepe.encoding("wavelet"), 16, 4, True)
GRAPHS = {  # the only operator of wavepe in each, so no constant table is an input
    "attention_forward": lambda q: ops.attention(q, q, q, softcap=2.0, dropout_p=0.1, offset=3),
    "attention_in_graph": lambda q: WAVELETS.attend(q, q, q, {}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph_for_a_gpu(reasons, monkeypatch, name):
    """torch.compile keeps the operator, on tensors that have a device and no values."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    torch._dynamo.reset()
    backend = torch._dynamo.testing.EagerAndRecordGraphs()
    compiled = torch.compile(GRAPHS[name], backend=backend, fullgraph=True)
    with FakeTensorMode(), torch.no_grad():
        compiled(torch.empty(1, 4, 20, 16, device="cuda", dtype=torch.bfloat16))
    (graph,) = backend.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [x.split(".")[1] for x in called if x.startswith("wavepe")] == [name]


# ---- PyTorch's attention with a mask ------------------------------------------------------------


def by_mask(q, k, v, *, return_lse=False, **options):
    """Call `masked` with the arguments of ops.attention; it returns no lse."""
    return masked(Arguments(q, k, v, **options)), q.new_zeros(q.shape[:3], dtype=F32)


MASKED = [
    option
    for option in OPTIONS
    if can_mask(
        (given := OPTIONS[option](generator(option), Shape(1, 2, 1, 3, 3, 2, 2))).get("softcap"),
        given.get("dropout_p", 0.0),
        False,
    )
]


@pytest.mark.parametrize("option", MASKED)
@pytest.mark.parametrize("shape", [Shape(2, 4, 2, 23, 30, 16, 12), Shape(2, 3, 3, 17, 5, 8, 3)])
def test_a_mask_says_it_all(shape, option):
    rng = generator("masked", option)
    arguments = draw(rng, shape, OPTIONS[option])
    grad_out, _ = incoming(rng, arguments)
    want = run(ops.attention, arguments, grad_out)
    got = run(by_mask, arguments, grad_out)
    for name in want.keys() - {"lse"}:
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=2e-5, msg=name)


# ---- what the GPU's half of the operators does beside its kernels -------------------------------


@pytest.mark.parametrize("option", ["plain", "bias", "edge from 2, per head", "everything"])
def test_launches_copy_nothing_and_read_nothing(monkeypatch, option):
    needs("triton")
    from wavepe.ops._attention_gpu import call, launches

    launched = []
    monkeypatch.setattr(launches, "launch", lambda kernel, *rest, **more: launched.append(kernel))
    shape = Shape(2, 4, 2, 70, 80, 16, 16)
    args = draw(generator("traffic"), shape, OPTIONS[option])
    if args.get("dropout_p"):
        args["seed"] = torch.zeros((), dtype=torch.int64)
    args = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    arguments = Arguments(**args)
    with Traffic() as traffic:
        out, lse = call.forward(*arguments)
        grads = call.backward(out, lse, out, lse, *arguments, True, True)
    assert not traffic.found
    assert len(launched) >= 3
    for name, grad in zip(("q", "k", "v", "p", "q_rel", "bias"), grads, strict=True):
        like = getattr(arguments, name)
        assert (grad is None) == (like is None), name
        assert grad is None or grad.shape == like.shape, name


@pytest.mark.parametrize(("gigabytes", "counts"), [(4, [64, 64, 64]), (139, [2, 4, 4])])
def test_chunks_fill_a_part_of_the_memory(gigabytes, counts, monkeypatch):
    """A learned table of 8192 rows, and a bias of 131072 tokens, whose tiles would take 17 GB."""
    needs("triton")
    from wavepe.ops._attention_gpu import chunk

    memory = SimpleNamespace(total_memory=gigabytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(chunk, "chunk_bytes", chunk.chunk_bytes.__wrapped__)
    monkeypatch.setattr(chunk, "Chunk", lambda *parts: parts)
    shapes = (1, 64, 8192, 128), (8192, 128), (8, 32, 131072, 128), (8, 8, 131072, 128)
    with FakeTensorMode():
        x, p, q, k = (torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        table, bias = Arguments(x, x, x, p), Arguments(q, k, k, bias=p)
        calls = (table, False), (table, True), (bias, True, True)
        assert [len(list(chunk.chunks(*each))) for each in calls] == counts


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_only_plain_calls_pass_the_dispatcher():
    """A mode, such as one that counts or fakes, and a tracer see the operator."""
    x = SimpleNamespace(is_cuda=True)
    assert _attention_gpu.serves(x)
    assert not _attention_gpu.serves(torch.zeros(1))
    with FakeTensorMode():
        assert not _attention_gpu.serves(x)
    seen = []
    note = lambda y: seen.append(_attention_gpu.serves(x)) or y + 1  # noqa: E731
    torch.jit.trace(note, torch.zeros(1), check_trace=False)
    assert seen == [False]


def test_a_plan_is_for_one_signature():
    needs("triton")
    from wavepe.ops._attention_gpu.plans import _signature

    x, storage = torch.zeros(2, 3, 16), torch.zeros(200)

    def signature(*values):
        return _signature(values, [], {})

    usual = signature(x, 1, None, [x])
    assert usual == signature(torch.nn.Parameter(x), 1, None, (x.clone(),))
    moved = storage[1:97].view(2, 3, 16)
    others = [(y, 1, None, [x]) for y in (x.double(), x[:, :2], x.mT.contiguous().mT, moved)]
    others += [(x, 2, None, [x]), (x, 1, 0.0, [x]), (x, 1, None, [x, x]), (x, 1, x, None)]
    assert len({str(signature(*values)) for values in others} | {str(usual)}) == len(others) + 1
    assert signature(storage[4:100].view(2, 3, 16), 1, None, [x]) == usual
    negative = torch.complex(storage, storage).conj().imag
    assert negative.is_neg()
    other_class = x.as_subclass(type("Other", (torch.Tensor,), {}))
    for unreadable in (negative, torch.empty(2, device="meta"), other_class, object()):
        assert signature(x, unreadable) is None


def test_a_plan_of_few_queries_follows_strides():
    """Not n, but what Triton compiles for: strides of 1, of multiples of 16, of more than 32 bits.
    A call that is not served has none, so its shapes are in the signature."""
    needs("triton")
    from wavepe.ops._attention_gpu.decode import lengths

    def parts(n, batch_stride=None, m=1, last=1, **options):
        strides = (32 * n if batch_stride is None else batch_stride, 16 * n, 16, last)
        k = torch.empty_strided((1, 2, n, 16), strides, device="meta")
        q = torch.empty(1, 2, m, 16, device="meta")
        return lengths(Arguments(q, k, k, **options))[1:]

    assert parts(15) == ([15, 480, 240, 480, 240], parts(1000, m=16)[1])
    usual, *others = [parts(15, stride)[1] for stride in (32, 40, 1, 1 << 31)]
    assert usual == parts(15)[1]
    assert all(x != y for x, y in zip([usual, *others], others, strict=False))
    masks = [torch.ones(1, n, dtype=torch.bool) for n in (15, 20)]
    assert parts(15, key_mask=masks[0])[1] == parts(20, key_mask=masks[1])[1]
    assert parts(15, key_mask=masks[1])[1] != parts(20, key_mask=masks[1])[1]
    assert parts(15, segments=masks[0])[1] != parts(16, segments=masks[0])[1]  # which are m
    of_pairs = torch.ones(1, 1, 1, 15, dtype=torch.bool)
    for options in ({"m": 17}, {"m": 0}, {"last": 2}, {"dropout_p": 0.1}, {"mask": of_pairs}):
        assert parts(15, **options) == ([], {})


# ---- the kernels, compiled ahead of time for GPUs that need not be here -------------------------

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = """bias=torch.zeros(4, 100), bias_beyond="edge", softcap=2.0, window=99,
slopes=torch.ones(4), offset=torch.zeros(1, dtype=torch.int64),
key_mask=torch.ones(1, 1024, dtype=torch.bool), segments=torch.zeros(1, 1024, dtype=torch.int32),
mask=torch.ones(1, 1, 1024, 1024, dtype=torch.bool), dropout_p=0.1, seed=torch.tensor(1)"""
SPLIT = """bias=torch.zeros(4, 100), softcap=2.0, window=99, sinks=torch.ones(4), beyond="edge",
slopes=torch.ones(4), offset=torch.zeros(1, dtype=torch.int64),
q_rel=torch.ones(1, 4, 3, 128).half(), key_mask=torch.ones(1, 1024, dtype=torch.bool)"""
COMPILED = [  # a call of attention_kernels.measure, its kernels, the bytes that each may spill
    ("Case(80, 64), backward=False", 2, 32),
    ("Case(80, 128), backward=False", 2, 0),
    *((f"Case(100, {size}), backward=False", 2, 0) for size in (64, 128)),
    ("Case(90, 64, dtype=torch.float16), backward=False", 2, 0),
    # an H200 is fastest with tiles that spill a little
    ("Case(90, 64, 'constant')", 5, 128),
    ("Case(90, 128, 'constant')", 5, 128),
    ("Case(90, 64, 'learned')", 6, 0),
    *((f"Case(90, {size}, 'constant'), {EVERYTHING}", 7, 10**4) for size in (64, 128)),
    ("Case(80, 128, 'constant', queries=1)", 2, 0),
    (f"Case(90, 128, 'learned', torch.float16, 3), {SPLIT}", 2, 64),
]


@pytest.fixture(scope="module")
def kernels():
    """The module that compiles them. Triton versions other than this one allot registers
    otherwise."""
    if needs("triton").__version__ != "3.9.0":
        pytest.skip("registers are those of Triton 3.9.0")
    reason = "not run from a source tree"
    return pytest.importorskip("benchmarks.attention_kernels", reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "count", "spills"), COMPILED)
def test_compiled(kernels, call, count, spills):
    """Nothing spills where it must not, shared memory is enough, tensor cores are used."""
    # a fresh process, in which Triton was not told to interpret
    program = "import json, torch; from benchmarks.attention_kernels import *; "
    program += f"print(json.dumps(measure({call})))"
    rows = json.loads(output("-c", program, cwd=ROOT, TRITON_INTERPRET="0"))
    assert len(rows) == count
    forward = ["table_products", "attention_forward"], ["attention_splits", "merge_splits"]
    assert count > 2 or [r["kernel"] for r in rows] == forward[rows[0]["queries"] < 17]
    for row in rows:
        assert row["spilled"] <= spills, row
        assert not (row["spills_in_loops"] and "backward=False" in call), row
        assert row["shared"] <= 1024 * kernels.SHARED[row["arch"]], row
        assert row["tensor_core"] or row["kernel"] in ("diagonal_sums", "merge_splits"), row


def test_the_table_of_kernels(kernels):
    kept = ROOT / "benchmarks" / "results" / "attention-kernels.json"
    rows = json.loads(kept.read_text())["rows"]
    archs, sizes, tables = ({row[key] for row in rows} for key in ("arch", "head_size", "table"))
    assert (archs, sizes) == (set(kernels.ARCHS), {64, 128})
    assert tables == {"none", "constant", "learned"}


def test_missing_parts_are_named(kernels, monkeypatch, capsys):
    from benchmarks import attention

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert attention.main(["kernels"]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", None)
    assert attention.main(["kernels"]) == 1
    assert "make extras brings it" in capsys.readouterr().err
