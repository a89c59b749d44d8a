"""Self-attention of a decoder layer, computed by `wavepe.ops.attention`."""

from __future__ import annotations

from . import compat  # noqa: F401 - it must come before fairseq

import torch  # isort: skip
from fairseq.modules import MultiheadAttention  # isort: skip
from torch import Tensor  # isort: skip

from ..positions import PositionEncoding  # isort: skip
from ..positions.tokens import token_positions  # isort: skip
from .positions import DecoderPositions  # isort: skip

# Shape of the empty tensor that replaces the causal mask of queries x keys.
CAUSAL_SHAPE = (0,)


class CausalSelfAttention(MultiheadAttention):
    """fairseq's self-attention with the decoder's position encoding.

    The parameters, their initial values and the cache of incremental decoding are those of
    `MultiheadAttention`. The cache holds rotated keys.
    """

    # The decoder sets these two. The first one is in a tuple, so that it does not become a child of
    # this module.
    positions: tuple[DecoderPositions]
    position_encoding: PositionEncoding

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Return causal self-attention (T, B, C), and None in place of the weights.

        `query`, `key` and `value` must be the same tensor (T, B, C). `incremental_state` is the
        cache: it holds the earlier tokens, and this call adds the new ones. Without it,
        `attn_mask` must have `CAUSAL_SHAPE`, which means the causal mask; with it, None.
        NotImplementedError for weights, another mask or other keys.
        """
        if need_weights or need_head_weights or before_softmax:
            raise NotImplementedError(
                "with --pos-enc, attention cannot return its weights: call it with "
                "need_weights=False"
            )
        if key is not query or value is not query or static_kv:
            raise NotImplementedError(
                "--pos-enc needs self-attention, where query, key and value are one tensor; got "
                "keys or values of another sequence"
            )
        marked = attn_mask is not None and attn_mask.shape == CAUSAL_SHAPE
        if not (marked if incremental_state is None else attn_mask is None):
            shown = "no mask" if attn_mask is None else f"a mask {tuple(attn_mask.shape)}"
            raise NotImplementedError(f"--pos-enc needs the causal mask of a decoder, got {shown}")
        q, k, v = (
            projection(query).unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        encoding, positions, cached = self.position_encoding, None, {}
        if incremental_state is None:
            if key_padding_mask is not None:
                positions = token_positions(~key_padding_mask.bool())
        else:
            cached = self._get_input_buffer(incremental_state)
        before = cached.get("prev_key")
        start = 0 if before is None else before.shape[2]
        shared = self.positions[0].attention(start + k.shape[2])
        learned = encoding.learn(start + k.shape[2], shared=shared, x=query.transpose(0, 1))
        state = encoding.cache_state(start) if start else None
        q, k, rotated = encoding.rotate(q, k, positions, state)
        terms = encoding.score_terms
        k = terms.with_decay(k, learned)
        if incremental_state is not None:
            k, v, key_padding_mask = self._with_cached(cached, k, v, key_padding_mask)
            self._set_input_buffer(incremental_state, cached)
            if key_padding_mask is not None and terms.reads_positions:
                positions = token_positions(key_padding_mask.logical_not())[:, -q.shape[2] :]
        dropout = self.dropout_module
        out = terms.attend(
            q, k, v, learned, rotated, positions, encoding.training,
            key_mask=None if key_padding_mask is None else ~key_padding_mask.bool(),
            dropout_p=dropout.p if self.training or dropout.apply_during_inference else 0.0,
        )  # fmt: skip
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None

    def _with_cached(
        self, cached: dict[str, Tensor | None], k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the new keys, values and padding to `cached`, and return those of all tokens."""
        before, values = cached.get("prev_key"), cached.get("prev_value")
        if before is not None and values is not None:
            k, v = torch.cat([before, k], dim=2), torch.cat([values, v], dim=2)
        mask = self._append_prev_key_padding_mask(
            mask, cached.get("prev_key_padding_mask"), k.shape[0], k.shape[2], static_kv=False
        )
        cached |= {"prev_key": k, "prev_value": v, "prev_key_padding_mask": mask}
        return k, v, mask


# --retain-dropout-modules finds the dropout of this class by this name.
CausalSelfAttention.__name__ = MultiheadAttention.__name__
