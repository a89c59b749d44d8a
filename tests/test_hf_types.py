"""The model types wavepe_<family>: every family saves and loads its position encoding."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import wavepe.hf
from hf_families import FAMILIES, build, stirred
from hf_model import close, logits, pickled, tokens
from processes import output
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from wavepe.hf.config import CONFIGS, MODELS
from wavepe.hf.families import SUPPORTED, decoder
from wavepe.hf.model_types import KINDS
from wavepe.hf.rope_config import TRANSFORMERS_5

IDS = tokens(2, 12)
SPECS = ("wavelet:scales=4,learned=true", "rope:theta=30", {"1": "alibi"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_patched_model_comes_back_from_a_folder(family, spec, tmp_path):
    model = stirred(wavepe.hf.patch(build(family), spec))
    kind = f"wavepe_{FAMILIES[family].model_type}"
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is MODELS["WavePE" + type(model).__name__]
    assert type(loaded.config) is CONFIGS[kind]
    assert loaded.config.position_encoding == model.config.position_encoding
    assert torch.equal(logits(loaded, IDS), wanted)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits(again, IDS), wanted)
    assert torch.equal(logits(copy.deepcopy(loaded), IDS), wanted)
    assert torch.equal(logits(pickled(loaded), IDS), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_folder_read_with_an_encoding(family, tmp_path):
    stock = build(family)
    stock.save_pretrained(tmp_path)
    own = MODELS["WavePE" + type(stock).__name__]
    loaded = own.from_pretrained(tmp_path, position_encoding="alibi").eval()
    assert torch.equal(logits(loaded, IDS), logits(wavepe.hf.patch(stock, "alibi"), IDS))
    again = own.from_pretrained(tmp_path).eval()  # a bare rope
    assert close(logits(again, IDS), logits(wavepe.hf.unpatch(stock), IDS), 1e-5)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(stock)


@pytest.mark.parametrize("family", SUPPORTED)
def test_stock_classes_refuse_the_folder(family, tmp_path):
    model = build(family)
    wavepe.hf.patch(model, "wavelet:scales=4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"import wavepe\.hf, and load with AutoModelForCausalLM"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_head_of_transformers_has_its_type(family, tmp_path):
    config = copy.deepcopy(build(family).config)
    for auto, classes in KINDS:
        if type(config) not in classes:
            continue
        model = auto.from_config(config)
        wavepe.hf.patch(model, "alibi").save_pretrained(tmp_path)
        loaded, left = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is MODELS["WavePE" + type(model).__name__]
        assert not any(left["missing_keys"])
        assert type(loaded).__name__ in wavepe.hf.__all__
        assert getattr(wavepe.hf, type(loaded).__name__) is type(loaded)
    base = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert base.config.model_type == f"wavepe_{family}"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_learned_parameters_stay_in_float32(family, tmp_path):
    model = stirred(wavepe.hf.patch(build(family), "shaw:clip=3"))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(
        decoder(loaded).position_encoding.table, decoder(model).position_encoding.table
    )


def test_a_configuration_of_another_family_is_refused(tmp_path):
    build("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="read from the files of a mistral or a wavepe_mistral"):
        wavepe.hf.WavePEMistralConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt_neox"])
def test_files_of_either_transformers(family, tmp_path):
    """Here rope parameters as transformers 5 writes them are read, by either version."""
    options = {"rotary_pct": 0.5} if family == "gpt_neox" else {}  # not its default
    model = wavepe.hf.patch(build(family, **options), "rope")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if "rope_parameters" not in config:
        config.pop("rope_scaling")
        base, share = "rope_theta", "partial_rotary_factor"
        if family == "gpt_neox":
            base, share = "rotary_emb_base", "rotary_pct"
        given = {"rope_type": "default", "rope_theta": config.pop(base)}
        if family in ("phi3", "gpt_neox"):
            given["partial_rotary_factor"] = config.pop(share)
        if family == "gemma3_text":
            local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
            given = {"full_attention": given, "sliding_attention": local}
        path.write_text(json.dumps({**config, "rope_parameters": given}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


EXPERTS = """
import transformers, wavepe.hf
sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
for make in (wavepe.hf.WavePEMixtralForCausalLM, transformers.MixtralForCausalLM):
    config = make.config_class(**sizes, **heads)
    print(make(config).config._experts_implementation)
"""


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has one way")
def test_the_experts_are_computed_as_in_the_family():
    """transformers asks the class, and remembers the answer of a stock one for those derived."""
    own, stock = output("-c", EXPERTS).split()
    assert own == stock != "eager"


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "rope"])
def test_output_attentions_in_the_configuration(spec, tmp_path):
    patched = wavepe.hf.patch(build("mistral"), spec)
    wanted = patched(IDS, output_attentions=True).attentions
    patched.config.output_attentions = True
    patched.save_pretrained(tmp_path)
    for model in (patched, AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        model.config.output_attentions = True
        got = model(IDS).attentions
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    wavepe.hf.unpatch(patched).save_pretrained(tmp_path)  # sdpa again, which gives no weights


def test_labels_that_are_shifted_already(tmp_path):
    """transformers passes arguments of the loss to the attention too."""
    wavepe.hf.patch(build("llama"), "wavelet:scales=4").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    shifted = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:].contiguous()
    got = model(IDS, labels=IDS, shift_labels=shifted).loss
    assert torch.equal(got, model(IDS, labels=IDS).loss)
