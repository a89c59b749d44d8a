"""Where ``wavepe compare`` trains and evaluates (needs torch)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UsageError

# Each reading of a loss waits for the GPU.
_STEPS_BETWEEN_READS = 16


@dataclass(frozen=True)
class Device:
    """A device of torch, and how it is worked with.

    `autocast` is the dtype of most products, None for that of the weights. The losses are read
    every `read_every` steps.
    """

    place: torch.device
    gpu: str | None = None
    autocast: torch.dtype | None = None
    read_every: int = 1

    @property
    def label(self) -> str:
        """What figures depend on, in words."""
        details = [self.gpu, f"autocast to {self._precision}" if self.autocast else None]
        given = ", ".join(filter(None, details))
        return f"{self.place.type} ({given})" if given else self.place.type

    @property
    def facts(self) -> dict[str, Any]:
        """What is recorded of it, ready for JSON."""
        return {"device": self.place.type, "gpu": self.gpu, "autocast": self._precision}

    @property
    def _precision(self) -> str | None:
        return str(self.autocast).removeprefix("torch.") if self.autocast else None

    def autocasting(self) -> contextlib.AbstractContextManager:
        """Within, torch takes products in `autocast`."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.place.type, self.autocast)

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the batch there, without waiting for what the device is at."""
        if self.place.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.place, non_blocking=True)


CPU = Device(torch.device("cpu"))


@contextlib.contextmanager
def torch_threads(wanted: int | None) -> Iterator[int]:
    """torch on `wanted` threads (None: as it is), and no remarks of transformers; gives the number
    in force."""
    from transformers.utils import logging

    before, verbosity = torch.get_num_threads(), logging.get_verbosity()
    if wanted is not None:
        torch.set_num_threads(wanted)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of parameters that an encoding adds or drops, too
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
        logging.set_verbosity(verbosity)


def device_named(name: str) -> Device:
    """Return the device of --device; UsageError where this process has none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else f"has CUDA {torch.version.cuda}"
        raise UsageError(
            "--device cuda: needs a GPU that torch can use, and torch.cuda.is_available() is False "
            f"(torch {torch.__version__} {built}: torch.version.cuda is {torch.version.cuda}); "
            "--device cpu computes without one"
        )
    place = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(place)
    return Device(place, gpu, torch.bfloat16, _STEPS_BETWEEN_READS)
