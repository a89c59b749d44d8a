"""Known bugs of RoPE implementations: ours is right, and the naive form really is wrong.

The table in docs/guides/rope.md lists them. What needs a Hugging Face model is in
test_rope_known_bugs_hf.py, every step of the angles' reduction in test_rope_reduction.py.
"""

import itertools

import numpy as np
import oracle
import pytest
import wavepe
from cases import INTEGERS, assert_same_bits, generator, load_torch
from checks import check_rope_table as check_table
from tensors import check_rope as check
from tensors import normal

torch, ops = load_torch()

FREQ = oracle.rope_frequencies(128)
TORCH_FREQ = torch.from_numpy(FREQ)


def tables(positions, freq=TORCH_FREQ, **options):
    return ops.rope_table(torch.as_tensor(positions), freq, **options)


def naive(positions, freq=TORCH_FREQ):
    """Return cos of the float32 product of positions and frequencies."""
    return (positions.float()[..., None] * freq.float()).cos()


def error(got, positions):
    """The largest of cos."""
    exact = oracle.rope_table(np.asarray(positions), FREQ)[0]
    return np.abs(got.double().numpy() - exact).max()


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------ positions and angles


def test_bfloat16_positions(variant):
    """From 257 on two neighbours are one bfloat16 number."""
    positions = torch.arange(250, 300)
    assert error(naive(positions.bfloat16()), positions) > 0.4
    cos, sin = tables(positions)
    check_table((cos.numpy(), sin.numpy()), oracle.rope_table(positions.numpy(), FREQ))
    for rounded in (positions.bfloat16(), positions.float()):
        with pytest.raises(RuntimeError, match="integers"):
            tables(rounded)
        with pytest.raises(TypeError, match="integers"):
            wavepe.rope_table(rounded.float().numpy(), FREQ)


def test_float16_positions_overflow(variant):
    positions = torch.tensor([65519, 65520, 70000, 131071])
    assert naive(positions.half()).isnan().any()
    assert error(tables(positions)[0], positions) < 2**-24


def test_float32_products_drift(variant):
    positions = torch.tensor([9_999, 9_999_991, 2**31 - 1])
    drift = [error(naive(m), m) for m in positions]
    assert 1e-5 < drift[0] < 1e-2 < 0.1 < drift[1]
    assert error(tables(positions)[0], positions) < 2**-24


def test_casting_the_frequencies():
    """What `model.to(torch.bfloat16)` does to a buffer of inv_freq."""
    nn = pytest.importorskip("wavepe.nn")
    positions = torch.arange(2000)
    assert error(naive(positions, TORCH_FREQ.bfloat16()), positions) > 1
    q, k = (normal(generator("cast"), 1, heads, 2000, 128).bfloat16() for heads in (2, 1))
    rotary = nn.Rotary(128)
    before = rotary(q, k)
    for cast in (torch.bfloat16, torch.float16):
        assert same(rotary.to(cast)(q, k), before)
    check(before[0], q, *tables(positions))


def test_autocast_leaves_angles_alone(variant):
    """An outer product under autocast runs in bfloat16."""
    positions = torch.arange(1000)
    want = tables(positions)
    x = normal(generator("autocast"), 1, 2, 1000, 128)
    turned = ops.rope(x, *want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        angle = positions.float()[:, None] @ TORCH_FREQ.float()[None]
        assert error(angle.float().cos(), positions) > 0.5
        assert same(tables(positions), want)
        assert torch.equal(ops.rope(x, *want), turned)
        assert turned.dtype == want[0].dtype == torch.float32


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_matmul_precision_leaves_angles_alone(variant, precision):
    """TF32 and bfloat16 products are for matrix products alone."""
    positions = torch.arange(1000)
    x = normal(generator("tf32"), 1, 2, 1000, 128)
    want = tables(positions)
    turned, before = ops.rope(x, *want), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert same(tables(positions), want)
        assert torch.equal(ops.rope(x, *want), turned)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("integer", INTEGERS)
def test_ends_of_integer_types(variant, integer):
    """The next position wraps around in the type itself."""
    info = np.iinfo(integer)
    ends = [max(info.min, -(2**31)), 0, min(info.max, 2**31)]
    if info.bits <= 32:
        with np.errstate(over="ignore"):
            assert int(np.array([info.max], integer)[0:1].sum(dtype=integer) + integer(1)) < 1
    got = wavepe.rope_table(np.array(ends, integer), FREQ)
    want = wavepe.rope_table(np.array(ends, np.int64), FREQ)
    check_table(got, oracle.rope_table(ends, FREQ))
    assert_same_bits(got[0], want[0])
    tensor = torch.from_numpy(np.array(ends, integer))
    assert_same_bits(tables(tensor)[1].numpy(), want[1])


def test_expanded_positions(variant):
    row = torch.arange(40, dtype=torch.int32)[::2]
    want = tables(row.clone())
    for rows in (row.expand(3, 20), row[:, None].expand(20, 3).T):
        assert 0 in rows.stride()
        for got, whole in zip(tables(rows), want, strict=True):
            assert torch.equal(got, whole.expand(3, 20, 64))


def test_empty_sequences(variant):
    cos, sin = tables(torch.arange(0))
    assert cos.shape == sin.shape == (0, 64)
    assert ops.rope(torch.ones(2, 3, 0, 128), cos, sin).shape == (2, 3, 0, 128)
    q, k = ops.rope_qk(torch.ones(2, 4, 0, 128), torch.ones(2, 1, 0, 128), cos, sin)
    assert (q.shape, k.shape) == ((2, 4, 0, 128), (2, 1, 0, 128))
    assert tables(torch.empty(2, 0, dtype=torch.uint8))[0].shape == (2, 0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [72, 80, 128])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_decoded_token_is_a_row_of_the_full_pass(variant, dtype, head, interleaved):
    freq = torch.from_numpy(oracle.rope_frequencies(head))
    for first in (0, 2**24 - 8, 2**31 - 17):
        positions = torch.arange(first, first + 17)
        x = normal(generator("decode"), 1, 17, 3, head, dtype=dtype).transpose(1, 2)
        cos, sin = tables(positions, freq)
        whole = ops.rope(x, cos, sin, interleaved=interleaved)
        for i in (0, 1, 7, 16):
            row = tables(positions[i : i + 1], freq)
            assert same(row, (cos[i : i + 1], sin[i : i + 1]))
            one = x[:, :, i : i + 1]
            assert torch.equal(ops.rope(one, *row, interleaved=interleaved), whole[:, :, i : i + 1])
            pair = ops.rope_qk(one.contiguous(), one, *row, interleaved=interleaved)
            assert torch.equal(pair[0], whole[:, :, i : i + 1])


# ------------------------------------------------------------------ batches


def test_a_position_for_every_token_of_a_batch(variant):
    """One row's table for all rows is what goes wrong elsewhere."""
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10], [5, 0, 1, 2**20]])
    x = normal(generator("batch"), 3, 2, 4, 128)
    cos, sin = tables(positions)
    got = ops.rope(x, cos, sin)
    for row in range(3):
        alone = ops.rope(x[row : row + 1], *tables(positions[row]))
        assert torch.equal(got[row : row + 1], alone)
    assert not torch.allclose(got, ops.rope(x, cos[0], sin[0]), atol=0.1)


def test_left_padding(variant):
    """Rows that start late, counted from their first token, equal the rows alone."""
    lengths, longest = (9, 4, 1), 9
    x = normal(generator("padding"), 3, 2, longest, 128)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    cos, sin = tables((mask.cumsum(-1) - 1).clamp(min=0))
    padded, shared = ops.rope(x, cos, sin), ops.rope(x, *tables(torch.arange(longest)))
    for row, n in enumerate(lengths):
        alone = ops.rope(x[row, :, -n:], *tables(torch.arange(n)))
        assert torch.equal(padded[row, :, -n:], alone)
        assert (n == longest) == torch.allclose(shared[row, :, -n:], alone)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_queries_and_keys(variant, dtype, interleaved):
    """Views as attention layers make them, without a copy or with wrong rows."""
    rng = generator("strided")
    cos, sin = tables(torch.arange(6))
    wide = normal(rng, 2, 6, 3 * 4 * 128, dtype=dtype)
    fused = wide.view(2, 6, 3, 4, 128)
    chunks = [part.unflatten(-1, (4, 128)).transpose(1, 2) for part in wide.chunk(3, -1)]
    views = [*chunks, *(fused[:, :, i].transpose(1, 2) for i in range(3))]
    views += [normal(rng, 2, 6, 4, 128, dtype=dtype).transpose(1, 2)]
    views += [normal(rng, 2, 4, 128, 6, dtype=dtype).mT]
    for x in views:
        assert not x.is_contiguous()
        kept = x.clone()
        got = ops.rope(x, cos, sin, interleaved=interleaved)
        check(got, x, cos, sin, interleaved)
        assert torch.equal(got, ops.rope(x.contiguous(), cos, sin, interleaved=interleaved))
        assert torch.equal(x, kept), "the input was changed"
    q, k = ops.rope_qk(views[0], views[1][:, :1], cos, sin, interleaved=interleaved)
    check(q, views[0], cos, sin, interleaved)
    check(k, views[1][:, :1], cos, sin, interleaved)


def test_in_place_on_a_part_of_a_fused_qkv(variant):
    """Only q and k change; v and the elements between rows stay."""
    cos, sin = tables(torch.arange(6))
    fused = normal(generator("fused"), 2, 6, 3, 4, 128)
    kept = fused.clone()
    for i in (0, 1):
        view = fused[:, :, i].transpose(1, 2)
        assert ops.rope_(view, cos, sin) is view
        check(view, kept[:, :, i].transpose(1, 2), cos, sin)
    assert torch.equal(fused[:, :, 2], kept[:, :, 2])


def through_data(x, cos, sin):
    """How in-place rotations hide from autograd."""
    x.data.copy_(ops.rope(x.detach(), cos, sin))


def test_in_place_under_autograd(variant):
    """The naive form gives a wrong gradient and says nothing; ours raises."""
    cos, sin = tables(torch.arange(6))

    def gradient(change):
        leaf = normal(generator("gradient"), 1, 2, 6, 128).requires_grad_()
        y = leaf * 2
        squared = y * y  # backward needs y as it was
        change(y, cos, sin)
        squared.sum().backward()
        return leaf.grad

    right = gradient(lambda y, cos, sin: None)
    assert not torch.allclose(gradient(through_data), right)
    with pytest.raises(RuntimeError, match="requires grad"):
        gradient(ops.rope_)

    def without_grad(y, cos, sin):
        with torch.no_grad():
            ops.rope_(y, cos, sin)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(without_grad)

    def of_a_view(y, cos, sin):
        with torch.no_grad():
            ops.rope_(y[:, :1], cos, sin)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(of_a_view)


def test_in_place_on_leaves_and_views():
    cos, sin = tables(torch.arange(6))
    leaf = normal(generator("leaf"), 1, 2, 6, 128).requires_grad_()
    for x in (leaf, leaf[:, :1], (leaf * 2)[..., :64].detach().requires_grad_()):
        kept, h = x.detach().clone(), x.shape[-1] // 2
        with pytest.raises(RuntimeError, match="requires grad"):
            ops.rope_(x, cos[:, :h], sin[:, :h])
        assert torch.equal(x, kept), "refused, but changed"
    version, kept = leaf._version, leaf.detach().clone()
    with torch.no_grad():
        ops.rope_(leaf, cos, sin)
    assert leaf._version > version
    check(leaf, kept, cos, sin)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [72, 80])
def test_head_sizes_off_the_vector_width(variant, dtype, head):
    rng = generator("head sizes", head)
    freq = torch.from_numpy(oracle.rope_frequencies(head))
    cos, sin = tables(torch.arange(100, 105), freq)
    x = normal(rng, 2, 5, 3, head, dtype=dtype).transpose(1, 2)
    for interleaved in (False, True):
        check(ops.rope(x, cos, sin, interleaved=interleaved), x, cos, sin, interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head", "pairs"), [(80, 16), (80, 9), (72, 1), (64, 31), (33, 16), (7, 1)]
)
def test_partial_rotation_copies_the_tail(variant, dtype, head, pairs):
    """Odd numbers of pairs, odd heads, and a tail that no arithmetic touches."""
    x = normal(generator("partial", head), 2, 3, 5, head, dtype=dtype)
    x[..., 2 * pairs :: 3] = torch.nan
    x[..., 2 * pairs + 1 :: 3] = torch.inf
    cos, sin = tables(torch.arange(5), TORCH_FREQ[:pairs])
    turned = x[..., : 2 * pairs].clone()
    for interleaved in (False, True):
        for got in (
            ops.rope(x, cos, sin, interleaved=interleaved),
            ops.rope_(x.clone(), cos, sin, interleaved=interleaved),
        ):
            check(got[..., : 2 * pairs], turned, cos, sin, interleaved)
            tails = (t[..., 2 * pairs :].float().numpy() for t in (got, x))
            assert_same_bits(*tails, "the tail")


# ------------------------------------------------------------------ meaning


def scores(q, k):
    return q @ k.mT


def test_layouts_and_their_conversion(variant):
    """The permutation in docs/guides/rope.md, on weights; without it the scores are others."""
    d, width, rng = 64, 32, generator("layout")
    weights = [normal(rng, 2 * d, width, dtype=torch.float64) for _ in range(2)]  # two heads
    hidden = normal(rng, 6, width, dtype=torch.float64)
    freq = torch.from_numpy(oracle.rope_frequencies(d))
    cos, sin = tables(torch.arange(6), freq, dtype=torch.float64)
    permutation = torch.arange(d).view(2, d // 2).T.reshape(-1)
    assert [int(i) for i in permutation[:4]] == [0, 32, 1, 33]

    def run(weights, interleaved):
        qk = [(hidden @ w.T).view(6, 2, d).transpose(0, 1) for w in weights]
        return scores(*ops.rope_qk(*qk, cos, sin, interleaved=interleaved))

    right = run(weights, False)
    converted = [w.view(2, d, width)[:, permutation].reshape(2 * d, width) for w in weights]
    assert torch.allclose(run(converted, True), right, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(run(weights, True), right, rtol=0.1, atol=1)
    back = [w.view(2, d, width)[:, permutation.argsort()].reshape(2 * d, width) for w in converted]
    assert same(back, weights)


def test_two_bases_are_an_error():
    same_base = {"rope_type": "default", "rope_theta": 1e6}
    assert_same_bits(
        wavepe.rope_frequencies(64, 1e6, scaling=same_base)[0], wavepe.rope_frequencies(64, 1e6)[0]
    )
    for theta, scaling in itertools.product((1e4, 5e5), (same_base, {"rope_theta": 1e6})):
        with pytest.raises(ValueError, match=r"rope_theta.*1000000"):
            wavepe.rope_frequencies(64, theta, scaling=scaling)
    with pytest.warns(UserWarning, match="theta"):
        wavepe.rope_frequencies(64, scaling={"rope_type": "default", "theta": 1e6})


def test_bfloat16_states_are_rounded_once(variant):
    """Llama's own expression rounds after every operation; ours is the exact result, rounded."""
    x = normal(generator("once"), 1, 8, 64, 128, dtype=torch.bfloat16)
    cos, sin = tables(torch.arange(64))
    low = [t.bfloat16() for t in (cos, sin)]
    a, b = x.chunk(2, -1)
    stepwise = torch.cat((a * low[0] - b * low[1], b * low[0] + a * low[1]), -1)
    exact = ops.rope(x.double(), *tables(torch.arange(64), dtype=torch.float64))
    ours = ops.rope(x, cos, sin)
    check(ours, x, cos, sin)
    relative = [((y.double() - exact) / exact).abs().max() for y in (ours, stepwise)]
    assert relative[0] < 2**-7
    assert relative[1] > 1


def test_tables_of_inference_mode():
    """A kept table: right in inference; for training, right or refused, never wrong."""
    nn = pytest.importorskip("wavepe.nn")
    rotary = nn.Rotary(128)
    x = normal(generator("inference"), 1, 2, 6, 128)
    with torch.inference_mode():
        early = rotary(x, x)[0].clone()
        cos, sin = tables(torch.arange(6))
    leaf = x.clone().requires_grad_()
    out = rotary(leaf, x)[0]
    assert torch.equal(out.detach(), early)
    (got,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(got, ops.rope(torch.ones_like(x), cos.clone(), sin.clone(), inverse=True))
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors cannot be saved"):
        ops.rope(leaf, cos, sin)
