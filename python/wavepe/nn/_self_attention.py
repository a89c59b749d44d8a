"""Self-attention with any position encoding, with its projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common import checks
from ..encodings import Encoding
from ._attention import Attention
from ._cache import KVCache
from ._sequences import check_shape


class SelfAttention(Attention):
    """Apply multi-head self-attention with any position encoding.

    It is `Attention` with projections: ``y = o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))``.

    Parameters
    ----------
    dim : int
        Size of a token's vector.
    heads : int
        Number of query heads H. It divides `dim` unless `head_dim` is given.
    kv_heads, encoding, causal, dropout, trained_length, device, dtype : optional
        As in `Attention`, with its errors, but the projections have any dtype.
    head_dim : int, optional
        Head size d; None is dim / heads.
    bias : bool
        Whether the four projections have biases.
    window : int, optional
        Hide keys at a distance of `window` tokens or more before the query.

    Examples
    --------
    >>> import torch
    >>> from wavepe.nn import SelfAttention
    >>> attention = SelfAttention(64, heads=4, kv_heads=2, encoding="wavelet")
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        encoding: str | Mapping[str, Any] | Encoding = "wavelet",
        causal: bool = True,
        dropout: float = 0.0,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        window: int | None = None,
        trained_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dim, heads = checks.integer("dim", dim, 1), checks.integer("heads", heads, 1)
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim={dim}, got {heads}; or give head_dim")
        super().__init__(
            encoding, dim // heads if head_dim is None else head_dim, heads, kv_heads,
            causal=causal, dropout=dropout, trained_length=trained_length, dim=dim, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.dim: int = dim
        self.window = None if window is None else checks.integer("window", window, 0)
        bias = checks.flag("bias", bias)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, kv_inner = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(self.dim, inner, bias, **factory)
        self.k_proj = nn.Linear(self.dim, kv_inner, bias, **factory)
        self.v_proj = nn.Linear(self.dim, kv_inner, bias, **factory)
        self.o_proj = nn.Linear(inner, self.dim, bias, **factory)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return attention of the tokens x to themselves, and to the tokens in the cache.

        Parameters
        ----------
        x : Tensor (B, L, dim)
            The vectors of L tokens.
        key_mask, positions, segments, cache : optional
            As in `Attention.forward`, with n = L. Errors are those of this method, too.

        Returns
        -------
        y : Tensor (B, L, dim)
            For a token that sees no token, it is `o_proj` of zeros.
        """
        check_shape("x", x, "B", "L", self.dim)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = super().forward(
            q, k, v, positions=positions, cache=cache, key_mask=key_mask, segments=segments,
            window=self.window, x=x,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def reset_parameters(self) -> None:
        """Set all parameters to the initial values of a new module."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        super().reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.dim}, {super().extra_repr()}, window={self.window}"
