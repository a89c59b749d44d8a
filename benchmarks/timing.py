"""Time several calls, which take turns."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .memory import Allocator, page_faults

LEAST_ROUNDS = 7


@dataclass
class Timing:
    """The times of one call."""

    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Return a quantile, linear between the two nearest times, as numpy.quantile."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def over(self, other: Timing) -> Timing:
        """Return the quotients of all rounds, in which a disturbance of both calls cancels."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Timing([mine / theirs for mine, theirs in pairs])

    def summary(self) -> dict[str, Any]:
        """Return the statistics in seconds, ready for JSON."""
        return {
            "median": self.median,
            "p10": self.quantile(0.1),
            "p90": self.quantile(0.9),
            "min": min(self.seconds),
            "rounds": len(self.seconds),
            "page_faults": round(statistics.median(self.faults)),
        }


def take_turns(
    calls: dict[Any, Callable[[], Any]],
    *,
    before: Callable[[Any], None] = lambda key: None,
    allocator: Allocator | None = None,
    repeats: int = 21,
    budget: float = 6.0,
    warm_up: int = 1,
    batch: int = 1,
) -> dict[Any, Timing]:
    """Time all calls in `repeats` rounds; a round makes each call once.

    The order is shuffled in each round (with a seed), so that a call does not always find the
    caches that the same other call left. `before(key)` and the freeing of a result are not timed.
    After LEAST_ROUNDS rounds, no round begins later than `budget` seconds. `batch` calls are timed
    together, and the time is divided by `batch`, for calls that take microseconds.
    """
    order, shuffle = list(calls), random.Random(0).shuffle
    timings = {key: Timing() for key in order}
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = time.perf_counter()
        for number in range(-warm_up, repeats):
            shuffle(order)
            for key in order:
                before(key)
                if allocator is not None:
                    allocator.before_call()
                faults = page_faults()
                call = calls[key]
                start = time.perf_counter()
                for _ in range(batch):
                    result = call()
                seconds = time.perf_counter() - start
                faults = page_faults() - faults
                del result
                if number >= 0:
                    timings[key].seconds.append(seconds / batch)
                    timings[key].faults.append(faults)
            if number + 1 >= LEAST_ROUNDS and time.perf_counter() - began > budget:
                break
    finally:
        if collecting:
            gc.enable()
    return timings
