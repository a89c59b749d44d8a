"""``compare``: train one small Llama per encoding, and evaluate it on longer text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import UsageError, need_matplotlib, require, thread_count
from ..common.files import new_file
from ..training.folder import ComparisonFolder, digest
from .data import load_text
from .executors import cluster, run_all
from .imports import import_all
from .model import PARTS
from .numbers import integer
from .report import Results, report_text
from .settings import OPTIONS, chosen_settings, hints

if TYPE_CHECKING:
    from ..encodings import Encoding

# Measured on models of this size: a second thread is a quarter faster on an idle machine. But if
# another process uses one of two cores, it is 2 to 20 times slower, because threads spin.
_THREADS = 1


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
    bands: bool | None = None, out: str | Path | None = None, jobs: int | None = None,
    executor: str | Executor | None = None, device: str = "cpu", threads: int | None = None,
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
        Number of trainings at the same time, each in its own process. The default is 1, or with
        `device` cuda the number of GPUs, of which each process has one.
    executor : str or concurrent.futures.Executor
        In place of `jobs`, what runs the trainings: dask://HOST:PORT, slurm:KEY=VALUE,... with the
        parameters of submitit, ray or mpi; in Python also an executor, such as a process pool. Its
        processes must see `out` and `imports` at the same paths, and run one training at a time.
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
        A package is missing, a training fails, or a file cannot be read.
    OSError
        A file cannot be written.

    Examples
    --------
    >>> from wavepe.experiments import compare
    >>> results = compare(["rope", "wavelet"], steps=300)  # doctest: +SKIP
    >>> results.table()  # doctest: +SKIP
    """
    arguments = locals()
    begun = ComparisonFolder(Path(out)).recorded("imports", list) if out and not imports else None
    if begun:  # else an unknown encoding would be the error
        raise UsageError(f"`out` {out} was begun with {', '.join(map(str, begun))}: give `imports`")
    settings = chosen_settings({x: arguments[x] for x in OPTIONS}, import_all(imports))
    for name, value in (("jobs", jobs), ("save_every", save_every)):
        if value is not None:
            integer(name, value, 1)
    if isinstance(executor, ThreadPoolExecutor) or (executor and jobs):
        raise UsageError("`executor`: needs processes, and `jobs` to be left out")
    opened = cluster(executor) if isinstance(executor, str) else executor
    train_length = max(settings.train_length, settings.finetune)
    text = load_text(data, max(settings.lengths), train_length, settings.split)
    if out == "":
        raise UsageError("`out`: needs a folder, got an empty name")
    require("wavepe compare", **PARTS, matplotlib="plot")
    need_matplotlib("wavepe compare")  # now, and not after the trainings
    import torch

    from ..training import device as devices
    from .comparison import Comparison, Work, check_rows
    from .progress import Report

    if executor is not None and device == "cuda":  # of other machines
        place = devices.Device(torch.device("cuda"), count=1)
    else:
        place = devices.device_named(device)
    check_rows(settings)
    manifest = settings.manifest(text.sha256)
    ending = "" if place == devices.CPU else f"-{place.place.type}"
    folder = ComparisonFolder(Path(out or f"runs/compare-{digest(manifest)}{ending}"))
    threads = threads or folder.recorded("threads", int) or _THREADS
    # a killed training loses little, and saving takes little time
    often = save_every or max(1, min(settings.steps // 20, 200))
    with (
        devices.torch_threads(thread_count(threads)),
        folder.opened({**manifest, "threads": threads}),
    ):
        comparison = Comparison(Work(settings, text, folder, threads, often, place))
        with Report(comparison.steps, quiet=not progress) as report:
            for hint in hints(settings):
                report.say(f"hint: {hint}")
            run_all(comparison, jobs or max(1, place.count), opened, imports, report)
        results = Results.load(folder.path)
        for section in results.sections:
            if section.draw:
                with new_file(folder.path / section.picture) as new:
                    section.draw(new)
        with new_file(folder.path / "report.md") as new:
            whole = report_text(results.content, results.sections, pictures=True)
            new.write_text(whole, "utf-8", "backslashreplace")
    return results
