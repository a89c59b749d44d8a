"""The wavelet position encoding [W]: wavelets of the distance on a grid of scales and shifts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.relative_bias import Table
from ..arrays.wavelet import check_kind, wavelet_grid, wavelet_table
from ..arrays.wavelet_pywt import check_levels, is_family
from ..arrays.wavelet_registered import registered
from ..common import checks
from .base import Encoding
from .methods import Arrays, Query, Tensor, Tensors, input_queries, once
from .options import flag, integer, items, option, positive
from .register import register_encoding


def _count_or_scales(label: str, value: Any) -> int | tuple[float, ...]:
    if isinstance(value, numbers.Number | str):
        return checks.integer(label, value, 1)
    scale: Callable[[str, Any], Any] = positive()
    return tuple(scale(label, item) for item in items(label, value))


@register_encoding
class Wavelet(Encoding):
    """Add the product of the query with wavelets of the distance to the score.

    score(m, n) = (q_m.k_n + q_m.p_delta) / sqrt(d), where p_delta[c] = psi((t - b_c) / a_c) and t
    is the distance delta = m - n. Column c = i * (d/s) + j has the scale a_i and the shift b_j = j;
    the number s of scales divides the head size d. q and k are not rotated. All heads and layers
    use the same p.

    Parameters
    ----------
    kind : str
        The mother wavelet psi: "ricker", "gaussian", "morlet", "haar", a name given to
        `wavepe.register_wavelet`, or a discrete wavelet of PyWavelets such as "db4". For a wavelet
        of PyWavelets, p_delta[c] is sample number t - b_c of the psi of ``wavefun(level)``.
    scales : int or list of float
        Either the number s of scales, which are then min_scale * 2^0 to min_scale * 2^(s-1), or
        the scales themselves. The largest should be at most about a quarter of the training
        length. For a wavelet of PyWavelets these are levels from 1 to 16: a number s stands for
        the levels 1..s.
    min_scale : float
        The smallest scale. It may be given only where `scales` is a number.
    fixed_scale : bool
        Use `min_scale` for all s scales. This restricted form resembles RoPE.
    mirrored : bool, optional
        True takes t = -delta instead of t = delta. None is True for haar, whose formula is written
        for negative t, and False otherwise.
    learned : bool
        Train the scale and the shift of each column, which begin at the values above. The kind
        must have a derivative: ricker, gaussian, morlet, or a registered wavelet with one.
    biases : bool
        Train u and v (heads, head size), which begin at 0:
        score = ((q_m + u).k_n + (q_m + v).p_delta) / sqrt(d), as in Transformer-XL.
    projection : bool
        Train a matrix W (head size, head size) for each head, which begins as the identity: the
        query of the table is q_m W, or (q_m + v) W with biases. The table stays constant.
    rank : int, optional
        The number of columns of the table, if it is not the head size. They are read through a
        projection W (head size, rank), or by the input.
    from_input : bool
        The input x of the attention layer reads the table, in place of the query:
        score = q_m.k_n / sqrt(d) + (W x_m).p_delta. Each head has a W (columns, dim), which begins
        at zero. `relative` does the same with a table that is learned.
    shared : bool
        All layers share u, v and W. Without it each layer has its own.

    Raises
    ------
    TypeError
        If an option has a wrong type.
    ValueError
        If an option has a wrong value, or if options contradict each other.

    References
    ----------
    Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004.
    """

    name = "wavelet"

    kind: str = option("ricker", check_kind)
    scales: int | tuple[float, ...] = option(8, _count_or_scales)
    min_scale: float = option(1.0, positive())
    fixed_scale: bool = False
    mirrored: bool | None = option(None, flag)
    learned: bool = False
    biases: bool = False
    projection: bool = False
    rank: int | None = option(None, integer(1))
    from_input: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scales()
        if self.learned and (reason := self._unlearnable()):
            raise ValueError(
                f"wavelet learned=true needs a gradient, but kind={self.kind} {reason}"
            )
        if self.from_input and (self.biases or self.projection):
            raise ValueError(
                "wavelet from_input=true lets the layer's input read the table, and not the query: "
                "leave out biases=true and projection=true"
            )
        if self.shared and not (self.biases or self._projects):
            raise ValueError("wavelet shared=true needs biases=true or projection=true")

    @property
    def _projects(self) -> bool:
        return self.projection or (self.rank is not None and not self.from_input)

    @once
    def learns(self) -> tuple[str, ...]:
        query = ("query",) * (self.biases or self._projects)
        return ("table",) * self.learned + query + ("input_query",) * self.from_input

    @property
    def per_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.from_input:
            return ("r_proj",)
        if self.shared:
            return ()
        return ("u", "v") * self.biases + ("projection",) * self._projects

    def _check_scales(self) -> None:
        scales: Any = self.scales
        has_levels, listed = is_family(self.kind), isinstance(scales, tuple)
        if (has_levels or listed) and (self.min_scale != 1 or self.fixed_scale):
            got = f"kind={self.kind} has levels as scales" if has_levels else "these are a list"
            raise ValueError(
                f"wavelet min_scale and fixed_scale need a number of scales, but {got}"
            )
        if has_levels:
            ends = scales if listed else (1, scales)
            check_levels(f"wavelet scales of kind={self.kind}", np.array(ends, dtype=np.float64))
        elif not (listed or self.fixed_scale) and math.frexp(self.min_scale)[1] + scales > 1025:
            raise ValueError(
                "wavelet scales: the largest, min_scale * 2^(scales-1), must be finite in float64; "
                f"got scales={scales}, min_scale={self.min_scale}"
            )

    def _unlearnable(self) -> str | None:
        """Return why the kind has no gradient in scale and shift; None if it has one."""
        if self.kind == "haar":
            return "is piecewise constant: its gradient is zero everywhere"
        if is_family(self.kind):
            return "is sampled at integer levels and shifts"
        users = registered(self.kind)
        if users is not None and users.derivative is None:
            return (
                "was registered without a derivative: wavepe.register_wavelet(..., derivative=...)"
            )
        return None

    def table_columns(self, head_dim: int) -> int:
        return head_dim if self.rank is None else self.rank

    def grid(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scale and the shift of each column, both float64 (head_dim,).

        For a wavelet of PyWavelets the scales are levels. ValueError if the head size, or the rank,
        is not divisible by the number of scales.
        """
        scales: Any = self.scales
        count = len(scales) if isinstance(scales, tuple) else scales
        columns = self.table_columns(checks.integer("wavelet head_dim", head_dim, 1))
        if columns % count:
            fitting = [n for n in range(1, columns + 1) if columns % n == 0]
            size = "head size" if self.rank is None else "rank"
            near = [n for n in fitting if n < count][-1:] + [n for n in fitting if n > count][:1]
            raise ValueError(
                f"{size} {columns} is not divisible by {count} scales: choose "
                + " or ".join(f"wavelet:scales={n}" for n in near)
            )
        if is_family(self.kind) and not isinstance(scales, tuple):
            scales = range(1, scales + 1)
        return wavelet_grid(columns, scales, self.min_scale, fixed_scale=self.fixed_scale)

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        length = checks.integer("wavelet length", length, 1)
        first = 0 if checks.flag("causal", causal) else 1 - length
        scale, shift = self.grid(head_dim)
        offsets = np.arange(first, length)
        p = wavelet_table(offsets, scale, shift, kind=self.kind, mirrored=self.mirrored)
        return Table(p, first)

    def parameters(self, head_dim: int, heads: int, dim: int | None = None) -> Arrays:
        """Return the initial values of what the options let a model learn, float64.

        "scale" and "shift" (columns,) are those of `grid`. "u" and "v" (heads, head_dim) are
        zeros, and "projection" (heads, head_dim, columns) holds identities. With a rank, column c
        takes element c * head_dim / rank of the query, rounded down. "r_proj" (heads, columns, dim)
        is zero.
        """
        if not self.learns:
            return super().parameters(head_dim, heads)
        scale, shift = self.grid(head_dim)
        heads = checks.integer("wavelet heads", heads, 1)
        initial = {"scale": scale, "shift": shift} if self.learned else {}
        if self.biases:
            initial |= {key: np.zeros((heads, head_dim)) for key in "uv"}
        if self._projects:
            columns = len(scale)
            matrix = np.zeros((heads, head_dim, columns))
            matrix[:, np.arange(columns) * head_dim // columns, np.arange(columns)] = 1
            initial["projection"] = matrix
        if self.from_input:
            size = (heads, len(scale), checks.integer("wavelet dim", dim, 1))
            initial["r_proj"] = np.zeros(size)
        return initial

    def learned_query(self, parameters: Tensors) -> Query:
        if "query" not in self.learns:
            return super().learned_query(parameters)
        return Query(parameters.get("u"), parameters.get("v"), parameters.get("projection"))

    def input_query(self, x: Tensor, parameters: Tensors) -> Tensor:
        if not self.from_input:
            return super().input_query(x, parameters)
        return input_queries(x, parameters["r_proj"])

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        if not self.learned:
            return super().learned_table(length, parameters, causal=causal)
        import torch

        from ..ops._wavelet import wavelet_table as table_of_tensors

        scale, shift = parameters["scale"], parameters["shift"]
        first = 0 if causal else 1 - length
        offsets = torch.arange(first, length, device=scale.device)
        p = table_of_tensors(offsets, scale, shift, kind=self.kind, mirrored=self.mirrored)
        return Table(p, first)


def scale_hint(encoding: Encoding, head_dim: int, length: float) -> str:
    """Return a warning, or "", for a largest scale above a quarter of the trained length [W]."""
    for part in encoding.parts:
        if isinstance(part, Wavelet) and not is_family(part.kind):
            largest = part.grid(head_dim)[0].max()
            if largest > length / 4:
                return (
                    f"the largest scale is {largest:g}, which is above {length / 4:g}, a "
                    "quarter of the trained length: training sees only a part of its wavelets"
                )
    return ""
