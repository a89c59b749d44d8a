"""Packed sequences: each as if it were alone, whatever else the caller passes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from hf_families import FAMILIES, build
from hf_model import close, logits, patched_tiny, tokens
from transformers import DynamicCache, StaticCache
from wavepe.hf import masks

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
def test_padding_between_them(spec):
    """As collators leave it that pad each sequence to a multiple."""
    model = patched_tiny(spec)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6]])
    got = logits(model, IDS[:1], position_ids=positions, attention_mask=mask)
    assert close(got[:, :3], logits(model, IDS[:1, :3]), 1e-5)
    assert close(got[:, 5:], logits(model, IDS[:1, 5:]), 1e-5)


@pytest.mark.parametrize("counted", ["tokens", "places"])
def test_padding_within_a_sequence_is_none_of_theirs(counted):
    model, mask = patched_tiny("rope"), torch.ones(1, 12, dtype=torch.long)
    mask[:, 3:5] = 0
    positions = mask.cumsum(1) - 1 if counted == "tokens" else torch.arange(12)[None]
    seen = torch.ones(12, 12, dtype=torch.bool).tril() & mask.bool()
    wanted = logits(model, IDS[:1], position_ids=positions, attention_mask=seen[None, None])
    got = logits(model, IDS[:1], position_ids=positions, attention_mask=mask)
    assert close(got[:, mask[0] == 1], wanted[:, mask[0] == 1], 1e-5)


def test_masks_of_other_lengths_and_numbers():
    """Of the room in a static cache, and of the sequences' own numbers."""
    model = patched_tiny("wavelet:scales=4")
    wanted = alone(model)
    longer = torch.ones(2, 20, dtype=torch.long)
    for mask, cache in (
        (longer, None),
        (longer, StaticCache(config=model.config, max_cache_len=20)),
        (torch.tensor([[2] * 5 + [1] * 7] * 2), None),
    ):
        given = {"attention_mask": mask, "past_key_values": cache}
        assert close(logits(model, IDS, position_ids=POSITIONS, **given), wanted, 1e-5)


def test_a_cache_that_was_emptied_serves_again():
    model = patched_tiny("wavelet:scales=4")
    cache = StaticCache(config=model.config, max_cache_len=20)
    logits(model, IDS, position_ids=POSITIONS, past_key_values=cache)
    cache.reset()
    parts = [logits(model, ids, past_key_values=cache) for ids in (IDS[:, :6], IDS[:, 6:])]
    assert close(torch.cat(parts, 1), logits(model, IDS), 1e-5)


def test_lengths_of_one_sequence_leave_its_cache_alone():
    model = patched_tiny("wavelet:scales=4")
    whole = logits(model, IDS[:1])
    out = model(IDS[:1, :6], cu_seq_lens_q=torch.tensor([0, 6]), use_cache=True)
    more = logits(model, IDS[:1, 6:], past_key_values=out.past_key_values)
    assert close(more, whole[:, 6:], 1e-5)


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


@pytest.mark.parametrize("spec", SPECS)
def test_gaps_begin_no_sequence(spec):
    """Positions may be drawn at random: distances of score encodings count tokens all the same."""
    model, positions = patched_tiny(spec), torch.arange(12)[None] ** 2
    got = logits(model, IDS, position_ids=positions)
    mask = torch.ones(2, 12, dtype=torch.long)
    assert torch.equal(logits(model, IDS, position_ids=positions, attention_mask=mask), got)
    assert close(got, logits(model, IDS), 1e-5) == (spec not in ("rope", "sinusoidal"))


def test_what_cannot_be_right_is_refused():
    model = patched_tiny("wavelet:scales=4")
    cache = DynamicCache(config=model.config)
    logits(model, IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds packed sequences"):
        model(IDS[:, :1], past_key_values=cache)
    cache = DynamicCache(config=model.config)
    logits(model, IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"new ones begin at \[5\]\) cannot follow the 12 tokens"):
        model(IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"new ones begin at \[5\]\) cannot follow the 12 tokens"):
        model(IDS[:1], cu_seq_lens_q=ENDS, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be continued: pass use_cache=False"):
        model(IDS, position_ids=POSITIONS, use_cache=True)
    for given, message in (
        ({"cu_seq_lens_q": ENDS[:2]}, "rise from 0 to the number of tokens, 12; got .0, 5."),
        ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1}, "must be equal"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 5, 12])}, "rise from 0 .*; got .0, 8, 5, 12."),
        ({"cu_seq_lens_q": ENDS[:0]}, "number of tokens, 12; got .."),
    ):
        with pytest.raises(ValueError, match=message):
            model(IDS[:1], **given)
    with pytest.raises(ValueError, match="needs one row of packed sequences, got 2"):
        model(IDS, cu_seq_lens_q=ENDS)
    with pytest.raises(TypeError, match="cu_seq_lens_q must be a tensor, got list"):
        model(IDS[:1], cu_seq_lens_q=[0, 5, 12])
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="cannot follow the 12 tokens of a cache"):
        model(IDS[:1, :2], cu_seq_lens_q=torch.tensor([0, 1, 2]), past_key_values=cache)
    follows = patched_tiny("normalised")
    with pytest.raises(ValueError, match="normalised depends on the sequence length"):
        follows(IDS, position_ids=POSITIONS)


def test_the_models_own_message_for_wrong_arguments():
    model = patched_tiny("wavelet:scales=4")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model.model(position_ids=POSITIONS)


@pytest.mark.parametrize("spec", SPECS)
def test_on_a_device_nobody_looks_and_the_same_is_seen(spec, monkeypatch):
    """There every mask counts as one that hides something, and positions as packed sequences."""
    model, ones = patched_tiny(spec).train(), torch.ones(2, 12, dtype=torch.long)
    padding = ones.clone()
    padding[0, :3] = 0

    def run():
        yield logits(model, IDS)
        yield logits(model, IDS, use_cache=False)
        yield logits(model, IDS, use_cache=False, output_attentions=True)
        for mask in (None, ones, padding):
            for positions in (None, POSITIONS, torch.arange(12)[None]):
                given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
                yield logits(model, IDS, **given)
        yield logits(model, IDS[:1], cu_seq_lens_q=ENDS, use_cache=False)
        cache = DynamicCache(config=model.config)
        yield logits(model, IDS[:, :5], past_key_values=cache)
        yield logits(model, IDS[:, 5:6], past_key_values=cache, attention_mask=ones[:, :6])

    wanted = list(run())
    monkeypatch.setattr(masks, "reading_waits", lambda device: True)
    looked = []
    monkeypatch.setattr(torch.Tensor, "any", lambda *x: looked.append("any"))
    monkeypatch.setattr(torch.Tensor, "all", lambda *x: looked.append("all"))
    for got, expected in zip(run(), wanted, strict=True):
        assert close(got, expected, 1e-5)
    assert not looked


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_that_hides_nothing_is_none(family, monkeypatch):
    """On a device patched models get one where nothing is given, lest transformers looks."""
    model, ids = wavepe.hf.patch(build(family), "wavelet"), tokens(2, 12)
    wanted = logits(model, ids)
    monkeypatch.setattr(masks, "reading_waits", lambda device: True)
    made, real = [], masks.nothing_hidden
    monkeypatch.setattr(masks, "nothing_hidden", lambda device: made.append(1) or real(device))
    assert torch.equal(logits(model, ids), wanted)
    assert made == [1]
