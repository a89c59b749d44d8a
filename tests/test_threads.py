"""Threads: the same bits for any number of them; a fork, Ctrl-C and `use_variant` meanwhile."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator, lay_out, turn, using
from processes import forked, python
from variants import all_of_them
from wavepe.arrays import wavelet_registered
from wavepe.arrays.threads import LEAST_ELEMENTS
from wavepe.encodings import ALiBi, known_encodings

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


def test_what_is_cut(pools):
    """A piece must not write what the next one still reads."""
    rng = generator("cut")
    x, memory, (cos, sin) = *rng.normal(size=(2, 38, 16)), turn(rng, (37, 8), np.float64)
    square = rng.normal(size=(37, 37))
    for name, given, out, cut in (
        ("in place", (x[1:], cos, sin), x[1:], True),
        ("shifted", (memory[:-1], cos, sin), memory[1:], False),
        ("transposed", (square[:, :16], cos, sin), square.T[:, :16], False),
        ("over its tables", (x, memory[::-1, :8], memory[::-1, 8:]), memory, False),
        ("over a table of one row", (x, memory[:1, :8], memory[:1, 8:]), memory, False),
    ):
        want = wavepe.rope(*(a.copy() for a in given))
        wavepe.set_num_threads(4)
        assert wavepe.rope(*given, out=out) is out
        assert_same_bits(out, want, name)
        assert pools == ([4] if cut else []), name
        wavepe.set_num_threads(1)
        pools.clear()


def test_small_calls_use_one_thread(monkeypatch, pools):
    monkeypatch.setattr("wavepe.arrays.threads.LEAST_ELEMENTS", LEAST_ELEMENTS)
    wavepe.set_num_threads(8)
    for call in calls().values():
        call()
    assert not pools


def test_callers_in_threads_of_their_own():
    expected = {name: call() for name, call in calls().items()}
    wavepe.set_num_threads(2)

    def work(_):
        for name, call in 5 * [*calls().items()]:
            assert_same_bits(call(), expected[name], name)

    together(work)


def together(work, count=4):
    """Return the results of work(0), work(1), ... in threads of their own."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_several_threads_register(monkeypatch):
    """Every registration counts, for kept tables go by it; and a name has one owner."""
    monkeypatch.setattr(wavelet_registered, "_known", {})
    before = wavelet_registered.registrations()

    def work(number):
        won = 0
        for i in range(50):
            assert wavepe.register_encoding(ALiBi).name in known_encodings()
            name = f"own-{number}-{i}"
            wavepe.register_wavelet(name, lambda u, i=i: u == i)
            assert wavepe.wavelet_table(50, [1.0], [0.0], kind=name)[i, 0] == 1
            owner = lambda u: [time.sleep(0), u][1]  # noqa: E731 - others run meanwhile
            owner.__module__ = f"module{number}"
            with contextlib.suppress(ValueError):
                wavepe.register_wavelet(f"claimed-{i}", owner)
                won += 1
        return won

    assert sum(together(work)) == 50
    assert wavelet_registered.registrations() == before + 4 * (50 + 50) + 50


def test_several_threads_ask_for_constants():
    """No constant takes the name of another one, which would be its numbers silently."""
    pytest.importorskip("torch")
    from wavepe.ops._device_constant import device_constant

    class Slow(int):
        def __hash__(self):
            time.sleep(1e-3)  # others run meanwhile
            return int(self)

    def work(number):
        for i in range(20):
            got = device_constant(np.array, (Slow(number % 2), i)).tensor
            assert got.tolist() == [number % 2, i]

    together(work)


@pytest.mark.parametrize(
    ("n", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_bad_numbers(n, error):
    wavepe.set_num_threads(3)
    with pytest.raises(error, match="n must be"):
        wavepe.set_num_threads(n)
    assert wavepe.get_num_threads() == 3


BEGIN = """
import os, sys, threading, time
import numpy as np, wavepe
from wavepe.arrays import threads

threads.LEAST_ELEMENTS = 16
"""
FORKED = """
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
    done = forked("-c", BEGIN + FORKED)
    assert done.stdout == "0 True\n", done.stderr


INTERRUPTED = """
import signal

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
    done = python("-c", BEGIN + INTERRUPTED, threads)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.returncode == -signal.SIGINT


# ------------------------------------------------------------------ another variant meanwhile
#
# A call under way ends with the kernels that it began with, for what one variant packs another
# cannot read.


@pytest.fixture
def switches():
    """A thread that switches to the next variant all the time, once it is started."""
    before, interval, stop = wavepe.variant(), sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(1e-5)

    def switch():
        for name in itertools.cycle(all_of_them()):
            wavepe.use_variant(name)
            if stop.wait(1e-5):
                return

    thread = threading.Thread(target=switch)
    yield thread
    stop.set()
    if thread.is_alive():  # a skipped test has not started it
        thread.join()
    sys.setswitchinterval(interval)
    wavepe.use_variant(before)
    set_threads(1)


def set_threads(count):
    for module in {wavepe, sys.modules.get("torch", wavepe)}:
        module.set_num_threads(count)


def numbers(*shapes):
    rng = generator("meanwhile")
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def numpy_calls():
    q, k, v, p = numbers((2, 4, 131, 33), (2, 2, 150, 33), (2, 2, 150, 24), (140, 33))
    return {
        "attention": lambda: wavepe.attention(q, k, v, p=p, return_lse=True),
        "decode": lambda: wavepe.attention(q[:, :, :1], k, v, p=p, return_lse=True),
        "relative_bias": lambda: [wavepe.relative_bias(q, p, 150)],
    }


def torch_calls():
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("wavepe.ops")
    shapes = (2, 4, 131, 40), (2, 2, 150, 40), (2, 2, 150, 24), (140, 40), (2, 4, 131, 24)
    q, k, v, p, g = map(torch.from_numpy, numbers(*shapes))
    table = ops.relative_table(*wavepe.encoding("wavelet").table(150, 40))
    out, lse = ops.attention(q, k, v, p=p, return_lse=True)
    backward = torch.ops.wavepe.attention_backward
    cos, sin = map(torch.from_numpy, turn(generator("turn"), (131, 16)))
    return {
        "attention": lambda: ops.attention(q, k, v, p=p, return_lse=True),
        "relative_table": lambda: [ops.attention(q, k, v, p=table)],
        "decode": lambda: [ops.attention(q[:, :, :1], k, v, p=p)],
        "backward": lambda: backward(g, None, out, lse, q, k, v, p, p_grad=True),
        "relative_bias": lambda: [ops.relative_bias(q, p, 150)],
        "rope_qk": lambda: ops.rope_qk(q, q[:, :2], cos, sin),
    }


NUMPY = ["attention", "decode", "relative_bias"]
TORCH = [*NUMPY, "relative_table", "backward", "rope_qk"]


@pytest.mark.skipif(len(all_of_them()) < 2, reason="one variant on this machine")
@pytest.mark.parametrize(
    ("calls", "name"), [(numpy_calls, x) for x in NUMPY] + [(torch_calls, x) for x in TORCH]
)
def test_another_variant_meanwhile(calls, name, switches):
    """Every result is that of one variant, and not all are of the same one."""
    call = calls()[name]

    def bits():
        return [np.asarray(x).tobytes() for x in call()]

    wanted = {}
    for variant in all_of_them():
        with using(variant):
            wanted[variant] = bits()
    set_threads(3)
    switches.start()
    seen = set()
    for done in range(400):
        result = bits()
        equal = [variant for variant, want in wanted.items() if result == want]
        assert equal, f"call {done} has the bits of no variant"
        seen.add("portable" in equal)  # AVX2 and AVX-512 agree in every bit
        if done >= 12 and len(seen) == 2:
            return
    raise AssertionError("400 calls, and no switch between two of them")
