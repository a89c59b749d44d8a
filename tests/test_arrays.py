"""Shared by all functions for NumPy arrays: where `out` may lie, inputs left alone, and errors."""

import copy
import itertools
import math

import numpy as np
import oracle
import pytest
import wavepe
from cases import OUT_LAYOUTS, Guard, assert_same_bits, generator, turn


# ---- out -----------------------------------------------------------------------------------------
def calls_of_rope(rng, dtype):
    for shape, h in (((1, 2), 1), ((3, 7), 3), ((2, 3, 17), 8), ((5, 34), 16), ((2, 2, 3, 66), 31)):
        x, (cos, sin) = rng.normal(size=shape).astype(dtype), turn(rng, (shape[-2], h), dtype)
        for interleaved in (False, True):
            yield {"x": x, "cos": cos, "sin": sin, "interleaved": interleaved}


def calls_of_relative_bias(rng, dtype):
    for lead, m, keys, w, d in (
        ((), 1, 1, 1, 1),
        ((), 3, 5, 4, 3),
        ((2,), 7, 9, 16, 8),
        ((2, 3), 5, 17, 6, 5),
        ((), 33, 20, 40, 17),
        ((), 16, 64, 64, 16),
        ((), 65, 65, 33, 4),
    ):
        q, p = rng.normal(size=(*lead, m, d)).astype(dtype), rng.normal(size=(w, d)).astype(dtype)
        for beyond in ("zero", "edge"):
            yield {"q": q, "p": p, "keys": keys, "first": -1, "beyond": beyond}


def calls_of_wavelet_table(rng, dtype):
    for w, dim in itertools.product((1, 2, 7, 16, 33), (1, 5, 8, 17, 32)):
        scale, shift = wavepe.wavelet_grid(dim, 1, 5)
        yield {"offsets": np.arange(w), "scale": scale, "shift": shift, "dtype": dtype}


def calls_of_sinusoidal(rng, dtype):
    for shape, dim in itertools.product(((), (1,), (5,), (3, 4)), (2, 6, 34)):
        yield {"positions": np.arange(math.prod(shape)).reshape(shape), "dim": dim}


CALLS = {
    "rope": (calls_of_rope, (np.float32, np.float64)),
    "relative_bias": (calls_of_relative_bias, (np.float32, np.float64)),
    "wavelet_table": (calls_of_wavelet_table, (np.float16, np.float32, np.float64)),
    "sinusoidal": (calls_of_sinusoidal, (np.float64,)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, types) in CALLS.items() for dtype in types]
)
def test_out_gets_all_and_nothing_else_is_written(variant, name, dtype):
    function = getattr(wavepe, name)
    for args in CALLS[name][0](generator("out", name), dtype):
        before = copy.deepcopy(args)
        want = function(**args)
        for layout in OUT_LAYOUTS:
            guard = Guard(want.shape, dtype, layout)
            what = f"{want.shape} {layout}"
            assert function(**args, out=guard.out) is guard.out
            guard.check(what)
            assert_same_bits(guard.out, want, what)
            if name == "rope":
                guard.out[...] = args["x"]
                assert function(**args | {"x": guard.out}, out=guard.out) is guard.out
                guard.check(f"{what} in place")
                assert_same_bits(guard.out, want, f"{what} in place")
        for key, value in args.items():
            if isinstance(value, np.ndarray):
                assert_same_bits(value, before[key], f"{key} was changed")


OVER = {  # shapes of inputs, of 8 bytes an element as out is, and options; out is (6, 8)
    "rope": ({"x": (6, 8), "cos": (6, 4), "sin": (6, 4)}, {}),
    "rope interleaved": ({"x": (6, 8), "cos": (6, 4), "sin": (6, 4)}, {"interleaved": True}),
    "relative_bias": ({"q": (6, 8), "p": (9, 8)}, {"keys": 8, "first": -1}),
    "wavelet_table": ({"offsets": (6,), "scale": (8,), "shift": (8,)}, {"dtype": np.float64}),
    "sinusoidal": ({"positions": (6,)}, {"dim": 8}),
}
each_threads = pytest.mark.parametrize("threads", [1, 4])


def drawn(call, *key):
    """Return a function of `out` and of changed inputs, and its inputs."""
    (shapes, options), rng = OVER[call], generator(call, *key)
    function = getattr(wavepe, call.split()[0])
    args = {
        name: rng.integers(-9, 99, shape)
        if name in ("offsets", "positions")
        else rng.uniform(0.5, 2, shape)
        for name, shape in shapes.items()
    }
    return lambda **changes: function(**args | options | changes), args


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (shapes, _) in OVER.items() for name in shapes]
)
@each_threads
def test_out_over_an_input(variant, small_pieces, call, name, threads):
    """As if the inputs had been copied before."""
    wavepe.set_num_threads(threads)
    for start in (0, 1, 4, 8, 12, 18, 19, 20, 21, 22, 28, 36, 40, 60):
        function, given = drawn(call, start)
        memory, want, source = np.zeros(200), function(), given[name]
        view = memory[start : start + source.size].view(source.dtype).reshape(source.shape)
        view[...] = source
        out = memory[20 : 20 + want.size].reshape(want.shape)
        assert function(**{name: view}, out=out) is out
        assert_same_bits(out, want, f"{name} from {start}")


@pytest.mark.parametrize("call", OVER)
@each_threads
def test_out_over_itself(variant, small_pieces, call, threads):
    """Half of each row is the next one's: one of the two results stands there, none beside."""
    wavepe.set_num_threads(threads)
    function, _ = drawn(call)
    want = function()
    (rows, columns), half = want.shape, want.shape[1] // 2
    memory = np.full(32 + (rows + 1) * half + 32, 7.0)
    inner = memory[32:-32]
    function(out=np.lib.stride_tricks.as_strided(inner, (rows, columns), (half * 8, 8)))
    assert (memory[:32] == 7).all()
    assert (memory[-32:] == 7).all()
    firsts = np.concatenate([want[:, :half].ravel(), want[-1, half:]])
    seconds = np.concatenate([want[0, :half], want[:, half:].ravel()])
    assert ((inner == firsts) | (inner == seconds)).all()


def test_out_is_the_input_in_reverse(variant):
    function, given = drawn("rope")
    x, want = given["x"], function()
    assert_same_bits(function(x=x, out=x[::-1]), want)


# ---- errors --------------------------------------------------------------------------------------

X, TABLE, FREQ = np.ones((2, 3, 8), "f4"), np.ones((3, 4), "f4"), oracle.rope_frequencies(8)
Q, P, PLACES = np.ones((2, 3, 4), "f4"), np.ones((5, 4), "f4"), np.arange(3)
WORKS = {  # a call of each function
    "rope": {"x": X, "cos": TABLE, "sin": TABLE},
    "apply_rope": {"x": np.ones((2, 4), "f4"), "positions": [0, 1]},
    "rope_table": {"positions": PLACES, "inv_freq": FREQ},
    "rope_frequencies": {"dim": 8},
    "relative_bias": {"q": Q, "p": P, "keys": 3},
    "wavelet_grid": {"dim": 8},
    "wavelet_table": {"offsets": 4, "scale": [1.0, 2.0], "shift": [0.0, 1.0]},
    "sinusoidal": {"positions": PLACES, "dim": 8},
    "alibi_slopes": {"heads": 8},
}


def tables(*shape):
    return {"cos": np.ones(shape, "f4"), "sin": np.ones(shape, "f4")}


def axes(count, sections):
    return {"positions": np.zeros((3, count), int), "sections": sections}


default = {"rope_type": "default", "rope_theta": 500.0}
REFUSED = {  # the error, words of its message, and the arguments that differ
    "rope": [
        (ValueError, "8", tables(3, 5)),
        (ValueError, "2", tables(2, 4)),
        (ValueError, "4", {"sin": np.ones((3, 3), "f4")}),
        (ValueError, "5", tables(5, 1, 3, 4)),
        (ValueError, "6", {"x": X[:, :1], **tables(6, 4)}),
        (ValueError, r"need a last axis, got shapes \(\), \(3, 4\)", {"x": np.float32(1)}),
        (ValueError, r"need a last axis, got shapes \(2, 3, 8\), \(\)", tables()),
        (TypeError, "int64", {"x": X.astype(int)}),
        (TypeError, "complex", {"x": X.astype(complex)}),
        (TypeError, "int64", {"cos": TABLE.astype(int), "sin": TABLE.astype(int)}),
        (TypeError, "cos must hold floating point numbers, got dtype complex128",
         {"cos": TABLE.astype(complex)}),
        (TypeError, "x must be float16, .* got dtype object", {"x": X.astype(object)}),
    ],
    "apply_rope": [
        (ValueError, r"even d, got \(2, 5\)", {"x": np.ones((2, 5), "f4")}),
        (ValueError, "even d", {"x": np.float32(1), "positions": 0}),
        (ValueError, "broadcast", {"positions": [0, 1, 2]}),
        (TypeError, "positions must hold integers", {"positions": [0.5, 1]}),
        (TypeError, "theta must be a number", {"theta": "base"}),
        (ValueError, "fraction must be a number from 0 to 1", {"fraction": 1.5}),
        (TypeError, "interleaved must be True or False", {"interleaved": 2}),
        (TypeError, "x must be float16", {"x": np.ones((2, 4), int)}),
    ],
    "rope_table": [
        (ValueError, "exact", {"precision": "fast"}),
        (TypeError, "precision must be .*exact, hf; got 3", {"precision": 3}),
        (ValueError, r"inv_freq must be 1-D .* got shape \(2, 2\)",
         {"inv_freq": FREQ.reshape(2, 2)}),
        (ValueError, r"inv_freq must be 1-D .* got shape \(\)", {"inv_freq": np.float64(1.0)}),
        (TypeError, "inv_freq must hold real numbers, got dtype complex128",
         {"inv_freq": FREQ.astype(complex)}),
        (TypeError, "positions must hold integers, got dtype complex128",
         {"positions": PLACES * 1j}),
        (TypeError, "dtype must be float16, .* got int32", {"dtype": np.int32}),
        (TypeError, "attention_factor must be a number, got '1'", {"attention_factor": "1"}),
        (ValueError, "5", axes(2, (2, 3))),
        (ValueError, "3", axes(3, (2, 2))),
        (ValueError, "-1", axes(2, (5, -1))),
        (ValueError, r"must have a last axis of 2, .* got shape \(\)",
         {"positions": np.int64(3), "sections": (2, 2)}),
        (TypeError, r"sections must be an integer, got 2\.0", axes(2, (2.0, 2.0))),
        (TypeError, "sections must be a list .* got '22'", axes(2, "22")),
    ],
    "rope_frequencies": [
        (ValueError, "7", {"dim": 7}),
        (ValueError, "-2", {"dim": -2}),
        (ValueError, r"theta must be above 0, got 0\.0", {"theta": 0.0}),
        (ValueError, "theta must be finite, got inf", {"theta": math.inf}),
        (TypeError, r"dim must be an integer, got 8\.0", {"dim": 8.0}),
        (TypeError, "scaling must be a dict .* got 4", {"scaling": 4}),
        (ValueError, "warped", {"scaling": {"rope_type": "warped"}}),
        (ValueError, r"theta=10000\.0 and rope_theta=500\.0", {"theta": 1e4, "scaling": default}),
    ],
    "relative_bias": [
        (ValueError, "4(.|\n)*6|6(.|\n)*4", {"p": np.ones((5, 6), "f4")}),
        (ValueError, r"leading axes of q and p \(2,\) and \(3,\)", {"p": np.ones((3, 5, 4), "f4")}),
        (ValueError, r"must be .* got shapes \(4,\) and \(5, 4\)", {"q": np.ones(4, "f4")}),
        (ValueError, r"must be .* got shapes \(2, 3, 4\) and \(4,\)", {"p": np.ones(4, "f4")}),
        (ValueError, "edge", {"q": np.ones((3, 2)), "p": np.ones((0, 2)), "beyond": "edge"}),
        (ValueError, "edge", {"beyond": "wrap"}),
        (TypeError, "beyond must be .*zero, edge; got None", {"beyond": None}),
        (ValueError, "-1", {"keys": -1}),
        (TypeError, r"keys must be an integer, got 3\.0", {"keys": 3.0}),
        *(((ValueError, MemoryError), "too big|too large|allocate", {"keys": keys})  # none may wrap
          for keys in (2**53, 2**63 - 1)),
        (TypeError, r"first must be an integer, got 0\.5", {"first": 0.5}),
        (TypeError, "complex", {"q": Q.astype(complex)}),
        (TypeError, "p must hold real numbers, got dtype complex128", {"p": P.astype(complex)}),
        (TypeError, "q must hold real numbers, got dtype object", {"q": Q.astype(object)}),
    ],
    "wavelet_grid": [
        (ValueError, "dim must be at least 1, got 0", {"dim": 0}),
        (ValueError, "scales must be at least 1, got 0", {"scales": 0}),
        (ValueError, "scales must be a non-empty list", {"scales": []}),
        (ValueError, "dim 8 is not divisible by the number of scales 3",
         {"scales": [1.0, 2.0, 4.0]}),
        (TypeError, r"dim must be an integer, got 8\.0", {"dim": 8.0}),
        (TypeError, "scales must be .* got 'ab'", {"scales": "ab"}),
        (TypeError, "min_scale must be a number, got None", {"scales": 2, "min_scale": None}),
    ],
    "wavelet_table": [
        (ValueError, "ricker", {"kind": "mexican"}),
        (TypeError, "kind must be .*ricker.* got None", {"kind": None}),
        (ValueError, "-1", {"offsets": -1}),
        (TypeError, r"offsets must be an integer, got 4\.0", {"offsets": 4.0}),
        (TypeError, "offsets must hold integers, got dtype float64", {"offsets": [0.0, 1.0]}),
        (ValueError, r"offsets must be an integer or \(w,\), got shape \(2, 2\)",
         {"offsets": np.zeros((2, 2), int)}),
        (ValueError, "3", {"scale": [1.0, 2.0, 3.0]}),
        (ValueError, "3", {"shift": [1.0, 2.0, 3.0]}),
        (ValueError, r"scale and shift must both be \(dim,\), got shapes \(1, 2\)",
         {"scale": [[1.0, 2.0]], "shift": [[1.0, 2.0]]}),
        (TypeError, "scale must hold real numbers, got dtype complex128", {"scale": [1j, 2j]}),
        (TypeError, "dtype must be float16, .* got int32", {"dtype": np.int32}),
    ],
    "sinusoidal": [
        (ValueError, "7", {"dim": 7}),
        (ValueError, "-2", {"dim": -2}),
        (ValueError, "theta", {"theta": 0.0}),
        (TypeError, r"dim must be an integer, got 8\.0", {"dim": 8.0}),
        (TypeError, "positions must hold real numbers, got dtype complex128",
         {"positions": PLACES * 1j}),
    ],
    "alibi_slopes": [
        *((ValueError, "heads", {"heads": heads}) for heads in (0, -4)),
        *((TypeError, "heads", {"heads": heads}) for heads in (8.0, math.nan, "8", None, [8])),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "match", "changes"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_errors(name, error, match, changes):
    with pytest.raises(error, match=match):
        getattr(wavepe, name)(**WORKS[name] | changes)


@pytest.mark.parametrize("name", CALLS)
def test_unfit_out(name):
    function, args = getattr(wavepe, name), WORKS[name]
    want = function(**args)
    other = np.dtype(np.float32 if want.dtype == np.float64 else np.float64)
    shape = ", ".join(map(str, want.shape))
    for error, words, out in (
        (ValueError, shape, np.empty((*want.shape[:-1], want.shape[-1] + 1), want.dtype)),
        (ValueError, shape, np.empty((1, *want.shape), want.dtype)),
        (TypeError, other.name, np.empty(want.shape, other)),
        (TypeError, "out must be a NumPy array, got list", [1.0]),
        (ValueError, "out must be writeable, got a read-only array",
         np.broadcast_to(want.dtype.type(0), want.shape)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            function(**args, out=out)


def test_one_rule_for_dtypes_and_byte_orders():
    """Every function takes arrays of any byte order, and bfloat16 for queries and tables."""
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def swapped(x):
        return x.astype(x.dtype.newbyteorder(">"))

    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 7
    positions, inv_freq = np.arange(4), wavepe.rope_frequencies(8)[0]
    cos, sin = wavepe.rope_table(positions, inv_freq)
    ones = np.ones(8)
    calls = {
        "rope": (wavepe.rope, (x, cos, sin), {}),
        "apply_rope": (wavepe.apply_rope, (x, positions), {}),
        "rope_table": (wavepe.rope_table, (positions, inv_freq), {"dtype": np.dtype("f4")}),
        "wavelet_table": (wavepe.wavelet_table, (positions, ones, ones), {"dtype": np.dtype("f8")}),
        "relative_bias": (wavepe.relative_bias, (x, x, 3), {}),
        "attention": (wavepe.attention, (x, x, x), {}),
        "sinusoidal": (wavepe.sinusoidal, (positions, 8), {}),
    }
    for name, (function, given, options) in calls.items():
        wanted = np.asarray(function(*given, **options))
        other = [swapped(one) if isinstance(one, np.ndarray) else one for one in given]
        options = {key: value.newbyteorder(">") for key, value in options.items()}
        got = np.asarray(function(*other, **options))
        assert got.dtype.isnative, name
        np.testing.assert_array_equal(got, wanted, err_msg=name)
    narrow = x.astype(ml_dtypes.bfloat16)
    rounded = narrow.astype(np.float32)
    np.testing.assert_array_equal(
        wavepe.relative_bias(narrow, narrow, 3), wavepe.relative_bias(rounded, rounded, 3)
    )
    assert wavepe.rope(narrow, cos, sin).dtype == wavepe.attention(narrow, narrow, narrow).dtype


@pytest.mark.parametrize("axes", [40, 63, 64])
def test_more_axes_than_numpy_has(axes):
    """In our words: NumPy broadcasts 32 axes, and an array has 64."""
    x = np.ones((1,) * (axes - 1) + (4,), np.float32)
    positions = np.zeros((1,) * axes, np.int64)
    calls = [
        lambda: wavepe.attention(x, x, x),
        lambda: wavepe.relative_bias(x, x[(0,) * (axes - 2)], 3),
        lambda: wavepe.rope_table(positions, np.ones(2)),
    ]
    if axes == 64:
        calls.append(lambda: wavepe.sinusoidal(positions, 4))
        calls += [
            lambda spec=spec: wavepe.encoding(spec).absolute(positions, 4, length=1)
            for spec in ("integer", "normalised", "binary")
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"at most (32|63).*, got \d"):
            call()
