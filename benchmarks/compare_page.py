"""Write the tables of docs/results/index.md from kept comparisons.

README's table of wins and losses is made here too. benchmarks/results/compare/NAME.json is the
results.json of a preset, without its large parts.

python -m benchmarks.compare_page --keep FOLDER NAME    keep the results.json of a folder as NAME
python -m benchmarks.compare_page --add FOLDER NAME     add its rows to NAME, or take their place
python -m benchmarks.compare_page --write | --check     --write draws the pictures too
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wavepe.analysis.plots import perplexity_by_length
from wavepe.cli.compare.presets import PRESETS
from wavepe.cli.compare.protocols import Protocol
from wavepe.cli.compare.report import (
    headings,
    mean_and_spread,
    rows_of,
    sections,
    title,
)
from wavepe.cli.compare.rows import Row
from wavepe.cli.compare.settings import Settings
from wavepe.cli.tables import Row as TableRow
from wavepe.cli.tables import markdown_rows

from .command import add_page, new_parser, write_page
from .readme import Missing, replaced, wrapped

PAGE = Path("docs", "results", "index.md")
KEPT = Path("benchmarks", "results", "compare")
PICTURES = Path("docs", "results")
FAIRSEQ, SWAP = PICTURES / "fairseq-demo.json", PICTURES / "hf-swap.json"
ABOUT = ("wavepe", "variant", "python", "torch", "machine", "date", "threads", "data", "settings")
# README's picture has no room for all rows. It shows the encodings in use, and the best ones.
HEADLINE = (
    "none",
    "rope",
    "rope/rope:type=yarn,factor=scaled",
    "rope:theta=128,inference_theta=scaled",
    "alibi",
    "kerple",
    "transformer_xl",
    "wavelet:scales=6",
)
# README's table has the rivals that were trained with their encoding and are close.
RIVALS = (*HEADLINE[1:-1], "shaw", "sandwich")
ONE_SEED = 0.02  # twice the usual difference between seeds
# The picture of combinations has these.
LEARNED = "wavelet:scales=6,biases=true,projection=true"
COMBINED = (
    "rope",
    "rope+alibi",
    "transformer_xl",
    "rope+wavelet:scales=6",
    "rope@::2+wavelet:scales=6@1::2",
    "wavelet:scales=6",
    LEARNED,
    f"rope:fraction=0.25+{LEARNED}",
)
W, MIRRORED = "wavelet:scales=6", "wavelet:scales=6,mirrored=true"
HAAR, FIXED = "wavelet:kind=haar,scales=6", "wavelet:kind=haar,scales=6,fixed_scale=true"
BANK, FIXED_BANK = "relative:extent=128,rank=24", "wavelet:rank=24,from_input=true"
FIXED_BASES = tuple(f"rope:theta=10000,inference_theta={10000 * n}" for n in (2, 4, 8, 16, 64))
L_SCALED, SCALED = "rope:theta=128,inference_theta=scaled", "rope:inference_theta=scaled"


@dataclass(frozen=True)
class Claim:
    """A published or expected result: `better` has a lower perplexity than `worse`.

    If `worse` has several rows, `better` is compared to the best of them at each length.
    """

    text: str
    preset: str
    better: str
    worse: str | tuple[str, ...]


CLAIMS = (
    Claim("Wavelets are ahead of RoPE [W]", "wavelet", W, "rope"),
    Claim("Wavelets are ahead of ALiBi [W]", "wavelet", W, "alibi"),
    Claim("Wavelets are ahead of Transformer-XL with its query biases", "wavelet", W,
          "transformer_xl"),
    Claim("Wavelets are ahead of sine waves in their place [W]", "wavelet", W,
          "transformer_xl:biases=false"),
    Claim("Wavelets are ahead of YaRN without training", "wavelet", W,
          "rope/rope:type=yarn,factor=scaled"),
    Claim("Wavelets are ahead of KERPLE", "wavelet", W, "kerple"),
    Claim("Literal wavelets are ahead of mirrored ones", "wavelet", W, MIRRORED),
    Claim("Haar of many scales is ahead of Haar of one [W]", "kinds", HAAR, FIXED),
    Claim("Ricker is ahead of Haar [W]", "kinds", W, HAAR),
    Claim("Ricker is ahead of Morlet [W]", "kinds", W, "wavelet:kind=morlet,scales=6"),
    Claim("Gaussian is ahead of Ricker at five times the trained length [W]", "kinds",
          "wavelet:kind=gaussian,scales=6", W),
    Claim("Base 128 times the factor of the length is ahead of 10000 times the same factor [F]",
          "theta", L_SCALED, SCALED),
    Claim("Base 128 times the factor of the length is ahead of 10000 times the best of five fixed "
          "factors at each length (control)", "theta", L_SCALED, FIXED_BASES),
    Claim("Base 128 alone is ahead of 10000 alone", "theta", "rope:theta=128", "rope"),
    Claim("Wavelets with biases and projection are ahead of plain ones", "combinations", LEARNED,
          W),
    Claim("Wavelets with biases and projection are ahead of Transformer-XL", "combinations",
          LEARNED, "transformer_xl"),
    Claim("A quarter of RoPE's pairs improves wavelets", "combinations",
          "rope:fraction=0.25+wavelet:scales=6", W),
    Claim("A quarter of RoPE's pairs improves wavelets with biases and projection",
          "combinations", f"rope:fraction=0.25+{LEARNED}", LEARNED),
    Claim("Wavelets with all three are ahead of Transformer-XL", "combinations",
          f"rope:fraction=0.25+{LEARNED}", "transformer_xl"),
    Claim("All of RoPE beside wavelets is ahead of wavelets alone", "combinations",
          "rope+wavelet:scales=6", W),
    Claim("RoPE and wavelets by turns of layers are ahead of wavelets alone", "combinations",
          "rope@::2+wavelet:scales=6@1::2", W),
    Claim("RoPE with ALiBi is ahead of ALiBi", "combinations", "rope+alibi", "alibi"),
    Claim("A learned bank is ahead of Transformer-XL", "recent", BANK, "transformer_xl"),
    Claim("A fixed bank that the input reads is ahead of the learned one", "recent", FIXED_BANK,
          BANK),
    Claim("A fixed bank that the input reads is ahead of Transformer-XL", "recent", FIXED_BANK,
          "transformer_xl"),
)  # fmt: skip


# [W], table 3: perplexity of Ricker's sets of scales, in the preset's order, trained on 512 tokens.
# The keys are our lengths in bytes; the paper's are 512 tokens, then 2512.
PUBLISHED = {
    "512": (19.19, 19.25, 19.40, 19.55, 19.95, 19.24, 19.26, 19.30, 19.46, 19.80),
    "2048": (17.99, 18.02, 18.07, 21.73, 70.80, 17.84, 17.84, 18.02, 18.29, 21.31),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Keep results, or write the page; return the exit code."""
    parser = new_parser(__doc__)
    for option, what in (
        ("--keep", "keep the results of FOLDER as NAME"),
        ("--add", "add the rows of FOLDER to the kept NAME; rows that it has are replaced"),
    ):
        parser.add_argument(option, nargs=2, metavar=("FOLDER", "NAME"), help=what)
    add_page(parser, PAGE)
    args = parser.parse_args(argv)
    if args.keep or args.add:
        folder, name = args.keep or args.add
        keep_results(Path(folder), args.root / KEPT, name, add=bool(args.add))
    if not (args.write or args.check):
        return 0
    try:
        if args.write:
            draw(args.root)
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return write_page(PAGE, updated, args.root, args.check)


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
    """Return `old` with the rows of `new`, in the order of the preset `name`.

    The entry "added" says of each later comparison which rows came from it, and how.
    """
    about, settings = new["environment"], dict(new["environment"]["settings"])
    rows = settings.pop("encodings")
    there = old["environment"]["settings"] | old["environment"]["data"]
    other = [key for key, value in (settings | about["data"]).items() if value != there[key]]
    if other:
        raise SystemExit(f"the kept {name} was made with other values of {', '.join(other)}")
    wanted = PRESETS[name].options["encodings"]
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


# ------------------------------------------------------------------ the page


def kept(root: Path, name: str) -> dict[str, Any]:
    """Return the kept results of `name`."""
    path = root / KEPT / f"{name}.json"
    if not path.exists():
        raise Missing(f"{path.relative_to(root)} is missing")
    return json.loads(path.read_text("utf-8"))


def updated(text: str, root: Path) -> str:
    """Return the page with the tables of the kept results."""
    for name, section in SECTIONS.items():
        if f"<!-- {name}:begin" not in text:
            continue
        text = replaced(text, name, section(root), PAGE)
    return text


def standings(root: Path) -> str:
    """Return README's table: wavelets against each rival, at each multiple of the length."""
    results = kept(root, "wavelet")
    lengths, trained = results["environment"]["settings"]["lengths"], results["train_length"]
    compared = {run["encoding"] for run in results["runs"]}
    rows = [(f"`{name}`", results["runs"], W, name) for name in RIVALS if name in compared]
    fairseq = _runs_of(root / FAIRSEQ)
    for protocol, text in (("blocks", "blocks"), ("sliding", "sliding window")):
        runs = [run for run in fairseq if run["protocol"] == protocol]
        rows.append((f"`alibi`, in fairseq, {text}, one seed", runs, "wavelet", "alibi"))
    swapped, stayed = f"rope -> {W}, trained on", "rope, trained on"
    text = "`rope` trained on, after a swap and the same steps, one seed"
    rows.append((text, _runs_of(root / SWAP), swapped, stayed))
    cells = [
        (name, [_standing(_ratios(runs, ours, (rival,), str(length))) for length in lengths])
        for name, runs, ours, rival in rows
    ]
    table = _plain_rows("wavelets against", headings(lengths, trained), cells)
    others = (
        "The rows of one seed are measured elsewhere: [in fairseq](docs/results/fairseq.md), and "
        "[after a swap](docs/results/swap.md). The other rows:"
    )
    return f"{table}\n{wrapped(others)}\n{made_with(results)}"


def _runs_of(path: Path) -> list[dict[str, Any]]:
    """Return the runs of an example's results.json."""
    if not path.exists():
        raise Missing(f"{path.name} is missing")
    return json.loads(path.read_text("utf-8"))["runs"]


def _standing(ratios: Sequence[float], lower: str = "ahead", higher: str = "behind") -> str:
    """Return `lower` or `higher` if all seeds agree, else "unclear", and the mean ratio."""
    if not ratios:
        return ""
    margin = 0 if len(ratios) > 1 else ONE_SEED
    ahead, behind = max(ratios) < 1 - margin, min(ratios) > 1 + margin
    says = lower if ahead else higher if behind else "unclear"
    return f"{says}, {statistics.fmean(ratios):.2f}"


def protocols(root: Path) -> str:
    """Return the table of the longest length, with a column for each protocol."""
    results = kept(root, "wavelet")
    length = results["environment"]["settings"]["lengths"][-1]
    names = list(results["runs"][0]["protocols"])
    columns = [dict(rows_of(results["runs"], [length], "protocols", name)) for name in names]
    rows = [(name, [column[name][0] for column in columns]) for name in columns[0]]
    heads = [Protocol.parse(name, results["train_length"]).text for name in names]
    return markdown_rows("encoding", heads, rows)


def tables_of(*names: str) -> Callable[[Path], str]:
    """Return a section with all tables of these comparisons, and how they were made."""

    def section(root: Path) -> str:
        parts = []
        for name in names:
            results = kept(root, name)
            settings = Settings.from_dict(results["environment"]["settings"])
            settings = replace(settings, protocols=settings.protocols[:1])
            for one in sections(results["runs"], settings):
                rows = markdown_rows("encoding", one.headings, one.rows)
                parts.append(f"{one.title}, mean ± standard deviation:\n\n{rows}")
            parts.append(f"{made_with(results)}\n")
        return "\n".join(parts)

    return section


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
        f"{data['evaluated_bytes']} bytes of the {settings['split']} text were evaluated. "
        f"{_where(about)}"
    )
    for one in (one for part in parts for one in part.get("added", ())):
        names = ", ".join(f"`{row}`" for row in one["rows"])
        text += (
            f" Newer rows: {names}. Their {one['trainings']} trainings took "
            f"{one['seconds'] / 60:.0f} minutes. {_where(one)}"
        )
    return wrapped(text)


def _where(about: Mapping[str, Any]) -> str:
    return f"{about['machine']}, {about['variant']}, torch {about['torch']}, {about['date']}."


def claims(root: Path) -> str:
    """Return the table of claims, with the verdict and the ratio at each length."""
    lengths = kept(root, "wavelet")["environment"]["settings"]["lengths"]
    rows = []
    for claim in CLAIMS:
        if not (root / KEPT / f"{claim.preset}.json").exists():
            rows.append((claim.text, ["not run yet"] * len(lengths)))
            continue
        runs = kept(root, claim.preset)["runs"]
        rows.append((claim.text, [_verdict(runs, claim, str(length)) for length in lengths]))
    return _plain_rows("claim", headings(lengths, kept(root, "wavelet")["train_length"]), rows)


def _verdict(runs: Sequence[Mapping[str, Any]], claim: Claim, length: str) -> str:
    """Return "yes" or "no" if all seeds agree, else "unclear", and the mean ratio."""
    rivals = (claim.worse,) if isinstance(claim.worse, str) else claim.worse
    return _standing(_ratios(runs, claim.better, rivals, length), "yes", "no")


def _ratios(
    runs: Sequence[Mapping[str, Any]], one: str, rivals: Sequence[str], length: str
) -> list[float]:
    """Return the perplexity of `one` over that of the rival that is best on average, by seed.

    The list is empty if the length was not evaluated.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in (one, *rivals)}
    for run in runs:
        if run["encoding"] in found and length in run["perplexity"]:
            found[run["encoding"]][run.get("seed", 0)] = run["perplexity"][length]
    if not found[one]:
        return []
    best = min((found[name] for name in rivals), key=lambda own: statistics.fmean(own.values()))
    return [found[one][seed] / best[seed] for seed in found[one]]


def _plain_rows(heading: str, heads: Sequence[str], rows: Sequence[TableRow]) -> str:
    """Return a Markdown table. `markdown_rows` is not used, because its labels are code."""
    lines = [f"| {' | '.join((heading, *heads))} |", "|---|" + "---|" * len(heads)]
    lines += [f"| {' | '.join((name, *cells))} |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def scale_sets(root: Path) -> str:
    """Return the table of literal and mirrored wavelets, with a row for each set of scales."""
    results = kept(root, "scales")
    settings = results["environment"]["settings"]
    lengths = settings["lengths"]
    cells = dict(rows_of(results["runs"], lengths))
    names, rows = settings["encodings"], []
    for name, other in zip(names[::2], names[1::2], strict=True):
        both = zip(cells[name], cells[other], strict=True)
        rows.append((name, [f"{one.strip('*')} / {two.strip('*')}" for one, two in both]))
    table = markdown_rows("scales", headings(lengths, results["train_length"]), rows)
    return f"Perplexity, literal / mirrored:\n\n{table}\n{made_with(results)}"


def bands(root: Path) -> str:
    """Return the table of predicted and measured bands, by trained length and base."""
    rows, parts = [], []
    for path in sorted((root / KEPT).glob("bands-length-*.json"), key=_number_in):
        results = json.loads(path.read_text("utf-8"))
        parts.append(results)
        settings = Settings.from_dict(results["environment"]["settings"])
        *_, table = sections(results["runs"], settings)
        rows += [(f"{results['train_length']}, {name}", cells) for name, cells in table.rows]
    if not rows:
        raise Missing(f"{KEPT}/bands-length-*.json are missing")
    text = markdown_rows("trained length, base", table.headings, rows)
    predicted, measured = (
        [float(cells[column].split()[0]) for _, cells in rows] for column in (0, -1)
    )
    ratios = [one / other for one, other in zip(measured, predicted, strict=True)]
    found = (
        f"At the end the measured band is {min(ratios):.2f} to {max(ratios):.2f} times j*, and "
        f"{statistics.fmean(ratios):.2f} times on average. The rank correlation of measured and "
        f"predicted bands over the rows is {_rank_correlation(measured, predicted):.2f}."
    )
    return f"{text}\n{wrapped(found)}\n\n{made_with(*parts)}"


def _number_in(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def sweep(root: Path) -> str:
    """Return the table of p-RoPE at inference, with the main table's models."""
    results = kept(root, "models")
    heads = [f"p = {fraction:g}" for fraction in results["fractions"]]
    rows = []
    for name, seeds in results["sweeps"].items():
        for length in seeds[0]:
            columns = zip(*(one[length] for one in seeds), strict=True)
            rows.append((f"{name}, {length} bytes", [mean_and_spread(c) for c in columns]))
    return markdown_rows("model", heads, rows)


def windows(root: Path) -> str:
    """Return the table of the windows of three models' heads, at twice the trained length."""
    results = kept(root, "models")
    rows = [
        (name, [", ".join(map(str, layer)) for layer in layers])
        for name, layers in results["windows"].items()
    ]
    layers = [f"layer {number}" for number in range(len(rows[0][1]))]
    return markdown_rows("model", layers, rows)


def scale_ranks(root: Path) -> str:
    """Return the table of Spearman's rank correlations of our perplexities and the paper's.

    A row is literal or mirrored wavelets; cells are mean, lowest and highest over the seeds.
    """
    results = kept(root, "scales")
    names = results["environment"]["settings"]["encodings"]
    seeds = range(results["environment"]["settings"]["seeds"])
    found = {(run["encoding"], run["seed"]): run["perplexity"] for run in results["runs"]}
    rows = []
    for sign, own in (("literal", names[::2]), ("mirrored", names[1::2])):
        cells = []
        for length, published in PUBLISHED.items():
            each = [
                _rank_correlation(published, [found[name, seed][length] for name in own])
                for seed in seeds
            ]
            cells.append(f"{statistics.fmean(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        rows.append((sign, cells))
    return markdown_rows("sign", ["512 (published at 512)", "2048 (published at 2512)"], rows)


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their rank."""
    ranks = [[sum(v < x for v in row) + sum(v == x for v in row) / 2 for x in row]
             for row in (one, other)]  # fmt: skip
    return statistics.correlation(*ranks)


def why(root: Path) -> str:
    """Return what encodings add to the scores, near and far."""
    from .score_parts import NAME, table  # needs torch and transformers

    return table(kept(root, NAME))


SECTIONS: dict[str, Callable[[Path], str]] = {
    "claims": claims,
    "wavelet": tables_of("wavelet"),
    "protocols": protocols,
    "combinations": tables_of("combinations"),
    "score-parts": why,
    "recent": tables_of("recent"),
    "theta": tables_of("theta"),
    "tasks": tables_of("tasks-needle", "tasks-keys", "tasks-tracking"),
    "kinds": tables_of("kinds"),
    "scales": scale_sets,
    "scale-ranks": scale_ranks,
    "families": tables_of("families"),
    "bands": bands,
    "sweep": sweep,
    "windows": windows,
    "finetune": tables_of("finetune"),
}


def draw(root: Path) -> None:
    """Draw the pictures of README and the page."""
    (root / PICTURES).mkdir(exist_ok=True)
    for name, rows in (("wavelet", HEADLINE), ("combinations", COMBINED)):
        results = kept(root, name)
        perplexity_by_length(
            [run for row in rows for run in results["runs"] if run["encoding"] == row],
            root / PICTURES / f"{name}.png",
            train_length=results["train_length"],
            title=title(results["train_length"]),
        )
    for path in sorted((root / KEPT).glob("tasks-*.json")):
        task = json.loads(path.read_text("utf-8"))
        settings = Settings.from_dict(task["environment"]["settings"])
        first, *_ = sections(task["runs"], settings)
        assert first.draw is not None
        first.draw(root / PICTURES / f"{path.stem}.png")


if __name__ == "__main__":
    sys.exit(main())
