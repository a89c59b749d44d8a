"""Self-attention of a decoder layer by `wavepe.ops.attention`."""

from __future__ import annotations

from . import compat  # noqa: F401 - fairseq cannot be imported before

import torch  # isort: skip
from fairseq.modules import MultiheadAttention  # isort: skip
from torch import Tensor  # isort: skip

from .positions import DecoderPositions, places_of  # isort: skip

# Of what stands for the causal mask of queries x keys.
CAUSAL_SHAPE = (0,)


class CausalSelfAttention(MultiheadAttention):
    """fairseq's attention with the decoder's position encoding in it.

    Parameters, their initial values and the cache of incremental decoding are those of
    `MultiheadAttention`; keys are cached as they were rotated.
    """

    # Set by the layer's decoder; in a tuple, as it is no part of this module.
    positions: tuple[DecoderPositions]

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
        """Return attention (T, B, C) of each token to itself and to those before it, and None.

        `query`, `key` and `value` are one tensor (T, B, C). `incremental_state` holds the tokens
        before these, and is given these. `attn_mask` of `CAUSAL_SHAPE` stands for the causal mask;
        it is None with `incremental_state`. NotImplementedError where weights are asked for, or
        another mask or keys of another sequence are given.
        """
        if need_weights or need_head_weights or before_softmax:
            raise NotImplementedError(
                "attention by wavepe holds no matrix of weights, so it cannot return them"
            )
        if key is not query or value is not query or static_kv:
            raise NotImplementedError(
                "--pos-enc serves self-attention, got keys of another sequence"
            )
        marked = attn_mask is not None and attn_mask.shape == CAUSAL_SHAPE
        if not (marked if incremental_state is None else attn_mask is None):
            given = "no mask" if attn_mask is None else f"one of {tuple(attn_mask.shape)}"
            raise NotImplementedError(f"--pos-enc serves a decoder's causal mask, got {given}")
        q, k, v = (
            projection(query).unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        encoding = self.positions[0].attention
        if incremental_state is None:
            padding = key_padding_mask
            places = None if padding is None else places_of(~padding.bool())
            q, k = encoding.rotate(q, k, places, None)
        else:
            cached = self._get_input_buffer(incremental_state)
            before = cached.get("prev_key")
            seen = 0 if before is None else before.shape[2]
            q, k = encoding.rotate(q, k, None, encoding.cache_state(seen) if seen else None)
            k, v, key_padding_mask = self._with_cached(cached, k, v, key_padding_mask)
            self._set_input_buffer(incremental_state, cached)
        dropout = self.dropout_module
        out = encoding.attend(
            q,
            k,
            v,
            key_mask=None if key_padding_mask is None else ~key_padding_mask.bool(),
            dropout_p=dropout.p if self.training or dropout.apply_during_inference else 0.0,
        )
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None

    def _with_cached(
        self, cached: dict[str, Tensor | None], k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and padding of all tokens so far; `cached` holds them from now on."""
        before, values = cached.get("prev_key"), cached.get("prev_value")
        if before is not None and values is not None:
            k, v = torch.cat([before, k], dim=2), torch.cat([values, v], dim=2)
        mask = self._append_prev_key_padding_mask(
            mask, cached.get("prev_key_padding_mask"), k.shape[0], k.shape[2], static_kv=False
        )
        cached |= {"prev_key": k, "prev_value": v, "prev_key_padding_mask": mask}
        return k, v, mask


# By this name --retain-dropout-modules knows the dropout in it.
CausalSelfAttention.__name__ = MultiheadAttention.__name__
