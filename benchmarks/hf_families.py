"""Keep the results of the model families' tests, for docs/reference/families.md.

python -m pytest --all tests/test_hf_{families,situations,types,workflows}.py \
    -o junit_family=xunit1 --junitxml build/families.xml
python -m benchmarks.hf_families build/families.xml

With `--add`, families that this run did not test keep the results of an earlier run.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command import RESULTS, Missing, add_root, keep, new_parser

# test -> the name of its situation on the page
COLUMNS = {
    "values": "full pass",
    "gradients": "gradients",
    "left_padding": "left pad",
    "right_padding": "right pad",
    "packed": "packed",
    "packed_unseen": "packed, unseen",
    "dynamic_cache": "dynamic",
    "static_cache": "static",
    "static_cache_in_pieces": "static, in pieces",
    "chunked_prefill": "chunked",
    "chunked_prefill_left_padding": "chunked, left pad",
    "beams": "beams",
    "assisted": "assisted",
    "checkpointing": "checkpointing",
    "compile": "compile",
    "export": "export",
    "a_patched_model_comes_back_from_a_folder": "saves, loads",
    "trainer_resumes": "Trainer",
}
TEST = re.compile(r"test_(\w+)\[(?:.*-)?(\w+)\]")


def read(file: Path) -> dict[str, Any]:
    """Return the results of a run of pytest, by family and situation.

    A test with several cases of a family counts as failed if one of them failed. Tests that are not
    in the table are ignored.

    Raises
    ------
    Missing
        The file does not exist, or it has no test of the table, or no versions.
    """
    try:
        cases = list(ElementTree.parse(file).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise Missing(f"{file}: {error}") from None
    cells: dict[str, dict[str, str]] = {}
    versions: dict[str, str] = {}
    for case in cases:
        match = TEST.fullmatch(case.get("name", ""))
        if match is None or match[1] not in COLUMNS:
            continue
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        versions |= {key: properties[key] for key in ("transformers", "torch") if key in properties}
        row = cells.setdefault(match[2], {})
        if row.get(match[1]) not in ("fails", "not run"):
            row[match[1]] = _outcome(case, properties)
    if len(versions) != 2:
        raise Missing(f"{file} holds no results of tests/test_hf_situations.py with their versions")
    return {**versions, "families": dict(sorted(cells.items()))}


def _outcome(case: ElementTree.Element, properties: dict) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "fails"
    return "not run" if case.find("skipped") is not None else properties.get("cell", "right")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if the file holds no results."""
    parser = new_parser(__doc__)
    parser.add_argument("file", type=Path, help="the file of --junitxml")
    parser.add_argument("--add", action="store_true", help="keep other families' results")
    add_root(parser)
    args = parser.parse_args(argv)
    try:
        results = read(args.file)
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    path = args.root / RESULTS / f"hf-families-{results['transformers']}.json"
    if args.add:
        kept = json.loads(path.read_text("utf-8"))["families"]
        results["families"] = dict(sorted((kept | results["families"]).items()))
    keep(results, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
