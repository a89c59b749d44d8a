"""Attention with any position encoding, in place of scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common import checks
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..ops._torch_private import holds
from ..positions import PositionEncoding
from ..positions.tokens import token_positions
from ._cache import CachedTokens, KVCache, tokens_of
from ._sequences import check_order, check_shape, checked_rows, joined_key_mask, joined_positions


class Attention(nn.Module):
    """Attend with any position encoding, in a layer of your own.

    Use it in place of `torch.nn.functional.scaled_dot_product_attention`. It does everything that
    the encoding needs: it rotates queries and keys, and adds to the scores. It calls
    `wavepe.ops.attention`, so memory grows with the length and not with its square.

    Parameters of a learned encoding are in the submodule `position_encoding`. They stay float32 if
    the model is cast to a narrower dtype. To share them between layers, assign
    ``b.position_encoding = a.position_encoding``. Constant tables and frequencies are neither
    parameters nor buffers, so a cast of the model does not change them.

    TypeError or ValueError if an argument is wrong, or if the sizes do not fit together.

    Parameters
    ----------
    encoding : str, dict or Encoding
        The encoding, as `wavepe.encoding` reads it. An absolute encoding is refused, because it
        belongs to the token embeddings (`AbsoluteEncoding`). So is one that differs by layer: give
        each layer its own, ``encoding.at(layer, layers)``.
    head_dim : int
        Head size d.
    heads : int
        Number of query heads H.
    kv_heads : int, optional
        Number of key and value heads Hk, a divisor of `heads`; None is `heads`.
    causal : bool
        True: a token sees itself and the tokens before it. False: it sees all tokens.
    dropout : float
        Probability that an attention weight is dropped in training mode.
    trained_length : int, optional
        Length of the sequences in training, for the rope types that need it.
    dim : int, optional
        Size of x, the input of the layer, for encodings that read it (relative, fox).
    device, dtype : optional
        Those of the parameters. bfloat16 and float16 become float32.

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
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.integer("head_dim", head_dim, 1)
        self.heads = checks.integer("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else checks.integer("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={heads}, got {kv_heads}")
        self.dim = None if dim is None else checks.integer("dim", dim, 1)
        self.causal = checks.flag("causal", causal)
        self.dropout = checks.zero_to_one("dropout", dropout)
        if trained_length is not None:
            trained_length = checks.integer("trained_length", trained_length, 1)
        self.position_encoding = PositionEncoding(
            read_encoding(encoding), self.head_dim, self.heads, causal=self.causal,
            trained_length=trained_length, dim=self.dim, device=device, dtype=dtype,
        )  # fmt: skip

    @property
    def encoding(self) -> Encoding:
        """The position encoding; `str` of it is its spec."""
        return self.position_encoding.encoding

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "position_encoding" and isinstance(value, PositionEncoding):
            value.check_fits(self.head_dim, self.heads, self.causal)
        super().__setattr__(name, value)

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
        x: Tensor | None = None,
    ) -> Tensor:
        """Return attention of the queries to the keys, and to the keys in the cache.

        RuntimeError if a shape or dtype is wrong, if positions start again without segments, or if
        the cache does not fit.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            Queries of the last m of the n tokens, before any rotation.
        k : Tensor (B, Hk, n, d)
            Keys, before any rotation.
        v : Tensor (B, Hk, n, dv)
            Values.
        positions : integer Tensor (n,) or (B|1, n), optional
            Positions of the tokens. None counts them, on from the cache. Padding on the left then
            shifts them, which matters only if a rope type follows the length: pass positions there.
            For rotary encodings, positions must rise along a row; for other encodings they must
            rise by 1. Hidden tokens may have any position. This is checked on the CPU only, because
            on a device the check would have to wait. With a cache, give positions for all tokens or
            for none.
        cache : KVCache, optional
            The tokens before these. k and v are added to it. It needs m = n and a causal module.
        key_mask : bool Tensor (B|1, n), or (B|1, cached + n) with a cache, optional
            False hides a token, such as padding, from all queries. torch's `key_padding_mask` has
            the opposite meaning. The cache keeps the mask of its tokens.
        segments : integer Tensor (n,) or (B|1, n), optional
            The number of each token's sequence, for packed sequences: a token sees only tokens with
            its number. In each sequence, positions may start again or go on. It needs m = n and no
            cache.
        window : int, optional
            Hide keys at a distance of `window` tokens or more before the query.
        softcap : float, optional
            A bound for the scores: they become softcap * tanh(score / softcap).
        x : Tensor (B, n, dim), optional
            The input of the layer, of all n tokens, for encodings that read it.

        Returns
        -------
        out : Tensor (B, H, m, dv)
            0 for a query that sees no key.
        """
        self._check(q, k, v, cache, x)
        batch, count = k.shape[0], k.shape[2]
        cached = None if cache is None else self._tokens_of(cache, segments, count)
        start = 0 if cached is None else cached.length
        key_mask = joined_key_mask(key_mask, cached, batch, count)
        if segments is not None:
            segments = checked_rows("segments", segments, batch, count)
        positions = joined_positions(positions, cached, batch, count)
        if positions is not None:
            check_order(positions, key_mask, segments, self.encoding.in_scores)
        new = None if positions is None else positions[:, start:]
        encoding = self.position_encoding
        learned = encoding.learn(start + count, cached, x=x)
        q, k, rotated = encoding.rotate(q, k, new, cached)
        terms = encoding.score_terms
        k = terms.with_decay(k, learned)
        if cached is not None:
            k, v = cached.extended(k, v)
        of_queries = positions
        masked = key_mask is not None or segments is not None
        if positions is None and masked and terms.reads_positions:
            real = k.new_ones((batch, count), dtype=torch.bool) if key_mask is None else key_mask
            of_queries = token_positions(real, segments)
        if of_queries is not None:
            of_queries = of_queries[:, of_queries.shape[1] - q.shape[2] :]
        out = terms.attend(
            q, k, v, learned, rotated, of_queries, encoding.training, causal=self.causal,
            window=window, softcap=softcap, key_mask=key_mask, segments=segments,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        if cached is not None:
            cached.commit(count, key_mask, positions)
        return out

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None, x: Tensor | None
    ) -> None:
        """Raise if the tensors do not fit this module; `ops.attention` checks the rest."""
        check_shape("q", q, "B", self.heads, "tokens", self.head_dim)
        check_shape("k", k, "B", self.kv_heads, "tokens", self.head_dim)
        check_shape("v", v, "B", self.kv_heads, "tokens", "dv")
        queries, keys = q.shape[2], k.shape[2]
        if self.encoding.reads_input:
            if x is None:
                raise RuntimeError(
                    f"wavepe: '{self.encoding}' reads the input of the layer: give x= "
                    f"({k.shape[0]}, {keys}, {self.dim}), of the tokens of k"
                )
            check_shape("x, of all tokens of k,", x, k.shape[0], keys, self.dim or 0)
        if not holds(queries <= keys) or (cache is not None and queries != keys):
            needed = "m = n with a cache" if cache is not None else "m <= n"
            raise RuntimeError(
                f"wavepe: attention needs {needed}, because the queries belong to the last tokens; "
                f"got m = {queries} queries and n = {keys} keys"
            )

    def _tokens_of(self, cache: KVCache, segments: Tensor | None, count: int) -> CachedTokens:
        """Return this module's part of the cache, for a call with `count` new tokens."""
        if not isinstance(cache, KVCache):
            raise RuntimeError(f"wavepe: cache must be a KVCache, got {type(cache).__name__}")
        if not self.causal:
            raise RuntimeError(
                "wavepe: a cache needs causal=True, because without it later tokens change earlier "
                "outputs"
            )
        if segments is not None:
            raise RuntimeError("wavepe: a cache holds one sequence per row and takes no segments")
        return tokens_of(cache, self, count)

    def reset_parameters(self) -> None:
        """Set all parameters to the initial values of a new module."""
        self.position_encoding.reset_parameters()

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, heads={self.heads}, kv_heads={self.kv_heads}"
        return f"'{self.encoding}', {sizes}, causal={self.causal}, dropout={self.dropout:g}"
