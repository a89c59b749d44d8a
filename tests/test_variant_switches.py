"""`use_variant` in another thread: a call under way ends with the kernels that it began with, for
what one variant packs another cannot read."""

import contextlib
import itertools
import sys
import threading

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator, turn, using

FEW, MANY = 12, 400  # calls


def names():
    """Those of the build, and the test-only variant of a development build."""
    found = wavepe.variants()
    with contextlib.suppress(ValueError), using("avx2x2"):
        found.append("avx2x2")
    return found


@pytest.fixture
def switches():
    """A function that switches to the next variant; a thread calls it all the time."""
    before, interval = wavepe.variant(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    stop = threading.Event()

    def switch():
        for name in itertools.cycle(names()):
            wavepe.use_variant(name)
            if stop.wait(1e-5):
                return

    thread = threading.Thread(target=switch)
    yield thread
    stop.set()
    if thread.ident:
        thread.join()
    sys.setswitchinterval(interval)
    wavepe.use_variant(before)


def arrays(label, *shapes, dtype=np.float32):
    rng = generator(label)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def same(a, b):
    try:
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
    except AssertionError:
        return False
    return True


def check(call, thread):
    """Every result is one variant's; and not all are the same one's."""
    wanted = {}
    for name in names():
        with using(name):
            wanted[name] = call()
    thread.start()
    seen = set()
    for done in range(MANY):
        got = call()
        equal = [name for name, result in wanted.items() if same(got, result)]
        assert equal, f"call {done}: no variant gives this"
        seen.add("portable" in equal)
        if done >= FEW and len(seen) == 2:
            return
    raise AssertionError(f"{MANY} calls, and no switch between two of them")


def numpy_calls():
    q, k, v, p = arrays("numpy", (2, 4, 131, 33), (2, 2, 150, 33), (2, 2, 150, 24), (140, 33))
    return {
        "attention": lambda: wavepe.attention(q, k, v, p=p, return_lse=True),
        "decode": lambda: wavepe.attention(q[:, :, :1], k, v, p=p, return_lse=True),
        "relative_bias": lambda: [wavepe.relative_bias(q, p, 150)],
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", numpy_calls())
def test_numpy(name, threads, switches, small_pieces):
    wavepe.set_num_threads(threads)
    check(numpy_calls()[name], switches)


def torch_calls(torch):
    ops, raw = pytest.importorskip("wavepe.ops"), torch.ops.wavepe
    shapes = (2, 4, 131, 40), (2, 2, 150, 40), (2, 2, 150, 24), (140, 40), (2, 4, 131, 24)
    q, k, v, p, g = map(torch.from_numpy, arrays("torch", *shapes))
    table = ops.relative_table(*wavepe.encoding("wavelet").table(150, 40))
    out, lse = ops.attention(q, k, v, p=p, return_lse=True)
    cos, sin = (torch.from_numpy(x) for x in turn(generator("turn"), (131, 16)))
    return {
        "attention": lambda: ops.attention(q, k, v, p=p, return_lse=True),
        "relative_table": lambda: [ops.attention(q, k, v, p=table)],
        "decode": lambda: [ops.attention(q[:, :, :1], k, v, p=p)],
        "backward": lambda: raw.attention_backward(g, None, out, lse, q, k, v, p, p_grad=True),
        "relative_bias": lambda: [ops.relative_bias(q, p, 150)],
        "rope_qk": lambda: ops.rope_qk(q, q[:, :2], cos, sin),
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "name", ["attention", "relative_table", "decode", "backward", "relative_bias", "rope_qk"]
)
def test_torch(name, threads, switches, torch):
    call = torch_calls(torch)[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(call, switches)
    finally:
        torch.set_num_threads(before)
