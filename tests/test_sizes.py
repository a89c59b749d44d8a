"""Sizes that no memory holds: a call returns at once, or says what is too large. And what a
decoding step allocates."""

import re
from pathlib import Path

import pytest
from cases import HAS_TORCH
from processes import forked

CALLS = Path(__file__).with_name("sizes_calls.py")
SIDES = {"numpy": 1000, "torch": 700}  # calls drawn
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"
)


def run(*words):
    return forked(*words, PYTHONPATH=str(CALLS.parent))


def needs(side):
    if side == "torch" and not HAS_TORCH:
        pytest.skip("wavepe was built without torch")


@pytest.mark.parametrize("side", SIDES)
def test_sizes_that_no_memory_holds(side):
    needs(side)
    done = run(CALLS, side, 16, SIDES[side])
    *calls, summary = done.stdout.splitlines() or [""]
    message = f"exit status {done.returncode}, last call:\n{summary}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, message
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


# Calls whose result, gradient or step fits no memory, by the name that the error gives.
OUT_OF_MEMORY = {
    "relative_bias": [
        "ops.relative_bias(E(1, 4), E(3, 4), 2**45)",
        "ops.relative_bias(E(1, 4, dtype='bfloat16'), E(3, 4, dtype='bfloat16'), 2**45)",
        "ops.relative_bias(E(2**40, 4, dtype='bfloat16'), E(3, 4, dtype='bfloat16'), 1)",
        "ops.relative_bias(E(1, 2**27).requires_grad_(), E(64, 2**27), 64)",
        "vjp(lambda q: ops.relative_bias(q, E(2**40, 4), 5), E(1, 4))",
    ],
    "relative_bias_skew": ["raw.relative_bias_skew(E(3, 4), 2**45)"],
    "relative_bias_unskew": [
        "raw.relative_bias_unskew(E(3, 4), 2**45)",
        "derive(ops.relative_bias(T(1, 4), E(2**40, 4), 5))",
    ],
    "the gradient of relative_bias": [
        "derive(ops.relative_bias(E(2**22, 2**9).requires_grad_(), E(1, 2**9), 1))"
    ],
    "rope": [
        "ops.rope(E(1, 2**40, 1, 4), E(1, 2), E(1, 2))",
        "ops.rope(E(1, 2**40, 1, 4).requires_grad_(), E(1, 2), E(1, 2))",
        "vjp(lambda x: ops.rope(x, E(1, 2), E(1, 2)), E(1, 2**40, 1, 4))",
    ],
    "rope_qk": ["ops.rope_qk(E(1, 1, 1, 4), E(1, 2**40, 1, 4), E(1, 2), E(1, 2))"],
    "rope_table": ["ops.rope_table(E(2**40, dtype='int64'), E(2))"],
    "wavelet_table": [
        "ops.wavelet_table(2**40, E(3), E(3))",
        "ops.wavelet_table(4, E(2**40), E(2**40))",
        "ops.wavelet_table(E(2**40, dtype='int64'), T(3), E(3))",
        "ops.wavelet_table(2**40, E(3), E(3), kind='own')",
        "ops.wavelet_table(E(2**40, dtype='int64'), E(3), E(3), kind='own')",
    ],
    "wavelet_table_backward": [
        "raw.wavelet_table_backward(E(1, 2**36), E(1, dtype='int64'), E(2**36), E(2**36), 'haar', "
        "None)"
    ],
    "attention_forward": [
        "ops.attention(E(1, 1, 2**34, 4), E(1, 1, 4, 4), E(1, 1, 4, 4), causal=False)",
        "ops.attention(E(1, 1, 2**34, 4), E(1, 1, 4, 4), E(1, 1, 4, 4), dropout_p=0.5)",
        "ops.attention(E(1, 1, 2**46, 4), E(1, 1, 4, 4), E(1, 1, 4, 4))",
        "ops.attention(E(1, 1, 2**34, 4).requires_grad_(), E(1, 1, 4, 4), E(1, 1, 4, 4))",
    ],
    "attention_backward": [
        "derive(ops.attention(T(1, 1, 2, 4), E(1, 1, 2, 4), E(1, 1, 2, 4),"
        " p=E(2**40, 4).requires_grad_()))"
    ],
    "attention": [
        "jvp(lambda q: ops.attention(q, q, q), (E(1, 1, 2**20, 4),), (E(1, 1, 2**20, 4),))",
        "jvp(lambda q: ops.attention(q, q, q), (E(1, 1, 2**40, 4),), (E(1, 1, 2**40, 4),))",
    ],
    "merge_attention": [
        "ops.merge_attention(E(2, 2**40, 4), E(2, 2**40))",
        "ops.merge_attention([E(2**40, 4)] * 2, [E(2**40)] * 2)",
    ],
    "relative_table": ["ops.relative_table(E(2**40, 4))", "ops.relative_table(A(2**40, 4))"],
}

NAMED = """
import sys
import numpy as np, sizes_calls, torch, wavepe
from sizes_calls import A, E
from torch.func import jvp
from wavepe import ops

def T(*shape):
    return torch.ones(shape, requires_grad=True)

def derive(result):
    result.sum().backward()

def vjp(function, x):
    torch.func.grad(lambda x: function(x).sum())(x)

raw, sizes_calls.torch = torch.ops.wavepe, torch
wavepe.register_wavelet("own", np.sin)
sizes_calls.limit_memory()
for call in sys.argv[1:]:
    try:
        print("gave", type(eval(call)))
    except RuntimeError as error:
        print(error)
"""


def test_out_of_memory_says_in_which_operator_and_for_how_much(torch):
    calls = [(name, call) for name, calls in OUT_OF_MEMORY.items() for call in calls]
    done = run("-c", NAMED, *(call for _, call in calls))
    message = done.stdout.splitlines()
    assert len(message) == len(calls), done.stdout + done.stderr
    for (name, call), text in zip(calls, message, strict=True):
        size = r"shape \([\d, ]+\)|\d\d+ bytes|sizes=\[[\d, ]+\]|q \([\d, ]+\)"
        assert re.match(rf"wavepe: {name}: .*({size})", text), f"{call}: {text}"


def test_scratch_memory_is_counted_without_wrapping(torch):
    """The tables of 2^18 heads, packed: more than 2^64 bytes. 17 queries are not decoded."""

    def expanded(*shape):
        return torch.zeros((), dtype=torch.float64).expand(shape)

    heads, keys, d = 2**18, 2**24, 2**19
    q, k, v = (expanded(1, heads, *rest) for rest in ((17, d), (keys, d), (keys, 1)))
    with pytest.raises(RuntimeError, match=f"attention needs {heads} x ") as caught:
        torch.ops.wavepe.attention_forward(q, k, v, expanded(heads, keys, d))
    each = int(re.search(r"x (\d+) bytes", str(caught.value))[1])
    assert heads * each > 2**64
