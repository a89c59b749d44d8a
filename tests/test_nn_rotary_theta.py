"""wavepe.nn.Rotary where theta changes: caches of other frequencies are refused."""

import numpy as np
import oracle
import pytest
from cases import load_torch

torch, ops = load_torch()

from rotary_cases import SCALINGS, assert_rotated, heads
from wavepe.nn import Rotary


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
    rotary.scaling = {"rope_type": "linear", "factor": 2.0}
    assert rotary.theta == 200.0
    with pytest.raises(RuntimeError, match="cache"):
        step(rotary, 1)
    rotary.scaling["factor"] = 3.0  # of a copy
    q, k = heads()
    inv_freq = oracle.rope_frequencies(8, 200.0) / 2
    assert_rotated(rotary(q, k)[0], q, np.arange(6), inv_freq)
    rotary.scaling = {"rope_theta": 50.0}
    assert rotary.theta == 50.0
    rotary.scaling = None
    assert rotary.theta == 50.0


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_type_that_follows_the_length(name):
    rotary = Rotary(8, scaling=SCALINGS[name], max_length=16)
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
