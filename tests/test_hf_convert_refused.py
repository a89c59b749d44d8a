"""What wavepe.hf.convert refuses before it writes anything, and `wavepe convert`."""

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
    "model_type": ({"model_type": "qwen3"}, r"model_type 'qwen3'.*llama, wavepe_llama"),
    "no type": ({"model_type": None}, "model_type None"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map"),
    "own name": ({"transformers_weights": "a.safetensors"}, "transformers_weights"),
    "head": ({"architectures": ["LlamaForMagic"]}, "LlamaForMagic.*LlamaForCausalLM"),
    "shape": ({"vocab_size": 51}, r"lm_head.weight \(50, 24\) instead of \(51, 24\)"),
    "more layers": ({"num_hidden_layers": 3}, r"missing: model.layers.2.* and 5 more"),
    "fewer layers": ({"num_hidden_layers": 1}, r"unknown: model.layers.1"),
    "other head": ({"architectures": ["LlamaModel"]}, r"missing: embed_tokens.weight"),
    "architectures": ({"architectures": {"a": 1}}, "architectures must be a list, got dict"),
    "auto_map": ({"auto_map": 5}, "auto_map must be a dict, got int"),
    "too many layers": ({"num_hidden_layers": 10**9}, "1000000000 layers, and 21 tensors"),
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
    refused(tmp_path / "nosuch", target, r"nosuch does not exist \(download")
    refused(source / "config.json", target, "config.json is a file")
    refused(source, source, "same folder")
    refused(source, source / ".." / "source", "same folder")
    refused(source, source / "config.json", "config.json is a file")
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
    refused(tmp_path / "none", tmp_path / "other", "is no JSON")
    (tmp_path / "none" / "config.json").write_text("[]")
    refused(tmp_path / "none", tmp_path / "other", "object, got list")


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
    refused(
        source, target, f"{first.name} is no safetensors file of {len(whole) - 1} bytes: .*cover"
    )
    first.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused(source, target, "downloaded in full")
    first.write_bytes(b"\x02" + bytes(7) + b"[]")
    refused(source, target, "is no safetensors file")
    first.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"F99"', 1))
    refused(source, target, "is no safetensors file.*F99")
    first.unlink()
    refused(source, target, f"lists shards that are not there: {first.name}")
    first.write_bytes(whole)
    change(source / index, weight_map={**json.loads(listed)["weight_map"], "x": first.name})
    refused(source, target, "lists tensors that its shards lack: x")
    change(source / index, weight_map={"x": "../x.safetensors"})
    refused(source, target, "files beside it")
    (source / index).unlink()
    refused(source, target, "has no weights: needs model.safetensors or pytorch_model.bin")
    (source / "pytorch_model.bin").write_bytes(b"x")
    refused(source, target, "cannot be read as weights")
    torch.save({"model": {}}, source / "pytorch_model.bin")
    refused(source, target, "other things")
    torch.save({"model": RunsCode()}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"other things than tensors.*posix\.system") as caught:
        convert(source, target, "alibi")
    assert "weights_only" not in str(caught.value)
    (source / index).write_text(listed)
    convert(source, target, "alibi")


class RunsCode:
    """What a malicious file holds: its pickle calls a function when it is read."""

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
        "load it in Python:",
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
    assert "where that module registers" in out
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
    monkeypatch.setattr(conversion, "_check_written", lambda *args: 1 / 0)
    monkeypatch.setattr(conversion, "_write", fail_with(RuntimeError("changed")))
    assert run(capsys, source, target, "alibi") == (1, "", "wavepe convert: error: changed\n")
    monkeypatch.setattr(conversion, "_write", fail_with(KeyboardInterrupt()))
    code, _, err = run(capsys, source, target, "alibi")
    assert code == 130
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == [source]


def fail_with(error):
    def fail(*args):
        raise error

    return fail
