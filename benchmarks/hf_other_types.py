"""Why `wavepe.hf.patch` does not take other types of models, for docs/reference/families.md.

python -m benchmarks.hf_other_types --json benchmarks/results/hf-other-types-VERSION.json
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command import measuring_command
from .command import table as markdown

ALIKE = "attention and rotation have the code of a supported family; not tested"
ROTATES_ALIKE = "the rotation has the code of a supported family, not the attention; not tested"
OTHER = "rotates by other code than every supported family; not tested"


def measure() -> dict[str, Any]:
    """Return the types of the installed transformers that are not supported, by reason.

    The modelling files are read, and not imported: that would take minutes.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from wavepe.hf.families import SUPPORTED
    from wavepe.hf.why_not import UNTESTED, why_not

    sources: dict[str, str] = {}  # class -> its modelling file
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text("utf-8")
        sources |= dict.fromkeys(re.findall(r"^class (\w+)\(", text, re.M), text)
    stock = {kind: name for kind, name in CAUSAL.items() if not kind.startswith("wavepe_")}
    known = [(sources[name], name) for kind, name in stock.items() if kind in SUPPORTED]
    rotations, whole = ({parts(*one)[i] for one in known} for i in (0, 1))
    types: dict[str, list[str]] = {}
    for kind in sorted(stock.keys() - SUPPORTED):
        source, name = sources[stock[kind]], stock[kind]
        reason = why_not(source, name)
        if reason == UNTESTED:
            rotation, both = parts(source, name)
            reason = ALIKE if both in whole else ROTATES_ALIKE if rotation in rotations else OTHER
        types.setdefault(reason, []).append(kind)
    return {"transformers": transformers.__version__, "causal": len(stock), "types": types}


def parts(source: str, model: str) -> tuple[str, str]:
    """Return the code that rotates, and with it that of attention, without the family's name."""
    from wavepe.hf.why_not import reached

    family = re.sub(r"(Text)?For\w+$|LMHeadModel$", "", model)
    found = {}
    for part in ("Attention", "RotaryEmbedding"):
        found[part] = reached(source, family + part) or reached(source, f"{family}Text{part}")
    forwards = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(found["RotaryEmbedding"]))
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    ]
    rotation = "\n".join([*forwards[:1], reached(source, "apply_rotary_pos_emb")])
    both = rotation + found["Attention"] + found["RotaryEmbedding"]
    rotation, both = (re.sub(rf"\b{family}(Text)?", "", text) for text in (rotation, both))
    return rotation, both


def table(run: dict[str, Any]) -> str:
    """Return the table of reasons, the most frequent first."""
    types = run["types"]
    others = sum(map(len, types.values()))
    words = (
        f"**transformers {run['transformers']}** has {run['causal']} types of causal models. "
        f"{run['causal'] - others} are supported, and {others} are not:"
    )
    ordered = sorted(types.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [(reason, str(len(kinds)), ", ".join(kinds)) for reason, kinds in ordered]
    return f"{words}\n\n{markdown(('why not', 'number', 'types'), rows, 'l')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    return measuring_command(__doc__, measure, table, argv)


if __name__ == "__main__":
    sys.exit(main())
