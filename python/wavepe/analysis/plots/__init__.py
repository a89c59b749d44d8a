"""Draw encodings and the results of the analyses (needs matplotlib, from the extra "plot").

Each function writes a picture to the file `path`, whose ending names the format: .png, .pdf or
.svg.

The functions for encodings return a dict with the numbers that they draw, and share their options:
`encodings`, one spec or a list of one to six, where learned encodings show their initial values;
`dim`, the size of the head, up to 1024, by default a multiple of the number of scales; `heads`, up
to 32; and `length`, the number of distances from 0 on, 2 to 65536 unless the function says
otherwise.

The functions for measurements return None and take a `title`, the text above the picture.

All of them raise ImportError without matplotlib, ValueError for a spec, size or array that cannot
be drawn, and TypeError for an argument of a wrong type.
"""

from ._encodings import bias, table, wavelets
from ._measurements import (
    accuracy_grid,
    attention_maps,
    band_heatmap,
    needle_grid,
    perplexity_by_length,
)

__all__ = [
    "accuracy_grid", "attention_maps", "band_heatmap", "bias", "needle_grid",
    "perplexity_by_length", "table", "wavelets",
]  # fmt: skip
