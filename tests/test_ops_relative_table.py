"""wavepe.ops.relative_table: the error of the zones, rows that are dropped at the ends, and the
object: nothing changes it, its tensors are made once for all, compilers take it."""

import concurrent.futures
import copy
import importlib
import pickle

import numpy as np
import pytest
import torch
import wavepe
from cases import compiled_once, generator, lay_out, recording_backend, wavelets
from wavepe import ops

KINDS = ("ricker", "gaussian", "morlet", "haar")
TOLERANCE = 1e-7  # of the largest value
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# METHODS 1: the published sets of scales, as many as divide each head size
WAVELETS = {
    "octaves": [2.0**i for i in range(8)], "from 2": [2.0**i for i in range(1, 9)],
    "from 4": [2.0**i for i in range(2, 10)], "four": [2.0**i for i in range(4)], "two": [1.0, 2.0],
    "16": [2.0**i for i in range(16)], "32": [2.0**i for i in range(32)], "one": [128.0],
}  # fmt: skip


def ranks(zones):
    """Return that of each zone; the head size where the zone holds its rows."""
    return [u.shape[1] or c.shape[1] for c, u in zip(zones[::2], zones[1::2], strict=True)]


def rebuilt(zones):
    """(p, sum of the magnitudes of its products), float64."""
    p, size = [], []
    for c, u in zip(zones[::2], zones[1::2], strict=True):
        c, u = c.double(), u.double()
        p.append(c @ u.T if u.numel() else c)
        size.append(c.abs() @ u.abs().T if u.numel() else c.abs())
    return torch.cat(p), torch.cat(size)


def check(table, p, first=0, dtype=torch.float32):
    """The table's tensors against the rows given; returns the zones."""
    p = np.asarray(p, np.float64)
    largest = np.abs(p).max(initial=0.0)
    got, start, zones = table.tensors(dtype, "cpu")
    assert got.dtype == dtype
    assert got.is_contiguous()
    lo = start - first
    hi = lo + got.shape[-2]
    assert torch.equal(got, torch.from_numpy(p[..., lo:hi, :]).to(dtype))
    for dropped in (p[..., :lo, :], p[..., hi:, :]):
        assert np.abs(dropped).max(initial=0.0) <= TOLERANCE * largest
    if zones:
        for c, u in zip(zones[::2], zones[1::2], strict=True):
            assert c.dtype == u.dtype == dtype
            assert c.is_contiguous()
            assert u.is_contiguous()
            assert u.shape == (p.shape[-1], 0 if u.numel() == 0 else c.shape[1])
            assert u.numel() == 0 or c.shape[1] < 0.75 * p.shape[-1]
        again, size = rebuilt(zones)
        # The part that the basis leaves out, then C and U round once each.
        bound = TOLERANCE * largest + (2 + UNIT[dtype]) * UNIT[dtype] * size
        assert ((again - torch.from_numpy(p[lo:hi])).abs() <= 1.0001 * bound).all()
    return zones


# ------------------------------------------------------------------ zones
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [32, *(pytest.param(d, marks=pytest.mark.slow) for d in (64, 128))])
def test_every_wavelet(kind, d):
    for scales in WAVELETS.values():
        if d % len(scales) == 0:
            for options in ({}, {"mirrored": True}, {"first": -700, "w": 1400}):
                p = wavelets(d, scales=scales, kind=kind, **{"w": 1000, **options})
                first = options.get("first", 0)
                check(ops.relative_table(p, first), p, first)


@pytest.mark.parametrize(
    ("d", "rows", "near", "far"), [(32, 808, 24, 11), (64, 812, 29, 12), (128, 820, 37, 15)]
)
def test_ranks_of_the_papers_wavelets(d, rows, near, far):
    """The ranks and the band that a prototype measured at 1e-7."""
    p, first, zones = ops.relative_table(wavelets(d)).tensors(torch.float32, "cpu")
    assert first == 0
    assert abs(len(p) - rows) <= 4
    assert [len(c) for c in zones[::2]] == [64, len(p) - 64]
    got = ranks(zones)
    assert abs(got[1] - far) <= 1
    if near >= 0.75 * d:  # not worth it
        assert got[0] == d
        assert torch.equal(zones[0], p[:64])
    else:
        assert abs(got[0] - near) <= 1
    work = sum(r * (len(c) + d) for r, c in zip(got, zones[::2], strict=True))
    assert work < {32: 0.55, 64: 0.35, 128: 0.25}[d] * p.numel()


def test_zones_of_both_sides():
    p = wavelets(64, w=1601, first=-800)
    zones = check(ops.relative_table(p, -800), p, -800)
    assert [len(c) for c in zones[::2]][1] == 127  # |delta| < 64
    assert len(zones) == 6
    assert max(ranks(zones)[::2]) <= 14
    p[:100] *= 1e-12  # dropped: the zones stay where they are
    zones = check(ops.relative_table(p, -800), p, -800)
    assert [len(c) for c in zones[::2]][:2] == [800 - 100 - 63, 127]
    one_side = p[:700]  # delta < -100
    zones = check(ops.relative_table(one_side, -800), one_side, -800)
    assert len(zones) == 2


@pytest.mark.parametrize("dtype", UNIT)
def test_float32_values_and_low_precision(dtype):
    p = wavelets(dtype=np.float32)
    zones = check(ops.relative_table(torch.from_numpy(p)), p, dtype=dtype)
    assert ranks(zones) == pytest.approx([37, 15], abs=2)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (40, 64), (64, 128), (300, 64), (5000, 32)])
def test_irregular_tables_keep_their_rows(shape):
    p = generator("random").normal(size=shape)
    for first in (0, -50, 1000):
        assert check(ops.relative_table(p, first), p, first) == []


def test_a_zone_that_is_irregular_keeps_its_rows():
    p = wavelets()
    p[:64] += generator("near").normal(size=(64, 128))
    table = ops.relative_table(p)
    zones = check(table, p)
    assert ranks(zones)[0] == 128
    assert ranks(zones)[1] < 20
    rows, _, _ = table.tensors(torch.float32, "cpu")
    assert torch.equal(zones[0], rows[:64])
    p = wavelets()
    p[64:] = generator("far").normal(size=(2048 - 64, 128))
    assert ranks(check(ops.relative_table(p), p))[1] == 128


def test_long_tables():
    rng = generator("long")
    smooth = rng.normal(size=(6000, 5)) @ rng.normal(size=(5, 64))
    assert ranks(check(ops.relative_table(smooth), smooth)) == [5, 5]
    hidden = smooth.copy()  # rank 64, in rows of which a sample sees few
    hidden[1000:1064] += rng.normal(size=(64, 64))
    assert ranks(check(ops.relative_table(hidden), hidden)) == [5, 64]


def test_a_zone_of_zeros_is_not_taken_for_a_full_one():
    p = np.zeros((400, 16))
    p[0], p[-1] = 1, 2
    zones = check(ops.relative_table(p, -200), p, -200)
    assert ranks(zones) == [1, 1, 1]
    assert not rebuilt(zones)[0][1:-1].any()


def test_float64_keeps_the_exact_table():
    p = wavelets()
    got, first, zones = ops.relative_table(p).tensors(torch.float64, "cpu")
    assert first == 0
    assert zones == []
    assert torch.equal(got, torch.from_numpy(p[: len(got)]))
    assert not p[len(got) :].any()
    assert len(got) > len(ops.relative_table(p).tensors(torch.float32, "cpu")[0])


# ------------------------------------------------------------------ values of all kinds
@pytest.mark.parametrize("exponent", [-1000, -100, 100, 1000])
def test_scale_does_not_matter(exponent):
    p = np.ldexp(wavelets(64), exponent)
    with np.errstate(all="raise"):
        table = ops.relative_table(p)
    assert "rank 29+12" in repr(table)
    if abs(exponent) == 100:
        check(table, p)
    got, first, _ = table.tensors(torch.float64, "cpu")
    assert torch.equal(got, torch.from_numpy(p[first : len(got)]))


def test_zones_that_would_overflow_are_not_used():
    """Sums over a row may pass the end of a dtype's range where its entries do not."""
    for dtype, largest in ((torch.float32, 3e38), (torch.float16, 6e4)):
        p = largest * wavelets(64)
        table = ops.relative_table(p)
        assert "rank 29+12" in repr(table)
        assert check(table, p, dtype=dtype) == []
    assert check(table, p) != []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stay(value):
    p = wavelets(32, w=300)
    p[200, 3] = value
    p = np.concatenate([np.zeros((2, 32)), p, np.full((1, 32), value), np.zeros((3, 32))])
    table = ops.relative_table(p, -2)
    for dtype in (torch.float32, torch.float64):
        got, first, zones = table.tensors(dtype, "cpu")
        assert zones == []
        assert first == 0
        want = torch.from_numpy(p[2:-3]).to(dtype)
        assert torch.equal(got.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4), (7, 4), (7, 0), (0, 0), (3, 7, 4), (3, 0, 4), (0, 7, 4)])
def test_nothing_but_zeros(shape, dtype):
    table = ops.relative_table(np.zeros(shape), 5)
    p, _, zones = table.tensors(dtype, "cpu")
    assert p.shape == (*shape[:-2], 0, shape[-1])
    assert zones == []
    assert table.rows == 0
    assert "no rows" in repr(table)


def same_bias(table, p, first, beyond, tolerance=0.0):
    """The rows kept say what all of them said, far outside of them too."""
    rng = generator("bias")
    q = rng.normal(size=(3, 5, p.shape[-1]))
    q = np.abs(q) if tolerance else q
    for dtype in (torch.float64, torch.float32):
        rows, start, _ = table.tensors(dtype, "cpu")
        allowed = tolerance * q.sum(-1).max() * np.abs(p).max() if dtype == torch.float32 else 0
        q_, p_, rows = q.astype(rows.numpy().dtype), p.astype(rows.numpy().dtype), rows.numpy()
        # the last ones: deltas far on both sides
        for keys, j in ((5, 0), (9, 0), (60, 0), (1, 45), (1, 100), (1, -40)):
            want = wavepe.relative_bias(q_, p_, keys, first=first + j, beyond=beyond)
            got = wavepe.relative_bias(q_, rows, keys, first=start + j, beyond=beyond)
            assert (np.abs(got - want) <= allowed).all(), f"keys={keys} j={j}"


@pytest.mark.parametrize("lead", [(), (3,)])
def test_rows_that_say_nothing_are_dropped(lead):
    p = generator("rows").normal(size=(*lead, 30, 8))
    p[..., :4, :] = 0
    p[..., 10, :] = 0
    p[..., 25:, :] = 0
    p[..., 6, 0] = 100
    table = ops.relative_table(p, -7)
    assert (table.first, table.rows) == (-3, 21)
    same_bias(table, p, -7, "zero")
    p[..., 4, :] *= 1e-9  # said to float64 alone
    p[..., 24, :] *= 1e-9
    table = ops.relative_table(p, -7)
    assert (table.first, table.rows) == (-3, 21)
    got, first, _ = table.tensors(torch.float32, "cpu")
    assert (first, got.shape[-2]) == (-2, 19)
    same_bias(table, p, -7, "zero", TOLERANCE)
    if lead:  # dropped only where no head says anything
        p[1, 0, 2] = 5
        assert ops.relative_table(p, -7).first == -7


@pytest.mark.parametrize("lead", [(), (3,)])
def test_an_edge_is_dropped_where_it_repeats(lead):
    p = generator("edge").normal(size=(*lead, 30, 8))
    p[..., -1, :] = 0
    table = ops.relative_table(p, -7, "edge")
    assert (table.first, table.rows) == (-7, 30)
    same_bias(table, p, -7, "edge")
    p[..., :5, :] = p[..., 4:5, :]
    p[..., 20:, :] = p[..., 20:21, :]
    p[..., 10:13, :] = p[..., 10:11, :]
    table = ops.relative_table(p, -7, beyond="edge")
    assert (table.first, table.rows) == (-3, 17)
    same_bias(table, p, -7, "edge")
    p[...] = p[..., :1, :]
    table = ops.relative_table(p, -7, beyond="edge")
    assert table.rows == 1
    same_bias(table, p, -7, "edge")


def test_tables_of_heads_and_edges_have_no_zones():
    p = wavelets(64)
    assert ops.relative_table(np.stack([p, p])).tensors(torch.float32, "cpu")[2] == []
    assert ops.relative_table(p, beyond="edge").tensors(torch.float32, "cpu")[2] == []
    assert ops.relative_table(p).tensors(torch.float32, "cpu")[2] != []


def test_a_huge_row_hides_no_other():
    """The allowed error is relative to a usual row, and not to the largest one."""
    scale, shift = wavepe.wavelet_grid(64)
    p = torch.from_numpy(wavepe.wavelet_table(300, scale, shift, dtype=np.float64))
    for factor in (1e3, 1e9):
        tall = p.clone()
        tall[0] *= factor
        rows, first, zones = ops.relative_table(tall).tensors(torch.float32, torch.device("cpu"))
        found = rebuilt(zones)[0] if zones else rows.double()
        assert first == 0
        torch.testing.assert_close(found[1:], p[1 : len(found)], rtol=0, atol=1e-6)


# ------------------------------------------------------------------ the object
def test_attributes():
    p = wavelets(64, w=900).astype(np.float32)
    p[-1] = 1
    table = ops.relative_table(p, -3)
    assert (table.first, table.rows, table.head_size, table.heads) == (-3, 900, 64, None)
    assert table.beyond == "zero"
    assert table.p.dtype == torch.float64
    assert torch.equal(table.p, torch.from_numpy(p).double())
    assert ops.relative_table(np.ones((4, 6, 2)), beyond="edge").heads == 4
    for part in ("delta -3..896", "head size 64", "zero", "rank 29+"):
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
    table.tensors(torch.float32, "cpu")[2].append(1)  # a list of one's own
    assert table.tensors(torch.float32, "cpu")[2] == []


def test_copies_and_pickles():
    table = ops.relative_table(np.concatenate([np.zeros((2, 64)), wavelets(64)]), -5)
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
    meta = table.tensors(torch.float32, "meta")
    assert meta[0].is_meta
    assert [x.shape for x in meta[2]] == [x.shape for x in table.tensors(torch.float32, "cpu")[2]]


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


def within(mode, given=lambda: X):
    def call(function):
        with mode():
            function(given())

    return call


def fake_tensors():
    module = importlib.import_module("torch._subclasses.fake_tensor")
    return module.FakeTensorMode(allow_non_fake_inputs=True)


X = torch.ones(3, 64, dtype=torch.bfloat16)
AROUND = {
    "fake tensors": within(fake_tensors, lambda: X.new_ones(X.shape)),
    "inference": within(torch.inference_mode, lambda: X.new_ones(X.shape)),
    "default device": within(lambda: torch.device("meta")),
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


LOW = pytest.param(torch.bfloat16, marks=pytest.mark.slow)  # a part of it is made in any case


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
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
        ("beyond.*wrap.*zero, edge", (P, 0, "wrap")),
        ("at least one row", (np.ones((0, 3)), 0, "edge")),
        ("<U1", (np.array([["a"]]),)),
        ("sequence", ([["a"], 3],)),
        (r"got tuple; pass Table\(\*p\)", ((P, 0, "zero"),)),
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
