"""Shared by the commands that measure a model: options, checks before the work, figures, files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis import perplexity
from ..common.errors import need_matplotlib, require
from ..common.files import writing
from ..experiments import model as models
from ..experiments.environment import environment
from ..experiments.text import Tokens, check_data, tokens_for
from .options import Number, add_imports, add_json, check_json, check_picture, write_json

if TYPE_CHECKING:
    import torch

DATA_HELP = ("a text file, or a folder of text files (default: the sources of Python's standard "
    "library, the part that wavepe compare does not train on)")  # fmt: skip
# The figures for --json, and the function that draws them to a path.
Measured = tuple[dict[str, Any], Callable[[Path], Any]]


def add_arguments(
    parser: argparse.ArgumentParser, *, several: bool = False, data: str = DATA_HELP
) -> None:
    """Add MODEL and the options that all these commands have; `data` is the help of --data."""
    parser.set_defaults(command=parser.prog)
    add = parser.add_argument
    # argparse would show MODEL last, where an option of several values would swallow it.
    parser.usage = f"%(prog)s MODEL{' [MODEL ...]' * several} [options]"
    add("models", metavar="MODEL", nargs="+" if several else 1,
        help="local folder in Hugging Face format, with config.json, weights and tokenizer. A "
        "model without a tokenizer reads bytes, and must have a vocabulary of 256, like the "
        "checkpoints of wavepe compare")  # fmt: skip
    add("--data", metavar="PATH", help=data)
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu",
        help="device of the model; auto is cuda if there is a GPU (default: cpu)")  # fmt: skip
    add("--threads", type=int, metavar="N",
        help="number of CPU threads (default: that of torch, all cores; give fewer if others use "
        "them)")  # fmt: skip
    add_imports(parser)
    add_json(parser, "figures")
    add("--png", metavar="FILE", help="draw the figures to this file (.png, .pdf or .svg)")


def add_length(parser: argparse.ArgumentParser, longest: int) -> None:
    """Add the option of commands that run the model on one text."""
    text = f"tokens to run (default: the trained length, at most {longest})"
    parser.add_argument("--length", action=Number, help=text)


def one_text(loaded: models.Model, args: argparse.Namespace, longest: int) -> Tokens:
    """Return the tokens of --data in the length of --length."""
    length = args.length or min(loaded.trained_length or longest, longest)
    return tokens_for(loaded, args.data, [length], length)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that measure the perplexity at several lengths."""
    add = parser.add_argument
    add("--lengths", "--length", nargs="+", action=Number, least=2,
        help="sequence lengths to evaluate (default: those of the wavepe compare that trained the "
        "model; for other models 1, 2, 4 and 8 times the trained length, which counts as 512 if it "
        "is longer)")  # fmt: skip
    add("--tokens", action=Number,
        help="approximate number of tokens to evaluate, at least the longest length (default: "
        "65536)")  # fmt: skip


def run(
    args: argparse.Namespace, measure: Callable[[models.Model, argparse.Namespace], Measured]
) -> int:
    """Run a command of one MODEL: `measure` prints the tables of a loaded model."""
    check(args)
    with models.opened(args.models[0], args.imports, args.device, args.threads) as loaded:
        figures, draw = measure(loaded, args)
    write(args, figures, draw)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise CommandError for what cannot be read, written or run, before the long work begins."""
    require(args.command, **models.PARTS)
    check_json(args)
    if args.png is not None:
        need_matplotlib(f"{args.command} --png")
        check_picture("--png", args.png)
    check_data(args.data)
    for path in args.models:
        models.check_folder(path)


@contextmanager
def running(loaded: models.Model, args: argparse.Namespace) -> Iterator[Callable[[str], Any]]:
    """Run passes of the model; gives begin(title), which returns progress(done, total)."""
    from ..experiments.progress import Report  # needs rich

    with loaded.running(), Report(quiet=args.quiet, lines=False) as report:
        yield report.begin


def perplexities(
    loaded: models.Model, args: argparse.Namespace, ids: torch.Tensor, lengths: Sequence[int],
    title: str = "", **options: Any,
) -> dict[int, float]:  # fmt: skip
    """Return the perplexity for each length; `options` are those of `analysis.perplexity`."""
    values = {}
    with running(loaded, args) as begin:
        for length in lengths:
            progress = begin(f"{title}length {length}")
            values[length] = perplexity(loaded.model, ids, length, progress=progress, **options)
    return values


def write(args: argparse.Namespace, figures: dict[str, Any], draw: Callable[[Path], Any]) -> None:
    """Write the files of --json and --png: `figures` as JSON, and the picture of `draw(path)`."""
    if args.json is not None:
        about = {**environment(), **figures["environment"]}
        write_json(args, {**figures, "environment": about})
    if args.png is not None:
        with writing(Path(args.png)):
            draw(Path(args.png))
    written = [f"{name}: {value}" for name in ("json", "png") if (value := getattr(args, name))]
    if written and not args.quiet:
        print("  ".join(written))
