"""One comparison: its trainings and their results."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import wavepe

from .data import Text, evaluation_bytes
from .environment import environment
from .errors import CommandError, UsageError
from .folder import RunFolder, model_name
from .plan import Listener, plan_of
from .report import summary_of
from .rows import Row
from .settings import Settings, hints

if TYPE_CHECKING:
    from .device import Device

Result = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One training, and the rows that are evaluated with it."""

    spec: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return model_name(self.spec, self.seed)

    @property
    def trainings(self) -> list[str]:
        """Return the names of this training and of the trainings that continue it."""
        return list(dict.fromkeys([self.spec, *(row.continued for row in self.rows)]))


@dataclass(frozen=True)
class Work:
    """The data that every process of a comparison needs."""

    settings: Settings
    folder: RunFolder
    threads: int
    save_every: int
    device: Device


def models_of(settings: Settings) -> list[Model]:
    """Return the trainings; rows whose encodings train alike share one."""
    rows: dict[str, list[Row]] = {}
    for row in settings.rows:
        rows.setdefault(str(row.trained), []).append(row)
    return [
        Model(spec, seed, tuple(alike))
        for seed in range(settings.seeds)
        for spec, alike in rows.items()
    ]


class Comparison:
    """Runs the missing trainings and evaluations in order, and keeps results.json up to date."""

    def __init__(self, work: Work, text: Text) -> None:
        self.work, self.settings, self.text = work, work.settings, text
        self.folder = folder = work.folder
        before = folder.read(folder.results)
        before = {"runs": [], "environment": {}} if before is None else before
        lengths = self.settings.lengths
        try:
            self.done = {(run["encoding"], run["seed"]): run for run in before["runs"]}
            whole = [run["perplexity"][str(n)] for run in before["runs"] for n in lengths]
            same = before["environment"].get("run", folder.run) == folder.run
            self.variants = set(before["environment"].get("variants", ())) | {wavepe.variant()}
            # Old results do not name their device: it was the CPU.
            used = before["environment"].get("devices", ["cpu"] if self.done else [])
            self.devices = {*used, work.device.label}
            if not (same and all(isinstance(value, float) for value in whole)):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{folder.results} belongs to another comparison: remove it, or give another --out"
            ) from None
        self.models = models_of(self.settings)
        for model in self.models:
            if folder.trained(model.spec, model.seed) is None:
                for row in model.rows:  # their model is gone
                    self.done.pop((row.name, model.seed), None)

    def run(self, jobs: int, imports: Iterable[str], quiet: bool, part: str = "") -> Result:
        """Train and evaluate; return the content of results.json at the end.

        `part` is the name of this comparison, if there are several.
        """
        from .jobs import run_jobs
        from .progress import Report

        steps = [
            self.settings.steps + len(model.rows) * self.settings.finetune_steps
            for model in self.models
        ]
        with Report(steps, quiet=quiet, part=part) as report:
            for hint in hints(self.settings):
                report.note(f"hint: {hint}")
            if jobs > 1:
                run_jobs(self, jobs, list(imports), report)
            else:
                runner = Runner(self.work, self.text)
                for number, model in enumerate(self.models):
                    listener = report.model(number, model.rows[0].name)
                    runner.run(model, self.missing(model), listener, self.keep)
        results = self.folder.read(self.folder.results)
        assert results is not None  # every comparison has a row
        return results

    def missing(self, model: Model) -> list[Row]:
        """Return the rows of the model that have no result yet."""
        return [row for row in model.rows if (row.name, model.seed) not in self.done]

    def keep(self, result: Result) -> None:
        """Add the result of a row to results.json."""
        self.done[result["encoding"], result["seed"]] = result
        self.folder.write_json(self.folder.results, self._results())

    def _results(self) -> Result:
        settings, device = self.settings, self.work.device
        wanted = [(name, seed) for seed in range(settings.seeds) for name in settings.encodings]
        found = [
            self.folder.trained(name, model.seed)
            for model in self.models
            for name in (model.trainings if settings.finetune else [model.spec])
        ]
        runs = [self.done[key] for key in wanted if key in self.done]
        models = {f"checkpoints/{path.name}": facts for path, facts in filter(None, found)}
        return {
            "train_length": settings.train_length,
            "runs": runs,
            "summary": summary_of(runs, settings.lengths),
            "environment": {
                **environment(),
                "run": self.folder.run,
                "variants": sorted(self.variants),
                **device.facts,
                "devices": sorted(self.devices),
                "threads": self.work.threads,
                "date": datetime.date.today().isoformat(),
                "protocol": settings.protocols[0],
                "data": {
                    "text": self.text.description,
                    "sha256": self.text.sha256,
                    "train_bytes": len(self.text.train),
                    "held_out_bytes": len(self.text.held_out),
                    "evaluated_bytes": len(_evaluated_text(self.text, settings)),
                },
                "settings": asdict(settings),
                "models": models,
                "complete": all(key in self.done for key in wanted),
            },
        }


class Runner:
    """Trains and evaluates models in this process."""

    def __init__(self, work: Work, text: Text) -> None:
        self.work, self.settings, self.text = work, work.settings, text
        self.folder = work.folder
        self.held_out = _evaluated_text(text, work.settings)

    def run(
        self, model: Model, rows: list[Row], listener: Listener, keep: Callable[[Result], None]
    ) -> None:
        """Train the model unless it exists; evaluate `rows`, and pass each result to `keep`."""
        from ..hf.folder import note_perplexities

        listener.stage(0)
        checkpoint, facts = self._trained(model.spec, model.seed, listener)
        for number, row in enumerate(model.rows):
            if row not in rows:
                continue
            began = time.perf_counter()
            result = self._evaluated(checkpoint, row, listener)
            seconds = facts["seconds"] + time.perf_counter() - began
            if self.settings.finetune:
                listener.stage(self.settings.steps + number * self.settings.finetune_steps)
                tuned, more = self._trained(row.continued, model.seed, listener, checkpoint)
                result = {**self._evaluated(tuned, row, listener), "before": result}
                seconds += more["seconds"]
            result = {"encoding": row.name, "seed": model.seed, **result}
            keep({**result, "seconds": round(seconds, 3)})
            evaluated = tuned if self.settings.finetune else checkpoint
            note_perplexities(evaluated, str(row.read), result["perplexity"])
            numbers = ", ".join(
                f"{length}: {value:.2f}" for length, value in result["perplexity"].items()
            )
            listener.note(f"{row.name}: perplexity at {numbers}, in {seconds:.0f} s")

    def _trained(
        self, spec: str, seed: int, listener: Listener, base: Path | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint of a training and its training.json; train now if it is missing.

        With the checkpoint `base`, that training continues on longer text.
        """
        name, found = model_name(spec, seed), self.folder.trained(spec, seed)
        plan = plan_of(self.settings, spec, seed, base)
        if found is not None:
            self.folder.discard_training(name)
            listener.starts_at(plan.steps)
            listener.note(f"{spec}: trained before, {found[0]}{self._elsewhere(found[1])}")
            return found
        from .training import train

        def keep(model: Any, step: int) -> None:
            self.folder.keep(f"{name}-step{step}", model.save_pretrained)

        state = train(
            plan, self.settings, self.text.train, self.folder.training(name), self.folder.run,
            self.work.save_every, listener, self.work.device, keep,
        )  # fmt: skip
        facts = {"spec": spec, "seed": seed, "steps": state.step}
        facts["run"] = self.folder.run
        facts |= {"loss": round(state.loss, 4), "seconds": round(state.seconds, 3)}
        facts |= {"variants": state.variants, "devices": state.devices}

        def save(path: Path) -> None:
            state.model.save_pretrained(path)
            self.folder.write_json(path / "training.json", facts)

        self.folder.finish(name, save)
        return self.folder.checkpoint(name), facts

    def _elsewhere(self, facts: dict[str, Any]) -> str:
        """Return a remark if the model was trained on another device; else an empty text."""
        devices, label = facts.get("devices", ["cpu"]), self.work.device.label
        if devices == [label]:
            return ""
        return f", on {' and '.join(devices)}: figures may differ from those of {label}"

    def _evaluated(self, checkpoint: Path, row: Row, listener: Listener) -> Result:
        """Return the measurements of the checkpoint with the encoding of the row."""
        from .evaluation import evaluate

        listener.evaluating(row.name)
        kept = self.folder.kept(checkpoint.name) if self.settings.bands else {}
        result = evaluate(
            checkpoint, str(row.read), self.held_out, self.settings, self.work.device, kept
        )
        for values in (result["perplexity"], *result.get("protocols", {}).values()):
            for length, value in values.items():
                if not math.isfinite(value):
                    raise CommandError(
                        f"{row.name}: the perplexity at {length} is {value}: try a smaller --lr"
                    )
        return result


def _evaluated_text(text: Text, settings: Settings) -> np.ndarray:
    return evaluation_bytes(text.held_out, settings.lengths, settings.eval_bytes)
