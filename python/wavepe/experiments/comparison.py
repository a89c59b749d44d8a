"""One comparison: its trainings and evaluations, and the file of their results."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wavepe

from ..common.errors import CommandError, UsageError
from ..training.folder import RunFolder, model_name
from .data import Text, evaluation_bytes
from .environment import environment
from .report import summary_of
from .rows import Row
from .settings import Settings, hints

if TYPE_CHECKING:
    import numpy as np

    from ..training.device import Device

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


@dataclass(frozen=True)
class Work:
    """Trains and evaluates models in this process; a pickle of it goes to each worker."""

    settings: Settings
    text: Text
    folder: RunFolder
    threads: int
    save_every: int
    device: Device

    @property
    def evaluated(self) -> np.ndarray:
        """Return the held-out bytes that are evaluated."""
        return evaluation_bytes(self.text.held_out, self.settings.lengths, self.settings.eval_bytes)

    def run(
        self,
        model: Model,
        rows: Sequence[str],
        tell: Callable[..., None],
        keep: Callable[[Result], None],
    ) -> None:
        """Train the model unless it exists; evaluate `rows`, and pass results to `keep`.

        `tell` gets the progress: the name of a method of `progress.Report` and its arguments.
        """
        from ..hf.folder import note_perplexities

        checkpoint, facts = self._trained(model.spec, model.seed, 0, tell)
        for place, row in enumerate(model.rows):
            if row.name not in rows:
                continue
            began = time.perf_counter()
            result, evaluated = self._evaluated(checkpoint, row, tell), checkpoint
            seconds = facts["seconds"] + time.perf_counter() - began
            if self.settings.finetune:
                before = self.settings.steps + place * self.settings.finetune_steps
                then = row.continued, model.seed, before, tell, checkpoint
                evaluated, more = self._trained(*then)
                result = {**self._evaluated(evaluated, row, tell), "before": result}
                seconds += more["seconds"]
            result = {"encoding": row.name, "seed": model.seed, **result}
            keep({**result, "seconds": round(seconds, 3)})
            note_perplexities(evaluated, str(row.read), result["perplexity"])
            found = ", ".join(f"{n}: {value:.2f}" for n, value in result["perplexity"].items())
            tell("note", f"{row.name}: perplexity at {found}, in {seconds:.0f} s")

    def _trained(
        self, spec: str, seed: int, before: int, tell: Callable[..., None], base: Path | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint of a training and its training.json; train now if it is missing.

        It begins after `before` steps of the same model. With the checkpoint `base`, it continues
        that training on longer text.
        """
        from .training import plan_of, train

        name, found = model_name(spec, seed), self.folder.trained(spec, seed)
        plan = plan_of(self.settings, spec, seed, base)
        if found is not None:
            self.folder.discard_training(name)
            tell("skip", before + plan.steps)
            tell("note", f"{spec}: trained before, {found[0]}{self._elsewhere(found[1])}")
            return found
        tell("doing", spec)

        def told(event: str, *values: Any) -> None:
            if event in ("step", "skip"):  # the steps of this training, among those of the model
                values = (before + values[0], *values[1:])
            tell(event, *values)

        state = train(
            plan, self.settings, self.text.train, self.folder.training(name), self.folder.run,
            self.save_every, told, self.device,
            lambda model, step: self.folder.keep(f"{name}-step{step}", model.save_pretrained),
        )  # fmt: skip
        facts = {
            "spec": spec, "seed": seed, "steps": state.step, "run": self.folder.run,
            "loss": round(state.loss, 4), "seconds": round(state.seconds, 3),
            "variants": state.variants, "devices": state.devices,
        }  # fmt: skip

        def save(path: Path) -> None:
            state.model.save_pretrained(path)
            self.folder.write_json(path / "training.json", facts)

        self.folder.finish(name, save)
        return self.folder.checkpoint(name), facts

    def _elsewhere(self, facts: dict[str, Any]) -> str:
        """Return a remark if the model was trained on another device; else an empty text."""
        devices, label = facts.get("devices", ["cpu"]), self.device.label
        if devices == [label]:
            return ""
        return f", on {' and '.join(devices)}: figures may differ from those of {label}"

    def _evaluated(self, checkpoint: Path, row: Row, tell: Callable[..., None]) -> Result:
        """Return the measurements of the checkpoint with the encoding of the row."""
        from . import evaluation

        tell("doing", f"evaluating {row.name}")
        kept = self.folder.kept(checkpoint.name) if self.settings.bands else {}
        result = evaluation.evaluate(
            checkpoint, str(row.read), self.evaluated, self.settings, self.device, kept
        )
        for values in (result["perplexity"], *result.get("protocols", {}).values()):
            for length, value in values.items():
                if not math.isfinite(value):
                    raise CommandError(
                        f"{row.name}: the perplexity at {length} is {value}: try a smaller --lr"
                    )
        return result


class Comparison:
    """Runs the missing trainings and evaluations in order, and keeps results.json up to date."""

    def __init__(self, work: Work) -> None:
        self.work, self.settings, self.folder = work, work.settings, work.folder
        folder, lengths = self.folder, self.settings.lengths
        before = folder.read(folder.results)
        before = {"runs": [], "environment": {}} if before is None else before
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

    def run(self, jobs: int, imports: Sequence[str], quiet: bool, part: str = "") -> Result:
        """Train and evaluate; return the content of results.json at the end.

        `part` is the name of this comparison, if there are several.
        """
        from .progress import Report

        steps = [
            self.settings.steps + len(model.rows) * self.settings.finetune_steps
            for model in self.models
        ]
        with Report(steps, quiet=quiet, part=part) as report:
            for hint in hints(self.settings):
                report.say(f"hint: {hint}")
            if jobs > 1:
                from .jobs import run_jobs

                run_jobs(self, jobs, imports, report)
            else:
                for number, model in enumerate(self.models):
                    self.work.run(model, self.missing(model), report.teller(number), self.keep)
        results = self.folder.read(self.folder.results)
        assert results is not None  # every comparison has a row
        return results

    def missing(self, model: Model) -> list[str]:
        """Return the names of the model's rows that have no result yet."""
        return [row.name for row in model.rows if (row.name, model.seed) not in self.done]

    def keep(self, result: Result) -> None:
        """Add the result of a row to results.json."""
        self.done[result["encoding"], result["seed"]] = result
        self.folder.write_json(self.folder.results, self._results())

    def _results(self) -> Result:
        settings, text = self.settings, self.work.text
        wanted = [(name, seed) for seed in range(settings.seeds) for name in settings.encodings]
        found = [
            self.folder.trained(name, model.seed)
            for model in self.models
            for name in (model.trainings if settings.finetune else [model.spec])
        ]
        runs = [self.done[key] for key in wanted if key in self.done]
        return {
            "train_length": settings.train_length,
            "runs": runs,
            "summary": summary_of(runs, settings.lengths),
            "environment": {
                **environment(),
                "run": self.folder.run,
                "variants": sorted(self.variants),
                **self.work.device.facts,
                "devices": sorted(self.devices),
                "threads": self.work.threads,
                "date": datetime.date.today().isoformat(),
                "protocol": settings.protocols[0],
                "data": {
                    "text": text.description,
                    "sha256": text.sha256,
                    "train_bytes": len(text.train),
                    "held_out_bytes": len(text.held_out),
                    "longest": text.longest,
                    "read_bytes": text.read_bytes,
                    "evaluated_bytes": len(self.work.evaluated),
                },
                "settings": asdict(settings),
                "models": {f"checkpoints/{p.name}": facts for p, facts in filter(None, found)},
                "complete": all(key in self.done for key in wanted),
            },
        }
