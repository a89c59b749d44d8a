"""wavepe.attention: shapes that broadcast, dtypes, memory layouts, empty sizes, memory, errors.

Random calls of all of it are in test_fuzz.py.
"""

import itertools
import os
import sys

import numpy as np
import pytest
import wavepe
from attention_arrays import DECODING, Shape, call, check, draw
from attention_options import EMPTY
from cases import INTEGERS, LAYOUTS, OUT_LAYOUTS, SIZES, Guard, assert_same_bits, generator, lay_out
from processes import python

SHAPE = Shape(2, 4, 2, 7, 9, 5, 6)


def arrays(given):
    return {name: x for name, x in given.items() if isinstance(x, np.ndarray)}


# ---- shapes ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v", "of_p", "of_slopes", "of_bias", "lead"),
    [
        ((), (), (), None, None, None, ()),
        ((), (), (), (), (), (), ()),
        ((3,), (3,), (3,), (), (3,), None, (3,)),
        ((6,), (2,), (2,), (6,), (6,), (6,), (6,)),
        ((6,), (), (), (1,), (), None, (6,)),
        ((6,), (1,), (3,), None, None, None, (6,)),
        ((), (4,), (4,), None, None, None, (4,)),
        ((), (), (), (4,), None, None, (4,)),
        ((), (), (), None, (4,), None, (4,)),
        ((), (), (), None, None, (4,), (4,)),
        ((4,), (), (), None, None, (), (4,)),
        ((4,), (), (), None, None, (2, 1), (2, 4)),
        ((1, 4), (), (), None, None, (2, 4), (2, 4)),
        ((1,), (2,), (2,), (6,), None, None, (6,)),
        ((5, 4), (5, 2), (5, 2), (4,), (4,), (4,), (5, 4)),
        ((5, 4), (2,), (5, 1), (), (5, 1), None, (5, 4)),
        ((4,), (5, 2), (5, 2), None, None, None, (5, 4)),
        ((1, 4), (5, 2), (1, 2), (5, 1), None, None, (5, 4)),
        ((2, 1, 4), (3, 2), (2, 1, 1), (1, 1), (3, 4), None, (2, 3, 4)),
        ((2, 3, 4), (4,), (), (2, 1, 4), (2, 3, 1), None, (2, 3, 4)),
    ],
)
def test_leading_axes_broadcast(variant, of_q, of_k, of_v, of_p, of_slopes, of_bias, lead):
    rng = generator("lead")
    for m, n in ((5, 7), (1, 9), (100, 4)):
        args = {
            name: rng.normal(size=(*axes, *rest)).astype(np.float32)
            for name, axes, rest in (
                ("q", of_q, (m, 4)), ("k", of_k, (n, 4)), ("v", of_v, (n, 3)), ("p", of_p, (6, 4)),
                ("slopes", of_slopes, ()), ("bias", of_bias, (6,)),
            )
            if axes is not None
        }  # fmt: skip
        if "p" in args:  # q_rel has the axes of p, which are not q's
            args["p"] = args["p"][..., :3]
            args["q_rel"] = rng.normal(size=(*of_p, m, 3)).astype(np.float32)
        if "slopes" in args:
            args["sinks"] = rng.normal(size=of_slopes).astype(np.float32)
        first = {"bias_first": -1} if "bias" in args else {}
        out, lse = check(args | first, f"{m} {n}")
        assert out.shape == (*lead, m, 3)
        assert lse.shape == (*lead, m)
        for name in args.keys() & {"p", "bias"}:  # rows out of reach change no shape
            far = {"p": {"first": 99}, "bias": {"bias_first": 99}}[name]
            none = args[name][..., :0, :] if name == "p" else args[name][..., :0]
            assert wavepe.attention(**args | far).shape == out.shape
            assert wavepe.attention(**args | {name: none}).shape == out.shape


@pytest.mark.parametrize("shape", [*EMPTY, Shape(2, 1, 0, 5, 6, 4, 3)], ids=str)
def test_empty(variant, shape):
    options = ("plain", "every key", "table", "edge far above", "slopes", "everything", "bias")
    for option in options:
        for dtype in (np.float16, np.float32, np.float64):
            check(draw(generator("empty"), shape, option, dtype), f"{option} {shape}")


def test_table_without_rows(variant):
    args = draw(generator("rows"), SHAPE)
    for p in (np.zeros((0, 5), np.float32), np.zeros((4, 0, 5), np.float32)):
        assert_same_bits(wavepe.attention(**args, p=p), wavepe.attention(**args))
        with pytest.raises(ValueError, match="at least one row"):
            wavepe.attention(**args, p=p, beyond="edge")
    for bias in (np.zeros(0), np.zeros((4, 0))):
        assert_same_bits(wavepe.attention(**args, bias=bias), wavepe.attention(**args))
        with pytest.raises(ValueError, match="bias_beyond='edge' needs a bias of at least one"):
            wavepe.attention(**args, bias=bias, bias_beyond="edge")


def test_bias_is_read_as_what_is_computed_in(variant):
    given = draw(generator("bias dtypes"), SHAPE, "bias, both sides")
    numbers = np.round(4 * given["bias"])
    for dtype, wide in ((np.float16, "f4"), (np.float32, "f4"), (np.float64, "f8")):
        qkv = {name: given[name].astype(dtype) for name in "qkv"}
        want = call(given | qkv | {"bias": numbers.astype(wide)})
        for kind in ("i1", "f2", "f4", "f8", ">f4", "i8"):
            for x, y in zip(call(given | qkv | {"bias": numbers.astype(kind)}), want, strict=True):
                assert_same_bits(x, y)


# ---- memory ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "bfloat16"])
def test_every_layout(variant, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    for shape in (Shape(2, 4, 2, 19, 37, 24, 20), DECODING[1]):
        given = draw(generator("layouts"), shape, "everything", dtype)
        for layout in LAYOUTS:
            for names in (*"qkvp", "qkvp", ["bias"]):
                laid = given | {name: lay_out(given[name], layout) for name in names}
                plain = {name: np.array(x, order="C") for name, x in arrays(laid).items()}
                for x, y in zip(call(laid), call(laid | plain), strict=True):
                    bits = f"u{x.dtype.itemsize}"
                    assert_same_bits(x.view(bits), y.view(bits), f"{layout} {names}")


def test_heads_last_and_packed_projections(variant):
    rng = generator("packed")
    qkv = rng.normal(size=(2, 21, 3, 4, 16)).astype(np.float32)  # batch, token, which, head, dim
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    given = {"q": q, "k": k, "v": v}
    check(given)
    assert_same_bits(call(given)[0], call({n: x.copy() for n, x in given.items()})[0])
    fields = np.zeros(qkv.shape, [("flag", "u1"), ("x", "f4")])  # an element each five bytes
    fields["x"] = qkv
    assert_same_bits(wavepe.attention(*fields["x"].transpose(2, 0, 3, 1, 4)), call(given)[0])
    other_order = qkv.astype(">f4").transpose(2, 0, 3, 1, 4)
    assert_same_bits(wavepe.attention(*other_order), call(given)[0])


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_outputs_stay_inside(variant, monkeypatch, layout):
    guards, empty = [], np.empty

    def guarded(shape, dtype):
        if not np.dtype(dtype).itemsize:
            return empty(shape, dtype)  # NumPy's own, to broadcast shapes
        guards.append(Guard(shape, dtype, "offset" if guards else layout))  # lse is dense
        return guards[-1].out

    for dtype, size in itertools.product((np.float16, np.float32, np.float64), SIZES):
        shape = Shape(2, 2, 1, size, size + 2, 4, 1 + size % 19)
        given = draw(generator("canary"), shape, "edge from 2, per head", dtype)
        want = call(given)
        with monkeypatch.context() as patched:
            patched.setattr(np, "empty", guarded)
            got = call(given)
        assert len(guards) == 2
        for guard, x, y in zip(guards, got, want, strict=True):
            guard.check(f"{dtype} {size}")
            assert_same_bits(x, y)
        guards.clear()


def test_inputs_are_left_alone(variant):
    given = draw(generator("left alone"), SHAPE, "everything")
    before = {name: x.copy() for name, x in arrays(given).items()}
    for x in arrays(given).values():
        x.flags.writeable = False
    call(given)
    for name, x in before.items():
        assert_same_bits(given[name], x)


LIMITED = """
import resource, numpy as np, wavepe
x = np.broadcast_to(np.float32(1), (8192, 4))
wavepe.attention(x[:100], x, x)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
y = wavepe.attention(x, x, x, window=50, bias=x[:, 0])  # weights alone would be 2^28 bytes
print(y.shape, (y == 1).all())
x = np.broadcast_to(np.float32(1), (2**22, 4))
try:
    wavepe.attention(x[:17], x, x)  # fewer would decode, which packs nothing
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan maps terabytes")
def test_memory_is_linear_and_its_end_an_error():
    done = python("-c", LIMITED)
    lines = done.stdout.splitlines()
    assert lines[0] == "(8192, 4) True", done.stderr
    assert lines[1].startswith("attention needs ")
    assert lines[1].endswith(" bytes of scratch memory")


def repeated(*shape):
    """One element, stride 0."""
    return np.broadcast_to(np.float32(1), shape)


@pytest.mark.parametrize(
    ("q", "k", "p"),
    [
        (repeated(2, 8), repeated(2**45, 8), None),
        (repeated(2, 0), repeated(2**58, 0), None),
        (repeated(2, 2**45), repeated(3, 2**45), None),
        (repeated(1, 2**57), repeated(1, 2**57), None),
        (repeated(2**45, 8), repeated(1, 8), None),
        (repeated(2**45, 8), repeated(1, 8), repeated(2**45, 8)),
    ],
)
@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_sizes_that_overflow(q, k, p, beyond):
    """No product of sizes may wrap: an error instead."""
    with pytest.raises(MemoryError, match=r"memory|Unable to allocate"):
        wavepe.attention(q, k, k, p=p, beyond=beyond)


def test_a_table_may_be_endless(variant):
    """Only rows in reach are read."""
    args = draw(generator("endless"), SHAPE)
    for first in (0, -(2**40)):
        got = wavepe.attention(**args, p=repeated(2**50, 5), first=first)
        assert_same_bits(got, wavepe.attention(**args, p=repeated(9, 5)))
        got = wavepe.attention(**args, bias=repeated(2**50), bias_first=first)
        assert_same_bits(got, wavepe.attention(**args, bias=repeated(9)))


# ---- dtypes ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v", "of_p", "result"),
    [
        ("f4", "f4", "f8", None, "f8"),
        ("f2", "f4", "f2", None, "f4"),
        ("f2", "f2", "f2", "f4", "f4"),
        ("f4", "f4", "f4", "f8", "f8"),
        ("i1", "i1", "i1", "i1", "f4"),
        ("f4", "u2", "f4", None, "f4"),
        ("f4", "f4", "i8", None, "f8"),
        ("f2", "i1", "f2", None, "f2"),
        *((kind.__name__,) * 3 + (None, np.result_type(kind, np.float32)) for kind in INTEGERS),
    ],
)
def test_dtypes_promote(variant, of_q, of_k, of_v, of_p, result):
    rng = generator("promote")
    given = {
        name: (9 * rng.random(size=shape)).astype(dtype)
        for name, shape, dtype in (
            ("q", (4, 7, 5), of_q),
            ("k", (2, 9, 5), of_k),
            ("v", (2, 9, 3), of_v),
            ("p", (6, 5), of_p),
        )
        if dtype
    }
    got, cast = call(given), {name: x.astype(result) for name, x in given.items()}
    assert got[0].dtype == result
    for x, y in zip(got, check(cast), strict=True):
        assert_same_bits(x, y)


def test_bfloat16_promotes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q = np.ones((3, 4), bfloat16)
    out, lse = wavepe.attention(q, q, q, p=q, slopes=np.ones((), bfloat16), return_lse=True)
    assert (out.dtype, lse.dtype) == (bfloat16, np.float32)
    assert wavepe.attention(q, q, q.astype(np.float32)).dtype == np.float32
    assert wavepe.attention(q, q, q.astype(np.float64)).dtype == np.float64
    with pytest.raises(TypeError, match=r"q bfloat16 .*v float16"):
        wavepe.attention(q, q, q.astype(np.float16))


def test_lists_and_other_slopes(variant):
    q = [[1, 2], [3, 4]]
    assert wavepe.attention(q, q, q).dtype == np.float64
    x = np.ones((2, 3, 4), np.float32)
    want = wavepe.attention(x, x, x, slopes=np.array([1.0, 2.0]))
    for slopes in ([1, 2], np.array([1, 2], np.float16), np.array([1, 2], np.int8)):
        assert_same_bits(wavepe.attention(x, x, x, slopes=slopes), want)


# ---- errors ------------------------------------------------------------------------------------

Q, K, V = (np.ones(s, np.float32) for s in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"head size, .*q .* 8\), k .* 7\)", {"k": K[..., :7]}),
        (ValueError, r"same size, .*p float32 \(9, 7\); p .* needs q_rel of size 7",
         {"p": np.ones((9, 7), "f4")}),
        (ValueError, r"q_rel and p must have the same size, .* q_rel float32 \(2, 4, 3, 8\)",
         {"p": np.ones((9, 7), "f4"), "q_rel": Q}),
        (ValueError, "q and q_rel .* same queries",
         {"p": np.ones((9, 8), "f4"), "q_rel": K[:, :1]}),
        (ValueError, "q_rel needs a table p", {"q_rel": Q}),
        (ValueError, r"of q, sinks \(2, 4\) and \(3,\)", {"sinks": np.ones(3)}),
        (TypeError, "sinks must hold real", {"sinks": np.ones(4, complex)}),
        (ValueError, r"same number of keys, .* 5, 8\), v .* 4, 6\)", {"v": V[:, :, :4]}),
        (ValueError, r"q has 3 heads, .* multiple of the 2 ", {"q": Q[:, :3]}),
        (ValueError, r"q has 4 heads, .* multiple of the 0 ", {"k": K[:, :0], "v": V[:, :0]}),
        (ValueError, r"of k, v \(2, 2\) and \(3,\)", {"v": np.ones((3, 5, 6), "f4")}),
        (ValueError, r"of q and k \(3,\) and \(2,\)", {"q": np.ones((3, 4, 3, 8), "f4")}),
        (ValueError, r"of q, p \(2, 4\) and \(3,\)", {"p": np.ones((3, 9, 8), "f4")}),
        (ValueError, r"of q, slopes \(2, 4\) and \(3,\)", {"slopes": np.ones(3)}),
        (ValueError, r"of q, bias \(2, 4\) and \(3,\)", {"bias": np.ones((3, 9))}),
        (ValueError, r"bias must be \(w,\) or \(\.\.\., H, w\), got shape \(\)", {"bias": 1.0}),
        (ValueError, "unknown bias_beyond 'wrap'", {"bias": np.ones(3), "bias_beyond": "wrap"}),
        (TypeError, "bias must hold real", {"bias": np.ones(4, complex)}),
        (TypeError, "bias_first", {"bias_first": 0.5}),
        (TypeError, "bias_beyond", {"bias_beyond": None}),
        (ValueError, r"\(\.\.\., m, d\).*q float32 \(8,\)", {"q": Q[0, 0, 0]}),
        (ValueError, r"p float32 \(8,\)", {"p": Q[0, 0, 0]}),
        (ValueError, r"v float32 \(\)", {"v": np.float32(1)}),
        (ValueError, "beyond", {"beyond": "wrap"}),
        (ValueError, "window must be at least 0, got -1", {"window": -1}),
        (ValueError, "scale must be finite", {"scale": np.nan}),
        (TypeError, "complex", {"q": Q.astype(complex)}),
        (TypeError, "k must hold real", {"k": K.astype(object)}),
        (ValueError, "q: .*inhomogeneous", {"q": [[1, 2], [3]]}),
        (TypeError, "slopes must hold real", {"slopes": np.ones(4, complex)}),
        (TypeError, "longdouble|float128|float64 .* needed", {"q": Q.astype(np.longdouble)}),
        (TypeError, "first", {"first": 0.5}),
        (TypeError, "beyond", {"beyond": None}),
        (TypeError, "window", {"window": 2.0}),
        (TypeError, "scale", {"scale": "1"}),
        (TypeError, "causal", {"causal": "yes"}),
        (TypeError, "return_lse", {"return_lse": 2}),
    ],
)  # fmt: skip
def test_errors(error, match, args):
    with pytest.raises(error, match=match):
        wavepe.attention(**{"q": Q, "k": K, "v": V} | args)
