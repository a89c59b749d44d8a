"""The decoder of `transformer_lm` with the position encoding that its options choose."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from . import compat  # noqa: F401 - it must come before fairseq

from fairseq.distributed import fsdp_wrap  # isort: skip
from fairseq.models.transformer import TransformerConfig, TransformerDecoder  # isort: skip
from fairseq.modules.checkpoint_activations import checkpoint_wrapper  # isort: skip
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase  # isort: skip
from torch import Tensor  # isort: skip

from ..encodings import Encoding, encoding  # isort: skip
from .attention import CAUSAL_SHAPE, CausalSelfAttention  # isort: skip
from .positions import AbsolutePositions, DecoderPositions  # isort: skip

# Shorthand -> the encoding and the option that it sets.
SHORTHANDS = {
    "rope_theta": ("rope", "theta"),
    "wavelet_kind": ("wavelet", "kind"),
    "wavelet_scales": ("wavelet", "scales"),
}


def chosen_encoding(args: Any) -> Encoding | None:
    """Return the encoding that the options choose; ValueError if they do not fit."""
    spec = getattr(args, "pos_enc", None)
    chosen = None if spec is None else encoding(spec)
    for key, (name, option) in SHORTHANDS.items():
        text = getattr(args, key, None)
        if text is None:
            continue
        flag = "--" + key.replace("_", "-")
        parts = () if chosen is None else chosen.parts
        named = [part for part in parts if part.name == name]
        if chosen is None or not named:
            chosen_text = "no --pos-enc" if spec is None else f"--pos-enc {spec}"
            raise ValueError(f"{flag} {text} needs --pos-enc {name}, got {chosen_text}")
        value = getattr(encoding(f"{name}:{option}={text}"), option)
        if any(part.options().get(option, value) != value for part in named):
            raise ValueError(f"{flag} {text} and --pos-enc {spec} both give {option}: give one")
        new = {part: dataclasses.replace(part, **{option: value}) for part in named}
        chosen = chosen.with_parts(lambda part, new=new: new.get(part, part))  # type: ignore[misc]
    return chosen


def write_out(args: Any) -> None:
    """Write the shorthands into ``pos_enc``, so that the checkpoint keeps one option."""
    chosen = chosen_encoding(args)
    if chosen is None:
        return
    args.pos_enc = str(chosen)
    for key in SHORTHANDS:
        setattr(args, key, None)


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with `CausalSelfAttention`."""

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> CausalSelfAttention:
        for name, chosen in (
            ("add_bias_kv", add_bias_kv),
            ("add_zero_attn", add_zero_attn),
            ("--decoder-xformers-att-config", cfg.decoder.xformers_att_config),
            ("--cross-self-attention", cfg.cross_self_attention),
        ):
            if chosen:
                raise ValueError(
                    f"--pos-enc does not go with {name}, which needs another attention: give one "
                    "of the two"
                )
        return CausalSelfAttention(
            embed_dim, cfg.decoder.attention_heads, dropout=cfg.attention_dropout,
            self_attention=True, q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )  # fmt: skip


# --retain-dropout-modules finds the dropouts of this class by this name.
DecoderLayer.__name__ = TransformerDecoderLayerBase.__name__


class Decoder(TransformerDecoder):
    """fairseq's decoder with the position encoding of ``--pos-enc``."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        args = copy.copy(args)  # the checkpoint stores the options of the user
        args.no_token_positional_embeddings = True
        super().__init__(args, *rest, **options)
        if self.position_encoding.absolute is not None:
            self.embed_positions = AbsolutePositions(self.position_encoding, self.padding_idx)

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = False) -> Any:
        """Build a `DecoderLayer`, as fairseq's method builds a layer of its own class."""
        cfg = TransformerConfig.from_namespace(args)
        if not hasattr(self, "position_encoding"):
            chosen = chosen_encoding(self.args)
            assert chosen is not None
            if self.args.decoder_layers_to_keep and any(chosen.layers):
                raise ValueError(
                    f"--pos-enc {chosen} names layers, and --decoder-layers-to-keep changes "
                    "their numbers: give one of the two"
                )
            heads, dim = cfg.decoder.attention_heads, cfg.decoder.embed_dim
            self.position_encoding = DecoderPositions(
                chosen, dim // heads, heads, dim, self.args.tokens_per_sample, cfg.decoder.layers
            )
        layer = DecoderLayer(cfg, no_encoder_attn)
        layer.self_attn.positions = (self.position_encoding,)
        layer.self_attn.position_encoding = self.position_encoding.build_next_layer()
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        wrapped_from = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
        return fsdp_wrap(layer, min_num_params=wrapped_from)

    def extract_features(self, prev_output_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = self.args.tokens_per_sample
        if self.training and length > self.position_encoding.trained_length:
            self.position_encoding.set_trained_length(length)  # training goes on, on longer samples
        return super().extract_features(prev_output_tokens, *args, **kwargs)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor: no layer here needs the causal mask of queries x keys."""
        return tensor.new_empty(CAUSAL_SHAPE)

    def max_positions(self) -> int:
        """Return a length that no sample exceeds, because fairseq drops longer ones."""
        return 1_000_000


def language_model_decoder(args: Any, *rest: Any, **options: Any) -> TransformerDecoder:
    """Build the decoder of a language model: `Decoder`, or fairseq's without ``--pos-enc``."""
    decoder = TransformerDecoder if chosen_encoding(args) is None else Decoder
    return decoder(args, *rest, **options)
