"""Which way attention goes on a GPU, on a machine without one: fused, by PyTorch's attention with a
mask, or composed; and that PyTorch's attention with a mask is right."""

import importlib

import pytest
from attention_cases import F32, OPTIONS, Shape, draw, incoming, run, torch
from cases import generator
from traffic import DEVICE, Traffic
from wavepe import ops
from wavepe.ops import _attention, _attention_gpu
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_masked import can_mask, masked
from wavepe.ops._compiler import is_compiling

importlib.import_module("torch._dynamo")  # before tests replace find_spec
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
    monkeypatch.setattr(_attention, "composed", note("composed", lambda q: (q, q, q)))
    monkeypatch.setattr(_attention, "_DIRECT_FORWARD", note("fused", lambda q: (q, q)))
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


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "dropout_p": 0.1, "offset": 3, "return_lse": True}]
)
def test_one_graph_for_a_gpu(reasons, monkeypatch, options):
    """torch.compile keeps the operator, on tensors that have a device and no values."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: ops.attention(q, q, q, **options), backend=backend, fullgraph=True
    )
    with FakeTensorMode(), torch.no_grad():
        compiled(torch.empty(1, 4, 20, 16, device="cuda", dtype=torch.bfloat16))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.wavepe.attention_forward.default in called


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
    pytest.importorskip("triton", reason="needs Triton")
    from wavepe.ops._attention_gpu import call, launches

    launched = []
    monkeypatch.setattr(launches, "launch", lambda kernel, *rest, **more: launched.append(kernel))
    shape = Shape(2, 4, 2, 70, 80, 16, 16)
    given = draw(generator("traffic"), shape, OPTIONS[option])
    if given.get("dropout_p"):
        given["seed"] = torch.zeros((), dtype=torch.int64)
    given = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    arguments = Arguments(**given)
    with Traffic() as traffic:
        out, lse = call.forward(*arguments)
        grads = call.backward(out, lse, out, lse, *arguments, True, True)
    assert not traffic.found
    assert len(launched) >= 3
    assert len({id(x) for x in grads}) == len(grads) == 6  # torch refuses one tensor twice
    for name, grad in zip(("q", "k", "v", "p", "q_rel", "bias"), grads, strict=True):
        like = getattr(arguments, name)
        assert grad.shape == ((0,) if like is None else like.shape), name
