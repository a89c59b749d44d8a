"""The report of a comparison: tables in the terminal, report.md, and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from .settings import Protocol, Settings
from .tables import Row, markdown_rows

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A table and its picture; `of` is the key of a run that it shows."""

    title: str
    headings: list[str]
    rows: Sequence[Row]
    of: str
    picture: str = ""
    draw: Callable[[Path], Any] | None = None


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


def _accuracy(runs: Runs, settings: Settings) -> Section:
    """Return the table of the right answers of a task, by length."""
    from wavepe.analysis import plots

    lengths, length = settings.lengths, settings.train_length
    title = f"Task {settings.task}: share of answers that are right, trained on {length} bytes"
    values, rows = _values(runs, lengths, ["accuracy"]), rows_of(runs, lengths, "accuracy")
    draw = partial(plots.accuracy_grid, values, lengths, train_length=length, title=title)
    return Section(title, headings(lengths, length), rows, "accuracy", "accuracy.png", draw)


def _perplexity(runs: Runs, settings: Settings, title: str, picture: str, *keys: str) -> Section:
    """Return the table of the perplexity that `keys` lead to in a run, by length."""
    from wavepe.analysis import plots

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
    environment = results["environment"]
    settings, data = environment["settings"], environment["data"]
    seeds = settings["seeds"]
    seconds = sum(model["seconds"] for model in environment["models"].values())
    return (
        f"{len(environment['models'])} trainings of {settings['steps']} steps in "
        f"{seconds:.0f} s of training; {seeds} seed{'s' * (seeds > 1)}"
        f"{', mean ± standard deviation' * (seeds > 1)}; {settings['layers']} layers, "
        f"{settings['heads']} heads of {settings['head_dim']}.\n"
        f"Text: {data['text']}; evaluated on {data['evaluated_bytes']} bytes of the "
        f"{settings['split']} part. {environment['machine']}, torch {environment['torch']}, "
        f"{environment['date']}.\n"
    )


def mean_and_spread(cell: Sequence[float]) -> str:
    """Return the mean as text, and for several values also their standard deviation."""
    text = _plain(statistics.fmean(cell))
    return text if len(cell) == 1 else f"{text} ±{_plain(statistics.stdev(cell))}"


def _plain(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"  # a training that failed
