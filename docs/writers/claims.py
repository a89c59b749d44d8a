"""Which claims hold, from kept comparisons: the first table of docs/results/index.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavepe.experiments.presets import FACTORS_TO_16

from benchmarks.command import table

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


CLAIMS = (
    Claim("KERPLE's slopes improve wavelets", "combinations", f"{W}+kerple", W),
    Claim("KERPLE's slopes improve wavelets with biases and projection", "combinations", BEST,
          LEARNED),
    Claim("Wavelets with biases, projection and KERPLE beat KERPLE", "wavelet", BEST,
          "kerple"),
    Claim("Wavelets with KERPLE beat Transformer-XL", "combinations", f"{W}+kerple",
          "transformer_xl"),
    Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL",
          "combinations", BEST, "transformer_xl"),
    Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL", "wavelet", BEST,
          "transformer_xl"),
    Claim("Wavelets with biases, projection and KERPLE beat Transformer-XL with KERPLE",
          "combinations", BEST, "transformer_xl+kerple"),
    Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat "
          "Transformer-XL", "larger-prose", LARGE_BEST, "transformer_xl"),
    Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat "
          "Transformer-XL with KERPLE", "larger-prose", LARGE_BEST, "transformer_xl+kerple"),
    Claim("4 M parameters, prose: wavelets with biases, projection and KERPLE beat KERPLE",
          "larger-prose", LARGE_BEST, "kerple"),
    Claim("4 M parameters, prose: KERPLE improves wavelets with biases and projection",
          "larger-prose", LARGE_BEST, LARGE_LEARNED),
    Claim("4 M parameters, prose: wavelets with biases and projection beat Transformer-XL",
          "larger-prose", LARGE_LEARNED, "transformer_xl"),
    Claim("4 M parameters, prose: wavelets alone beat KERPLE", "larger-prose", LARGE_W,
          "kerple"),
    Claim("4 M parameters, prose: wavelets alone beat RoPE", "larger-prose", LARGE_W,
          "rope"),
    Claim("Wavelets beat RoPE [W]", "wavelet", W, "rope"),
    Claim("Wavelets beat ALiBi [W]", "wavelet", W, "alibi"),
    Claim("Wavelets beat Transformer-XL with its query biases", "wavelet", W,
          "transformer_xl"),
    Claim("Wavelets beat sine waves in their place [W]", "wavelet", W,
          "transformer_xl:biases=false"),
    Claim("Wavelets beat YaRN without training", "wavelet", W,
          "rope/rope:type=yarn,factor=scaled"),
    Claim("Wavelets beat KERPLE", "wavelet", W, "kerple"),
    Claim("Literal wavelets beat mirrored ones", "wavelet", W, MIRRORED),
    Claim("Haar of many scales beats Haar of one [W]", "kinds", HAAR, FIXED),
    Claim("Ricker beats Haar [W]", "kinds", W, HAAR),
    Claim("Ricker beats Morlet [W]", "kinds", W, "wavelet:kind=morlet,scales=6"),
    Claim("Gaussian beats Ricker at five times the trained length [W]", "kinds",
          "wavelet:kind=gaussian,scales=6", W),
    Claim("Base 128 times the factor of the length beats 10000 times the same factor [F]",
          "theta", L_SCALED, SCALED),
    Claim("Base 128 times the factor of the length beats 10000 times the best of five fixed "
          "factors at each length (control)", "theta", L_SCALED, FIXED_BASES),
    Claim("Base 128 alone beats 10000 alone", "theta", "rope:theta=128", "rope"),
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
    Claim("A learned bank beats Transformer-XL", "recent", BANK, "transformer_xl"),
    Claim("A fixed bank that the input reads beats the learned one", "recent", FIXED_BANK,
          BANK),
    Claim("A fixed bank that the input reads beats Transformer-XL", "recent", FIXED_BANK,
          "transformer_xl"),
)  # fmt: skip


def claims(root: Path, *marks: str) -> str:
    """Return the table of claims, with the verdict and the ratio at each multiple of the length.

    With `marks`, it has the claims that hold one of these words.
    """
    rows = []
    for claim in (x for x in CLAIMS if not marks or any(mark in x.text for mark in marks)):
        results = comparison(root, claim.preset)
        lengths = [results["train_length"] * factor for factor in FACTORS_TO_16]
        verdicts = (_verdict(results["runs"], claim, n) for n in lengths)
        rows.append((claim.text, f"`{claim.preset}`", *verdicts))
    return table(("claim", "preset", *(f"{factor}x" for factor in FACTORS_TO_16)), rows, "l")


def _verdict(runs: Sequence[Mapping[str, Any]], claim: Claim, length: int) -> str:
    """Return the verdict on which all seeds agree, else "unclear", and the mean ratio."""
    rivals = (claim.worse,) if isinstance(claim.worse, str) else claim.worse
    ratios = _ratios(runs, claim.better, rivals, length)
    verdicts = {"equal" if abs(x - 1) < ROUNDING else "yes" if x < 1 else "no" for x in ratios}
    says = verdicts.pop() if len(verdicts) == 1 else "unclear"
    return f"{says}, {statistics.fmean(ratios):.3f}"


def _ratios(
    runs: Sequence[Mapping[str, Any]], one: str, rivals: Sequence[str], length: int
) -> list[float]:
    """Return the perplexity of `one` over that of the rival that is best on average, by seed."""
    by_name: dict[str, dict[int, float]] = {name: {} for name in (one, *rivals)}
    for run in runs:
        if run["encoding"] in by_name:
            by_name[run["encoding"]][run["seed"]] = run["perplexity"][str(length)]
    best = min(
        (by_name[name] for name in rivals),
        key=lambda by_length: statistics.fmean(by_length.values()),
    )
    return [by_name[one][seed] / best[seed] for seed in by_name[one]]
