"""The folder of `wavepe compare`: whose it is, what it is called, and what is found in it."""

import json
import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import safetensors.torch
import torch
import wavepe
from cases import forget_registrations
from compare_cases import arguments, figures, one_line, results, text_in
from wavepe.cli import main
from wavepe.cli.compare import folder as run_folder
from wavepe.cli.compare import training
from wavepe.cli.compare.data import load_text
from wavepe.encodings import Encoding


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_in(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The folder of one uninterrupted comparison."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(arguments(text, out, specs=["none", "rope"])) == 0
    return out


@pytest.fixture
def lin(monkeypatch):
    """Register "lin", whose specs differ by a sign, and wavelets with names without ASCII."""
    forget_registrations(monkeypatch)

    @wavepe.register_encoding
    @dataclass(frozen=True)
    class Lin(Encoding):
        name, entry = "lin", "slope"
        slope: float = 0.1

        def slopes(self, heads):
            return np.full(heads, self.slope)

    wavepe.register_wavelet("é", lambda u: np.exp(-u * u))
    wavepe.register_wavelet("ü", lambda u: np.exp(-np.abs(u)))


# Names


ALIKE = ["lin:slope=0.5", "lin:slope=-0.5", "wavelet:kind=é,scales=3", "wavelet:kind=ü,scales=3"]


def test_specs_that_look_alike_are_models_of_their_own(text, tmp_path, lin):
    assert main(arguments(text, tmp_path / "all", specs=ALIKE, steps=2)) == 0
    together = {spec: values for spec, _, values in figures(tmp_path / "all")}
    assert len(list((tmp_path / "all" / "checkpoints").iterdir())) == len(ALIKE)
    for number, spec in enumerate(ALIKE):
        assert main(arguments(text, tmp_path / f"{number}", specs=[spec], steps=2)) == 0
        assert figures(tmp_path / f"{number}") == [(spec, 0, together[spec])]
    assert len({str(values) for values in together.values()}) == len(ALIKE)


def test_names_tell_the_spec_where_they_can():
    assert run_folder.model_name("rope:theta=10000", 3) == "rope-theta-10000-seed3"
    assert (
        run_folder.model_name("wavelet:kind=haar,scales=6", 0) == "wavelet-kind-haar-scales-6-seed0"
    )
    specs = [
        "a:b=1",
        "a:b=-1",
        "a:b=+1",
        "A:b=1",
        "a:b=1,c=2",
        "a-b-1",
        "é",
        "ü",
        "\udcff",
        "a" * 999,
    ]
    specs += ["a" * 998, "a:b=" + "1+" * 500 + "1"]
    names = [run_folder.model_name(spec, 0) for spec in specs]
    assert len(set(map(str.lower, names))) == len(specs)
    assert max(len(os.fsencode(name)) for name in names) < 128


LONG = "rope:type=longrope,short_factor={0},long_factor={0},original_max_position_embeddings=16"


def test_a_long_spec_finishes(text, tmp_path):
    spec = LONG.format("+".join(f"{1 + i / 7:.15f}" for i in range(12)))
    words = arguments(text, tmp_path, "--head-dim", "24", specs=[spec], steps=2)
    assert len(spec) > 400
    assert main(words) == 0
    assert main(words) == 0
    assert len(figures(tmp_path)) == 1


def test_names_that_are_not_utf8(text, tmp_path, capsys):
    data, out = (tmp_path / os.fsdecode(name) for name in (b"te\xfft", b"ou\xfft"))
    shutil.copytree(text, data)
    assert main(arguments(data, out, specs=["none"], steps=2)) == 2
    assert r"ou\udcfft: needs a name in UTF-8" in one_line(capsys)
    assert not out.exists()
    out = tmp_path / "out"
    for _ in range(2):
        assert main(arguments(data, out, specs=["none"], steps=2)) == 0
        assert str(data) in results(out)["environment"]["data"]["text"]


def test_the_model_of_another_spec_is_not_taken(text, tmp_path, lin, capsys):
    out = tmp_path / "out"
    words = arguments(text, out, specs=["lin:slope=0.5"], steps=2)
    assert main(words) == 0
    training = out / "checkpoints" / "lin-slope-0.5-seed0" / "training.json"
    facts = json.loads(training.read_text())
    capsys.readouterr()
    for wrong in ({**facts, "spec": "lin:slope=-0.5"}, {**facts, "seed": 1}, [], {}):
        training.write_text(json.dumps(wrong))
        assert main(words) == 2
        assert "should hold the model trained as lin:slope=0.5 with seed 0" in one_line(capsys)
    training.unlink()
    assert main(words) == 2
    assert "remove that folder" in one_line(capsys)


def test_rows_of_a_shared_name_are_made_again(text, tmp_path, lin):
    """A folder from when two specs shared one: the second has the figures of the first."""
    words = arguments(text, tmp_path / "out", specs=ALIKE[:2], steps=2)
    assert main(words) == 0
    right = figures(tmp_path / "out")
    path = tmp_path / "out" / "results.json"
    wrong = results(tmp_path / "out")
    wrong["runs"][1]["perplexity"] = wrong["runs"][0]["perplexity"]
    path.write_text(json.dumps(wrong))
    second = next((tmp_path / "out" / "checkpoints").glob("lin-slope-0.5-?*-seed0"))
    shutil.rmtree(second)
    assert main(words) == 0
    assert figures(tmp_path / "out") == right


def interrupt(monkeypatch):
    """Ctrl-C right after the next state is saved."""
    save = training.State.save

    def interrupted(state, path):
        save(state, path)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(training.State, "save", interrupted)


def test_the_state_of_another_training_is_not_taken(text, tmp_path, capsys, monkeypatch):
    words = arguments(text, tmp_path, "--quiet", specs=["none"])
    interrupt(monkeypatch)
    assert main(words) == 130
    capsys.readouterr()
    path = tmp_path / "training" / "none-seed0.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "spec": "alibi"}, path)
    assert main(words) == 1
    assert f"cannot resume from {path} (it is of alibi with seed 0): delete this file" in one_line(
        capsys
    )
    path.unlink()
    assert main(words) == 0


# Whose folder it is


def test_out_that_cannot_serve(finished, text, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("in the way")
    for out in (file, file / "below"):
        assert main(arguments(text, out)) == 2
        assert str(out) in one_line(capsys)
    before = figures(finished)
    assert main(arguments(text, finished, "--steps", "7")) == 2
    assert "steps 6 there, 7 here" in one_line(capsys)
    assert main(arguments(text, finished, "--threads", "2")) == 2
    assert "threads 1 there, 2 here" in one_line(capsys)
    other = tmp_path / "other.txt"
    other.write_bytes(b"some other text " * 100)
    assert main(arguments(other, finished)) == 2
    assert "text_sha256" in one_line(capsys)
    assert figures(finished) == before


def test_one_process_a_folder(text, tmp_path, capsys):
    folder = run_folder.RunFolder(tmp_path / "out")
    with folder.opened({"encodings": ["none"], "text_sha256": ""}):
        assert main(arguments(text, tmp_path / "out")) == 2
    assert "another wavepe compare" in one_line(capsys)


FOREIGN = {
    "results.json": '{"runs": [{"name": "mine"}]}',
    "report.md": "mine",
    "settings.json": '{"theme": "dark"}',
    "checkpoints/none-seed0/model.safetensors": "mine",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_never_touched(text, tmp_path, capsys, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(FOREIGN[name])
    assert main(arguments(text, tmp_path)) == 2
    assert f"--out {tmp_path}" in one_line(capsys)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == FOREIGN[name]


@pytest.mark.parametrize("wrong", ["[]", "{}", '{"runs": 3}', '{"runs": [{"name": "mine"}]}', "{"])
def test_results_that_are_none_of_ours(finished, text, tmp_path, capsys, wrong):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "results.json").write_text(wrong)
    assert main(arguments(text, out, specs=["none", "rope"])) == 2
    assert "results.json" in one_line(capsys)
    assert (out / "results.json").read_text() == wrong


def test_a_checkpoint_that_lacks_a_tensor(finished, text, tmp_path, capsys):
    """If the tensor were drawn at random instead, the figure would be wrong."""
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "results.json").unlink()
    model = out / "checkpoints" / "none-seed0" / "model.safetensors"
    tensors = safetensors.torch.load(model.read_bytes())
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    safetensors.torch.save_file(tensors, model, {"format": "pt"})
    assert main(arguments(text, out, "--quiet", specs=["none", "rope"])) == 1
    assert "lack model.layers.0.self_attn.k_proj.weight" in one_line(capsys)


def test_a_checkpoint_that_cannot_be_loaded(finished, text, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "results.json").unlink()
    model = out / "checkpoints" / "none-seed0" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:99])
    assert main(arguments(text, out, "--quiet", specs=["none", "rope"])) == 1
    said = one_line(capsys)
    assert f"cannot load {model.parent}" in said
    assert "remove" in said
    shutil.rmtree(model.parent)
    assert main(arguments(text, out, specs=["none", "rope"])) == 0
    assert figures(out) == figures(finished)


def test_a_run_that_diverged_says_so(text, tmp_path, capsys):
    """The loss before its only step is finite."""
    assert main(arguments(text, tmp_path, "--quiet", "--lr", "1e18", steps=1, specs=["rope"])) == 1
    assert "rope: the perplexity at 16 is nan: try a smaller --lr" in one_line(capsys)


@pytest.mark.parametrize("what", ["results.json", "checkpoints", "training"])
def test_what_other_settings_made_is_not_taken(text, tmp_path, capsys, monkeypatch, what):
    outs = tmp_path / "a", tmp_path / "b"
    for number, out in enumerate(outs):
        if what == "training":
            interrupt(monkeypatch)
        words = arguments(text, out, "--quiet", "--lr", f"0.0{number + 1}", specs=["none"])
        assert main(words) == (130 if what == "training" else 0)
    capsys.readouterr()
    (outs[1] / "results.json").unlink(missing_ok=True)
    if what == "results.json":
        shutil.copy(outs[0] / what, outs[1] / what)
    else:
        shutil.copytree(outs[0] / what, outs[1] / what, dirs_exist_ok=True)
    assert main(words) in (1, 2)
    assert (
        "of another comparison" in (said := one_line(capsys))
        or "belongs to another comparison" in said
    )


ALIKE_ONE = '{"encodings": [], "text_sha256": "", "threads": "a", "imports": [1]}'


@pytest.mark.parametrize("known", ["[1]", "5", '"a"', "[" * 100_000, ALIKE_ONE])
def test_settings_that_are_none(text, tmp_path, capsys, known):
    (tmp_path / "settings.json").write_text(known)
    assert main(arguments(text, tmp_path)) == 2
    assert f"{tmp_path}" in one_line(capsys)


def test_a_lock_of_someone_elses(text, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for make in (lambda lock: lock.symlink_to(mine), lambda lock: lock.write_text("mine")):
        make(tmp_path / "out" / ".lock")
        assert main(arguments(text, tmp_path / "out")) == 2
        assert ".lock is not of a comparison" in one_line(capsys)
        (tmp_path / "out" / ".lock").unlink()
    assert mine.read_text() == "precious"


def test_a_copy_of_a_run_is_no_text(finished, text, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(text, data)
    before = load_text(str(data), 32, 16).sha256
    shutil.copytree(finished, data / "copy", ignore=shutil.ignore_patterns(".*"))
    assert load_text(str(data), 32, 16).sha256 == before


def test_an_empty_out_is_refused(text, capsys):
    assert main(arguments(text, "")) == 2
    assert "--out: needs a folder, got an empty name" in one_line(capsys)


# Variants


@pytest.mark.skipif(len(wavepe.variants()) < 2, reason="this CPU runs one variant")
def test_another_variant_is_told_and_recorded(text, tmp_path, capsys, monkeypatch):
    first, second = wavepe.variants()[:2]
    before = wavepe.variant()
    try:
        wavepe.use_variant(first)
        interrupt(monkeypatch)
        assert main(arguments(text, tmp_path, specs=["rope"])) == 130
        capsys.readouterr()
        wavepe.use_variant(second)
        assert main(arguments(text, tmp_path, specs=["rope"])) == 0
    finally:
        wavepe.use_variant(before)
    assert f"began with variant {first}, continues with {second}" in capsys.readouterr().err
    environment = results(tmp_path)["environment"]
    models = environment["models"]["checkpoints/rope-theta-10000-seed0"]
    assert models["variants"] == [first, second]
    assert environment["variants"] == [second]
