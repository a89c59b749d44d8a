"""README: how to get the sources, which encoding to take, and the first figures of speed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import table

from .choose import cases
from .headlines import bench_headline
from .pages import addresses

PAGE = Path("README.md")


def blocks(root: Path) -> dict[str, str]:
    return {"address": how_to_get(root), "choice": choice(root), "bench": bench_headline(root)}


def how_to_get(root: Path) -> str:
    """Return the command that clones the sources, where they have an address."""
    urls = addresses(root)
    if "Repository" not in urls:
        return "In a checkout of the sources:"
    documentation = urls.get("Documentation")
    lines = [f"[Documentation]({documentation})", ""] if documentation else []
    return "\n".join([*lines, "```", f"git clone {urls['Repository']} wavepe", "cd wavepe", "```"])


def choice(root: Path) -> str:
    """Return the table of docs/guides/choose.md, without the evidence and where it loses."""
    text = table(("you have", "take", "price"), [case[:3] for case in cases(root)], "l")
    return text.replace("](adapt.md)", "](docs/guides/adapt.md)")
