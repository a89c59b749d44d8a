"""The encoding of an attention layer as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import ops
from ..encodings import Encoding
from ..ops._torch_private import is_known
from .learned import Learned, LearnedCache, Terms
from .rotation import Frequencies, FrequencySchedule, Rotated, angles
from .scores import Scores
from .tables import refuse_trace


class CacheState:
    """The facts about a cache that an encoding needs: length, frequencies, learned terms."""

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.frequencies: Frequencies | None = None
        self.learned = LearnedCache()


class PositionEncoding(Learned):
    """The encoding of an attention layer: it rotates queries and keys, and adds to the scores.

    `score_terms` attends: it takes what `rotate` and `learn` return. ValueError if the encoding is
    absolute or differs by layer, does not fit the head size, or needs `trained_length`.
    """

    def __init__(
        self,
        encoding: Encoding,
        head_dim: int,
        heads: int,
        *,
        causal: bool,
        trained_length: int | None,
        **learned: Any,
    ) -> None:
        if encoding.adds:
            raise ValueError(
                f"the encoding '{encoding}' is absolute: add its vectors to the token embeddings "
                "with wavepe.nn.AbsoluteEncoding, and give attention layers encoding='none'"
            )
        if any(encoding.layers):
            raise ValueError(
                f"the encoding '{encoding}' differs by layer, and a module is one layer: give it "
                "wavepe.encoding(spec).at(layer, layers)"
            )
        super().__init__(encoding, head_dim, heads, causal, **learned)
        # Slopes alone are the same numbers at every length.
        self._depends_on_length = encoding.in_scores and encoding.terms != ("slopes",)
        self.score_terms = Scores(encoding, head_dim, heads, causal)
        self._schedule: FrequencySchedule | None = None
        self.set_trained_length(trained_length)

    def set_trained_length(self, length: int | None) -> None:
        """Set the length of the sequences in training, on which frequencies may depend."""
        self._schedule = None
        if (rope := self.encoding.rotary) is not None:
            schedule = self._schedule = FrequencySchedule(rope, self._head_dim, length)
            if 2 * schedule.pairs > self._head_dim:
                raise ValueError(
                    f"{rope} rotates {2 * schedule.pairs} dims, more than head_dim={self._head_dim}"
                )

    def fix(self, length: int | None) -> None:
        """Rotate with the frequencies of `length` tokens from now on; None: of each sequence."""
        if self._schedule is not None:
            self._schedule.fix(length)

    def check_fits(self, head_dim: int, heads: int, causal: bool) -> None:
        """Raise ValueError if this is not the encoding of a layer of that kind."""
        sizes = (self._head_dim, self._heads, self._causal)
        if sizes != (head_dim, heads, causal):
            raise ValueError(
                "a position_encoding can be shared by layers of one head_dim, heads and causal; "
                f"got that of {sizes} for {(head_dim, heads, causal)}"
            )

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, state: CacheState | None
    ) -> tuple[Tensor, Tensor, Rotated | None]:
        """Rotate queries and keys of the new tokens by their positions.

        k (B, Hk, L, d) holds the keys of L tokens, and q (B, H, m, d) the queries of the last m.
        `positions` (B|1, L) None counts on from the tokens in the cache, whose state is given. The
        third result is for `Scores.attend`; None if nothing is rotated.
        """
        schedule = self._schedule
        if schedule is None:
            return q, k, None
        start = 0 if state is None else state.length
        current = schedule.needed(start + k.shape[-2], positions, self.training)
        if state is not None:
            before = state.frequencies
            if state.length and before is not None and before != current:
                raise RuntimeError(
                    f"wavepe: the {state.length} cached keys were rotated for {before.label}, but "
                    f"this call rotates for {current.label}: reset() the cache, and compute the "
                    "whole sequence again"
                )
            state.frequencies = current
        cos, sin = angles(current, k, positions, start=start)
        interleaved = bool(schedule.rope.interleaved)
        if is_known(q.shape[-2] == k.shape[-2]):
            rotated_q, k = ops.rope_qk(q, k, cos, sin, interleaved=interleaved)
            return rotated_q, k, Rotated(cos, sin, interleaved, q)
        k = ops.rope(k, cos, sin, interleaved=interleaved)
        first_query = k.shape[-2] - q.shape[-2]
        cos, sin = cos[..., first_query:, :], sin[..., first_query:, :]
        rotated_q = ops.rope(q, cos, sin, interleaved=interleaved)
        return rotated_q, k, Rotated(cos, sin, interleaved, q)

    def cache_state(self, length: int) -> CacheState:
        """Return the state of a cache of `length` tokens that another module keeps."""
        state = CacheState(length)
        if self._schedule is not None:
            state.frequencies = self._schedule.needed(length, None, self.training)
        return state

    def learn(
        self,
        tokens: int,
        state: CacheState | None = None,
        shared: Terms | None = None,
        x: Tensor | None = None,
    ) -> Terms:
        """Return the learned terms of the encoding, for `score_terms`.

        `tokens` counts those in the cache, too. `shared` are the terms that another module learns
        for several layers, and x (B, L, dim) is the input of the layer, of the new tokens.
        """
        if self._depends_on_length:
            refuse_trace(self.encoding)
        if not self.has_parameters:
            return shared or {}
        learned: Terms = self(max(tokens, 1), None if state is None else state.learned, shared, x)
        return learned

    def extra_repr(self) -> str:
        return str(self.encoding)
