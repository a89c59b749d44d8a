"""The object of wavepe.ops.relative_table: nothing changes it, its tensors are made once for all,
compilers take it; bad input."""

import concurrent.futures
import copy
import importlib
import pickle

import numpy as np
import pytest
from cases import compiled_once, generator, lay_out, load_torch, recording_backend, wavelets

torch, ops = load_torch()


def test_attributes():
    p = wavelets(64, w=900).astype(np.float32)
    p[-1] = 1
    table = ops.relative_table(p, -3)
    assert (table.first, table.rows, table.head_size, table.heads) == (-3, 900, 64, None)
    assert table.beyond == "zero"
    assert table.p.dtype == torch.float64
    assert torch.equal(table.p, torch.from_numpy(p).double())
    assert ops.relative_table(np.ones((4, 6, 2)), beyond="edge").heads == 4
    for part in ("delta -3..896", "head size 64", "zero", "rank 29+", "bytes"):
        assert part in repr(table)
    assert "4 heads" in repr(ops.relative_table(np.ones((4, 6, 2))))


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "negative", "fortran"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_copy_is_held(layout, dtype):
    p = lay_out(generator("copy").normal(size=(9, 4)).astype(dtype), layout)
    tensor = torch.from_numpy(p.copy())
    kept = tensor.clone().double()
    tables = ops.relative_table(p), ops.relative_table(tensor), ops.relative_table(tensor.mT).p.mT
    assert torch.equal(tables[2], kept)
    p[...] = 7
    tensor.fill_(7)
    tables[0].p.fill_(7)
    for table in tables[:2]:
        assert torch.equal(table.p, kept)
        for wanted in (torch.float64, torch.float32, torch.bfloat16):
            assert torch.equal(table.tensors(wanted, "cpu")[0], kept.to(wanted))


def test_bfloat16_sources():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    p = generator("bf16").normal(size=(9, 4))
    want = torch.from_numpy(p).bfloat16().double()
    assert torch.equal(ops.relative_table(torch.from_numpy(p).bfloat16()).p, want)
    given = want.numpy().astype(ml_dtypes.bfloat16)
    assert torch.equal(ops.relative_table(given).p, want)


def test_nothing_can_be_set():
    table = ops.relative_table(np.eye(4, 3))
    for name in ("first", "p", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(table, name, 1)
    with pytest.raises(AttributeError, match="first"):
        del table.first
    table.tensors(torch.float32, "cpu")[2].append(1)  # a list of one's own
    assert table.tensors(torch.float32, "cpu")[2] == []


def test_copies_and_pickles():
    p = np.concatenate([np.zeros((2, 64)), wavelets(64)])
    table = ops.relative_table(p, -5)
    table.tensors(torch.bfloat16, "cpu")
    assert copy.deepcopy(table) is table
    assert copy.copy(table) is table
    again = pickle.loads(pickle.dumps(table))
    assert (again.first, again.rows, again.beyond) == (-3, table.rows, "zero")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        (a, first, zones), (b, first_b, zones_b) = (t.tensors(dtype, "cpu") for t in (table, again))
        assert first == first_b
        assert torch.equal(a, b)
        assert all(torch.equal(x, y) for x, y in zip(zones, zones_b, strict=True))


def test_tensors_are_made_once():
    table = ops.relative_table(wavelets(64))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        p, first, zones = table.tensors(dtype, torch.device("cpu"))
        for device in ("cpu", torch.device("cpu")):
            again = table.tensors(dtype, device)
            assert again[0] is p
            assert again[1] == first
            assert all(a is b for a, b in zip(again[2], zones, strict=True))
    before = repr(table)
    meta = table.tensors(torch.float32, "meta")
    assert meta[0].is_meta
    assert [x.shape for x in meta[2]] == [x.shape for x in table.tensors(torch.float32, "cpu")[2]]
    assert before != repr(table)  # it says how many bytes it holds


def test_threads_get_the_same_tensors():
    table = ops.relative_table(wavelets(64))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(table.tensors, torch.bfloat16, "cpu") for _ in range(32)]
        made = [job.result()[0] for job in jobs]
    assert all(p is made[0] for p in made)


# ------------------------------------------------------------------ framework


def product(table, x):
    """Return x . p, computed from the zones and the other results of `tensors`."""
    p, first, zones = table.tensors(x.dtype, x.device)
    out = (x @ p.mT).sum(-1) + first
    for c, u in zip(zones[::2], zones[1::2], strict=True):
        if u.numel():
            out = out + ((x @ u) @ c.mT).sum(-1)
    return out


def assert_usable(table, dtype):
    """Assert that a later call can use the table, also in training."""
    p, _, zones = table.tensors(dtype, "cpu")
    for x in (p, *zones):
        assert type(x) is torch.Tensor
        assert not x.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(x)
        assert x.device.type == "cpu"
    x = torch.ones(3, 64, dtype=dtype, requires_grad=True)
    product(table, x).sum().backward()
    assert x.grad.isfinite().all()


def in_inference_mode(function):
    with torch.inference_mode():
        function(torch.ones(3, 64, dtype=torch.bfloat16))


def on_another_default_device(function):
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    with torch.device("meta"):
        function(x)


def on_fake_tensors(function):
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    with fake(allow_non_fake_inputs=True):
        function(torch.ones(3, 64, dtype=torch.bfloat16))


X = torch.ones(3, 64, dtype=torch.bfloat16)
AROUND = {
    "fake tensors": on_fake_tensors,
    "inference": in_inference_mode,
    "default device": on_another_default_device,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: torch.vmap(f)(X),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
    "make_fx": lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(X),
    "compile": lambda f: torch.compile(f, backend="eager", fullgraph=True)(X),
}


@pytest.mark.parametrize("around", AROUND)
def test_made_within_anything(around):
    torch._dynamo.reset()
    table = ops.relative_table(wavelets(64))
    AROUND[around](lambda x: product(table, x))
    assert_usable(table, torch.bfloat16)
    with torch.inference_mode():
        table = ops.relative_table(torch.from_numpy(wavelets(64)))
    assert_usable(table, torch.float32)


TABLE = ops.relative_table(wavelets(64))


def of_a_global(x, table):
    return product(TABLE, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", [of_a_global, lambda x, table: product(table, x)])
def test_compiles_whole_for_any_length(function, dtype):
    backend = recording_backend()
    table = ops.relative_table(2 * wavelets(64), 3)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 23):
        x = torch.ones(length, 64, dtype=dtype)
        assert torch.equal(compiled(x, table), function(x, table))
    assert compiled_once(backend)
    # Another table, never used before, in the same compiled function; and two dtypes in one graph.
    other = ops.relative_table(3 * wavelets(64), -8)
    assert torch.equal(compiled(x, other), function(x, other))
    assert torch.equal(compiled(x, table), function(x, table))

    def both(x, table):
        return function(x, table).double() + function(x.half(), table)

    third = ops.relative_table(wavelets(64), 1)
    got = torch.compile(both, backend="eager", fullgraph=True)(x, third)
    assert torch.equal(got, both(x, third))


def test_made_outside_of_compiled_functions():
    torch._dynamo.reset()
    p = np.ones((4, 64))

    def inside(x):
        return product(ops.relative_table(p), x)

    x = torch.ones(3, 64)
    assert torch.equal(torch.compile(inside, backend="eager")(x), inside(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside"):
        torch.compile(inside, backend="eager", fullgraph=True)(x)


P = np.ones((4, 3))


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        (r"\(w, d\).*\(4,\)", (np.ones(4),)),
        (r"\(2, 3, 4, 5\)", (torch.ones(2, 3, 4, 5),)),
        (r"\(w, d\).*\(\)", (1.0,)),
        ("int64", (np.ones((4, 3), int),)),
        ("int64", (torch.ones(4, 3, dtype=torch.int64),)),
        ("complex64", (torch.ones(4, 3, dtype=torch.complex64),)),
        ("requires grad.*pass the tensor itself", (torch.ones(4, 3, requires_grad=True),)),
        ("meta", (torch.ones(4, 3, device="meta"),)),
        ("first.*1.5", (P, 1.5)),
        ("first.*True", (P, True)),
        (r"2\^62", (P, 2**62)),
        ("beyond.*wrap.*zero, edge", (P, 0, "wrap")),
        ("at least one row", (np.ones((0, 3)), 0, "edge")),
        ("<U1", (np.array([["a"]]),)),
        ("sequence", ([["a"], 3],)),
        (r"unpack it: relative_table\(\*table\)", ((P, 0, "zero"),)),
        ("a RelativeTable already", (ops.relative_table(P),)),
    ],
)
def test_errors(match, arguments):
    with pytest.raises(RuntimeError, match=f"wavepe: .*{match}"):
        ops.relative_table(*arguments)


def test_errors_of_tensors_and_transforms():
    table = ops.relative_table(P)
    for dtype in (torch.int64, torch.complex64, "float32", None):
        with pytest.raises(RuntimeError, match="wavepe: dtype"):
            table.tensors(dtype, "cpu")
    with pytest.raises(RuntimeError, match=r"outside of torch\.func"):
        torch.vmap(lambda p: ops.relative_table(p).p)(torch.ones(2, 4, 3))
