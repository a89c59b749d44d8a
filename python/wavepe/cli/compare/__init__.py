"""``wavepe compare``: train one small Llama per encoding, evaluate each beyond its length."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._files import DISK_ERRORS
from ...encodings import known_encodings
from ..errors import CommandError, UsageError, require, thread_count
from ..imports import import_all, name_in
from ..outputs import need_matplotlib
from .data import SPLITS, Text, load_text
from .folder import RunFolder
from .presets import DEFAULTS, MODELS, PRESETS, default_rows
from .settings import Settings, comparisons, digest
from .tasks import TASKS

if TYPE_CHECKING:
    from ..device import Device

# Training states kept so often that a kill costs little, so seldom that they cost nothing.
_SAVES_PER_TRAINING = 20
_MOST_STEPS_BETWEEN_SAVES = 200

# Measured on models of this size: a second thread gains a quarter on an idle machine, and costs a
# factor of 2 to 20 where another process keeps one of two cores busy (threads wait by spinning).
_THREADS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wavepe compare``. None means that a preset or DEFAULTS decide."""
    parser.epilog = "presets:\n" + "\n".join(f"  {n:10}{p.text}" for n, p in PRESETS.items())
    add, default, tiny = parser.add_argument, DEFAULTS, MODELS["tiny"]
    add("--encodings", nargs="+", metavar="SPEC",
        help="the rows: name or name:key=value,key=value; TRAINED/SPEC reads (or, with "
        "--finetune, trains on) with SPEC a model trained as TRAINED, as in "
        "rope/rope:type=yarn,factor=scaled (default: "
        + " ".join(default_rows(default["train_length"])) + "); names: "
        + " ".join(known_encodings()))  # fmt: skip
    add(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="a comparison of the papers, listed below; other options win over it",
    )
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip
    add("--lengths", nargs="+", metavar="N",
        help="sequence lengths to evaluate (default: 1, 2, 4, 8 times --train-length)")  # fmt: skip
    add("--protocols", nargs="+", metavar="NAME",
        help="how perplexity is measured: whole, blocks[:WINDOW], sliding[:WINDOW[/STRIDE]]; a "
        "window is the trained length, a stride half the window (default: whole)")  # fmt: skip
    add("--task", choices=TASKS, metavar="NAME",
        help="train and evaluate on a task of retrieval instead of plain text: "
        + ", ".join(TASKS))  # fmt: skip
    add("--finetune", type=int, metavar="LENGTH",
        help="go on training on sequences of LENGTH, each row with its own encoding, and "
        "evaluate before and after")  # fmt: skip
    add("--finetune-steps", type=int, metavar="N",
        help="steps of --finetune (default: a tenth of --steps)")  # fmt: skip
    add("--data", metavar="PATH", help="a text file, or a folder of them (default: the Python "
        "standard library's sources)")  # fmt: skip
    add("--split", choices=SPLITS,
        help="which held-out text to evaluate on; choose hyper-parameters on validation, and "
        "take figures from test (default: test)")  # fmt: skip
    add("--model", choices=MODELS, metavar="NAME",
        help=f"size: {', '.join(MODELS)}; the options below change a part of it "
        f"(default: {default['model']})")  # fmt: skip
    add("--layers", type=int, metavar="N", help=f"layers ({tiny['layers']})")
    add("--heads", type=int, metavar="N", help=f"attention heads ({tiny['heads']})")
    add("--head-dim", type=int, metavar="N", help=f"head size ({tiny['head_dim']})")
    add("--batch", type=int, metavar="N", help=f"sequences per step ({tiny['batch']})")
    add("--lr", type=float, metavar="X", help=f"learning rate ({tiny['lr']})")
    add("--train-length", type=int, metavar="N", help=f"trained length ({default['train_length']})")
    add("--steps", type=int, metavar="N", help=f"training steps ({default['steps']})")
    add("--seeds", type=int, metavar="N", help=f"trainings per encoding ({default['seeds']})")
    add("--eval-bytes", type=int, metavar="N",
        help=f"held-out bytes to evaluate on, about ({default['eval_bytes']})")  # fmt: skip
    add("--keep", type=int, metavar="N", help="checkpoints to keep on the way, evenly spread (0)")
    add("--bands", action="store_true", default=None,
        help="measure the frequency band of rotary models, at each checkpoint too")  # fmt: skip
    add("--out", metavar="DIR", help="folder of the results (default: runs/compare-XXXXXXXX, "
        "named after the settings)")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="trainings at a time, each in a process of its own (%(default)s)")  # fmt: skip
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu",
        help="what trains and evaluates; cuda takes products in bfloat16, auto is cuda where there "
        "is a GPU (default: %(default)s)")  # fmt: skip
    add("--threads", type=int, metavar="N", help=f"CPU threads of a job (default: {_THREADS})")
    add("--save-every", type=int, metavar="N",
        help="training steps between the states a killed run resumes from")  # fmt: skip
    add("--quiet", action="store_true", help="print the table alone")


def run(args: argparse.Namespace) -> int:
    """Check everything, then train, evaluate and report."""
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
    need_matplotlib("wavepe compare")  # a wrong MPLBACKEND, after hours of training otherwise
    from ..device import device_named

    try:
        _run_parts(args, parts, text, device_named(args.device))
    except OSError as error:
        if error.errno in DISK_ERRORS and error.filename is not None:
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


def _run_parts(
    args: argparse.Namespace, parts: dict[str, Settings], text: Text, device: Device
) -> None:
    """Run each comparison in its folder, and report them together."""
    from ..device import CPU, torch_threads
    from .comparison import Comparison, Work
    from .report import report
    from .training import check_rows

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
