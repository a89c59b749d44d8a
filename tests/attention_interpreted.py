"""`interpreted` of benchmarks/interpreted.py: the GPU's kernels of attention on the CPU."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")
assert os.environ.get("TRITON_INTERPRET") == "1", (
    "tests/conftest.py sets it before Triton is loaded"
)

sys.path.insert(0, str(Path(__file__).parent.parent))  # no part of the installed package

from benchmarks.interpreted import interpreted

__all__ = ["interpreted"]
