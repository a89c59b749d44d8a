"""The position encoding of a decoder, one for all layers, and its record in the checkpoint."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..encodings.base import combine
from ..positions import Learned, PositionEncoding, named_as_in
from ..positions.absolute import AbsoluteVectors
from ..positions.tokens import token_positions


class DecoderPositions(nn.Module):
    """The encoding of one decoder: shared parameters in `attention`, vectors in `absolute`.

    The state dict holds a record of the encoding and of the trained length. So stock fairseq, and
    a model with another encoding, refuse the checkpoint. And options that depend on the trained
    length (``inference_theta=scaled``) are right with any ``--tokens-per-sample`` of an evaluation.
    """

    record: Tensor

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, dim: int, trained_length: int,
        layers: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoding = encoding
        self._sizes, self._layers = (head_dim, heads, dim), layers
        self.attention = Learned(encoding, head_dim, heads, True, layer=False, dim=dim)
        acting = [(part, place) for part, place in encoding.parts_with_layers if not part.adds]
        self._acting = combine(acting) if acting else read_encoding("none")
        # In a tuple, so that they are children of their layers only.
        self._in_layers: tuple[PositionEncoding, ...] = ()
        self.absolute: AbsoluteVectors | None = None
        self.register_buffer("record", torch.empty(0))
        self.set_trained_length(trained_length)

    def build_next_layer(self) -> PositionEncoding:
        """Return the encoding of the next layer, with parameters that no other layer has."""
        encoding = self._acting.at(len(self._in_layers), self._layers)
        head_dim, heads, dim = self._sizes
        built = PositionEncoding(
            named_as_in(self.encoding, encoding), head_dim, heads, causal=True,
            trained_length=self.trained_length, layer=True, dim=dim,
        )  # fmt: skip
        self._in_layers += (built,)
        return built

    def set_trained_length(self, length: int) -> None:
        """Set the trained length, and rebuild what may depend on it."""
        self.trained_length = length
        for layer in self._in_layers:
            layer.set_trained_length(length)
        if self.encoding.adds:
            self.absolute = AbsoluteVectors(self.encoding, self._sizes[2], length)
        trained = self.encoding.trained_as().to_dict()
        text = json.dumps({"encoding": trained, "trained_length": length})
        # Letters as numbers: exact in every dtype, also when equal checkpoints are averaged.
        self.record = torch.tensor([float(ord(letter)) for letter in text]).to(self.record.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        error_msgs = rest[-1]
        letters = state_dict.get(f"{prefix}record")
        if letters is None:
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', but the checkpoint was "
                "trained with fairseq's own positions: do not give pos_enc"
            )
            return
        record = json.loads("".join(chr(round(number)) for number in letters.tolist()))
        trained = read_encoding(record["encoding"])
        if trained != self.encoding.trained_as():
            error_msgs.append(
                f"this model has the position encoding '{self.encoding}', but the checkpoint was "
                f"trained with '{trained}': to continue training, give --pos-enc {trained}; to "
                "evaluate, leave pos_enc out of --model-overrides, or change only options that "
                "matter at inference alone"
            )
            return
        self.set_trained_length(record["trained_length"])


class AbsolutePositions(nn.Module):
    """Vectors for the embeddings, in place of fairseq's embed_positions; those of padding are 0."""

    def __init__(self, positions: DecoderPositions, padding_idx: int) -> None:
        super().__init__()
        self._positions = (positions,)  # in a tuple: it is a child of the decoder
        self.padding_idx = padding_idx

    def forward(self, tokens: Tensor, incremental_state: dict[str, Any] | None = None) -> Tensor:
        """Return vectors, float32 (B, L, dim), for the tokens (B, L) of the sequences so far."""
        (positions,) = self._positions
        vectors = positions.absolute
        assert vectors is not None
        if vectors.follows_length and incremental_state is not None and tokens.shape[1] > 1:
            raise ValueError(
                f"{positions.encoding} depends on the sequence length, but generation keeps the "
                "vectors of a shorter sequence: generate with another encoding"
            )
        real = tokens != self.padding_idx
        return vectors(token_positions(real)).masked_fill(~real[..., None], 0)
