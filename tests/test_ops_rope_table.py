"""wavepe.ops.rope_table: the NumPy table bit for bit, on tensors, compiled and in models."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import (
    assert_same_bits,
    compiled_once,
    generator,
    load_torch,
    not_emulated,
    recording_backend,
)
from tensors import assert_threads_agree

torch, ops = load_torch()

FREQ = torch.from_numpy(oracle.rope_frequencies(34))
BOTH = ("exact", "hf")


@not_emulated
@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numpy_and_torch_agree_bit_for_bit(variant, precision, dtype):
    rng = generator("both")
    for shape in ((), (1,), (97,), (2, 33), (0,), (3, 0)):
        positions = np.asarray(rng.integers(-(2**24), 2**24, shape))
        options = {"precision": precision, "attention_factor": 1.25}
        got = ops.rope_table(torch.from_numpy(positions), FREQ, dtype=dtype, **options)
        numpy_dtype = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
        want = wavepe.rope_table(positions, FREQ.numpy(), dtype=numpy_dtype, **options)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            assert_same_bits(a.numpy(), b, str(shape))


@pytest.mark.parametrize("precision", BOTH)
def test_sections(variant, precision):
    positions = torch.arange(30).reshape(2, 5, 3) * 1001
    got = ops.rope_table(positions, FREQ, sections=[4, 5, 8], precision=precision)
    want = wavepe.rope_table(
        positions.numpy(), FREQ.numpy(), sections=[4, 5, 8], precision=precision
    )
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.numpy(), b)


@pytest.mark.parametrize(
    "integer", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
)
def test_integer_types_and_strides(variant, integer):
    positions = torch.arange(40, dtype=integer)
    whole = ops.rope_table(positions, FREQ)
    want = wavepe.rope_table(np.arange(40), FREQ.numpy())
    assert_same_bits(whole[0].numpy(), want[0])
    cut = ops.rope_table(positions[1::3], FREQ.repeat_interleave(2)[::2])
    assert torch.equal(cut[1], whole[1][1::3])
    row = ops.rope_table(positions[:1].expand(4), FREQ)
    assert torch.equal(row[1], whole[1][:1].expand(4, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_rounded_table(variant, dtype):
    positions = torch.arange(-300, 300)
    exact = oracle.rope_table(positions.numpy(), FREQ.numpy())
    for got, want in zip(ops.rope_table(positions, FREQ, dtype=dtype), exact, strict=True):
        assert got.dtype == dtype
        rounded = torch.from_numpy(want).to(dtype)
        assert (
            (got.double() - torch.from_numpy(want))
            .abs()
            .le(2 * (rounded.double() - torch.from_numpy(want)).abs() + 1e-9)
            .all()
        )


def test_float32_frequencies_are_taken_as_they_are(variant):
    """Models keep inv_freq as a float32 buffer."""
    positions = torch.tensor([1, 1000, 2**20])
    got = ops.rope_table(positions, FREQ.float())
    want = wavepe.rope_table(positions.numpy(), FREQ.float().double().numpy())
    assert_same_bits(got[0].numpy(), want[0])
    assert_same_bits(got[1].numpy(), want[1])


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("sections", [None, [1, 2]])
def test_opcheck(precision, sections):
    positions = torch.arange(10).reshape(5, 2)
    options = {"precision": precision, "sections": sections, "attention_factor": 0.5}
    torch.library.opcheck(torch.ops.wavepe.rope_table.default, (positions, FREQ[:3]), options)


def test_compiles_whole_for_any_length():
    backend = recording_backend()

    def turned(x, positions):
        cos, sin = ops.rope_table(positions, FREQ, precision="hf")
        return ops.rope(x, cos, sin)

    compiled = torch.compile(turned, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 23):
        x, positions = torch.ones(2, 3, length, 34), torch.arange(length)
        assert torch.equal(compiled(x, positions), turned(x, positions))
    assert compiled_once(backend)


def test_bits_do_not_depend_on_threads(variant):
    assert_threads_agree(lambda: ops.rope_table(torch.arange(5000) * 977, FREQ), 2, 5)


def test_autocast_keeps_the_type_and_meta_the_shape():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.rope_table(torch.arange(3), FREQ)[0].dtype == torch.float32
    cos, sin = ops.rope_table(torch.arange(6, device="meta").view(2, 3), FREQ.to("meta"))
    assert cos.is_meta
    assert cos.shape == sin.shape == (2, 3, 17)


POSITIONS = torch.arange(6).view(2, 3)
ERRORS = [
    ("exact", (POSITIONS, FREQ), {"precision": "fast"}),
    (r"inv_freq must be 1-D .* got .*\(1, 17\)", (POSITIONS, FREQ.view(1, 17)), {}),
    ("inv_freq must be .*float32.* got complex128", (POSITIONS, FREQ.to(torch.complex128)), {}),
    ("positions must .* got complex64", (POSITIONS.to(torch.complex64), FREQ), {}),
    ("17", (POSITIONS, FREQ), {"sections": [8, 8, 8]}),
    ("3", (POSITIONS, FREQ), {"sections": [8, 9]}),
    ("-1", (POSITIONS, FREQ), {"sections": [9, 9, -1]}),
    ("dtype must be .*float.* got .*int32", (POSITIONS, FREQ), {"dtype": torch.int32}),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("match", "args", "options"), ERRORS)
def test_errors(match, args, options, device):
    with pytest.raises(RuntimeError, match=match):
        ops.rope_table(*(a.to(device) for a in args), **options)


def test_devices_must_agree():
    with pytest.raises(RuntimeError, match="meta"):
        ops.rope_table(POSITIONS, FREQ.to("meta"))


def test_sections_whose_sum_wraps_around():
    with pytest.raises(RuntimeError, match="sections"):
        ops.rope_table(
            torch.zeros(2, 3, dtype=torch.int8), torch.ones(4), sections=[2**63 - 1, 2**63 - 1, 6]
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("precision", 3), ("dtype", 6), ("attention_factor", 10**400), ("sections", range(2**58))],
)
def test_options_of_another_kind(name, value):
    """The schema would take 6 for a dtype, and go through a range."""
    with pytest.raises(RuntimeError, match=rf"^wavepe: (unknown )?{name} "):
        ops.rope_table(torch.arange(3), torch.ones(2), **{name: value})


@not_emulated  # a GPU's positions are not looked at
@pytest.mark.parametrize("position", [2**53 + 1, -(2**53) - 1, 2**53 + 2, 2**63 - 1])
def test_positions_that_float64_does_not_hold_are_refused(position):
    inv_freq = torch.tensor([1.0, 0.5])
    ops.rope_table(torch.tensor([2**53, -(2**53)]), inv_freq)
    with pytest.raises(RuntimeError, match=r"positions must lie within \+-2\^53"):
        ops.rope_table(torch.tensor([0, position]), inv_freq)
