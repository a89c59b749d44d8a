"""docs/cite.md: the BibTeX entry of wavepe, from CITATION.cff."""

from __future__ import annotations

import re
from pathlib import Path

from .pages import addresses

PAGE = Path("docs", "cite.md")


def blocks(root: Path) -> dict[str, str]:
    """Return an entry of the type misc, which every style of BibTeX knows."""
    text = (root / "CITATION.cff").read_text("utf-8").partition("\nreferences:")[0]
    facts = dict(re.findall(r"^ *(?:- )?([\w-]+): (.+)$", text, re.M))
    fields = {
        "author": f"{{{facts['name']}}}",
        "title": f"{{{facts['title']}}}: {facts['abstract'].lower()}",
        "note": f"Version {facts['version']}, {facts['license']}",
    }
    if "date-released" in facts:
        fields["year"] = facts["date-released"][:4]
    if "Repository" in (urls := addresses(root)):
        fields["url"] = urls["Repository"]
    lines = ",\n".join(f"  {key:6} = {{{value}}}" for key, value in fields.items())
    return {"wavepe": f"```bibtex\n@misc{{{facts['title']},\n{lines}\n}}\n```"}
