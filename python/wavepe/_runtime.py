"""Which kernels run, and what this build holds."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from . import _checks, _numpy

try:
    __version__ = version("wavepe")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_WHERE = "(in the folder of the wavepe checkout)"  # wavepe is on no package index
BUILD_AGAIN = f"pip install --no-cache-dir --force-reinstall --no-deps . {_WHERE}"


def command_for(extras: str) -> str:
    """The command that brings optional parts."""
    return f'pip install ".[{extras}]" {_WHERE}'


def variants() -> list[str]:
    """The instruction sets this build holds and this CPU runs, in rising order."""
    return _numpy.variants()


def variant() -> str:
    """The instruction set in use, by NumPy functions and torch ops alike."""
    return _numpy.variant()


def use_variant(name: str) -> None:
    """Switch all kernels of this process to "portable", "avx2" or "avx512".

    The environment variable WAVEPE_VARIANT does the same at import. ValueError for a variant that
    this build does not hold or this CPU does not run. Calls under way in other threads end with
    the kernels that they began with; of `wavepe.rope` on several threads, each piece does.
    """
    if not isinstance(name, str) or not _numpy.use_variant(name):
        _checks.choice("variant", name, variants())


def build_info() -> dict:
    """This build: version, variants (that this CPU runs), torch, cuda_archs, compiler, flags."""
    return {
        "version": __version__,
        "variants": variants(),
        "torch": find_spec("wavepe._torch") is not None,
        "cuda_archs": _numpy.cuda_archs().split(),
        "compiler": _numpy.compiler(),
        "flags": _numpy.flags(),
    }


if os.environ.get("WAVEPE_VARIANT"):
    try:
        use_variant(os.environ["WAVEPE_VARIANT"])
    except ValueError as error:
        raise ValueError(f"environment variable WAVEPE_VARIANT: {error}") from None
