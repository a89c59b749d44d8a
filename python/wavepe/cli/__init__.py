"""The command line ``wavepe``, also ``python -m wavepe``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

import wavepe

from .._files import interrupt_on_signals
from .._labels import fold
from .errors import CommandError, UsageError, out_of_memory

# Subcommand -> what it does; each is a module here with add_arguments(parser) and run(args).
_COMMANDS = {
    "compare": "train one small Llama per position encoding on a text, evaluate beyond its length",
    "perplexity": "perplexity of a trained model by sequence length, by one of three protocols",
    "bands": "which rotary pair of each head is largest, measured and predicted",
    "needle": "how often a model finds a fact again, by length of the context and depth in it",
    "heatmap": "attention maps of models, and how far back each head looks",
    "sweep": "perplexity of a trained model when its rotary embedding is changed: p-RoPE, or theta",
    "convert": "turn the checkpoint of a model into one with another position encoding",
    "plot": "draw pictures of the encodings themselves: over distance, position, head and scale",
    "bench": "time every operator against what one would use instead",
    "info": "what this installation has, and the commands that bring what it lacks",
}
# Subcommand -> what to do where the memory does not suffice.
_SMALLER = {
    "compare": "lower --batch, --train-length, --lengths, --layers, --heads or --head-dim",
    "perplexity": "lower --lengths",
    "bands": "lower --length",
    "needle": "lower --lengths",
    "heatmap": "lower --length",
    "sweep": "lower --lengths",
    "convert": "free memory, or convert on a machine with more",
    "plot": "lower --length or --dim",
    "bench": "take --quick, or free memory",
    "info": "free memory",
}
_INTERRUPTED = 130


class _Help(argparse.HelpFormatter):
    """In a narrow terminal words stay whole, and specs are cut behind their marks."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        return [part for line in lines for part in fold(line, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Each line on its own; of several, what does not fit is indented below it."""
        lines = text.splitlines()
        below = indent + "    " * (len(lines) > 1)
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=below)
            for line in lines
        )


class _Parser(argparse.ArgumentParser):
    """Wrong arguments end as one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, by default those of the process.

    Returns
    -------
    int
        0; 1 where something failed; 2 for a wrong argument, file or folder; 130 after Ctrl-C.
    """
    _make_streams_safe()
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in _COMMANDS else None
    name = f"wavepe {command}" if command else "wavepe"
    with interrupt_on_signals():
        return _ended(name, *_run(name, command, argv))


def _ended(name: str, code: int, message: str) -> int:
    """The exit code, after what is to be said is said."""
    try:
        sys.stdout.flush()  # a reader that has gone or a full disk shows here, not at exit
    except OSError as error:
        _discard(sys.stdout)
        code = code or 1
        unsaid = message in ("", f"error: {error.strerror}")
        if unsaid and not isinstance(error, BrokenPipeError):
            message = f"error: cannot write to stdout: {error.strerror}"
    if message:
        lines = [line.rstrip() for line in message.splitlines() if line.strip()]
        try:
            print(f"{name}: " + "\n".join(lines), file=sys.stderr, flush=True)
        except OSError:  # the same full disk
            _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Give what `stream` still holds to /dev/null: at exit Python would fail by it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _make_streams_safe() -> None:
    """No character and no closed stream ends a command: ASCII escapes, and /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, so that its number would go to the next file
            stream = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(name: str, command: str | None, argv: Sequence[str]) -> tuple[int, str]:
    """Run the command; its exit code, and what to say on stderr."""
    try:
        args, unknown = _parser(command).parse_known_args(argv)
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)} ({name} --help)")
        if command is None:
            raise UsageError("needs a command: " + ", ".join(_COMMANDS) + " (wavepe --help)")
        return importlib.import_module(f".{command}", __name__).run(args), ""
    except SystemExit as stop:  # --help, --version
        return int(stop.code or 0), ""
    except CommandError as error:
        return error.code, f"error: {error}"
    except KeyboardInterrupt:
        resumes = f"; to resume: {shlex.join(['wavepe', *argv])}" if command == "compare" else ""
        return _INTERRUPTED, f"interrupted{resumes}"
    except BrokenPipeError:  # whoever read our output has closed it
        return 1, ""
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return 1, f"error: {where}{error.strerror or error}"
    except ImportError as error:
        return 1, f"error: {error}"
    except (MemoryError, RuntimeError, ValueError) as error:
        memory = out_of_memory(error)
        if memory is None or command is None:
            raise
        return 1, f"error: {memory}; {_SMALLER[command]}"


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; of the commands only the one that is run is loaded."""
    parser = _Parser(
        prog="wavepe",
        description="Position encodings for transformers: wavelets, RoPE, ALiBi and relatives.",
    )
    parser.add_argument("--version", action="version", version=f"wavepe {wavepe.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, text in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(f".{name}", __name__).add_arguments(sub)
    return parser
