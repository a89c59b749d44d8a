"""`wavepe.experiments`: the commands compare and adapt, as functions."""

import inspect
import json
import multiprocessing
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import wavepe.hf
from compare_cases import SPECS, results, text, trained
from wavepe.cli import _parser
from wavepe.experiments import CommandError, adapt, compare
from wavepe.experiments.executors import _events
from wavepe.experiments.presets import DEFAULTS, MODELS

TINY = {
    "data": text(), "train_length": 16, "lengths": [16, 32], "batch": 2, "layers": 1, "heads": 2,
    "head_dim": 6, "eval_bytes": 128, "lr": 0.02, "steps": 6, "save_every": 2, "progress": False,
}  # fmt: skip


def test_a_call_gives_the_figures_of_the_command(tmp_path, capfd):
    found = compare(["none", "rope"], out=tmp_path / "out", **TINY)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    expected = {run["encoding"]: run["perplexity"] for run in results(trained())["runs"]}
    assert found.table() == [
        {"encoding": name, "seeds": 1, 16: expected[name]["16"], 32: expected[name]["32"]}
        for name in ("none", "rope")
    ]
    assert json.loads(found.to_json()) == results(tmp_path / "out")
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert f"{expected['rope']['32']:.2f}" in str(found)
    again = compare(["none", "rope"], out=tmp_path / "out", **TINY)  # nothing is trained
    assert again.table() == found.table()


def test_wrong_arguments_name_the_argument(tmp_path):
    out = tmp_path / "out"
    for wrong, message in (
        ({"lr": 0}, "^`lr` 0: needs a positive number"),
        ({"preset": "Wavelets"}, r"`preset` Wavelets: needs .*, did you mean 'wavelet'\?"),
        ({"encodings": []}, "^`encodings`: needs at least one"),
        ({"executor": ThreadPoolExecutor()}, "^`executor`: needs processes, "),
        ({"executor": Executor(), "jobs": 2}, "^`executor`: needs .* `jobs` to be left out"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(**{"encodings": "none", "out": out, **TINY, **wrong})
    assert not out.exists()
    with pytest.raises(ValueError, match=r"^`data` '': no such file"):
        adapt(tmp_path, out, "alibi", data="")
    with pytest.raises(ValueError, match=r"^`learning_rate` must be above 0, got -1.0$"):
        adapt(tmp_path, out, "alibi", data="", lr=-1)


class OneByOne(Executor):
    """Runs each task at once, and has no more than `submit`, as executors of other libraries."""

    def submit(self, function, /, *args, **options):
        future = Future()
        try:
            future.set_result(function(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def test_an_executor_gives_the_same_figures(tmp_path, capfd):
    """Also where a killed command has left its events; an error is that of the task."""
    options, out = {**TINY, "out": tmp_path / "out", "executor": OneByOne()}, tmp_path / "out"
    compare("none", **options)
    (out / ".events").mkdir()
    compare(SPECS, **options | {"progress": True})
    want, got = (results(folder)["runs"] for folder in (trained(), out))
    assert [run["perplexity"] for run in got] == [run["perplexity"] for run in want]
    lines = capfd.readouterr().err.splitlines()
    for start in ("step 3 of 6, loss ", "perplexity at 16: "):
        assert any(line.startswith(f"[3/3] wavelet:scales=3: {start}") for line in lines), lines
    assert not (out / ".events").exists()
    with pytest.raises(CommandError, match="none: the loss is"):
        compare("none", **options | {"lr": 1e30, "out": tmp_path / "bad"})


def test_an_event_is_read_when_it_is_whole(tmp_path):
    file = tmp_path / "events"
    with file.open("wb", 0) as written, file.open("rb") as read:
        written.write(b'["a", 1]\n["b"')
        assert list(_events(read)) == [["a", 1]]
        written.write(b", 2]\n")
        assert list(_events(read)) == [["b", 2]]


@pytest.mark.slow  # two interpreters that import torch
def test_a_pool_of_the_users(tmp_path):
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        compare(["none", "rope"], out=tmp_path / "out", executor=pool, **TINY)
    want = {run["encoding"]: run["perplexity"] for run in results(trained())["runs"]}
    for run in results(tmp_path / "out")["runs"]:
        assert run["perplexity"] == want[run["encoding"]]


def test_the_docstring_tells_the_defaults():
    told = inspect.getdoc(compare)
    for name, value in (*MODELS["tiny"].items(), *DEFAULTS.items()):
        if isinstance(value, (int, float)) and value:
            end = f"(tiny: {value:g})" if name in MODELS["tiny"] else f"The default is {value}."
            entry = told.partition(f"\n{name} : ")[2].partition(" : ")[0]
            assert end in " ".join(entry.split()), name


@pytest.mark.parametrize("function", [compare, adapt, wavepe.hf.adapt])
def test_every_parameter_is_an_option(function):
    parser = _parser(function.__name__, {})
    actions = next(a for a in parser._actions if a.choices).choices[function.__name__]._actions
    options = {action.dest for action in actions}
    others = {"executor", "progress", "options", "model", "folder", "tokenizer", "training"}
    assert set(inspect.signature(function).parameters) - others <= options
