"""wavepe.analysis.measured_band against a model's projections, pair by pair."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_families
import wavepe.hf
from hf_model import HEAD, patched_tiny, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM
from wavepe.analysis import measured_band

ROW = tokens(1, 12)[0]


def by_hand(layers, pairs):
    """Bands and heatmap of keys (heads, n, d) of each layer, by the dims of each pair."""
    bands, norms = [], []
    for keys in layers:
        of_layer = []
        for head in keys:
            table = [[float(np.sqrt(key[a] ** 2 + key[b] ** 2)) for a, b in pairs] for key in head]
            largest = [row.index(max(row)) for row in table]
            counts = [largest.count(index) for index in range(len(pairs))]
            of_layer.append(counts.index(max(counts)))
            norms.append(table)
        bands.append(of_layer)
    return np.array(bands), np.mean(norms, axis=0)


def projected(model, names, split):
    """Return the outputs of these modules for ROW, split into heads (heads, n, d)."""
    seen = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, out: seen.append(split(out[0].detach()).double().numpy())
        )
        for name, module in model.named_modules()
        if name.endswith(names)
    ]
    with torch.no_grad():
        model(ROW[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def heads(out):
    """Split a projection (n, heads * d) into heads."""
    return out.view(len(ROW), -1, HEAD).movedim(0, 1)


def normed(out):
    """Split the output of Qwen 3's norm, (n, heads, d), into heads."""
    return out.movedim(0, 1)


def keys_of_neox(out):
    """GPT-NeoX has query, key and value of a head beside each other."""
    return out.view(len(ROW), -1, 3, HEAD).movedim(0, 1)[:, :, 1]


HALVES = [(i, i + HEAD // 2) for i in range(HEAD // 2)]
INTERLEAVED = [(2 * i, 2 * i + 1) for i in range(HEAD // 2)]
FIRST_HALF = [(0, 2), (1, 3)]  # the first four dims turn
FIRST_HALF_INTERLEAVED = [(0, 1), (2, 3)]
SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MULTI_HEAD = {**SIZES, "hidden_size": 32, "num_key_value_heads": 4}
GPTJ = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# family -> configuration, the modules that make keys, how their output splits, the pairs.
FAMILIES = {
    "llama": (SIZES, ".k_proj", heads, HALVES),
    "qwen3": (SIZES, ".k_norm", normed, HALVES),
    "cohere": (MULTI_HEAD, ".k_proj", heads, INTERLEAVED),
    "phi": ({**MULTI_HEAD, "partial_rotary_factor": 0.5}, ".k_proj", heads, FIRST_HALF),
    "glm": ({**MULTI_HEAD, "partial_rotary_factor": 0.5}, ".k_proj", heads, FIRST_HALF_INTERLEAVED),
    "gptj": (GPTJ, ".k_proj", heads, FIRST_HALF_INTERLEAVED),
    "gpt_neox": ({**MULTI_HEAD, "rotary_pct": 0.5}, ".query_key_value", keys_of_neox, FIRST_HALF),
}


def family(kind):
    config = AutoConfig.for_model(kind, **FAMILIES[kind][0])
    return tiny(AutoModelForCausalLM.from_config, config)


def check(model, of, layers, pairs):
    band, heatmap = by_hand(layers, pairs)
    found = measured_band(model, ROW, of=of)
    np.testing.assert_array_equal(found["band"], band)
    assert found["mean"] == pytest.approx(band.mean())
    np.testing.assert_allclose(found["heatmap"], heatmap, rtol=1e-5)
    assert found["heatmap"].shape == (len(ROW), len(pairs))


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_of_families(kind):
    model = family(kind)
    _, names, split, pairs = FAMILIES[kind]
    check(model, "key", projected(model, names, split), pairs)


@pytest.mark.parametrize("kind", ["llama", "cohere", "gptj"])
def test_queries(kind):
    model = family(kind)
    check(model, "query", projected(model, ".q_proj", heads), FAMILIES[kind][3])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    ],
)
def test_scaled_frequencies_change_no_norm(scaling):
    model = tiny(rope_parameters=scaling)
    check(model, "key", projected(model, ".k_proj", heads), HALVES)


@pytest.mark.parametrize("spec", ["rope", "rope:fraction=0.5", "rope:fraction=0", "rope:theta=16"])
def test_patched_models_and_own_types(spec):
    """p-RoPE leaves pairs unrotated, and they stay pairs."""
    model = patched_tiny(spec)
    check(model, "key", projected(model, ".k_proj", heads), HALVES)
    config = wavepe.hf.WavePELlamaConfig(position_encoding=spec, **SIZES)
    own = tiny(wavepe.hf.WavePELlamaForCausalLM, config)
    check(own, "key", projected(own, ".k_proj", heads), HALVES)


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_every_family_that_can_be_patched(name):
    """And what its layers leave without positions has no band."""
    described = hf_families.FAMILIES[name]
    found = measured_band(hf_families.build(name), ROW)
    assert found["heatmap"].shape == (len(ROW), described.rotated // 2)
    assert [bool((row >= 0).all()) for row in found["band"]] == list(described.positions)


def test_hybrids_have_bands_where_they_rotate():
    stock, hybrid = tiny(), wavepe.hf.patch(tiny(), {"1": "alibi"})
    band = measured_band(hybrid, ROW)["band"]
    np.testing.assert_array_equal(band[0], measured_band(stock, ROW)["band"][0])
    np.testing.assert_array_equal(band[1], [-1, -1])


def test_fused_rotation():
    model = tiny()
    before = measured_band(model, ROW)
    after = measured_band(wavepe.hf.use_fused_rope(model), ROW)
    np.testing.assert_array_equal(after["band"], before["band"])


def test_ties_go_to_the_lowest():
    model = tiny()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "k_proj" in name:  # pairs 0 and 2 are equal, and larger than the others
                rows = weight.view(-1, HEAD, weight.shape[1])
                rows[:, [2, 6]] = rows[:, [0, 4]] = 5 * rows[:, [0, 4]]
    assert (measured_band(model, ROW)["band"] == 0).all()


@pytest.mark.parametrize("spec", ["alibi", "wavelet:scales=4", "none", "sinusoidal"])
def test_encodings_without_pairs_are_named(spec):
    with pytest.raises(ValueError, match=f"position encoding '{spec}', which is not rotary"):
        measured_band(patched_tiny(spec), ROW)


def test_a_model_without_rotation_is_refused():
    config = AutoConfig.for_model("gpt2", **{k: v for k, v in GPTJ.items() if k != "rotary_dim"})
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no rotary pairs"):
        measured_band(AutoModelForCausalLM.from_config(config), ROW)
    with pytest.raises(ValueError, match="no rotary pairs"):
        measured_band(torch.nn.Sequential(), torch.zeros(3, dtype=torch.int64))


def state_of(model):
    return [
        (type(module), module.training, dict(vars(module)), list(module._forward_hooks))
        for module in model.modules()
    ]


def test_the_model_is_restored():
    model = tiny()
    model.train()
    model.model.layers[0].eval()
    before = [(kind, mode, sorted(held), hooks) for kind, mode, held, hooks in state_of(model)]
    expected = copy.deepcopy(model)(ROW[None]).logits
    measured_band(model, ROW)
    model.model.layers[1].mlp.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        measured_band(model, ROW)
    model.model.layers[1].mlp._forward_hooks.clear()
    after = [(kind, mode, sorted(held), hooks) for kind, mode, held, hooks in state_of(model)]
    assert after == before
    assert torch.equal(model(ROW[None]).logits, expected)


def broken(module, args, out):
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        (ROW[None], {}, ValueError, r"shape \(1, 12\)"),
        (ROW[:0], {}, ValueError, "must hold at least one, got 0"),
        (ROW.float(), {}, TypeError, "float32"),
        (ROW + 50, {}, ValueError, "0..49"),
        (ROW, {"of": "value"}, ValueError, "value.*key, query"),
        (ROW, {"of": None}, TypeError, "key, query.*None"),
    ],
)
def test_bad_input(given, options, error, words):
    with pytest.raises(error, match=words):
        measured_band(tiny(), given, **options)
