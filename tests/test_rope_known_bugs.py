"""Known bugs of RoPE implementations: ours is right, and the naive form really is wrong.

The table in docs/guides/rope.md lists them.
"""

import numpy as np
import oracle
import pytest
import torch
import wavepe
from cases import generator
from checks import check_rope_table as check_table
from tensors import check_rope as check
from tensors import normal
from wavepe import nn, ops

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


def test_bfloat16_positions(variant):
    """From 257 on two neighbours are one bfloat16 number."""
    positions = torch.arange(250, 270)
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
    """`model.to(torch.bfloat16)` casts a buffer of inv_freq."""
    last = torch.arange(1950, 2000)
    assert error(naive(last, TORCH_FREQ.bfloat16()), last) > 1
    q, k = (normal(generator("cast"), 1, heads, 2000, 128).bfloat16() for heads in (2, 1))
    rotary = nn.Rotary(128)
    before = rotary(q, k)
    for cast in (torch.bfloat16, torch.float16):
        assert same(rotary.to(cast)(q, k), before)
    check(before[0], q, *tables(torch.arange(2000)))
    assert not [*rotary.state_dict(), *rotary.buffers(), *rotary.parameters()]


@pytest.mark.parametrize("precision", ["autocast", "high", "medium"])
def test_neither_autocast_nor_tf32_touches_angles(variant, precision):
    """An outer product under autocast runs in bfloat16; TF32 is for matrix products alone."""
    positions = torch.arange(1000)
    want = tables(positions)
    x = normal(generator("autocast"), 1, 2, 1000, 128)
    turned, before = ops.rope(x, *want), torch.get_float32_matmul_precision()
    if precision != "autocast":
        torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
            if precision == "autocast":
                angle = positions.float()[:, None] @ TORCH_FREQ.float()[None]
                assert error(angle[-50:].float().cos(), positions[-50:]) > 0.5
            assert same(tables(positions), want)
            assert torch.equal(ops.rope(x, *want), turned)
            assert turned.dtype == want[0].dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)


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


def test_tables_of_inference_mode():
    """A kept table: right in inference; for training, right or refused, never wrong."""
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
        return (lambda q, k: q @ k.mT)(*ops.rope_qk(*qk, cos, sin, interleaved=interleaved))

    right = run(weights, False)
    converted = [w.view(2, d, width)[:, permutation].reshape(2 * d, width) for w in weights]
    assert torch.allclose(run(converted, True), right, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(run(weights, True), right, rtol=0.1, atol=1)
    back = [w.view(2, d, width)[:, permutation.argsort()].reshape(2 * d, width) for w in converted]
    assert same(back, weights)


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


HEAD = 8  # of hf_model's tiny Llamas
FAR = torch.tensor([[0, 5, 257, 70001, 2**24 + 1, 2**31 - 1]])


def angles(model, dtype, positions=FAR):
    """cos and sin that the model's attention layers are given."""
    return model.base_model.rotary_emb(torch.zeros(1, dtype=dtype), positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_keeps_its_angles(hf, dtype):
    """Only results are rounded; the stock module would carry inv_freq in 8 bits."""
    model, frequencies = hf.patched_tiny("rope:theta=100"), oracle.rope_frequencies(HEAD, 100.0)
    want = angles(model, torch.float32)
    exact = oracle.rope_table(FAR.numpy(), frequencies)
    for table, right in zip(want, exact, strict=True):
        assert np.abs(table[..., : HEAD // 2].numpy() - right).max() < 2**-24
    rounded = FAR.double()[..., None] * torch.from_numpy(frequencies).to(dtype)
    assert (rounded.cos() - want[0][..., : HEAD // 2]).abs().max() > 0.5
    late = wavepe.hf.patch(hf.tiny().to(dtype), "rope:theta=100")
    for cast in (model.to(dtype), late):
        assert same(angles(cast, dtype), [table.to(dtype) for table in want])
        assert torch.isfinite(hf.logits(cast, hf.tokens(1, 5))).all()
    assert same(angles(model.float(), torch.float32), want)
    with torch.autocast("cpu", dtype=dtype):
        assert same(angles(model, torch.float32), want)
