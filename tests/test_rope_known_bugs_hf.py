"""Known bugs of RoPE in models: casts, lengths that come and go, caches, padding, wrong keys."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_same_bits, load_torch

torch, ops = load_torch()
pytest.importorskip("transformers")
nn = pytest.importorskip("wavepe.nn")

from hf_model import HEAD, LENGTH, close, logits, patched_tiny, tiny, tokens
from transformers import DynamicCache

DYNAMIC = "rope:theta=100,type=dynamic,factor=2"
FOLLOWS_LENGTH = (DYNAMIC, "rope:theta=100,inference_theta=scaled")
FAR = torch.tensor([[0, 5, 257, 70001, 2**24 + 1, 2**31 - 1]])


def angles(model, dtype, positions=FAR):
    """cos and sin that the model's attention layers are given."""
    return model.base_model.rotary_emb(torch.zeros(1, dtype=dtype), positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_keeps_its_angles(dtype):
    """Only results are rounded; the stock module would carry inv_freq in 8 bits."""
    model = patched_tiny("rope:theta=100")
    want = angles(model, torch.float32)
    exact = oracle.rope_table(FAR.numpy(), oracle.rope_frequencies(HEAD, 100.0))
    for table, right in zip(want, exact, strict=True):
        assert np.abs(table[..., : HEAD // 2].numpy() - right).max() < 2**-24
    rounded = FAR.double()[..., None] * torch.from_numpy(oracle.rope_frequencies(HEAD, 100.0)).to(
        dtype
    )
    assert (rounded.cos() - want[0][..., : HEAD // 2]).abs().max() > 0.5
    late = wavepe.hf.patch(tiny().to(dtype), "rope:theta=100")
    for cast in (model.to(dtype), late):
        for got, table in zip(angles(cast, dtype), want, strict=True):
            assert torch.equal(got, table.to(dtype))
        assert torch.isfinite(logits(cast, tokens(1, 5))).all()
    for got, table in zip(angles(model.float(), torch.float32), want, strict=True):
        assert torch.equal(got, table)


def test_a_model_under_autocast_keeps_its_angles():
    model = patched_tiny("rope:theta=100")
    want = angles(model, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = angles(model, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("spec", FOLLOWS_LENGTH)
def test_a_short_sequence_after_a_long_one(spec):
    """The frequencies go back to the original ones."""
    model, plain = patched_tiny(spec), patched_tiny("rope:theta=100")
    short, long = tokens(2, LENGTH - 3), tokens(2, 3 * LENGTH)
    before = logits(model, short)
    assert torch.equal(before, logits(plain, short))
    assert not close(logits(model, long), logits(plain, long), 1e-2)
    assert torch.equal(logits(model, short), before)


@pytest.mark.parametrize("spec", FOLLOWS_LENGTH)
def test_tables_of_an_encoding_know_no_past(spec):
    encoding, lengths = wavepe.encoding(spec), {"trained_length": LENGTH}
    original = wavepe.encoding("rope:theta=100").rope_table(np.arange(LENGTH), HEAD)
    for length in (LENGTH, 4 * LENGTH, 1, LENGTH, 2 * LENGTH, LENGTH):
        got = encoding.rope_table(np.arange(length), HEAD, **lengths)
        if length <= LENGTH:
            for a, b in zip(got, original, strict=True):
                assert_same_bits(a, b[:length])
        else:
            assert np.abs(got[0][:LENGTH] - original[0]).max() > 0.1
        last = encoding.rope_table([length - 1], HEAD, length=length, **lengths)
        for a, b in zip(last, got, strict=True):  # a cached step is a row of the full pass
            assert_same_bits(a, b[-1:])


def test_dynamic_scaling_of_a_module_goes_back():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    rotary = nn.Rotary(HEAD, 100.0, scaling=scaling, max_length=LENGTH)
    q = torch.ones(1, 2, 3 * LENGTH, HEAD)
    short = q[:, :, :LENGTH]
    before = rotary(short, short)[0]
    assert torch.equal(before, nn.Rotary(HEAD, 100.0)(short, short)[0])
    assert not torch.allclose(rotary(q, q)[0][:, :, :LENGTH], before, atol=0.1)
    assert torch.equal(rotary(short, short)[0], before)


@pytest.mark.parametrize("spec", FOLLOWS_LENGTH)
def test_cached_keys_of_another_base_are_refused(spec):
    model, ids = patched_tiny(spec), tokens(1, LENGTH + 1)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :LENGTH], past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        logits(model, ids[:, LENGTH:], past_key_values=cache)
    # a model of one base goes on, and equals the full pass
    fixed = patched_tiny("rope:theta=100")
    cache = DynamicCache(config=fixed.config)
    logits(fixed, ids[:, :LENGTH], past_key_values=cache)
    step = logits(fixed, ids[:, LENGTH:], past_key_values=cache)
    assert close(step, logits(fixed, ids)[:, -1:], 1e-5)


def test_cached_keys_after_theta_was_set():
    rotary, x = nn.Rotary(HEAD, 100.0), torch.ones(1, 2, 4, HEAD)
    _, keys = rotary(x, x)
    rotary.theta = 500.0
    with pytest.raises(RuntimeError, match="theta=100"):
        rotary(x[:, :, :1], x[:, :, :1], torch.tensor([4]))
    assert not torch.allclose(rotary(x, x)[1], keys, atol=0.1), "a new sequence has the new base"


@pytest.mark.parametrize("spec", ["rope:theta=100", *FOLLOWS_LENGTH])
def test_left_padding_changes_no_logits(spec):
    """With positions counted from each row's first token; without them they do change."""
    model, ids = patched_tiny(spec), tokens(1, 9)
    alone = logits(model, ids)
    padded = torch.cat([torch.zeros(1, 5, dtype=ids.dtype), ids], 1)
    mask = (torch.arange(14) >= 5).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits(model, padded, attention_mask=mask, position_ids=positions)[:, 5:]
    assert close(got, alone, 1e-5)
    # another row of the batch may start earlier
    both = torch.cat([tokens(1, 14, seed=2), padded])
    masks = torch.cat([torch.ones_like(mask), mask])
    positions = (masks.cumsum(-1) - 1).clamp(min=0)
    got = logits(model, both, attention_mask=masks, position_ids=positions)[1:, 5:]
    assert close(got, alone, 1e-5)
    shared = torch.arange(14).expand(2, -1)
    table = angles(model, torch.float32, positions)[0]
    assert not torch.equal(table, angles(model, torch.float32, shared)[0])


def test_a_base_under_an_unknown_name_is_refused():
    for spec in ("rope:rope_theta=5000", "rope:base=5000", "rope:thetas=5000"):
        with pytest.raises(
            ValueError,
            match=r"unknown option .* of encoding .rope..*; known: theta",
        ):
            wavepe.hf.patch(tiny(), spec)
