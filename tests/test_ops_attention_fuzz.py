"""Seeded random calls of ops.attention on every variant (fuzz.py), forward and backward.

Some calls cross the kernels' blocks. A call with a spoilt argument must be refused.
"""

import fuzz
import pytest
from attention_cases import composed, torch
from cases import generator
from fuzz_attention import Attention

CALLS = 300 if fuzz.SANITIZED else 1600  # those of the sanitizers take ten times as long
PARTS = 20  # a failure names a call, which is quick to make again


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(every_variant, part):
    share = CALLS // PARTS
    fuzz.make_calls("ops.attention", range(part * share, part * share + share))


class Composition(Attention):
    """The composition, which runs without a kernel: no constant tables, and NaN spreads further."""

    function = staticmethod(composed)
    rounds_out = False

    def takes(self, arguments):
        small = arguments["q"].shape[2] * arguments["k"].shape[2] < 1000
        tensors = arguments.get("p") is None or torch.is_tensor(arguments["p"])
        return small and tensors and not arguments["spoilt"]


def test_random_calls_of_the_composition():
    target, made = Composition(), 0
    for number in range(400):
        arguments = target.draw(generator("fuzz", "composition", number))
        if target.takes(arguments):
            target.check(target.call(arguments), target.judge(arguments), arguments)
            made += 1
    assert made > 80


def test_the_calls_cross_blocks():
    """Such calls once found wrong rows: a window, an offset, segments larger than a tile."""
    target, all_three, beyond = Attention(), 0, 0
    for number in range(500):
        arguments = target.draw(generator("fuzz", "blocks", number))
        if arguments["k"].shape[2] > 192:
            beyond += 1
            all_three += {"window", "offset", "segments"} <= arguments.keys()
    assert beyond > 100
    assert all_three > 10
