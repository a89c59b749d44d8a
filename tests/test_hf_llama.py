"""The model type wavepe_llama: configurations and checkpoints that keep their encoding."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe
import wavepe.hf
from hf_model import (
    EACH_ENTRY,
    LENGTH,
    SPECS,
    close,
    logits,
    patched_tiny,
    recompute,
    reference,
    tiny,
    tiny_config,
    tokens,
)
from processes import output
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
)
from wavepe.hf import WavePELlamaConfig, WavePELlamaForCausalLM, WavePELlamaModel

WAVELET = "wavelet:scales=4"
IDS = tokens(2, 12)


def own(spec, **options):
    """A tiny model of the type wavepe_llama."""
    config = tiny_config(WavePELlamaConfig, position_encoding=spec, **options)
    return tiny(WavePELlamaForCausalLM, config)


# --------------------------------------------------------------- the configuration


@pytest.mark.parametrize("spec", SPECS)
def test_configurations_keep_the_encoding(spec, tmp_path):
    encoding = wavepe.encoding(spec)
    for form in (spec, encoding, encoding.to_dict()):
        config = WavePELlamaConfig(position_encoding=form)
        assert config.position_encoding == str(encoding)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is WavePELlamaConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    other = AutoConfig.from_pretrained(tmp_path, position_encoding={"name": "alibi"})
    assert other.position_encoding == "alibi"


def test_wrong_encodings_are_seen_by_the_configuration():
    assert WavePELlamaConfig().position_encoding == "rope"
    with pytest.raises(ValueError, match="unknown encoding 'nosuch'"):
        WavePELlamaConfig(position_encoding="nosuch")
    config = WavePELlamaConfig()
    with pytest.raises(ValueError, match="unknown option"):
        config.position_encoding = "wavelet:nosuch=1"
    with pytest.raises(TypeError, match="spec"):
        config.position_encoding = 3
    assert config.position_encoding == "rope"


# --------------------------------------------------------------- the models


@pytest.mark.parametrize("spec", SPECS)
def test_logits_equal_the_written_out_model(spec):
    model, ids = own(spec), tokens(1, 3 * LENGTH)
    assert close(logits(model, ids)[0], reference(model, ids[0], spec)[0])
    assert torch.equal(logits(model, ids), logits(patched_tiny(spec), ids))


def test_first_weights_depend_on_the_seed_alone():
    states = []
    for spec in EACH_ENTRY:
        torch.manual_seed(3)
        config = tiny_config(WavePELlamaConfig, position_encoding=spec)
        states.append(WavePELlamaForCausalLM(config).state_dict())
    torch.manual_seed(3)
    states.append(LlamaForCausalLM(tiny_config()).state_dict())
    for state in states:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.parametrize("spec", SPECS)
def test_a_checkpoint_keeps_its_encoding(spec, tmp_path):
    model = own(spec)
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path)
    for auto in (WavePELlamaForCausalLM, AutoModelForCausalLM):
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is WavePELlamaForCausalLM
        assert not any(report.values())
        assert torch.equal(logits(loaded, IDS), wanted)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is WavePELlamaModel
    with torch.no_grad():
        hidden = base(IDS).last_hidden_state
        assert torch.equal(model.lm_head(hidden), wanted)


def test_another_process_fails_without_the_import(tmp_path):
    own(WAVELET).save_pretrained(tmp_path)
    script = """
import sys, transformers
for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
    try:
        cls.from_pretrained(sys.argv[1])
    except ValueError as error:
        print(error)
import wavepe.hf
print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    out = output("-c", script, tmp_path)
    assert "wavepe_llama" in out
    assert "import wavepe.hf, and load with AutoModelForCausalLM" in out
    assert out.endswith("WavePELlamaForCausalLM\n")


@pytest.mark.parametrize("spec", ["rope:theta=20,inference_theta=300", WAVELET, "none"])
def test_a_checkpoint_under_another_encoding(spec, tmp_path):
    own("rope:theta=20").save_pretrained(tmp_path)
    wanted = logits(own(spec), IDS)
    loaded = WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding=spec)
    assert torch.equal(logits(loaded, IDS), wanted)
    config = AutoConfig.from_pretrained(tmp_path)
    config.position_encoding = spec
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(logits(loaded, IDS), wanted)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.position_encoding == spec
    assert torch.equal(logits(again, IDS), wanted)


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_a_stock_checkpoint_read_with_an_encoding(spec, tmp_path):
    tiny().save_pretrained(tmp_path)
    loaded = WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding=spec)
    assert torch.equal(logits(loaded, IDS), logits(patched_tiny(spec), IDS))
    config = WavePELlamaConfig.from_pretrained(tmp_path, position_encoding=spec)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(logits(loaded, IDS), logits(patched_tiny(spec), IDS))


def test_a_stock_checkpoint_read_without_an_encoding_stays_what_it_is(tmp_path):
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model.save_pretrained(tmp_path)
    loaded = WavePELlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.position_encoding == "rope"
    assert close(logits(loaded, IDS), logits(model, IDS), 1e-5)


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_bfloat16_checkpoints(spec, tmp_path):
    model = own(spec).bfloat16()
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded, IDS), wanted)


@pytest.mark.parametrize("spec", SPECS)
def test_a_patched_stock_model_is_saved_with_its_encoding(spec, tmp_path):
    model = patched_tiny(spec)
    wanted = logits(model, IDS)
    assert model.config.model_type == "llama"
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "wavepe_llama"
    assert stored["architectures"] == ["WavePELlamaForCausalLM"]
    assert stored["position_encoding"] == str(wavepe.encoding(spec))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is WavePELlamaForCausalLM
    assert torch.equal(logits(loaded, IDS), wanted)
    assert torch.equal(logits(model, IDS), wanted)
    wavepe.hf.unpatch(model).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "llama"
    assert "position_encoding" not in stored


def test_other_heads(tmp_path):
    model = tiny(LlamaForSequenceClassification, num_labels=3)
    wanted = wavepe.hf.patch(model, WAVELET)(IDS).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is wavepe.hf.WavePELlamaForSequenceClassification
    assert torch.equal(loaded(IDS).logits, wanted)
    assert loaded.config is loaded.model.config
    base = wavepe.hf.patch(tiny(LlamaModel), WAVELET)
    base.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_models_that_share_a_configuration():
    config = tiny_config(WavePELlamaConfig, position_encoding=WAVELET)
    first, second = (tiny(WavePELlamaForCausalLM, config) for _ in range(2))
    assert torch.equal(logits(first, IDS), logits(second, IDS))


def test_training_from_a_checkpoint_moves_on(tmp_path):
    model = own(WAVELET).train()
    recompute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


# --------------------------------------------------------------- refusals


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_is_refused(other, tmp_path):
    model = own(WAVELET)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"got '{other}'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=other)
    with pytest.raises(ValueError, match=f"got '{other}'"):
        model.set_attn_implementation(other)
    model(IDS)
    model.config._attn_implementation = other
    with pytest.raises(ValueError, match=f"got '{other}'"):
        model(IDS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="wavepe")
    assert close(logits(loaded, IDS)[0], reference(loaded, IDS[0], WAVELET)[0])


def test_a_spec_changed_on_a_live_model_raises(tmp_path):
    model = own("rope:theta=20")
    model.config.position_encoding = "rope:theta=300"
    with pytest.raises(ValueError, match="no effect"):
        model(IDS)


def test_it_is_neither_patched_nor_unpatched():
    model = own(WAVELET)
    with pytest.raises(ValueError, match="from_pretrained"):
        wavepe.hf.patch(model, "alibi")
    with pytest.raises(ValueError, match="it was not patched"):
        wavepe.hf.unpatch(model)


@pytest.mark.parametrize("spec", ["wavelet:scales=3", "rope:interleaved=true"])
def test_encodings_that_do_not_fit(spec, tmp_path):
    config = tiny_config(WavePELlamaConfig, position_encoding=spec)
    with pytest.raises(ValueError, match=r"3 scales|interleaved"):
        WavePELlamaForCausalLM(config)


def test_what_would_be_another_model_without_a_word(tmp_path):
    for wrong in ("positional_encoding", "pos_encoding", "position_encodings"):
        with pytest.raises(TypeError, match=f"'{wrong}', did you mean 'position_encoding'"):
            tiny_config(WavePELlamaConfig, **{wrong: "alibi"})
    tiny_config(WavePELlamaConfig, position_embedding_type="absolute")  # old files have it
    tiny_config(MistralConfig).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of a llama or a wavepe_llama, got model_type 'mistral'"):
        WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding="alibi")


def test_files_of_any_transformers(tmp_path):
    """Of a bare "rope" the base, as transformers 5 writes it and as those before did."""
    own("rope").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        stored.pop(key, None)
    linear, doubled = {"rope_type": "linear", "factor": 2.0}, "rope:theta=500,type=linear,factor=2"
    for form, spec in (
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope:theta=500"),
        ({"rope_theta": 500.0, "rope_scaling": None}, "rope:theta=500"),
        (
            {"rope_parameters": {**linear, "rope_theta": 500.0}},
            "rope:theta=500,type=linear,factor=2",
        ),
        ({"rope_theta": 500.0, "rope_scaling": linear}, doubled),
    ):
        file.write_text(json.dumps(stored | form))
        wanted = logits(own(spec), IDS)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), wanted)


def test_stock_classes_refuse_configuration_and_checkpoint(tmp_path):
    config = tiny_config(WavePELlamaConfig, position_encoding=WAVELET)
    with pytest.raises(ValueError, match=WAVELET):
        LlamaForCausalLM(config)(IDS)
    own(WAVELET).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"import wavepe\.hf, and load with AutoModelForCausalLM"):
        LlamaForCausalLM.from_pretrained(tmp_path)
