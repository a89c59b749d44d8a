"""Errors of wavepe.hf.convert before it writes any file, and `wavepe convert`."""

import errno
import json
import os

import pytest
from cases import forget_registrations

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from convert_cases import change, load, read, refused, stock
from processes import python
from wavepe.cli import main
from wavepe.hf import conversion, convert

# ------------------------------------------------------------------ refusals


FITS = {
    "model_type": ({"model_type": "gpt2"}, r"model_type 'gpt2', needs one of llama, mistral, "),
    "no type": ({"model_type": None}, "model_type 'None'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map"),
    "own name": ({"transformers_weights": "a.safetensors"}, "transformers_weights"),
    "head": ({"architectures": ["LlamaForMagic"]}, "LlamaForMagic.*LlamaForCausalLM"),
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
}


@pytest.mark.parametrize("spec", MISFITS)
def test_encodings_that_do_not_fit(spec, tmp_path):
    refused(stock(tmp_path / "source"), tmp_path / "target", MISFITS[spec], spec)


def test_its_own_encoding_is_no_conversion(tmp_path):
    source = stock(tmp_path / "source")
    convert(source, tmp_path / "a", "wavelet:scales=4,kind=ricker")
    refused(tmp_path / "a", tmp_path / "b", "already", "wavelet:scales=4")


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
    (tmp_path / "none" / "config.json").write_text("{")
    refused(tmp_path / "none", tmp_path / "other", "config.json holds no JSON object")
    (tmp_path / "none" / "config.json").write_text("[]")
    refused(tmp_path / "none", tmp_path / "other", "model_type 'None'")


def test_an_empty_folder_is_filled(tmp_path):
    source = stock(tmp_path / "source")
    (tmp_path / "target").mkdir()
    convert(source, tmp_path / "target", "alibi")
    load(tmp_path / "target")
    convert(source, tmp_path / "not" / "yet" / "there", "alibi")
    load(tmp_path / "not" / "yet" / "there")


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
    (source / index).write_text("{}")
    refused(source, target, "do not fit its config.json: missing: ")
    (source / index).unlink()
    refused(source, target, "has no weights: needs model.safetensors or pytorch_model.bin")
    (source / "pytorch_model.bin").write_bytes(b"x")
    refused(source, target, "pytorch_model.bin cannot be read as weights")
    torch.save({"model": {}}, source / "pytorch_model.bin")
    refused(source, target, "do not fit its config.json: missing: .*; unknown: model")
    torch.save({"model": RunsCode()}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"cannot be read as weights.*posix\.system") as caught:
        convert(source, target, "alibi")
    assert "weights_only" not in str(caught.value)
    (source / index).write_text(listed)
    convert(source, target, "alibi")


class RunsCode:
    """The object in a malicious file: its pickle calls a function when it is read."""

    def __reduce__(self):
        return os.system, ("exit 1",)


# ------------------------------------------------------------------ the command


def run(capsys, *argv):
    capsys.readouterr()
    code = main(["convert", *map(str, argv)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_and_the_line_it_prints(tmp_path, capsys):
    source, target = stock(tmp_path / "source", "tied"), tmp_path / "target"
    code, out, err = run(capsys, source, target, "shaw:clip=3")
    assert (code, err) == (0, "")
    *facts, last = out.splitlines()
    assert facts == [
        f"{target}: WavePELlamaForCausalLM with shaw:clip=3",
        f"copied from {source}: 21 tensors, 23.6 kB",
        "new parameters: model.position_encoding.table",
        "a model whose encoding has changed must be trained on",
        "to load it in Python:",
    ]
    script = f"{last.strip()}\nprint(type(model).__name__, model.config.position_encoding)"
    done = python("-c", script)
    assert done.stdout == "WavePELlamaForCausalLM shaw:clip=3\n", done.stderr


def test_the_command_says_what_stays_behind(tmp_path, capsys, monkeypatch):
    forget_registrations(monkeypatch)
    source = stock(tmp_path / "source")
    (source / "model.gguf").touch()
    (source / "own.py").write_text(
        "import dataclasses, numpy as np, wavepe\n"
        "from wavepe.encodings import Encoding\n"
        "@wavepe.register_encoding\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Even(Encoding):\n"
        "    name, entry = 'even', 'slope'\n"
        "    def slopes(self, heads):\n"
        "        return np.full(heads, 0.1)\n"
    )
    options = ["--link", "--import", source / "own.py"]
    code, out, err = run(capsys, source, tmp_path / "target", "even", *options)
    assert (code, err) == (0, "")
    assert f"linked from {source}" in out
    assert "files left out: model.gguf\n" in out
    assert "after importing the module of --import" in out
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
        [source, target, '{"0": "rope", "0": "none"}'],
    ):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "")
        assert err.startswith("wavepe convert: error: ") or "--help" in err
        assert err.count("\n") == 1
    monkeypatch.setattr(conversion, "_write_weights", fail_with(OSError(errno.EIO, "broken", "x")))
    code, _, err = run(capsys, source, target, "alibi")
    assert (code, err) == (1, "wavepe convert: error: x: broken\n")
    monkeypatch.setattr(conversion, "_write_weights", fail_with(KeyboardInterrupt()))
    code, _, err = run(capsys, source, target, "alibi")
    assert code == 130
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == [source]


def fail_with(error):
    def fail(*args):
        raise error

    return fail
