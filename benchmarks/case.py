"""The cases that each bench_<op>.py gives to bench.py: a call, its rivals and its judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

Call = Callable[[], Any]


class Verdict(NamedTuple):
    """The largest error of a result, and the largest quotient of an error and its bound."""

    error: float
    of_bound: float

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1


@dataclass
class Case:
    """A call to time, with its rivals.

    op, size, dtype: the text of the row.
    ours: the call to time, once for each variant.
    rivals: name -> a call with the same result.
    beside: name -> another call of wavepe, timed in the same variant.
    every_variant: if False, only the fastest of the chosen variants is timed.
    work, unit: the least bytes ("GB/s") or floating point operations ("GFLOP/s") of the result.
    judge: a function of a call's result that returns a Verdict.
    bound: the bound in words.
    memory: the kinds of memory to time in, see memory.py.
    headline: the kinds of memory whose rows README shows.
    reset: called before a call that is judged, for calls that work in place.
    batch: number of calls that are timed together, if one takes microseconds.
    inference: if True, calls are timed under torch.inference_mode, as in decoding.
    floor: names of rivals and calls beside that do less work; they are not judged.
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
    beside: dict[str, Call] = field(default_factory=dict)
    every_variant: bool = True
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rivals = {name: call for name, call in self.rivals.items() if call is not None}


def plain(x: Any) -> np.ndarray:
    """Return a tensor or an array as a float64 array."""
    if isinstance(x, torch.Tensor):
        x = x.detach().double().numpy()
    return np.asarray(x, np.float64)


def judge(exact: tuple[np.ndarray, ...], bound: tuple[np.ndarray | float, ...]):
    """Return a judge of results: a tuple of arrays like `exact`, or one array if `exact` has one.

    NaN and a wrong shape are errors too.
    """

    def verdict(result: Any) -> Verdict:
        got = result if isinstance(result, (tuple, list)) else (result,)
        error = of_bound = 0.0
        for value, right, allowed in zip(got, exact, bound, strict=True):
            value = plain(value)
            if value.shape != right.shape:
                return Verdict(float("inf"), float("inf"))
            distance = np.abs(value - right)
            with np.errstate(divide="ignore", invalid="ignore"):
                part = np.where(distance == 0, 0.0, distance / allowed)
            worst = float(part.max()) if part.size else 0.0
            error = max(error, float(distance.max()) if part.size else 0.0)
            of_bound = max(of_bound, worst if worst == worst else float("inf"))
        return Verdict(error if error == error else float("inf"), of_bound)

    return verdict


class Compiler:
    """torch.compile (inductor) for rivals.

    The first call compiles. bench.py does not time it. If it fails, for example because there is no
    C++ compiler, bench.py leaves the rival out and notes the reason.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled

    def function(self, function: Callable) -> Callable | None:
        """Return `function`, compiled at its first call, or None if compilation is off."""
        if not self.enabled:
            return None
        return torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, function: Callable, *args: Any) -> Call | None:
        """Return the call `function(*args)`, compiled, or None if compilation is off."""
        compiled = self.function(function)
        return None if compiled is None else lambda: compiled(*args)
