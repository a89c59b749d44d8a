"""examples/fairseq_demo.py at toy size: its output and files, a second run, its errors."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from processes import python

for needed in ("fairseq", "rich", "matplotlib"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed here: make test-fairseq", allow_module_level=True)

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parent.parent / "examples" / "fairseq_demo.py"
LENGTHS = ["16", "32"]
SCALED = "rope:inference_theta=scaled"
ROWS = [(spec, protocol) for spec in ("rope", SCALED) for protocol in ("blocks", "sliding")]
TINY = [
    "--encodings", "rope", "--length", "16", "--times", "1", "2", "--updates", "4",
    "--words", "200", "--jobs", "2",
]  # fmt: skip


def demo(out, text, *more):
    words = (DEMO, "--out", out, "--data", text, *TINY, *more)
    return python(*words, COLUMNS="120", PYTHONWARNINGS="ignore")


def figures(out):
    runs = json.loads((out / "results.json").read_text())["runs"]
    return [(run["encoding"], run["protocol"], run["perplexity"]) for run in runs]


def times_of_logs(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "logs").iterdir()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 3000 lines, words of Zipf's frequencies."""
    ranks = np.random.default_rng(0).zipf(1.3, size=(3000, 8)).clip(max=400)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(f"w{rank}" for rank in line) for line in ranks))
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """Return (folder, output) of one run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    done = demo(out, text)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_results_picture_and_logs(finished):
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    assert results["train_length"] == 16
    assert results["scored_tokens"] > 0
    assert results["environment"]["torch"]
    runs = {(run["encoding"], run["protocol"]): run for run in results["runs"]}
    assert list(runs) == ROWS
    for run in runs.values():
        assert list(run["perplexity"]) == LENGTHS
        assert all(1 < value < 1000 for value in run["perplexity"].values())
        assert run["seconds"] > 0
    for protocol in ("blocks", "sliding"):
        plain, scaled = (runs[spec, protocol]["perplexity"] for spec in ("rope", SCALED))
        assert plain["16"] == scaled["16"]  # the base grows beyond the trained length alone
        assert plain["32"] != scaled["32"]
    assert (out / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    names = set(times_of_logs(out))
    assert {"preprocess.log", "train-rope.log"} < names
    assert len(names) == 2 + len(ROWS) * len(LENGTHS)


def test_the_table_has_every_figure(finished):
    out, printed = finished
    for heading in ("16 (1x)", "32 (2x)", "Perplexity per word", "blocks", "sliding"):
        assert heading in printed
    for run in json.loads((out / "results.json").read_text())["runs"]:
        assert run["encoding"] in printed
        for value in run["perplexity"].values():
            assert f"{value:.2f}" in printed


def test_again_it_repeats_what_is_missing_alone(finished, text):
    out, _ = finished
    before, logs = figures(out), times_of_logs(out)
    (out / "logs" / "eval-rope-blocks-32.log").unlink()
    done = demo(out, text)
    assert done.returncode == 0, done.stderr
    changed = {name for name, time in times_of_logs(out).items() if logs[name] != time}
    assert changed == {"eval-rope-blocks-32.log"}
    assert figures(out) == before


def test_other_settings_are_refused(finished, text):
    out, _ = finished
    before = times_of_logs(out)
    for more, named in (("--updates 5", "updates 4 -> 5"), ("--seed 2", "seed 1 -> 2")):
        done = demo(out, text, *more.split())
        assert done.returncode == 1
        assert named in done.stderr
        assert "give another --out" in done.stderr
        assert "Traceback" not in done.stderr
    assert times_of_logs(out) == before


def test_a_command_that_fails_shows_its_last_lines(finished, text):
    out, _ = finished
    done = demo(out, text, "--encodings", "wavelet:scales=5")  # which does not divide 32
    assert done.returncode == 1
    assert "wavepe-fairseq-train ended with" in done.stderr
    assert "train-wavelet-scales-5.log" in done.stderr
    assert not (out / "checkpoints" / "wavelet-scales-5" / "seconds.txt").exists()
