"""set_num_threads: more threads, the same bits; and who may not share memory."""

import os
import signal
import threading

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator, lay_out, turn
from processes import python

pytestmark = pytest.mark.usefixtures("small_pieces")


def calls():
    rng = generator("threads")
    x, (cos, sin) = rng.normal(size=(3, 37, 18)).astype(np.float32), turn(rng, (37, 7))
    q, p = rng.normal(size=(2, 37, 9)), rng.normal(size=(21, 9))
    scale, shift = wavepe.wavelet_grid(16)
    inv_freq, _ = wavepe.rope_frequencies(16)
    return {
        "rope": lambda: wavepe.rope(x, cos, sin),
        "rope strided": lambda: wavepe.rope(lay_out(x, "negative"), cos, sin, interleaved=True),
        "rope float16": lambda: wavepe.rope(x.astype(np.float16), cos, sin, inverse=True),
        "rope_table": lambda: np.stack(wavepe.rope_table(np.arange(37) * 10**7, inv_freq)),
        "rope_table hf": lambda: np.stack(
            wavepe.rope_table(np.arange(37), inv_freq, precision="hf", dtype=np.float64)
        ),
        "relative_bias": lambda: wavepe.relative_bias(q, p, 41, first=-3),
        "relative_bias edge": lambda: wavepe.relative_bias(q, p, 11, first=5, beyond="edge"),
        "wavelet_table": lambda: wavepe.wavelet_table(np.arange(-20, 21), scale, shift),
    }


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("threads", [2, 3, 64])
def test_same_bits_for_any_number_of_threads(variant, pools, name, threads):
    alone = calls()[name]()
    assert not pools
    wavepe.set_num_threads(threads)
    assert_same_bits(calls()[name](), alone)
    assert pools
    assert 2 <= max(pools) <= threads


def test_in_place_in_pieces(pools):
    rng = generator("in place")
    x, (cos, sin) = rng.normal(size=(37, 16)), turn(rng, (37, 8), np.float64)
    expected = wavepe.rope(x, cos, sin)
    wavepe.set_num_threads(4)
    assert wavepe.rope(x, cos, sin, out=x) is x
    assert pools == [4]
    assert_same_bits(x, expected)


def test_shifted_memory_is_not_cut(pools):
    """A piece would write what the next one still reads."""
    rng = generator("shifted")
    memory, (cos, sin) = rng.normal(size=(38, 16)), turn(rng, (37, 8), np.float64)
    expected = wavepe.rope(memory[:-1].copy(), cos, sin)
    wavepe.set_num_threads(4)
    assert_same_bits(wavepe.rope(memory[:-1], cos, sin, out=memory[1:]), expected)
    assert not pools


def test_output_over_its_tables_is_not_cut(pools):
    rng = generator("over tables")
    memory, x = rng.normal(size=(400, 16)), rng.normal(size=(400, 16))
    for cos, sin in (
        (memory[::-1, :8], memory[::-1, 8:]),
        (memory[:1, :8], memory[:1, 8:]),
    ):
        kept = memory.copy()
        expected = wavepe.rope(x, cos.copy(), sin.copy())
        wavepe.set_num_threads(4)
        assert_same_bits(wavepe.rope(x, cos, sin, out=memory), expected)
        wavepe.set_num_threads(1)
        memory[...] = kept
    assert not pools


def test_at_the_end_of_the_interpreter():
    code = """
import atexit, numpy as np, wavepe
from wavepe import _threads
_threads.LEAST_ELEMENTS = 16
wavepe.set_num_threads(4)
x, cos, sin = np.ones((64, 8)), np.zeros((64, 4)), np.ones((64, 4))
atexit.register(lambda: print(wavepe.rope(x, cos, sin)[0, 0]))
"""
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("-1.0\n", "")


@pytest.mark.parametrize("threads", [1, 4])
def test_relative_bias_into_its_own_queries(variant, threads):
    rng = generator("own queries")
    table, q = rng.normal(size=(40, 37)), rng.normal(size=(37, 37))
    expected = wavepe.relative_bias(q, table, 37)
    wavepe.set_num_threads(threads)
    assert wavepe.relative_bias(q, table, 37, out=q) is q
    assert_same_bits(q, expected)


def test_small_calls_use_one_thread(monkeypatch, pools):
    monkeypatch.undo()
    wavepe.set_num_threads(8)
    for call in calls().values():
        call()
    assert not pools


def test_callers_in_threads_of_their_own():
    expected = {name: call() for name, call in calls().items()}
    wavepe.set_num_threads(2)
    wrong = []

    def work():
        for _ in range(5):
            for name, call in calls().items():
                if not np.array_equal(call(), expected[name]):
                    wrong.append(name)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(
    ("n", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_bad_numbers(n, error):
    with pytest.raises(error, match="n must be"):
        wavepe.set_num_threads(n)


# ------------------------------------------------------------------ other processes and threads

FORKED = """
import os
import numpy as np, wavepe
from wavepe import _threads

_threads.LEAST_ELEMENTS = 16
wavepe.set_num_threads(4)
x = np.random.default_rng(0).normal(size=(64, 8))


def call():
    rotated = wavepe.rope(x, x[:, :4], x[:, 4:])
    return rotated.tobytes() + wavepe.attention(x, x, x, p=x).tobytes()


want = call()
child = os.fork()
if child == 0:
    os._exit(call() != want)
print(os.waitpid(child, 0)[1], call() == want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_after_threads():
    done = python("-c", FORKED)
    assert done.stdout == "0 True\n", done.stderr


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np, wavepe

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
wavepe.set_num_threads(int(sys.argv[1]))
x = np.random.default_rng(0).normal(size=(2000, 64)).astype(np.float32)
want = wavepe.attention(x, x, x)
within = False


def interrupt():
    while not within:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)


thread = threading.Thread(target=interrupt)
thread.start()
sys.setswitchinterval(1e9)  # it can only run where a call lets it
try:
    within = True
    while True:
        wavepe.attention(x, x, x)
except KeyboardInterrupt:
    sys.setswitchinterval(0.005)
    thread.join()
    print(np.array_equal(wavepe.attention(x, x, x), want))
    raise
"""


@pytest.mark.parametrize("threads", ["1", "4"])
def test_ctrl_c_in_a_long_call(threads):
    """KeyboardInterrupt once the kernel is done, and calls go on as before."""
    done = python("-c", INTERRUPTED, threads)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.returncode == -signal.SIGINT
