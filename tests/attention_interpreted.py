"""`interpreted` of benchmarks/interpreted.py: the GPU's kernels of attention on the CPU."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("TRITON_INTERPRET=0 lets Triton compile", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))  # no part of the installed package

from benchmarks.interpreted import interpreted

__all__ = ["interpreted"]
