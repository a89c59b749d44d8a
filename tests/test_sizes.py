"""Sizes that no memory holds: a call returns at once, or says what is too large. And what a
decoding step allocates."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import wavepe

CALLS = Path(__file__).with_name("sizes_calls.py")
SIDES = {"numpy": 1000, "torch": 700}  # calls drawn
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"
)


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=100
    )


def needs(side):
    if side == "torch" and not wavepe.build_info()["torch"]:
        pytest.skip("wavepe was built without torch")


@pytest.mark.parametrize("side", SIDES)
def test_sizes_that_no_memory_holds(side):
    needs(side)
    done = run(CALLS, side, 16, SIDES[side])
    *calls, summary = done.stdout.splitlines() or [""]
    said = f"exit status {done.returncode}, last call:\n{summary}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    drawn = dict(pair.split("=") for pair in summary.split()[1:])
    assert min(map(int, drawn.values())) >= 10, summary
    assert len(calls) > SIDES[side] / 3


DECODING = """
import resource, sys
import numpy as np
import wavepe

def arrays(n):  # in memory that does not grow with n
    return [np.broadcast_to(np.float32(1) / 2, shape) for shape in ((1, 2, 1, 64), (1, 2, n, 64))]

def numpy_step(n):
    q, k = arrays(n)
    wavepe.attention(q, k, k, p=np.broadcast_to(np.float32(1) / 2, (n, 64)))

def torch_step(n):
    q, k = (torch.full((), 0.5).expand(x.shape) for x in arrays(n))
    ops.attention(q, k, k, p=k[0, 0])

if sys.argv[1] == "torch":
    import torch
    from wavepe import ops

step = globals()[f"{sys.argv[1]}_step"]
for variant in wavepe.variants():
    wavepe.use_variant(variant)
    step(192)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
for variant in wavepe.variants():
    wavepe.use_variant(variant)
    step(2**17)
print("done")
try:
    {"numpy": np, "torch": sys.modules.get("torch")}[sys.argv[1]].zeros(2**23)
except (MemoryError, RuntimeError):
    print("and no more")
"""


@pytest.mark.parametrize("side", SIDES)
def test_decoding_needs_little_memory_at_any_length(side):
    """With 16 MB to spare: a block of queries would take 50 MB for the table's scores alone."""
    needs(side)
    done = run("-c", DECODING, side)
    assert done.stdout.split("\n")[:2] == ["done", "and no more"], done.stderr[-3000:]


def test_scratch_memory_is_counted_without_wrapping(torch):
    """The tables of 2^18 heads, packed: more than 2^64 bytes."""

    def expanded(*shape):
        return torch.zeros((), dtype=torch.float64).expand(shape)

    heads, keys, d = 2**18, 2**24, 2**19
    q, k, v = (expanded(1, heads, *rest) for rest in ((2, d), (keys, d), (keys, 1)))
    with pytest.raises(RuntimeError, match=f"attention needs {heads} x ") as caught:
        torch.ops.wavepe.attention_forward(q, k, v, expanded(heads, keys, d))
    each = int(re.search(r"x (\d+) bytes", str(caught.value))[1])
    assert heads * each > 2**64
