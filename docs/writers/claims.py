"""Which claims hold, from kept comparisons: the first part of docs/results/index.md."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from wavepe.analysis.plots.drawing import COLOURS, GRID, MARKERS, new_figure
from wavepe.experiments import Results
from wavepe.experiments.presets import FACTORS_TO_16

from benchmarks.command import PICTURES, table
from benchmarks.compare_kept import KEPT

from .runs import comparison

W, MIRRORED = "wavelet:scales=6", "wavelet:scales=6,mirrored=true"
HAAR, FIXED = "wavelet:kind=haar,scales=6", "wavelet:kind=haar,scales=6,fixed_scale=true"
BANK, FIXED_BANK = "relative:extent=128,rank=24", "wavelet:rank=24,from_input=true"
FIXED_BASES = tuple(f"rope:theta=10000,inference_theta={10000 * n}" for n in (2, 4, 8, 16, 64))
L_SCALED, SCALED = "rope:theta=128,inference_theta=scaled", "rope:inference_theta=scaled"
LEARNED = "wavelet:scales=6,biases=true,projection=true"
# The slopes are chosen on the validation text.
BEST = f"{LEARNED}+kerple"
ROUNDING = 0.002  # a smaller difference of two perplexities may be that of two machines
DRAWN = (1, 4, 16)  # multiples of the trained length in the picture
LARGE_W = "wavelet"  # of eight scales
LARGE_LEARNED = "wavelet:biases=true,projection=true"
LARGE_BEST = f"{LARGE_LEARNED}+kerple"


@dataclass(frozen=True)
class Claim:
    """A published or expected result: `better` has a lower perplexity than `worse`.

    If `worse` has several rows, `better` is compared to the best of them at each length.
    """

    text: str
    preset: str
    better: str
    worse: str | tuple[str, ...]


# question -> its claims
QUESTIONS = {
    "Do the best wavelets beat other encodings?": (
        Claim("Wavelets with biases, projection and KERPLE beat KERPLE", "wavelet", BEST,
              "kerple"),
        Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL",
              "combinations", BEST, "transformer_xl"),
        Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL", "wavelet", BEST,
              "transformer_xl"),
        Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL with KERPLE",
              "combinations", BEST, "transformer_xl+kerple"),
        Claim("Wavelets with KERPLE beat Transformer-XL", "combinations", f"{W}+kerple",
              "transformer_xl"),
    ),
    "Do wavelets alone beat other encodings?": (
        Claim("Wavelets beat RoPE [W]", "wavelet", W, "rope"),
        Claim("Wavelets beat ALiBi [W]", "wavelet", W, "alibi"),
        Claim("Wavelets beat sine waves in their place [W]", "wavelet", W,
              "transformer_xl:biases=false"),
        Claim("Wavelets beat YaRN without training", "wavelet", W,
              "rope/rope:type=yarn,factor=scaled"),
        Claim("Wavelets beat KERPLE", "wavelet", W, "kerple"),
        Claim("Wavelets beat Transformer-XL with its query biases", "wavelet", W,
              "transformer_xl"),
    ),
    "Do larger models, on prose, agree?": (
        Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat KERPLE",
              "larger-prose", LARGE_BEST, "kerple"),
        Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat "
              "Transformer-XL", "larger-prose", LARGE_BEST, "transformer_xl"),
        Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat "
              "Transformer-XL with KERPLE", "larger-prose", LARGE_BEST, "transformer_xl+kerple"),
        Claim("4 M parameters, prose: KERPLE improves wavelets with biases and projection",
              "larger-prose", LARGE_BEST, LARGE_LEARNED),
        Claim("4 M parameters, prose: wavelets with biases and projection beat Transformer-XL",
              "larger-prose", LARGE_LEARNED, "transformer_xl"),
        Claim("4 M parameters, prose: wavelets alone beat KERPLE", "larger-prose", LARGE_W,
              "kerple"),
        Claim("4 M parameters, prose: wavelets alone beat RoPE", "larger-prose", LARGE_W,
              "rope"),
        Claim("11 M parameters, prose: wavelets with biases, projection and KERPLE beat KERPLE",
              "larger-11m", LARGE_BEST, "kerple"),
        Claim("11 M parameters, prose: wavelets with biases, projection and KERPLE beat "
              "Transformer-XL with KERPLE", "larger-11m", LARGE_BEST, "transformer_xl+kerple"),
    ),
    "What improves wavelets, or RoPE?": (
        Claim("KERPLE's slopes improve wavelets", "combinations", f"{W}+kerple", W),
        Claim("KERPLE's slopes improve wavelets with biases and projection", "combinations", BEST,
              LEARNED),
        Claim("Wavelets with biases and projection beat plain ones", "combinations", LEARNED,
              W),
        Claim("Wavelets with biases and projection beat Transformer-XL", "combinations",
              LEARNED, "transformer_xl"),
        Claim("A quarter of RoPE's pairs improves wavelets", "combinations",
              "rope:fraction=0.25+wavelet:scales=6", W),
        Claim("A quarter of RoPE's pairs improves wavelets with biases and projection",
              "combinations", f"rope:fraction=0.25+{LEARNED}", LEARNED),
        Claim("Wavelets with all three beat Transformer-XL", "combinations",
              f"rope:fraction=0.25+{LEARNED}", "transformer_xl"),
        Claim("All of RoPE with wavelets beats wavelets alone", "combinations",
              "rope+wavelet:scales=6", W),
        Claim("RoPE and wavelets in alternating layers beat wavelets alone", "combinations",
              "rope@::2+wavelet:scales=6@1::2", W),
        Claim("RoPE with ALiBi beats ALiBi", "combinations", "rope+alibi", "alibi"),
    ),
    "Which wavelets?": (
        Claim("Literal wavelets beat mirrored ones", "wavelet", W, MIRRORED),
        Claim("Haar of many scales beats Haar of one [W]", "kinds", HAAR, FIXED),
        Claim("Ricker beats Haar [W]", "kinds", W, HAAR),
        Claim("Ricker beats Morlet [W]", "kinds", W, "wavelet:kind=morlet,scales=6"),
        Claim("Gaussian beats Ricker at five times the trained length [W]", "kinds",
              "wavelet:kind=gaussian,scales=6", W),
    ),
    "Which base for RoPE?": (
        Claim("Base 128 times the factor of the length beats 10000 times the same factor [F]",
              "theta", L_SCALED, SCALED),
        Claim("Base 128 times the factor of the length beats 10000 times the best of five fixed "
              "factors at each length (control)", "theta", L_SCALED, FIXED_BASES),
        Claim("Base 128 alone beats 10000 alone", "theta", "rope:theta=128", "rope"),
    ),
    "Does a bank need to be learned?": (
        Claim("A fixed bank that the input reads beats the learned one", "recent", FIXED_BANK,
              BANK),
        Claim("A learned bank beats Transformer-XL", "recent", BANK, "transformer_xl"),
        Claim("A fixed bank that the input reads beats Transformer-XL", "recent", FIXED_BANK,
              "transformer_xl"),
    ),
}  # fmt: skip
CLAIMS = tuple(chain.from_iterable(QUESTIONS.values()))


def claims(root: Path, *marks: str) -> str:
    """Return the table of the claims that hold one of these words."""
    return _table(root, [x for x in CLAIMS if any(mark in x.text for mark in marks)])


def questions(root: Path) -> str:
    """Return a heading and a table of claims for each question."""
    return "\n\n".join(f"### {name}\n\n{_table(root, x)}" for name, x in QUESTIONS.items())


def _table(root: Path, chosen: Sequence[Claim]) -> str:
    """Return a table of claims, with the verdict and the ratio at each multiple of the length."""
    rows = []
    for claim in chosen:
        verdicts = (_verdict(row) for row in _ratios(root, claim))
        rows.append((claim.text, f"`{claim.preset}`", *verdicts))
    return table(("claim", "preset", *(f"{factor}x" for factor in FACTORS_TO_16)), rows, "l")


def draw(root: Path) -> None:
    """Draw the ratios of the claims of the first two questions, with their intervals."""
    shown = [claim for claims in [*QUESTIONS.values()][:2] for claim in claims]
    figure = new_figure(8.2, 0.9 + 0.5 * len(shown))
    axes = figure.subplots()
    for place, claim in enumerate(shown):
        rows = _ratios(root, claim)
        for number, factor in enumerate(DRAWN):
            row, y = rows[FACTORS_TO_16.index(factor)], place + 0.24 * (number - 1)
            ends = [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
            axes.errorbar(row["mean"], y, xerr=ends, fmt=MARKERS[number], capsize=3,
                color=COLOURS[number], label="" if place else f"{factor}x")  # fmt: skip
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_xscale("log")
    ticks = (0.2, 0.3, 0.5, 0.7, 1, 1.3)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter("")
    labels = [textwrap.fill(f"{x.text.split(' [')[0]} ({x.preset})", 42) for x in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="ratio of perplexities, with 95 % interval")
    axes.grid(True, axis="x", **GRID)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(DRAWN), frameon=False,
        title="times the trained length")  # fmt: skip
    figure.savefig(root / PICTURES / "claims.png")


def _verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict on which all seeds agree, else "unclear", and the mean ratio.

    It is bold if the interval of the mean ratio does not hold 1.
    """
    ratios = row["by_seed"].values()
    verdicts = {"equal" if abs(x - 1) < ROUNDING else "yes" if x < 1 else "no" for x in ratios}
    says = verdicts.pop() if len(verdicts) == 1 else "unclear"
    text = f"{says}, {row['mean']:.3f}"
    return text if row["low"] is None or row["low"] <= 1 <= row["high"] else f"**{text}**"


def _ratios(root: Path, claim: Claim) -> list[dict[str, Any]]:
    """Return the perplexity over that of the rival that is best on average, for each length."""
    results = loaded(root, claim.preset)
    rivals = (claim.worse,) if isinstance(claim.worse, str) else claim.worse
    means = {row["encoding"]: row for row in results.table()}
    pairs = {name: results.paired(claim.better, name) for name in rivals}
    lengths = [results.content["train_length"] * factor for factor in FACTORS_TO_16]
    best = [min(rivals, key=lambda name: means[name][n]) for n in lengths]
    return [
        next(row for row in pairs[name] if row["length"] == n)
        for name, n in zip(best, lengths, strict=True)
    ]


@cache
def loaded(root: Path, name: str) -> Results:
    """Return a kept comparison."""
    comparison(root, name)  # names a file that is missing
    return Results.load(root / KEPT / f"{name}.json")
