"""The command line ``wavepe``, also ``python -m wavepe``."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import wavepe

from .._files import unwinding
from .errors import CommandError, UsageError

# Subcommand -> what it does; each is a module here with add_arguments(parser) and run(args).
_COMMANDS = {
    "compare": "train one small Llama per position encoding on a text, evaluate beyond its length",
    "convert": "turn the checkpoint of a Llama into one with another position encoding",
    "bench": "time every operator against what one would use instead",
    "info": "what this installation has, and the commands that bring what it lacks",
}
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Wrong arguments end as one line."""

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
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in _COMMANDS else None
    name = f"wavepe {command}" if command else "wavepe"
    with unwinding():
        return _main(argv, command, name)


def _main(argv: list[str], command: str | None, name: str) -> int:
    try:
        args = _parser(command).parse_args(argv)
        if command is None:
            raise UsageError("needs a command: " + ", ".join(_COMMANDS) + " (wavepe --help)")
        code = importlib.import_module(f".{command}", __name__).run(args)
        sys.stdout.flush()  # a reader that has gone shows here, not at exit
        return code
    except SystemExit as stop:  # --help, --version
        return int(stop.code or 0)
    except CommandError as error:
        return _fail(name, f"error: {error}", error.code)
    except KeyboardInterrupt:
        return _fail(name, f"interrupted; to resume: {shlex.join(['wavepe', *argv])}", _INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ImportError) as error:
        return _fail(name, f"error: {error}", 1)


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


def _fail(name: str, message: str, code: int) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return code
