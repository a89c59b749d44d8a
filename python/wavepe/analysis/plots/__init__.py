"""Pictures of encodings and of what the analyses return (needs matplotlib, of the extra "plot").

The functions write a picture to a file. Those of encodings return the numbers that they draw.
"""

from ._absolute import absolute
from ._accuracy import accuracy_grid
from ._bias import bias
from ._perplexity import perplexity_by_length
from ._rotation import decay, matrices, wavelengths
from ._wavelets import table, transform, wavelets

__all__ = [
    "absolute",
    "accuracy_grid",
    "bias",
    "decay",
    "matrices",
    "perplexity_by_length",
    "table",
    "transform",
    "wavelengths",
    "wavelets",
]
