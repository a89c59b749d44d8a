"""wavepe.ops.merge_attention: parts over ranges of keys against one softmax over all of them.

What it shares with other operators is in test_ops_every.py.
"""

import itertools
import math

import pytest
import torch
from cases import generator
from tensors import normal
from wavepe import ops

INF, F64 = math.inf, torch.float64


def softmax_part(score, v):
    """Return (out, lse) of attention over some keys; a row of only -inf gives 0 and -inf."""
    lse = torch.logsumexp(score, -1)
    unseen = lse == -INF
    return torch.exp(score - torch.where(unseen, 0, lse)[..., None]) @ v, lse


def split(score, v, edges):
    ranges = itertools.pairwise((0, *edges, v.shape[-2]))
    return zip(*(softmax_part(score[..., a:b], v[..., a:b, :]) for a, b in ranges), strict=True)


def scores(rng, *, m=7, n=24, lead=(2, 3), hidden=0.4):
    score = 3 * normal(rng, *lead, m, n, dtype=F64)
    score[torch.from_numpy(rng.random(score.shape) < hidden)] = -INF
    score[..., 0, :] = -INF  # a row that no part has seen
    score[..., 1, : n // 2] = -INF  # and one that some have not
    return score, normal(rng, *lead, n, 5, dtype=F64)


@pytest.mark.parametrize("edges", [(), (8,), (8, 8, 9, 20)])  # an empty range too
def test_parts_make_the_whole(edges):
    score, v = scores(generator("whole"))
    got, whole = ops.merge_attention(*split(score, v, edges)), softmax_part(score, v)
    torch.testing.assert_close(got, whole, rtol=1e-14, atol=1e-14)
    assert not got[0][..., 0, :].any()
    assert (got[1][..., 0] == -INF).all()


def test_one_part_is_itself():
    score, v = scores(generator("one"))
    out, lse = (part.float() for part in softmax_part(score, v))
    merged = ops.merge_attention((out,), (lse,))
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse)


def test_stacked_parts_and_iterators():
    outs, lses = split(*scores(generator("stacked")), (8, 20))
    want = ops.merge_attention(outs, lses)
    for given in (
        (torch.stack(outs), torch.stack(lses)),
        (torch.stack(outs), list(lses)),
        (iter(outs), iter(lses)),
    ):
        got = ops.merge_attention(*given)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_large_lse_neither_overflows_nor_vanishes():
    for large in (1e4, -1e4, 3e38):
        out, lse = ops.merge_attention(
            (torch.tensor([[2.0]]), torch.tensor([[4.0]])), (torch.tensor([large]),) * 2
        )
        assert out.item() == 3
        assert lse.item() == pytest.approx(large + math.log(2), rel=1e-6)


@pytest.mark.parametrize("what", [math.nan, INF, -INF])
def test_a_part_that_saw_nothing_weighs_nothing(what):
    seen, unseen = torch.ones(2, 3), torch.full((2, 3), what)
    lses = torch.tensor([0.5, 1.5]), torch.tensor([-INF, -INF])
    out, lse = ops.merge_attention((seen, unseen), lses)
    assert torch.equal(out, seen)
    assert torch.equal(lse, lses[0])
    out, lse = ops.merge_attention((unseen,), lses[1:])
    assert torch.equal(out, torch.zeros(2, 3))
    assert (lse == -INF).all()


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("other", [1.0, -INF])
def test_nan_and_infinity_stay_visible(value, other):
    out, lse = ops.merge_attention(
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.tensor([value, 0.0]), torch.tensor([other, 0.0])),
    )
    assert out[0].isnan().all()
    assert lse[0].isnan()
    assert torch.equal(out[1], torch.ones(3))  # and in their own row
    bad = torch.tensor([[math.nan, 1.0]])
    out, _ = ops.merge_attention((bad, torch.ones(1, 2)), (torch.zeros(1), torch.zeros(1)))
    assert out.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("edges", [(), (8,), (8, 8, 9, 20)])
def test_gradients_are_those_of_the_whole(edges):
    rng = generator("gradient")
    score, v = scores(rng)
    score[..., 0, 0] = 0.0  # torch's own softmax of nothing has no gradient
    grads = normal(rng, 2, 3, 7, 5, dtype=F64), normal(rng, 2, 3, 7, dtype=F64)

    def gradients(function):
        leaves = score.clone().requires_grad_(), v.clone().requires_grad_()
        return torch.autograd.grad(function(*leaves), leaves, grads)

    def whole(score, v):
        return torch.softmax(score, -1) @ v, torch.logsumexp(score, -1)

    def merged(score, v):
        # A part that sees nothing stands aside, so that its own gradients are 0.
        ranges = itertools.pairwise((0, *edges, v.shape[-2]))
        outs, lses = [], []
        for a, b in ranges:
            part = score[..., a:b]
            unseen = (part == -INF).all(-1)
            out, lse = softmax_part(torch.where(unseen[..., None], 0, part), v[..., a:b, :])
            outs.append(torch.where(unseen[..., None], math.nan, out))
            lses.append(torch.where(unseen, -INF, lse))
        return ops.merge_attention(outs, lses)

    for got, want in zip(gradients(merged), gradients(whole), strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_rows_that_saw_nothing_get_no_gradient():
    outs = torch.tensor([[[1.0, 2], [5, 6]], [[math.nan, INF], [math.nan, 1]]])
    lses = torch.tensor([[0.0, -INF], [-INF, -INF]])
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    out, lse = ops.merge_attention(outs, lses)
    (3 * out.sum() + lse[0] + lse[1].clamp(-1)).backward()
    assert torch.equal(outs.grad, torch.tensor([[[3.0, 3], [0, 0]], [[0, 0], [0, 0]]]))
    assert torch.equal(lses.grad, torch.tensor([[1.0, 0], [0, 0]]))
