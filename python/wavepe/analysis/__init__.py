"""Analyses of trained models: functions that return plain data; ``plots`` draws it.

The matrices and bands need NumPy alone; what runs a model imports torch when it is called.
"""

from ._bands import band_variance, predicted_band
from ._matrices import (
    multiscale_rope_matrix,
    rope_matrix,
    rope_wavelet,
    rope_wavelet_matrix,
    shift_matrix,
    wavelet_transform,
)
from ._perplexity import perplexity

__all__ = [
    "band_variance",
    "multiscale_rope_matrix",
    "perplexity",
    "predicted_band",
    "rope_matrix",
    "rope_wavelet",
    "rope_wavelet_matrix",
    "shift_matrix",
    "wavelet_transform",
]
