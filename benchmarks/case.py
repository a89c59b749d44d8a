"""What a bench_<op>.py hands to the runner: one thing to time, its rivals and its judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

Call = Callable[[], Any]


class Verdict(NamedTuple):
    """Largest error, and the largest share of its bound that any element's error reaches."""

    error: float
    of_bound: float

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1


@dataclass
class Case:
    """One thing to time.

    op, size, dtype: what the row shows.
    ours: the call to time, once per variant; rivals: name -> a call that gives the same.
    own: name -> another call of wavepe's, timed beside it in the same variant.
    every_variant: False where only the fastest of the chosen variants is timed.
    work, unit: bytes ("GB/s") or floating point operations ("GFLOP/s") that no way around exists.
    judge: result of any of the calls -> Verdict; bound: the bound in words.
    memory: the situations to time, see memory.py; headline: those that README shows.
    reset: run before a call that is judged (for what works in place).
    batch: calls that are timed together, where one takes microseconds.
    inference: timed under torch.inference_mode, as a decoding step runs.
    floor: rivals and own calls that do less than the case asks; they are not judged.
    """

    op: str
    size: str
    dtype: str
    ours: Call
    rivals: dict[str, Call | None]
    work: float
    unit: str
    judge: Callable[[Any], Verdict]
    bound: str
    memory: tuple[str, ...] = ("fresh", "warm")
    headline: tuple[str, ...] = ()
    reset: Call | None = None
    batch: int = 1
    inference: bool = False
    floor: tuple[str, ...] = ()
    own: dict[str, Call] = field(default_factory=dict)
    every_variant: bool = True
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rivals = {name: call for name, call in self.rivals.items() if call is not None}


def plain(x: Any) -> np.ndarray:
    """A tensor or an array as float64."""
    if isinstance(x, torch.Tensor):
        x = x.detach().double().numpy()
    return np.asarray(x, np.float64)


def judge(exact: tuple[np.ndarray, ...], bound: tuple[np.ndarray | float, ...]):
    """A judge for results that are as many arrays as `exact`, or that array alone.

    An error is a distance that is not within the bound, so NaN and a wrong shape are errors too.
    """

    def verdict(result: Any) -> Verdict:
        got = result if isinstance(result, (tuple, list)) else (result,)
        error = share = 0.0
        for value, right, allowed in zip(got, exact, bound, strict=True):
            value = plain(value)
            if value.shape != right.shape:
                return Verdict(float("inf"), float("inf"))
            distance = np.abs(value - right)
            with np.errstate(divide="ignore", invalid="ignore"):
                part = np.where(distance == 0, 0.0, distance / allowed)
            worst = float(part.max()) if part.size else 0.0
            error = max(error, float(distance.max()) if part.size else 0.0)
            share = max(share, worst if worst == worst else float("inf"))
        return Verdict(error if error == error else float("inf"), share)

    return verdict


class Compiler:
    """torch.compile (inductor). The runner makes the first call, which compiles, untimed, and
    leaves the rival out with the reason where that fails (no C++ compiler, for one)."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled

    def function(self, function: Callable) -> Callable | None:
        """`function` to be compiled at its first call; None if rivals of this kind are off."""
        if not self.enabled:
            return None
        return torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, function: Callable, *args: Any) -> Call | None:
        """The call `function(*args)`, compiled."""
        compiled = self.function(function)
        return None if compiled is None else lambda: compiled(*args)
