"""The kernels in use, and what this build of wavepe contains."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

from .. import _numpy
from . import checks

_pip, _extras = "pip install", "pip install"
try:
    _installed = distribution("wavepe")
    __version__ = _installed.version
    if (_installed.read_text("INSTALLER") or "").strip() == "uv":
        _pip, _extras = "uv pip install", "uv pip install --no-build-isolation"
except PackageNotFoundError:  # wavepe runs from a source tree that was never installed
    __version__ = "0+unknown"

_WHERE = "(in the folder of the wavepe checkout)"  # wavepe is on no package index
# An isolated build may not see torch, as pip's hides PYTHONPATH; and nothing would say so.
_AGAIN = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps ."
BUILD_AGAIN = f'{_pip} "setuptools>=77" && {_pip} {_AGAIN} {_WHERE}'


def command_for(extras: str) -> str:
    """Return the command that installs optional parts."""
    return f'{_extras} ".[{extras}]" {_WHERE}'


def variants() -> list[str]:
    """Return the instruction sets that this build contains and this CPU supports.

    Returns
    -------
    names : list of str
        Some of "portable", "avx2" and "avx512", in this order.
    """
    return _numpy.variants()


def variant() -> str:
    """Return the name of the instruction set in use.

    NumPy functions and torch operators use the same one. At import wavepe takes the last of
    `variants`, unless the environment variable WAVEPE_VARIANT names another.

    Returns
    -------
    name : str
        "portable", "avx2" or "avx512".
    """
    return _numpy.variant()


def use_variant(name: str) -> None:
    """Switch all kernels of this process to another instruction set.

    NumPy functions and torch operators switch together. The environment variable WAVEPE_VARIANT
    does the same at import. A call that runs in another thread finishes with the kernels that it
    began with; of `wavepe.rope` or a wavelet, each piece does.

    Parameters
    ----------
    name : str
        "portable", "avx2" or "avx512".

    Raises
    ------
    TypeError
        If `name` is not a string.
    ValueError
        If this build does not contain the variant, or this CPU does not support it.

    Examples
    --------
    >>> import wavepe
    >>> before = wavepe.variant()
    >>> wavepe.use_variant("portable")
    >>> wavepe.variant()
    'portable'
    >>> wavepe.use_variant(before)
    """
    if isinstance(name, str):
        if _numpy.use_variant(name):
            return
        if name in ("portable", "avx2", "avx512"):
            raise ValueError(
                f"variant {name!r} cannot run here: this CPU does not have it, or this build does "
                f"not contain it; use one of {', '.join(variants())}"
            )
    checks.choice("variant", name, variants())


def build_info() -> dict:
    """Return a description of this build of wavepe.

    Returns
    -------
    info : dict
        "version" of wavepe, "variants" as `variants` returns them, "torch" (whether its operators
        were built), "cuda_archs" (the GPU architectures of the CUDA kernels), and "compiler" and
        "flags" of the C code: those of CFLAGS and Python's own, too, as far as they are in force.
    """
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
