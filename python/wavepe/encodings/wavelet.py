"""The wavelet position encoding [W]: a relative encoding from a grid of scales and shifts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import numpy as np

from .. import _checks
from .._wavelet import KINDS, wavelet_grid, wavelet_table
from .base import Encoding, register_encoding
from .options import flag, items, one_of, option, positive


def _count_or_scales(label: str, value: Any) -> int | tuple[float, ...]:
    if isinstance(value, numbers.Number | str):
        return _checks.integer(label, value, 1)
    return tuple(positive()(label, item) for item in items(label, value))


@register_encoding
@dataclasses.dataclass(frozen=True)
class Wavelet(Encoding):
    """score(m, n) = (q_m.k_n + q_m.p_delta) / sqrt(d), p_delta[c] = psi((t - b_c) / a_c) [W].

    [W] is Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004. q and k are not rotated; p is shared by all heads and layers; nothing is
    learned. Column c = i * (d/s) + j has scale a_i and shift b_j = j, for s scales that divide d.

    Parameters
    ----------
    kind : str
        The mother wavelet psi: ricker, gaussian, morlet or haar.
    scales : int or list of float
        The number s of scales min_scale * 2^0 .. 2^(s-1), or the scales themselves. The largest
        should be at most about a quarter of the training length.
    min_scale : float
        The smallest scale, where `scales` is a number.
    fixed_scale : bool
        All s scales are `min_scale`: the restriction that resembles RoPE.
    mirrored : bool, optional
        t = -delta instead of t = delta; None is True for haar, whose formula is written for
        negative t, and False for the others.
    """

    name = "wavelet"
    entry = "relative"

    kind: str = option("ricker", one_of(*KINDS))
    scales: int | tuple[float, ...] = option(8, _count_or_scales)
    min_scale: float = option(1.0, positive())
    fixed_scale: bool = False
    mirrored: bool | None = option(None, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scales, tuple):
            if self.min_scale != 1 or self.fixed_scale:
                raise ValueError(
                    "wavelet min_scale and fixed_scale go with a number of scales, "
                    f"not with the list {list(self.scales)}"
                )
        elif not self.fixed_scale:
            try:
                math.ldexp(self.min_scale, self.scales - 1)
            except OverflowError:
                raise ValueError(
                    "wavelet scales: the largest, min_scale * 2^(scales-1), must be finite in "
                    f"float64; got scales={self.scales}, min_scale={self.min_scale}"
                ) from None

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        """Table p, its first delta, and "zero".

        Parameters
        ----------
        length : int
            The sequence length; p holds every delta that occurs in it.
        head_dim : int
            A multiple of the number of scales, else ValueError.
        causal : bool
            Rows for delta = 0..length-1; otherwise for 1-length..length-1.

        Returns
        -------
        p : ndarray, float32 (w, head_dim)
        first : int
        beyond : str
        """
        length = _checks.integer("wavelet length", length, 1)
        first = 0 if causal else 1 - length
        scale, shift = wavelet_grid(
            head_dim, self.scales, self.min_scale, fixed_scale=self.fixed_scale
        )
        offsets = np.arange(first, length)
        p = wavelet_table(offsets, scale, shift, kind=self.kind, mirrored=self.mirrored)
        return p, first, "zero"
