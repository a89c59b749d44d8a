"""The GPU's kernels of attention, interpreted on the CPU, against the oracle: outputs and every
gradient. What else is known of them without a GPU is in test_ops_attention_compiled.py."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

import torch
import wavepe
from attention_cases import (
    F32,
    OPTIONS,
    Shape,
    array,
    check,
    draw,
    grid,
    incoming,
    judge,
    run,
    same,
    tensor,
)
from attention_interpreted import interpreted
from attention_options import everything, relative
from cases import generator
from wavepe.ops import relative_table
from wavepe.ops._attention_gpu import chunk

# Beyond 2^29 rows the kernels say that they cannot.
FAR = [option for option in OPTIONS if "offset" in option and "far" in option]
SHAPE = Shape(1, 2, 1, 66, 97, 12, 8)  # two blocks of queries and of keys, the second cut


# The products with a table take the interpreter seconds. So these have few queries.
TABLES = (
    "bias, table",
    "table, q_rel",
    "table from -3",
    "table, both sides, edge",
    "edge from 2, per head",
    "edge far below",
    "offset of rows, edge",
    "segments, both sides",
    "packed training",
    "batched decoding",
    "everything",
    "everything, both sides",
)
OTHERS = tuple(o for o in OPTIONS if "p" not in OPTIONS[o](generator(o), SHAPE) and o not in FAR)


@pytest.mark.parametrize("option", OTHERS)
def test_options_interpreted(option):
    grid(interpreted, option, [SHAPE])


@pytest.mark.parametrize("option", TABLES)
def test_tables_interpreted(option):
    grid(interpreted, option, [SHAPE._replace(m=10)])


@pytest.mark.parametrize("option", ["table, both sides, per head", "everything"])
def test_tables_of_many_blocks_interpreted(option):
    grid(interpreted, option, [Shape(1, 1, 1, 130, 97, 12, 8)])


@pytest.mark.parametrize("option", FAR)
def test_tables_too_far_are_refused(option):
    arguments = draw(generator("far"), SHAPE, OPTIONS[option])
    with pytest.raises(RuntimeError, match=r"must lie within \+-2\^29, got \d+ rows from -?\d+ on"):
        interpreted(**arguments)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_around_the_blocks_interpreted(n):
    rng = generator("lengths", str(n))
    for m in {1, n, max(n - 63, 1)}:
        check(interpreted, rng, Shape(1, 2, 2, m, n, 16, 16), {"window": 70})
        check(interpreted, rng, Shape(1, 1, 1, n, m, 8, 4), {"causal": False})


@pytest.mark.parametrize("d", [1, 3, 16, 17, 64, 80, 128])
def test_head_sizes_interpreted(d):
    rng = generator("sizes", str(d))
    check(interpreted, rng, Shape(1, 1, 1, 40, 50, d, d), {})
    check(interpreted, rng, Shape(1, 3, 1, 9, 20, 20, d), {"softcap": 2.0})


@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 1, 5, 6, 8, 8),
        (1, 0, 2, 5, 6, 8, 8),
        (1, 2, 2, 0, 6, 8, 8),
        (1, 2, 1, 5, 0, 8, 8),
        (1, 2, 1, 0, 0, 8, 8),
        (1, 1, 1, 3, 4, 8, 0),
        (1, 1, 1, 3, 4, 0, 8),
    ],
)
@pytest.mark.parametrize("option", ["plain", "edge", "bias", "everything"])
def test_empty_interpreted(shape, option):
    check(interpreted, generator("empty"), shape, OPTIONS[option])


def test_a_table_without_rows_interpreted():
    given = relative(generator("no rows"), SHAPE, 0, q_rel=True)
    check(interpreted, generator("no rows"), SHAPE, given)


def wavelets(length, d, kind="ricker", causal=True):
    encoding = wavepe.encoding("wavelet", kind=kind)
    return encoding.table(length, d, causal=causal)


@pytest.mark.parametrize(
    ("kind", "causal", "offset"),
    [("ricker", True, 840), ("ricker", False, 300), ("morlet", True, 37), ("haar", True, 840)],
)
def test_low_rank_zones_interpreted(kind, causal, offset):
    """A relative_table against its own rows: plain tiles, low-rank ones and near ones. Of every
    row 1e-7 is neglected, and a score here is 1.5 times a sum of 32 products with about 0.8."""
    rng, d = generator("zones", kind), 32
    p, first, _ = wavelets(700, d, kind, causal)
    table = relative_table(p, first)
    given = {"causal": causal, "scale": 1.5, "offset": offset}
    m, n = (70 if offset == 37 else 9), 900
    q, k, v = (tensor(rng.normal(size=(1, 1, x, d)), F32) for x in (m, n, n))
    arguments = {"q": q, "k": k, "v": v, **given}
    grads = incoming(rng, arguments)
    exact = judge({**arguments, "p": torch.from_numpy(p), "first": first}, *grads).values
    found = run(interpreted, {**arguments, "p": table}, *grads, wanted=("q", "k", "v"))
    for name, got in found.items():
        close(got, exact[name], 1.5 * 32 * 0.8e-7, name)


def close(got, exact, limit, name):
    error = np.linalg.norm(array(got) - exact) / max(np.linalg.norm(exact), 1e-30)
    assert error <= limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "option", ["plain", "table", "edge from 2, per head", "bias", "everything"]
)
def test_float16_interpreted(option):
    """Weights and their gradients are rounded to float16 once more than on the CPU, as in every
    fused attention: twice the error of rounding the result, in the norm."""
    rng = generator("float16", option)
    arguments = draw(rng, SHAPE._replace(m=20), OPTIONS[option], torch.float16)
    grads = incoming(rng, arguments)
    exact = judge(arguments, *grads).values
    for name, got in run(interpreted, arguments, *grads).items():
        seen = np.isfinite(exact[name])
        assert (np.isfinite(array(got)) == seen).all(), name
        close(array(got)[seen], exact[name][seen], 2.0**-10, name)


def test_the_largest_head_interpreted():
    rng = generator("largest")
    arguments = draw(rng, Shape(1, 1, 1, 9, 20, 256, 256), {}, torch.float16)
    grads = incoming(rng, arguments)
    exact = judge(arguments, *grads).values
    for name, got in run(interpreted, arguments, *grads).items():
        close(got, exact[name], 2.0**-10, name)


def test_float16_zones_interpreted():
    rng, d = generator("float16 zones"), 32
    p = wavelets(700, d)[0]
    q, k, v = (tensor(rng.normal(size=(1, 1, x, d)), torch.float16) for x in (9, 700, 700))
    arguments = {"q": q, "k": k, "v": v}
    grads = incoming(rng, arguments)
    exact = judge({**arguments, "p": torch.from_numpy(p)}, *grads).values
    found = run(interpreted, {**arguments, "p": relative_table(p)}, *grads, wanted=("q", "k", "v"))
    for name, got in found.items():
        close(got, exact[name], 2.0**-10, name)


def test_products_beyond_float16_are_not_inf_interpreted():
    q = torch.full((1, 1, 3, 16), 200.0, dtype=torch.float16)
    p = torch.full((3, 16), 100.0, dtype=torch.float16)
    out = interpreted(q, q / 200, q, p=p)
    assert torch.isfinite(out).all()


def test_chunks_of_heads_change_nothing_interpreted(monkeypatch):
    rng = generator("chunks")
    arguments = draw(rng, Shape(2, 2, 2, 5, 30, 8, 8), everything)
    grads = incoming(rng, arguments)
    whole = run(interpreted, arguments, *grads)
    monkeypatch.setattr(chunk, "PRODUCTS_BYTES", 1)
    parts = run(interpreted, arguments, *grads)
    summed = {name: whole.pop(name) for name in ("p", "bias") if name in whole}
    same({name: parts[name] for name in whole}, whole)
    for name, x in summed.items():
        torch.testing.assert_close(parts[name], x)


def test_strides_interpreted():
    rng = generator("strides")
    arguments = draw(rng, Shape(1, 2, 1, 5, 30, 8, 8), everything)
    grads = incoming(rng, arguments)
    whole = run(interpreted, arguments, *grads)
    turned = {
        name: x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x
        for name, x in arguments.items()
    }
    same(run(interpreted, turned, *(g.mT.contiguous().mT for g in grads)), whole)


def test_padding_of_nan_interpreted():
    """What key_mask hides may hold anything; a NaN elsewhere stays out of rows of other blocks."""
    arguments = draw(generator("nan"), Shape(1, 2, 2, 70, 70, 8, 8), {})
    mask = torch.ones(1, 70, dtype=torch.bool)
    mask[:, 5:9] = False
    arguments["key_mask"] = mask
    grads = incoming(generator("nan grads"), arguments)
    clean = run(interpreted, arguments, *grads)
    for name in ("k", "v"):
        arguments[name][:, :, 5:9] = torch.nan
    dirty = run(interpreted, arguments, *grads)
    same(dirty, clean)
