"""``wavepe compare``: train one small Llama per encoding, evaluate each beyond its length."""

from __future__ import annotations

import argparse
import datetime
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wavepe

from ..._files import OF_THE_DISK, new_file
from ..environment import environment
from ..errors import CommandError, UsageError, require, thread_count
from ..imports import import_all, name_in
from .data import Text, evaluation_bytes, load_text
from .folder import RunFolder, model_name
from .settings import DEFAULT_ENCODINGS, Settings, digest, settings_from

if TYPE_CHECKING:
    from ..device import Device

# Training states kept so often that a kill costs little, so seldom that they cost nothing.
_SAVES_PER_TRAINING = 20
_MOST_STEPS_BETWEEN_SAVES = 200

# Measured on models of this size: a second thread gains a quarter on an idle machine, and costs a
# factor of 2 to 20 where another process keeps one of two cores busy (threads wait by spinning).
_THREADS = 1


@dataclass(frozen=True)
class Model:
    """One training, and the rows (specs) that are read from it."""

    spec: str
    seed: int
    rows: tuple[str, ...]

    @property
    def name(self) -> str:
        return model_name(self.spec, self.seed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wavepe compare``."""
    add = parser.add_argument
    add("--encodings", nargs="+", metavar="SPEC",
        help="the rows: name or name:key=value,key=value (default: "
        + " ".join(DEFAULT_ENCODINGS) + ")")  # fmt: skip
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip
    add("--lengths", nargs="+", metavar="N",
        help="sequence lengths to evaluate (default: 1, 2, 4, 8 times --train-length)")  # fmt: skip
    add("--data", metavar="PATH", help="a text file, or a folder of them (default: the Python "
        "standard library's sources)")  # fmt: skip
    add("--steps", type=int, default=1200, metavar="N", help="training steps (%(default)s)")
    add("--seeds", type=int, default=1, metavar="N", help="trainings per encoding (%(default)s)")
    add("--out", metavar="DIR", help="folder of the results (default: runs/compare-XXXXXXXX, "
        "named after the settings)")  # fmt: skip
    add("--train-length", type=int, default=128, metavar="N", help="trained length (%(default)s)")
    add("--batch", type=int, default=8, metavar="N", help="sequences per step (%(default)s)")
    add("--layers", type=int, default=2, metavar="N", help="layers (%(default)s)")
    add("--heads", type=int, default=4, metavar="N", help="attention heads (%(default)s)")
    add("--head-dim", type=int, default=24, metavar="N", help="head size (%(default)s)")
    add("--lr", type=float, default=3e-3, metavar="X", help="learning rate (%(default)s)")
    add("--eval-bytes", type=int, default=65536, metavar="N",
        help="held-out bytes to evaluate on, about (%(default)s)")  # fmt: skip
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu",
        help="what trains and evaluates; cuda takes products in bfloat16, auto is cuda where there "
        "is a GPU (default: %(default)s)")  # fmt: skip
    add("--threads", type=int, metavar="N", help=f"CPU threads (default: {_THREADS})")
    add("--save-every", type=int, metavar="N",
        help="training steps between the states a killed run resumes from")  # fmt: skip
    add("--quiet", action="store_true", help="print the table alone")


def run(args: argparse.Namespace) -> int:
    """Check everything, then train, evaluate and report."""
    settings = settings_from(args, _import(args))
    for option in ("threads", "save_every"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} {value}: needs at least 1")
    text = load_text(args.data, max(settings.lengths), settings.train_length)
    if args.out == "":
        raise UsageError("--out: needs a folder, got an empty name")
    require("wavepe compare", torch="torch", transformers="hf", rich="cli", matplotlib="plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ValueError as error:  # of MPLBACKEND, after hours of training otherwise
        raise CommandError(f"matplotlib: {error}") from error
    from ..device import CPU, device_named

    device = device_named(args.device)
    manifest = settings.manifest(text.sha256)
    ending = "" if device == CPU else f"-{device.place.type}"
    folder = RunFolder(Path(args.out or f"runs/compare-{digest(manifest)}{ending}"))
    threads = thread_count("--threads", args.threads or folder.recorded("threads", int) or _THREADS)
    save_every = args.save_every or max(
        1, min(settings.steps // _SAVES_PER_TRAINING, _MOST_STEPS_BETWEEN_SAVES)
    )
    try:
        with _torch_threads(threads) as threads, folder.opened({**manifest, "threads": threads}):
            comparison = _Comparison(settings, text, folder, threads, save_every, device)
            results = comparison.run(args.quiet)
            _report(folder, settings, results, args.quiet)
    except OSError as error:
        if error.errno in OF_THE_DISK and error.filename is not None:
            raise CommandError(
                f"{error.filename}: {error.strerror}; to go on, give the same command again"
            ) from error
        raise
    return 0


def _import(args: argparse.Namespace) -> tuple[str, ...]:
    """Run the files of --import; UsageError where the folder was begun with another."""
    imports = import_all(args.imports)
    begun = RunFolder(Path(args.out)).recorded("imports", list) if args.out else None
    for name in map(name_in, map(str, begun or ())):
        if name not in map(name_in, imports):
            raise UsageError(f"--out {args.out} was begun with --import {name}: give it again")
    return imports


def models_of(settings: Settings) -> list[Model]:
    """The trainings: rows whose encodings train alike share one."""
    rows: dict[str, list[str]] = {}
    for spec in settings.encodings:
        rows.setdefault(str(wavepe.encoding(spec).trained_as()), []).append(spec)
    return [
        Model(spec, seed, tuple(specs))
        for seed in range(settings.seeds)
        for spec, specs in rows.items()
    ]


class _Comparison:
    """Runs what is missing in the folder, in order, and keeps results.json up to date."""

    def __init__(
        self,
        settings: Settings,
        text: Text,
        folder: RunFolder,
        threads: int,
        save_every: int,
        device: Device,
    ) -> None:
        self.settings, self.text, self.folder = settings, text, folder
        self.threads, self.save_every, self.device = threads, save_every, device
        self.held_out = evaluation_bytes(text.held_out, settings.lengths, settings.eval_bytes)
        before = folder.read(folder.results)
        before = {"runs": [], "environment": {}} if before is None else before
        try:
            self.done = {(run["encoding"], run["seed"]): run for run in before["runs"]}
            whole = [run["perplexity"][str(n)] for run in before["runs"] for n in settings.lengths]
            same = before["environment"].get("run", folder.run) == folder.run
            self.variants = set(before["environment"].get("variants", ())) | {wavepe.variant()}
            # Of rows from before there were others: the CPU.
            used = before["environment"].get("devices", ["cpu"] if self.done else [])
            self.devices = {*used, device.label}
            if not (same and all(isinstance(value, float) for value in whole)):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{folder.results} is not of this comparison: remove it, or give another --out"
            ) from None
        self.models = models_of(settings)
        for model in self.models:
            if folder.trained(model.spec, model.seed) is None:
                for spec in model.rows:  # of a model that is gone, or was another's
                    self.done.pop((spec, model.seed), None)

    def run(self, quiet: bool) -> dict[str, Any]:
        """Train and evaluate; returns what results.json holds at the end."""
        from .progress import Report

        with Report(len(self.models), self.settings.steps, quiet=quiet) as report:
            for number, model in enumerate(self.models):
                report.model(number, model.rows[0])
                checkpoint, facts = self._train(model, report)
                for spec in model.rows:
                    if (spec, model.seed) not in self.done:
                        report.evaluating(spec)
                        self._evaluate(checkpoint, facts, model.seed, spec, report)
        results = self.folder.read(self.folder.results)
        assert results is not None  # every comparison has a row
        return results

    def _train(self, model: Model, report: Any) -> tuple[Path, dict[str, Any]]:
        """The model's checkpoint and its training.json, trained now if it was not before."""
        found = self.folder.trained(model.spec, model.seed)
        if found is not None:
            self.folder.discard_training(model.name)
            report.starts_at(self.settings.steps)
            report.note(f"{model.rows[0]}: trained before, {found[0]}{self._elsewhere(found[1])}")
            return found
        from .training import train

        state = train(
            model.spec, model.seed, self.settings, self.text.train,
            self.folder.training(model.name), self.folder.run, self.save_every, report, self.device,
        )  # fmt: skip
        facts = {"spec": model.spec, "seed": model.seed, "steps": state.step}
        facts["run"] = self.folder.run
        facts |= {"loss": round(state.loss, 4), "seconds": round(state.seconds, 3)}
        facts |= {"variants": state.variants, "devices": state.devices}

        def save(path: Path) -> None:
            state.model.save_pretrained(path)
            self.folder.write_json(path / "training.json", facts)

        self.folder.finish(model.name, save)
        return self.folder.checkpoint(model.name), facts

    def _elsewhere(self, facts: dict[str, Any]) -> str:
        """A remark on a model that was trained on another device; empty for others."""
        devices = facts.get("devices", ["cpu"])
        if devices == [self.device.label]:
            return ""
        return f", on {' and '.join(devices)}: figures may differ from those of {self.device.label}"

    def _evaluate(
        self, checkpoint: Path, facts: dict[str, Any], seed: int, spec: str, report: Any
    ) -> None:
        from .training import evaluate

        began = time.perf_counter()
        perplexity = evaluate(checkpoint, spec, self.held_out, self.settings.lengths, self.device)
        for length, value in perplexity.items():
            if not math.isfinite(value):
                raise CommandError(
                    f"{spec}: the perplexity at {length} is {value}: try a smaller --lr"
                )
        seconds = facts["seconds"] + time.perf_counter() - began
        self.done[spec, seed] = {
            "encoding": spec,
            "seed": seed,
            "perplexity": perplexity,
            "seconds": round(seconds, 3),
        }
        self.folder.write_json(self.folder.results, self._results())
        numbers = ", ".join(f"{length}: {value:.2f}" for length, value in perplexity.items())
        report.note(f"{spec}: perplexity at {numbers}, in {seconds:.0f} s")

    def _results(self) -> dict[str, Any]:
        wanted = [
            (spec, seed) for seed in range(self.settings.seeds) for spec in self.settings.encodings
        ]
        found = (self.folder.trained(m.spec, m.seed) for m in self.models)
        models = {f"checkpoints/{path.name}": facts for path, facts in filter(None, found)}
        return {
            "train_length": self.settings.train_length,
            "runs": [self.done[key] for key in wanted if key in self.done],
            "environment": {
                **environment(),
                "run": self.folder.run,
                "variants": sorted(self.variants),
                **self.device.facts,
                "devices": sorted(self.devices),
                "threads": self.threads,
                "date": datetime.date.today().isoformat(),
                "protocol": "whole",
                "data": {
                    "text": self.text.description,
                    "sha256": self.text.sha256,
                    "train_bytes": len(self.text.train),
                    "held_out_bytes": len(self.text.held_out),
                    "evaluated_bytes": len(self.held_out),
                },
                "settings": asdict(self.settings),
                "models": models,
                "complete": all(key in self.done for key in wanted),
            },
        }


def _report(folder: RunFolder, settings: Settings, results: dict[str, Any], quiet: bool) -> None:
    from wavepe.analysis.plots import perplexity_by_length

    from .report import markdown_table, print_table, title

    runs, train_length = results["runs"], settings.train_length
    heading = title(train_length).partition(" (*")[0]
    with new_file(folder.picture) as part:
        perplexity_by_length(runs, part, train_length=train_length, title=heading)
    with new_file(folder.table) as part:
        part.write_text(markdown_table(runs, settings.lengths, train_length), "utf-8")
    print_table(runs, settings.lengths, train_length)
    if not quiet:
        print(f"results: {folder.results}  picture: {folder.picture}")


@contextmanager
def _torch_threads(wanted: int) -> Iterator[int]:
    """torch on `wanted` threads; gives the number in force."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
