"""The folder of `wavepe compare`: whose it is, what is found in it, and the user's own code."""

import json
import os
import random
import shutil
import sys

import pytest
import safetensors.torch
import torch
from cases import forget_registrations
from compare_cases import LIN, compare, figures, interrupt, refused, results, text, trained
from wavepe.experiments.data import load_text
from wavepe.experiments.imports import import_all
from wavepe.training import folder as run_folder
from wavepe.training import loop

ONE = {"specs": ["none"]}
TWO = {"specs": ("none", "rope")}
WAVELET = """
import numpy as np
import wavepe
wavepe.register_wavelet({name!r}, lambda u: np.exp(-np.abs(u)){more})
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Forget the registrations and the modules of a test when it ends."""
    forget_registrations(monkeypatch)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("wavepe_import_", "own_")):
            del sys.modules[name]


@pytest.fixture
def lin():
    """Register "lin", whose specs differ by a sign, and wavelets with names without ASCII."""
    exec(LIN, {"__name__": __name__})
    for name in "éü":
        exec(WAVELET.format(name=name, more=" * 2" * (name == "ü")), {})


@pytest.fixture
def copy(tmp_path):
    """A copy of a finished comparison of TWO."""
    return shutil.copytree(trained(**TWO), tmp_path / "copy")


# ------------------------------------------------------------------ names


ALIKE = ["lin:slope=0.5", "lin:slope=-0.5", "wavelet:kind=é,scales=3", "wavelet:kind=ü,scales=3"]


@pytest.mark.usefixtures("lin")
def test_specs_that_look_alike_are_models_of_their_own(tmp_path):
    assert compare(tmp_path / "all", specs=ALIKE, steps=2) == 0
    together = {spec: values for spec, _, values in figures(tmp_path / "all")}
    assert len(list((tmp_path / "all" / "checkpoints").iterdir())) == len(ALIKE)
    for number, spec in enumerate(ALIKE):
        assert compare(tmp_path / f"{number}", specs=[spec], steps=2) == 0
        assert figures(tmp_path / f"{number}") == [(spec, 0, together[spec])]
    assert len({str(values) for values in together.values()}) == len(ALIKE)


def test_names_tell_the_spec_where_they_can():
    for spec, name in (
        ("rope:theta=10000", "rope-theta-10000-seed3"),
        ("wavelet:kind=haar,scales=6", "wavelet-kind-haar-scales-6-seed3"),
    ):
        assert run_folder.model_name(spec, 3) == name
    specs = ["a:b=1", "a:b=-1", "a:b=+1", "A:b=1", "a:b=1,c=2", "a-b-1", "é", "ü", "\udcff"]
    specs += ["a" * 999, "a" * 998, "a:b=" + "1+" * 500 + "1"]
    names = [run_folder.model_name(spec, 0) for spec in specs]
    assert len(set(map(str.lower, names))) == len(specs)
    assert max(len(os.fsencode(name)) for name in names) < 128


def test_names_that_are_not_utf8(tmp_path, capsys):
    data, out = (tmp_path / os.fsdecode(name) for name in (b"te\xfft", b"ou\xfft"))
    shutil.copytree(text(), data)
    assert r"ou\udcfft: needs a name in UTF-8" in refused(capsys, out, data=data, **ONE)
    assert not out.exists()
    out = tmp_path / "out"
    for _ in range(2):
        assert compare(out, data=data, steps=2, **ONE) == 0
        assert str(data) in results(out)["environment"]["data"]["text"]


# ------------------------------------------------------------------ whose folder it is


def test_out_that_cannot_serve(copy, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("in the way")
    for out in (file, file / "below"):
        assert str(out) in refused(capsys, out)
    assert "--out: needs a folder, got an empty name" in refused(capsys, "")
    before = figures(copy)
    assert "steps 6 there, 7 here" in refused(capsys, copy, "--steps", "7", **TWO)
    assert "threads 1 there, 2 here" in refused(capsys, copy, "--threads", "2", **TWO)
    other = tmp_path / "other.txt"
    other.write_bytes(b"some other text " * 100)
    assert "text_sha256" in refused(capsys, copy, data=other, **TWO)
    assert figures(copy) == before
    kept = json.loads((copy / "settings.json").read_text())
    del kept["decayed"]  # a folder of the time when tables that an encoding learns decayed, too
    (copy / "settings.json").write_text(json.dumps(kept))
    assert "decayed not given there, the model's matrices here" in refused(capsys, copy, **TWO)


def test_encodings_and_seeds_can_be_added(tmp_path, capsys):
    """A finished model is not trained again, and each figure is that of one comparison of all."""
    out, more = tmp_path / "out", ("--seeds", "2")
    assert compare(out, "--quiet", **ONE) == 0
    before = figures(out)
    assert compare(out, "--quiet", **TWO) == 0
    capsys.readouterr()
    assert compare(out, *more, **TWO) == 0
    assert capsys.readouterr().err.count("trained before") == 2
    assert figures(out) == figures(trained("--quiet", *more, **TWO))
    assert all(one in figures(out) for one in before)
    assert compare(out, "--quiet", *more, **TWO) == 0
    assert "seeds 2 there, 1 here" in refused(capsys, out, "--quiet", **TWO)
    assert "encodings none rope there, none here" in refused(capsys, out, *more, **ONE)


ALIKE_ONE = '{"encodings": [], "text_sha256": "", "threads": "a", "imports": 1}'
FOREIGN = [
    ("results.json", '{"runs": [{"name": "mine"}]}'),
    ("report.md", "mine"),
    ("checkpoints/none-seed0/model.safetensors", "mine"),
    ("settings.json", '{"theme": "dark"}'),
    *(("settings.json", text) for text in ("[1]", "5", '"a"', "[" * 100_000, ALIKE_ONE)),
]


@pytest.mark.parametrize(("name", "content"), FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_files_are_never_touched(tmp_path, capsys, name, content):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    message = refused(capsys, tmp_path)
    told = "{} holds a comparison with other settings" if content == ALIKE_ONE else "--out {}"
    assert told.format(tmp_path) in message or f"cannot read {tmp_path}" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize("wrong", ["[]", "{}", '{"runs": 3}', FOREIGN[0][1], "{"])
def test_results_that_are_none_of_ours(copy, capsys, wrong):
    (copy / "results.json").write_text(wrong)
    assert "results.json" in refused(capsys, copy, **TWO)
    assert (copy / "results.json").read_text() == wrong


# ------------------------------------------------------------------ models and states in it


def test_a_folder_of_adapt_is_no_text(tmp_path):
    """Another program's results are."""
    for name, content in (("ours", '{"settings": {"recipe": "auto"}}'), ("theirs", "{}" * 50)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints/state.json").write_text("words " * 10)
        (tmp_path / name / "results.json").write_text(content)
    assert load_text(tmp_path, 10, 10).read_bytes == 160


@pytest.mark.usefixtures("lin")
def test_the_model_of_another_spec_is_not_taken(tmp_path, capsys):
    args = {"specs": ["lin:slope=0.5"], "steps": 2}
    assert compare(tmp_path, **args) == 0
    trained_as = tmp_path / "checkpoints" / "lin-slope-0.5-seed0" / "training.json"
    facts = json.loads(trained_as.read_text())
    for wrong in ({**facts, "spec": "lin:slope=-0.5"}, {**facts, "seed": 1}, [], {}):
        trained_as.write_text(json.dumps(wrong))
        message = refused(capsys, tmp_path, **args)
        assert "should hold the model trained as lin:slope=0.5 with seed 0" in message
    trained_as.unlink()
    assert "remove that folder" in refused(capsys, tmp_path, **args)


def test_the_state_of_another_training_is_not_taken(tmp_path, capsys, monkeypatch):
    interrupt(monkeypatch, loop.State, "save")
    assert compare(tmp_path, "--quiet", **ONE) == 130
    path = tmp_path / "training" / "none-seed0.pt"
    torch.save({**torch.load(path, weights_only=True), "spec": "alibi"}, path)
    message = refused(capsys, tmp_path, "--quiet", code=1, **ONE)
    assert f"cannot resume from {path} (it is of alibi with seed 0): delete this file" in message
    path.unlink()
    assert compare(tmp_path, "--quiet", **ONE) == 0


def test_a_checkpoint_that_lacks_a_tensor_or_its_end(copy, capsys):
    """If the tensor were drawn at random instead, the figure would be wrong."""
    (copy / "results.json").unlink()
    model = copy / "checkpoints" / "none-seed0" / "model.safetensors"
    tensors = safetensors.torch.load(model.read_bytes())
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    safetensors.torch.save_file(tensors, model, {"format": "pt"})
    message = refused(capsys, copy, "--quiet", code=1, **TWO)
    assert "lack model.layers.0.self_attn.k_proj.weight" in message
    model.write_bytes(model.read_bytes()[:99])
    message = refused(capsys, copy, "--quiet", code=1, **TWO)
    assert f"cannot load {model.parent}" in message
    assert "remove" in message
    shutil.rmtree(model.parent)  # its figures go with it
    wrong = results(trained(**TWO))
    wrong["runs"][0]["perplexity"]["16"] = 1.5
    (copy / "results.json").write_text(json.dumps(wrong))
    assert compare(copy, **TWO) == 0
    assert figures(copy) == figures(trained(**TWO))


@pytest.mark.parametrize("what", ["results.json", "checkpoints", "training"])
def test_what_other_settings_made_is_not_taken(tmp_path, capsys, monkeypatch, what):
    outs = tmp_path / "a", tmp_path / "b"
    for out, lr in zip(outs, ("0.01", "0.02"), strict=True):
        if what == "training":
            interrupt(monkeypatch, loop.State, "save")
        assert compare(out, "--quiet", "--lr", lr, **ONE) == (130 if what == "training" else 0)
    (outs[1] / "results.json").unlink(missing_ok=True)
    if what == "results.json":
        shutil.copy(outs[0] / what, outs[1] / what)
    else:
        shutil.copytree(outs[0] / what, outs[1] / what, dirs_exist_ok=True)
    code = 1 if what == "training" else 2
    message = refused(capsys, outs[1], "--quiet", "--lr", "0.02", code=code, **ONE)
    assert "of another comparison" in message or "belongs to another comparison" in message


# ------------------------------------------------------------------ --import

CUSP = {"specs": ["wavelet:kind=cusp,scales=3"], "steps": 3}


@pytest.fixture
def wavelet(tmp_path):
    """Write a file that registers the wavelet "cusp"."""
    return write(tmp_path / "own_wavelet.py", WAVELET.format(name="cusp", more=""))


def write(path, content):
    path.write_text(content, "utf-8")
    return path


def imported(out):
    """Return the names of the imported files that a folder keeps, without their digests."""
    kept = json.loads((out / "settings.json").read_text()).get("imports", [])
    assert all(len(name.split()[-1]) == 12 for name in kept)
    return [name.rpartition(" ")[0] for name in kept]


def test_wavelets_and_encodings_of_files(wavelet, tmp_path):
    own = write(tmp_path / "own_encoding.py", LIN)
    specs = ["lin:slope=0.5", *CUSP["specs"], "alibi"]
    out = tmp_path / "out"
    assert compare(out, "--import", wavelet, "--import", own, specs=specs, steps=3) == 0
    assert [name for name, *_ in figures(out)] == specs
    assert len({values["32"] for *_, values in figures(out)}) == 3
    assert imported(out) == ["own_wavelet.py", "own_encoding.py"]
    kept = json.loads((out / "settings.json").read_text())["imports"]
    assert results(out)["environment"]["settings"]["imports"] == kept


def test_a_module_by_its_name(wavelet, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert compare(tmp_path / "out", "--import", "own_wavelet", **CUSP) == 0
    assert imported(tmp_path / "out") == ["own_wavelet"]


def test_resumes_with_it_and_not_without(wavelet, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    wavelet = wavelet.rename(tmp_path / "own wavelet.py")
    assert compare(out, "--import", wavelet, **CUSP) == 0
    finished = (out / "results.json").read_bytes()
    (out / "perplexity.png").unlink()
    forget_registrations(monkeypatch)
    for options in (CUSP, ONE):
        assert f"{out} was begun with own wavelet.py" in refused(capsys, out, **options)
    monkeypatch.chdir(tmp_path)  # the same file by another path
    assert compare(out, "--import", "own wavelet.py", **CUSP) == 0
    assert (out / "results.json").read_bytes() == finished
    assert (out / "perplexity.png").exists()
    write(wavelet, WAVELET.format(name="cusp", more=" / 2"))
    error = refused(capsys, out, "--import", wavelet, **CUSP)
    assert "imports own wavelet.py" in error
    assert "give another folder" in error


def test_a_folder_without_imports_stays_as_it_was(wavelet, copy, capsys):
    assert "imports" not in json.loads((copy / "settings.json").read_text())
    message = refused(capsys, copy, "--import", wavelet, **TWO)
    assert "imports not given there, own_wavelet.py" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1\nraise KeyError('gone')\n", "KeyError: 'gone' (line 2)"),
        ("import nosuchmodule\n", "No module named 'nosuchmodule' (line 1)"),
        ("import wavepe\nwavepe.register_wavelet('ricker', abs)\n",
         "'ricker' is wavepe's own; choose another (line 2)"),
        ("import wavepe\ndef psi(u):\n    return u.missing\nwavepe.register_wavelet('x', psi)\n",
         "AttributeError: 'numpy.ndarray' object has no attribute 'missing' (line 3)"),
    ],
)  # fmt: skip
def test_errors_of_the_file(tmp_path, capsys, content, words):
    file = write(tmp_path / "own_broken.py", content)
    out = tmp_path / "out"
    error = refused(capsys, out, "--import", file, **ONE)
    assert f"--import {file}: " in error
    assert words in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nosuch.py"], "--import nosuch.py: no such file"),
        (["nosuchmodule"], "No module named 'nosuchmodule' (the path of a file ends in .py)"),
        ([""], "needs a path that ends in .py"),
        (["folder.py"], "no such file"),
        (["own_wavelet.py", "own_wavelet.py"], "own_wavelet.py is given twice"),
    ],
)
def test_nothing_to_import(wavelet, tmp_path, capsys, monkeypatch, names, words):
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    given = [word for name in names for word in ("--import", name)]
    assert words in refused(capsys, tmp_path / "out", *given, **ONE)


def test_a_file_may_be_called_as_a_module_that_others_need(tmp_path):
    content = "import random, numpy\nassert random.random() < 1\nassert __name__ != 'random'\n"
    (name,) = import_all([str(write(tmp_path / "random.py", content))])
    assert name.startswith("random.py ")
    assert sys.modules["random"] is random
