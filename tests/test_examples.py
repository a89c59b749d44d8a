"""The files of examples/ run, and train."""

import ast
import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import wavepe
from cases import forget_registrations
from processes import forked, output

EXAMPLES = Path(__file__).parent.parent / "examples"
CUSTOM = EXAMPLES / "custom_wavelet.py"


# They need minutes, processes or other packages: test_fairseq_commands.py, test_examples_hf.py,
# test_distributed.py.
ELSEWHERE = ("context_parallel", "fairseq", "hf_", "ring_attention")
FILES = {file.stem for file in EXAMPLES.glob("*.py") if not file.name.startswith(ELSEWHERE)}
UNTRAINED = math.log(256)  # nats a byte


def prints_its_table_and_a_loss(shown):
    table, values, loss = shown.splitlines()
    assert table.startswith("table (128, 24) from delta = 0 on; at delta = 4 and shift 0")
    u = [4 / 2**k for k in range(6)]
    dog = [2 * math.exp(-(x**2)) - math.exp(-(x**2) / 4) for x in u]
    assert json.loads(values) == pytest.approx(dog, abs=5.01e-4)
    assert float(loss.split()[-2]) == pytest.approx(UNTRAINED, abs=0.3)


def trains_and_generates(shown):
    lines = shown.splitlines()
    for encoding, losses, text in zip(
        ("wavelet:scales=4", "rope"), lines[::2], lines[1::2], strict=True
    ):
        found = re.fullmatch(rf"{encoding}: loss (.*) at length 64, (.*) at 256", losses)
        assert 0 < float(found[1]) < UNTRAINED - 1.5
        assert 0 < float(found[2]) < UNTRAINED - 1.5
        text = ast.literal_eval(text.strip())
        assert text.startswith("    return ")
        assert 11 < len(text) <= 11 + 40


def compares_encodings_of_images(shown):
    head, *rows, last = shown.splitlines()
    assert head.split() == ["encoding", "8", "x", "8", "12", "x", "12", "16", "x", "16"]
    results = json.loads(Path("out/results.json").read_text("utf-8"))
    names = ["none", "1-D", "2-D"]
    assert [(run["encoding"], run["seed"]) for run in results["runs"]] == [
        (name, seed) for name in names for seed in range(2)
    ]
    for row, name in zip(rows, names, strict=True):
        found = [run["accuracy"]["16"] for run in results["runs"] if run["encoding"] == name]
        assert all(0 <= share <= 1 for share in found)
        assert row.startswith(name)
        assert row.endswith(f"{sum(found) / 2:.3f} ± {abs(found[0] - found[1]) / 2**0.5:.3f}")
    assert last == "figures and picture in out"
    assert Path("out/rope-images.png").read_bytes().startswith(b"\x89PNG")


def draws_five_pictures(shown):
    names = ["transform", "matrices", "decay", "wavelengths", "absolute"]
    files = [f"{name}.png" for name in names]
    assert shown.splitlines() == [f"picture: {Path('out', file)}" for file in files]
    assert all(Path("out", file).read_bytes().startswith(b"\x89PNG") for file in files)


SHOWS = {
    "custom_wavelet": prints_its_table_and_a_loss,
    "rope_images": compares_encodings_of_images,
    "self_attention": trains_and_generates,
    "theory_pictures": draws_five_pictures,
}
LESS = {
    "rope_images": ["--steps", "2", "--seeds", "2", "--images", "64", "--out", "out"],
    "theory_pictures": ["out"],
}
LONGER = ("rope_images", "self_attention")
BY_TIME = [pytest.param(n, marks=pytest.mark.slow) if n in LONGER else n for n in SHOWS]


def test_each_example_is_run():
    assert set(SHOWS) == FILES


@pytest.mark.parametrize("name", BY_TIME)
def test_it_runs(name, tmp_path, monkeypatch):
    if name in LESS:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    SHOWS[name](output(EXAMPLES / f"{name}.py", *LESS.get(name, ()), start=forked, COLUMNS="100"))


def test_scores_of_images_depend_on_both_distances_alone():
    images = runpy.run_path(str(EXAMPLES / "rope_images.py"))
    pairs, grid = 6, 5
    cos, sin = (table.double().numpy() for table in images["tables"]("2-D", grid, pairs))
    spectrum = 100.0 ** (-np.arange(3) / 3)  # each axis has a whole one
    row, column = np.divmod(np.arange(grid * grid), grid)
    angles = np.concatenate([row[:, None] * spectrum, column[:, None] * spectrum], 1)
    assert np.abs(cos - np.cos(angles)).max() < 1e-6
    assert np.abs(sin - np.sin(angles)).max() < 1e-6
    flat, _ = images["tables"]("1-D", grid, pairs)
    angles = np.arange(grid * grid)[:, None] * 100.0 ** (-np.arange(6) / 6)
    assert np.abs(flat.numpy() - np.cos(angles)).max() < 1e-6
    assert images["tables"]("none", grid, pairs) is None


def test_matrices_show_that_rope_is_made_of_wavelets():
    pytest.importorskip("matplotlib")
    pictures = runpy.run_path(str(EXAMPLES / "theory_pictures.py"))
    axes = pictures["matrices"](position=5, dim=6, theta=50.0).axes
    rotation, wavelets, multiscale = (panel.images[0].get_array() for panel in axes[:3])
    cos = np.cos(5 * 50.0 ** (-np.arange(3) / 3))
    assert np.abs(np.sort(np.diag(rotation)) - np.sort(np.repeat(cos, 2))).max() < 1e-12
    assert np.abs(rotation - wavelets).max() < 1e-12
    assert np.abs(rotation - multiscale).max() > 0.1


def test_five_lines_register_the_wavelet(monkeypatch):
    """Imports, function and registration, as the file has them."""
    forget_registrations(monkeypatch)
    code = CUSTOM.read_text("utf-8").split('"""', 2)[2].partition("def main")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) == 5
    exec(compile("\n".join(lines), CUSTOM.name, "exec"), {"__name__": "custom_wavelet"})
    p = wavepe.wavelet_table(2000, [5.0], [1000.0], kind="dog", dtype=np.float64)[:, 0]
    assert p[1000] == p.max() == 1
    assert abs(p.sum()) < 1e-12  # an admissible wavelet has the mean 0


TINY = (
    "--steps 4 --train-length 16 --lengths 16 32 --batch 2 --layers 1 --heads 2 --head-dim 6 "
    "--eval-bytes 128"
)


def test_the_command_in_its_text_trains(tmp_path):
    """As printed there, from the root of the repository, with less of everything."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    (command,) = re.findall(r"wavepe (compare --import .*\\\n.*)\n", CUSTOM.read_text("utf-8"))
    words = command.replace("\\\n", " ").split()
    text = tmp_path / "text.txt"
    letters = np.random.default_rng(0).integers(97, 105, size=4000).astype(np.uint8)
    text.write_bytes(letters.tobytes())
    out = tmp_path / "out"
    words += ["--data", text, "--out", out, *TINY.split()]
    shown = output("-m", "wavepe", *words, start=forked, cwd=EXAMPLES.parent, COLUMNS="100")
    runs = json.loads((out / "results.json").read_text())["runs"]
    specs = ["wavelet:kind=dog,scales=6", "wavelet:scales=6"]
    assert [run["encoding"] for run in runs] == specs
    assert all(spec in shown for spec in specs)
    assert runs[0]["perplexity"] != runs[1]["perplexity"]
    load = "import sys, wavepe.hf; from transformers import AutoModelForCausalLM as Auto; "
    load += "Auto.from_pretrained(sys.argv[1])"
    folder = out / "checkpoints" / "wavelet-kind-dog-scales-6-seed0"
    done = forked("-c", load, folder)
    assert done.returncode != 0
    assert "ValueError: unknown wavelet kind 'dog'" in done.stderr
