"""The device on which a command runs models (needs torch)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..common.errors import UsageError


@dataclass(frozen=True)
class Device:
    """A device of torch, and how the commands use it."""

    place: torch.device
    gpu: str | None = None
    autocast: torch.dtype | None = None  # of matrix products; None: that of the weights
    read_every: int = 1  # steps; reading a loss waits for the GPU
    count: int = 0  # of GPUs that this process sees
    compiles: bool = False  # whether a training step is worth a minute of torch.compile

    @property
    def label(self) -> str:
        """Return a text with the properties that figures depend on."""
        details = f"{self.gpu}, " * bool(self.gpu) + f"autocast to {self._precision}"
        return f"{self.place.type} ({details})" if self.autocast else self.place.type

    @property
    def facts(self) -> dict[str, Any]:
        """Return the record of the device for a results file."""
        return {"device": self.place.type, "gpu": self.gpu, "autocast": self._precision}

    @property
    def _precision(self) -> str | None:
        return str(self.autocast).removeprefix("torch.") if self.autocast else None

    def autocasting(self) -> contextlib.AbstractContextManager:
        """Return a context in which torch computes products in the dtype `autocast`."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.place.type, self.autocast)

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a copy of the batch on the device, without waiting for the device."""
        if self.place.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.place, non_blocking=True)


CPU = Device(torch.device("cpu"))


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Leave out transformers' bars, one for each checkpoint; commands have their own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def torch_threads(wanted: int | None) -> Iterator[None]:
    """Set the number of torch's threads (None: keep it), and silence transformers."""
    from transformers.utils import logging

    before, verbosity = torch.get_num_threads(), logging.get_verbosity()
    if wanted is not None:
        torch.set_num_threads(wanted)
    logging.set_verbosity_error()  # no warnings about parameters that an encoding adds or drops
    try:
        with without_bars():
            yield
    finally:
        torch.set_num_threads(before)
        logging.set_verbosity(verbosity)


def device_named(name: str) -> Device:
    """Return the device of this name; UsageError if this process cannot use it."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise UsageError(
            "`device` cuda: needs a GPU that torch can use, but torch.cuda.is_available() is False "
            f"(torch {torch.__version__}: torch.version.cuda is {torch.version.cuda}); "
            "`device` cpu needs no GPU"
        )
    place = torch.device("cuda", torch.cuda.current_device())
    gpu, count = torch.cuda.get_device_name(place), torch.cuda.device_count()
    return Device(place, gpu, torch.bfloat16, read_every=16, count=count, compiles=True)
