"""Pictures of what the analyses return (needs matplotlib, of the extra "plot")."""

from ._models import attention_maps, band_heatmap, needle_grid, sweep_curve
from ._perplexity import perplexity_by_length

__all__ = [
    "attention_maps",
    "band_heatmap",
    "needle_grid",
    "perplexity_by_length",
    "sweep_curve",
]
