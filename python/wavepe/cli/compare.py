"""``wavepe compare``: train one small Llama per encoding, and evaluate it on longer text."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import DISK_ERRORS
from ..encodings import known_encodings
from ..experiments.data import SPLITS, Text, load_text
from ..experiments.errors import CommandError, UsageError, require, thread_count
from ..experiments.folder import RunFolder
from ..experiments.imports import import_all, name_in
from ..experiments.presets import DEFAULTS, MODELS, PRESETS, default_rows
from ..experiments.settings import Settings, comparisons, digest
from ..experiments.tasks import TASKS
from .outputs import need_matplotlib

if TYPE_CHECKING:
    from ..experiments.device import Device

# How often training states are saved: a killed training loses little, and saving takes little time.
_SAVES_PER_TRAINING = 20
_MOST_STEPS_BETWEEN_SAVES = 200

# Measured on models of this size: a second thread is a quarter faster on an idle machine. But if
# another process uses one of two cores, it is 2 to 20 times slower, because threads spin.
_THREADS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe compare``; None means that a preset or DEFAULTS decide."""
    parser.epilog = "presets:\n" + "\n".join(f"  {n:14}{p.text}" for n, p in PRESETS.items())
    add, default, tiny = parser.add_argument, DEFAULTS, MODELS["tiny"]
    add("--encodings", nargs="+", metavar="SPEC",
        help="the rows of the table, each an encoding: name or name:key=value,key=value. "
        "TRAINED/SPEC, such as rope/rope:type=yarn,factor=scaled, takes the model that was trained "
        "with TRAINED and evaluates it with SPEC (--finetune also trains it further with SPEC) "
        "(default: " + " ".join(default_rows(default["train_length"])) + "); names: "
        + " ".join(known_encodings()))  # fmt: skip
    add(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="a ready comparison, listed below; options that you give replace those of the preset",
    )
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip
    add("--lengths", nargs="+", metavar="N",
        help="sequence lengths to evaluate (default: 1, 2, 4, 8 times --train-length)")  # fmt: skip
    add("--protocols", nargs="+", metavar="NAME",
        help="how perplexity is measured: whole, blocks[:WINDOW] or sliding[:WINDOW[/STRIDE]], "
        "where WINDOW is the trained length and STRIDE half the window if you leave them out "
        "(default: whole)")  # fmt: skip
    add("--task", choices=TASKS, metavar="NAME",
        help="train and evaluate on a retrieval task instead of plain text: "
        + ", ".join(TASKS))  # fmt: skip
    add("--finetune", type=int, metavar="LENGTH",
        help="train each model further, on sequences of LENGTH bytes and with the encoding of its "
        "row, and evaluate before and after")  # fmt: skip
    add("--finetune-steps", type=int, metavar="N",
        help="steps of --finetune (default: a tenth of --steps)")  # fmt: skip
    add("--data", metavar="PATH", help="a text file, or a folder of text files (default: the "
        "sources of Python's standard library)")  # fmt: skip
    add("--split", choices=SPLITS,
        help="the held-out text to evaluate on: validation to choose hyper-parameters, test for "
        "the final figures (default: test)")  # fmt: skip
    add("--model", choices=MODELS, metavar="NAME",
        help=f"size of the models: {', '.join(MODELS)}; --layers, --heads, --head-dim, --batch and "
        f"--lr change parts of it (default: {default['model']})")  # fmt: skip
    add("--layers", type=int, metavar="N", help=f"number of layers (tiny: {tiny['layers']})")
    add("--heads", type=int, metavar="N", help=f"number of attention heads (tiny: {tiny['heads']})")
    add("--head-dim", type=int, metavar="N", help=f"head size (tiny: {tiny['head_dim']})")
    add("--batch", type=int, metavar="N", help=f"sequences in a step (tiny: {tiny['batch']})")
    add("--lr", type=float, metavar="X", help=f"learning rate (tiny: {tiny['lr']})")
    add("--train-length", type=int, metavar="N",
        help=f"bytes of a training sequence (default: {default['train_length']})")  # fmt: skip
    add("--steps", type=int, metavar="N", help=f"training steps (default: {default['steps']})")
    add(
        "--seeds",
        type=int,
        metavar="N",
        help=f"trainings of each encoding, with different seeds (default: {default['seeds']})",
    )
    add(
        "--eval-bytes",
        type=int,
        metavar="N",
        help=f"approximate number of held-out bytes to evaluate (default: {default['eval_bytes']})",
    )
    add(
        "--keep",
        type=int,
        metavar="N",
        help="number of checkpoints to keep during a training, evenly spread (default: 0)",
    )
    add(
        "--bands",
        action="store_true",
        default=None,
        help="measure the frequency bands of rotary models, also at the checkpoints of --keep",
    )
    add("--out", metavar="DIR", help="folder of the results (default: runs/compare-XXXXXXXX, "
        "where the X depend on the settings)")  # fmt: skip
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="number of trainings at the same time, each in its own process (default: %(default)s)",
    )
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu",
        help="device that trains and evaluates; cuda multiplies matrices in bfloat16, auto is cuda "
        "if there is a GPU (default: %(default)s)")  # fmt: skip
    add("--threads", type=int, metavar="N", help=f"CPU threads of each job (default: {_THREADS})")
    add("--save-every", type=int, metavar="N",
        help="training steps between two saved states; a killed run resumes from the last one "
        f"(default: a 20th of --steps, at most {_MOST_STEPS_BETWEEN_SAVES})")  # fmt: skip
    add("--quiet", action="store_true", help="print nothing but the tables")


def run(args: argparse.Namespace) -> int:
    """Check all arguments, then train, evaluate and report."""
    parts = comparisons(args, _import(args))
    for option in ("threads", "save_every", "jobs"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} {value}: needs at least 1")
    text = load_text(
        args.data,
        max(max(part.lengths) for part in parts.values()),
        max(max(part.train_length, part.finetune) for part in parts.values()),
        split=next(iter(parts.values())).split,
    )
    if args.out == "":
        raise UsageError("--out: needs a folder, got an empty name")
    require("wavepe compare", torch="torch", transformers="hf", rich="cli", matplotlib="plot")
    need_matplotlib("wavepe compare")  # now, and not after hours of training
    from ..experiments.device import device_named

    try:
        _run_parts(args, parts, text, device_named(args.device))
    except OSError as error:
        if error.errno in DISK_ERRORS and error.filename is not None:
            raise CommandError(
                f"{error.filename}: {error.strerror}; to continue, give the same command again"
            ) from error
        raise
    return 0


def _import(args: argparse.Namespace) -> tuple[str, ...]:
    """Run the files of --import; UsageError if the folder was begun with another one."""
    imports = import_all(args.imports)
    begun = RunFolder(Path(args.out)).recorded("imports", list) if args.out else None
    for name in map(name_in, map(str, begun or ())):
        if name not in map(name_in, imports):
            raise UsageError(f"--out {args.out} was begun with --import {name}: give it again")
    return imports


def _run_parts(
    args: argparse.Namespace, parts: dict[str, Settings], text: Text, device: Device
) -> None:
    """Run each comparison in its folder, and report them together."""
    from ..experiments.comparison import Comparison, Work
    from ..experiments.device import CPU, torch_threads
    from ..experiments.report import report
    from ..experiments.training import check_rows

    for part in parts.values():
        check_rows(part)
    manifests = {name: part.manifest(text.sha256) for name, part in parts.items()}
    whole: dict[str, Any] = {"encodings": [], "parts": list(parts), "text_sha256": text.sha256}
    whole = manifests.get("", whole)
    ending = "" if device == CPU else f"-{device.place.type}"
    named = digest(manifests.get("", manifests))
    out = Path(args.out or f"runs/compare-{named}{ending}")
    outer = RunFolder(out)
    first = outer if "" in parts else RunFolder(out / next(iter(parts)))
    threads = thread_count("--threads", args.threads or first.recorded("threads", int) or _THREADS)
    results: dict[str, dict[str, Any]] = {}
    with torch_threads(threads) as threads, ExitStack() as stack:
        stack.enter_context(outer.opened({**whole, "threads": threads}))
        for name, settings in parts.items():
            folder = outer
            if name:
                folder = RunFolder(out / name)
                stack.enter_context(folder.opened({**manifests[name], "threads": threads}))
            work = Work(settings, folder, threads, _save_every(args, settings), device)
            comparison = Comparison(work, text)
            results[name] = comparison.run(args.jobs, args.imports, args.quiet, name)
        report(outer, parts, results, args.quiet)


def _save_every(args: argparse.Namespace, settings: Settings) -> int:
    often = min(settings.steps // _SAVES_PER_TRAINING, _MOST_STEPS_BETWEEN_SAVES)
    return args.save_every or max(1, often)
