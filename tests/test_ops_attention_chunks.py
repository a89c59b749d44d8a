"""Backward of few long heads: chunks of queries with sums of their own, of the keys they see."""

import pytest
from attention_cases import OPTIONS, Shape, attention, compare, draw, incoming, judge, run
from cases import generator

# chunks of 4, 2 (and two key heads with several query heads), 4 with rows that see nothing
SHAPES = [Shape(1, 1, 1, 1700, 1700, 8, 8), Shape(2, 4, 2, 900, 1000, 8, 4)]
SHAPES += [Shape(1, 2, 1, 1600, 700, 4, 8)]
CHOSEN = ["plain", "every key", "window", "table", "table, q_rel, per head", "edge", "key_mask"]
CHOSEN += ["bias", "bias of all heads", "bias, both sides, edge"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("option", [*CHOSEN, "offset", "everything"])
def test_against_the_oracle(shape, option):
    rng = generator("chunks", option)
    arguments = draw(rng, shape, OPTIONS[option])
    grads = incoming(rng, arguments)
    exact = judge(arguments, *grads)
    compare(run(attention, arguments, *grads), exact, arguments["q"].dtype, option)


def test_segments_end_where_chunks_do():
    """Consecutive and scattered segments, some chunks see few keys."""
    shape = Shape(1, 1, 1, 1700, 1700, 8, 8)
    for option in ("segments", "packed training"):
        rng = generator("chunks", option)
        arguments = draw(rng, shape, OPTIONS[option])
        for width in (1, 97, 700):
            arguments["segments"] = (arguments["segments"] * 0).cumsum(-1)  # zeros
            arguments["segments"] += (arguments["segments"] + 1).cumsum(-1) // width
            grads = incoming(rng, arguments)
            exact = judge(arguments, *grads)
            compare(run(attention, arguments, *grads), exact, arguments["q"].dtype, option)
