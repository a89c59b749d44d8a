"""Compare rope_frequencies to transformers' own functions, in many configurations.

    python -m benchmarks.rope_parity [--json benchmarks/results/rope-parity-VERSION.json]

For each rope type it prints the largest differences of all
configurations:

- "inv_freq", "factor": to transformers' results in float32, relative;
- "float64": to the results of transformers' functions when they run in float64, relative;
- "cos, sin": between the tables of `rope_table(..., precision="hf")` and of transformers, from the
  same frequencies, relative to the attention factor.

The exit code is 1 if a difference is above its bound. There is one exception, rounding in
transformers. Near the end of a ramp, yarn and llama3 divide by almost the factor, and 1 - ramp has
lost bits in float32; a larger factor loses more. Such a configuration is excused and counted if
transformers' own float64 result differs as much from its float32 result.
"""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
import wavepe
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .command import add_json, keep, new_parser

BOUND = 2e-6  # for inv_freq and the attention factor, relative
BOUND_FLOAT64 = 1e-13
BOUND_TABLE = 2.0**-22  # two float32 ulp of 1: each of the two tables has rounded once
DIMS = (32, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Configuration:
    """The arguments of one call: head size, `rope_parameters` and lengths."""

    dim: int
    parameters: dict[str, Any]
    max_length: int = 4096
    length: int | None = None

    @property
    def rope_type(self) -> str:
        return self.parameters["rope_type"]


# ------------------------------------------------------------------ configurations


def configurations() -> list[Configuration]:
    """Return all configurations: some hundreds, the same in every run."""
    return [
        *_without_length(),
        *_dynamic(),
        *_yarn(),
        *_longrope(),
        *_llama3(),
    ]


def _parameters(rope_type: str, theta: float, partial: float = 1.0, **keys: Any) -> dict[str, Any]:
    part = {} if partial == 1 else {"partial_rotary_factor": partial}
    parameters = {key: value for key, value in keys.items() if value is not Ellipsis}
    return {"rope_type": rope_type, "rope_theta": theta, **part, **parameters}


def _without_length() -> Iterator[Configuration]:
    for dim, theta, partial in itertools.product(DIMS, (128.0, 1e4, 1e6), (1.0, 0.5, 0.25)):
        yield Configuration(dim, _parameters("default", theta, partial))
        for factor in (1.0, 2, 3.7, 32.0):
            if theta > 1e3 or factor == 2:
                yield Configuration(dim, _parameters("linear", theta, partial, factor=factor))
    for factor in (..., 2.0):  # 25 rotated elements are rounded up to 13 pairs
        kind = "default" if factor is ... else "linear"
        yield Configuration(100, _parameters(kind, 1e4, 0.25, factor=factor))
    for dim, theta, partial in itertools.product(DIMS, (1e4, 1e6), (1.0, 0.75, 0.25, 0.0)):
        for factor in (..., 8.0):
            yield Configuration(dim, _parameters("proportional", theta, partial, factor=factor))


def _dynamic() -> Iterator[Configuration]:
    lengths = (None, 1, 4096, 4097, 10000, 131072)
    for dim, theta, length in itertools.product(DIMS, (1e4, 5e5), lengths):
        for partial, factor in ((1.0, 2.0), (0.5, 4.5), (1.0, 1)):
            parameters = _parameters("dynamic", theta, partial, factor=factor)
            yield Configuration(dim, parameters, length=length)


def _yarn() -> Iterator[Configuration]:
    original = {"original_max_position_embeddings": 4096}
    variants: list[dict[str, Any]] = [
        {},
        {"attention_factor": 1.25},
        {"truncate": False},
        {"beta_fast": 64, "beta_slow": 2},
        {"beta_fast": 48.5, "beta_slow": 0.5, "truncate": False},
        {"beta_fast": 8, "beta_slow": 8},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"mscale": 0.8, "mscale_all_dim": 0.8, "attention_factor": 1.1},
    ]
    for dim, theta, variant in itertools.product(DIMS, (1e4, 1e6), variants):
        for factor, partial in ((4.0, 1.0), (40, 0.5)):
            parameters = _parameters("yarn", theta, partial, factor=factor, **original, **variant)
            yield Configuration(dim, parameters, max_length=int(4096 * factor))
    for dim in DIMS:
        yield Configuration(dim, _parameters("yarn", 150000.0, factor=32.0))
        none = _parameters("yarn", 1e4, factor=None, **original)
        yield Configuration(dim, none, max_length=65536)
        # An explicit factor differs from the ratio of the lengths.
        yield Configuration(dim, _parameters("yarn", 1e4, factor=3.5, **original), max_length=65536)


def _longrope() -> Iterator[Configuration]:
    original = {"original_max_position_embeddings": 4096}
    for dim, theta, partial in itertools.product(DIMS, (1e4, 1e6), (1.0, 0.5)):
        pairs = np.arange(int(dim * partial) // 2)
        lists = {
            "short_factor": (1 + 0.03 * pairs).round(2).tolist(),
            "long_factor": (1 + 1.7 * pairs**1.2).round(3).tolist(),
        }
        for length in (None, 4096, 4097, 100000):
            for variant in ({}, {"factor": 16.0}, {"factor": 32.0}, {"attention_factor": 1.19}):
                parameters = _parameters("longrope", theta, partial, **lists, **original, **variant)
                yield Configuration(dim, parameters, max_length=131072, length=length)
        parameters = _parameters("longrope", theta, partial, **lists, factor=4.0)
        yield Configuration(dim, parameters, length=9000)


def _llama3() -> Iterator[Configuration]:
    for dim, theta, partial in itertools.product(DIMS, (1e4, 5e5), (1.0, 0.5)):
        for factor, low, high in ((8.0, 1.0, 4.0), (32, 1, 4), (2.5, 0.5, 32.0)):
            bands = {"low_freq_factor": low, "high_freq_factor": high}
            for original in (8192, ...):
                parameters = _parameters(
                    "llama3",
                    theta,
                    partial,
                    factor=factor,
                    original_max_position_embeddings=original,
                    **bands,
                )
                yield Configuration(dim, parameters, max_length=131072)


# ------------------------------------------------------------------ the two sides


class _Float64(TorchFunctionMode):
    """A mode in which torch code computes in float64 where it asks for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs) if func is not torch.Tensor.float else args[0].double()


def theirs(case: Configuration) -> tuple[torch.Tensor, float] | None:
    """Return transformers' results, or None if this version cannot compute them."""
    config = LlamaConfig(
        hidden_size=case.dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=case.dim,
        max_position_embeddings=case.max_length,
        rope_parameters=dict(case.parameters),
    )
    if case.rope_type == "default":
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        # One of many such classes; this one honours partial_rotary_factor.
        return Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    if case.rope_type not in ROPE_INIT_FUNCTIONS:
        return None
    function = ROPE_INIT_FUNCTIONS[case.rope_type]
    return function(config, torch.device("cpu"), seq_len=case.length)


def differences(case: Configuration) -> dict[str, float] | None:
    """Return the largest differences of one configuration; None if transformers lacks it."""
    stock = theirs(case)
    if stock is None:
        return None
    inv_freq, factor = wavepe.rope_frequencies(
        case.dim, scaling=case.parameters, length=case.length, max_length=case.max_length
    )
    with _Float64():
        double, _ = theirs(case)
    if double.dtype != torch.float64:
        raise TypeError(f"{case}: transformers computed in {double.dtype}")
    single = stock[0].double().numpy()
    return {
        "inv_freq": _relative(inv_freq, single),
        "float64": _relative(inv_freq, double.numpy()),
        "rounding": _relative(double.numpy(), single),
        "factor": _relative(np.array(factor), np.array(float(stock[1]))),
        "cos, sin": _tables(case, stock[0], float(stock[1])),
    }


def _relative(ours: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference relative to `other`, whose zeros must be zeros in both."""
    if ours.shape != other.shape:
        return np.inf
    if np.any((ours != 0) & (other == 0)):
        return np.inf
    safe = np.where(other == 0, 1.0, other)
    return float(np.max(np.abs(ours - other) / np.abs(safe), initial=0.0))


def _tables(case: Configuration, inv_freq: torch.Tensor, factor: float) -> float:
    """Return the difference of precision="hf" and the expression of LlamaRotaryEmbedding."""
    last = max(case.length or 0, case.max_length) - 1
    positions = np.unique(np.linspace(0, last, 33).astype(np.int64))
    ours = wavepe.rope_table(
        positions, inv_freq.double().numpy(), attention_factor=factor, precision="hf"
    )
    angles = torch.from_numpy(positions)[:, None].float() * inv_freq
    other = (angles.cos() * factor).numpy(), (angles.sin() * factor).numpy()
    worst = max(
        np.max(np.abs(a.astype(np.float64) - b), initial=0.0)
        for a, b in zip(ours, other, strict=True)
    )
    return float(worst / factor)


# ------------------------------------------------------------------ the report


LIMITS = {
    "inv_freq": BOUND,
    "factor": BOUND,
    "float64": BOUND_FLOAT64,
    "cos, sin": BOUND_TABLE,
}


def is_excused(differences: dict[str, float]) -> bool:
    """Return whether only transformers' float32 rounding puts inv_freq above its bound."""
    ours, rounding = differences["inv_freq"], differences["rounding"]
    return (
        ours > BOUND and differences["float64"] <= BOUND_FLOAT64 and ours <= rounding * (1 + 1e-6)
    )


def compare() -> list[dict[str, Any]]:
    """Return a row for each rope type, with its largest differences and its exceptions."""
    rows: dict[str, dict[str, Any]] = {}
    for case in configurations():
        start = {"type": case.rope_type, "ok": True, "configurations": 0, "excused": 0, "absent": 0}
        row = rows.setdefault(case.rope_type, {**start, **dict.fromkeys(LIMITS, 0.0)})
        difference = differences(case)
        if difference is None:
            row["absent"] += 1
            continue
        row["configurations"] += 1
        row["excused"] += is_excused(difference)
        above = [key for key, limit in LIMITS.items() if not difference[key] <= limit]
        row["ok"] &= not above or (above == ["inv_freq"] and is_excused(difference))
        for key in LIMITS:
            row[key] = max(row[key], difference[key])
    return list(rows.values())


def print_report(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print(f"wavepe {wavepe.__version__}, transformers {transformers.__version__}")
    print(f"{'type':14}{'configurations':>15}" + "".join(f"{key:>11}" for key in LIMITS))
    for row in rows:
        print(_line(row["type"], row) + _note(row))
    whole = {key: max(row[key] for row in rows) for key in LIMITS}
    whole["configurations"] = sum(row["configurations"] for row in rows)
    print(_line("all", whole))
    print(f"{'bound':29}" + "".join(f"{limit:11.1e}" for limit in LIMITS.values()))


def _line(name: str, row: dict[str, Any]) -> str:
    return f"{name:14}{row['configurations']:15}" + "".join(f"{row[key]:11.1e}" for key in LIMITS)


def _note(row: dict[str, Any]) -> str:
    note = "" if row["ok"] else "  FAIL"
    if row["excused"]:
        note += f"  {row['excused']} above the bound by transformers' own rounding"
    if row["absent"]:
        note += f"  {row['absent']} more not in this version"
    return note


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 1 if a difference is above its bound, else 0."""
    parser = new_parser(__doc__)
    add_json(parser)
    options = parser.parse_args(argv)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of many configurations
    try:
        rows = compare()
    finally:
        transformers.logging.set_verbosity(verbosity)
    print_report(rows)
    about = {
        "date": datetime.date.today().isoformat(),
        "wavepe": wavepe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    keep({**about, "rows": rows}, options.json)
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
