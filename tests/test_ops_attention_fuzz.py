"""Seeded random small cases of ops.attention, forward and backward against the oracle; and random
calls with one argument spoilt, which must be refused."""

import numpy as np
import pytest
import wavepe
from attention_cases import (
    F32,
    F64,
    FLOATING,
    Shape,
    attention,
    compare,
    composed,
    draw,
    incoming,
    judge,
    run,
    slopes,
    table,
    torch,
)
from cases import generator

# For each variant; with sanitizers, which look at each access, fewer.
SANITIZED = "-fsanitize" in wavepe.build_info()["flags"]  # ten times slower
CASES = 1000 if SANITIZED else 5000
CASES_OF_A_DTYPE = 60 if SANITIZED else 300
PARTS = 25  # tests of a variant: a failure names a part that is quick to run again


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def chance(rng, probability):
    return rng.random() < probability


def random_shape(rng):
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    m, n = (int(x) for x in rng.integers(0, 25, 2))
    d, dv = (int(x) for x in rng.integers(0, 21, 2))
    if chance(rng, 0.2):
        m = 1
    return Shape(int(rng.integers(1, 3)), kv_heads * group, kv_heads, m, n, d, dv)


def random_options(rng, s):
    """Each option now and then, alone and together."""
    found = {"causal": chance(rng, 0.7)}
    often = pick(rng, 0.0, 0.15, 0.4)
    if chance(rng, 0.6):
        found["beyond"] = pick(rng, "zero", "edge")
        w = int(rng.integers(found["beyond"] == "edge", 40))
        found["p"] = table(rng, s, w, chance(rng, 0.4))
        found["first"] = int(rng.integers(-30, 20)) if chance(rng, 0.6) else 0
        if chance(rng, 0.3):
            found["q_rel"] = rng.normal(size=(s.batch, s.heads, s.m, s.d))
    if chance(rng, often):
        found["slopes"] = slopes(s) * pick(rng, 1.0, -0.5)
    if chance(rng, often):
        found["window"] = int(rng.integers(0, 30))
    if chance(rng, often):
        found["softcap"] = float(rng.uniform(0.3, 6))
    if chance(rng, often):
        found["scale"] = float(rng.normal())
    if chance(rng, often):
        found["offset"] = pick(
            rng,
            int(rng.integers(-30, 30)),
            rng.integers(-30, 30, s.batch),
            rng.integers(-30, 30, 1).astype(np.int32),
        )
    if chance(rng, often):
        found["key_mask"] = rng.random((pick(rng, 1, s.batch), s.n)) < rng.random()
    if chance(rng, often) and s.m == s.n:
        ids = rng.integers(0, 4, (pick(rng, 1, s.batch), s.n))
        found["segments"] = np.sort(ids, -1) if chance(rng, 0.7) else ids
    if chance(rng, often):
        shape = (pick(rng, 1, s.batch), pick(rng, 1, s.heads), s.m, s.n)
        found["mask"] = rng.random(shape) < rng.random()
    if chance(rng, often):
        found["dropout_p"] = pick(rng, 0.1, 0.5, 0.9)
    return found


def strided(rng, x):
    """The same values with other strides."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.numel():
        return x
    how = rng.integers(4)
    if how == 0:
        axis = int(rng.integers(x.dim() - 1))
        return x.transpose(axis, -1).contiguous().transpose(axis, -1)
    if how == 1:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x


def random_case(rng, dtype):
    s = random_shape(rng)
    if chance(rng, 0.3):
        s = s._replace(n=s.m)
    arguments = draw(rng, s, random_options(rng, s), dtype)
    return {name: strided(rng, x) for name, x in arguments.items()}


def fuzz(function, key, count, dtype):
    rng = generator("fuzz", key)
    for number in range(count):
        arguments = random_case(rng, dtype)
        grad_out, grad_lse = incoming(rng, arguments)
        grads = pick(rng, (grad_out, grad_lse), (grad_out, None), (None, grad_lse))
        given = {n: tuple(x.shape) if torch.is_tensor(x) else x for n, x in arguments.items()}
        wanted = FLOATING if chance(rng, 0.8) else tuple(n for n in FLOATING if chance(rng, 0.5))
        if not any(n in arguments for n in wanted):
            wanted = ("q",)
        found = run(function, arguments, *grads, wanted=wanted)
        compare(found, judge(arguments, *grads), dtype, f"case {key} {number}, {given}")


@pytest.mark.parametrize("part", range(PARTS))
def test_small_cases(variant, part):
    fuzz(attention, f"f32 {part}", CASES // PARTS, F32)


def test_small_cases_of_the_composition():
    fuzz(composed, "composed", 300, F32)


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16, torch.float16])
def test_small_cases_of_other_dtypes(variant, dtype):
    fuzz(attention, f"{dtype}", CASES_OF_A_DTYPE, dtype)


def spoilt(rng, name, x):
    """A tensor that no call may take in place of x."""
    how = rng.integers(3)
    if how == 0:
        return x.to("meta")
    if how == 1:  # floats for integers and bools, integers for floats
        return x.long() if x.is_floating_point() else x.float()
    axis = 2 if name == "v" else -1
    extra = x.new_zeros([3 if a == axis % x.dim() else n for a, n in enumerate(x.shape)])
    return torch.cat([x, extra], axis)


def test_one_argument_spoilt(variant):
    rng = generator("spoilt")
    for _ in range(400):
        arguments = random_case(rng, pick(rng, F32, F64, torch.bfloat16))
        names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
        name = pick(rng, *names)
        arguments[name] = spoilt(rng, name, arguments[name])
        with pytest.raises(RuntimeError):
            attention(**arguments)
