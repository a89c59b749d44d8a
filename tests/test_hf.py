"""Llamas with another position encoding, against the same model written out in float64."""

import numpy as np
import pytest
import torch
import wavepe.hf
from cases import by_turns, every, forget_registrations
from encoding_cases import (
    ASKED,
    COMBINED,
    COMBINED_IN_CALL,
    FOLLOW_LENGTH,
    IN_CALL,
    LEARNED,
    rotary,
)
from hf_families import stirred
from hf_model import (
    EACH_ENTRY,
    HEAD,
    LENGTH,
    SPECS,
    begun_pass,
    close,
    gradients,
    logits,
    patched_tiny,
    recompute,
    reference,
    tiny,
    tokens,
    worst,
)
from transformers import DynamicCache, StaticCache
from wavepe.encodings import Encoding
from wavepe.hf.absolute import AddAbsolute
from wavepe.hf.families import CACHE_NAMES, argument_names
from wavepe.positions import tables

WAVELET = "wavelet:scales=4"
IN_CALLS = (*IN_CALL, *COMBINED_IN_CALL)
EACH = (*EACH_ENTRY, *LEARNED, ASKED, *COMBINED, *IN_CALLS)
CACHED = [*EACH, "rope:theta=20,inference_theta=300"]
STEADY = ("binary", "integer", "sinusoidal")  # absolute, and the same at every length


def patched(spec, **options):
    """A patched model whose learned parameters are not the initial ones."""
    return stirred(patched_tiny(spec, **options))


def parameters_of(model):
    """The learned parameters by name."""
    named = model.named_parameters()
    return {
        name if "self_attn" in name else name.rpartition("position_encoding.")[2]: x
        for name, x in named
        if "position_encoding." in name
    }


# --------------------------------------------------------------- numbers

# Each encoding, and of each kind of term the other numbers of heads.
HEADS = [(spec, (4, 2)) for spec in (*SPECS, *LEARNED, ASKED, *COMBINED, *IN_CALLS)]
HEADS += by_turns((*EACH_ENTRY, *LEARNED), ((4, 4), (6, 2), (2, 1)))


@pytest.mark.parametrize(("spec", "heads"), HEADS, ids=str)
def test_logits_equal_the_written_out_model(spec, heads):
    model = patched(spec, heads=heads[0], kv_heads=heads[1])
    for length in (1, 7, 3 * LENGTH):
        ids = tokens(2, length)
        for row, result in zip(ids, logits(model, ids), strict=True):
            assert close(result, reference(model, row, spec)[0]), length


@pytest.mark.parametrize("spec", LEARNED)
def test_first_values_are_those_of_the_encoding(spec):
    model, row = patched_tiny(spec), tokens(1, 2 * LENGTH)
    initial, got = wavepe.encoding(spec).parameters(HEAD, 4), parameters_of(model)
    assert {name: tuple(x.shape) for name, x in got.items()} == LEARNED[spec][1]
    assert list(got) == list(initial)
    for name, value in initial.items():
        assert torch.equal(got[name], torch.from_numpy(value).float())
    assert close(logits(model, row)[0], reference(model, row[0], spec)[0])
    assert not close(logits(patched(spec), row), logits(model, row), 1e-2)


@pytest.mark.parametrize("theta", ["scaled", "300"])
def test_training_takes_theta_and_inference_the_other(theta):
    spec = f"rope:theta=20,inference_theta={theta}"
    model, row = patched_tiny(spec), tokens(1, 3 * LENGTH)
    trained = reference(model, row[0], rotary(20.0))[0]
    assert close(logits(model.train(), row)[0], trained)
    assert close(logits(model.eval(), row)[0], reference(model, row[0], spec)[0])
    assert not close(logits(model, row)[0], trained)


@pytest.mark.parametrize("spec", every(2, EACH))
def test_float64_and_bfloat16(spec):
    """bfloat16 is as good as in the stock model. What is learned stays in float32."""
    model, ids = patched(spec).double(), tokens(4, LENGTH)
    assert all(x.dtype == torch.float64 for x in parameters_of(model).values())
    assert close(logits(model, ids[:1])[0], reference(model, ids[0], spec)[0], 1e-6)

    def error(model, spec):
        rows = zip(logits(model, ids).double(), ids, strict=True)
        return max(worst(got, reference(model, row, spec)[0]) for got, row in rows)

    model = tiny().bfloat16()
    stock = error(model, "rope")
    stirred(wavepe.hf.patch(model, spec))
    assert all(x.dtype == torch.float32 for x in parameters_of(model).values())
    assert error(model, spec) <= 2 * stock


def test_scores_of_bfloat16_are_added_up_in_float32():
    """A bias of hundreds, rounded to bfloat16, would shift the softmax by whole units."""
    layer = patched_tiny(WAVELET).model.layers[0].self_attn
    generator = torch.Generator().manual_seed(2)
    shape = (1, 4, LENGTH, layer.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    q, k, v = 64 * q, k[:, :2], v[:, :2]
    with torch.no_grad():
        got, _ = wavepe.hf.attention.attention_forward(
            layer, q, k, v, None, scaling=layer.scaling, wavepe_pass=begun_pass()
        )
    assert got.dtype == torch.bfloat16
    table = torch.from_numpy(wavepe.encoding(WAVELET).table(LENGTH, layer.head_dim)[0])
    table = table.bfloat16()  # the operator's operands have one dtype
    place = torch.arange(LENGTH)
    delta = place[:, None] - place
    q, k, v = (x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    score = q @ k.mT + (q[..., None, :] * table.double()[delta.clamp(min=0)]).sum(-1)
    score = (score * layer.scaling).masked_fill(delta < 0, -torch.inf)
    wanted = (score.softmax(-1) @ v).transpose(1, 2)
    assert (got.double() - wanted).abs().max() <= 2 * 2.0**-9 * v.abs().max()


@pytest.mark.parametrize("spec", every(2, EACH, 1))
def test_weights_and_what_a_later_token_changes(spec):
    model, ids = patched(spec), tokens(1, 2 * LENGTH)
    output = model(ids, output_attentions=True, output_hidden_states=True)
    wanted, weights = reference(model, ids[0], spec)
    assert close(output.logits[0].detach(), wanted)
    assert close(torch.cat(output.attentions).detach(), weights)
    assert len(output.hidden_states) == 3
    other = ids.clone()
    other[0, 20:] = tokens(1, 2 * LENGTH, seed=5)[0, 20:]
    before, after = logits(model, ids), logits(model, other)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


# --------------------------------------------------------------- padding and positions
@pytest.mark.parametrize(("spec", "side"), by_turns(EACH, ["left", "right"], 4))
def test_a_ragged_batch_equals_its_rows(spec, side):
    model, ids = patched(spec), tokens(3, 12)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 11)):
        mask[row, :pad] = 0
    mask = mask if side == "left" else mask.flip(1)
    ids = torch.where(mask.bool(), ids, 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = logits(model, ids, attention_mask=mask, position_ids=positions)
    # Relative encodings need no positions, and absolute ones find them in the mask.
    output = logits(model, ids, attention_mask=mask)
    for row, kept in enumerate(mask.bool()):
        wanted = reference(model, ids[row][kept], spec)[0]
        assert close(given[row][kept], wanted)
        assert close(output[row][kept], wanted)
    with_weights = logits(model, ids, attention_mask=mask, output_attentions=True)
    assert close(with_weights[mask.bool()], output[mask.bool()], 1e-5)
    assert torch.isfinite(given).all()
    assert torch.isfinite(with_weights).all()


@pytest.mark.parametrize("spec", FOLLOW_LENGTH)
def test_each_row_of_a_batch_has_its_own_length(spec):
    model, ids = patched_tiny(spec), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    got = logits(model, ids, attention_mask=mask, use_cache=False)
    assert close(got[0], reference(model, ids[0], spec)[0])
    assert close(got[1, 5:], reference(model, ids[1, 5:], spec)[0])


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


# --------------------------------------------------------------- absolute encodings
@pytest.mark.parametrize("spec", [*STEADY, *FOLLOW_LENGTH])
def test_what_is_found_to_follow_the_length(spec):
    for width in (4, 512):  # of the token embedding
        base = tiny().model
        base.config.hidden_size = width
        adds = AddAbsolute(wavepe.encoding(spec), base)
        assert adds.follows_length == (spec in FOLLOW_LENGTH)


@pytest.mark.parametrize("spec", STEADY)
def test_positions_of_an_absolute_encoding(spec):
    model, row = patched_tiny(spec), tokens(1, 4)
    hook = next(iter(model.model._forward_pre_hooks.values()))
    places = [torch.tensor([[3, 0, 1 << 20, 70000]])]  # beyond any table
    if spec == "sinusoidal":
        places.append(torch.tensor([[-2, 3, 5, 1]]))
    for place in places:
        wanted = wavepe.encoding(spec).absolute(place[0].numpy(), model.config.hidden_size)
        assert np.array_equal(hook.__self__.absolute(place)[0], wanted.astype(np.float32))
    moved = logits(model, row, position_ids=torch.arange(4)[None] + 3)
    assert not close(moved, logits(model, row), 1e-2)


def test_binary_ends_where_the_bits_do():
    # width 4: sixteen positions, fewer than the tables hold at first
    model, row = patched_tiny("binary", hidden_size=4), tokens(1, 16)
    assert close(logits(model, row)[0], reference(model, row[0], "binary")[0])
    with pytest.raises(ValueError, match=r"with 4 dims .* got 16, which has 5 bits"):
        logits(model, tokens(1, 17))
    assert close(logits(model, row)[0], reference(model, row[0], "binary")[0])
    with pytest.raises(ValueError, match="at least 0"):
        logits(model, row[:, :2], position_ids=torch.tensor([[-1, 0]]))


# --------------------------------------------------------------- constant tables
def test_tables_grow_and_are_shared():
    spec = "wavelet:kind=haar,scales=1+300"  # one that no other test has asked for
    encoding = wavepe.encoding(spec)
    for length in (3, 1000, 2500, 5):
        table = tables.constant_table(length, encoding, 8, True)
        assert tables.constant_table(length, encoding, 8, True) is table
        wanted = encoding.table(length, 8)[0]
        p, first, _ = table.tensors(torch.float32, "cpu")
        assert (first, table.beyond) == (0, "zero")
        both = min(length, len(p))
        assert np.array_equal(p[:both].numpy(), wanted[:both])
        assert not wanted[both:].any()
        given = (length, 8, torch.float32, torch.device("cpu"))
        rows = tables._constant_rows(tables.name_of(encoding), "table", True, *given)
        assert np.array_equal(rows.numpy(), wanted)
        rows = tables._constant_rows(tables.name_of(encoding), "table", False, *given)
        assert np.array_equal(rows.numpy(), encoding.table(length, 8, causal=False)[0])
    both = (tables.constant_table(length, encoding, 8, True) for length in (100, 5))
    assert next(both) is next(both)


@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_a_table_of_ones_own_may_begin_and_end_anywhere(monkeypatch, beyond):
    forget_registrations(monkeypatch)
    rows = np.random.default_rng(0).normal(size=(3, HEAD)).astype(np.float32)

    @wavepe.register_encoding
    class Three(Encoding):
        name = f"three_{beyond}"

        def table(self, length, head_dim, *, causal=True):
            return rows, 2, beyond

    def parts(length, **_):
        place = np.arange(length) - 2
        table = rows[place.clip(0, 2)].astype(np.float64)
        return {
            "relative": table if beyond == "edge" else table * (place == place.clip(0, 2))[:, None]
        }

    model, row = patched_tiny(f"three_{beyond}"), tokens(1, 2 * LENGTH)
    wanted = reference(model, row[0], parts)[0]
    assert close(logits(model, row)[0], wanted)
    assert close(logits(model, row, output_attentions=True)[0], wanted)
    given = (f"three_{beyond}", "table", True, 9, HEAD, torch.float32, torch.device("cpu"))
    got = tables._constant_rows(*given)
    assert np.array_equal(got.numpy(), parts(9)["relative"].astype(np.float32))


def test_a_table_made_in_inference_mode_serves_training():
    """The tables are shared; a forward under inference_mode must not spoil them for others."""
    model = patched_tiny("wavelet:scales=4,min_scale=3")  # no other test's table
    with torch.inference_mode():
        model(tokens(1, 300))
    model.train()
    model(tokens(1, 20), labels=tokens(1, 20)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# --------------------------------------------------------------- caches
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("spec", ["integer", *every(2, CACHED, 1)])
def test_a_sequence_in_pieces(spec, cache):
    """Padded too, without position_ids: absolute encodings find them over cache and input."""
    model, ids = patched(spec), tokens(2, 12)
    options = {"max_cache_len": 20} if cache == "static" else {}
    kind = StaticCache if cache == "static" else DynamicCache
    # The model's own name of the argument: `cache` from transformers 5.24 on.
    own = next(name for name in CACHE_NAMES if name in argument_names(model))
    ragged = torch.ones_like(ids)
    ragged[0, :3] = 0
    for mask, weights in ((None, False), (ragged, False), (ragged, True)):
        kept = (torch.ones_like(ids) if mask is None else mask).bool()
        wanted = logits(model, ids, attention_mask=mask, use_cache=False)[kept]
        filled, pieces = kind(config=model.config, **options), []
        for name, start, stop in (
            ("past_key_values", 0, 5),
            (own, 5, 6),
            (own, 6, 9),
            ("past_key_values", 9, 12),
        ):
            args = {name: filled, "output_attentions": weights}
            args["attention_mask"] = None if mask is None else mask[:, :stop]
            pieces.append(logits(model, ids[:, start:stop], **args))
        assert close(torch.cat(pieces, dim=1)[kept], wanted, 1e-5), (mask, weights)


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4},
}
GENERATED = [("greedy", spec) for spec in (*CACHED, *STEADY[:2])]
GENERATED += [(way, spec) for way in ("static", "beams", "chunks") for spec in EACH_ENTRY]
GENERATED += [("static", spec) for spec in CACHED[-3:]]


@pytest.mark.parametrize(("way", "spec"), every(3, GENERATED))
def test_generation_with_and_without_a_cache(way, spec):
    model, ids, how = patched(spec), tokens(2, 9), WAYS[way]
    mask = torch.ones_like(ids)
    if way != "chunks":  # transformers cuts a 2-D mask there only without padding
        mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": LENGTH - 9, "do_sample": False}
    wanted = model.generate(ids, **options, use_cache=False, num_beams=how.get("num_beams", 1))
    try:
        output = model.generate(ids, **options, **how)
    except ValueError as error:  # of transformers 5.0, which makes no cache for these chunks
        if "prefill chunking without a cache" not in str(error):
            raise
        with pytest.raises(ValueError, match=str(error)):
            tiny().generate(ids, **options, **how)
        pytest.skip(f"a stock model says so too: {error}")
    assert torch.equal(output, wanted)
    assert wanted.shape == (2, LENGTH)


def test_a_cache_filled_in_training_is_refused_where_inference_rotates_otherwise():
    model = patched_tiny("rope:theta=32,inference_theta=999")
    cache = DynamicCache(config=model.config)
    model.train()
    with torch.no_grad():
        model(tokens(1, 8), past_key_values=cache, use_cache=True)
    model.eval()
    with torch.no_grad(), pytest.raises(ValueError, match="use_cache=False"):
        model(tokens(1, 2), past_key_values=cache, use_cache=True)


# --------------------------------------------------------------- training and tools
@pytest.mark.parametrize(("spec", "reentrant"), by_turns(EACH, [False, True], 4))
def test_gradient_checkpointing(spec, reentrant):
    model, ids = patched(spec).train(), tokens(2, LENGTH)
    wanted = gradients(model, ids)
    recompute(model, reentrant)
    for got, gradient in zip(gradients(model, ids), wanted, strict=True):
        # Re-entrant: the forward pass outside autograd takes another kernel of PyTorch's.
        assert close(got, gradient, 1e-5 if reentrant else 0)
        assert gradient.abs().max() > 0


GRADIENTS = [spec for spec in IN_CALLS if wavepe.encoding(spec).learns]
GRADIENTS += [WAVELET, *LEARNED, ASKED, COMBINED[1], COMBINED[4]]


@pytest.mark.parametrize("spec", GRADIENTS)
def test_gradients_are_those_of_the_written_out_model(spec):
    """By differences of the loss of the float64 model, at the largest entries and a few others.

    Of a constant encoding those of one weight of each matrix, of another one of what is learned.
    """
    model, ids = patched(spec).train(), tokens(1, 9)
    gradients(model, ids)
    checked = parameters_of(model) or dict(model.named_parameters())
    found = {name: weight.grad.flatten() for name, weight in checked.items()}

    def loss():
        row = reference(model, ids[0], spec)[0][:-1]
        row = row - row.max(axis=1, keepdims=True)
        return (np.log(np.exp(row).sum(axis=1)) - row[np.arange(8), ids[0, 1:].numpy()]).mean()

    model.double()
    for name, gradient in found.items():
        entries, step = checked[name].data.view(-1), 1e-5
        largest = gradient.abs().argsort(descending=True)[: 1 if spec == WAVELET else 3].tolist()
        for place in largest if spec == WAVELET else (*largest, 0, -1):
            middle, losses = entries[place].item(), []
            for value in (middle + step, middle - step):
                entries[place] = value
                losses.append(loss())
            entries[place] = middle
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - gradient[place].item()) < 1e-3 * gradient.abs().max(), name
        assert gradient.abs().max() > 1e-4, name


@pytest.mark.parametrize("spec", [WAVELET, *LEARNED, ASKED, *COMBINED, *IN_CALLS])
def test_autocast_trains_and_casts_stop_at_what_is_learned(spec):
    model, ids = patched(spec).train(), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
    for parameter in parameters_of(model).values():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any()
    model.to(torch.float8_e4m3fn)
    assert model.lm_head.weight.dtype == torch.float8_e4m3fn
    assert all(x.dtype == torch.float32 for x in parameters_of(model).values())


def test_only_causal_attention():
    model = patched_tiny(WAVELET)
    with pytest.raises(ValueError, match="causal"):
        model(tokens(1, 5), is_causal=False)
