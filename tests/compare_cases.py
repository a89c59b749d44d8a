"""Comparisons of tiny models, for the tests of `wavepe compare`."""

import json

import numpy as np

SPECS = ["none", "rope", "rope:inference_theta=scaled", "wavelet:scales=3"]
TINY = [
    "--train-length", "16", "--lengths", "16", "32", "--batch", "2", "--layers", "1", "--heads",
    "2", "--head-dim", "6", "--eval-bytes", "128", "--lr", "0.02", "--threads", "1",
]  # fmt: skip


def text_in(folder):
    """Write twelve text files of 300 bytes each into a folder; return the folder."""
    letters = np.random.default_rng(0).integers(97, 105, size=(12, 300)).astype(np.uint8)
    for number, content in enumerate(letters):
        (folder / f"part{number}.txt").write_bytes(content.tobytes())
    return folder


def arguments(text, out, *more, steps=6, specs=SPECS):
    tiny = [*TINY, "--data", str(text), "--steps", str(steps), "--save-every", "2"]
    return ["compare", "--encodings", *specs, *tiny, "--out", str(out), *more]


def results(out):
    return json.loads((out / "results.json").read_text())


def figures(out):
    return [(run["encoding"], run["seed"], run["perplexity"]) for run in results(out)["runs"]]


def one_line(capsys):
    """Return the one line that a failed command wrote to stderr."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("wavepe compare: error: ")
    return printed.err
