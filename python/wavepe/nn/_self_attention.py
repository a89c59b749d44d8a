"""Self-attention with any position encoding, for models of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks, ops
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ._cache import KVCache
from ._positions import position_encoding
from ._sequences import check_order, checked_segments, joined_key_mask, joined_positions


class SelfAttention(nn.Module):
    """Multi-head self-attention whose position encoding is named by a spec.

    ``y = o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))``, with the encoding inside: wavelets
    [W], RoPE [R], ALiBi [A], Shaw [S], Transformer-XL [X], none, or one of your own. Computed by
    `wavepe.ops.attention`: memory grows with the length, not with its square.

    Constant tables and frequencies are no parameters and no buffers: no cast of the module reaches
    them, and the state dict holds the weights alone. What an encoding learns is in
    `position_encoding` and stays in float32 at least; assign one layer's to another
    (``b.position_encoding = a.position_encoding``) for layers that share it.

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
        super().__init__()
        self.dim = _checks.integer("dim", dim, 1)
        self.heads = _checks.integer("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else _checks.integer("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={heads}, got {kv_heads}")
        if head_dim is None and self.dim % self.heads:
            raise ValueError(f"heads must divide dim={dim}, got {heads}; or give head_dim")
        given = self.dim // self.heads if head_dim is None else head_dim
        self.head_dim = _checks.integer("head_dim", given, 1)
        self.causal = _checks.flag("causal", causal)
        self.dropout = _checks.share("dropout", dropout)
        self.window = None if window is None else _checks.integer("window", window, 0)
        bias = _checks.flag("bias", bias)
        if max_length is not None:
            max_length = _checks.integer("max_length", max_length, 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, kv_inner = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(self.dim, inner, bias, **factory)
        self.k_proj = nn.Linear(self.dim, kv_inner, bias, **factory)
        self.v_proj = nn.Linear(self.dim, kv_inner, bias, **factory)
        self.o_proj = nn.Linear(inner, self.dim, bias, **factory)
        self.position_encoding = position_encoding(
            read_encoding(encoding),
            self.head_dim,
            self.heads,
            causal=self.causal,
            max_length=max_length,
            **factory,
        )

    @property
    def encoding(self) -> Encoding:
        """The position encoding; `str` of it is its spec."""
        return self.position_encoding.encoding

    def forward(
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
        _check_input(x, self.dim)
        batch, count = x.shape[:2]
        layer = None if cache is None else self._layer(cache, segments, count)
        seen = 0 if layer is None else layer.length
        key_mask = joined_key_mask(key_mask, layer, batch, count)
        segments = checked_segments(segments, batch, count)
        positions = joined_positions(positions, layer, batch, count)
        if positions is not None:
            check_order(positions, key_mask, segments, self.position_encoding.contiguous)

        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        new = None if positions is None else positions[:, seen:]
        q, k = self.position_encoding.rotated(q, k, new, layer)
        if layer is not None:
            k, v = layer.extended(k, v)
        out: Any = ops.attention(
            **self.position_encoding.arguments(q, seen + count, layer),
            k=k,
            v=v,
            causal=self.causal,
            window=self.window,
            key_mask=key_mask,
            segments=segments,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if layer is not None:
            layer.commit(count, key_mask, positions)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _layer(self, cache: KVCache, segments: Tensor | None, count: int) -> Any:
        """This module's part of the cache."""
        if not isinstance(cache, KVCache):
            raise RuntimeError(f"wavepe: cache must be a KVCache, got {type(cache).__name__}")
        if not self.causal:
            raise RuntimeError(
                "wavepe: a cache needs causal=True: without it later tokens change earlier outputs"
            )
        if segments is not None:
            raise RuntimeError("wavepe: a cache holds one sequence per row: give no segments")
        return cache._layer(self, count)

    def reset_parameters(self) -> None:
        """Initial values, as a new module has them."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        self.position_encoding.reset_parameters()

    def extra_repr(self) -> str:
        parts = [f"{self.dim}, heads={self.heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.heads else []
        parts += [f"head_dim={self.head_dim}"] if self.head_dim * self.heads != self.dim else []
        parts += [f"encoding='{self.encoding}'"]
        parts += ["causal=False"] if not self.causal else []
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += [f"window={self.window}"] if self.window is not None else []
        return ", ".join(parts)


def _check_input(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise RuntimeError(f"wavepe: x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != dim:
        raise RuntimeError(f"wavepe: x must be (B, L, {dim}), got {tuple(x.shape)}")
