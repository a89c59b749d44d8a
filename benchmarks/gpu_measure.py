"""Judge results, time calls and measure their memory, for the parts of `benchmarks.gpu`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The relative error of one rounding, of the result or of the largest summand.
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNITS[torch.float64] = 2.0**-53
CALLS, ROUNDS = 20, 9
ROUND_SECONDS = 0.02  # a turn makes as many calls as take this time, but at most CALLS


# ---- right ---------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    error: float  # divided by its bound; inf for a NaN
    largest: float  # the largest absolute error

    @property
    def ok(self) -> bool:
        return self.error <= 1


Triple = tuple[Tensor, Tensor, float]  # result, exact values, bound of every element


class Place:
    """The device of the kernels: a GPU, or the CPU, where they are emulated."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.emulated = device == "cpu"

    def to(self, *tensors: Tensor) -> list[Tensor]:
        return [t.to(self.device) for t in tensors]

    @contextlib.contextmanager
    def kernels_in_use(self) -> Iterator[None]:
        """Let the CPU's operators be the emulated kernels; outside they are the reference."""
        if self.emulated:
            torch.ops.wavepe.emulate_cuda(True)
        try:
            yield
        finally:
            if self.emulated:
                torch.ops.wavepe.emulate_cuda(False)

    def attention(self) -> Callable[..., Any]:
        """Return ops.attention; without a GPU, return its kernels in Triton's interpreter."""
        if self.emulated:
            from .interpreted import interpreted

            return interpreted
        import wavepe.ops as ops

        return ops.attention

    def needs_kernel(self, q: Tensor) -> None:
        """Raise if the operator would not use its kernels."""
        from wavepe.ops._attention_gpu import missing_kernel

        if self.device != "cpu" and (missing := missing_kernel(q, q, None)):
            raise RuntimeError(f"attention has no kernel: {missing}")


def worst(name: str, dtype: torch.dtype, triples: Iterable[Triple]) -> Check:
    over, largest = 0.0, 0.0
    for got, want, bound in triples:
        error = (got.cpu().double() - want.double()).abs().max().item() if got.numel() else 0.0
        error = math.inf if math.isnan(error) else error
        over, largest = max(over, error / bound), max(largest, error)
    return Check(f"{name} {short(dtype)}", over, largest)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- fast ----------------------------------------------------------------------------------------


def time_calls(
    calls: dict[str, Callable[[], Any]], device: str = "cuda", rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the least seconds of each call; the calls take turns."""
    least = dict.fromkeys(calls, math.inf)
    counts = {}
    for name, call in calls.items():
        for _ in range(min(3, rounds - 1)):
            call()
        once = _seconds(call, 1, device)
        counts[name] = min(max(int(ROUND_SECONDS / once), 1), CALLS)
    for _ in range(rounds):
        for name, call in calls.items():
            least[name] = min(least[name], _seconds(call, counts[name], device))
    return least


def _seconds(call: Callable[[], Any], count: int, device: str) -> float:
    """Return the seconds of one of `count` calls.

    On a GPU they are measured by events, so the time of launches may be hidden.
    """
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def extra_memory(call: Callable[[], Any], device: str) -> int | None:
    """Return the peak of the bytes that a call allocates; None without a GPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
