"""`wavepe.experiments`: the commands compare and adapt, as functions."""

import inspect
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import wavepe.hf
from compare_cases import SPECS, figures, results, text, trained
from faults import without_times
from wavepe.cli import _parser
from wavepe.experiments import CommandError, Results, adapt, compare, comparison, executors
from wavepe.experiments.presets import DEFAULTS, MODELS
from wavepe.training.loop import Stopped

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
    assert str(Results.load(tmp_path / "out")) == str(found)


def planted(folder, **figures):
    """Write results that have these figures at both lengths, by encoding and seed; load them."""
    content = results(trained())
    content["runs"] = [
        {"encoding": name, "seed": seed, "perplexity": dict.fromkeys(("16", "32"), value)}
        for name, by_seed in figures.items() for seed, value in by_seed.items()
    ]  # fmt: skip
    content["environment"]["settings"]["seeds"] = len(figures["rope"])
    (folder / "results.json").write_text(json.dumps(content))
    return Results.load(folder)


# Student's t with n - 1 degrees of freedom, which 2.5 % of cases exceed, from a printed table
@pytest.mark.parametrize(("n", "t"), [(3, 4.303), (5, 2.776), (10, 2.262), (30, 2.045)])
def test_an_interval_over_seeds(tmp_path, n, t):
    """Seeds are paired by number, and not by order; ratios are averaged as logarithms."""
    logs = [0.01 * (7 * seed % 10) - 0.1 for seed in range(n)]
    base = {seed: 3.0 + seed for seed in range(n)}
    better = {seed: base[seed] * math.exp(logs[seed]) for seed in reversed(base)}
    loaded = planted(tmp_path, rope=base, alibi=better)
    row, swapped = (loaded.paired(*names)[1] for names in (("alibi", "rope"), ("rope", "alibi")))
    half, mean = t * statistics.stdev(logs) / math.sqrt(n), statistics.fmean(logs)
    expected = pytest.approx([math.exp(mean + x) for x in (-half, 0, half)], rel=1e-5)
    assert [row[x] for x in ("low", "mean", "high")] == expected
    assert [1 / swapped[x] for x in ("high", "mean", "low")] == expected
    assert row["by_seed"] == pytest.approx(dict(enumerate(map(math.exp, logs))))


def test_few_or_different_seeds_have_no_interval(tmp_path):
    for seeds, many in (({4: 4.0}, "1 seed"), ({4: 4.0, 5: 16.0}, "2 seeds")):
        loaded = planted(tmp_path, rope=seeds, alibi=dict.fromkeys(seeds, 2.0))
        row, _ = loaded.paired("rope", "alibi")
        assert (row["low"], row["high"], row["seeds"]) == (None, None, len(seeds))
        assert row["mean"] == pytest.approx(2.0 ** len(seeds))
        assert f"{many}: too few for an interval" in str(loaded)
    loaded = planted(tmp_path, rope=seeds, alibi={4: 1.0, 6: 1.0})
    for of, wrong in (("perplexity", "alibi has .4, 6."), ("accuracy", "`of` .*perplexity")):
        with pytest.raises(ValueError, match=wrong):
            loaded.paired("rope", "alibi", of)


def test_a_seed_that_failed_leaves_the_table_readable(tmp_path):
    rope, one = dict.fromkeys(range(3), 2.0), {0: 2.0, 1: 1e250, 2: 2.0}
    text = str(planted(tmp_path, rope=rope, alibi=one))
    assert wavepe.experiments.report.mean_and_spread([-0.004]) == "0.00"
    assert re.search(r"\[0\.000, \d\.\d\de\+\d+\] \|$", text)


def test_the_table_of_pairs_in_markdown_and_latex(tmp_path):
    shown = planted(tmp_path, a_b=dict.fromkeys(range(3), 2.0), rope=dict.fromkeys(range(3), 1.0))
    title, cell = "rope, mean and 95 % interval of 3 seeds\n", "2.000 [2.000, 2.000]"
    assert f"## Perplexity divided by that of {title}\n| encoding | 16 (1x) |" in str(shown)
    assert str(shown).endswith(f"|\n| `a_b` | {cell} | {cell} |\n")
    before, latex = shown.to_latex().split(f"\n% Perplexity divided by that of {title}")
    rows = rf"encoding & 16 (1x) & 32 (2x) \\|\midrule|\texttt{{a\_b}} & {cell} & {cell} \\"
    rows = rf"\begin{{tabular}}{{lrr}}|\toprule|{rows}|\bottomrule|\end{{tabular}}|"
    assert latex == rows.replace("|", "\n")
    assert r"\texttt{rope} & \textbf{1.00 $\pm$ 0.00} & \textbf{1.00 $\pm$ 0.00} \\" in before


def test_what_is_loaded_are_whole_results(tmp_path):
    kept, path = Path(__file__).parents[1] / "benchmarks/results", tmp_path / "results.json"
    tasks = Results.load(kept / "compare/tasks-keys.json")
    row = tasks.paired(wavepe.encoding("kerple"), "alibi", "accuracy")[-1]
    assert row["low"] < row["mean"] == pytest.approx(0.58 - 0.18, abs=0.01)  # as the report has it
    others = ((kept / x).read_text() for x in ("adapt-128.json", "hf-models.json"))
    texts = ["[1", "[" * 100_000, "[]", *others]
    runs = results(trained())["runs"]
    for wrong in ({"16": 1.5}, {"16": 1.5, "32": math.nan}, {"16": 1.5, "32": "1.5"}):
        texts.append(json.dumps({**results(trained()), "runs": [{**runs[0], "perplexity": wrong}]}))
    for written in (*texts, json.dumps({**results(trained()), "runs": [*runs, runs[0]]})):
        path.write_text(written)
        with pytest.raises(ValueError, match=f"^{path} holds no results of compare"):
            Results.load(tmp_path)


def test_wrong_arguments_name_the_argument(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for wrong, message in (
        ({"lr": 0}, "^`lr` 0: needs a positive number"),
        ({"preset": "Wavelets"}, r"`preset` Wavelets: needs .*, did you mean 'wavelet'\?"),
        ({"encodings": []}, "^`encodings`: needs at least one"),
        ({"executor": ThreadPoolExecutor()}, "^`executor`: needs processes, "),
        ({"executor": Executor(), "jobs": 2}, "^`executor`: needs .* `jobs` to be left out"),
        ({"executor": "dusk://here:1"}, "^`executor` dusk://here:1: needs dask://HOST:PORT, slurm"),
        ({"executor": "dask"}, "^`executor` dask: needs dask://HOST:PORT, slurm"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(**{"encodings": "none", "out": out, **TINY, **wrong})
    monkeypatch.setitem(executors._KINDS, "mpi", ("nothing", None))
    with pytest.raises(ImportError, match=r'`executor` mpi needs nothing: pip install "\.\[mpi\]"'):
        compare("none", out=out, executor="mpi", **TINY)
    assert not out.exists()
    with pytest.raises(ValueError, match=r"^`data` '': no such file"):
        adapt(tmp_path, out, "alibi", data="")
    with pytest.raises(ValueError, match=r"^`learning_rate` must be above 0, got -1.0$"):
        adapt(tmp_path, out, "alibi", data="", lr=-1)


class OneByOne(Executor):
    """Runs each task at once, and has no more than `submit`, as executors of other libraries.

    It loses the process of a task whose number is in `lost`.
    """

    def __init__(self, *lost):
        self.lost = lost

    def submit(self, function, /, number, *args):
        future = Future()
        if number in self.lost:
            future.set_exception(EOFError("worker 7 is gone\nits log"))
        else:
            future.set_result(function(number, *args))
        return future


def test_an_executor_gives_the_same_figures(tmp_path, capfd):
    """Also where a killed command has left its events; an error is that of the task."""
    options, out = {**TINY, "out": tmp_path / "out", "executor": OneByOne()}, tmp_path / "out"
    compare("none", **options)
    (out / ".events-old").mkdir()
    compare(SPECS, **options | {"progress": True})
    want, got = (results(folder)["runs"] for folder in (trained(), out))
    assert [run["perplexity"] for run in got] == [run["perplexity"] for run in want]
    lines = capfd.readouterr().err.splitlines()
    for start in ("step 3 of 6, loss ", "perplexity at 16: "):
        assert any(line.startswith(f"[3/3] wavelet:scales=3: {start}") for line in lines), lines
    assert not list(out.glob(".events*"))
    with pytest.raises(CommandError, match="none: the loss is"):
        compare("none", **options | {"lr": 1e30, "out": tmp_path / "bad"})


def test_an_event_is_read_when_it_is_whole(tmp_path):
    file = tmp_path / "events"
    with file.open("wb", 0) as written, file.open("rb") as read:
        written.write(b'["a", 1]\n["b"')
        assert list(executors._events(read)) == [["a", 1]]
        written.write(b", 2]\n")
        assert list(executors._events(read)) == [["b", 2]]
        written.write(b'["c", \n["d", 3]\n')  # the process was killed, and another went on
        assert list(executors._events(read)) == [["d", 3]]


def test_a_task_ends_when_its_command_has(tmp_path, monkeypatch):
    """No executor need stop it. It saves its state, from which the same command goes on."""
    batch_at, out = comparison.batch_at, tmp_path / "out"

    def ending(text, step, *rest):
        for events in out.glob(".events*") if step == 4 else ():
            shutil.rmtree(events)
        return batch_at(text, step, *rest)

    monkeypatch.setattr(comparison, "batch_at", ending)
    options = {**TINY, "out": out, "save_every": 99}
    with pytest.raises(Stopped):
        compare(["none"], executor=OneByOne(), **options)
    assert torch.load(out / "training/none-seed0.pt", weights_only=True)["step"] == 5
    assert compare(["none"], **options).table()[0][32] == figures(trained())[0][2]["32"]


def test_a_lost_process_costs_one_training(tmp_path):
    with pytest.raises(CommandError, match=r"was killed, .* \(EOFError: worker 7 is gone\)$"):
        compare(["none", "rope", "alibi"], out=tmp_path, executor=OneByOne(0), **TINY)
    assert [run["encoding"] for run in results(tmp_path)["runs"]] == ["rope", "alibi"]


@contextmanager
def pool(folder):
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        yield executor


@contextmanager
def dask(folder):
    """Two workers. The one that trains is killed, and the other goes on."""
    distributed = pytest.importorskip("distributed")
    sizes = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**sizes) as workers, distributed.Client(workers) as client:
        numbers = client.run(os.getpid)

        def kill():
            while not list(folder.glob("training/rope*.pt")):
                time.sleep(0.01)
            (victim,) = (worker for worker, keys in client.processing().items() if keys)
            os.kill(numbers[victim], signal.SIGKILL)

        threading.Thread(target=kill).start()
        yield workers.scheduler_address.replace("tcp", "dask")


@contextmanager
def slurm(folder):
    """SLURM's commands are scripts here, which run a job at once."""
    pytest.importorskip("submitit")
    job = "JOB_ID=$$ NTASKS=1 JOB_NUM_NODES=1 NODEID=0 JOB_NODELIST=here PROCID=0 LOCALID=0"
    job = f"export {' '.join(f'SLURM_{word}' for word in job.split())}"
    scripts = {
        "sbatch": f'{job}; sh "$1" > /dev/null 2>&1 & echo Submitted batch job $$',
        "srun": 'shift 5; exec "$@"', "sacct": "", "scancel": "",
    }  # fmt: skip
    for name, script in scripts.items():
        path = folder.parent / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    with mock.patch.dict(os.environ, PATH=f"{path.parent}:{os.environ['PATH']}"):
        yield "slurm:timeout_min=5,slurm_partition=cpus"


@pytest.mark.slow  # interpreters that import torch
@pytest.mark.parametrize("kind", [pool, dask, slurm])
def test_every_executor_gives_the_same_results(kind, tmp_path, capfd):
    sizes = {**TINY, "steps": 300, "save_every": 20, "progress": True}
    compare("rope", out=tmp_path / "alone", **sizes)
    with kind(tmp_path / "out") as executor:
        compare("rope", out=tmp_path / "out", executor=executor, **sizes)
    alone, found = (without_times(results(tmp_path / name)) for name in ("alone", "out"))
    assert found == alone
    assert ("resumes at step" in capfd.readouterr().err) == (kind is dask)


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
    others = {"progress", "options", "model", "folder", "tokenizer", "training"}
    assert set(inspect.signature(function).parameters) - others <= options
