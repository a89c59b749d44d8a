"""Encodings that depend on the length: the error of `generate`, and fix_length."""

import copy

import pytest
import torch
import wavepe.hf
from hf_families import build
from hf_model import LENGTH, close, llamas, logits, patched_tiny, pickled, tiny, tokens
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

SCALED = "rope:theta=30,inference_theta=scaled"
FOLLOW = (  # with the first length at which they change
    (SCALED, LENGTH),
    ("rope:theta=30,type=dynamic,factor=4", LENGTH),
    ("rope:type=longrope,factor=2,short_factor=1+1+1+1,long_factor=9+9+9+9", LENGTH),
    ("normalised", 1),
    ("sinusoidal:theta=length", 1),
    ("sinusoidal:reversed=true", 1),
)
EACH = pytest.mark.parametrize(("spec", "steady"), FOLLOW)
MORE = {"do_sample": False, "max_new_tokens": 12}


def refused(model, ids, **options):
    """Return whether `generate` raises a helpful error before the model computes anything."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match=r"fix_length\(model, \d+\) .*use_cache=False"):
        model.generate(ids, **{**MORE, **options})
    hook.remove()
    return not calls


@EACH
def test_generate_says_it_before_the_first_token(spec, steady):
    model, ids = patched_tiny(spec), tokens(2, 6)
    assert refused(model, ids)
    whole = model.generate(ids, use_cache=False, **MORE)
    assert whole.shape == (2, 18)
    # The last token is written, and not read.
    room = {**MORE, "max_new_tokens": max(steady + 1 - 6, 1)}
    got = model.generate(ids, **room)
    assert torch.equal(got, model.generate(ids, use_cache=False, **room))
    assert refused(model, ids, max_new_tokens=room["max_new_tokens"] + 1)
    assert refused(model, ids, max_new_tokens=None, max_length=18)


@EACH
def test_fix_length_makes_caches_right(spec, steady):
    model, ids = patched_tiny(spec), tokens(2, 30)
    whole = logits(model, ids)
    assert wavepe.hf.fix_length(model, 30) is model
    assert torch.equal(logits(model, ids), whole)  # 30 tokens, as before
    cache = DynamicCache(config=model.config)
    steps = [logits(model, part, past_key_values=cache) for part in ids.split([7, 9, 1, 13], 1)]
    assert close(torch.cat(steps, 1), whole, 1e-5)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids[:, :15]], 1)
    written = model.generate(padded, attention_mask=(padded != 0).long(), **MORE)
    alone = model.generate(ids[:, :15], use_cache=False, **MORE)
    assert torch.equal(written[:, 3:], alone)
    wavepe.hf.fix_length(model, None)
    assert refused(model, ids[:, :7])


def test_a_fixed_length_is_a_fixed_base():
    ids = tokens(1, 12)
    model = wavepe.hf.fix_length(patched_tiny(SCALED), 4 * LENGTH)
    wanted = patched_tiny("rope:theta=120")
    assert close(logits(model, ids), logits(wanted, ids), 1e-6)
    assert torch.equal(model.generate(ids, **MORE), wanted.generate(ids, **MORE))
    longer = tokens(1, 5 * LENGTH)
    assert close(logits(model, longer), logits(wanted, longer), 1e-6)
    trained = patched_tiny("rope:theta=30").train()
    assert close(logits(model.train(), ids), logits(trained, ids), 1e-6)
    wavepe.hf.set_theta(model.eval(), 60.0)  # keeps the length
    assert close(logits(model, ids), logits(patched_tiny("rope:theta=240"), ids), 1e-6)


@EACH
def test_a_cache_of_other_frequencies_is_refused(spec, steady):
    model, ids = patched_tiny(spec), tokens(1, 9)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    wavepe.hf.fix_length(model, 40)
    with pytest.raises(ValueError, match=r"5 cached keys .*use_cache=False, .*fix_length"):
        logits(model, ids[:, 5:], past_key_values=cache)


def test_what_stays_and_what_is_refused():
    model, ids = patched_tiny("alibi"), tokens(1, 9)
    wanted = logits(model, ids)
    assert torch.equal(logits(wavepe.hf.fix_length(model, 4), ids), wanted)
    for length, kind, message in (
        (0, ValueError, "length must be at least 1, got 0"),
        (2.5, TypeError, "length must be an integer, got 2.5"),
        ("9", TypeError, "length must be an integer"),
    ):
        with pytest.raises(kind, match=message):
            wavepe.hf.fix_length(patched_tiny(SCALED), length)
    with pytest.raises(ValueError, match="needs a model with a position encoding of wavepe"):
        wavepe.hf.fix_length(tiny(LlamaForCausalLM), 9)
    long = {"max_new_tokens": 1, "prefill_chunk_size": 8}
    assert refused(patched_tiny(SCALED), tokens(1, 20), **long)  # at the first chunk
    with llamas(SCALED):
        model = tiny()
    assert refused(model, ids)


def test_a_prompt_of_embeddings():
    model = patched_tiny(SCALED)
    embeds = model.get_input_embeddings()(tokens(1, 9))
    assert model.generate(inputs_embeds=embeds, **{**MORE, "max_new_tokens": 4}).shape == (1, 4)
    with pytest.raises(ValueError, match=r"9 tokens of the prompt .*fix_length\(model, 21\)"):
        model.generate(inputs_embeds=embeds, **MORE)


@pytest.mark.parametrize(("spec", "steady"), FOLLOW[:3])
def test_padding_does_not_count(spec, steady):
    """It does not count in a batch of rows of several lengths either."""
    model, ids = patched_tiny(spec), tokens(2, 6)
    ids[1, 0] = 0
    padded = torch.cat([torch.zeros(2, 10, dtype=torch.long), ids], 1)
    options = {"attention_mask": (padded != 0).long(), "do_sample": False}
    got = model.generate(padded, max_new_tokens=11, **options)
    for row, tokens_of_row in zip(got, (ids[:1], ids[1:, 1:]), strict=True):
        alone = model.generate(tokens_of_row, max_new_tokens=11, do_sample=False)
        assert torch.equal(row[-alone.shape[1] :], alone[0])
    assert refused(model, padded, **{**options, "max_new_tokens": 12})


def test_copies_files_and_the_way_back(tmp_path):
    model, ids = patched_tiny(SCALED), tokens(1, 9)
    same = copy.deepcopy(model)
    wavepe.hf.fix_length(same, 21)
    assert refused(model, ids)
    assert torch.equal(same.generate(ids, **MORE), copy.deepcopy(same).generate(ids, **MORE))
    loaded = pickled(same)
    assert torch.equal(loaded.generate(ids, **MORE), same.generate(ids, **MORE))
    assert refused(wavepe.hf.fix_length(loaded, None), ids)
    same.save_pretrained(tmp_path)
    assert refused(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    stock = wavepe.hf.unpatch(model)
    assert torch.equal(stock.generate(ids, **MORE), tiny().generate(ids, **MORE))
    with wavepe.hf.patched(stock, "alibi"):
        stock.generate(ids, **MORE)


def test_phi3_computes_its_keys_again():
    """Its own `generate` does, at the original length; in some versions it forgets the tokens."""
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 50.0, "partial_rotary_factor": 1.0, **lists}
    model = build("phi3", original_max_position_embeddings=LENGTH, rope_parameters=rope)
    ids = tokens(1, 10)
    right = torch.equal(model.generate(ids, **MORE), model.generate(ids, use_cache=False, **MORE))
    for spec in ("rope", "alibi", "normalised"):
        with wavepe.hf.patched(model, spec):
            wavepe.hf.fix_length(model, None if spec == "rope" else 22)
            whole = model.generate(ids, use_cache=False, **MORE)
            if right:
                assert torch.equal(model.generate(ids, **MORE), whole)
            else:
                with pytest.raises(ValueError, match="forgets all earlier tokens"):
                    model.generate(ids, **MORE)
    wavepe.hf.patch(model, SCALED)  # which goes on changing after that
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, do_sample=False, max_new_tokens=80)


def test_layers_that_keep_a_rope_that_follows_the_length():
    """A hybrid's other layers: the stock module tells no cache what its frequencies were."""
    scaling = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}
    ids = tokens(1, 36)
    for spec in ({"0": SCALED}, {"0": "alibi"}):
        model = wavepe.hf.patch(tiny(rope_parameters=scaling), spec)
        assert refused(model, ids[:, :6])
        whole = logits(wavepe.hf.fix_length(model, 36), ids)
        cache = DynamicCache(config=model.config)
        steps = [logits(model, part, past_key_values=cache) for part in ids.split([6, 10, 20], 1)]
        assert close(torch.cat(steps, 1), whole, 1e-5)


def test_vectors_go_by_positions():
    model, ids = patched_tiny("normalised"), tokens(1, 6)
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(-1)
    with pytest.raises(ValueError, match="use_cache=False"):
        logits(model, ids[:, 5:], past_key_values=cache, position_ids=torch.tensor([[9]]))


@pytest.mark.parametrize("spec", [SCALED, "rope:type=yarn,factor=2", "rope:type=dynamic,factor=2"])
def test_a_trained_length_that_is_changed_on_a_live_model(spec, tmp_path):
    """Read back from a folder, it has its effect: the live model must not differ in silence."""
    model, ids = patched_tiny(spec), tokens(1, 24)
    model.config.max_position_embeddings = 2048
    with pytest.raises(
        ValueError, match=r"changed from 16 to 2048, .*max_position_embeddings=2048"
    ):
        logits(model, ids)
    model.save_pretrained(tmp_path)
    wanted = patched_tiny(spec, max_position_embeddings=2048)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(wanted, ids))


@pytest.mark.parametrize("spec", ["rope:theta=30", "alibi", "normalised"])
def test_a_trained_length_that_nothing_depends_on(spec):
    model, ids = patched_tiny(spec, num_hidden_layers=1), tokens(1, 24)
    wanted = logits(model, ids)
    model.config.max_position_embeddings = 24
    if spec == "rope:theta=30":  # normalised leaves the graph
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert close(logits(compiled, ids, use_cache=False), wanted, 1e-6)
    assert torch.equal(logits(model, ids), wanted)


def test_a_chat_that_goes_on_from_a_cache():
    model, ids = wavepe.hf.fix_length(patched_tiny(SCALED), 40), tokens(1, 20)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :12], past_key_values=cache)
    wanted = model.generate(ids, **MORE)
    assert torch.equal(model.generate(ids, past_key_values=cache, **MORE), wanted)
    wavepe.hf.fix_length(model, None)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :12], past_key_values=cache)
    assert refused(model, ids, past_key_values=cache)
