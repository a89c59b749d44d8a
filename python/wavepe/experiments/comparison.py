"""One comparison: its small Llamas of bytes, their trainings, and the file of their results."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wavepe.hf

from ..common.errors import CommandError, UsageError
from ..training import loop
from ..training.device import Device
from ..training.folder import ComparisonFolder, model_name, read_json, write_json
from ..training.plan import Plan
from . import evaluation
from .data import Text, batch_at, evaluation_bytes
from .environment import environment
from .model import BYTES, load_model
from .progress import Report
from .report import summary_of
from .settings import Model, Row, Settings
from .tasks import TASKS

Result = dict[str, Any]
# Small models train faster with more than transformers' 0.02. With less than this, the vectors of
# an absolute encoding would be much larger than the token embeddings for a long time.
INITIAL_SPREAD = 0.06


@dataclass(frozen=True)
class Work:
    """Trains and evaluates models in this process; a pickle of it goes to each worker."""

    settings: Settings
    text: Text
    folder: ComparisonFolder
    threads: int
    save_every: int
    device: Device

    @property
    def evaluated(self) -> np.ndarray:
        """Return the held-out bytes that are evaluated."""
        return evaluation_bytes(self.text.held_out, self.settings.lengths, self.settings.eval_bytes)

    def run(self, model: Model, rows: Sequence[str], tell: loop.Tell) -> None:
        """Train the model unless it exists; evaluate `rows`, and tell each "result"."""
        checkpoint, facts = self._trained(model.spec, model.seed, 0, tell)
        for number, row in enumerate(model.rows):
            if row.name not in rows:
                continue
            began = time.perf_counter()
            result = self._evaluated(checkpoint, row, tell)
            seconds = facts["seconds"] + time.perf_counter() - began
            if self.settings.finetune:
                before = self.settings.steps + number * self.settings.finetune_steps
                evaluated, more = self._trained(row.continued, model.seed, before, tell, checkpoint)
                result = {**self._evaluated(evaluated, row, tell), "before": result}
                seconds += more["seconds"]
            result = {"encoding": row.name, "seed": model.seed, **result}
            place = wavepe.variant(), self.device.label, self.device.facts
            tell("result", {**result, "seconds": round(seconds, 3)}, *place)
            figures = ", ".join(f"{n}: {value:.2f}" for n, value in result["perplexity"].items())
            tell("note", f"{row.name}: perplexity at {figures}, in {seconds:.0f} s")

    def _trained(
        self, name: str, seed: int, before: int, tell: loop.Tell, base: Path | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint of a training and its training.json; train now if it is missing.

        It begins after `before` steps of the same model. With the checkpoint `base`, it continues
        that training on longer text.
        """
        settings, folder, place = self.settings, self.folder, model_name(name, seed)
        plan = plan_of(settings, name, seed, continued=base is not None)
        if (finished := folder.trained(name, seed)) is not None:
            folder.discard_training(place)
            tell("skip", before + plan.steps)
            note = f"{name}: trained before, {finished[0]}"
            devices, label = finished[1]["devices"], self.device.label
            if devices != [label]:
                note += f", on {' and '.join(devices)}: figures may differ from those of {label}"
            tell("note", note)
            return finished
        tell("doing", name)

        def tell_steps(event: str, *values: Any) -> Any:
            if event in ("step", "skip"):  # the steps of this training, among those of the model
                values = (before + values[0], *values[1:])
            return tell(event, *values)

        model = new_model(name.rpartition("/")[2], seed, settings, base)
        text = batches(plan, settings, self.text.train, 0 if base is None else settings.steps)

        def keep(model: Any, step: int) -> None:
            folder.save(f"{place}-step{step}", model.save_pretrained)

        state = loop.train(
            plan, model, text, folder.training(place), folder.run, self.save_every, tell_steps,
            self.device, keep,
        )  # fmt: skip
        facts = {
            "spec": name, "seed": seed, "steps": state.step, "run": folder.run,
            "loss": round(state.loss, 4), "seconds": round(state.seconds, 3),
            "variants": state.variants, "devices": state.devices,
        }  # fmt: skip

        def save(path: Path) -> None:
            state.model.save_pretrained(path)
            write_json(path / "training.json", facts)

        folder.save(place, save)
        folder.discard_training(place)
        return folder.checkpoint(place), facts

    def _evaluated(self, checkpoint: Path, row: Row, tell: loop.Tell) -> Result:
        """Return the measurements of the checkpoint with the encoding of the row."""
        tell("doing", f"evaluating {row.name}")
        kept = self.folder.kept(checkpoint.name) if self.settings.bands else {}
        result = evaluation.evaluate(
            checkpoint, str(row.evaluated), self.evaluated, self.settings, self.device, kept
        )
        for values in (result["perplexity"], *result.get("protocols", {}).values()):
            for n, value in values.items():
                if not math.isfinite(value):
                    wrong = f"the perplexity at {n} is {value}: try a smaller `lr`"
                    raise CommandError(f"{row.name}: {wrong}")
        return result


class Comparison:
    """The trainings of a comparison, and its results.json."""

    def __init__(self, work: Work) -> None:
        self.work, self.settings, self.folder = work, work.settings, work.folder
        self.models, self.facts = self.settings.models, work.device.facts
        self.done, self.variants, self.devices = self._stored()
        for model in self.models:
            if self.folder.trained(model.spec, model.seed) is None:
                for row in model.rows:  # their model is gone
                    self.done.pop((row.name, model.seed), None)

    def _stored(self) -> tuple[dict[tuple[str, int], Result], set[str], set[str]]:
        """Return the results that the folder holds, and the variants and devices of all of them."""
        folder, variants, devices = self.folder, set[str](), set[str]()
        if (stored := read_json(folder.results)) is None:
            return {}, variants, devices
        try:
            done = {(run["encoding"], run["seed"]): run for run in stored["runs"]}
            lengths = map(str, self.settings.lengths)
            figures = [run["perplexity"][n] for n in lengths for run in stored["runs"]]
            about = stored["environment"]
            same = about.get("run", folder.run) == folder.run
            variants |= set(about.get("variants", ()))
            devices |= set(about["devices"])
            if not (same and all(isinstance(value, float) for value in figures)):
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{folder.results} belongs to another comparison: remove it, or give another `out`"
            ) from None
        return done, variants, devices

    def tell(self, report: Report, number: int, event: str, *values: Any) -> None:
        """Save a result, or show the progress of model `number`."""
        if event != "result":
            getattr(report, event)(number, *values)
            return
        result, variant, device, self.facts = values
        self.variants.add(variant)
        self.devices.add(device)
        self.done[result["encoding"], result["seed"]] = result
        write_json(self.folder.results, self._results())

    @property
    def steps(self) -> list[int]:
        """Return the steps of each model, with those of further training."""
        more = self.settings.finetune_steps
        return [self.settings.steps + len(model.rows) * more for model in self.models]

    def missing(self, model: Model) -> list[str]:
        """Return the names of the model's rows that have no result yet."""
        return [row.name for row in model.rows if (row.name, model.seed) not in self.done]

    def _results(self) -> Result:
        settings, text = self.settings, self.work.text
        wanted = [(name, seed) for seed in range(settings.seeds) for name in settings.encodings]
        checkpoints = [
            self.folder.trained(name, model.seed)
            for model in self.models
            for name in (model.trainings if settings.finetune else [model.spec])
        ]
        runs = [self.done[key] for key in wanted if key in self.done]
        data = {
            "text": text.description, "sha256": text.sha256, "train_bytes": len(text.train),
            "held_out_bytes": len(text.held_out), "longest": text.longest,
            "read_bytes": text.read_bytes, "evaluated_bytes": len(self.work.evaluated),
        }  # fmt: skip
        about = {
            **environment(), "run": self.folder.run, "variants": sorted(self.variants),
            **self.facts, "devices": sorted(self.devices),
            "threads": self.work.threads, "date": datetime.date.today().isoformat(),
            "protocol": settings.protocols[0], "data": data, "settings": asdict(settings),
            "models": {f"checkpoints/{p.name}": x for p, x in filter(None, checkpoints)},
            "complete": all(key in self.done for key in wanted),
        }  # fmt: skip
        summary = summary_of(runs, settings.lengths)
        results = {"train_length": settings.train_length, "runs": runs, "summary": summary}
        return results | {"environment": about}


def new_model(spec: str, seed: int, settings: Settings, base: Path | None = None) -> Any:
    """Return an untrained Llama with the encoding `spec`, or the checkpoint `base` with it.

    New weights, on the CPU, depend on `seed` alone.
    """
    inner = -(-8 * settings.hidden // 96) * 32  # 8/3 of the size, in multiples of 32
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding=spec, vocab_size=BYTES, hidden_size=settings.hidden,
        intermediate_size=inner, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, num_key_value_heads=settings.heads,
        head_dim=settings.head_dim, max_position_embeddings=settings.train_length,
        tie_word_embeddings=True, initializer_range=INITIAL_SPREAD, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(base, spec) if base else wavepe.hf.WavePELlamaForCausalLM(config)


def check_rows(settings: Settings) -> None:
    """Raise UsageError if a Llama with these settings cannot have the encoding of a row."""
    for row in settings.rows:
        try:
            with torch.device("meta"):
                for spec in (str(row.trained), str(row.evaluated)):
                    new_model(spec, 0, settings)
        except ValueError as error:
            raise UsageError(f"`encodings` {row.name}: {error}") from None


def plan_of(settings: Settings, name: str, seed: int, *, continued: bool = False) -> Plan:
    """Return the plan of the training `name`; a continued one sees as many tokens in a step."""
    rate, steps, length = settings.learning_rate, settings.steps, settings.train_length
    if continued:
        batch = max(1, settings.batch * length // settings.finetune)
        return Plan(name, seed, settings.finetune_steps, batch, settings.finetune, rate)
    parts = settings.keep + 1
    kept = tuple(sorted({steps * part // parts for part in range(1, parts)} - {0, steps}))
    return Plan(name, seed, steps, settings.batch, length, rate, kept_steps=kept)


def batches(
    plan: Plan, settings: Settings, text: np.ndarray, before: int = 0
) -> Callable[[int], loop.Batch]:
    """Return a function that gives the batch of a step: of a text, after `before` others."""
    size = (plan.batch, plan.length)

    def batch(step: int) -> loop.Batch:
        if not settings.task:
            tokens = batch_at(text, before + step, plan.seed, *size)
            return loop.Batch(torch.from_numpy(tokens), None)
        drawn = TASKS[settings.task].examples(text, [plan.seed, step], *size)
        asked = torch.from_numpy(drawn.questions[:, 1:] > 0)
        return loop.Batch(torch.from_numpy(drawn.tokens), asked)

    return batch
