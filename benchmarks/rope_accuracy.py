"""Measure the errors of rope_table and of other RoPE tables, for each decade of |position|.

`python -m benchmarks.rope_accuracy` measures and prints; `--json FILE` keeps the figures, for
docs/internals/rope-exactness.md.

The reference is benchmarks/exact_angles.py, which computes position * inv_freq in integers. The
head size is 128, and theta is 1e4, 5e5 or 1e6. For each decade and theta there are some thousand
positions of either sign: the ends, powers of two and their neighbours, random positions, and for
each frequency the positions whose angle is nearest to a multiple of pi/2 (by continued fractions).
An error is given in float32 ulp of the exact result, which is a small unit near a zero of cos or
sin, and as an absolute number.

The ways
    wavepe          rope_table, float32, inv_freq in float64; every variant and the torch operator.
    from theta      the same numbers against theta^(-2i/d) itself instead of its float64 rounding.
    transformers    stock LlamaRotaryEmbedding: inv_freq and the product in float32.
    its own angles  the same numbers against the exact product with its float32 inv_freq.
    recurrence      (cos, sin) of position m + 1 from those of m by one rotation in float32, up to
                    m = 10^6. That would take too long beyond, so larger positions use repeated
                    squaring: the product, in float32, of the rotations by f, 2f, 4f, ... for the
                    bits of m. Each rotation is the square of the one before, scaled to length 1.
    bf16 positions  like transformers, but positions are rounded to bfloat16, as under autocast.
    bf16 inv_freq   LlamaRotaryEmbedding after model.to(torch.bfloat16), which casts its buffer.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import wavepe
import wavepe.ops
from wavepe.experiments.environment import cpu_name, version_of

from .command import measuring_command
from .command import table as markdown
from .exact_angles import Exact, ideal_frequencies, near_quarter_turns

DIM = 128
THETAS = (1e4, 5e5, 1e6)
STEPS = 10**6  # the last position of the recurrence by single steps
BOUNDS = (*(10**k for k in range(10)), 2**31, 10**10, 10**12, 10**14, 2**53)
WAYS = ("wavepe", "transformers", "recurrence", "bf16 positions", "bf16 inv_freq")  # in the table

Table = tuple[np.ndarray, np.ndarray]
Way = Callable[[np.ndarray], Table]


# ------------------------------------------------------------------ positions


def positions_of(
    low: int, high: int, count: int, quarters: list[int], rng: np.random.Generator
) -> np.ndarray:
    """Return positions in [low, high], of either sign: all, or the hard ones and random ones."""
    if high - low <= count:
        chosen = np.arange(low, high + 1)
    else:
        hard = [m for g in quarters for m in near_quarter_turns(g, low, high, 4)]
        powers = [2**k + d for k in range(54) for d in (-1, 0, 1) if low <= 2**k + d <= high]
        anywhere = rng.integers(low, high, count, endpoint=True)
        chosen = np.unique(np.concatenate([[low, high], powers, hard, anywhere]).astype(np.int64))
    return chosen * rng.choice([-1, 1], chosen.size)


# ------------------------------------------------------------------ the ways


def wavepe_table(inv_freq: np.ndarray, variant: str) -> Way:
    def table(positions: np.ndarray) -> Table:
        before = wavepe.variant()
        wavepe.use_variant(variant)
        try:
            made = wavepe.rope_table(positions, inv_freq)
            tensors = wavepe.ops.rope_table(torch.from_numpy(positions), torch.from_numpy(inv_freq))
        finally:
            wavepe.use_variant(before)
        for ours, theirs in zip(made, tensors, strict=True):
            if not np.array_equal(ours, theirs.numpy()):
                raise AssertionError(f"{variant}: NumPy's and torch's tables differ")
        return made

    return table


def llama(theta: float, dtype: torch.dtype) -> torch.nn.Module:
    """Return transformers' module for this base, cast like its model."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=DIM, num_attention_heads=1, rope_parameters=parameters)
    return LlamaRotaryEmbedding(config).to(dtype)


def llama_table(module: torch.nn.Module) -> Way:
    def table(positions: np.ndarray) -> Table:
        cos, sin = module(torch.zeros(1), torch.from_numpy(positions)[None])
        return cos[0, :, : DIM // 2].numpy(), sin[0, :, : DIM // 2].numpy()

    return table


def bf16_positions(module: torch.nn.Module) -> Way:
    def table(positions: np.ndarray) -> Table:
        angle = torch.from_numpy(positions).to(torch.bfloat16).float()[:, None] * module.inv_freq
        return angle.cos().numpy(), angle.sin().numpy()

    return table


def one_step(inv_freq: np.ndarray) -> np.ndarray:
    """Return cos + i sin of the angle of position 1, rounded once: complex64 (h,)."""
    return np.exp(1j * inv_freq).astype(np.complex64)


def walked(inv_freq: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Rotate step by step; return the results at the sorted positions `wanted`."""
    step, block, done = one_step(inv_freq), 1000, 0
    rows, now = np.empty((block, step.size), np.complex64), np.ones_like(step)
    out = np.empty((wanted.size, step.size), np.complex64)
    for start in range(0, int(wanted.max(initial=0)), block):
        for row in rows:
            now = np.multiply(now, step, out=row)
        now = now.copy()
        stop = np.searchsorted(wanted, start + block, side="right")
        out[done:stop] = rows[wanted[done:stop] - start - 1]
        done = stop
    return out


def doubled(inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rotations of positions > 0 by repeated squaring: complex64 (n, h).

    Each product is scaled to length 1. Without that, each squaring doubles the error of the length,
    which becomes infinite near position 10^8.
    """
    power = one_step(inv_freq)
    out = np.ones((positions.size, inv_freq.size), np.complex64)
    for bit in range(int(positions.max()).bit_length()):
        turned = out * power
        turned /= np.abs(turned)
        out = np.where((positions >> bit & 1).astype(bool)[:, None], turned, out)
        power = power * power
        power /= np.abs(power)
    return out


def recurrence(inv_freq: np.ndarray, decades: Sequence[np.ndarray]) -> Way:
    """Return the recurrence: step by step up to STEPS, by squaring beyond."""
    steps = np.abs(np.concatenate(decades))
    steps = np.unique(steps[steps <= STEPS])
    rows = walked(inv_freq, steps)

    def table(positions: np.ndarray) -> Table:
        size = np.abs(positions)
        near = size.max() <= STEPS
        z = rows[np.searchsorted(steps, size)] if near else doubled(inv_freq, size)
        return z.real, z.imag * np.sign(positions).astype(np.float32)[:, None]

    return table


# ------------------------------------------------------------------ measuring


def errors(made: Table, exact: Table) -> dict[str, float]:
    """Return the largest error of cos and sin, in float32 ulp and absolute."""
    ulps, absolute = [], []
    for got, right in zip(made, exact, strict=True):
        distance = np.abs(got.astype(np.float64) - right)
        unit = np.ldexp(1.0, np.maximum(np.frexp(right)[1] - 24, -149))
        ulps.append(float((distance / unit).max()))
        absolute.append(float(distance.max()))
    return {"ulp": max(ulps), "absolute": max(absolute)}


def judged(theta: float, count: int, bounds: Sequence[int]) -> list[dict]:
    """Return positions, nearest distance to a quarter turn and all errors, for each decade."""
    rng = np.random.default_rng(int(theta))
    inv_freq, _ = wavepe.rope_frequencies(DIM, theta)
    stock, cast = llama(theta, torch.float32), llama(theta, torch.bfloat16)
    exact = Exact(inv_freq.tolist())
    others = {
        "from theta": Exact(ideal_frequencies(DIM, theta)),
        "its own angles": Exact(stock.inv_freq.tolist()),
    }
    decades = [
        positions_of(low, high, count, exact.quarters, rng)
        for low, high in itertools.pairwise(bounds)
    ]
    ways: dict[str, Way] = {name: wavepe_table(inv_freq, name) for name in wavepe.variants()}
    ways |= {"transformers": llama_table(stock), "recurrence": recurrence(inv_freq, decades)}
    ways |= {"bf16 positions": bf16_positions(stock), "bf16 inv_freq": llama_table(cast)}
    rows = []
    for positions in decades:
        exact.nearest = 1.0
        right = exact(positions)
        made = {name: way(positions) for name, way in ways.items()}
        judged_errors = {name: errors(table, right) for name, table in made.items()}
        ours = made[wavepe.variant()]
        judged_errors["from theta"] = errors(ours, others["from theta"](positions))
        judged_errors["its own angles"] = errors(
            made["transformers"], others["its own angles"](positions)
        )
        judged_errors["wavepe"] = worst(judged_errors.pop(name) for name in wavepe.variants())
        rows.append(
            {"positions": positions.size, "nearest": exact.nearest, "errors": judged_errors}
        )
    return rows


def worst(several: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest of each error."""
    several = list(several)
    return {key: max(one[key] for one in several) for key in ("ulp", "absolute")}


def measure(count: int = 3000, bounds: Sequence[int] = BOUNDS) -> dict:
    """Return all results, with `count` random positions for each decade and theta."""
    by_theta = [judged(theta, count, bounds) for theta in THETAS]
    rows = []
    for low, high, *parts in zip(bounds, bounds[1:], *by_theta, strict=False):
        rows.append(
            {
                "from": low,
                "to": high,
                "positions": sum(part["positions"] for part in parts),
                "nearest_to_a_quarter_turn": min(part["nearest"] for part in parts),
                "errors": {
                    name: worst(part["errors"][name] for part in parts)
                    for name in parts[0]["errors"]
                },
            }
        )
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("wavepe", "numpy", "torch", "transformers")},
        "variants": wavepe.variants(),
    }
    return {"environment": about, "dim": DIM, "thetas": THETAS, "steps": STEPS, "rows": rows}


# ------------------------------------------------------------------ the table


def place(number: int) -> str:
    """Return a bound in short form, such as a power of ten."""
    for base, power in ((10, len(str(number)) - 1), (2, number.bit_length() - 1)):
        if number == base**power and power > 3:
            return f"{base}^{power}"
    return str(number)


def cell(error: dict[str, float]) -> str:
    ulp, absolute = error["ulp"], error["absolute"]
    ulp_text = f"{ulp:.3f}" if ulp < 1 else f"{ulp:.0f}" if ulp < 1000 else f"{ulp:.0e}"
    absolute_text = f"{absolute:.1f}" if absolute >= 0.1 else f"{absolute:.0e}"
    return re.sub(r"e([+-])0*", r"e\1", f"{ulp_text}, {absolute_text}").replace("e+", "e")


def table(results: dict) -> str:
    """Return the errors as Markdown, with a row for each decade."""
    rows = [
        (f"{place(row['from'])} to {place(row['to'])}", *(cell(row["errors"][w]) for w in WAYS))
        for row in results["rows"]
    ]
    return markdown(("positions", *WAYS), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    return measuring_command(__doc__, measure, table, argv)


if __name__ == "__main__":
    sys.exit(main())
