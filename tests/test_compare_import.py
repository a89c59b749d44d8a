"""`wavepe compare --import` runs a user's own code before specs are read."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from wavepe import _wavelet_registered
from wavepe.cli import main
from wavepe.cli.imports import import_all
from wavepe.encodings import base

WAVELET = """
import numpy as np
import wavepe
wavepe.register_wavelet({name!r}, lambda u: np.exp(-np.abs(u)){more})
"""
ENCODING = """
import dataclasses
import numpy as np
import wavepe
from wavepe.encodings import Encoding

@wavepe.register_encoding
@dataclasses.dataclass(frozen=True)
class Even(Encoding):
    name = "even"
    entry = "slope"
    slope: float = 0.1

    def slopes(self, heads):
        return np.full(heads, self.slope)
"""


@pytest.fixture(autouse=True)
def registers(monkeypatch):
    """Forget the registrations and the modules of a test when it ends."""
    forget_registrations(monkeypatch)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("wavepe_import_") or name.startswith("own_"):
            del sys.modules[name]


def forget_registrations(monkeypatch):
    monkeypatch.setattr(_wavelet_registered, "_known", {})
    monkeypatch.setattr(base, "_known", {k: v for k, v in base._known.items() if k != "even"})


@pytest.fixture
def wavelet(tmp_path):
    """Write a file that registers the wavelet "cusp"."""
    return write(tmp_path / "own_wavelet.py", WAVELET.format(name="cusp", more=""))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    letters = np.random.default_rng(0).integers(97, 105, size=4000).astype(np.uint8)
    path.write_bytes(letters.tobytes())
    return path


def write(path, content):
    path.write_text(content, "utf-8")
    return path


def arguments(text, out, *more, specs=("wavelet:kind=cusp,scales=3",)):
    return [
        "compare", "--encodings", *specs, "--data", str(text), "--steps", "3", "--train-length",
        "16", "--lengths", "16", "32", "--batch", "2", "--layers", "1", "--heads", "2",
        "--head-dim", "6", "--eval-bytes", "128", "--quiet", *(("--out", str(out)) if out else ()),
        *map(str, more),
    ]  # fmt: skip


def error_of(capsys):
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("wavepe compare: error: ")
    return printed.err


def test_wavelets_and_encodings_of_files(text, wavelet, tmp_path):
    own = write(tmp_path / "own_encoding.py", ENCODING)
    specs = ["even:slope=0.5", "wavelet:kind=cusp,scales=3", "alibi"]
    out = tmp_path / "out"
    assert main(arguments(text, out, "--import", wavelet, "--import", own, specs=specs)) == 0
    results = json.loads((out / "results.json").read_text())
    assert [run["encoding"] for run in results["runs"]] == specs
    figures = [run["perplexity"]["32"] for run in results["runs"]]
    assert len(set(figures)) == 3
    names = [name.split() for name in json.loads((out / "settings.json").read_text())["imports"]]
    assert [name for name, _ in names] == ["own_wavelet.py", "own_encoding.py"]
    assert results["environment"]["settings"]["imports"] == [" ".join(name) for name in names]
    assert all(len(digest) == 12 for _, digest in names)


def test_a_module_by_its_name(text, wavelet, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert main(arguments(text, tmp_path / "out", "--import", "own_wavelet")) == 0
    (name,) = json.loads((tmp_path / "out" / "settings.json").read_text())["imports"]
    assert name.split()[0] == "own_wavelet"


def test_resumes_with_it_and_not_without(text, wavelet, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    wavelet = wavelet.rename(tmp_path / "own wavelet.py")
    assert main(arguments(text, out, "--import", wavelet)) == 0
    finished = (out / "results.json").read_bytes()
    (out / "perplexity.png").unlink()
    forget_registrations(monkeypatch)
    capsys.readouterr()
    assert main(arguments(text, out)) == 2
    assert "was begun with --import own wavelet.py: give it again" in error_of(capsys)
    monkeypatch.chdir(tmp_path)  # the same file by another path
    assert main(arguments(text, out, "--import", "own wavelet.py")) == 0
    assert (out / "results.json").read_bytes() == finished
    assert (out / "perplexity.png").exists()


def test_another_text_of_the_file_is_another_comparison(text, wavelet, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(text, out, "--import", wavelet)) == 0
    write(wavelet, WAVELET.format(name="cusp", more=" / 2"))
    capsys.readouterr()
    assert main(arguments(text, out, "--import", wavelet)) == 2
    error = error_of(capsys)
    assert "imports own_wavelet.py" in error
    assert "give another --out" in error


def test_folders_of_comparisons_without_imports_stay_as_they_were(text, tmp_path):
    out = tmp_path / "out"
    assert main(arguments(text, out, specs=["none"])) == 0
    assert "imports" not in json.loads((out / "settings.json").read_text())


def test_an_import_that_was_not_there_before_is_noticed(text, wavelet, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(text, out, specs=["none"])) == 0
    capsys.readouterr()
    assert main(arguments(text, out, "--import", wavelet, specs=["none"])) == 2
    assert "imports None there, own_wavelet.py" in error_of(capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1\nraise KeyError('gone')\n", "KeyError: 'gone' (line 2)"),
        ("\n\ndef f(:\n", "SyntaxError: invalid syntax"),
        ("import nosuchmodule\n", "No module named 'nosuchmodule' (line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (line 2)"),
        (
            "import wavepe\nwavepe.register_wavelet('ricker', abs)\n",
            "'ricker' is wavepe's own; choose another (line 2)",
        ),
        (
            "import wavepe\n\ndef psi(u):\n    return u.missing\n\n"
            "wavepe.register_wavelet('x', psi)\n",
            "AttributeError: 'numpy.ndarray' object has no attribute 'missing' (line 4)",
        ),
    ],
)
def test_errors_of_the_file(text, tmp_path, capsys, content, words):
    file = write(tmp_path / "own_broken.py", content)
    out = tmp_path / "out"
    assert main(arguments(text, out, "--import", file, specs=["none"])) == 2
    error = error_of(capsys)
    assert f"--import {file}: " in error
    assert words in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch.py", "--import nosuch.py: no such file"),
        ("nosuchmodule", "No module named 'nosuchmodule' (the path of a file ends in .py)"),
        ("", "needs a path that ends in .py"),
    ],
)
def test_nothing_to_import(text, tmp_path, capsys, name, words):
    assert main(arguments(text, tmp_path / "out", "--import", name, specs=["none"])) == 2
    assert words in error_of(capsys)
    (tmp_path / "folder.py").mkdir()
    assert main(arguments(text, None, "--import", tmp_path / "folder.py")) == 2
    assert "no such file" in error_of(capsys)


def test_given_twice(text, wavelet, tmp_path, capsys):
    more = ["--import", wavelet, "--import", wavelet]
    assert main(arguments(text, tmp_path / "out", *more)) == 2
    assert "own_wavelet.py is given twice" in error_of(capsys)


def test_a_file_may_be_called_as_a_module_that_others_need(tmp_path):
    import random

    content = "import random, numpy\nassert random.random() < 1\nassert __name__ != 'random'\n"
    file = write(tmp_path / "random.py", content)
    (name,) = import_all([str(file)])
    assert name.startswith("random.py ")
    assert sys.modules["random"] is random
    del sys.modules["wavepe_import_random"]
