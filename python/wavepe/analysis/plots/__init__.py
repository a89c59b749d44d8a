"""Draw encodings and the results of the analyses (needs matplotlib, from the extra "plot").

Each function writes a picture to the file `path`, whose ending names the format: .png, .pdf or
.svg. The functions for encodings take `encodings`, one spec or a list of one to six, and return a
dict with the numbers that they draw. The functions for measurements return None and take a `title`,
the text above the picture. Numbers of tokens are at most 65536 and numbers of dims at most 1024,
unless a function says less.

All of them raise ImportError without matplotlib, ValueError for a spec, size or array that cannot
be drawn, and TypeError for an argument of a wrong type.
"""

from ._absolute import absolute
from ._bias import bias
from ._models import attention_maps, band_heatmap
from ._perplexity import perplexity_by_length
from ._rotation import decay, wavelengths
from ._shares import accuracy_grid, needle_grid
from ._wavelets import table, wavelets

__all__ = [
    "absolute",
    "accuracy_grid",
    "attention_maps",
    "band_heatmap",
    "bias",
    "decay",
    "needle_grid",
    "perplexity_by_length",
    "table",
    "wavelengths",
    "wavelets",
]
