"""Packed sequences: each as if it were alone, whatever else the caller passes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_model import close, logits, patched_tiny, tokens
from transformers import DynamicCache, StaticCache

SPECS = ("wavelet:scales=4", "shaw:clip=3", "alibi", "none", "rope", "sinusoidal")
IDS = tokens(2, 12)
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)


def alone(model, ids=IDS):
    return torch.cat([logits(model, ids[:, :5]), logits(model, ids[:, 5:])], dim=1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_positions_that_start_again(spec, rows):
    """With a mask of ones or a cache, transformers itself would not see them."""
    model, ids = patched_tiny(spec), IDS[:rows]
    wanted = alone(model, ids)
    for positions in (POSITIONS, POSITIONS.expand(rows, -1)):
        for options in (
            {},
            {"use_cache": False},
            {"attention_mask": torch.ones(rows, 12, dtype=torch.long)},
            {"past_key_values": DynamicCache(config=model.config)},
            {"past_key_values": StaticCache(config=model.config, max_cache_len=20)},
        ):
            got = logits(model, ids, position_ids=positions, **options)
            assert close(got, wanted, 1e-5), options.keys()


@pytest.mark.parametrize("spec", SPECS)
def test_padding_beside_them(spec):
    model = patched_tiny(spec)
    mask, positions = torch.ones(2, 12, dtype=torch.long), POSITIONS.repeat(2, 1)
    mask[:, 10:], positions[:, 10:] = 0, 0
    wanted = torch.cat([logits(model, IDS[:, :5]), logits(model, IDS[:, 5:10])], dim=1)
    got = logits(model, IDS, position_ids=positions, attention_mask=mask)
    assert close(got[:, :10], wanted, 1e-5)
    weights = model(IDS, position_ids=positions, attention_mask=mask, output_attentions=True)
    assert close(weights.logits.detach()[:, :10], wanted, 1e-5)
    assert not weights.attentions[0][:, :, 5:10, :5].any()


@pytest.mark.parametrize("spec", SPECS)
def test_lengths_as_collators_give_them(spec):
    model = patched_tiny(spec)
    wanted = alone(model, IDS[:1])
    given = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 7, "max_length_k": 7}
    assert close(logits(model, IDS[:1], **given), wanted, 1e-5)
    assert close(logits(model, IDS[:1], position_ids=POSITIONS, **given), wanted, 1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert close(logits(compiled, IDS[:1], cu_seq_lens_q=ENDS, use_cache=False), wanted, 1e-5)
    torch._dynamo.reset()


def test_gradients():
    model = patched_tiny("wavelet:scales=4").train()
    model(IDS, position_ids=POSITIONS).logits.square().sum().backward()
    packed = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for piece in (IDS[:, :5], IDS[:, 5:]):
        model(piece).logits.square().sum().backward()
    for got, weight in zip(packed, model.parameters(), strict=True):
        assert close(got, weight.grad, 1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_is_no_packing(spec):
    """Positions of generate and of left padding start late; a cache goes on."""
    model, mask = patched_tiny(spec), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    got = model(IDS, attention_mask=mask, position_ids=positions, use_cache=True)
    assert got.past_key_values.get_seq_length() == 12
    assert close(got.logits.detach()[0, 4:], logits(model, IDS[:1, 4:])[0], 1e-5)
    more = logits(
        model,
        IDS[:, :1],
        attention_mask=torch.cat([mask, mask[:, :1] | 1], 1),
        position_ids=positions[:, -1:] + 1,
        past_key_values=got.past_key_values,
    )
    whole = torch.cat([IDS, IDS[:, :1]], 1)
    assert close(more[1], logits(model, whole)[1, -1:], 1e-5)


def test_what_cannot_be_right_is_refused():
    model = patched_tiny("wavelet:scales=4")
    cache = DynamicCache(config=model.config)
    logits(model, IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds packed sequences"):
        model(IDS[:, :1], past_key_values=cache)
    cache = DynamicCache(config=model.config)
    logits(model, IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"begin at \[0, 5\], cannot follow the 12 tokens"):
        model(IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"begin at \[0, 5\], cannot follow the 12 tokens"):
        model(IDS[:1], cu_seq_lens_q=ENDS, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be continued: pass use_cache=False"):
        model(IDS, position_ids=POSITIONS, use_cache=True)
    for given, message in (
        ({"cu_seq_lens_q": ENDS[:2]}, "from 0 to the number of tokens 12, got .0, 5."),
        ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1}, "differ"),
    ):
        with pytest.raises(ValueError, match=message):
            model(IDS[:1], **given)
    with pytest.raises(ValueError, match="needs one row of packed sequences, got 2"):
        model(IDS, cu_seq_lens_q=ENDS)
    follows = patched_tiny("normalised")
    with pytest.raises(ValueError, match="normalised depends on the length"):
        follows(IDS, position_ids=POSITIONS)


def test_the_models_own_message_for_wrong_arguments():
    model = patched_tiny("wavelet:scales=4")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model.model(position_ids=POSITIONS)
