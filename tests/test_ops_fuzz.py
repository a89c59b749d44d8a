"""Seeded random calls of torch's operators but attention, forward and backward, on every variant
(fuzz.py): a right result, or an error of torch's kind."""

import pytest
from cases import load_torch

load_torch()

import fuzz
import fuzz_ops

CALLS = 50 if fuzz.SANITIZED else 200


@pytest.mark.parametrize("name", fuzz_ops.TARGETS)
def test_random_calls(every_variant, name):
    fuzz.make_calls(name, range(CALLS))
