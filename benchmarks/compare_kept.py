"""The kept comparisons: benchmarks/results/compare/NAME.json, each the results.json of a preset.

Large parts are left out. `keep_results` writes the files, and `kept` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavepe.experiments.presets import PRESETS, Preset
from wavepe.experiments.rows import Row

from .readme import Missing, wrapped

KEPT = Path("benchmarks", "results", "compare")
STANDARD = "the Python standard library's sources"
ABOUT = ("wavepe", "variant", "python", "torch", "machine", "date", "threads", "data", "settings")


def keep_results(folder: Path, target: Path, name: str, add: bool = False) -> None:
    """Keep the results of a comparison, one file for each of its parts.

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

    The entry "added" says of each later comparison which rows came from it, and how.
    """
    about, settings = new["environment"], dict(new["environment"]["settings"])
    rows = settings.pop("encodings")
    there = old["environment"]["settings"] | old["environment"]["data"]
    other = [key for key, value in (settings | about["data"]).items() if value != there[key]]
    if other:
        raise SystemExit(f"the kept {name} was made with other values of {', '.join(other)}")
    wanted = preset_of(name).options["encodings"]
    wanted = wanted(new["train_length"]) if callable(wanted) else wanted
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


def kept(root: Path, name: str) -> dict[str, Any]:
    """Return the kept results of `name`."""
    path = root / KEPT / f"{name}.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(root)} is missing")
    return json.loads(path.read_text("utf-8"))


def made_with(*parts: Mapping[str, Any]) -> str:
    """Return how a comparison of one or more parts was made, in sentences."""
    about = parts[0]["environment"]
    settings, data = about["settings"], about["data"]
    trainings = sum(part["trainings"] for part in parts)
    minutes = sum(part["seconds"] for part in parts) / 60
    each = [part["environment"]["settings"] for part in parts]
    batches = " or ".join(
        f"{one['batch']} sequences of {one['train_length']} bytes" for one in each
    )
    steps = f"{settings['steps']} steps"
    if settings.get("finetune"):
        steps += f", or of {settings['finetune_steps']} that continue one,"
    text = (
        f"{settings['seeds']} seeds. {trainings} trainings of {steps} took "
        f"{minutes:.0f} minutes of one thread. A model has {settings['layers']} layers with "
        f"{settings['heads']} head{'s' * (settings['heads'] > 1)} of {settings['head_dim']}. "
        f"A step takes {batches}. "
        f"{data['evaluated_bytes']} bytes of the {settings['split']} text were evaluated"
        f"{'' if STANDARD in data['text'] else ': ' + data['text']}. {_where(about)}"
    )
    newer: dict[str, list[Mapping[str, Any]]] = {}  # by machine and date
    for one in (one for part in parts for one in part.get("added", ())):
        newer.setdefault(_where(one), []).append(one)
    for where, ones in newer.items():
        names = ", ".join(f"`{row}`" for one in ones for row in one["rows"])
        minutes = sum(one["seconds"] for one in ones) / 60
        text += (
            f" Newer rows: {names}. Their {sum(one['trainings'] for one in ones)} trainings took "
            f"{minutes:.0f} minutes. {where}"
        )
    return wrapped(text)


def _where(about: Mapping[str, Any]) -> str:
    return f"{about['machine']}, {about['variant']}, torch {about['torch']}, {about['date']}."
