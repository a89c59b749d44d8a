"""The wavelet position encoding [W]: a relative encoding from a grid of scales and shifts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _checks
from .._wavelet import check_kind, wavelet_grid, wavelet_table
from .._wavelet_pywt import check_levels, is_family
from .._wavelet_registered import registered
from .base import Encoding, register_encoding
from .options import flag, items, option, positive

if TYPE_CHECKING:
    from torch import Tensor


def _count_or_scales(label: str, value: Any) -> int | tuple[float, ...]:
    if isinstance(value, numbers.Number | str):
        return _checks.integer(label, value, 1)
    scale: Callable[[str, Any], Any] = positive()
    return tuple(scale(label, item) for item in items(label, value))


@register_encoding
@dataclasses.dataclass(frozen=True)
class Wavelet(Encoding):
    """score(m, n) = (q_m.k_n + q_m.p_delta) / sqrt(d), p_delta[c] = psi((t - b_c) / a_c) [W].

    [W] is Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004. q and k are not rotated; p is shared by all heads and layers. Column
    c = i * (d/s) + j has scale a_i and shift b_j = j, for s scales that divide d.

    Parameters
    ----------
    kind : str
        The mother wavelet psi: ricker, gaussian, morlet or haar, a name given to
        `wavepe.register_wavelet`, or a discrete wavelet of PyWavelets such as db4, for which
        p_delta[c] is sample number t - b_c of ``wavefun(level)``'s psi.
    scales : int or list of float
        The number s of scales min_scale * 2^0 .. 2^(s-1), or the scales themselves. The largest
        should be at most about a quarter of the training length. For PyWavelets these are levels:
        1..s, or the levels themselves, from 1 to 16.
    min_scale : float
        The smallest scale, where `scales` is a number.
    fixed_scale : bool
        All s scales are `min_scale`: the restriction that resembles RoPE.
    mirrored : bool, optional
        t = -delta instead of t = delta; None is True for haar, whose formula is written for
        negative t, and False for the others.
    learned : bool
        Scale and shift of each column are trained, from these as initial values. For kinds with a
        derivative: ricker, gaussian, morlet, and registered ones that gave theirs.
    """

    name = "wavelet"
    entry = "relative"

    kind: str = option("ricker", check_kind)
    scales: int | tuple[float, ...] = option(8, _count_or_scales)
    min_scale: float = option(1.0, positive())
    fixed_scale: bool = False
    mirrored: bool | None = option(None, flag)
    learned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scales()
        if is_family(self.kind):
            self._check_levels()
        if self.learned and (reason := self._unlearnable()):
            raise ValueError(
                f"wavelet learned=true needs a gradient, but kind={self.kind} {reason}"
            )

    def _check_scales(self) -> None:
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

    def _check_levels(self) -> None:
        if self.min_scale != 1 or self.fixed_scale:
            raise ValueError(
                f"wavelet min_scale and fixed_scale mean nothing to kind={self.kind}, whose scales "
                "are levels: give scales=s for the levels 1..s, or a list of levels"
            )
        check_levels(f"wavelet scales of kind={self.kind}", self._levels())

    def _levels(self) -> np.ndarray:
        """Return the levels of a PyWavelets kind; of a number of them its ends, to check it."""
        last = self.scales
        return np.array(last if isinstance(last, tuple) else [1, last], dtype=np.float64)

    def _unlearnable(self) -> str | None:
        """Say why the kind has no gradient to scale and shift; None where it has one."""
        if self.kind == "haar":
            return "is piecewise constant: its gradient is zero everywhere"
        if is_family(self.kind):
            return "is sampled at integer levels and shifts"
        own = registered(self.kind)
        if own is not None and own.derivative is None:
            return "was registered without one: wavepe.register_wavelet(..., derivative=...)"
        return None

    def grid(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scale (level for PyWavelets) and shift of each column, float64 (head_dim,).

        ValueError where the head size is not divisible by the number of scales.
        """
        scales: Any = self.scales
        count = len(scales) if isinstance(scales, tuple) else scales
        head_dim = _checks.integer("wavelet head_dim", head_dim, 1)
        if head_dim % count:
            fitting = next(n for n in range(min(count, head_dim), 0, -1) if head_dim % n == 0)
            raise ValueError(
                f"head size {head_dim} is not divisible by {count} scales: choose scales, e.g. "
                f"wavelet:scales={fitting}"
            )
        if is_family(self.kind) and not isinstance(scales, tuple):
            scales = range(1, scales + 1)
        return wavelet_grid(head_dim, scales, self.min_scale, fixed_scale=self.fixed_scale)

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        length = _checks.integer("wavelet length", length, 1)
        first = 0 if _checks.flag("causal", causal) else 1 - length
        scale, shift = self.grid(head_dim)
        offsets = np.arange(first, length)
        p = wavelet_table(offsets, scale, shift, kind=self.kind, mirrored=self.mirrored)
        return p, first, "zero"

    def parameters(self, head_dim: int, heads: int) -> dict[str, np.ndarray]:
        """Return the initial "scale" and "shift", both float64 (head_dim,): those of `table`.

        All heads share them. NotImplementedError without ``learned=true``.
        """
        if not self.learned:
            return super().parameters(head_dim, heads)
        scale, shift = self.grid(head_dim)
        return {"scale": scale, "shift": shift}

    def learned_table(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        if not self.learned:
            return super().learned_table(length, parameters, causal=causal)
        import torch

        from .. import ops

        scale, shift = parameters["scale"], parameters["shift"]
        first = 0 if causal else 1 - length
        offsets = torch.arange(first, length, device=scale.device)
        p = ops.wavelet_table(offsets, scale, shift, kind=self.kind, mirrored=self.mirrored)
        return p, first, "zero"
