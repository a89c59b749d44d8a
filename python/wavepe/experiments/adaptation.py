"""``adapt``: swap the encoding of a trained model, and fine-tune it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wavepe

from ..common.errors import CommandError, UsageError, need_matplotlib, require
from ..common.files import new_file
from . import model as models
from .numbers import integer, integers, reals
from .tables import markdown_rows

if TYPE_CHECKING:
    from ..training.adapting import Adapted

_ROWS = {
    "stock": "{} model",
    "control": "{} model, fine-tuned",
    "swapped": "swapped",
    "adapted": "swapped, fine-tuned",
}
_ADVICE = (
    "For text beyond the trained length alone, compare rope:type=yarn, which needs no training: "
    "wavepe perplexity, and wavepe convert."
)


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
    adapted: Adapted
    title: str
    _name: str
    _labels: dict[str, str]
    _unit: str

    def table(self) -> list[dict[Any, Any]]:
        """Return a row for each state of the model: "model", and for each length the perplexity."""
        return [{"model": name, **cells} for name, cells in self._figures]

    @property
    def _figures(self) -> list[tuple[str, dict[int, float]]]:
        figures = self.adapted.perplexity
        return [(text, figures[name]) for name, text in self._labels.items() if name in figures]

    def to_json(self) -> str:
        """Return encoding, recipe, perplexities, settings and seconds as JSON."""
        return json.dumps({k: x for k, x in vars(self.adapted).items() if k != "model"}, indent=2)

    def plot(self, path: str | Path) -> None:
        """Draw the perplexity by length to a file (.png, .pdf or .svg); needs matplotlib."""
        need_matplotlib("plot")
        from ..analysis.plots import perplexity_by_length

        runs = [{"encoding": name, "seed": 0, "perplexity": x} for name, x in self._figures]
        length = self.adapted.settings["length"]
        with new_file(Path(path)) as new:
            perplexity_by_length(runs, new, train_length=length, title=self.title, unit=self._unit)

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """Return the table as texts: a label, and a cell for each length."""
        return [(name, [f"{x:.2f}" for x in cells.values()]) for name, cells in self._figures]

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
        is_scaled = getattr(wavepe.encoding(done.encoding).rotary, "type", None)
        return lines if is_scaled else [*lines, _ADVICE]

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
    tokens: int = 1_000_000, length: int = 512, lengths: Sequence[int] | None = None,
    held_out: int | None = None, recipe: str = "auto", batch: int = 1, lr: float = 1e-4,
    lora: int | None = None, control: bool = False, seed: int = 0, bf16: bool = False,
    gradient_checkpointing: bool = False, imports: Sequence[str] = (), device: str = "cpu",
    threads: int | None = None, progress: bool = True,
) -> Adaptation:  # fmt: skip
    """Swap the position encoding of the model in a folder, and fine-tune it.

    ``wavepe adapt`` calls it. The same call continues a stopped one. See also `wavepe.hf.adapt`.

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
    tokens : int
        Tokens to train on. The default is 1000000.
    length : int
        Tokens of a sequence in training. The default is 512.
    lengths : sequence of int
        Lengths of the perplexities. The default is `length` and twice that.
    held_out : int
        Tokens at the end of the text for the perplexities. The default is 16384, or a quarter.
    recipe : {"auto", "plain", "transfer"}
        plain: train on the next token. transfer: each attention layer first learns the output of
        the stock layer. auto, the default: transfer, and keep RoPE's fast pairs beside an encoding
        that only adds to the scores, such as wavelet or alibi.
    batch : int
        Sequences of a step. The default is 1.
    lr : float
        Learning rate of the weights. The default is 0.0001.
    lora : int
        Train LoRA adapters of this rank, and merge them (needs PEFT).
    control : bool
        Train a copy of the stock model on the same tokens, at half the rate.
    seed : int
        Seed of the order of the text, and of torch. The default is 0.
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
    reals("lr", lr)
    for name, value, least in (
        ("tokens", tokens, 1), ("length", length, 2), ("batch", batch, 1), ("seed", seed, 0),
        ("held_out", held_out, 2), ("lora", lora, 1),
    ):  # fmt: skip
        if value is not None:
            integer(name, value, least)
    lengths = integers("lengths", lengths, 2) if lengths else None
    from accelerate import PartialState

    from ..hf import encoding_of, families
    from ..training import adapting, folder, recipes
    from .progress import Report
    from .text import check_data, first_and_last_tokens

    folder.check_adaptation(Path(target))
    check_data(data)
    models.check_folder(source)
    with models.opened(source, imports, device, threads) as loaded:
        source_encoding = encoding_of(loaded.model)
        word = "stock" if source_encoding is None else "source"
        labels = {name: label.format(word) for name, label in _ROWS.items()}
        last = max(held_out or adapting.HELD_OUT, *(lengths or (2 * length,)))
        ids = first_and_last_tokens(loaded, data, tokens, last)
        if held_out is None and len(ids) >= tokens + last:
            held_out = last  # of a shorter text adapt takes a quarter
        training = {"bf16": bf16, "gradient_checkpointing": gradient_checkpointing}
        bars: dict[str, Any] = {}

        def report_progress(what: str, done: int, total: int) -> None:
            if what not in bars:
                name, _, size = what.partition(", ")
                doing = f"measuring at {size}" if size else "training"
                bars[what] = report.begin(f"{labels[name]}: {doing}")
            bars[what](done, total)

        with Report(quiet=not progress) as report:
            try:
                base = families.decoder(loaded.model)
                chosen = recipes.choose(recipe, encoding, base, length, source_encoding)
                report.say(f"encoding: {chosen.encoding}; recipe {chosen.why}")
                adapted = adapting.adapt(
                    loaded.model, encoding, ids, tokens=tokens, length=length, recipe=recipe,
                    folder=Path(target), tokenizer=loaded.tokenizer, lengths=lengths,
                    held_out=held_out, batch_size=batch, learning_rate=lr, lora=lora,
                    control=control, seed=seed, progress=report_progress, use_cpu=device == "cpu",
                    **{name: True for name, value in training.items() if value},
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from error
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
