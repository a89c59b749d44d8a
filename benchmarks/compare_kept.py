"""Keep a comparison in benchmarks/results/compare/NAME.json, for docs/results.

python -m benchmarks.compare_kept FOLDER NAME          keep the results.json of FOLDER as NAME
python -m benchmarks.compare_kept FOLDER NAME --add    add its rows to NAME, or take their place

Large parts of results.json are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wavepe.experiments.presets import PRESETS, Preset, rows_for
from wavepe.experiments.settings import Row

from .command import RESULTS, add_root, new_parser

KEPT = RESULTS / "compare"
ABOUT = ("wavepe", "variant", "python", "torch", "machine", "date", "threads", "data", "settings")


def keep_results(folder: Path, target: Path, name: str, add: bool = False) -> None:
    """Keep the results of a comparison, or of each comparison in a folder of several.

    With `add` they join what is kept: the same comparison with other rows, or with newer ones.
    """
    parts = {path.parent.name: path for path in sorted(folder.glob("*/results.json"))}
    for part, path in (parts or {"": folder / "results.json"}).items():
        results = json.loads(path.read_text("utf-8"))
        about = results["environment"]
        if not about["complete"]:
            raise SystemExit(f"{path} is not complete")
        trained = [model["seconds"] for model in about["models"].values()]
        kept = {
            "train_length": results["train_length"],
            "trainings": len(trained),
            "seconds": round(sum(trained)),
            "runs": [_rounded(run) for run in results["runs"]],
            "environment": {key: about[key] for key in ABOUT},
        }
        target.mkdir(exist_ok=True)
        file = target / f"{name}{f'-{part}' if part else ''}.json"
        if add:
            kept = _joined(json.loads(file.read_text("utf-8")), kept, name)
        file.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def _joined(old: dict[str, Any], new: dict[str, Any], name: str) -> dict[str, Any]:
    """Return `old` with the rows of `new`, in the order of the preset.

    The entry "added" lists each later comparison with the rows that came from it, and how.
    """
    about, settings = new["environment"], dict(new["environment"]["settings"])
    rows = settings.pop("encodings")
    there = old["environment"]["settings"] | old["environment"]["data"]
    other = [
        key for key, value in (settings | about["data"]).items() if value != there.get(key, value)
    ]
    if other:
        raise SystemExit(f"the kept {name} was made with other values of {', '.join(other)}")
    wanted = preset_of(name).options["encodings"]
    wanted = rows_for(wanted, new["train_length"])
    order = [Row.parse(spec).name for spec in wanted]
    stay = [run for run in old["runs"] if run["encoding"] not in rows]
    runs = sorted(
        (*stay, *new["runs"]), key=lambda run: (run["seed"], order.index(run["encoding"]))
    )
    facts = {key: about[key] for key in ABOUT if key not in ("settings", "data")}
    added = [one | {"rows": [row for row in one["rows"] if row not in rows]}
             for one in old.get("added", ())]  # fmt: skip
    added.append({key: new[key] for key in ("trainings", "seconds")} | facts | {"rows": rows})
    old["environment"]["settings"]["encodings"] = list(dict.fromkeys(r["encoding"] for r in runs))
    return old | {"runs": runs, "added": [one for one in added if one["rows"]]}


def preset_of(name: str) -> Preset:
    """Return the preset of kept results: of "larger", or of "larger-prose" on another text."""
    return PRESETS[name if name in PRESETS else name.rpartition("-")[0]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="what wavepe compare wrote")
    parser.add_argument("name", help="the name of the kept results")
    parser.add_argument("--add", action="store_true", help="add its rows to what is kept")
    add_root(parser)
    args = parser.parse_args(argv)
    keep_results(args.folder, args.root / KEPT, args.name, args.add)
    return 0


if __name__ == "__main__":
    sys.exit(main())
