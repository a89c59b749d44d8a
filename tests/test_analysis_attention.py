"""wavepe.analysis.attention_map against eager attention and against the model in float64."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_families
import wavepe.hf
from encoding_cases import LEARNED
from hf_model import SPECS, close, patched_tiny, reference, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from wavepe.analysis import attention_map, attention_window

ROW = tokens(1, 20)[0]  # more than a head's dims, so that the identity comes in pieces


def told(model):
    """Return the weights of eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ROW[None], use_cache=False, output_attentions=True).attentions
    return np.stack([layer[0].numpy() for layer in weights])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_stock_models(name, implementation):
    """Windows, soft caps, grouped queries and several rotations among them."""
    model = hf_families.build(name)
    if implementation == "sdpa" and hf_families.FAMILIES[name].cap is not None:
        pytest.skip("transformers 5 refuses sdpa with a soft cap, transformers 4 ignores the cap")
    expected = told(copy.deepcopy(model))
    model.set_attn_implementation(implementation)
    np.testing.assert_allclose(attention_map(model, ROW), expected, atol=2e-6)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "gptj"])
def test_models_without_rotation_or_without_the_interface(kind):
    config = AutoConfig.for_model(
        kind, vocab_size=50, n_embd=32, hidden_size=32, n_layer=2, n_head=4, n_positions=32,
        rotary_dim=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = tiny(AutoModelForCausalLM.from_config, config)
    np.testing.assert_allclose(attention_map(model, ROW), told(copy.deepcopy(model)), atol=2e-6)


def test_sinks_take_their_share():
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=50, hidden_size=24, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, sliding_window=6, max_position_embeddings=4096 * 32,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    found = attention_map(model, ROW)
    np.testing.assert_allclose(found, told(model), atol=2e-6)
    assert found.sum(axis=-1).max() < 1


@pytest.mark.parametrize("spec", [*SPECS, *LEARNED])
def test_every_encoding_against_the_oracle(spec):
    """Also those whose attention is one kernel, which does not return weights."""
    model = hf_families.stirred(patched_tiny(spec))
    found = attention_map(model, ROW)
    _, expected = reference(model, ROW, spec)
    assert close(found, expected)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(found, 1).any()


def test_own_types_and_other_dtypes():
    model = patched_tiny("alibi")
    expected = attention_map(model, ROW)
    double = attention_map(model.double(), ROW)
    assert (expected.dtype, double.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(double, expected, atol=1e-5)
    half = attention_map(model.to(torch.bfloat16), ROW)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, expected, atol=0.05)


def test_the_model_is_restored():
    model = tiny()
    model.train()
    before = [(module.training, sorted(vars(module))) for module in model.modules()]
    attention_map(model, ROW)
    model.model.norm.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        attention_map(model, ROW)
    model.model.norm._forward_hooks.clear()
    assert [(module.training, sorted(vars(module))) for module in model.modules()] == before


def broken(module, args, out):
    raise RuntimeError("broken")


def test_a_layer_with_a_forward_of_its_own_is_refused():
    model = tiny()
    model.model.layers[1].self_attn.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="LlamaAttention has its own forward"):
        attention_map(model, ROW)
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_hooks_of_accelerate_stay():
    """The hooks call the forward that they replace."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny()
    expected = attention_map(model, ROW)
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.self_attn, hooks.ModelHook())
    kept = [vars(layer.self_attn)["forward"] for layer in model.model.layers]
    np.testing.assert_array_equal(attention_map(model, ROW), expected)
    assert [vars(layer.self_attn)["forward"] for layer in model.model.layers] == kept


def test_compiled_models():
    model = tiny()
    expected = attention_map(model, ROW)
    np.testing.assert_array_equal(
        attention_map(torch.compile(model, backend="eager"), ROW), expected
    )


@pytest.mark.parametrize(
    ("model", "given", "error", "words"),
    [
        (tiny, ROW[None], ValueError, r"shape \(1, 20\)"),
        (tiny, list(ROW), TypeError, "tokens must be .* got list"),
        (tiny, ROW * 50, ValueError, "0..49"),
        (lambda: None, ROW, TypeError, "model must be .* got NoneType"),
        (torch.nn.Sequential, ROW, ValueError, "Sequential gives no attention weights"),
    ],
)
def test_bad_input(model, given, error, words):
    with pytest.raises(error, match=words):
        attention_map(model(), given)


def test_a_model_that_looks_ahead_is_refused():
    config = AutoConfig.for_model(
        "bert", vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    eager = {"attn_implementation": "eager"}
    # Of transformers 4, it gives none.
    with pytest.raises(ValueError, match=r"attends to later tokens|gives no attention weights"):
        attention_map(AutoModelForMaskedLM.from_config(config, **eager), ROW)


# ------------------------------------------------------------------ windows


def window_by_hand(weights, threshold):
    found = 0
    for delta in range(len(weights)):
        seen = [weights[query][query - delta] for query in range(delta, len(weights))]
        if sum(seen) / len(seen) >= threshold:
            found = delta + 1
    return found


@pytest.mark.parametrize("threshold", [1e-3, 0.03, 0.1, 0.5])
def test_windows_by_hand(threshold):
    weights = attention_map(patched_tiny("alibi"), ROW)
    expected = [[window_by_hand(head.astype(float), threshold) for head in row] for row in weights]
    found = attention_window(weights, threshold)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int64


def test_windows_of_plain_matrices():
    assert attention_window(np.eye(5)) == 1
    assert attention_window(np.zeros((5, 5))) == 0
    assert attention_window([[1.0, 0], [0.25, 0.75]], threshold=0.25) == 2
    hole = np.eye(6) + np.eye(6, k=-4)  # nothing in between
    assert attention_window(hole) == 5


def test_windows_of_a_model_are_its_own():
    """A Mistral sees its sliding window, and no more."""
    model = hf_families.build("mistral")
    windows = attention_window(attention_map(model, ROW), 1e-9)
    np.testing.assert_array_equal(windows, np.full((2, 4), hf_families.WINDOW))


@pytest.mark.parametrize(
    ("given", "threshold", "error", "words"),
    [
        (np.zeros((3, 4)), 0.1, ValueError, r"shape \(3, 4\)"),
        (np.zeros(3), 0.1, ValueError, r"shape \(3,\)"),
        (np.zeros((2, 0, 0)), 0.1, ValueError, "n at least 1"),
        ([["x"]], 0.1, TypeError, "map must hold real numbers"),
        (np.eye(3), "much", TypeError, "threshold must be a number"),
        (np.eye(3), np.nan, ValueError, "threshold must be finite"),
    ],
)
def test_bad_windows(given, threshold, error, words):
    with pytest.raises(error, match=words):
        attention_window(given, threshold)


def test_heads_of_alibi_look_back_by_their_slopes():
    """The pictures of [W] show this."""
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding="alibi", vocab_size=50, hidden_size=32, intermediate_size=40,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = wavepe.hf.WavePELlamaForCausalLM(config)
    windows = attention_window(attention_map(model, tokens(1, 60)[0]), 0.01)[0]
    assert sorted(windows) == list(windows)
    assert windows[0] < windows[-1]
