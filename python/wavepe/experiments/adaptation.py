"""``adapt``: swap the encoding of a trained model, and fine-tune it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CommandError, UsageError, need_matplotlib, require
from ..common.files import new_file
from ..training import adapting
from . import model as models
from .numbers import integers
from .tables import markdown_rows

_PARAMETERS = inspect.signature(adapting.adapt).parameters
_ROWS = {
    "stock": "{} model", "yarn": "{} model, YaRN", "self-extend": "{} model, Self-Extend",
    "control": "{} model, fine-tuned", "swapped": "swapped", "adapted": "swapped, fine-tuned",
}  # fmt: skip
_ADVICE = """For text beyond the trained length alone, compare YaRN and Self-Extend, which need \
no training. The table has them for --lengths beyond it, if the source model's RoPE is plain."""


@dataclass(frozen=True, repr=False)
class Adaptation:
    """The adapted model, and the table of its perplexities.

    Attributes
    ----------
    folder : Path
        The folder of the new model, with results.json, report.md and perplexity.png.
    adapted : wavepe.hf.Adapted
        The model, its encoding, the perplexities and the settings.
    title : str
        What the perplexities are.
    """

    folder: Path
    adapted: adapting.Adapted
    title: str
    _name: str
    _labels: dict[str, str]
    _unit: str

    def table(self) -> list[dict[Any, Any]]:
        """Return a row for each state of the model: "model", and for each length the perplexity."""
        figures, labels = self.adapted.perplexity, self._labels.items()
        return [{"model": text, **figures[name]} for name, text in labels if name in figures]

    def to_json(self) -> str:
        """Return encoding, recipe, perplexities, settings and seconds as JSON."""
        return json.dumps({k: x for k, x in vars(self.adapted).items() if k != "model"}, indent=2)

    def plot(self, path: str | Path) -> None:
        """Draw the perplexity by length to a file (.png, .pdf or .svg); needs matplotlib."""
        need_matplotlib("plot")
        from ..analysis.plots import perplexity_by_length

        rows = self.table()
        runs = [{"encoding": row.pop("model"), "seed": 0, "perplexity": row} for row in rows]
        length = self.adapted.settings["length"]
        with new_file(Path(path)) as new:
            perplexity_by_length(runs, new, train_length=length, title=self.title, unit=self._unit)

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """Return the table as texts: a label, and a cell for each length."""
        return [(row.pop("model"), [f"{x:.2f}" for x in row.values()]) for row in self.table()]

    @property
    def facts(self) -> list[str]:
        """Return lines about the encoding, the recipe and the training."""
        done = self.adapted
        again = f", {done.passes:.2g} times the text," if done.passes > 1 else ""
        trained = f"Trained on {done.tokens} tokens{again} in {done.seconds:.0f} s."
        lines = [f"Encoding: {done.encoding}", f"Recipe {done.why}.", trained]
        if "control" in done.perplexity:
            rate = done.settings["learning_rate"]
            lines.append(f"Learning rate: {rate:g}; of the stock model: {rate / 2:g}.")
        figures, specs = done.perplexity, done.untrained
        lines += [f"{self._labels[name]}: {specs[name]}" for name in specs if name in figures]
        for rival in ("control", "yarn", "self-extend"):
            ahead = [n for n, x in figures.get(rival, {}).items() if x < figures["adapted"][n]]
            if ahead:
                at = " and ".join(map(str, ahead))
                lines.append(f"At {at} {self._unit}s it is behind: {self._labels[rival]}.")
        return lines if "self-extend" in figures else [*lines, _ADVICE]

    def __repr__(self) -> str:
        return f"<Adaptation to {self.adapted.encoding} in {self.folder}>"

    def __str__(self) -> str:
        lengths = list(map(str, self.adapted.settings["lengths"]))
        table = markdown_rows("model", lengths, self.rows)
        heading = f"# {self._name} with {self.adapted.encoding}"
        return "\n\n".join([heading, f"{self.title}.", table, *self.facts]) + "\n"

    _repr_markdown_ = __str__


def adapt(
    source: str | Path, target: str | Path, encoding: str, *, data: str | Path,
    bf16: bool = False, gradient_checkpointing: bool = False, imports: Sequence[str] = (),
    device: str = "cpu", threads: int | None = None, progress: bool = True, **options: Any,
) -> Adaptation:  # fmt: skip
    """Swap the position encoding of the model in a folder, and fine-tune it.

    ``wavepe adapt`` calls it. The same call continues a stopped one.

    Parameters
    ----------
    source : path
        Local folder in Hugging Face format, with config.json, weights and tokenizer.
    target : path
        Folder for the new model and its checkpoints, results.json, report.md and perplexity.png.
    encoding : str
        The new encoding, such as wavelet or rope+alibi.
    data : path
        A text file, or a folder of text files. Its end is held out, for the perplexities.
    bf16 : bool
        Compute in bfloat16; weights stay as they are.
    gradient_checkpointing : bool
        Less memory, a third more time.
    device : {"cpu", "cuda", "auto"}
        Device of the model; auto is cuda if there is a GPU. The default is cpu.
    threads : int
        Number of CPU threads. The default is all cores; give fewer if other programs use them.
    progress : bool
        Show the progress on stderr.
    **options
        Further arguments of `wavepe.hf.adapt`, such as tokens, length, recipe or batch_size, which
        may also be written batch, and learning_rate, or lr.

    Returns
    -------
    Adaptation

    Raises
    ------
    ValueError
        An argument is wrong, the text is too short, or `target` holds something else.
    CommandError
        A package is missing, or a model cannot be loaded.
    """
    require("wavepe adapt", **models.PARTS, accelerate="hf")
    for short, name in (("batch", "batch_size"), ("lr", "learning_rate")):
        if short in options:
            options[name] = options.pop(short)
    if options.get("lengths"):
        options["lengths"] = integers("lengths", options["lengths"], 2)
    with _errors_of_usage():
        options = adapting.checked(options)
    from accelerate import PartialState

    from ..hf import encoding_of, families
    from ..training import folder, recipes
    from .progress import Report
    from .text import check_data, first_and_last_tokens

    tokens, length, recipe = (
        options.get(name, _PARAMETERS[name].default) for name in ("tokens", "length", "recipe")
    )
    folder.check_adaptation(Path(target))
    check_data(data)
    models.check_folder(source)
    models.check_links(Path(source))
    with models.opened(source, imports, device, threads) as loaded:
        source_encoding = encoding_of(loaded.model)
        word = "stock" if source_encoding is None else "source"
        labels = {name: label.format(word) for name, label in _ROWS.items()}
        lengths, held_out = options.get("lengths") or (2 * length,), options.get("held_out")
        last = max(held_out or adapting.HELD_OUT, *lengths)
        ids = first_and_last_tokens(loaded, data, tokens, last)
        if held_out is None:
            part = max(*lengths, min(adapting.HELD_OUT, len(ids) // 4))
            held_out = options["held_out"] = last if len(ids) >= tokens + last else part
        chosen = {"bf16": bf16, "gradient_checkpointing": gradient_checkpointing}
        options |= {name: True for name, value in chosen.items() if value}
        bars: dict[str, Any] = {}

        def report_progress(what: str, done: int, total: int) -> None:
            if what not in bars:
                name, _, size = what.partition(", ")
                doing = f"measuring at {size}" if size else "training"
                bars[what] = report.begin(f"{labels[name]}: {doing}")
            bars[what](done, total)

        with Report(quiet=not progress) as report:
            with _errors_of_usage():
                base = families.decoder(loaded.model)
                options["recipe"] = recipes.choose(recipe, encoding, base, length, source_encoding)
                report.say("encoding: {1}; recipe {3}".format(*options["recipe"]))
                if (rest := len(ids) - held_out) < tokens:
                    report.say(
                        f"warning: {data} has {rest} {loaded.unit}s to train on, fewer than the "
                        f"{tokens} asked for: training reads them more than once"
                    )
                adapted = adapting.adapt(
                    loaded.model, encoding, ids, folder=Path(target), tokenizer=loaded.tokenizer,
                    progress=report_progress, **{"use_cpu": device == "cpu", **options},
                )  # fmt: skip
            if not bars:
                report.say(f"{target} is finished already: nothing was left to do")
    title = f"Perplexity per {loaded.unit} of {loaded.name}, on held-out text of {data}"
    result = Adaptation(Path(target), adapted, title, loaded.name, labels, loaded.unit)
    if not PartialState().is_main_process:
        return result
    with new_file(result.folder / "report.md") as new:
        new.write_text(str(result), "utf-8")
    with suppress(CommandError):  # matplotlib is missing
        result.plot(result.folder / "perplexity.png")
    return result


@contextmanager
def _errors_of_usage() -> Iterator[None]:
    """Raise UsageError for a wrong argument of `wavepe.hf.adapt`, with its name in backticks."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(re.sub(r"^(\w+) must", r"`\1` must", str(error))) from error
