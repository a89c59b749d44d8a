"""What the parts of `benchmarks.gpu` share: judging a result, timing calls, and their memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What one rounding of a result may be off, of its own size or of the largest summand.
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNITS[torch.float64] = 2.0**-53
CALLS, ROUNDS = 20, 9
ROUND_SECONDS = 0.02  # of one call's turn: fewer calls where they are slow


# ---- right ---------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    error: float  # over its bound; inf for a NaN
    largest: float  # absolute

    @property
    def ok(self) -> bool:
        return self.error <= 1


Triple = tuple[Tensor, Tensor, float]  # got, exact, bound of every element


class Place:
    """Where the kernels run: a GPU, or their emulation, for tensors on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.emulated = device == "cpu"

    def to(self, *tensors: Tensor) -> list[Tensor]:
        return [t.to(self.device) for t in tensors]

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the CPU's operators are the emulated kernels; outside they are the judge."""
        if self.emulated:
            torch.ops.wavepe.emulate_cuda(True)
        try:
            yield
        finally:
            if self.emulated:
                torch.ops.wavepe.emulate_cuda(False)

    def attention(self) -> Callable[..., Any]:
        """The operator on a GPU; without one its kernels by Triton's interpreter."""
        if self.emulated:
            from .interpreted import interpreted

            return interpreted
        import wavepe.ops as ops

        return ops.attention

    def needs_kernel(self, q: Tensor) -> None:
        """Raise where the operator would take another way than its kernels."""
        from wavepe.ops._attention_gpu import missing_kernel

        if self.device != "cpu" and (missing := missing_kernel(q, q)):
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
    """The least seconds a call of each, in turns."""
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
    """Of one of `count` calls; by events on a GPU, which says nothing of the time to launch."""
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
    """Bytes that a call holds at most beside what was there; None without a GPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
