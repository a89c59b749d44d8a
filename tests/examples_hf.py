"""Helpers of the tests of examples/hf_*.py: the files as modules, their models in float64."""

import importlib.util
import re
from pathlib import Path

import oracle
import torch
from hf_model import HEAD, logits, reference, worst
from processes import forked, output
from safetensors import safe_open

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(file.stem for file in EXAMPLES.glob("hf_*.py"))
INITIAL = [1, 2, 4, 8]  # scales of wavelet:scales=4


def load(name):
    """Return examples/NAME.py as a module, without running its main."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_processes(work, processes, folder):
    """Return what processes find that run a function of distributed_worker.py."""
    worker = Path(__file__).with_name("distributed_worker.py")
    output(worker, work, processes, folder, start=forked)
    return torch.load(folder / "found", weights_only=False)


def stored(file, words=""):
    """Return the tensors of a safetensors file whose names contain `words`."""
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys() if words in name}  # noqa: SIM118


def wavelet(scale=None, shift=None):
    """[W] in float64: with these scales and shifts of the columns, or the initial ones."""
    initial_scale, initial_shift = oracle.wavelet_grid(HEAD, INITIAL)
    scale = initial_scale if scale is None else scale.double().numpy()
    shift = initial_shift if shift is None else shift.double().numpy()

    def parts(length, **_):
        return {"relative": oracle.wavelet_table(range(length), scale, shift, "ricker", None)}

    return parts


def error(model, row, parts, got=None):
    """Return the largest error of a model's logits of one row, or of given logits."""
    wanted, _ = reference(model, row, parts)
    return worst(logits(model, row[None])[0] if got is None else got, wanted)


def numbers(text, words):
    """Return all numbers that follow `words` in a text."""
    number = r"\s*(\d[\d.]*(?:e[-+]\d+)?)"
    return [float(found) for found in re.findall(re.escape(words) + number, text)]


def bytes_row(length, seed=0):
    """Return random tokens of the byte models."""
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed))
