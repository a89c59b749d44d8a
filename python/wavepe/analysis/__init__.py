"""Analyse trained models: functions that return plain data, which ``plots`` draws.

The functions for matrices and predicted bands need NumPy only. Functions that run a `model` import
torch when they are called. It runs in evaluation mode without gradients and is restored at the end,
also after an error; `tokens` is a torch.Tensor (n,) of token ids in any integer dtype.

All functions raise TypeError for an argument of a wrong type, ValueError for a value, shape or
token id out of range, and ImportError where torch or transformers is missing. Names that are not in
`__all__` serve the other rooms of wavepe.
"""

from ._attention_map import attention_map, attention_window
from ._bands import band_variance, measured_band, predicted_band
from ._matrices import (
    multiscale_rope_matrix,
    rope_matrix,
    rope_wavelet,
    rope_wavelet_matrix,
    shift_matrix,
    wavelet_transform,
)
from ._needle import STATEMENT_LENGTH as STATEMENT_LENGTH
from ._needle import STATEMENT_SIGNS as STATEMENT_SIGNS
from ._needle import needle
from ._perplexity import PROTOCOLS as PROTOCOLS
from ._perplexity import perplexity
from ._perplexity import perplexity_of as perplexity_of

__all__ = [
    "attention_map",
    "attention_window",
    "band_variance",
    "measured_band",
    "multiscale_rope_matrix",
    "needle",
    "perplexity",
    "predicted_band",
    "rope_matrix",
    "rope_wavelet",
    "rope_wavelet_matrix",
    "shift_matrix",
    "wavelet_transform",
]
