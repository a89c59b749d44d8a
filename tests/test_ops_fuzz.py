"""Seeded random calls of torch's operators but attention, forward and backward, on every variant
(fuzz.py): a right result, or an error of torch's kind."""

import fuzz
import fuzz_ops
import pytest


def test_every_operator_is_called():
    """By `make fuzz`, too."""
    assert {*fuzz_ops.TARGETS, "ops.attention"} == {n for n in fuzz.NAMES if n.startswith("ops.")}


@pytest.mark.parametrize("name", fuzz_ops.TARGETS)
@pytest.mark.parametrize("calls", fuzz.parts(40, 200))
def test_random_calls(every_variant, name, calls):
    fuzz.make_calls(name, calls)
