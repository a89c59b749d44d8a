"""wavepe.hf.set_theta: another base on a live model, against models built with it."""

import copy

import pytest
import torch
import transformers
import wavepe
import wavepe.hf
from cases import soon
from hf_families import BY_TYPE, FAMILIES, LOCAL_THETA, ROTARY, THETA, base, build
from hf_model import LENGTH, SCALINGS, VOCABULARY, logits, pickled, tiny, tiny_config, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from wavepe.hf.theta import set_theta

OTHER = 9.0
QUICK = ("llama", "phi3", "gpt_neox", "gemma3_text", *ROTARY)
# For granite_swa see test_a_base_for_each_layer.
EVERY = soon((x for x in (*FAMILIES, *ROTARY) if x != "granite_swa"), *QUICK)


def asked(family, theta):
    return {"full_attention": theta} if family in BY_TYPE else theta


def fields(config):
    """Return the fields of a configuration, without those that save_pretrained and `to` write."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("architectures", "dtype", "torch_dtype")
    }


def same_model(model, wanted, ids):
    """Assert the same logits, frequencies and configuration."""
    buffers, expected = dict(model.named_buffers()), dict(wanted.named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[key], expected[key]) for key in expected)
    assert fields(model.config) == fields(wanted.config)
    assert torch.equal(logits(model, ids), logits(wanted, ids))


@pytest.mark.parametrize("family", EVERY)
def test_is_the_model_of_that_theta_and_back(family, tmp_path):
    model, ids = build(family), tokens(2, LENGTH)
    before = logits(model, ids)
    assert set_theta(model, asked(family, OTHER)) is model
    assert not torch.allclose(logits(model, ids), before, atol=1e-3)
    same_model(model, build(family, OTHER), ids)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    if not torch.equal(logits(loaded, ids), logits(model, ids)):
        # transformers 5.0 forgets which share of a head a stock GPT-NeoX rotates.
        build(family).save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert not torch.equal(logits(loaded, ids), before)
    set_theta(model, asked(family, THETA))
    same_model(model, build(family), ids)


@pytest.mark.skipif("granite_swa" not in FAMILIES, reason="a newer transformers has it")
def test_a_base_for_each_layer():
    for model in (build("granite_swa"), wavepe.hf.patch(build("granite_swa"), "rope")):
        with pytest.raises(ValueError, match="has one for each layer"):
            set_theta(model, OTHER)


@pytest.mark.parametrize("name", SCALINGS)
def test_type_and_scaling_stay(name):
    scaling = {"rope_type": name, **SCALINGS[name]}

    def scaled(theta):
        return build("llama", max_position_embeddings=LENGTH, **base(theta, **scaling))

    model, ids = scaled(THETA), tokens(1, 3 * LENGTH)
    logits(model, ids)  # leaves the frequencies of a long sequence
    set_theta(model, OTHER)
    for length in (5, 3 * LENGTH):
        wanted = logits(scaled(OTHER), ids[:, :length])
        assert torch.equal(logits(model, ids[:, :length]), wanted)


def test_bases_of_layer_types():
    model, ids = build("gemma3_text"), tokens(1, LENGTH)
    before = logits(model, ids)
    with pytest.raises(ValueError, match=r"full_attention theta=50.*dict") as caught:
        set_theta(model, OTHER)
    assert f"sliding_attention theta={LOCAL_THETA:g}" in str(caught.value)
    for wrong in ({}, {"chunked_attention": OTHER}, {"full_attention": 1.0, "other": 2.0}):
        with pytest.raises(ValueError, match="some of the bases of this model"):
            set_theta(model, wrong)
    set_theta(model, {"sliding_attention": OTHER})
    assert not torch.allclose(logits(model, ids), before, atol=1e-3)
    set_theta(model, {"sliding_attention": THETA})  # both the same now
    set_theta(model, 20.0)
    both = set_theta(build("gemma3_text"), {"full_attention": 20, "sliding_attention": 20})
    same_model(model, both, ids)
    with pytest.raises(ValueError, match="one base for all layers, theta=50: give a number"):
        set_theta(build("llama"), {"full_attention": OTHER})


def test_other_models_of_the_configuration_are_not_concerned():
    config, ids = tiny_config(**base()), tokens(1, LENGTH)
    model, other = tiny(config=config), tiny(config=config)
    before, old = logits(other, ids), copy.deepcopy(fields(config))
    set_theta(model, OTHER)
    assert torch.equal(logits(other, ids), before)
    assert fields(other.config) == old
    assert model.model.config is model.config
    assert model.model.layers[0].self_attn.config is model.config


def test_the_frequencies_count_and_not_what_the_configuration_says():
    """A field that is set on a live model has no effect, but set_theta has."""
    model, ids = build("llama"), tokens(1, LENGTH)
    same_model(set_theta(model, THETA), build("llama"), ids)  # changes nothing
    model.config.rope_parameters["rope_theta"] = OTHER
    same_model(set_theta(model, OTHER), build("llama", OTHER), ids)


@pytest.mark.parametrize(
    ("theta", "error"),
    [
        *((theta, ValueError) for theta in (0, -1.0, float("nan"), float("inf"))),
        (1e-300, ValueError),  # its frequencies are not finite in float32
        *((theta, TypeError) for theta in ("10000", None, True)),
    ],
)
def test_wrong_bases(theta, error):
    model, ids = build("llama"), tokens(1, LENGTH)
    with pytest.raises(error, match="theta"):
        set_theta(model, theta)
    same_model(model, build("llama"), ids)
    with pytest.raises(ValueError, match="finite frequencies"):
        set_theta(build("llama", **base(rope_type="yarn", **SCALINGS["yarn"])), 1.0)


@pytest.mark.parametrize("spec", ["rope:self_extend=2,neighbors=3", "xpos"])
def test_rotations_that_act_in_the_scores_too(spec):
    model, ids = wavepe.hf.patch(build("llama"), spec), tokens(1, LENGTH)
    wanted = logits(model, ids)
    with pytest.raises(ValueError, match=rf"encoding '{spec}', and set_theta needs one rope"):
        set_theta(model, OTHER)
    assert torch.equal(logits(model, ids), wanted)


def test_models_without_a_base():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4}
    for family in ("gptj", "gpt2"):
        more = {"rotary_dim": 4} if family == "gptj" else {}
        config = AutoConfig.for_model(family, **sizes, **more)
        with pytest.raises(ValueError, match=r"this GPT.* has no rotary embedding .*rotary module"):
            set_theta(AutoModelForCausalLM.from_config(config), OTHER)
    with pytest.raises(ValueError, match="no rotary embedding"):
        set_theta(torch.nn.Linear(2, 2), OTHER)
    with pytest.raises(ValueError, match="configuration of one causal model"):
        set_theta(build("llama").model.rotary_emb, OTHER)
    with pytest.raises(TypeError, match="got str"):
        set_theta("model", OTHER)
    two = {key: tiny_config().to_dict() for key in ("encoder", "decoder")}
    two["decoder"]["cross_attention_hidden_size"] = two["encoder"]["hidden_size"]
    model = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(**two))
    with pytest.raises(ValueError, match="configuration of one causal model"):
        set_theta(model, OTHER)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(ValueError, match="meta device"):
        set_theta(model, OTHER)


def test_copies_pickles_wrappers_and_dtypes():
    model, ids = build("llama").to(torch.bfloat16), tokens(1, LENGTH)
    wanted = build("llama", OTHER).to(torch.bfloat16)
    wrapper = torch.nn.Sequential(model)
    set_theta(wrapper, OTHER)
    for other in (model, copy.deepcopy(model), pickled(model)):
        same_model(other, wanted, ids)
        set_theta(other, THETA)
        same_model(other, build("llama").to(torch.bfloat16), ids)


def test_the_text_model_among_others():
    text = tiny_config(**base())
    picture = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    picture |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    vision = transformers.PixtralVisionConfig(**picture)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    model, ids = tiny(transformers.LlavaForConditionalGeneration, config), tokens(1, LENGTH)
    buffers = {key: value.clone() for key, value in model.named_buffers() if "vision" in key}
    assert buffers
    before = logits(model, input_ids=ids)
    set_theta(model, OTHER)
    assert model.config.text_config is model.model.language_model.config
    assert not torch.allclose(logits(model, input_ids=ids), before, atol=1e-3)
    assert all(torch.equal(dict(model.named_buffers())[key], buffers[key]) for key in buffers)
    fresh = tiny(**base(OTHER))
    fresh.model.load_state_dict(model.model.language_model.state_dict())
    fresh.lm_head.load_state_dict(model.lm_head.state_dict())
    assert torch.equal(logits(model, input_ids=ids), logits(fresh, ids))
    assert fields(model.config.text_config) == fields(fresh.config)


# ---------------------------------------------------------------- caches
@pytest.mark.parametrize("family", ["llama", "glm", "gemma3_text"])
def test_keys_of_another_theta_are_refused(family):
    model, ids = build(family), tokens(1, LENGTH)
    old = DynamicCache(config=model.config)
    logits(model, ids[:, :5], past_key_values=old)
    set_theta(model, asked(family, OTHER))
    with pytest.raises(ValueError, match=r"theta=50\b.*theta=9\b.*empty cache"):
        logits(model, ids[:, 5:], past_key_values=old)
    wanted = logits(model, ids, use_cache=False)
    new = DynamicCache(config=model.config)
    parts = [logits(model, part, past_key_values=new) for part in ids.split((5, 1, 10), dim=1)]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-4)
    set_theta(model, asked(family, THETA))
    with pytest.raises(ValueError, match="empty cache"):
        logits(model, ids[:, :1], past_key_values=new)
    step = logits(model, ids[:, 5:], past_key_values=old)  # its keys fit again
    assert torch.allclose(step, logits(model, ids)[:, 5:], atol=1e-4)


def test_caches_that_the_model_makes():
    model, ids = set_theta(build("llama"), OTHER), tokens(1, LENGTH)
    with torch.no_grad():
        first = model(ids[:, :5])
        inner = model.model(ids[:, :5], None, None, first.past_key_values, return_dict=False)
    assert logits(model, ids[:, :5], past_key_values=inner[1]).shape[1] == 5
    set_theta(model, 20.0)
    for cache in (first.past_key_values, copy.deepcopy(first.past_key_values)):
        with pytest.raises(ValueError, match="empty cache"), torch.no_grad():
            model.model(ids[:, :1], None, None, cache)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    logits(model, ids[:, :5], past_key_values=cache)
    set_theta(model, OTHER)
    with pytest.raises(ValueError, match="empty cache"):
        logits(model, ids[:, 5:6], past_key_values=cache)
    cache.reset()
    wanted = logits(model, ids[:, :5], use_cache=False)
    assert torch.allclose(logits(model, ids[:, :5], past_key_values=cache), wanted, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_goes_on(cache):
    model, ids = build("llama"), tokens(2, 5)
    how = {"max_new_tokens": 6, "do_sample": False}
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    for theta in (THETA, OTHER, 20.0):
        set_theta(model, theta)
        found = model.generate(ids, **how, **options, disable_compile=True)
        assert torch.equal(found, model.generate(ids, **how, use_cache=False))


@pytest.mark.slow
def test_compiled_models_follow():
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1}
    model, ids = build("llama", **one), tokens(1, LENGTH)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        cache = compiled(ids).past_key_values
        for theta in (OTHER, 20.0):
            set_theta(model, theta)
            filled = compiled(ids)  # in the shapes of the graph of before
            assert torch.equal(filled.logits, logits(build("llama", theta, **one), ids))
            with pytest.raises(ValueError, match="empty cache"):
                compiled(ids[:, :1], past_key_values=cache)
            cache = filled.past_key_values
            compiled(ids[:, :1], past_key_values=cache)
    torch._dynamo.reset()


# ---------------------------------------------------------------- encodings of wavepe
@pytest.mark.parametrize("spec", ["rope", "rope:theta=30", "rope:theta=30,type=linear,factor=2"])
def test_patched_models(spec, tmp_path):
    model, ids = build("llama"), tokens(1, LENGTH)
    stock, patched = logits(model, ids), logits(wavepe.hf.patch(model, spec), ids)
    theta = model.model.rotary_emb.rotations[0].encoding.theta
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :5], past_key_values=cache)
    set_theta(model, OTHER)
    wanted = build("llama")
    wavepe.hf.patch(wanted, {**wavepe.encoding(spec).to_dict(), "theta": OTHER})
    assert torch.equal(logits(model, ids), logits(wanted, ids))
    with pytest.raises(ValueError, match="empty cache"):
        logits(model, ids[:, 5:6], past_key_values=cache)
    model.save_pretrained(tmp_path)
    loaded = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), logits(wanted, ids))
    set_theta(loaded, theta)
    assert torch.equal(logits(loaded, ids), patched)
    wavepe.hf.unpatch(model)
    assert torch.equal(logits(model, ids), stock)
    assert fields(model.config) == fields(build("llama").config)


def test_the_base_at_inference_of_a_spec():
    model, ids = wavepe.hf.patch(tiny(), "rope:theta=30,inference_theta=90"), tokens(1, LENGTH)
    set_theta(model, OTHER)
    assert model.config.position_encoding == "rope:theta=30,inference_theta=9"
    wanted = logits(wavepe.hf.patch(tiny(), "rope:theta=9"), ids)
    assert torch.equal(logits(model, ids), wanted)
    scaled = wavepe.hf.patch(tiny(), "rope:theta=30,inference_theta=scaled")
    set_theta(scaled, OTHER)
    assert scaled.config.position_encoding == "rope:theta=9,inference_theta=scaled"
    with pytest.raises(ValueError, match="'none', and set_theta needs one rope"):
        set_theta(wavepe.hf.patch(tiny(), "none"), OTHER)
