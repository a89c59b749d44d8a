"""Attention with any position encoding, in the place of PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..positions import position_encoding
from ._cache import CachedTokens, KVCache
from ._sequences import check_order, check_shape, checked_rows, joined_key_mask, joined_positions


class Attention(nn.Module):
    """Attention whose position encoding is named by a spec, for a layer of one's own.

    It stands where `torch.nn.functional.scaled_dot_product_attention` stood, and does all that the
    encoding does: it rotates queries and keys, and adds to the scores. Computed by
    `wavepe.ops.attention`: memory grows with the length, not with its square.

    Constant tables and frequencies are no parameters and no buffers: no cast of the module reaches
    them. What an encoding learns is in `position_encoding` and stays in float32 at least; assign
    one layer's to another (``b.position_encoding = a.position_encoding``) for layers that share it.

    Parameters
    ----------
    encoding : str, dict or Encoding
        What `wavepe.encoding` reads. Absolute ones are added to token embeddings
        (`AbsoluteEncoding`) and refused here.
    head_dim : int
        Head size d.
    heads : int
        Number of query heads H.
    kv_heads : int, optional
        Number of key and value heads Hk, a divisor of `heads` (grouped queries); None is `heads`.
    causal : bool
        A token sees itself and those before it; else all of them.
    dropout : float
        Share of the attention weights that are dropped in training mode.
    trained_length : int, optional
        For the rope types that need it.
    device, dtype : optional
        Of what is learned, as in torch's own modules.

    Raises
    ------
    ValueError, TypeError
        Sizes that do not fit together, an absolute encoding, wrong options.

    Examples
    --------
    >>> import torch
    >>> from wavepe.nn import Attention
    >>> attention = Attention("wavelet", head_dim=16, heads=4, kv_heads=2)
    >>> q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 16)
    >>> attention(q, k, v).shape
    torch.Size([2, 4, 10, 16])
    """

    def __init__(
        self,
        encoding: str | Mapping[str, Any] | Encoding,
        head_dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        trained_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = _checks.integer("head_dim", head_dim, 1)
        self.heads = _checks.integer("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else _checks.integer("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={heads}, got {kv_heads}")
        self.causal = _checks.flag("causal", causal)
        self.dropout = _checks.zero_to_one("dropout", dropout)
        if trained_length is not None:
            trained_length = _checks.integer("trained_length", trained_length, 1)
        self.position_encoding = position_encoding(
            read_encoding(encoding),
            self.head_dim,
            self.heads,
            causal=self.causal,
            max_length=trained_length,
            device=device,
            dtype=dtype,
        )

    @property
    def encoding(self) -> Encoding:
        """The position encoding; `str` of it is its spec."""
        return self.position_encoding.encoding

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        segments: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return attention of the queries to the keys, and to those in the cache.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            Of the last m of the n tokens; not rotated.
        k : Tensor (B, Hk, n, d)
            Not rotated.
        v : Tensor (B, Hk, n, dv)
        positions : integer Tensor (n,) or (B|1, n), optional
            None is the index, counted on from the cache; then padding on the left is right as it
            is, as all encodings here are relative. Rotary encodings take any positions that rise,
            the others positions that go up by 1 (hidden tokens may have any); that is checked on
            the CPU alone, as the check of a device would be waited for. With a cache they are
            given for all tokens or for none.
        cache : KVCache, optional
            The tokens before these; k and v are added to it. Needs m = n and a causal module.
        key_mask : bool Tensor (B|1, n), or (B|1, cached + n) with a cache, optional
            False hides a token (padding) from all queries: the opposite of the `key_padding_mask`
            of torch. The cache remembers that of its tokens. A query that sees nothing gives 0.
        segments : integer Tensor (n,) or (B|1, n), optional
            Packed sequences: a token sees only tokens of its own number. Positions may start again
            in each, and need not. Needs m = n; not together with a cache.
        window : int, optional
            Keys at a distance of `window` tokens or more before the query are hidden.
        softcap : float, optional
            Scores become softcap * tanh(score / softcap).

        Returns
        -------
        Tensor (B, H, m, dv)

        Raises
        ------
        RuntimeError
            Wrong shapes or dtypes; positions that start again without segments; a cache that does
            not fit.
        """
        self._check(q, k, v, cache)
        batch, count = k.shape[0], k.shape[2]
        layer = None if cache is None else self._layer(cache, segments, count)
        seen = 0 if layer is None else layer.length
        key_mask = joined_key_mask(key_mask, layer, batch, count)
        if segments is not None:
            segments = checked_rows("segments", segments, batch, count)
        positions = joined_positions(positions, layer, batch, count)
        if positions is not None:
            check_order(positions, key_mask, segments, self.position_encoding.contiguous)
        new = None if positions is None else positions[:, seen:]
        q, k = self.position_encoding.rotate(q, k, new, layer)
        if layer is not None:
            k, v = layer.extended(k, v)
        out = self.position_encoding.attend(
            q,
            k,
            v,
            layer,
            causal=self.causal,
            window=window,
            softcap=softcap,
            key_mask=key_mask,
            segments=segments,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if layer is not None:
            layer.commit(count, key_mask, positions)
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> None:
        """Raise where they are none of this module's; `ops.attention` compares the rest."""
        check_shape("q", q, "B", self.heads, "tokens", self.head_dim)
        check_shape("k", k, "B", self.kv_heads, "tokens", self.head_dim)
        check_shape("v", v, "B", self.kv_heads, "tokens", "dv")
        queries, keys = q.shape[2], k.shape[2]
        if queries > keys or (cache is not None and queries != keys):
            needed = "as many keys as queries, beside a cache" if cache is not None else "m <= n"
            raise RuntimeError(
                f"wavepe: needs {needed}: the queries are those of the last tokens; got m = "
                f"{queries} queries and n = {keys} keys"
            )

    def _layer(self, cache: KVCache, segments: Tensor | None, count: int) -> CachedTokens:
        """Return this module's part of the cache."""
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
        """Set initial values, as a new module has them."""
        self.position_encoding.reset_parameters()

    def extra_repr(self) -> str:
        return self._described(f"'{self.encoding}', head_dim={self.head_dim}")

    def _described(self, first: str, *more: str) -> str:
        """Return the arguments; of those with a default the ones that differ."""
        parts = [first, f"heads={self.heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.heads else []
        parts += more
        parts += ["causal=False"] if not self.causal else []
        return ", ".join(parts + ([f"dropout={self.dropout:g}"] if self.dropout else []))
