"""``wavepe adapt``: swap the encoding of a trained model, and train it until it has recovered."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import new_file
from ..experiments import model as models
from ..experiments.errors import UsageError, require
from ..experiments.numbers import integer, integers

if TYPE_CHECKING:
    from ..hf import Adapted

DATA_HELP = "a text file, or a folder of text files; its end is held out, for the perplexities"
ROWS = {
    "stock": "{} model",
    "control": "{} model, trained on",
    "swapped": "swapped, not trained",
    "adapted": "swapped and trained",
}
ADVICE = (
    "For text beyond the trained length alone, compare rope:type=yarn, which needs no training: "
    "wavepe perplexity, and wavepe convert."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe adapt``."""
    models.add_arguments(parser, data=DATA_HELP)
    parser.usage = "%(prog)s SOURCE TARGET ENCODING --data PATH [options]"
    source = next(action for action in parser._actions if action.dest == "model")
    source.metavar = "SOURCE"
    add = parser.add_argument
    add(
        "target",
        metavar="TARGET",
        help="folder for the new model and its checkpoints, results.json, report.md and "
        "perplexity.png; after a stop the same command goes on",
    )
    add("encoding", metavar="ENCODING", help="the new encoding, such as wavelet or rope+alibi")
    add("--tokens", type=int, metavar="N", default=1_000_000,
        help="tokens to train on (default: %(default)s)")  # fmt: skip
    add("--length", type=int, metavar="N", default=512,
        help="tokens of a sequence in training (default: %(default)s)")  # fmt: skip
    add("--lengths", nargs="+", metavar="N",
        help="lengths of the perplexities (default: --length and twice that)")  # fmt: skip
    add("--held-out", type=int, metavar="N",
        help="tokens at the end of the text that are not trained on, and give the perplexities "
        "(default: 16384, or a quarter of the text)")  # fmt: skip
    add("--recipe", choices=("auto", "plain", "transfer"), default="auto",
        help="plain: train on the next token. transfer: each attention layer first learns the "
        "output of the stock layer. auto: transfer, and where ENCODING rotates nothing, keep the "
        "fast pairs of the stock rotation (default: %(default)s)")  # fmt: skip
    add(
        "--batch",
        type=int,
        metavar="N",
        default=1,
        help="sequences of a step (default: %(default)s)",
    )
    add("--lr", type=float, metavar="RATE", default=1e-4,
        help="learning rate of the weights (default: %(default)s)")  # fmt: skip
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank, and merge them (needs PEFT)",
    )
    add("--control", action="store_true",
        help="train a copy of the stock model on the same tokens, at half the rate")  # fmt: skip
    add("--seed", type=int, metavar="N", default=0, help="(default: %(default)s)")
    add("--resume", action="store_true", help="go on with what TARGET holds; this is the default")
    add("--bf16", action="store_true", help="compute in bfloat16; weights stay as they are")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")


def run(args: argparse.Namespace) -> int:
    """Adapt the model; print the table and write the report."""
    models.need_parts("wavepe adapt")
    require("wavepe adapt", accelerate="examples")
    if args.data is None:
        raise UsageError("--data: needs a text file or a folder")
    if not args.lr > 0:
        raise UsageError(f"--lr {args.lr}: needs a number above 0")
    target = _target(args.target)
    sizes = {
        name: integer(f"--{name}", getattr(args, name), least)
        for name, least in (("tokens", 1), ("length", 2), ("batch", 1), ("seed", 0))
    }
    held_out = None if args.held_out is None else integer("--held-out", args.held_out, 2)
    lengths = integers("--lengths", args.lengths, 2) if args.lengths else None
    training = {name: True for name in ("bf16", "gradient_checkpointing") if getattr(args, name)}
    lora = None if args.lora is None else integer("--lora", args.lora, 1)
    from transformers.utils import logging

    from ..experiments.bar import bar
    from ..experiments.text import check_data, first_and_last_tokens
    from ..hf import encoding_of
    from ..hf.adapting import HELD_OUT, adapt

    check_data(args.data)
    logging.disable_progress_bar()
    with models.opened(args, args.model) as loaded:
        word = "stock" if encoding_of(loaded.model) is None else "source"
        labels = {name: label.format(word) for name, label in ROWS.items()}
        last = max(held_out or HELD_OUT, *(lengths or (2 * sizes["length"],)))
        ids = first_and_last_tokens(loaded, args.data, sizes["tokens"], last)
        if held_out is None and len(ids) >= sizes["tokens"] + last:
            held_out = last  # of a shorter text adapt takes a quarter
        with bar(quiet=args.quiet, lines=True) as begin:
            progress = _progress(begin, labels)
            try:
                done = adapt(
                    loaded.model, args.encoding, ids, tokens=sizes["tokens"],
                    length=sizes["length"], recipe=args.recipe, folder=target,
                    tokenizer=loaded.tokenizer, lengths=lengths, held_out=held_out,
                    batch_size=sizes["batch"], learning_rate=args.lr, lora=lora,
                    control=args.control, seed=sizes["seed"], progress=progress,
                    use_cpu=args.device == "cpu", **training,
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from error
        _report(done, args, target, loaded, labels)
    return 0


def _target(given: str) -> Path:
    """Return the folder; UsageError if it holds something else than an adaptation."""
    from ..hf.adapt_run import RESULTS

    target = Path(given)
    if target.is_file():
        raise UsageError(f"TARGET {given}: is a file; needs a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / RESULTS).exists():
        raise UsageError(f"TARGET {given}: is not empty, and holds no adaptation to go on with")
    return target


def _progress(begin: Any, labels: dict[str, str]) -> Any:
    steps: dict[str, Any] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in steps:
            name, _, length = what.partition(", ")
            doing = f"measuring at {length}" if length else "training"
            steps[what] = begin(f"{labels[name]}: {doing}")
        steps[what](done, total)

    return progress


def _report(
    done: Adapted,
    args: argparse.Namespace,
    target: Path,
    loaded: models.Model,
    labels: dict[str, str],
) -> None:
    from ..experiments.tables import markdown_rows, print_rows
    from ..experiments.terminal import wrapped

    title = f"Perplexity per {loaded.unit} of {loaded.name}, on held-out text of {args.data}"
    lengths = list(map(str, done.settings["lengths"]))
    rows = [
        (label, [f"{done.perplexity[name][n]:.2f}" for n in done.settings["lengths"]])
        for name, label in labels.items()
        if name in done.perplexity
    ]
    trained = f"Trained on {done.settings['tokens']} tokens in {done.seconds:.0f} s."
    lines = [f"Encoding: {done.encoding}", f"Recipe {done.why}.", trained, ADVICE]
    if not args.quiet:
        print(wrapped(title, indent=0))
    print_rows("model", lengths, rows)
    if not args.quiet:
        for line in lines:
            print(wrapped(line, indent=0))
    with new_file(target / "report.md") as part:
        text = [
            f"# {loaded.name} with {done.encoding}",
            title + ".",
            markdown_rows("model", lengths, rows),
        ]
        part.write_text("\n\n".join([*text, *lines]) + "\n", "utf-8")
    _draw(done, target, title, loaded.unit, labels)


def _draw(done: Adapted, target: Path, title: str, unit: str, labels: dict[str, str]) -> None:
    try:
        from ..analysis.plots import perplexity_by_length
    except ImportError:
        return
    runs = [
        {"encoding": labels[name], "seed": 0, "perplexity": found}
        for name, found in done.perplexity.items()
    ]
    with new_file(target / "perplexity.png") as part:
        perplexity_by_length(
            runs, part, train_length=done.settings["length"], title=title, unit=unit
        )
