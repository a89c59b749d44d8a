"""wavepe.hf.convert: Llamas under another position encoding, from folder to folder."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import wavepe
import wavepe.hf
from convert_cases import IDS, SMALL, change, load, patched, read, refused, state, stock
from hf_families import build
from hf_model import LENGTH, close, logits, tiny, tokens
from transformers import LlamaModel
from wavepe.hf import convert
from wavepe.hf.config import UNKNOWN
from wavepe.hf.families import SUPPORTED
from wavepe.hf.rope_config import TRANSFORMERS_5

WAVELET = "wavelet:scales=4"
LEARNED = ("shaw:clip=3", "transformer_xl", "wavelet:scales=4,learned=true")
SPECS = (WAVELET, "alibi", "none", "rope", "rope:theta=100", "sinusoidal", *LEARNED)

HEADS = {
    "LlamaModel": "AutoModel",
    "LlamaForSequenceClassification": "AutoModelForSequenceClassification",
    "LlamaForTokenClassification": "AutoModelForTokenClassification",
    "LlamaForQuestionAnswering": "AutoModelForQuestionAnswering",
}


# ------------------------------------------------------------------ models


@pytest.mark.parametrize(
    ("form", "spec"),
    [*(("tied", spec) for spec in SPECS), *(("single", spec) for spec in SPECS[::3])],
)
def test_it_is_the_patched_model_bit_for_bit(form, spec, tmp_path):
    source, target = stock(tmp_path / "source", form), tmp_path / "target"
    done = convert(source, target, spec)
    model, wanted = load(target), patched(source, spec)
    assert type(model) is wavepe.hf.WavePELlamaForCausalLM
    assert model.dtype == wanted.dtype
    assert model.config.position_encoding == done.encoding == str(wavepe.encoding(spec))
    for ids in (IDS, tokens(1, 3 * LENGTH)):
        assert torch.equal(logits(model, ids), logits(wanted, ids))
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == (form == "tied")
    kept = state(target)
    assert ("lm_head.weight" in kept) == (form != "tied")
    assert len(kept) == done.tensors
    assert sum(x.nbytes for x in kept.values()) == done.bytes
    added = [name for name in kept if "position_encoding" in name]
    assert sorted(done.added) == sorted(added)
    assert bool(added) == (spec in LEARNED)
    assert all(kept[name].dtype == torch.float32 for name in added)
    assert all(torch.equal(kept[name], x) for name, x in state(source).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("form", ["single", "tied"])
@pytest.mark.parametrize("spec", [WAVELET, *LEARNED[:2]])
def test_there_and_back(spec, form, tmp_path):
    source, back = stock(tmp_path / "source", form), tmp_path / "back"
    convert(source, tmp_path / "there", spec)
    done = convert(tmp_path / "there", back, "rope")
    assert bool(done.dropped) == (spec in LEARNED)
    assert torch.equal(logits(load(back), IDS), logits(patched(source, "rope"), IDS))
    if form == "single":
        assert len(list(back.glob("*.safetensors"))) == 1
        return
    before, after = (
        {path.name: path.read_bytes() for path in folder.glob("model*")}
        for folder in (source, back)
    )
    index = "model.safetensors.index.json"
    assert json.loads(before.pop(index)) == json.loads(after.pop(index))
    assert before == after  # byte for byte


@pytest.mark.parametrize("shards", [SMALL, "1GB"])
@pytest.mark.parametrize("to", ["alibi", "shaw:clip=2", "transformer_xl"])
def test_what_was_learned_goes_with_its_encoding(to, shards, tmp_path):
    model = wavepe.hf.patch(tiny().bfloat16(), "shaw:clip=3")
    torch.nn.init.normal_(model.model.position_encoding.table)
    model.save_pretrained(tmp_path / "trained", max_shard_size=shards)
    done = convert(tmp_path / "trained", tmp_path / "target", to)
    assert done.dropped == ("model.position_encoding.table",)
    wanted = wavepe.hf.patch(wavepe.hf.unpatch(model), to)
    assert torch.equal(logits(load(tmp_path / "target"), IDS), logits(wanted, IDS))
    kept = state(tmp_path / "target")
    index = tmp_path / "target" / "model.safetensors.index.json"
    if index.exists():
        listed = read(index)
        assert set(listed["weight_map"]) == set(kept)
        assert listed["metadata"]["total_size"] == sum(x.nbytes for x in kept.values())


@pytest.mark.parametrize("head", HEADS)
def test_other_heads(head, tmp_path):
    model = tiny(getattr(transformers, head))
    model.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "target", "shaw:clip=3")
    loaded = load(tmp_path / "target", getattr(transformers, HEADS[head]))
    assert done.model == type(loaded).__name__ == f"WavePE{head}"
    with torch.no_grad():
        got, wanted = loaded(IDS), wavepe.hf.patch(model, "shaw:clip=3")(IDS)
    assert torch.equal(got[0], wanted[0])


def test_a_checkpoint_that_names_no_class(tmp_path):
    source = stock(tmp_path / "source")
    change(source / "config.json", architectures=None)
    assert convert(source, tmp_path / "a", "alibi").model == "WavePELlamaForCausalLM"
    base = tmp_path / "base"
    tiny(LlamaModel).save_pretrained(base)
    change(base / "config.json", architectures=None)
    refused(base, tmp_path / "b", "missing: lm_head.weight, .* unknown: embed_tokens.weight")


# ------------------------------------------------------------------ configurations


def test_the_configuration_keeps_all_but_what_it_must_change(tmp_path):
    source = stock(tmp_path / "source", "sharded")
    own = {"foo": {"bar": [1, 2.5, None]}, "rms_norm_eps": 1e-05, "_attn_implementation": "sdpa"}
    change(source / "config.json", **own, attn_implementation="flash_attention_2")
    convert(source, tmp_path / "target", WAVELET)
    before, after = read(source / "config.json"), read(tmp_path / "target" / "config.json")
    changed = {
        "model_type": "wavepe_llama",
        "architectures": ["WavePELlamaForCausalLM"],
        "position_encoding": WAVELET,
        "attn_implementation": UNKNOWN,
        "_attn_implementation": UNKNOWN,
    }
    assert after == {**before, **changed}
    load(tmp_path / "target")


ROPES = {
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "as written by transformers 4": {
        "rope_parameters": None,
        "rope_theta": 300.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "torch_dtype": "bfloat16",
        "dtype": None,
    },
}


@pytest.mark.skipif(not TRANSFORMERS_5, reason="a stock Llama does not read rope_parameters there")
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_bare_rope_keeps_base_and_scaling(rope, tmp_path):
    source = stock(tmp_path / "source", "tied")
    change(source / "config.json", **rope)
    convert(source, tmp_path / "alibi", "alibi")
    convert(source, tmp_path / "a", "rope")
    convert(tmp_path / "alibi", tmp_path / "b", "rope")
    wanted = logits(patched(source, "rope"), IDS)
    assert not torch.equal(wanted, logits(patched(source, "rope:theta=10000"), IDS))
    for name in "ab":
        assert torch.equal(logits(load(tmp_path / name), IDS), wanted)
        stored = read(tmp_path / name / "config.json")
        assert all(stored.get(key) == value for key, value in rope.items())
        assert stored["position_encoding"] == "rope"


def test_options_and_other_forms_of_an_encoding(tmp_path):
    source = stock(tmp_path / "source")
    done = convert(source, tmp_path / "a", "wavelet", scales=[1, 2])
    assert done.encoding == "wavelet:scales=1+2"
    done = convert(str(source), str(tmp_path / "b"), {"name": "alibi"})
    assert done.folder == tmp_path / "b"
    with pytest.raises(ValueError, match="unknown encoding 'nosuch'"):
        convert(source, tmp_path / "c", "nosuch")
    with pytest.raises(ValueError, match="unknown option 'nosuch'"):
        convert(source, tmp_path / "c", "alibi", nosuch=1)


# ------------------------------------------------------------------ families


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "target", "shaw:clip=3")
    assert done.model == "WavePE" + type(model).__name__
    wanted = logits(wavepe.hf.patch(model, "shaw:clip=3"), IDS)
    assert torch.equal(logits(load(tmp_path / "target"), IDS), wanted)
    convert(tmp_path / "target", tmp_path / "back", "rope")
    stock = logits(wavepe.hf.unpatch(model), IDS)
    assert close(logits(load(tmp_path / "back"), IDS), stock, 1e-5)
