"""The results of a comparison: tables in the terminal, report.md, LaTeX and pictures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis import plots
from ..common.errors import UsageError, need_matplotlib
from ..common.files import new_file
from ..training.folder import RESULTS
from .numbers import once
from .settings import Protocol, Settings, entry
from .tables import Row, latex_rows, markdown_rows

Runs = Sequence[Mapping[str, Any]]
_LEAST_SEEDS = 3  # for an interval


@dataclass(frozen=True)
class Section:
    """A table and its picture; `of` is the key of a run that it shows."""

    title: str
    headings: list[str]
    rows: Sequence[Row]
    of: str
    picture: str = ""
    draw: Callable[[Path], Any] | None = None


@dataclass(frozen=True, repr=False)
class Results:
    """The results of `compare`. In a notebook they show their tables.

    Attributes
    ----------
    folder : Path
        The folder of the comparison, with results.json, report.md, pictures and checkpoints.
    content : dict
        The content of results.json.
    """

    folder: Path
    content: dict[str, Any]
    _settings: Settings

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read the results.json in the folder of a comparison, or a copy of it.

        A stopped comparison has the rows that were done. ValueError names another file, and OSError
        one that cannot be read.
        """
        path = Path(path, RESULTS) if Path(path).is_dir() else Path(path)
        text = path.read_bytes()
        try:
            content = json.loads(text)
            settings = Settings.from_dict(content["environment"]["settings"])
            loaded = cls(path.parent, content, settings)
            once("runs", [f"{run['encoding']}, seed {run['seed']}" for run in content["runs"]])
            json.dumps(content, allow_nan=False)
            str(loaded)  # a figure that is missing is an error here
        except Exception as error:  # another file may hold anything, nested at any depth
            wrong = f"{type(error).__name__}: {error}"
            raise UsageError(f"{path} holds no results of compare ({wrong})") from None
        return loaded

    def table(self) -> list[dict[Any, Any]]:
        """Return a row for each encoding, as ``pandas.DataFrame`` takes them.

        A row has "encoding", "seeds", and for each evaluated length (an int) the perplexity per
        byte, or its mean over the seeds.
        """
        return [
            {"encoding": row["encoding"], "seeds": row["seeds"],
             **{int(length): x["mean"] for length, x in row["perplexity"].items()}}
            for row in summary_of(self.content["runs"], self._settings.lengths)
        ]  # fmt: skip

    def paired(self, encoding: Any, baseline: Any, of: str = "perplexity") -> list[dict[str, Any]]:
        """Compare two rows seed by seed, with a 95 % interval of the mean.

        A seed gives all rows the same batches and initial weights; parameters of an encoding begin
        with fixed values. The interval is Student's. It says how far other seeds may move the mean,
        and nothing about other texts, sizes, learning rates or steps. It misses one mean of twenty,
        and is too narrow for shares that are 0 or 1 with each seed.

        Parameters
        ----------
        encoding, baseline : str or Encoding
            Names of rows. ValueError unless both have the same seeds.
        of : str
            "perplexity", or a further protocol, such as sliding:128/64: values are ratios, below 1
            if `encoding` is better. Or "accuracy" of a task: values are differences.

        Returns
        -------
        list of dict
            Each has "length", "seeds" (their number), "mean" (of ratios the geometric one), "low"
            and "high" (None for fewer than 3 seeds), "by_seed" (seed -> value).
        """
        known = {"perplexity": ["perplexity"]}
        known |= {"accuracy": ["accuracy"]} if self._settings.task else {}
        known |= {name: ["protocols", name] for name in self._settings.protocols[1:]}
        keys, by_name = entry("of", known, of), dict[str, dict[int, Any]]()
        for run in self.content["runs"]:
            by_name.setdefault(run["encoding"], {})[run["seed"]] = reduce(getitem, keys, run)
        one, other = entry("encoding", by_name, encoding), entry("baseline", by_name, baseline)
        if one.keys() != other.keys():
            seeds = f"{encoding} has {sorted(one)}, {baseline} has {sorted(other)}"
            raise UsageError(f"`baseline`: needs the seeds of `encoding`, but {seeds}")
        rows, ratio, few = [], of != "accuracy", len(one) < _LEAST_SEEDS
        scale = (lambda x: math.exp(min(x, 700))) if ratio else float  # a training may have failed
        for n in map(str, self._settings.lengths):
            pairs = ((x[n], other[seed][n]) for seed, x in one.items())
            values = [math.log(a / b) if ratio else a - b for a, b in pairs]
            low, high = (None, None) if few else map(scale, _interval(values))
            by_seed = dict(zip(one, map(scale, values), strict=True))
            rows.append({"length": int(n), "seeds": len(one), "low": low, "high": high,
                         "mean": scale(statistics.fmean(values)), "by_seed": by_seed})  # fmt: skip
        return rows

    def to_json(self) -> str:
        """Return the content of results.json."""
        return json.dumps(self.content, indent=2)

    def to_latex(self) -> str:
        """Return the tables for LaTeX with its package booktabs."""
        return "\n".join(
            f"% {x.title}\n{latex_rows('encoding', x.headings, x.rows)}" for x in self.sections
        )

    def plot(self, path: str | Path) -> None:
        """Draw the perplexity by length to a file (.png, .pdf or .svg); needs matplotlib."""
        need_matplotlib("plot")
        draw = next(x.draw for x in self.sections if x.of == "perplexity" and x.draw)
        with new_file(Path(path)) as new:
            draw(new)

    @property
    def sections(self) -> list[Section]:
        """The tables, with their pictures."""
        return [*sections(self.content["runs"], self._settings), *self._by_seed()]

    def _by_seed(self) -> list[Section]:
        """Return the table of all rows beside one, if they have the same seeds, two or more."""
        seeds: dict[str, set[int]] = {}
        for run in self.content["runs"]:
            seeds.setdefault(run["encoding"], set()).add(run["seed"])
        baseline = "rope" if "rope" in seeds else next(iter(seeds), "")
        same = seeds.pop(baseline, set())
        if (count := len(same)) < 2 or not seeds or any(x != same for x in seeds.values()):
            return []
        what, how = ("accuracy", "minus") if self._settings.task else ("perplexity", "divided by")
        enough = count >= _LEAST_SEEDS

        def cell(pair: dict[str, Any]) -> str:
            mean, *ends = (_plain(pair[x], 3) for x in ("mean", "low", "high")[: 1 + 2 * enough])
            return f"{mean} [{', '.join(ends)}]" if ends else mean

        rows = [(x, [cell(n) for n in self.paired(x, baseline, what)]) for x in seeds]
        shown = "mean" + " and 95 % interval" * enough
        title = f"{what.capitalize()} {how} that of {baseline}, {shown} of {count} seeds"
        heads = headings(self._settings.lengths, self._settings.train_length)
        return [Section(title, heads, rows, "by_seed")]

    def __repr__(self) -> str:
        return f"<Results of a comparison in {self.folder}>"

    def __str__(self) -> str:
        return report_text(self.content, self.sections, pictures=False)

    _repr_markdown_ = __str__


def report_text(results: Mapping[str, Any], shown: Sequence[Section], *, pictures: bool) -> str:
    """Return all tables as Markdown, with the pictures or without."""
    text = ["# Comparison of position encodings\n", _facts(results)]
    for section in shown:
        table = markdown_rows("encoding", section.headings, section.rows)
        text.append(f"## {section.title}\n\n{table}")
        if section.draw and pictures:
            text.append(f"![{section.title}]({section.picture})\n")
    return "\n".join(text)


def sections(runs: Runs, settings: Settings) -> list[Section]:
    """Return the sections of the report for these runs."""
    length, tuned, first = settings.train_length, settings.finetune, settings.protocols[0]
    listed = []
    if settings.task:
        listed.append(_accuracy(runs, settings))
    if tuned:
        heading = f"{title(length, first)}, before the training on {tuned} bytes"
        listed.append(_perplexity(runs, settings, heading, "before.png", "before", "perplexity"))
    for name in settings.protocols:
        keys = ("perplexity",) if name == first else ("protocols", name)
        ending = "" if name == first else f"-{name.replace(':', '-').replace('/', '-')}"
        heading = title(length, name, settings.task) + (f", then on {tuned}" if tuned else "")
        listed.append(_perplexity(runs, settings, heading, f"perplexity{ending}.png", *keys))
    if any("bands" in run for run in runs):
        listed.append(_bands(runs, settings))
    return listed


def title(train_length: int, protocol: str = "whole", task: str = "") -> str:
    """Return the title of a table of perplexity."""
    text = f"the answers of task {task}" if task else "held-out text"
    how = Protocol.parse(protocol, train_length).text
    return f"Perplexity per byte of {text}, {how}, trained on {train_length} bytes"


def headings(lengths: Sequence[int], train_length: int) -> list[str]:
    """Return one heading for each length, such as "256 (2x)"."""
    factors = [length / train_length for length in lengths]
    texts = [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in factors]  # never 1.02e+03
    return [f"{length} ({text}x)" for length, text in zip(lengths, texts, strict=True)]


def rows_of(runs: Runs, lengths: Sequence[int], *keys: str) -> list[tuple[str, list[str]]]:
    """Return rows (encoding, one cell for each length); the best cells of a column have a star.

    A cell is the perplexity, or the value that `keys` lead to in a run. With several seeds, it is
    the mean and the standard deviation. For "accuracy" the highest value is the best.
    """
    keys = keys or ("perplexity",)
    best = max if keys[-1] == "accuracy" else min
    values = _values(runs, lengths, keys)
    columns = []
    for column in zip(*values.values(), strict=True):
        means = [round(statistics.fmean(cell), 2) for cell in column]  # as they are printed
        stars = ["*" * (mean == best(means)) for mean in means]
        columns.append([mean_and_spread(x) + star for x, star in zip(column, stars, strict=True)])
    return list(zip(values, map(list, zip(*columns, strict=True)), strict=True))


def summary_of(runs: Runs, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return mean and standard deviation (None for one seed) of each encoding, for results.json."""
    summary: dict[str, dict[str, Any]] = {}
    for key in ("perplexity", "accuracy"):
        measured = [run for run in runs if key in run]
        for name, cells in _values(measured, lengths, (key,)).items():
            entry = summary.setdefault(name, {"encoding": name, "seeds": len(cells[0])})
            entry[key] = {}
            for length, cell in zip(lengths, cells, strict=True):
                std = statistics.stdev(cell) if len(cell) > 1 else None
                entry[key][str(length)] = {"mean": statistics.fmean(cell), "std": std}
    return list(summary.values())


def _values(
    runs: Runs, lengths: Sequence[int], keys: Sequence[str]
) -> dict[str, list[list[float]]]:
    """Return a dict: encoding -> for each length, one value for each seed."""
    figures = [(run["encoding"], reduce(getitem, keys, run)) for run in runs]
    return {
        name: [[by_length[str(n)] for encoding, by_length in figures if encoding == name]
               for n in lengths]
        for name, _ in figures
    }  # fmt: skip


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval of the mean."""
    n, angles = len(values), np.linspace(0, math.pi / 2, 20_001)
    # With |t| = sqrt(n - 1) tan(angle), the density of the angle is a power of its cosine.
    shares = np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (n - 2))
    t = math.sqrt(n - 1) * math.tan(np.interp(0.95, shares / shares[-1], angles[1:]))
    mean, half = statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def _accuracy(runs: Runs, settings: Settings) -> Section:
    """Return the table of the right answers of a task, by length."""
    lengths, length = settings.lengths, settings.train_length
    title = f"Task {settings.task}: share of answers that are right, trained on {length} bytes"
    values, rows = _values(runs, lengths, ["accuracy"]), rows_of(runs, lengths, "accuracy")
    draw = partial(plots.accuracy_grid, values, lengths, train_length=length, title=title)
    return Section(title, headings(lengths, length), rows, "accuracy", "accuracy.png", draw)


def _perplexity(runs: Runs, settings: Settings, title: str, picture: str, *keys: str) -> Section:
    """Return the table of the perplexity that `keys` lead to in a run, by length."""
    lengths, length = settings.lengths, settings.train_length
    drawn = [{**run, "perplexity": reduce(getitem, keys, run)} for run in runs]
    rows = rows_of(runs, lengths, *keys)
    draw = partial(plots.perplexity_by_length, drawn, train_length=length, title=title)
    return Section(title, headings(lengths, length), rows, keys[0], picture, draw)


def _bands(runs: Runs, settings: Settings) -> Section:
    """Return the table of predicted and measured bands, during training and at the end."""
    by_name: dict[str, list[dict[str, float]]] = {}  # row -> for each seed, heading -> band
    for run in runs:
        if "bands" not in run:
            continue
        bands = run.get("before", run)["bands"]
        predicted = bands["predicted"]
        cells = {"predicted j*": predicted, "1.1 j*": 1.1 * predicted}
        cells |= {f"step {step}": value for step, value in bands["steps"].items()}
        if settings.finetune:
            cells[f"before the training on {settings.finetune}"] = bands["key"]
        by_name.setdefault(run["encoding"], []).append({**cells, "at the end": run["bands"]["key"]})
    heads = list(next(iter(by_name.values()))[0])
    rows = []
    for name, seeds in by_name.items():
        constant = [f"{seeds[0][head]:.2f}" for head in heads[:2]]
        measured = [mean_and_spread([cells[head] for cells in seeds]) for head in heads[2:]]
        rows.append((name, constant + measured))
    pairs = f"a pair of 0 to {settings.head_dim // 2 - 1}"
    heading = f"Frequency band of keys, {pairs}, trained on {settings.train_length} bytes"
    return Section(heading, heads, rows, "bands")


def _facts(results: Mapping[str, Any]) -> str:
    """Return two lines about the models and the text of a comparison."""
    about = results["environment"]
    settings, data, seeds = about["settings"], about["data"], about["settings"]["seeds"]
    trained = [x["seconds"] for x in about.get("models", {}).values()]
    # Kept results have these two, and parts that were added on other machines.
    whole = {"trainings": len(trained), "seconds": sum(trained), **about, **results}
    parts = [whole, *results.get("added", ())]
    count, seconds = (sum(part[key] for part in parts) for key in ("trainings", "seconds"))
    places = dict.fromkeys(f"{x['machine']}, torch {x['torch']}, {x['date']}" for x in parts)
    return (
        f"{count} trainings of {settings['steps']} steps in {seconds:.0f} s of training; "
        f"{seeds} seed{'s' * (seeds > 1)}{': too few for an interval' * (seeds < _LEAST_SEEDS)}"
        f"{'; mean ± standard deviation' * (seeds > 1)}; {settings['layers']} layers, "
        f"{settings['heads']} heads of {settings['head_dim']}.\n"
        f"Text: {data['text']}; evaluated on {data['evaluated_bytes']} bytes of the "
        f"{settings['split']} part. {'; '.join(places)}.\n"
    )


def mean_and_spread(cell: Sequence[float]) -> str:
    """Return the mean as text, and for several values also their standard deviation."""
    text = _plain(statistics.fmean(cell))
    return text if len(cell) == 1 else f"{text} ±{_plain(statistics.stdev(cell))}"


def _plain(value: float, digits: int = 2) -> str:
    value = round(value, digits) + 0.0  # no -0.000
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"  # a training that failed
