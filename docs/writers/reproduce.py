"""docs/results/reproduce.md: the published claims that were tested, in the order of the papers."""

from __future__ import annotations

from pathlib import Path

from .claims import claims

PAGE = Path("docs", "results", "reproduce.md")


def blocks(root: Path) -> dict[str, str]:
    return {"of-wavelets": claims(root, "[W]"), "of-bands": claims(root, "[F]", "control")}
