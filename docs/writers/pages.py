"""Shared by the writers: kept results, markers, and words about a machine."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, Missing


def kept(root: Path, path: Path, command: str = "") -> dict[str, Any]:
    """Return the figures of a file; `command`, of benchmarks, makes it."""
    if not (root / path).is_file():
        advice = f": python -m benchmarks.{command} --json {path}" if command else ""
        raise Missing(f"{path} is missing{advice}")
    return json.loads((root / path).read_text("utf-8"))


def kept_results(root: Path, name: str, command: str = "") -> list[dict[str, Any]]:
    """Return the results <name>-*.json, by name of the file; Missing without a file."""
    paths = sorted((root / RESULTS).glob(f"{name}-*.json"))
    if not paths:
        advice = f": run python -m benchmarks.{command}" if command else ""
        raise Missing(f"no {name}-*.json in {RESULTS}{advice}")
    return [json.loads(path.read_text("utf-8")) for path in paths]


def kept_runs(root: Path, name: str, command: str) -> list[dict[str, Any]]:
    """Return the results <name>-<version>.json, one for each transformers, the newest first."""
    runs = kept_results(root, name, command)
    return sorted(runs, key=lambda run: _version(run["transformers"]), reverse=True)


def _version(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]


def replaced(text: str, name: str, section: str, page: str | Path) -> str:
    """Return `text` with a new section between the two markers of `name`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if len(pattern.findall(text)) != 1:
        raise Missing(f"{page} needs {begin} ... {end} once")
    return pattern.sub(lambda _: f"{begin}\n{section.strip()}\n{end}", text)


def addresses(root: Path) -> dict[str, str]:
    """Return [project.urls] of pyproject.toml."""
    text = (root / "pyproject.toml").read_text("utf-8")
    return dict(re.findall(r'^(Repository|Documentation) = "(.+?)"', text, re.M))


def wrapped(text: str, indent: str = "", width: int = 100) -> str:
    """Return the text in lines of at most `width` characters; names and links stay whole."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def in_threads(count: int) -> str:
    """Return a number of threads in words."""
    return "one thread" if count == 1 else f"{count} threads"


def commit_of(about: dict[str, Any]) -> str:
    return "commit " + (about["commit"] or "unknown")[:12] + " with changes" * bool(about["dirty"])
