"""Self-attention with any position encoding, for models of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..encodings import Encoding
from ._attention import Attention
from ._cache import KVCache
from ._sequences import check_tokens


class SelfAttention(Attention):
    """Multi-head self-attention whose position encoding is named by a spec.

    ``y = o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))``, with the encoding inside: wavelets
    [W], RoPE [R], ALiBi [A], Shaw [S], Transformer-XL [X], none, or one of your own. Computed by
    `wavepe.ops.attention`. It is `Attention`, with the projections around it: what that says of
    constants, and of what is learned, holds here.

    Parameters
    ----------
    dim : int
        Size of a token's vector.
    heads : int
        Number of query heads H; divides `dim` unless `head_dim` is given.
    kv_heads : int, optional
        Number of key and value heads, a divisor of `heads` (grouped queries); None is `heads`.
    encoding : str, dict or Encoding
        What `wavepe.encoding` reads. Absolute ones are added to token embeddings and refused here.
    causal : bool
        A token sees itself and those before it; else all of them.
    dropout : float
        Share of the attention weights that are dropped in training mode.
    head_dim : int, optional
        Head size d; None is dim / heads.
    bias : bool
        Biases in the four projections.
    window : int, optional
        Keys at a distance of `window` tokens or more before the query are hidden.
    max_length : int, optional
        The trained length, for the rope types that need it.
    device, dtype : optional
        Of the parameters, as in torch's own modules.

    Raises
    ------
    ValueError, TypeError
        Sizes that do not fit together, an absolute encoding, wrong options.

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
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dim, heads = _checks.integer("dim", dim, 1), _checks.integer("heads", heads, 1)
        if head_dim is None and dim % heads:
            raise ValueError(f"heads must divide dim={dim}, got {heads}; or give head_dim")
        if max_length is not None:
            max_length = _checks.integer("max_length", max_length, 1)
        super().__init__(
            encoding,
            dim // heads if head_dim is None else head_dim,
            heads,
            kv_heads,
            causal=causal,
            dropout=dropout,
            trained_length=max_length,
            device=device,
            dtype=dtype,
        )
        self.dim = dim
        self.window = None if window is None else _checks.integer("window", window, 0)
        bias = _checks.flag("bias", bias)
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
        """Attention of the tokens x to themselves, and to those in the cache.

        Parameters
        ----------
        x : Tensor (B, L, dim)
        key_mask : bool Tensor (B|1, L), or (B|1, cached + L) with a cache, optional
            False hides a token (padding) from all queries: the opposite of the `key_padding_mask`
            of torch. The cache remembers that of its tokens. The output of a token that sees
            nothing is `o_proj` of zeros.
        positions : integer Tensor (L,) or (B|1, L), optional
            None is the index, counted on from the cache; then padding on the left is right as it
            is, as all encodings here are relative. Rotary encodings take any positions that rise,
            the others positions that go up by 1 (hidden tokens may have any). With a cache they
            are given for all tokens or for none.
        segments : integer Tensor (L,) or (B|1, L), optional
            Packed sequences: a token sees only tokens of its own number. Positions may start again
            in each, and need not. Not together with a cache.
        cache : KVCache, optional
            The tokens before these; x is added to it. Needs a causal module.

        Returns
        -------
        Tensor (B, L, dim)

        Raises
        ------
        RuntimeError
            Wrong shapes or dtypes; positions that start again without segments; a cache that does
            not fit.
        """
        check_tokens(x, self.dim)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = super().forward(
            q,
            k,
            v,
            positions=positions,
            cache=cache,
            key_mask=key_mask,
            segments=segments,
            window=self.window,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def reset_parameters(self) -> None:
        """Initial values, as a new module has them."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        super().reset_parameters()

    def extra_repr(self) -> str:
        own_size = self.head_dim * self.heads != self.dim
        more = [f"head_dim={self.head_dim}"] if own_size else []
        text = self._described(f"{self.dim}", *more, f"encoding='{self.encoding}'")
        return text + (f", window={self.window}" if self.window is not None else "")
