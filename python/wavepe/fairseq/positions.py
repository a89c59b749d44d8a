"""The position encoding of a decoder, one for all layers, and what its checkpoint says of it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..positions import PositionEncoding, check_learned, position_encoding
from ..positions.absolute import AbsoluteVectors


class DecoderPositions(nn.Module):
    """An encoding as the layers of one decoder use it; what it learns, all layers share.

    Its state names the encoding and the length that the model was trained on, so that a checkpoint
    is refused by stock fairseq and by a model of another encoding, and options that follow the
    trained length (``inference_theta=scaled``) are right whatever ``--tokens-per-sample`` an
    evaluation names.

    Attributes
    ----------
    attention : PositionEncoding
        What the encoding does in the attention of every layer.
    absolute : AbsoluteVectors or None
        What it adds to the token embeddings.
    """

    record: Tensor

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, dim: int, trained_length: int
    ) -> None:
        super().__init__()
        check_learned(encoding)
        self.encoding = encoding
        self._sizes = head_dim, heads, dim
        added = encoding.entry == "absolute"
        self.attention = self._in_attention(
            read_encoding("none") if added else encoding, trained_length
        )
        self.absolute: AbsoluteVectors | None = None
        self.register_buffer("record", torch.empty(0))
        self.set_trained_length(trained_length)

    def set_trained_length(self, length: int) -> None:
        """Set it, and build anew what may follow it; nothing of that is learned."""
        self.trained_length = length
        if self.encoding.entry == "rotary":
            self.attention = self._in_attention(self.encoding, length).train(self.training)
        if self.encoding.entry == "absolute":
            self.absolute = AbsoluteVectors(self.encoding, self._sizes[2], length)
        trained = self.encoding.trained_as().to_dict()
        text = json.dumps({"encoding": trained, "trained_length": length})
        # As numbers that are exact in every dtype, and may be averaged with their like.
        self.record = torch.tensor([float(ord(letter)) for letter in text]).to(self.record.device)

    def _in_attention(self, encoding: Encoding, length: int) -> PositionEncoding:
        head_dim, heads, _ = self._sizes
        return position_encoding(encoding, head_dim, heads, causal=True, max_length=length)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        found = state_dict.get(f"{prefix}record")
        if found is None:
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', and the checkpoint was "
                "trained with fairseq's own positions: leave pos_enc away"
            )
            return
        record = json.loads("".join(chr(round(number)) for number in found.tolist()))
        trained = read_encoding(record["encoding"])
        if trained != self.encoding.trained_as():
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', and the checkpoint was "
                f"trained with '{trained}': to train on, give --pos-enc {trained}; elsewhere leave "
                "pos_enc out of --model-overrides, or change only its options of inference"
            )
            return
        self.set_trained_length(record["trained_length"])


class AbsolutePositions(nn.Module):
    """Vectors added to the token embeddings, called as fairseq calls its own.

    A token's position is the number of tokens before it; padding counts as none and gets zeros.
    """

    def __init__(self, positions: DecoderPositions, padding_idx: int) -> None:
        super().__init__()
        self._positions = (positions,)  # the decoder's, and not a part of this module
        self.padding_idx = padding_idx

    def forward(self, tokens: Tensor, incremental_state: dict[str, Any] | None = None) -> Tensor:
        """Return vectors, float32 (B, L, dim), of the tokens (B, L) of the sequences so far."""
        (own,) = self._positions
        assert own.absolute is not None
        if own.absolute.follows_length and incremental_state is not None and tokens.shape[1] > 1:
            raise ValueError(
                f"{own.encoding} depends on the length of the sequence: generation keeps what was "
                "encoded for a shorter one"
            )
        real = tokens != self.padding_idx
        return own.absolute(places_of(real)).masked_fill(~real[..., None], 0)


def places_of(real: Tensor) -> Tensor:
    """Return of each token (B, T) the number of real ones before it: padding adds to no length."""
    return (real.cumsum(1) - 1).clamp(min=0)
