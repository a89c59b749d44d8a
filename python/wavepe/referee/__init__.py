"""The RoPE referee: which rotation a model was trained with, and whether an engine computes it."""

from .check import Verdict
from .report import RopeReport, rope_report

__all__ = ["RopeReport", "Verdict", "rope_report"]
