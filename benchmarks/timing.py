"""Times of several calls, taken in turns."""

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
        """Linear between the two nearest, as numpy.quantile has it."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def over(self, other: Timing) -> Timing:
        """Quotients, round by round: what slowed both of a round down drops out."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Timing([mine / theirs for mine, theirs in pairs])

    def summary(self) -> dict[str, Any]:
        """Ready for JSON, in seconds."""
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
    """Time all calls round by round: each once, in a new (seeded) order, `repeats` times.

    The order changes so that nobody always finds the caches as the same other call left them.
    `before(key)` and the dropping of a result are not timed. Once LEAST_ROUNDS rounds are done,
    `budget` seconds end it. A `batch` of calls is timed together and divided, for calls of
    microseconds.
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
