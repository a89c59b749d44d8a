"""Llamas with another position encoding, against the same model written out in float64."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np
import wavepe.hf
from encoding_cases import rotary
from hf_model import (
    EACH_ENTRY,
    LENGTH,
    SPECS,
    close,
    gradients,
    logits,
    patched_tiny,
    pickled,
    recompute,
    reference,
    tiny,
    tokens,
    worst,
)
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from wavepe.hf.absolute import AddAbsolute
from wavepe.hf.families import CACHE_NAMES, argument_names

WAVELET = "wavelet:scales=4"
CACHED = [*EACH_ENTRY, "rope:theta=20,inference_theta=300"]


# --------------------------------------------------------------- numbers


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_logits_equal_the_written_out_model(spec, heads):
    model = patched_tiny(spec, heads=heads[0], kv_heads=heads[1])
    for length in (1, 7, 3 * LENGTH):
        ids = tokens(2, length)
        got = logits(model, ids)
        for row, result in zip(ids, got, strict=True):
            assert close(result, reference(model, row, spec)[0])


@pytest.mark.parametrize("theta", ["scaled", "300"])
def test_training_takes_theta_and_inference_the_other(theta):
    spec = f"rope:theta=20,inference_theta={theta}"
    model, row = patched_tiny(spec), tokens(1, 3 * LENGTH)
    trained = reference(model, row[0], rotary(20.0))[0]
    assert close(logits(model.train(), row)[0], trained)
    assert close(logits(model.eval(), row)[0], reference(model, row[0], spec)[0])
    assert not close(logits(model, row)[0], trained)


def test_bare_rope_takes_the_base_of_the_model():
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = tiny(**options)
    ids = tokens(2, LENGTH)
    stock = logits(model, ids)
    with wavepe.hf.patched(model, "rope"):
        assert close(logits(model, ids), stock, 1e-5)
    with wavepe.hf.patched(model, "rope:theta=10000"):
        assert not close(logits(model, ids), stock, 1e-2)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": LENGTH // 2},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_bare_rope_takes_the_scaling_of_the_model(scaling):
    model = tiny(rope_parameters={"rope_theta": 500.0, **scaling})
    ids = tokens(2, 3 * LENGTH)
    stock = logits(model, ids)
    logits(model, ids[:, :2])  # the type "dynamic" goes back to its first frequencies
    with wavepe.hf.patched(model, "rope"):
        assert close(logits(model, ids), stock, 1e-5)
    with pytest.raises(ValueError, match=scaling["rope_type"]):
        wavepe.hf.patch(model, "rope:fraction=0.5")


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_float64_model(spec):
    model = patched_tiny(spec).double()
    row = tokens(1, LENGTH)
    assert close(logits(model, row)[0], reference(model, row[0], spec)[0], 1e-6)


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_bfloat16_is_as_good_as_the_stock_model(spec):
    stock = tiny().bfloat16()
    row = tokens(1, LENGTH)
    error = worst(logits(stock, row)[0].double(), reference(stock, row[0], "rope")[0])
    with wavepe.hf.patched(stock, spec) as model:
        wanted = reference(model, row[0], spec)[0]
        assert worst(logits(model, row)[0].double(), wanted) <= 2 * error


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_attention_weights_on_request(spec):
    model, row = patched_tiny(spec), tokens(1, 9)
    found = model(row, output_attentions=True)
    wanted, weights = reference(model, row[0], spec)
    assert close(found.logits[0].detach(), wanted)
    assert close(torch.cat(found.attentions).detach(), weights)
    hidden = model(row, output_hidden_states=True).hidden_states
    assert len(hidden) == 3


@pytest.mark.parametrize("spec", SPECS)
def test_a_later_token_changes_no_earlier_output(spec):
    model, ids = patched_tiny(spec), tokens(1, 2 * LENGTH)
    other = ids.clone()
    other[0, 20:] = tokens(1, 2 * LENGTH, seed=5)[0, 20:]
    before, after = logits(model, ids), logits(model, other)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


# --------------------------------------------------------------- padding, masks, positions


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_a_ragged_batch_equals_its_rows(spec, side):
    model, ids = patched_tiny(spec), tokens(3, 12)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 11)):
        mask[row, :pad] = 0
    mask = mask if side == "left" else mask.flip(1)
    ids = torch.where(mask.bool(), ids, 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = logits(model, ids, attention_mask=mask, position_ids=positions)
    # Relative encodings need no positions, and absolute ones find them in the mask.
    found = logits(model, ids, attention_mask=mask)
    for row, kept in enumerate(mask.bool()):
        wanted = reference(model, ids[row][kept], spec)[0]
        assert close(given[row][kept], wanted)
        assert close(found[row][kept], wanted)
    with_weights = logits(model, ids, attention_mask=mask, output_attentions=True)
    assert close(with_weights[mask.bool()], found[mask.bool()], 1e-5)
    assert torch.isfinite(given).all()
    assert torch.isfinite(with_weights).all()


@pytest.mark.parametrize("spec", ["sinusoidal:theta=length", "sinusoidal:reversed=true"])
def test_each_row_of_a_batch_has_its_own_length(spec):
    model, ids = patched_tiny(spec), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    got = logits(model, ids, attention_mask=mask, use_cache=False)
    assert close(got[0], reference(model, ids[0], spec)[0])
    assert close(got[1, 5:], reference(model, ids[1, 5:], spec)[0])


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_masks_of_the_users_own(spec):
    model, ids = patched_tiny(spec), tokens(2, 7)
    seen = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    wanted = logits(model, ids)
    assert close(logits(model, ids, attention_mask=seen), wanted, 1e-5)
    assert close(logits(model, ids, attention_mask=added), wanted, 1e-5)
    with pytest.raises((TypeError, RuntimeError), match="bool"):
        logits(model, ids, attention_mask=seen.long())


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_packed_sequences_without_a_cache(spec):
    model, ids = patched_tiny(spec), tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    got = logits(model, ids, position_ids=positions, use_cache=False)[0]
    assert close(got[:5], reference(model, ids[0, :5], spec)[0])
    assert close(got[5:], reference(model, ids[0, 5:], spec)[0])


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_embeddings_in_place_of_tokens(spec):
    model, ids = patched_tiny(spec), tokens(2, 7)
    embeds = model.get_input_embeddings()(ids).detach()
    assert torch.equal(logits(model, inputs_embeds=embeds), logits(model, ids))
    assert torch.equal(
        model.model(ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state
    )
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=ids, inputs_embeds=embeds)


def test_positions_of_an_absolute_encoding():
    model, row = patched_tiny("sinusoidal"), tokens(1, 4)
    far = torch.tensor([[3, 0, 1 << 20, 70000]])  # beyond any table
    hooks = model.model._forward_pre_hooks.values()
    hook = next(hook for hook in hooks if isinstance(hook, AddAbsolute))
    dim = model.config.hidden_size
    assert close(hook.vectors(far)[0], wavepe.sinusoidal(far[0].numpy(), dim), 1e-6)
    behind = torch.tensor([[-2, 3, 5, 1]])
    assert close(hook.vectors(behind)[0], wavepe.sinusoidal(behind[0].numpy(), dim), 1e-6)
    moved = logits(model, row, position_ids=torch.arange(4)[None] + 3)
    assert not close(moved, logits(model, row), 1e-2)


# --------------------------------------------------------------- caches


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("spec", CACHED)
def test_a_sequence_in_pieces(spec, cache):
    model, ids = patched_tiny(spec), tokens(2, 12)
    wanted = logits(model, ids, use_cache=False)
    options = {"max_cache_len": 20} if cache == "static" else {}
    kind = StaticCache if cache == "static" else DynamicCache
    filled, pieces, start = kind(config=model.config, **options), [], 0
    # The model's own name of the argument: `cache` from transformers 5.24 on.
    own = next(name for name in CACHE_NAMES if name in argument_names(model))
    for length, name in ((5, "past_key_values"), (1, own), (3, own), (3, "past_key_values")):
        piece = ids[:, start : start + length]
        pieces.append(logits(model, piece, **{name: filled}))
        start += length
    assert close(torch.cat(pieces, dim=1), wanted, 1e-5)


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_a_ragged_batch_in_pieces(spec):
    """Without position_ids: absolute encodings find them in the mask over cache and input."""
    model, ids = patched_tiny(spec), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = DynamicCache(config=model.config)
    first = logits(model, ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    second = logits(model, ids[:, 9:], attention_mask=mask, past_key_values=cache)
    got = torch.cat([first, second], dim=1)
    assert close(got[0, 5:], reference(model, ids[0, 5:], spec)[0])
    assert close(got[1], reference(model, ids[1], spec)[0])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 4},
    ],
    ids=lambda how: next(iter(how), "greedy"),
)
@pytest.mark.parametrize("spec", CACHED)
def test_generation_with_and_without_a_cache(spec, how):
    model, ids = patched_tiny(spec), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    if "prefill_chunk_size" in how:  # transformers cuts a 2-D mask there only without padding
        mask[:] = 1
    options = {"attention_mask": mask, "max_new_tokens": LENGTH - 9, "do_sample": False}
    wanted = model.generate(ids, **options, use_cache=False, num_beams=how.get("num_beams", 1))
    try:
        found = model.generate(ids, **options, **how)
    except ValueError as error:  # of transformers 5.0, which makes no cache for these chunks
        if "prefill chunking without a cache" not in str(error):
            raise
        with pytest.raises(ValueError, match=str(error)):
            tiny().generate(ids, **options, **how)
        pytest.skip(f"a stock model says so too: {error}")
    assert torch.equal(found, wanted)
    assert wanted.shape == (2, LENGTH)


def test_scaled_theta_refuses_keys_of_another_theta():
    spec = "rope:theta=20,inference_theta=scaled"
    model, ids = patched_tiny(spec), tokens(1, LENGTH + 2)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, : LENGTH - 1], past_key_values=cache)
    step = logits(model, ids[:, LENGTH - 1 : LENGTH], past_key_values=cache)  # theta still holds
    assert close(step, logits(model, ids[:, :LENGTH])[:, -1:], 1e-5)
    with pytest.raises(ValueError, match="use_cache=False"):
        logits(model, ids[:, LENGTH:], past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert model.generate(ids, max_new_tokens=2, use_cache=False).shape == (1, LENGTH + 4)
    foreign = DynamicCache(config=model.config)
    logits(tiny(), ids[:, :3], past_key_values=foreign)
    with pytest.raises(ValueError, match="3 cached keys"):
        logits(model, ids[:, 3:5], past_key_values=foreign)


@pytest.mark.parametrize("spec", ["sinusoidal:theta=length", "sinusoidal:reversed=true"])
def test_an_encoding_that_follows_the_length_refuses_a_cache(spec):
    model, ids = patched_tiny(spec), tokens(1, 5)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert model.generate(ids, max_new_tokens=2, use_cache=False).shape == (1, 7)


# --------------------------------------------------------------- training and tools


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_gradient_checkpointing(spec, reentrant):
    model, ids = patched_tiny(spec).train(), tokens(2, LENGTH)
    wanted = gradients(model, ids)
    recompute(model, reentrant)
    for got, gradient in zip(gradients(model, ids), wanted, strict=True):
        # Re-entrant: the forward pass outside autograd takes another kernel of PyTorch's.
        assert close(got, gradient, 1e-5 if reentrant else 0)
        assert gradient.abs().max() > 0


def test_gradients_of_a_wavelet_model():
    """Against finite differences of the written-out model, for one weight of each matrix."""
    model, ids = patched_tiny(WAVELET).train(), tokens(1, LENGTH)
    found = gradients(model, ids)

    def loss():
        row = reference(model, ids[0], WAVELET)[0][:-1]
        row = row - row.max(axis=1, keepdims=True)
        chosen = row[np.arange(LENGTH - 1), ids[0, 1:].numpy()]
        return (np.log(np.exp(row).sum(axis=1)) - chosen).mean()

    model.double()
    for weight, gradient in zip(model.parameters(), found, strict=True):
        place = gradient.abs().argmax()
        entry = weight.data.view(-1)[place]
        middle, step = entry.item(), 1e-5
        entry.fill_(middle + step)
        above = loss()
        entry.fill_(middle - step)
        slope = (above - loss()) / (2 * step)
        entry.fill_(middle)
        assert slope == pytest.approx(gradient.view(-1)[place].item(), rel=1e-3)


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_copies_and_pickles(spec):
    model, ids = tiny(), tokens(2, 9)
    stock = logits(model, ids)
    wanted = logits(wavepe.hf.patch(model, spec), ids)
    for other in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(logits(other, ids), wanted)
        assert torch.equal(logits(wavepe.hf.unpatch(other), ids), stock)
        assert not any(module._forward_pre_hooks for module in other.modules())
    assert torch.equal(logits(model, ids), wanted)


def test_autocast_trains():
    model, ids = patched_tiny(WAVELET).train(), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


def test_only_causal_attention():
    model = patched_tiny(WAVELET)
    with pytest.raises(ValueError, match="causal"):
        model(tokens(1, 5), is_causal=False)
    assert isinstance(model, LlamaForCausalLM)


def test_a_cache_filled_in_training_is_refused_where_inference_rotates_otherwise():
    model = patched_tiny("rope:theta=32,inference_theta=999")
    cache = DynamicCache(config=model.config)
    model.train()
    with torch.no_grad():
        model(tokens(1, 8), past_key_values=cache, use_cache=True)
    model.eval()
    with torch.no_grad(), pytest.raises(ValueError, match="use_cache=False"):
        model(tokens(1, 2), past_key_values=cache, use_cache=True)
