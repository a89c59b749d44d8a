"""What ends a command early, and how: one line on stderr and an exit code."""

from __future__ import annotations

import importlib.util

from .._runtime import command_for


class CommandError(Exception):
    """Ends the command with its message as one line on stderr."""

    code = 1


class UsageError(CommandError):
    """The command was asked for something it cannot do."""

    code = 2


def require(command: str, **parts: str) -> None:
    """Raise CommandError unless every part (module=extra) is installed."""
    missing = {name: extra for name, extra in parts.items() if not _found(name)}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise CommandError(f"{command} needs {' and '.join(missing)}: {command_for(extras)}")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, as tests put into sys.modules
        return False
