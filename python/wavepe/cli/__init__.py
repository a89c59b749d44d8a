"""The command line ``wavepe``, also ``python -m wavepe``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

import wavepe

from ..common.errors import CommandError, UsageError, out_of_memory
from ..common.files import interrupt_on_signals
from ..common.labels import suggestion

# Command -> its purpose. Each has a module (`_module`) with add_arguments(parser) and run(args).
COMMANDS = {
    "compare": "train one small Llama for each position encoding, and evaluate it on longer text",
    "perplexity": "measure the perplexity of a model at several sequence lengths",
    "bands": "show which rotary pair of each head is largest, and which one theory predicts",
    "needle": "measure how often a model finds a fact that is hidden in a long context",
    "heatmap": "draw the attention weights of models, and show how far back each head looks",
    "sweep": "measure perplexity with a changed rotary embedding: fewer pairs, or another theta",
    "convert": "convert a checkpoint folder to another position encoding",
    "adapt": "swap the position encoding of a trained model, and fine-tune it",
    "plot": "draw the encodings themselves, by distance, head or scale",
    "rope": "show what turns how fast in a model, and check the rotation of an engine",
    "bench": "time the operators beside their alternatives",
    "info": "show what is installed, and the commands that install what is missing",
}
_EXAMPLES = {
    "compare": "wavepe compare --encodings rope alibi wavelet:scales=6+kerple --seeds 3 --jobs 2",
    "perplexity": "wavepe perplexity my-llama --lengths 512 2048 --data book.txt",
    "bands": "wavepe bands my-llama --length 2048",
    "needle": "wavepe needle my-llama --lengths 1024 4096",
    "heatmap": "wavepe heatmap my-llama my-wavelet-llama --length 1024 --png maps.png",
    "sweep": "wavepe sweep my-llama --theta 1e4 1e5 1e6 --lengths 2048 8192",
    "convert": "wavepe convert my-llama my-wavelet-llama wavelet+kerple",
    "adapt": "wavepe adapt my-llama my-wavelet-llama wavelet --data books/",
    "plot": "wavepe plot bias --encodings alibi kerple --png slopes.png",
    "rope": "wavepe rope my-llama/config.json --check engine.npz",
    "bench": "wavepe bench rope --quick",
    "info": "wavepe info",
}
_INTERRUPTED = 130
_RESUMING = ("compare", "adapt")


class _Help(argparse.HelpFormatter):
    """A formatter that keeps the lines of an epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each line on its own; if there are several, indent what does not fit."""
        lines = text.splitlines()
        below = indent + "    " * (len(lines) > 1)
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=below)
            for line in lines
        )


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if chosen := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            close = suggestion(chosen[1], re.findall(r"[\w-]+", chosen[2]))
            message = message.replace(" (choose", f"{close} (choose")
        raise UsageError(f"{message} ({self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process; return the exit code.

    It is 0 for success, 1 for a failure, 2 for a wrong argument, file or folder, and 130 after
    Ctrl-C.
    """
    _make_streams_safe()
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in COMMANDS else None
    name = f"wavepe {command}" if command else "wavepe"
    with interrupt_on_signals():
        return _finish(name, *_run(name, command, argv))


def _finish(name: str, code: int, message: str) -> int:
    """Print the message on stderr, and return the exit code."""
    try:
        sys.stdout.flush()  # a closed pipe or a full disk fails here, and not at exit
    except OSError as error:
        _discard(sys.stdout)
        code = code or 1
        unreported = message in ("", f"error: {error.strerror}")
        if unreported and not isinstance(error, BrokenPipeError):
            message = f"error: cannot write to stdout: {error.strerror}"
    if message:
        lines = [line.rstrip() for line in message.splitlines() if line.strip()]
        try:
            print(f"{name}: " + "\n".join(lines), file=sys.stderr, flush=True)
        except OSError:  # the same full disk
            _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Send what `stream` still holds to /dev/null; else Python would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _make_streams_safe() -> None:
    """Escape characters that a stream cannot print, and replace closed streams by /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed; the next file would get its number
            stream = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(name: str, command: str | None, argv: Sequence[str]) -> tuple[int, str]:
    """Run the command; return its exit code and the message for stderr."""
    flags: dict[str, str] = {}  # argument -> its option, or the name that the help gives it
    try:
        args, unknown = _parser(command, flags).parse_known_args(argv)
        if unknown:
            options = [f"--{key.replace('_', '-')}" for key in vars(args)]
            close = suggestion(unknown[0].partition("=")[0], options)
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{close} ({name} --help)")
        if command is None:
            raise UsageError("give a command: " + ", ".join(COMMANDS) + " (wavepe --help)")
        return _module(command).run(args), ""
    except SystemExit as stop:  # --help, --version
        return int(stop.code or 0), ""
    except CommandError as error:
        text = re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), str(error))
        return error.code, f"error: {text}"
    except KeyboardInterrupt:
        resumes = f"; to resume: {shlex.join(['wavepe', *argv])}" if command in _RESUMING else ""
        return _INTERRUPTED, f"interrupted{resumes}"
    except BrokenPipeError:  # the reader of our output has closed it
        return 1, ""
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return 1, f"error: {where}{error.strerror or error}"
    except ImportError as error:
        return 1, f"error: {error}"
    except (MemoryError, RuntimeError, ValueError) as error:
        memory = out_of_memory(error)
        if memory is None:
            raise
        return 1, f"error: {memory}; take smaller sizes, or free memory"


def _module(command: str) -> ModuleType:
    """Return the module of a command: of bench, in the repository's folder benchmarks."""
    bench = "wavepe.benchmarks.bench"  # setup.py puts it into the package
    return importlib.import_module(bench if command == "bench" else f".{command}", __name__)


def _parser(command: str | None, flags: dict[str, str]) -> argparse.ArgumentParser:
    """Return the parser, and fill `flags`. Only the module of the command is loaded."""
    parser = _Parser(
        prog="wavepe",
        description="Position encodings for transformers: wavelets, RoPE, ALiBi and relatives.",
    )
    parser.add_argument("--version", action="version", version=f"wavepe {wavepe.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            _module(name).add_arguments(sub)
            flags.update({a.dest: (a.option_strings or [str(a.metavar)])[0] for a in sub._actions})
            sub.epilog = "\n".join(filter(None, (sub.epilog, f"example: {_EXAMPLES[name]}")))
    return parser
