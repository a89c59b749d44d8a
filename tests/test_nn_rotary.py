"""wavepe.nn.Rotary: numbers, layouts, dtypes, kept tables, errors, and caches of another theta."""

import copy
import pickle

import numpy as np
import oracle
import oracle_rope
import pytest
import torch
from cases import BOUNDS, assert_within, compiled_once, recording_backend, unit
from wavepe import ops
from wavepe.nn import Rotary
from wavepe.positions import rotation, tables

ORIGINAL = {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0, **ORIGINAL}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
# Parameters, and the oracle's frequencies of head size 8 and factor, for a length, trained on 16
TYPES = {
    "linear": ({"factor": 4.0}, lambda n: oracle_rope.linear(8, 1e4, 4)),
    "yarn": ({"factor": 4.0, **ORIGINAL}, lambda n: oracle_rope.yarn(8, 1e4, 4, 16)),
    "llama3": (LLAMA3, lambda n: oracle_rope.llama3(8, 1e4, 8, 16, 1, 4)),
    "proportional": (
        {"partial_rotary_factor": 0.5}, lambda n: oracle_rope.proportional(8, 1e4, 0.5)),
    "default": (
        {"partial_rotary_factor": 0.5, "rope_theta": 500.0}, lambda n: oracle_rope.default(4, 500)),
    "dynamic": ({"factor": 4.0}, lambda n: oracle_rope.dynamic(8, 1e4, 4, n, 16)),
    "longrope": (LONG, lambda n: oracle_rope.longrope(8, 1e4, [1 if n <= 16 else 4] * 4, 4, 16)),
}  # fmt: skip


def scaled(kind):
    """A Rotary of that type."""
    return Rotary(8, scaling={"rope_type": kind, **TYPES[kind][0]}, trained_length=16)


def heads(length=6, dim=8, batch=2, dtype=None, seed=0):
    """q with four heads and k with two."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, 2, length, dim, generator=generator, dtype=torch.float64)
    return q.to(dtype or torch.float32), k.to(dtype or torch.float32)


def assert_rotated(got, x, positions, inv_freq, factor=1.0, interleaved=False):
    """Assert the exact result, in units of its terms; positions are (L,) or (B, L)."""
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    cos, sin = oracle.rope_table(np.asarray(positions), inv_freq, factor)
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    x = x.double().numpy()
    exact = oracle.rope(x, cos, sin, interleaved)
    terms = oracle.rope_terms(x, cos, sin, interleaved)
    full = (BOUNDS["rope"].units + BOUNDS["rope_table"].units) * unit(np.float32)
    bounds = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: full * 2.0**-27}
    assert_within(got.double().numpy(), exact, bounds.get(got.dtype, full) * terms)


# --------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_form_of_positions(interleaved, dtype):
    rotary = Rotary(8, 500.0, interleaved=interleaved)
    inv_freq = oracle.rope_frequencies(8, 500.0)
    q, k = heads(dtype=dtype)
    packed = torch.tensor([0, 1, 2, 0, 1, 2])
    rows = torch.stack([torch.arange(6), 1000 * torch.arange(6)])
    for argument in (None, torch.arange(6), torch.arange(6) + 2**24, packed, rows, rows[1:]):
        positions = torch.arange(6) if argument is None else argument
        for x, got in zip((q, k), rotary(q, k, argument), strict=True):
            assert_rotated(got, x, positions.numpy(), inv_freq, 1.0, interleaved)


@pytest.mark.parametrize("kind", TYPES)
def test_every_scaling_type(kind):
    rotary = scaled(kind)
    for length in (6, 20):
        q, k = heads(length)
        for got, x in zip(rotary(q, k), (q, k), strict=True):
            assert_rotated(got, x, np.arange(length), *TYPES[kind][1](length))
        again = rotary(q, k, torch.arange(length))
        assert all(map(torch.equal, again, rotary(q, k)))


@pytest.mark.parametrize(("fraction", "kept"), [(1, 4), (0.75, 3), (0.5, 2), (0.2, 0), (0, 0)])
def test_fraction_rotates_the_fast_pairs(fraction, kept):
    inv_freq = oracle.rope_frequencies(8)
    inv_freq[kept:] = 0
    q, k = heads()
    got = Rotary(8, fraction=fraction)(q, k)
    assert_rotated(got[0], q, np.arange(6), inv_freq)
    whole = Rotary(8)(q, k)
    for half in (0, 4):
        assert torch.equal(got[0][..., half : half + kept], whole[0][..., half : half + kept])
        assert torch.equal(got[0][..., half + kept : half + 4], q[..., half + kept : half + 4])


def test_precision_hf_is_that_of_rope_table():
    q, k = heads(4)
    far = torch.arange(4) + 10**6
    cos, sin = ops.rope_table(far, Rotary(8)._frequencies.tensor, precision="hf")
    assert torch.equal(Rotary(8, precision="hf")(q, k, far)[0], ops.rope(q, cos, sin))
    assert not torch.equal(Rotary(8)(q, k, far)[0], ops.rope(q, cos, sin))
    cos, sin = ops.rope_table(torch.arange(4), Rotary(8)._frequencies.tensor, precision="hf")
    assert torch.equal(Rotary(8, precision="hf")(q, k)[0], ops.rope(q, cos, sin))


# --------------------------------------------------------------- autograd, inference, compile
def test_tables_are_shared_and_grow():
    tables._built.cache_clear()
    one, other = Rotary(8, 77.0), Rotary(8, scaling={"rope_theta": 77.0})
    for length in (3, 200, 1000, 5):
        q, k = heads(length, batch=1)
        assert all(map(torch.equal, one(q, k), other(q, k, torch.arange(length))))
        assert all(map(torch.equal, one(q, k), other(q, k)))
    assert tables._built.cache_info().currsize == 3  # of 128, 256 and 1024 positions


def test_lengths_beyond_any_table(monkeypatch):
    q, k = heads(40, batch=1)
    wanted = Rotary(8)(q, k)
    tables._built.cache_clear()
    monkeypatch.setattr(rotation, "LARGEST_TABLE", 39)
    assert all(map(torch.equal, Rotary(8)(q, k), wanted))
    assert tables._built.cache_info().currsize == 0


@pytest.mark.parametrize("with_positions", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_graph_for_every_length(with_positions):
    backend, rotary = recording_backend(), Rotary(8)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=True, backend=backend)

    def both(length, start=0):
        q, k = heads(length)
        positions = torch.arange(length) + start if with_positions else None
        return compiled(q, k, positions), rotary(q, k, positions)

    for length in (5, 9, 33):
        assert all(map(torch.equal, *both(length, start=3)))
    assert compiled_once(backend)
    rotary.theta = 99.0
    if with_positions:
        with pytest.raises(RuntimeError, match="theta=10000, but this call rotates with theta=99:"):
            compiled(*heads(4), torch.arange(4) + 2)
    assert all(map(torch.equal, *both(7)))
    assert torch.equal(both(6)[0][0], Rotary(8, 99.0)(*heads(6))[0])
    torch._dynamo.reset()


def test_a_type_that_follows_the_length_says_so_under_fullgraph():
    torch._dynamo.reset()
    rotary, (q, k) = scaled("dynamic"), heads(20)
    loose = torch.compile(rotary, backend="eager")
    assert all(map(torch.equal, loose(q, k), rotary(q, k)))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="follows the length"):
        torch.compile(rotary, backend="eager", fullgraph=True)(q, k)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    rotary, (q, k) = Rotary(8), heads()
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(
        rotary,
        (q, k, torch.arange(6)),
        dynamic_shapes=({2: length}, {2: length}, {0: length}),
        strict=strict,
    )
    arguments = (*heads(11), torch.arange(11) + 5)
    assert all(map(torch.equal, program.module()(*arguments), rotary(*arguments)))


def test_copies_and_pickles():
    rotary = Rotary(8, 300.0, interleaved=True)
    q, k = heads()
    wanted = rotary(q, k)
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert all(map(torch.equal, other(q, k), wanted))
        other.theta = 9.0
        assert not torch.equal(other(q, k)[0], wanted[0])
        assert rotary.theta == 300.0
        assert all(map(torch.equal, rotary(q, k, torch.arange(6)), wanted))


# --------------------------------------------------------------- another theta
def step(rotary, position, batch=1):
    """One token at that position."""
    return rotary(*heads(1, batch=batch), torch.tensor([position]))


@pytest.mark.parametrize("first", [None, [0, 1, 2]])
def test_a_cache_of_another_theta_is_refused(first):
    rotary = Rotary(8)
    rotary(*heads(3), None if first is None else torch.tensor(first))
    step(rotary, 3)
    rotary.theta = 500
    message = "before position 4 .*theta=10000, .*theta=500: .*position 0.*reset"
    for _ in range(2):  # it goes on refusing
        with pytest.raises(RuntimeError, match=message):
            step(rotary, 4)
    with pytest.raises(RuntimeError, match=message):
        rotary(*heads(2), torch.tensor([[4, 5], [0, 1]]))  # one row of the two goes on
    got = rotary(*heads(3))  # a new sequence
    assert torch.equal(got[0], Rotary(8, 500.0)(*heads(3))[0])
    step(rotary, 3)


def test_what_is_allowed_after_a_change():
    fresh = Rotary(8)
    fresh.theta = 500  # nothing was rotated yet
    step(fresh, 9)
    rotary = Rotary(8)
    step(rotary, 0)
    rotary.theta = 500
    rotary.theta = 10000.0  # and back
    step(rotary, 1)
    rotary.theta = 500
    rotary.reset()
    step(rotary, 2)
    rotary.theta = 7
    rotary(*heads(4), torch.tensor([0, 1, 0, 1]))  # packed
    rotary.theta = 8
    rotary(*heads(4), torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]]))  # padded on the left
    rotary.theta = 9
    rotary(*heads(0), torch.empty(0, dtype=torch.int64))  # nothing, which proves nothing
    with pytest.raises(RuntimeError, match="theta=8"):
        step(rotary, 4)


def test_scaling_can_be_set():
    rotary = Rotary(8, scaling={"rope_theta": 300.0})
    assert rotary.theta == 300.0
    rotary.theta = 200
    assert (rotary.theta, rotary.scaling) == (200.0, {})
    step(rotary, 0)
    scaling = {"rope_type": "linear", "factor": 2.0}
    rotary.scaling = scaling
    assert rotary.theta == 200.0
    with pytest.raises(RuntimeError, match="cache"):
        step(rotary, 1)
    scaling["factor"] = rotary.scaling["factor"] = 3.0  # of copies
    rotary.theta = 200  # reads what is stored
    q, k = heads()
    assert_rotated(rotary(q, k)[0], q, np.arange(6), oracle.rope_frequencies(8, 200.0) / 2)
    rotary.scaling = {"rope_theta": 50.0}
    assert rotary.theta == 50.0
    rotary.scaling = None
    assert rotary.theta == 50.0


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_type_that_follows_the_length(name):
    rotary = scaled(name)
    rotary(*heads(10))
    for position in range(10, 16):
        step(rotary, position)
    with pytest.raises(RuntimeError, match="length 17"):
        step(rotary, 16)
    step(rotary, 15)  # the frequencies of before
    rotary(*heads(20))
    with pytest.raises(RuntimeError, match="length 20"):
        step(rotary, 10)
    if name == "longrope":  # one set of frequencies beyond the threshold
        step(rotary, 20)
    rotary(*heads(10), torch.arange(10))
    step(rotary, 10)


def test_a_refused_setting_changes_nothing():
    rotary = Rotary(8, fraction=0.5)
    q, k = heads()
    wanted = rotary(q, k)
    for name, value, error, match in (
        ("theta", -1.0, ValueError, r"theta must be above 0, got -1\.0"),
        ("theta", "10000", TypeError, "theta must be a number, got '10000'"),
        (
            "scaling",
            {"rope_type": "linear", "factor": 2.0},
            ValueError,
            "fraction=0.5 and scaling=",
        ),
    ):
        with pytest.raises(error, match=match):
            setattr(rotary, name, value)
    assert all(map(torch.equal, rotary(q, k, torch.arange(6) + 0), wanted))
    assert (rotary.theta, rotary.scaling) == (10000.0, None)


# --------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((7,), {}, ValueError, "head_dim must be even, got 7"),
        ((8.0,), {}, TypeError, "head_dim"),
        ((8, 0.0), {}, ValueError, "theta"),
        ((8, 5.0), {"scaling": {"rope_theta": 6.0}}, ValueError, r"5.*6"),
        ((8, 5.0), {"scaling": {"rope_theta": 6.0}, "fraction": 0.5}, ValueError, r"5.*6"),
        ((8,), {"trained_length": 4.0}, TypeError, "trained_length"),
        ((8,), {"scaling": {"rope_type": "linear"}}, ValueError, "factor"),
        ((8,), {"scaling": "linear"}, TypeError, "scaling"),
        ((8,), {"scaling": {"rope_type": "dynamic", "factor": 2.0}}, ValueError, "max"),
        ((8,), {"fraction": 1.5}, ValueError, "fraction"),
        ((8,), {"fraction": 0.5, "scaling": {"rope_type": "default"}}, ValueError, "give one of"),
        ((8,), {"interleaved": "no"}, TypeError, "interleaved"),
        ((8,), {"precision": "bf16"}, ValueError, "precision"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Rotary(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 6, 10)}, r"q must be \(B, H, L, 8\), got \(2, 4, 6, 10\)"),
        ({"k": torch.zeros(6, 8)}, r"k must be \(B, H, L, 8\)"),
        ({"k": torch.zeros(2, 2, 5, 8)}, "the same batch and length"),
        ({"k": torch.zeros(2, 2, 6, 8).double()}, "one dtype"),
        ({"q": torch.zeros(2, 4, 6, 8).int()}, "q must be float32, float64, bfloat16 or float16"),
        ({"q": None}, "q must be a torch.Tensor"),
        ({"positions": torch.arange(5)}, r"here \(6,\) or \(1\|2, 6\); got \(5,\)"),
        ({"positions": torch.tensor(0)}, r"got \(\)"),
    ],
)
def test_wrong_calls(change, message):
    q, k = heads()
    call = {"q": q, "k": k, "positions": None} | change
    with pytest.raises(RuntimeError, match=message):
        Rotary(8)(call["q"], call["k"], call["positions"])


def test_it_prints_what_it_is():
    text = str(Rotary(8, 1234567.0, interleaved=True, fraction=0.5, precision="hf"))
    assert text.startswith("Rotary(8, theta=1234567, scaling=None, interleaved=True, fraction=0.5,")
    text = str(scaled("dynamic"))
    assert "'dynamic'" in text
    assert "trained_length=16" in text
