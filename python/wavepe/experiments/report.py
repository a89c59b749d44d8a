"""The report of a comparison: tables in the terminal, report.md, and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .protocols import Protocol
from .settings import Settings
from .tables import Row, markdown_rows, print_rows

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A table and its picture; `of` is the key of a run that it shows."""

    title: str
    headings: list[str]
    rows: Sequence[Row]
    of: str
    picture: str = ""
    draw: Callable[[Path], None] | None = None


def report_text(
    results: Mapping[str, Any], found: Iterable[tuple[str, Section]], *, pictures: bool
) -> str:
    """Return the tables of all parts as Markdown, with the pictures or without."""
    text, last = ["# Comparison of position encodings\n"], None
    for part, section in found:
        if part != last:
            text += [f"# {part}\n"] * bool(part) + [_facts(results[part])]
            last = part
        text.append(
            f"## {section.title}\n\n{markdown_rows('encoding', section.headings, section.rows)}"
        )
        if section.draw and pictures:
            place = f"{part}/" if part else ""
            text.append(f"![{section.title}]({place}{section.picture})\n")
    return "\n".join(text)


def sections(runs: Runs, settings: Settings) -> list[Section]:
    """Return the sections of the report for these runs."""
    length, found = settings.train_length, []
    if settings.task:
        found.append(_accuracy(runs, settings))
    first, *others = settings.protocols
    tuned = settings.finetune
    if tuned:
        heading = f"{title(length, first)}, before the training on {tuned} bytes"
        found.append(_perplexity(runs, settings, heading, "before.png", "before", "perplexity"))
    heading = title(length, first, settings.task) + (f", then on {tuned}" if tuned else "")
    found.append(_perplexity(runs, settings, heading, "perplexity.png", "perplexity"))
    for name in others:
        picture = f"perplexity-{name.replace(':', '-').replace('/', '-')}.png"
        heading = title(length, name) + (f", then on {tuned}" if tuned else "")
        found.append(_perplexity(runs, settings, heading, picture, "protocols", name))
    if any("bands" in run for run in runs):
        found.append(_bands(runs, settings))
    return found


def title(train_length: int, protocol: str = "whole", task: str = "") -> str:
    """Return the title of a table of perplexity."""
    what = f"the answers of task {task}" if task else "held-out text"
    how = Protocol.parse(protocol, train_length).text
    return f"Perplexity per byte of {what}, {how}, trained on {train_length} bytes"


def console_table(runs: Runs, lengths: Sequence[int], train_length: int) -> None:
    """Print the table of perplexity, without a title."""
    print_rows("encoding", headings(lengths, train_length), rows_of(runs, lengths))


def markdown_table(runs: Runs, lengths: Sequence[int], train_length: int) -> str:
    """Return the table of perplexity as Markdown, with the best values in bold."""
    return markdown_rows("encoding", headings(lengths, train_length), rows_of(runs, lengths))


def headings(lengths: Sequence[int], train_length: int) -> list[str]:
    """Return one heading for each length, such as "256 (2x)"."""
    heads = []
    for length in lengths:
        factor = length / train_length
        text = f"{factor:.3g}" if factor < 1000 else f"{factor:.0f}"  # never 1.02e+03
        heads.append(f"{length} ({text}x)")
    return heads


def rows_of(runs: Runs, lengths: Sequence[int], *keys: str) -> list[tuple[str, list[str]]]:
    """Return rows (encoding, one cell for each length); the best cells of a column have a star.

    A cell is the perplexity, or the value that `keys` lead to in a run. With several seeds, it is
    the mean and the standard deviation. For "accuracy" the highest value is the best.
    """
    keys = keys or ("perplexity",)
    best = max if keys[-1] == "accuracy" else min
    values = _values(runs, lengths, keys)
    means = {  # rounded as they are printed
        name: [round(statistics.fmean(cell), 2) for cell in cells] for name, cells in values.items()
    }
    bests = [best(column) for column in zip(*means.values(), strict=True)]
    return [
        (
            name,
            [
                mean_and_spread(cell) + ("*" if mean == least else "")
                for cell, mean, least in zip(cells, means[name], bests, strict=True)
            ],
        )
        for name, cells in values.items()
    ]


def summary_of(runs: Runs, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return mean and spread over the seeds of each encoding, for results.json.

    "std" is the standard deviation of the sample; None for one seed.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in ("perplexity", "accuracy"):
        those = [run for run in runs if key in run]
        for name, cells in _values(those, lengths, (key,)).items():
            entry = found.setdefault(name, {"encoding": name, "seeds": len(cells[0])})
            entry[key] = {
                str(length): {
                    "mean": statistics.fmean(cell),
                    "std": statistics.stdev(cell) if len(cell) > 1 else None,
                }
                for length, cell in zip(lengths, cells, strict=True)
            }
    return list(found.values())


def _values(
    runs: Runs, lengths: Sequence[int], keys: Sequence[str]
) -> dict[str, list[list[float]]]:
    """Return a dict: encoding -> for each length, one value for each seed."""
    values: dict[str, list[list[float]]] = {}
    for run in runs:
        cells = values.setdefault(run["encoding"], [[] for _ in lengths])
        for cell, length in zip(cells, lengths, strict=True):
            cell.append(lookup(run, keys)[str(length)])
    return values


def lookup(run: Any, keys: Sequence[str]) -> Any:
    """Return what the keys lead to in a run."""
    for key in keys:
        run = run[key]
    return run


def _perplexity(runs: Runs, settings: Settings, heading: str, picture: str, *keys: str) -> Section:
    from wavepe.analysis.plots import perplexity_by_length

    lengths, length = settings.lengths, settings.train_length
    drawn = [{**run, "perplexity": lookup(run, keys)} for run in runs]

    def draw(path: Path) -> None:
        perplexity_by_length(drawn, path, train_length=length, title=heading)

    heads, rows = headings(lengths, length), rows_of(runs, lengths, *keys)
    return Section(heading, heads, rows, keys[0], picture, draw)


def _accuracy(runs: Runs, settings: Settings) -> Section:
    from wavepe.analysis.plots import accuracy_grid

    lengths, length = settings.lengths, settings.train_length
    heading = f"Task {settings.task}: share of answers that are right, trained on {length} bytes"
    values = _values(runs, lengths, ("accuracy",))

    def draw(path: Path) -> None:
        accuracy_grid(values, lengths, path, train_length=length, title=heading)

    rows = rows_of(runs, lengths, "accuracy")
    return Section(heading, headings(lengths, length), rows, "accuracy", "accuracy.png", draw)


def _bands(runs: Runs, settings: Settings) -> Section:
    """Return the table of predicted and measured bands, during training and at the end."""
    length = settings.train_length
    by_name: dict[str, list[dict[str, float]]] = {}  # row -> for each seed, heading -> band
    predicted = {}
    for run in runs:
        if "bands" not in run:
            continue
        bands = run.get("before", run)["bands"]
        found = {f"step {step}": value for step, value in bands["steps"].items()}
        if settings.finetune:
            found[f"before the training on {settings.finetune}"] = bands["key"]
        found["at the end"] = run["bands"]["key"]
        by_name.setdefault(run["encoding"], []).append(found)
        predicted[run["encoding"]] = bands["predicted"]
    measured = list(next(iter(by_name.values()))[0])
    rows = [
        (
            name,
            [f"{predicted[name]:.2f}", f"{1.1 * predicted[name]:.2f}"]
            + [mean_and_spread([one[key] for one in found]) for key in measured],
        )
        for name, found in by_name.items()
    ]
    heads = ["predicted j*", "1.1 j*", *measured]
    heading = (
        f"Frequency band of keys, a pair of 0 to {settings.head_dim // 2 - 1}, trained on "
        f"{length} bytes"
    )
    return Section(heading, heads, rows, "bands")


def _facts(results: Mapping[str, Any]) -> str:
    """Return two lines that say what was compared."""
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
