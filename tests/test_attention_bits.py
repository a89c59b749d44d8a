"""wavepe.attention: the same bits for any number of threads, beside other heads, before other
tokens."""

import itertools
import sys
import threading
import time

import numpy as np
import pytest
import wavepe
from attention_arrays import Shape, call, draw
from cases import assert_same_bits, generator


def test_later_tokens_change_no_earlier_output(variant):
    for length in (97, 200, 400):
        given = draw(generator("causal"), Shape(1, 2, 1, 800, 800, 16, 8), "table from -3")
        given["slopes"] = wavepe.alibi_slopes(2)
        start = {name: given[name][:, :, :length] for name in "qkv"}
        for x, y in zip(call(given | start), call(given), strict=True):
            assert_same_bits(x, y[:, :, :length])


@pytest.mark.parametrize("option", ["plain", "everything"])
def test_a_head_does_not_depend_on_the_others(variant, option):
    for m in (1, 131):
        given = draw(generator("heads"), Shape(2, 6, 2, m, 140, 16, 8), option)
        whole = call(given)
        for b, h in ((0, 0), (1, 5), (0, 3)):
            alone = {"q": given["q"][b, h], "k": given["k"][b, h // 3], "v": given["v"][b, h // 3]}
            alone |= {name: given[name][h] for name in ("p", "slopes", "bias") if name in given}
            for x, y in zip(call(given | alone), whole, strict=True):
                assert_same_bits(x, y[b, h], f"{m} {b} {h}")
        repeated = {name: np.repeat(given[name], 3, 1) for name in "kv"}
        for x, y in zip(call(given | repeated), whole, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("option", ["plain", "table", "everything", "bias, both sides"])
def test_same_bits_for_any_number_of_threads(variant, pools, threads, option):
    for shape in (
        Shape(2, 6, 2, 50, 60, 16, 16),  # heads to share out
        Shape(1, 1, 1, 700, 700, 16, 8),  # blocks of one head
        Shape(1, 2, 1, 200, 450, 8, 8),
        Shape(2, 4, 4, 1, 90, 8, 8),  # one query a head
    ):
        given = draw(generator("threads"), shape, option)
        wavepe.set_num_threads(1)
        alone = call(given)
        assert not pools
        wavepe.set_num_threads(threads)
        for x, y in zip(call(given), alone, strict=True):
            assert_same_bits(x, y, f"{shape}")
        assert 2 <= max(pools) <= threads
        pools.clear()


def test_other_threads_go_on_meanwhile():
    """A thread that never has to hand over the lock of the interpreter does so in the kernel."""
    x = np.ones((2000, 64), np.float32)
    calls, seen = itertools.count(), threading.Event()
    state = {"within": False}

    def work():
        while not seen.is_set() and next(calls) < 100:
            state["within"] = True
            wavepe.attention(x, x, x)
            state["within"] = False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e9)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive() and not seen.is_set():
            if state["within"]:
                seen.set()
            else:
                time.sleep(0)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen.is_set()
