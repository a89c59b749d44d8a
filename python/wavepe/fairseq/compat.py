"""Repairs that let fairseq 0.12 run on today's Python, NumPy and torch.

Importing this module imports fairseq. Each part repairs one error, and does no harm if fairseq has
repaired it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from .. import ops  # noqa: F401 - its error says how to install torch
from ..common.runtime import command_for

import torch  # isort: skip

INSTALL = (
    "wavepe.fairseq needs fairseq: with torch installed, pip install --no-deps fairseq==0.12.2 "
    "&& " + command_for("fairseq")
)


@contextlib.contextmanager
def allow_mutable_defaults() -> Iterator[None]:
    """Allow dataclasses of fairseq and Hydra as default values of fields, within the block.

    The error: "ValueError: mutable default <class 'fairseq.dataclass.configs.CommonConfig'> for
    field common is not allowed". From Python 3.11 on, a default must be hashable, and a dataclass
    with __eq__ is not. fairseq 0.12.2 and hydra-core 1.0 use such defaults and never change them.
    """
    original = dataclasses.dataclass

    def hashable(cls: Any) -> Any:
        if cls.__module__.partition(".")[0] in ("fairseq", "hydra") and cls.__hash__ is None:
            cls.__hash__ = object.__hash__
        return cls

    @functools.wraps(original)
    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        built: Any = original(cls, **options)
        return hashable(built) if cls is not None else lambda cls: hashable(built(cls))

    with mock.patch.object(dataclasses, "dataclass", dataclass):
        yield


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace ``owner.name`` by the decorated function, which gets the original first."""

    def replace(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    return replace


# For ``--sample-break-mode eos``, which generation uses too: "AttributeError: module 'numpy' has no
# attribute 'compat'".
setattr(np, "compat", types.SimpleNamespace(long=int))  # noqa: B010 - mypy knows NumPy 2

# For checkpoints of translation models: "UnpicklingError: ... Unsupported global: GLOBAL
# argparse.Namespace", from torch 2.6 on.
torch.serialization.add_safe_globals([argparse.Namespace])

try:
    with allow_mutable_defaults():
        importlib.import_module("fairseq")  # with all its models
except ModuleNotFoundError as error:
    here = error.name != "fairseq"
    what = f"fairseq needs {error.name}: {command_for('fairseq')}" if here else INSTALL
    raise ImportError(what) from error
utils = importlib.import_module("fairseq.distributed.utils")
models = importlib.import_module("fairseq.models.distributed_fairseq_model")


@wrap(utils, "_broadcast_object_slow")
def broadcast_object(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a rank unpickle the configuration that another rank of the same run sends.

    The error: "UnpicklingError: Weights only load failed ... omegaconf.dictconfig.DictConfig". From
    torch 2.6 on, torch.load reads tensors only. fairseq broadcasts other objects of a checkpoint
    when ranks resume.
    """
    load = functools.partial(torch.load, weights_only=False)
    with mock.patch.object(torch, "load", load):
        return original(*args, **kwargs)


@wrap(models, "DistributedDataParallel")
def distributed(original: Any, module: torch.nn.Module, **options: Any) -> Any:
    """Let ``--ddp-backend pytorch_ddp``, the default, work on the CPU.

    The error: "ValueError: DistributedDataParallel device_ids and output_device arguments only
    work with single-device/multiple-device GPU modules or CPU modules, but got device_ids [0]".
    """
    if next(module.parameters()).device.type == "cpu":
        options |= {"device_ids": None, "output_device": None}
    return original(module=module, **options)


@wrap(utils, "call_main")
def call_main(original: Any, cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
    """Let ``torchrun`` start processes on the CPU, and raise if fairseq would start none.

    fairseq starts one process for each GPU. Without a GPU and with ``--distributed-world-size``
    above 1, it ends at once: exit code 0, nothing trained. fairseq-fixed does not see that torchrun
    started its processes. Either each of them trains alone and writes the same checkpoint, or it
    divides by the number of GPUs.
    """
    _launch(cfg.distributed_training)
    return original(cfg, main, **kwargs)


def processes_launched() -> int:
    """Return the processes that fairseq joins: it ignores a WORLD_SIZE without the others."""
    joined = all(key in os.environ for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"))
    return int(os.environ["WORLD_SIZE"]) if joined else 1


def _launch(cfg: Any) -> None:
    """Set up a process of torchrun; ValueError if fairseq would start no process."""
    launched = processes_launched()
    if launched > 1 and cfg.distributed_init_method is None:
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = launched
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.distributed_no_spawn = True
    count = cfg.distributed_world_size
    if count > 1 and not (cfg.distributed_no_spawn or cfg.tpu or torch.cuda.device_count()):
        raise ValueError(
            f"--distributed-world-size {count}: fairseq starts one process per GPU, and there is "
            f"no GPU here; write torchrun --nproc-per-node {count} --no-python before the command, "
            "and add --cpu --distributed-backend gloo"
        )
