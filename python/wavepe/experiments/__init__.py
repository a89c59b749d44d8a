"""Experiments: what ``wavepe compare`` and ``wavepe adapt`` do, as functions.

`compare` trains one small model for each position encoding. `adapt` swaps the encoding of a trained
model in a folder. Both need torch, transformers and rich; `compare` needs matplotlib, too.
"""

from ..common.errors import CommandError
from .adaptation import Adaptation, adapt
from .report import Results
from .run import compare

__all__ = ["Adaptation", "CommandError", "Results", "adapt", "compare"]
