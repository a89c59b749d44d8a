"""The position encoding of a decoder, one for all layers, and what its checkpoint says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import Encoding, encoding
from ..nn._absolute import AbsoluteVectors
from ..nn._positions import PositionEncoding, position_encoding


class DecoderPositions(nn.Module):
    """An encoding as the layers of one decoder use it; what it learns, all layers share.

    Its state names the encoding and the length that the model was trained on, so that a checkpoint
    is refused by stock fairseq and by a model of another encoding, and options that follow the
    trained length (``inference_theta=scaled``) are right whatever ``--tokens-per-sample`` an
    evaluation names.

    Parameters
    ----------
    encoding : Encoding
    head_dim, heads, dim : int
        Sizes of the head and of the embedding, and the number of heads.
    trained_length : int
        Tokens per sample.

    Raises
    ------
    ValueError
        The encoding does not fit the sizes.
    """

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, dim: int, trained_length: int
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self._sizes = head_dim, heads, dim
        self.attention: PositionEncoding
        self.absolute: AbsoluteVectors | None
        self.spec: Tensor
        self.trained_length: Tensor
        self.register_buffer("spec", _codes(str(encoding.trained_as())))
        self.register_buffer("trained_length", torch.tensor(0))
        self.set_trained_length(trained_length)

    def set_trained_length(self, length: int) -> None:
        """What follows the trained length is made anew."""
        self.length = length
        self.trained_length.fill_(length)
        head_dim, heads, dim = self._sizes
        if self.encoding.entry == "absolute":
            self.attention = PositionEncoding(self.encoding)  # does nothing there
            self.absolute = AbsoluteVectors(self.encoding, dim, length)
        elif self.encoding.entry == "rotary" or not hasattr(self, "attention"):
            self.attention = position_encoding(
                self.encoding, head_dim, heads, causal=True, max_length=length
            )
            self.attention.train(self.training)
            self.absolute = None

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = state_dict.get(f"{prefix}spec")
        if found is None:
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', and the checkpoint was "
                "trained with fairseq's own positions: leave --pos-enc away"
            )
            return
        trained = "".join(map(chr, found.tolist()))
        if trained != "".join(map(chr, self.spec.tolist())) and encoding(trained) != (
            self.encoding.trained_as()
        ):
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', and the checkpoint was "
                f"trained with '{trained}': give --pos-enc {trained}, and beside it only options "
                "of inference"
            )
            return
        self.set_trained_length(int(state_dict[f"{prefix}trained_length"]))


class AbsolutePositions(nn.Module):
    """Vectors added to the token embeddings, called as fairseq calls its own.

    A token's position is the number of tokens before it; padding counts as none and gets zeros.
    """

    def __init__(self, positions: DecoderPositions, padding_idx: int) -> None:
        super().__init__()
        self._positions = (positions,)  # the decoder's, and not a part of this module
        self.padding_idx = padding_idx

    def forward(
        self, tokens: Tensor, incremental_state: dict[str, Any] | None = None, **_: Any
    ) -> Tensor:
        """Vectors, float32 (B, L, dim), of the tokens (B, L) of the sequences so far."""
        (own,) = self._positions
        assert own.absolute is not None
        if own.absolute.follows_length and incremental_state is not None and tokens.shape[1] > 1:
            raise ValueError(
                f"{own.encoding} depends on the length of the sequence: generation keeps what was "
                "encoded for a shorter one"
            )
        real = tokens != self.padding_idx
        place = real.cumsum(1) - 1
        return own.absolute(place.clamp(min=0)).masked_fill(~real[..., None], 0)


def _codes(text: str) -> Tensor:
    """Text as a tensor of code points, wide enough to be averaged over checkpoints."""
    return torch.tensor([ord(character) for character in text], dtype=torch.int64)
