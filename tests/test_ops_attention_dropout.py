"""Dropout of ops.attention: the counter-based hash bit for bit, torch's generator, statistics."""

import itertools

import numpy as np
import oracle_attention as oracle
import pytest
from attention_cases import (
    F32,
    F64,
    OPTIONS,
    Shape,
    composed,
    dense,
    draw,
    drawn_seed,
    each_function,
    incoming,
    run,
    same,
    torch,
)
from cases import generator
from wavepe.ops._attention_checks import Arguments

SHAPES = [  # the third decodes
    Shape(2, 4, 2, 7, 9, 8, 0), Shape(1, 1, 1, 130, 70, 8, 0), Shape(3, 2, 1, 1, 90, 8, 0),
    Shape(1, 2, 1, 200, 500, 4, 0), Shape(2, 3, 3, 97, 97, 5, 0),
]  # fmt: skip


def raw(function, arguments, dropout_p, seed):
    """out of a given seed, past the draw."""
    given = (None, 0, "zero", None, None, False, *[None] * 7, dropout_p, torch.tensor(seed))
    qkv = (arguments[name] for name in "qkv")
    if function is composed:
        return dense(Arguments(*qkv, *given))[0]
    return torch.ops.wavepe.attention_forward(*qkv, *given, [])[0]


SEEDS = (0, 1, 2**62 - 1, 2**40 + 12345, -1, -(2**63), 2**63 - 1)


@each_function
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_kept_is_the_hash(variant, function, dtype, shape):
    arguments = draw(generator("hash"), shape, {"causal": False}, dtype)
    arguments["v"] = torch.eye(shape.n, dtype=dtype).expand(*arguments["k"].shape[:2], -1, -1)
    whole = raw(function, arguments, 0.0, 0)
    for seed, p in zip(SEEDS, itertools.cycle((0.1, 0.5, 0.97))):
        kept = oracle.dropout_kept((*shape[:2], *shape[3:5]), p, seed)
        want = whole * torch.from_numpy(kept) / (1 - p)
        got = raw(function, arguments, p, seed)
        assert ((got != 0).numpy() == kept).all(), f"{seed} {p}"
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@each_function
def test_thresholds(variant, function):
    """Keep where the 32 bits are at least floor(p 2^32): probabilities near 0 and 1 too."""
    arguments = draw(generator("ends"), Shape(1, 2, 1, 100, 100, 4, 0), {"causal": False})
    arguments["v"] = torch.eye(100).expand(1, 1, -1, -1)
    whole = raw(function, arguments, 0.0, 0)
    assert torch.equal(raw(function, arguments, 2.0**-33, 3), whole)  # floor is 0
    for p in (2.0**-32, 1e-4, 1 - 1e-4, 1 - 2.0**-32):
        kept = oracle.dropout_kept((1, 2, 100, 100), p, 3)
        assert ((raw(function, arguments, p, 3) != 0).numpy() == kept).all()
    assert not raw(function, arguments, 1.0, 3).any()


@each_function
@pytest.mark.parametrize("option", ["plain", "everything", "segments", "batched decoding"])
def test_hidden_keys_stay_hidden_and_lse_unchanged(variant, function, option):
    arguments = draw(generator("hidden"), Shape(2, 4, 2, 9, 9, 8, 0), OPTIONS[option])
    arguments |= {"v": torch.eye(9).expand(2, 2, 9, 9), "dropout_p": 0.0}  # shows the weights
    whole, lse = function(**arguments, return_lse=True)
    seed = int(drawn_seed())
    torch.manual_seed(1234)
    got, same_lse = function(**arguments | {"dropout_p": 0.4}, return_lse=True)
    assert torch.equal(lse, same_lse)
    kept = oracle.dropout_kept(whole.shape, 0.4, seed)
    torch.testing.assert_close(got, whole * torch.from_numpy(kept) / 0.6, rtol=1e-5, atol=1e-7)


@each_function
def test_manual_seed_repeats(variant, function):
    arguments = draw(generator("seed"), Shape(2, 4, 2, 30, 30, 8, 8), OPTIONS["dropout, table"])

    def draws(seed, count):
        torch.manual_seed(seed)
        return [function(**arguments) for _ in range(count)]

    first, again, other = draws(1, 2), draws(1, 2), draws(2, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])  # each call draws anew
    assert not torch.equal(first[0], other[0])


@each_function
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_generator_moves_only_with_dropout(variant, function, p):
    arguments = draw(generator("moves"), Shape(1, 2, 1, 5, 5, 8, 8), {"dropout_p": p})
    before = torch.get_rng_state()
    function(**arguments)
    assert torch.equal(torch.get_rng_state(), before) == (p == 0)


@each_function
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint(variant, function, preserve):
    """Recomputed in the backward with the generator's state of the forward: the same weights."""
    from torch.utils.checkpoint import checkpoint

    rng = generator("checkpoint")
    arguments = draw(rng, Shape(2, 4, 2, 20, 20, 8, 8), OPTIONS["dropout, table"])
    grad_out, _ = incoming(rng, arguments)
    want = run(function, arguments, grad_out)
    leaves = {n: arguments[n].clone().requires_grad_() for n in ("q", "k", "v", "p")}
    torch.manual_seed(1234)

    def layer(q, k, v, p):
        return function(**arguments | {"q": q, "k": k, "v": v, "p": p})

    out = checkpoint(layer, *leaves.values(), use_reentrant=False, preserve_rng_state=preserve)
    assert torch.equal(out, want["out"])
    if preserve:
        out.backward(grad_out)
        same({n: x.grad for n, x in leaves.items()}, {n: want[n] for n in leaves})


@each_function
def test_all_and_nothing(variant, function):
    rng = generator("all")
    arguments = draw(rng, Shape(2, 4, 2, 20, 20, 8, 8), OPTIONS["edge"])
    grads = incoming(rng, arguments)
    same(run(function, arguments | {"dropout_p": 0.0}, *grads), run(function, arguments, *grads))
    grads = grads[0], grads[1] * 0
    found = run(function, arguments | {"dropout_p": 1.0}, *grads)
    assert found.pop("lse").isfinite().all()
    assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rates_of_the_hash(p):
    """Kept are 1 - p of every batch row, head, query and key, within 5 standard deviations; and
    neighbours in each direction, and other seeds, are independent."""
    shape = (4, 8, 96, 128)
    kept, other = (oracle.dropout_kept(shape, p, seed) for seed in (5, 6))

    def check(what, share, expected):
        trials = kept.size / np.asarray(share).size
        limit = 5 * np.sqrt(expected * (1 - expected) / trials)
        assert np.abs(share - expected).max() < limit, what

    check("all", kept.mean(), 1 - p)
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        check(f"mean over {axes}", kept.mean(axes), 1 - p)
    agree = p**2 + (1 - p) ** 2
    for axis in range(4):
        check(f"along {axis}", (kept == np.roll(kept, 1, axis)).mean(), agree)
    check("seeds", (kept == other).mean(), agree)
    rows = kept.reshape(-1, shape[-1]).astype(float)  # no two keys go together over all rows
    correlation = np.corrcoef(rows.T) - np.eye(shape[-1])
    assert np.abs(correlation).max() < 6 / np.sqrt(len(rows))
