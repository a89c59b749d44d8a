"""``compare``: train one small Llama per encoding, and evaluate it on longer text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import CommandError, UsageError, need_matplotlib, require, thread_count
from ..common.files import DISK_ERRORS, new_file
from ..training.folder import ComparisonFolder, digest, read_json
from .data import Text, load_text
from .imports import import_all
from .model import PARTS
from .numbers import integer
from .report import Section, report_text, sections
from .settings import Settings, comparisons, hints

if TYPE_CHECKING:
    from ..encodings import Encoding

# Measured on models of this size: a second thread is a quarter faster on an idle machine. But if
# another process uses one of two cores, it is 2 to 20 times slower, because threads spin.
_THREADS = 1


@dataclass(frozen=True, repr=False)
class Results:
    """The results of `compare`. In a notebook they show their tables.

    Attributes
    ----------
    folder : Path
        The folder of the comparison, with results.json, report.md, pictures and checkpoints.
    parts : dict of str to dict
        The content of each results.json. A grid such as the preset "tasks" has several parts; any
        other comparison has one, named "".
    """

    folder: Path
    parts: dict[str, dict[str, Any]]
    _settings: dict[str, Settings]

    def table(self) -> list[dict[Any, Any]]:
        """Return a row for each encoding, as ``pandas.DataFrame`` takes them.

        A row has "encoding", "seeds", and for each evaluated length (an int) the perplexity per
        byte, or its mean over the seeds. The rows of a grid also have "part".
        """
        return [
            {**({"part": name} if name else {}), "encoding": row["encoding"], "seeds": row["seeds"],
             **{int(length): x["mean"] for length, x in row["perplexity"].items()}}
            for name, content in self.parts.items()
            for row in content["summary"]
        ]  # fmt: skip

    def to_json(self) -> str:
        """Return the content of results.json; of a grid, by the names of its parts."""
        return json.dumps(self.parts.get("", self.parts), indent=2)

    def plot(self, path: str | Path, part: str = "") -> None:
        """Draw the perplexity by length to a file (.png, .pdf or .svg); needs matplotlib.

        ValueError if this comparison does not have the `part`. A grid has no part "".
        """
        if part not in self.parts:
            raise UsageError(f"part {part!r}: needs one of {', '.join(self.parts)}")
        need_matplotlib("plot")
        for name, section in self.sections():
            if name == part and section.of == "perplexity" and section.draw:
                with new_file(Path(path)) as new:
                    section.draw(new)
                return

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Yield the name of the part, a table and its picture, for all tables."""
        for name, settings in self._settings.items():
            for section in sections(self.parts[name]["runs"], settings):
                yield name, section

    def __repr__(self) -> str:
        return f"<Results of a comparison in {self.folder}>"

    def __str__(self) -> str:
        return report_text(self.parts, self.sections(), pictures=False)

    _repr_markdown_ = __str__


def compare(
    encodings: str | Encoding | Sequence[str | Encoding] | None = None,
    *,
    preset: str | None = None, data: str | Path | None = None, imports: Sequence[str] = (),
    lengths: Sequence[int] | None = None, protocols: Sequence[str] | None = None,
    task: str | None = None, finetune: int | None = None, finetune_steps: int | None = None,
    split: str | None = None, model: str | None = None, layers: int | None = None,
    heads: int | None = None, head_dim: int | None = None, batch: int | None = None,
    lr: float | None = None, train_length: int | None = None, steps: int | None = None,
    seeds: int | None = None, eval_bytes: int | None = None, keep: int | None = None,
    bands: bool | None = None, out: str | Path | None = None, jobs: int = 1,
    executor: Executor | None = None, device: str = "cpu", threads: int | None = None,
    save_every: int | None = None, progress: bool = True,
) -> Results:  # fmt: skip
    """Train one small Llama of bytes for each position encoding, and evaluate it on longer text.

    ``wavepe compare`` calls this function. Both write the same folder. The same call continues what
    a stopped one began.

    Parameters
    ----------
    encodings : sequence of str
        The rows of the table, each an encoding: name or name:key=value,key=value. TRAINED/SPEC,
        such as rope/rope:type=yarn,factor=scaled, takes the model that was trained with TRAINED and
        evaluates it with SPEC (`finetune` also trains it further with SPEC). The default is "none",
        sinusoidal, rope with several bases, alibi and wavelet.
    preset : str
        A ready comparison. Options that are given replace those of the preset.
    data : path
        A text file, or a folder of text files. The default is the sources of Python's standard
        library.
    imports : sequence of str
        Python files (.py) or modules that register encodings or wavelets of your own.
    lengths : sequence of int
        Sequence lengths to evaluate. The default is 1, 2, 4, 8 times `train_length`.
    protocols : sequence of str
        How perplexity is measured: whole, blocks[:WINDOW] or sliding[:WINDOW[/STRIDE]], where
        WINDOW is the trained length and STRIDE half the window if they are left out. The default
        is whole.
    task : str
        Train and evaluate on a retrieval task instead of plain text.
    finetune : int
        Train each model further, on sequences of so many bytes and with the encoding of its row,
        and evaluate before and after.
    finetune_steps : int
        Steps of `finetune`. The default is a tenth of `steps`.
    split : str
        The held-out text to evaluate on: validation to choose hyper-parameters, test (the default)
        for the final figures.
    model : str
        Size of the models. The default is tiny; `layers`, `heads`, `head_dim`, `batch` and `lr`
        change parts of it.
    layers : int
        Number of layers (tiny: 2).
    heads : int
        Number of attention heads (tiny: 4).
    head_dim : int
        Head size (tiny: 24).
    batch : int
        Sequences in a step (tiny: 8).
    lr : float
        Learning rate (tiny: 0.003).
    train_length : int
        Bytes of a training sequence. The default is 128.
    steps : int
        Training steps. The default is 1200.
    seeds : int
        Trainings of each encoding, with different seeds. The default is 1.
    eval_bytes : int
        Approximate number of held-out bytes to evaluate. The default is 65536.
    keep : int
        Number of checkpoints to keep during a training, evenly spread. The default is 0.
    bands : bool
        Measure the frequency bands of rotary models, also at the checkpoints of `keep`.
    out : path
        Folder of the results. The default is runs/compare-XXXXXXXX, where the X depend on the
        settings.
    jobs : int
        Number of trainings at the same time, each in its own process. The default is 1.
    executor : concurrent.futures.Executor
        In place of `jobs`, what runs the trainings, such as a process pool of yours,
        ``dask.distributed.Client.get_executor()`` or one of MPI. Its processes must see `out` and
        `imports` at the same paths, and run one training at a time, in no thread beside another.
    device : {"cpu", "cuda", "auto"}
        Device that trains and evaluates. cuda multiplies matrices in bfloat16; auto is cuda if
        there is a GPU. The default is cpu.
    threads : int
        CPU threads of each job. The default is 1.
    save_every : int
        Training steps between two saved states. A killed run resumes from the last one. The default
        is a 20th of `steps`, at most 200.
    progress : bool
        Show the progress on stderr.

    Returns
    -------
    Results

    Raises
    ------
    ValueError
        An argument is wrong, the text is too short, or `out` holds another comparison.
    CommandError
        A package is missing, a training fails, or a file cannot be read or written.

    Examples
    --------
    >>> from wavepe.experiments import compare
    >>> results = compare(["rope", "wavelet"], steps=300)  # doctest: +SKIP
    >>> results.table()  # doctest: +SKIP
    """
    options = {name: value for name, value in locals().items() if name not in _RUNNING}
    parts = comparisons(options, _import(imports, out))
    if threads is not None:
        thread_count(threads)
    integer("jobs", jobs, 1)
    if executor is not None and (jobs != 1 or isinstance(executor, ThreadPoolExecutor)):
        raise UsageError("`executor`: needs processes, and `jobs` to be left out")
    integer("save_every", 1 if save_every is None else save_every, 1)
    longest = max(max(part.lengths) for part in parts.values())
    train_length = max(max(part.train_length, part.finetune) for part in parts.values())
    text = load_text(data, longest, train_length, next(iter(parts.values())).split)
    if out == "":
        raise UsageError("`out`: needs a folder, got an empty name")
    require("wavepe compare", **PARTS, matplotlib="plot")
    need_matplotlib("wavepe compare")  # now, and not after the trainings
    try:
        run = jobs, executor, imports, device, threads, save_every, progress
        return _run(parts, text, out, *run)
    except OSError as error:
        if error.errno in DISK_ERRORS and error.filename is not None:
            raise CommandError(
                f"{error.filename}: {error.strerror}; to continue, give the same command again"
            ) from error
        raise


# The arguments of `compare` that are not settings of their own.
_RUNNING = (
    "data", "imports", "out", "jobs", "executor", "device", "threads", "save_every", "progress",
)  # fmt: skip


def _import(imports: Sequence[str], out: str | Path | None) -> tuple[str, ...]:
    """Run the files of `imports`; UsageError if the folder was begun with another one."""
    imported = import_all(imports)
    begun = ComparisonFolder(Path(out)).recorded("imports", list) if out else None
    names = [text.rpartition(" ")[0] for text in imported]
    for text in map(str, begun or ()):
        name = text.rpartition(" ")[0]
        if name not in names:
            raise UsageError(f"`out` {out} was begun with `imports` {name}: give it again")
    return imported


def _run(
    parts: dict[str, Settings], text: Text, out: str | Path | None, jobs: int,
    executor: Executor | None, imports: Sequence[str], device: str, threads: int | None,
    save_every: int | None, progress: bool,
) -> Results:  # fmt: skip
    """Run each comparison in its folder, and report them together."""
    from ..training import device as devices
    from .comparison import Comparison, Work, check_rows
    from .executors import run_all
    from .progress import Report

    place = devices.device_named(device)
    for part in parts.values():
        check_rows(part)
    manifests = {name: part.manifest(text.sha256) for name, part in parts.items()}
    ending = "" if place == devices.CPU else f"-{place.place.type}"
    folder = Path(out or f"runs/compare-{digest(manifests.get('', manifests))}{ending}")
    folders = {name: ComparisonFolder(folder / name) for name in parts}
    threads = threads or next(iter(folders.values())).recorded("threads", int) or _THREADS
    if "" not in parts:  # a grid has a folder of folders
        folders[""] = ComparisonFolder(folder)
        grid = {"encodings": [], "parts": list(parts), "text_sha256": text.sha256}
        manifests = {"": grid, **manifests}
    contents = {}
    with ExitStack() as stack:
        stack.enter_context(devices.torch_threads(thread_count(threads)))
        for name, manifest in manifests.items():
            stack.enter_context(folders[name].opened({**manifest, "threads": threads}))
        for name, part in parts.items():
            # a killed training loses little, and saving takes little time
            often = save_every or max(1, min(part.steps // 20, 200))
            comparison = Comparison(Work(part, text, folders[name], threads, often, place))
            with Report(comparison.steps, quiet=not progress, part=name) as report:
                for hint in hints(part):
                    report.say(f"hint: {hint}")
                run_all(comparison, jobs, executor, imports, report)
            contents[name] = read_json(folders[name].results)
        results = Results(folder, contents, parts)
        shown = list(results.sections())
        for name, section in shown:
            if section.draw:
                with new_file(folder / name / section.picture) as new:
                    section.draw(new)
        with new_file(folder / "report.md") as new:
            whole = report_text(contents, shown, pictures=True)
            new.write_text(whole, "utf-8", "backslashreplace")
    return results
