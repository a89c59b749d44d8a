"""Arrays and tensors that encodings give a model, against the formulas of encoding_cases.py."""

import math

import numpy as np
import oracle
import pytest
import wavepe
from cases import INTEGERS, assert_same_bits, assert_within
from encoding_cases import ASKED, CONSTANT, ENCODINGS, LEARNED, parts_of, sines, wavelet
from wavepe.encodings import Shaw, known_encodings

# (length, head size, heads); 24 is not a power of two.
SIZES = [(1, 8, 1), (9, 8, 4), (40, 24, 3)]
# Tables of these end at a distance, and their last row stands for all larger ones.
REACH = {"shaw:clip=3": 3, "t5:buckets=6,max_distance=9": 9}


# The table of `relative` ends, and is not for the query itself.
READ = {spec: one for spec in ENCODINGS if not (one := wavepe.encoding(spec)).reads_input}
TABLES = [spec for spec, one in READ.items() if {"table", "bias"} & {*one.terms}]
VECTORS = [spec for spec, one in READ.items() if one.adds or one.rotates]


def table(encoding, length, head, heads=4, *, causal=True, learned=None):
    """Return rows with the axes (heads, deltas, size), if any, the first delta, and beyond."""
    method = "bias" if "bias" in encoding.terms else "table"
    if learned is not None:
        rows, *place = getattr(encoding, f"learned_{method}")(length, learned, causal=causal)
    else:
        size = heads if method == "bias" else head
        rows, *place = getattr(encoding, method)(length, size, causal=causal)
    return rows[..., None] if method == "bias" else rows, *place


def rows_of(table, deltas):
    """Return the table's row of each delta."""
    rows, first, beyond = table
    place = np.asarray(deltas) - first
    last = rows.shape[-2] - 1
    assert beyond == "edge" or (place.min() >= 0 and place.max() <= last)
    return rows[..., place.clip(0, last), :]


def assert_place(spec, table, length, causal):
    """The table has a row for every delta, or up to where its last row stands for all others."""
    rows, first, beyond = table
    last = REACH.get(spec, length - 1)
    assert (first, beyond) == (0 if causal else -last, "edge" if spec in REACH else "zero")
    assert rows.shape[-2] == last - first + 1


def vectors(encoding, positions, head=8, **lengths):
    """Return what an absolute or rotary encoding gives these positions."""
    if encoding.adds:
        return encoding.absolute(positions, head, **lengths)
    return np.stack(encoding.rope_table(positions, head, **{"trained_length": 16} | lengths), -1)


# ------------------------------------------------------------------ arrays
def kerple(kind, of_r1, of_r2):
    """[K]: each head begins in the middle of its part of the ranges that the authors draw from."""

    def parts(deltas, heads, **_):
        middles = (np.arange(heads) + 0.5) / heads
        return {"bias": oracle.kerple(kind, of_r1 * middles, of_r2 * middles, np.asarray(deltas))}

    return parts


INITIAL = {  # what learned encodings begin with; of transformer_xl the first head
    ASKED: wavelet("ricker", [1, 2, 4, 8]),
    "wavelet:scales=4,learned=true": wavelet("ricker", [1, 2, 4, 8]),
    "shaw:clip=3": lambda deltas, head, **_: {  # [S]: sine waves of the clipped distance
        "relative": oracle.sinusoidal(np.clip(np.asarray(deltas), -3, 3), head)
    },
    "transformer_xl": sines,
    "t5:buckets=6,max_distance=9": lambda deltas, heads, **_: {
        "bias": np.zeros((heads, len(deltas)))
    },
    "kerple": kerple("log", 2, 1),
    "kerple:kind=power": kerple("power", 1, 2),
}


@pytest.mark.parametrize(("length", "head", "heads"), SIZES)
@pytest.mark.parametrize("spec", [spec for spec in (*CONSTANT, *LEARNED) if spec != "none"])
def test_arrays_are_the_formula(spec, length, head, heads):
    encoding, positions = wavepe.encoding(spec), np.arange(length)
    sizes = {"head": head, "dim": head, "trained_length": 16}
    for causal in (True, False):
        formula = INITIAL[spec] if encoding.learns else spec
        ((_, wanted),) = parts_of(formula, length, heads, causal=causal, **sizes).items()
        dtype, bound = np.float64, 1e-12
        if encoding.adds:
            got = encoding.absolute(positions, head)
        elif encoding.terms == ("slopes",):
            got = encoding.slopes(heads)
        elif encoding.rotates:
            inv_freq, factor, interleaved = wanted
            got = np.stack(encoding.rope_table(positions, head, trained_length=16))
            wanted = np.stack(oracle.rope_table(positions, inv_freq, factor))
            dtype, bound = np.float32, 2.0**-23
            assert bool(encoding.interleaved) == interleaved
            found = encoding.frequencies(head, length=length, trained_length=16)
            np.testing.assert_allclose(found[0], inv_freq, rtol=1e-12)
            assert (found[0].dtype, found[1]) == (np.float64, pytest.approx(factor, rel=1e-12))
        else:
            given = table(encoding, length, head, heads, causal=causal)
            assert_place(spec, given, length, causal)
            assert min(given[0].strides) >= 0, "torch takes no others"
            got = rows_of(given, np.arange(0 if causal else 1 - length, length))
            if "table" in encoding.terms:
                dtype, bound = np.float32, 2.0**-24
            else:
                got, bound = got[..., 0], 1e-12 * np.abs(wanted).max()
        assert got.dtype == dtype
        assert_within(got, wanted, bound, f"{causal=}")


PUBLISHED = [  # a call, and its numbers to that many digits
    *(
        (
            f"wavelet:mirrored={mirrored}",
            lambda e, at=at: e.table(512, 128)[0][at],
            [number],
            2**-25,
        )
        for mirrored, at, number in [  # row delta, column 16 log2(scale) + shift
            ("false", (2, 0), -0.4060058497),
            ("false", (3, 17), 0.0),
            ("false", (10, 51), 0.1598298636),
            ("false", (511, 127), -0.0076914980),
            ("true", (3, 17), -0.4060058497),
            ("true", (10, 51), -0.4381319172),
        ]
    ),
    (
        "sinusoidal",
        lambda e: e.absolute([1], 128)[0, [0, 1, -2, -1]],
        [0.8414709848, 0.5403023059, 0.0001154782, 0.9999999933],
        5e-11,
    ),
    ("alibi", lambda e: e.slopes(8), [2.0**-h for h in range(1, 9)], 0),
    ("alibi", lambda e: e.slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], 0),
    ("binary", lambda e: e.absolute(252, 8), [1, 1, 1, 1, 1, 1, 0, 0], 0),
    ("integer", lambda e: e.absolute([0, 3], 2).ravel(), [0, 0, 3, 3], 0),
    ("normalised", lambda e: e.absolute([0, 1, 3], 2).ravel(), [0, 0, 0.25, 0.25, 0.75, 0.75], 0),
    ("normalised", lambda e: e.absolute([[1, 9]], 1).ravel(), [0.1, 0.9], 0),
]


@pytest.mark.parametrize(("spec", "call", "numbers", "bound"), PUBLISHED)
def test_published_numbers(spec, call, numbers, bound):
    np.testing.assert_allclose(np.ravel(call(wavepe.encoding(spec))), numbers, rtol=0, atol=bound)


@pytest.mark.parametrize("spec", TABLES)
def test_a_table_is_a_part_of_the_longer_one(spec):
    encoding = wavepe.encoding(spec)
    for length in (1, 2, 5, 16, 33):
        causal = np.arange(length)
        both = np.arange(1 - length, length)
        short = rows_of(table(encoding, length, 16), causal)
        wide = rows_of(table(encoding, length, 16, causal=False), both)
        np.testing.assert_array_equal(rows_of(table(encoding, 2 * length, 16), causal), short)
        longer = table(encoding, 2 * length, 16, causal=False)
        np.testing.assert_array_equal(rows_of(longer, both), wide)
        np.testing.assert_array_equal(wide[..., length - 1 :, :], short)


@pytest.mark.parametrize("spec", VECTORS)
def test_a_cached_step_has_the_vectors_of_the_full_pass(spec):
    encoding = wavepe.encoding(spec)
    whole = vectors(encoding, np.arange(40))
    for part in (slice(39, 40), slice(0, 10)):
        got = vectors(encoding, np.arange(40)[part], length=40)
        np.testing.assert_array_equal(got, whole[part])


@pytest.mark.parametrize("spec", VECTORS)
def test_every_integer_type_and_shape(spec):
    encoding = wavepe.encoding(spec)
    values = np.array([[0, 1, 2], [127, 64, 3]])
    whole = vectors(encoding, values)
    np.testing.assert_array_equal(
        whole.reshape(6, -1), vectors(encoding, values.ravel()).reshape(6, -1)
    )
    for integer in INTEGERS:
        positions = values.astype(integer)
        assert_same_bits(vectors(encoding, positions), whole, integer.__name__)
        assert_same_bits(
            vectors(encoding, positions, length=300)[0], vectors(encoding, range(3), length=300)
        )
        assert (positions == values).all(), "left as it was"
    assert_same_bits(vectors(encoding, 7), vectors(encoding, [7])[0])
    for empty in ((0,), (2, 0)):
        assert vectors(encoding, np.zeros(empty, int)).shape == (*empty, *whole.shape[2:])
    if spec.startswith("sinusoidal"):
        assert_same_bits(vectors(encoding, values.astype(np.float32)), whole)


@pytest.mark.parametrize("dim", [9, 16, 53, 54, 55, 64, 200])
def test_binary_is_the_number_in_bits(dim):
    positions = [p for p in (*range(512), 2**31, 2**53 - 1, 2**53) if p < 2**dim]
    wanted = [[float(bit) for bit in format(p, f"0{dim}b")] for p in positions]
    assert wavepe.encoding("binary").absolute(positions, dim).tolist() == wanted


@pytest.mark.parametrize(("position", "count"), [(8, 4), (7, 3), (255, 8), (2**53, 54)])
def test_more_bits_than_dims(position, count):
    binary = wavepe.encoding("binary")
    assert binary.absolute(position, count).sum() == position.bit_count()
    message = rf"with {count - 1} dims .* got {position}, which has {count} bits"
    with pytest.raises(ValueError, match=message):
        binary.absolute([0, position, 1], count - 1)


# ------------------------------------------------------------------ what is learned


SHAPES = {spec: shapes for spec, (_, shapes) in LEARNED.items()} | {
    "wavelet:scales=2,rank=2": {"projection": (4, 8, 2)},
    "wavelet:scales=2,rank=2,from_input=true": {"r_proj": (4, 2, 10)},
    "wavelet:scales=4,from_input=true,learned=true": {
        "r_proj": (4, 8, 10), "scale": (8,), "shift": (8,)},
    "relative:extent=6,rank=3": {"r_proj": (4, 3, 10), "table": (6, 3)},
    "fox": {"f_proj": (4, 10), "f_bias": (4,)},
    "pope": {"delta": (4, 8)},
    "sink:initial=-2": {"sinks": (4,)},
    "sink:from_input=true": {"sinks": (4,), "s_proj": (4, 10)},
}  # fmt: skip


@pytest.mark.parametrize("spec", SHAPES)
def test_initial_parameters(spec):
    encoding, shapes = wavepe.encoding(spec), SHAPES[spec]
    assert encoding.learns
    size = {"dim": 10} if encoding.reads_input else {}
    parameters, again = (encoding.parameters(8, 4, **size) for _ in range(2))
    assert {name: x.shape for name, x in parameters.items()} == shapes
    assert all(x.dtype == np.float64 for x in parameters.values())
    assert all(map(np.array_equal, parameters.values(), again.values()))
    assert len({id(x) for x in parameters.values()}) == len(parameters)


@pytest.mark.parametrize(("clip", "head"), [(1, 3), (16, 8)])
def test_shaw_begins_with_sine_waves(clip, head):
    """Row n - m + clip is that of m - n; an odd size leaves its last sine without a cosine."""
    wanted = oracle.sinusoidal(range(clip, -clip - 1, -1), head + head % 2)[:, :head]
    assert np.abs(Shaw(clip).parameters(head, 1)["table"] - wanted).max() < 1e-14


@pytest.mark.parametrize(("head", "heads"), [(2, 1), (6, 4), (8, 3)])
def test_heads_of_transformer_xl_begin_with_waves_of_their_own(head, heads):
    """Head h takes the pairs h, h + heads, h + 2 heads, ..., so that r is as large as all waves."""
    parameters = wavepe.encoding("transformer_xl").parameters(head, heads)
    assert not parameters["u"].any()
    assert not parameters["v"].any()
    waves = oracle.sinusoidal(range(20), heads * head)
    for h, r in enumerate(waves @ parameters["W_r"]):
        assert np.array_equal(r[:, 0::2], waves[:, 2 * h :: 2 * heads])
        assert np.array_equal(r[:, 1::2], waves[:, 2 * h + 1 :: 2 * heads])
    square = np.concatenate(list(parameters["W_r"]), axis=1)
    assert np.array_equal(square @ square.T, np.eye(heads * head))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "head", "heads"), SIZES)
@pytest.mark.parametrize("spec", LEARNED)
def test_learned_tensors_and_gradients_are_the_formula(spec, length, head, heads, causal, torch):
    """From the first values on, and at others."""
    encoding, rng = wavepe.encoding(spec), np.random.default_rng(length)
    deltas = range(0 if causal else 1 - length, length)
    initial = encoding.parameters(head, heads)
    for noise in (0, 0.3):
        learned = {
            name: torch.from_numpy(x + noise * rng.normal(size=x.shape)).requires_grad_()
            for name, x in initial.items()
        }
        given = table(encoding, length, head, learned=learned, causal=causal)
        assert_place(spec, given, length, causal)
        got = rows_of(given, deltas)
        wanted = parts_of(spec, length, heads, causal=causal, head=head, learned=learned)
        exact = wanted["bias"][..., None] if "bias" in wanted else wanted["relative"]
        largest = exact.abs().max().clamp(min=1).item()
        assert (got - exact).abs().max() < 1e-12 * largest
        assert ("query" in encoding.learns) == ("u" in wanted)
        if "u" in wanted:
            *shifts, projection = encoding.learned_query(learned)
            assert all(map(torch.equal, shifts, (wanted["u"], wanted["v"])))
            assert projection is None
        weights = torch.from_numpy(rng.normal(size=got.shape))
        names = [name for name in learned if name not in ("u", "v")]
        gradients = [
            torch.autograd.grad((rows * weights).sum(), [learned[name] for name in names])
            for rows in (got, exact)
        ]
        for name, a, b in zip(names, *gradients, strict=True):
            assert (a - b).abs().max() < 1e-11 * b.abs().max().clamp(min=1), name
            assert b.any() or length == 1, name
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2**-5)):
            narrow = {name: x.detach().to(dtype) for name, x in learned.items()}
            low = rows_of(table(encoding, length, head, learned=narrow, causal=causal), deltas)
            assert low.dtype == dtype
            assert (low - exact).abs().max() < 4 * bound * largest, dtype


@pytest.mark.parametrize("spec", CONSTANT)
def test_others_learn_nothing(spec):
    encoding = wavepe.encoding(spec)
    assert not encoding.learned
    assert encoding.learns == ()
    for call, words in (
        (lambda: encoding.parameters(8, 2), "learns nothing"),
        (lambda: encoding.learned_table(3, {}), "learns no table"),
        (lambda: encoding.learned_bias(3, {}), "learns no bias"),
        (lambda: encoding.learned_query({}), "learns nothing for the queries"),
    ):
        with pytest.raises(NotImplementedError, match=f"{spec.replace('+', '.')}.*{words}"):
            call()


def test_t5_is_that_of_transformers(torch):
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    for buckets, farthest in ((32, 128), (2, 16), (8, 64), (10, 1000), (64, 100), (6, 9), (32, 17)):
        encoding = wavepe.encoding("t5", buckets=buckets, max_distance=farthest)
        b = torch.randn(3, buckets)
        for causal in (True, False) if buckets > 2 else (True,):
            bias, first, beyond = encoding.learned_bias(9, {"b": b}, causal=causal)
            assert beyond == "edge"
            last = first + bias.shape[1] - 1
            delta = torch.arange(first - (0 if causal else 500), last + 500)
            index = T5Attention._relative_position_bucket(
                -delta, bidirectional=not causal, num_buckets=buckets, max_distance=farthest
            )
            got = bias[:, delta.clamp(first, last) - first]
            assert torch.equal(got, b[:, index]), (buckets, farthest, causal)


def test_waves_that_a_tracer_asked_for_first(torch):
    """Later calls take no tensor of the tracer's, and the tracer none of theirs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def waves():
        return wavepe.encoding("transformer_xl").learned_table(5, {"W_r": torch.eye(dim)[None]}).p

    dim = 34  # that no other test asks for
    for _ in range(2):
        with FakeTensorMode():
            assert waves().shape == (1, 5, dim)
        rows = waves()
        assert type(rows) is torch.Tensor
        np.testing.assert_allclose(rows[0], wavepe.sinusoidal(np.arange(5), dim), atol=1e-6)


# ------------------------------------------------------------------ errors

METHODS = {
    "absolute": lambda e: e.absolute([0, 1], 8),
    "rope_table": lambda e: e.rope_table([0, 1], 8),
    "table": lambda e: e.table(4, 8),
    "slopes": lambda e: e.slopes(2),
    "bias": lambda e: e.bias(4, 2),
    "temperature": lambda e: e.temperature([0, 1]),
}
# They act on the call of attention, and have no array of their own.
WITHOUT = ("none", "fox", "pope", "sink", "window")


@pytest.mark.parametrize("name", known_encodings())
def test_methods_that_do_not_apply_raise(name):
    encoding = wavepe.encoding(name)
    own = [*["absolute"] * encoding.adds, *["rope_table"] * encoding.rotates, *encoding.terms]
    own += ["temperature"] * encoding.has_temperature
    assert len(own) == (name not in WITHOUT)
    for method, call in METHODS.items():
        if method in own:
            call(encoding)
        else:
            words = rf"^{method}\(\) .*{name!r}.* has {own[0] if own else 'no such method'}"
            with pytest.raises(NotImplementedError, match=words):
                call(encoding)


@pytest.mark.parametrize("spec", TABLES)
def test_wrong_sizes_of_tables(spec):
    encoding, name = wavepe.encoding(spec), spec.partition(":")[0]
    size = "heads" if "bias" in encoding.terms else "head_dim"
    for length, of_size, error, words in (
        (0, 8, ValueError, "length must be at least 1, got 0"),
        (-1, 8, ValueError, "length must be at least 1, got -1"),
        (2.0, 8, TypeError, "length must be an integer"),
        (2, 0, ValueError, f"{size} must be at least ., got 0"),
    ):
        with pytest.raises(error, match=f"{name} {words}"):
            table(encoding, length, of_size, of_size)
    with pytest.raises(TypeError, match="causal"):
        table(encoding, 3, 8, causal="yes")


@pytest.mark.parametrize(
    ("spec", "call", "words"),
    [
        ("wavelet", lambda e: e.table(4, 12), "12 .*8 scales"),
        ("wavelet:scales=3", lambda e: e.table(4, 64), "64 .*3 scales"),
        ("wavelet:scales=1+2+8", lambda e: e.table(4, 64), "64 .*3 scales"),
        ("transformer_xl", lambda e: e.table(2, 7), "transformer_xl head_dim must be even, got 7"),
        ("transformer_xl:biases=false", lambda e: e.table(2, 7), "must be even, got 7"),
        ("transformer_xl", lambda e: e.parameters(5, 2), "head_dim must be even"),
        ("transformer_xl", lambda e: e.parameters(4, 0), "heads must be at least 1"),
        ("sinusoidal", lambda e: e.absolute([0], 7), "7"),
        *((f"rope{o}", lambda e: e.rope_table([0], 7), "7") for o in ("", ":fraction=0.5")),
    ],
)
def test_wrong_head_sizes(spec, call, words):
    with pytest.raises(ValueError, match=words):
        call(wavepe.encoding(spec))


@pytest.mark.parametrize("spec", ["binary", "integer", "normalised"])
@pytest.mark.parametrize(
    ("positions", "dim", "error", "message"),
    [
        ([0, -1], 8, ValueError, "at least 0, got -1"),
        ([0.0, 1.0], 8, TypeError, "integers, got dtype float64"),
        ([True], 8, TypeError, "bool"),
        (["1"], 8, TypeError, "integers"),
        (None, 8, TypeError, "integers"),
        ([2**60], 64, ValueError, r"2\^53"),
        (np.array([2**64 - 1], np.uint64), 64, ValueError, r"2\^53"),
        ([0], -1, ValueError, "dim"),
        ([0], 8.0, TypeError, "dim"),
    ],
)
def test_wrong_positions(spec, positions, dim, error, message):
    with pytest.raises(error, match=f"{spec} .*{message}"):
        wavepe.encoding(spec).absolute(positions, dim)


@pytest.mark.parametrize(
    "spec", ["sinusoidal:theta=length", "sinusoidal:reversed=true", "normalised"]
)
@pytest.mark.parametrize(
    ("positions", "length", "error"),
    [
        ([0, 1], 0, ValueError),
        ([0, 1], -1, ValueError),
        ([0, 1], 2.0, TypeError),
        ([0.0, math.nan], None, (ValueError, TypeError)),
        (["a"], None, TypeError),
        (["a"], 3, TypeError),
    ],
)
def test_wrong_lengths(spec, positions, length, error):
    name = spec.partition(":")[0]
    with pytest.raises(error, match=rf"{name} (length|positions)"):
        wavepe.encoding(spec).absolute(positions, 8, length=length)
