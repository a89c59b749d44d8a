"""wavepe.ops.merge_attention: parts over ranges of keys against one softmax over all of them."""

import itertools
import math

import pytest
from cases import compiled_once, generator, load_torch, recording_backend

torch, ops = load_torch()

INF = math.inf
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
UNIT[torch.float16] = 2.0**-11


def normal(rng, *shape):
    return torch.from_numpy(rng.normal(size=shape))


def softmax_part(score, v):
    """Return (out, lse) of attention over some keys; a row of only -inf gives 0 and -inf."""
    lse = torch.logsumexp(score, -1)
    unseen = lse == -INF
    weights = torch.exp(score - torch.where(unseen, 0, lse)[..., None])
    return weights @ v, lse


def split(score, v, edges):
    ranges = itertools.pairwise((0, *edges, v.shape[-2]))
    return zip(*(softmax_part(score[..., a:b], v[..., a:b, :]) for a, b in ranges), strict=True)


def scores(rng, *, m=7, n=24, lead=(2, 3), hidden=0.4):
    score = 3 * normal(rng, *lead, m, n)
    score[torch.from_numpy(rng.random(score.shape) < hidden)] = -INF
    score[..., 0, :] = -INF  # a row that no part has seen
    score[..., 1, : n // 2] = -INF  # and one that some have not
    return score, normal(rng, *lead, n, 5)


@pytest.mark.parametrize("edges", [(), (8,), (8, 8, 9, 20)])  # an empty range too
@pytest.mark.parametrize("dtype", UNIT)
def test_parts_make_the_whole(edges, dtype):
    score, v = scores(generator("whole"))
    outs, lses = split(score, v, edges)
    exact_out, exact_lse = softmax_part(score, v)
    out, lse = ops.merge_attention(
        [part.to(dtype) for part in outs],
        [part.to(torch.float64 if dtype == torch.float64 else torch.float32) for part in lses],
    )
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # lse, some 10 at most, rounds in and out; so do the weights' exponents, each part and the sum.
    work = UNIT[lse.dtype]
    parts = len(edges) + 1
    assert torch.equal(lse == -INF, exact_lse == -INF)
    seen = exact_lse != -INF
    assert ((lse - exact_lse)[seen].abs() <= 16 * work * (2 + exact_lse.abs()[seen])).all()
    size = sum(
        torch.exp(lse_i - exact_lse)[..., None] * out_i.abs()
        for out_i, lse_i in zip(outs, lses, strict=True)
    )
    size = torch.where(seen[..., None], size, 0)
    bound = (2 * UNIT[dtype] + (32 + parts) * work) * size
    assert ((out.double() - exact_out).abs() <= bound).all()
    assert not out[..., 0, :].any()


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


def test_merging_in_two_steps_is_merging_once():
    outs, lses = split(*scores(generator("steps")), (5, 8, 20))
    once = ops.merge_attention(outs, lses)
    halves = [ops.merge_attention(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
    for a, b in zip(ops.merge_attention(*zip(*halves, strict=True)), once, strict=True):
        torch.testing.assert_close(a, b)


def test_large_lse_neither_overflows_nor_vanishes():
    for large in (1e4, -1e4, 3e38):
        out, lse = ops.merge_attention(
            (torch.tensor([[2.0]]), torch.tensor([[4.0]])), (torch.tensor([large]),) * 2
        )
        assert out.item() == 3
        assert lse.item() == pytest.approx(large + math.log(2), rel=1e-6)


# ------------------------------------------------------------------ what is not a number


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


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("edges", [(), (8,), (8, 8, 9, 20)])
def test_gradients_are_those_of_the_whole(edges):
    rng = generator("gradient")
    score, v = scores(rng)
    score[..., 0, 0] = 0.0  # torch's own softmax of nothing has no gradient
    grads = normal(rng, 2, 3, 7, 5), normal(rng, 2, 3, 7)

    def gradients(function):
        leaves = score.clone().requires_grad_(), v.clone().requires_grad_()
        return torch.autograd.grad(function(*leaves), leaves, grads)

    def whole(score, v):
        lse = torch.logsumexp(score, -1)
        return torch.softmax(score, -1) @ v, lse

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


def leaves_of(rng, parts=3, shape=(2, 3)):
    outs = [normal(rng, *shape, 2).requires_grad_() for _ in range(parts)]
    lses = [(2 * normal(rng, *shape)).requires_grad_() for _ in range(parts)]
    return outs, lses


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("parts", [1, 3])
def test_first_and_second_derivatives(parts):
    outs, lses = leaves_of(generator("gradcheck"), parts)

    def merge(*leaves):
        return ops.merge_attention(leaves[:parts], leaves[parts:])

    assert torch.autograd.gradcheck(merge, (*outs, *lses), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(merge, (*outs, *lses))


def test_rows_that_saw_nothing_get_no_gradient():
    outs = torch.tensor([[[1.0, 2], [5, 6]], [[math.nan, INF], [math.nan, 1]]])
    lses = torch.tensor([[0.0, -INF], [-INF, -INF]])
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    out, lse = ops.merge_attention(outs, lses)
    (3 * out.sum() + lse[0] + lse[1].clamp(-1)).backward()
    assert torch.equal(outs.grad, torch.tensor([[[3.0, 3], [0, 0]], [[0, 0], [0, 0]]]))
    assert torch.equal(lses.grad, torch.tensor([[1.0, 0], [0, 0]]))


# ------------------------------------------------------------------ framework


def test_transforms():
    outs, lses = (torch.stack(x).detach() for x in leaves_of(generator("func")))

    def loss(outs, lses):
        out, lse = ops.merge_attention(outs, lses)
        return out.sin().sum() + lse.cos().sum()

    got = torch.func.grad(loss, (0, 1))(outs, lses)
    leaves = outs.clone().requires_grad_(), lses.clone().requires_grad_()
    want = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(got, want)
    merged = ops.merge_attention(outs, lses)
    for axis in (0, 1):
        rows = torch.vmap(ops.merge_attention, (axis + 1, axis + 1), axis)(outs, lses)
        torch.testing.assert_close(rows, merged)


def test_compiles_whole_for_any_length():
    rng = generator("compile")
    backend = recording_backend()
    compiled = torch.compile(ops.merge_attention, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 23):
        outs, lses = leaves_of(rng, shape=(2, length))
        results = []
        for function in (ops.merge_attention, compiled):
            out, lse = function(outs, lses)
            grads = torch.autograd.grad(out.sin().sum() + lse.sum(), (*outs, *lses))
            results.append((out, lse, *grads))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert compiled_once(backend)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (4, 5, 0, 6, 2)])
def test_empty(shape):
    out, lse = ops.merge_attention([torch.ones(*shape, 8)] * 2, [torch.zeros(shape)] * 2)
    assert out.shape == (*shape, 8)
    assert lse.shape == shape
    out, _ = ops.merge_attention([torch.ones(2, 3, 0)] * 2, [torch.zeros(2, 3)] * 2)
    assert out.shape == (2, 3, 0)


def test_meta_tensors_give_shapes():
    out, lse = ops.merge_attention(
        [torch.ones(2, 3, 4, device="meta", dtype=torch.bfloat16)] * 2,
        [torch.ones(2, 3, device="meta")] * 2,
    )
    assert out.is_meta
    assert out.shape == (2, 3, 4)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 3)
    assert lse.dtype == torch.float32


def test_inputs_are_not_changed():
    outs, lses = (torch.stack(x).detach() for x in leaves_of(generator("changed")))
    lses[0] = -INF
    copies = outs.clone(), lses.clone()
    ops.merge_attention(outs, lses)
    assert torch.equal(outs, copies[0])
    assert torch.equal(lses, copies[1])


OUT, LSE = torch.ones(2, 3, 4), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("match", "outs", "lses"),
    [
        ("0 outs and 0 lses", [], []),
        ("0 outs and 0 lses", torch.ones(0, 2, 3, 4), torch.ones(0, 2, 3)),
        ("2 outs and 1 lses", [OUT, OUT], [LSE]),
        (r"\(2, 3, 4\).*part 1.*\(2, 3, 5\)", [OUT, torch.ones(2, 3, 5)], [LSE, LSE]),
        (r"part 1.*\(2, 1, 4\)", [OUT, torch.ones(2, 1, 4)], [LSE, LSE]),
        (r"lse \(2, 1\)", [OUT, OUT], [LSE, torch.ones(2, 1)]),
        (r"lse \(2, 3, 4\)", [OUT], [OUT]),
        (r"lse \(2, 3, 4\); pass zip\(\*parts\)", (OUT, LSE), (OUT, LSE)),
        ("float32.*bfloat16", [OUT, OUT.bfloat16()], [LSE, LSE]),
        ("int64", [OUT.long()], [LSE]),
        ("int64", [OUT], [LSE.long()]),
        ("meta", [OUT, OUT.to("meta")], [LSE, LSE]),
        ("meta", [OUT], [LSE.to("meta")]),
        (r"lses\[0\].*list", [OUT], [[1.0]]),
        ("sequence.*float", [OUT], 1.0),
        ("sequence", torch.tensor(1.0), [LSE]),
    ],
)
def test_errors(match, outs, lses):
    with pytest.raises(RuntimeError, match=f"wavepe: .*{match}"):
        ops.merge_attention(outs, lses)


def test_parts_over_keys_with_a_bias():
    """Each part counts its distances from its own first key, by offset; gradients add up."""
    rng = generator("bias")
    q, k, v = (normal(rng, 2, heads, 30, 8) for heads in (4, 2, 2))
    bias, grads = normal(rng, 4, 11), (normal(rng, 2, 4, 30, 8), normal(rng, 2, 4, 30))

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        found = function(*leaves)
        return [*found, *torch.autograd.grad(found, leaves, grads)]

    def attention(q, k, v, bias, first=0):
        given = {"bias": bias, "bias_first": 2, "bias_beyond": "edge", "return_lse": True}
        return ops.attention(q, k, v, offset=-first, **given)

    def merged(q, k, v, bias):
        edges = itertools.pairwise((0, 7, 8, 21, 30))
        parts = [attention(q, k[:, :, a:b], v[:, :, a:b], bias, a) for a, b in edges]
        return ops.merge_attention(*zip(*parts, strict=True))

    for got, want in zip(gradients(merged), gradients(attention), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
