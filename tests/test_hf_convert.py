"""wavepe.hf.convert and the command: models under another encoding, from folder to folder.

The files that it copies or changes are in test_hf_convert_files.py.
"""

import errno
import json

import commands
import pytest
import torch
import transformers
import wavepe
import wavepe.hf
from cases import forget_registrations
from convert_cases import IDS, SMALL, change, load, patched, read, refused, state, stock
from hf_families import build, by_turns
from hf_model import LENGTH, close, logits, tiny, tokens
from transformers import LlamaModel
from wavepe.hf import conversion, convert
from wavepe.hf.config import UNKNOWN

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


@pytest.mark.parametrize(
    ("form", "spec"), [("tied", WAVELET), ("tied", LEARNED[0]), ("single", LEARNED[1])]
)
def test_there_and_back(form, spec, tmp_path):
    source, back = stock(tmp_path / "source", form), tmp_path / "back"
    convert(source, tmp_path / "there", spec)
    done = convert(tmp_path / "there", back, "rope")
    assert bool(done.dropped) == (spec in LEARNED)
    assert torch.equal(logits(load(back), IDS), logits(patched(source, "rope"), IDS))
    if form == "single":
        assert len(list(back.glob("*.safetensors"))) == 1
        return
    before, after = (
        {path.name: path.read_bytes() for path in folder.glob("model[-.]*")}
        for folder in (source, back)
    )
    index = "model.safetensors.index.json"
    assert json.loads(before.pop(index)) == json.loads(after.pop(index))
    assert before == after  # byte for byte


@pytest.mark.parametrize(
    ("shards", "to"), [(SMALL, "alibi"), ("1GB", "shaw:clip=2"), (SMALL, "transformer_xl")]
)
def test_what_was_learned_goes_with_its_encoding(shards, to, tmp_path):
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
    own["auto_map"] = {"AutoTokenizer": "own.Tokenizer"}  # is not code of the model
    change(source / "config.json", **own, attn_implementation="flash_attention_2")
    convert(source, tmp_path / "target", WAVELET)
    before, after = read(source / "config.json"), read(tmp_path / "target" / "config.json")
    changed = {
        "model_type": "wavepe_llama", "architectures": ["WavePELlamaForCausalLM"],
        "position_encoding": WAVELET, "attn_implementation": UNKNOWN,
        "_attn_implementation": UNKNOWN, "wavepe_version": wavepe.__version__,
    }  # fmt: skip
    assert after.pop("auto_map").items() > before.pop("auto_map").items()
    assert after == {**before, **changed}
    load(tmp_path / "target")


ROPES = {
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "as written by transformers 4": {
        "rope_parameters": None,
        "rope_theta": 300.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "torch_dtype": "bfloat16",
        "dtype": None,
    },
}  # fmt: skip


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


def test_other_forms_of_encodings_and_folders(tmp_path):
    source, before = stock(tmp_path / "source"), torch.get_rng_state()
    done = convert(source, tmp_path / "a", "wavelet", scales=[1, 2])
    assert done.encoding == "wavelet:scales=1+2"
    (tmp_path / "b").mkdir()
    done = convert(str(source), str(tmp_path / "b"), {"name": "alibi"})
    assert done.folder == tmp_path / "b"
    convert(source, tmp_path / "not" / "yet" / "there", "transformer_xl")
    assert torch.equal(torch.get_rng_state(), before)  # the caller's go on
    for folder in ("a", "b", "not/yet/there"):
        load(tmp_path / folder)
    with pytest.raises(ValueError, match="unknown option 'nosuch'"):
        convert(source, tmp_path / "c", "alibi", nosuch=1)


# ------------------------------------------------------------------ families
@by_turns(0, always=("llama", "gpt_neox", "mixtral"))
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


# ------------------------------------------------------------------ refusals


FITS = {
    "model_type": ({"model_type": "gpt2"}, r"model_type 'gpt2', needs one of llama, mistral, "),
    "no type": ({"model_type": None}, "model_type 'None'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "own code": ({"auto_map": {"AutoTokenizer": "t.T", "AutoModel": "m.M"}}, "auto_map"),
    "own name": ({"transformers_weights": "a.safetensors"}, "transformers_weights"),
    "head": ({"architectures": ["LlamaForMagic"]}, "LlamaForMagic.*LlamaForCausalLM"),
    "heads": ({"architectures": 3}, "architectures 3, needs a list"),
    "number": ({"architectures": [3]}, "is a 3, needs one of LlamaModel"),
    "code": ({"auto_map": [1]}, r"auto_map \[1\], needs a dict"),
    "shape": ({"vocab_size": 51}, r"lm_head.weight \(50, 24\) instead of \(51, 24\)"),
    "more layers": ({"num_hidden_layers": 3}, r"missing: model.layers.2.* and 5 more"),
    "fewer layers": ({"num_hidden_layers": 1}, r"unknown: model.layers.1"),
    "other head": ({"architectures": ["LlamaModel"]}, r"missing: embed_tokens.weight"),
    "nonsense": ({"hidden_size": "wide"}, "do not fit"),
}


@pytest.mark.parametrize(("changes", "match"), FITS.values(), ids=FITS)
def test_configurations_that_are_refused(changes, match, tmp_path):
    source = stock(tmp_path / "source")
    change(source / "config.json", **changes)
    refused(source, tmp_path / "target", match)


MISFITS = {
    "wavelet:scales=3": "3 scales",
    "rope:interleaved=true": "interleaved",
    "rope:partial_rotary_factor=0.5": "4 of 8 dims",
    WAVELET: "already",
    "nosuch": "unknown encoding 'nosuch'",
}


@pytest.mark.parametrize("spec", MISFITS)
def test_encodings_that_do_not_fit(spec, tmp_path):
    source = stock(tmp_path / "source")
    if spec == WAVELET:  # its own encoding
        source = convert(source, tmp_path / "a", f"{spec},kind=ricker").folder
    refused(source, tmp_path / "target", MISFITS[spec], spec)


def test_folders_that_are_refused(tmp_path):
    source, target = stock(tmp_path / "source"), tmp_path / "target"
    refused(tmp_path / "nosuch", target, r"nosuch has no config.json.*download")
    refused(source / "config.json", target, "config.json has no config.json")
    refused(source, source, "not empty")
    refused(source, source / ".." / "source", "not empty")
    refused(source, source / "config.json", "Not a directory: .*config.json", error=OSError)
    convert(source, target, "alibi")
    refused(source, target, r"target is not empty", "none")
    assert read(target / "config.json")["position_encoding"] == "alibi"
    refused(source, source / "config.json" / "inside", "config.json", error=OSError)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "adapter", tmp_path / "other", "adapter")
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", tmp_path / "other", "has no config.json")
    for text in ("{", "[]", "3", '[["model_type", "llama"]]', "[" * 100_000):
        (tmp_path / "none" / "config.json").write_text(text)
        refused(tmp_path / "none", tmp_path / "other", r"none/config.json holds no JSON object: \w")


def test_weights_that_are_refused(tmp_path):
    source, target = stock(tmp_path / "source", "sharded"), tmp_path / "target"
    index = "model.safetensors.index.json"
    first = next(source.glob("model-00001-of-*"))
    whole, listed = first.read_bytes(), (source / index).read_text()
    first.write_bytes(whole[:-1])
    refused(source, target, rf"{first.name} cannot be read .*downloaded in full\?\): .*cover")
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused(source, target, f"{first.name} cannot be read .*downloaded in full")
    first.write_bytes(b"\x02" + bytes(7) + b"[]")
    refused(source, target, f"{first.name} cannot be read as weights")
    first.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"F99"', 1))
    refused(source, target, f"{first.name} cannot be read as weights.*F99")
    first.unlink()
    refused(source, target, f"lists shards that are not beside it: {first.name}")
    first.write_bytes(whole)
    lacks = {k: v for k, v in json.loads(listed)["weight_map"].items() if v != first.name}
    change(source / index, weight_map=lacks)
    refused(source, target, "do not fit its config.json: missing: ")
    (tmp_path / "x.safetensors").write_bytes(whole)
    change(source / index, weight_map={"x": "../x.safetensors"})
    refused(source, target, r"lists shards that are not beside it: \.\./x")
    for text in ("[]", "3"):
        (source / index).write_text(text)
        refused(source, target, f"{index} holds no JSON object: got (list|int)$")
    for weight_map in (None, [], 3, {}, {"x": 3}, {"x": ["y"]}):
        (source / index).write_text(json.dumps({"weight_map": weight_map}))
        refused(source, target, f"{index} needs a weight_map from names of tensors to files$")
    (source / index).unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")  # a pickle, which convert does not read
    refused(source, target, "has no model.safetensors, .* save it by save_pretrained, and convert")
    (source / index).write_text(listed)
    convert(source, target, "alibi")


# ------------------------------------------------------------------ the command
def test_the_command_and_the_line_it_prints(tmp_path, capsys):
    source, target = stock(tmp_path / "source", "tied"), tmp_path / "target"
    code, out, err = commands.run(capsys, "convert", source, target, "shaw:clip=3")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{target}: WavePELlamaForCausalLM with shaw:clip=3",
        f"copied from {source}: 21 tensors, 0.0236 MB",
        "new parameters: model.position_encoding.table",
        "fine-tune the model: its encoding has changed",
    ]


def test_a_scaling_of_rope_needs_no_training(tmp_path, capsys):
    source = stock(tmp_path / "source", "tied")
    for number, spec in enumerate(("rope:type=yarn,factor=4", "rope:fraction=0.5")):
        _, out, _ = commands.run(capsys, "convert", source, tmp_path / str(number), spec)
        assert ("fine-tune the model" in out) == (number == 1)


def test_the_command_says_what_stays_behind(tmp_path, capsys, monkeypatch):
    forget_registrations(monkeypatch)
    source = stock(tmp_path / "source")
    (source / "model.gguf").touch()
    (source / "own.py").write_text(
        "import numpy as np, wavepe\n"
        "from wavepe.encodings import Encoding\n"
        "@wavepe.register_encoding\n"
        "class Even(Encoding):\n"
        "    name = 'even'\n"
        "    def slopes(self, heads):\n"
        "        return np.full(heads, 0.1)\n"
    )
    options = ["--link", "--import", source / "own.py"]
    code, out, err = commands.run(capsys, "convert", source, tmp_path / "target", "even", *options)
    assert (code, err) == (0, "")
    assert f"linked from {source}" in out
    assert "files left out: model.gguf\n" in out
    assert (tmp_path / "target" / "model.safetensors").samefile(source / "model.safetensors")
    load(tmp_path / "target")


def test_the_command_fails_in_one_line(tmp_path, capsys, monkeypatch):
    source, target = stock(tmp_path / "source"), tmp_path / "target"
    for argv in (
        [source],
        [source, target],
        [source, target, "nosuch"],
        [source, target, "wavelet:scales=3"],
        [source, source, "alibi"],
        [target, target, "alibi"],
        [source, target, "alibi", "--import", "nosuch.py"],
        [source, target, '{"0": "rope"'],
    ):
        commands.refused(capsys, "convert", *argv)
    monkeypatch.setattr(conversion, "_write_weights", fail_with(OSError(errno.EIO, "broken", "x")))
    code, _, err = commands.run(capsys, "convert", source, target, "alibi")
    assert (code, err) == (1, "wavepe convert: error: x: broken\n")
    monkeypatch.setattr(conversion, "_write_weights", fail_with(KeyboardInterrupt()))
    code, _, err = commands.run(capsys, "convert", source, target, "alibi")
    assert code == 130
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == [source]


def fail_with(error):
    def fail(*args):
        raise error

    return fail
