"""Known bugs of RoPE implementations that no test of an operator shows: casts, decoded tokens,
inference mode. The table in docs/guides/rope.md lists them.
"""

import numpy as np
import oracle
import pytest
import torch
import wavepe
from cases import generator
from tensors import check_rope as check
from tensors import normal
from wavepe import nn, ops

TORCH_FREQ = torch.from_numpy(oracle.rope_frequencies(128))


def tables(positions, freq=TORCH_FREQ, **options):
    return ops.rope_table(torch.as_tensor(positions), freq, **options)


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_casting_the_frequencies():
    """`model.to(torch.bfloat16)` casts a buffer of inv_freq."""
    q, k = (normal(generator("cast"), 1, heads, 2000, 128).bfloat16() for heads in (2, 1))
    rotary = nn.Rotary(128)
    before = rotary(q, k)
    for cast in (torch.bfloat16, torch.float16):
        assert same(rotary.to(cast)(q, k), before)
    check(before[0], q, *tables(torch.arange(2000)))
    assert not [*rotary.state_dict(), *rotary.buffers(), *rotary.parameters()]


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
