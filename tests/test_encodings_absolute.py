"""The absolute encodings binary, integer and normalised (METHODS 4), and their errors."""

import numpy as np
import pytest
import wavepe
from cases import INTEGERS, assert_same_bits
from wavepe.encodings import Binary, Integer, Normalised

NAMES = ("binary", "integer", "normalised")


def bits(position, dim):
    return [float(digit) for digit in format(position, f"0{dim}b")] if dim else []


def test_values_of_the_methods():
    assert Binary().absolute([252], 8).tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert Binary().absolute(5, 8).tolist() == [0, 0, 0, 0, 0, 1, 0, 1]
    assert Integer().absolute([0, 3], 2).tolist() == [[0, 0], [3, 3]]
    assert Normalised().absolute([0, 1, 3], 2).tolist() == [[0, 0], [0.25, 0.25], [0.75, 0.75]]


@pytest.mark.parametrize("dim", [9, 16, 53, 54, 55, 64, 200])
def test_binary_is_the_number_in_bits(dim):
    positions = [p for p in (0, 1, 2, 3, 255, 256, 511, 2**31, 2**53 - 1, 2**53) if p < 2**dim]
    got = Binary().absolute(positions, dim)
    assert got.dtype == np.float64
    assert got.tolist() == [bits(p, dim) for p in positions]
    everything = np.arange(512)
    assert Binary().absolute(everything, dim).tolist() == [bits(p, dim) for p in everything]


@pytest.mark.parametrize(("position", "count"), [(8, 4), (7, 3), (255, 8), (2**53, 54)])
def test_more_bits_than_dims(position, count):
    assert Binary().absolute(position, count).sum() == position.bit_count()
    message = rf"with {count - 1} dims .* got {position}, which has {count} bits"
    with pytest.raises(ValueError, match=message):
        Binary().absolute([0, position, 1], count - 1)


def test_normalised_follows_the_length():
    encoding = Normalised()
    assert encoding.absolute([1], 1, length=4).tolist() == [[0.25]]
    assert encoding.absolute([1], 1, length=4, trained_length=2).tolist() == [[0.25]]
    assert encoding.absolute([[1, 9]], 1).tolist() == [[[0.1], [0.9]]]
    assert encoding.absolute(0, 3).tolist() == [0, 0, 0]
    assert encoding.absolute([], 3).shape == (0, 3)
    for length, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="normalised length"):
            encoding.absolute([0], 1, length=length)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("integer", INTEGERS)
def test_every_integer_type_and_shape(name, integer):
    encoding = wavepe.encoding(name)
    positions = np.array([[0, 1, 2], [127, 64, 3]], integer)
    whole = encoding.absolute(positions, 8)
    assert (whole.dtype, whole.shape) == (np.float64, (2, 3, 8))
    assert_same_bits(encoding.absolute(positions.astype(np.int64), 8), whole)
    assert_same_bits(encoding.absolute(positions.tolist(), 8), whole)
    assert_same_bits(encoding.absolute(positions.T[::-1], 8), whole.swapaxes(0, 1)[::-1])
    assert encoding.absolute(positions[:, :0], 8).shape == (2, 0, 8)
    assert encoding.absolute(integer(7), 8).shape == (8,)
    assert (positions == [[0, 1, 2], [127, 64, 3]]).all(), "left as it was"


@pytest.mark.parametrize("name", NAMES)
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
def test_errors(name, positions, dim, error, message):
    with pytest.raises(error, match=f"{name} .*{message}"):
        wavepe.encoding(name).absolute(positions, dim)


@pytest.mark.parametrize("name", NAMES)
def test_they_have_no_options(name):
    encoding = wavepe.encoding(name)
    assert (encoding.name, encoding.entry, str(encoding)) == (name, "absolute", name)
    with pytest.raises(ValueError, match=r"unknown option 'size'.*; it has none"):
        wavepe.encoding(f"{name}:size=1")
    for method in (lambda: encoding.rope_table([0], 8), lambda: encoding.slopes(2)):
        with pytest.raises(NotImplementedError, match=f"{name!r}.*'absolute'"):
            method()
