"""wavepe.analysis of models: attention maps against eager attention and the model in float64, and
measured bands against the projections, pair by pair."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import hf_families
import numpy as np
import pytest
import torch
import wavepe.hf
from encoding_cases import LEARNED
from hf_model import HEAD, SPECS, close, patched_tiny, reference, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from wavepe.analysis import attention_map, attention_window, measured_band, perplexity

ROW = tokens(1, 20)[0]
ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, **ENDS,
}  # fmt: skip
MULTI_HEAD = {**SIZES, "hidden_size": 32, "num_key_value_heads": 4}
GPT = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **ENDS}


def of_kind(kind, **sizes):
    return tiny(AutoModelForCausalLM.from_config, AutoConfig.for_model(kind, **sizes))


# ------------------------------------------------------------------ attention maps


def eager_weights(model):
    """Return the weights of eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ROW[None], use_cache=False, output_attentions=True).attentions
    return np.stack([layer[0].numpy() for layer in weights])


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_stock_models(name):
    """Windows, soft caps, grouped queries and several rotations among them."""
    model = hf_families.build(name)
    capped = hf_families.FAMILIES[name].cap is not None  # transformers refuses sdpa
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    before = model.config._attn_implementation
    expected = eager_weights(copy.deepcopy(model))
    np.testing.assert_allclose(attention_map(model, ROW), expected, atol=2e-6)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", GPT),
        ("bloom", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4, **ENDS}),
        ("gptj", {**GPT, "rotary_dim": 4}),
        # sinks take their share
        ("gpt_oss", {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6,
                     "max_position_embeddings": 4096 * 32}),
    ],
)  # fmt: skip
def test_models_without_rotation_without_the_interface_or_with_sinks(kind, sizes):
    model = of_kind(kind, **sizes)
    weights = attention_map(model, ROW)
    np.testing.assert_allclose(weights, eager_weights(copy.deepcopy(model)), atol=2e-6)
    assert (weights.sum(axis=-1).mean() < 0.999) == (kind == "gpt_oss")


@pytest.mark.parametrize("spec", [*SPECS, *LEARNED])
def test_every_encoding_against_the_oracle(spec):
    """Also those whose attention is one kernel, which does not return weights."""
    model = hf_families.stirred(patched_tiny(spec))
    weights = attention_map(model, ROW)
    _, expected = reference(model, ROW, spec)
    assert close(weights, expected)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(weights, 1).any()


def test_own_types_and_other_dtypes():
    model = patched_tiny("alibi")
    expected = attention_map(model, ROW)
    double = attention_map(model.double(), ROW)
    assert (expected.dtype, double.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(double, expected, atol=1e-5)
    half = attention_map(model.to(torch.bfloat16), ROW)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, expected, atol=0.05)


def test_compiled_models():
    model = tiny()
    expected = attention_map(model, ROW)
    np.testing.assert_array_equal(
        attention_map(torch.compile(model, backend="eager"), ROW), expected
    )


def test_a_model_that_looks_ahead_is_refused():
    config = AutoConfig.for_model("bert", **{**SIZES, "num_hidden_layers": 1})
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="attends to later tokens"):
        attention_map(model, ROW)


# ------------------------------------------------------------------ windows


def test_windows_of_plain_matrices():
    assert attention_window(np.eye(5)) == 1
    assert attention_window(np.zeros((5, 5))) == 0
    assert attention_window([[1.0, 0], [0.25, 0.75]], threshold=0.25) == 2
    hole = np.eye(6) + np.eye(6, k=-4)  # nothing in between
    assert attention_window(hole) == 5
    windows = attention_window([[np.eye(3) / 2 + np.diag([0.1, 0.3], -1), np.zeros((3, 3))]], 0.2)
    assert (windows.dtype, windows.tolist()) == (np.int64, [[2, 0]])  # the mean is 0.2


@pytest.mark.parametrize(
    ("weights", "threshold", "error", "words"),
    [
        (np.zeros((3, 4)), 0.1, ValueError, r"shape \(3, 4\)"),
        (np.zeros(3), 0.1, ValueError, r"shape \(3,\)"),
        (np.zeros((2, 0, 0)), 0.1, ValueError, "n at least 1"),
        ([["x"]], 0.1, TypeError, "map must hold real numbers"),
        (np.eye(3), "much", TypeError, "threshold must be a number"),
        (np.eye(3), np.nan, ValueError, "threshold must be finite"),
    ],
)
def test_bad_windows(weights, threshold, error, words):
    with pytest.raises(error, match=words):
        attention_window(weights, threshold)


# ------------------------------------------------------------------ measured bands


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
# family -> configuration, the modules that make keys, how their output splits, the pairs.
FAMILIES = {
    "llama": (SIZES, ".k_proj", heads, HALVES),
    "qwen3": (SIZES, ".k_norm", normed, HALVES),
    "cohere": (MULTI_HEAD, ".k_proj", heads, INTERLEAVED),
    "phi": ({**MULTI_HEAD, "partial_rotary_factor": 0.5}, ".k_proj", heads, FIRST_HALF),
    "glm": ({**MULTI_HEAD, "partial_rotary_factor": 0.5}, ".k_proj", heads, INTERLEAVED[:2]),
    "gptj": ({**GPT, "rotary_dim": 4}, ".k_proj", heads, INTERLEAVED[:2]),
    "gpt_neox": ({**MULTI_HEAD, "rotary_pct": 0.5}, ".query_key_value", keys_of_neox, FIRST_HALF),
}


def check_band(model, of="key", names=".k_proj", split=heads, pairs=HALVES):
    band, heatmap = by_hand(projected(model, names, split), pairs)
    bands = measured_band(model, ROW, of=of)
    np.testing.assert_array_equal(bands["band"], band)
    assert bands["mean"] == pytest.approx(band.mean())
    np.testing.assert_allclose(bands["heatmap"], heatmap, rtol=1e-5)
    assert bands["heatmap"].shape == (len(ROW), len(pairs))


@pytest.mark.parametrize("kind", FAMILIES)
def test_bands_of_families(kind):
    sizes, names, split, pairs = FAMILIES[kind]
    model = of_kind(kind, **sizes)
    check_band(model, "key", names, split, pairs)
    if kind in ("llama", "cohere", "gptj"):
        check_band(model, "query", ".q_proj", heads, pairs)


@pytest.mark.parametrize("spec", ["rope", "rope:fraction=0.5", "rope:fraction=0", "rope:theta=16"])
def test_bands_of_patched_models_and_own_types(spec):
    """p-RoPE leaves pairs unrotated, and they stay pairs."""
    check_band(patched_tiny(spec))
    config = wavepe.hf.WavePELlamaConfig(position_encoding=spec, **SIZES)
    check_band(tiny(wavepe.hf.WavePELlamaForCausalLM, config))


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_every_family_that_can_be_patched(name):
    """And what its layers leave without positions has no band."""
    described = hf_families.FAMILIES[name]
    bands = measured_band(hf_families.build(name), ROW)
    assert bands["heatmap"].shape == (len(ROW), described.rotated // 2)
    rotates = list(described.positions)
    rotates[len(rotates) - described.reused :] = [False] * described.reused  # they have no keys
    assert [row[0] >= 0 for row in bands["band"]] == rotates


def test_hybrids():
    """A hybrid has bands where it rotates."""
    stock = measured_band(tiny(), ROW)["band"]
    hybrid = measured_band(wavepe.hf.patch(tiny(), {"1": "alibi"}), ROW)["band"]
    np.testing.assert_array_equal(hybrid, [stock[0], [-1, -1]])


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


def test_other_threads_are_not_measured():
    model, other = tiny(), tiny()
    expected = measured_band(model, ROW)
    with ThreadPoolExecutor(1) as thread:
        hook = model.model.layers[1].register_forward_hook(
            lambda *_: thread.submit(other, ROW[None]).result() and None
        )
        again = measured_band(model, ROW)
    hook.remove()
    np.testing.assert_array_equal(again["heatmap"], expected["heatmap"])


# ------------------------------------------------------------------ both


@pytest.mark.parametrize("measure", [attention_map, measured_band, partial(perplexity, length=5)])
def test_the_model_is_restored(measure):
    def state():
        return [
            (type(module), module.training, sorted(vars(module)), list(module._forward_hooks))
            for module in model.modules()
        ]

    def broken(module, args, out):
        raise RuntimeError("broken")

    model = tiny()
    expected = copy.deepcopy(model)(ROW[None]).logits
    measure(model, ROW)  # transformers' own hooks for attention weights stay
    model.train()
    model.model.layers[0].eval()
    before = state()
    measure(model, ROW)
    hook = model.model.norm.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        measure(model, ROW)
    hook.remove()
    assert state() == before
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(model(ROW[None]).logits, expected)


@pytest.mark.parametrize(
    ("measure", "change", "error", "words"),
    [
        (attention_map, {"tokens": ROW[None]}, ValueError, r"shape \(1, 20\)"),
        (attention_map, {"model": None}, TypeError, "model must be .* got NoneType"),
        (attention_map, {"model": torch.nn.Sequential()}, ValueError,
         "Sequential gives no attention weights"),
        (measured_band, {"tokens": ROW[None]}, ValueError, r"shape \(1, 20\)"),
        (measured_band, {"tokens": ROW[:0]}, ValueError, "must hold at least one, got 0"),
        (measured_band, {"tokens": ROW.float()}, TypeError, "float32"),
        (measured_band, {"of": "value"}, ValueError, "value.*key, query"),
        (measured_band, {"model": torch.nn.Sequential()}, ValueError, "no rotary pairs"),
        (measured_band, {"model": of_kind("gpt2", **GPT)}, ValueError,
         "GPT2LMHeadModel has no rotary pairs"),
    ],
)  # fmt: skip
def test_bad_input(measure, change, error, words):
    with pytest.raises(error, match=words):
        measure(**{"model": tiny(), "tokens": ROW, **change})
