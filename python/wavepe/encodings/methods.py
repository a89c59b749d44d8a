"""The methods of `Encoding`: a class overrides those that apply to it."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.relative_bias import BEYOND, Bias, Table
from ..common import checks

if TYPE_CHECKING:
    from torch import Tensor as Tensor

    once = property  # a class may override it by a property of its own
else:
    Tensor = Any  # because no encoding needs torch before a method gets tensors
    once = functools.cached_property  # an encoding never changes

Tensors = Mapping[str, Tensor]
Arrays = dict[str, np.ndarray]

# Terms of the scores. A method has the name of its term; a learned term has a method
# learned_<term>, too.
TERMS = ("table", "slopes", "bias")
# Things that a model can train, and the method that uses the parameters.
LEARNED = {
    "table": "learned_table",
    "bias": "learned_bias",
    "query": "learned_query",
    "sinks": "learned_sinks",
    "vectors": "score_vectors",
    "input_query": "input_query",
    "input_decay": "input_decay",
    "input_sinks": "input_sinks",
}
FROM_INPUT = ("input_query", "input_decay", "input_sinks")


class Query(NamedTuple):
    """Hold what an encoding learns for the queries: score = ((q + u).k + ((q + v) W).p) / sqrt(d).

    Attributes
    ----------
    u : Tensor (heads, head_dim), optional
        The vector that is added to the queries for the keys. None adds nothing.
    v : Tensor (heads, head_dim), optional
        The vector that is added to the queries for the table. None adds nothing.
    projection : Tensor (heads, head_dim, columns), optional
        The matrix W of each head, for a table of so many columns. None is the identity.
    """

    u: Tensor | None = None
    v: Tensor | None = None
    projection: Tensor | None = None


class Methods:
    """The methods that say what an encoding does. Here none applies.

    Their arguments have the same meaning in all methods.

    Parameters of the methods
    -------------------------
    positions : integer array (...) or scalar
        Positions of tokens, counted from 0.
    dim : int
        Size of the token embeddings.
    head_dim, heads : int
        Head size, and number of query heads.
    length : int, optional
        In `absolute` and `rope_table` the length of the whole current sequence; None is the largest
        position + 1. A decoding step with a cache must give it to an encoding that depends on it.
        In `table` and `bias` the number of tokens that need rows. A row depends on its distance
        alone, because modules ask for more tokens than there are.
    trained_length : int, optional
        Length of the sequences in training, for the encodings that need it.
    causal : bool
        True needs the distances delta = 0..length-1 only. False also needs the negative ones, from
        1-length.
    parameters : mapping of str to Tensor
        Tensors with the names and shapes of `parameters`; empty if nothing is learned.
    x : Tensor (B, m, dim)
        The input of the attention layer.

    Tables and biases are returned with their range: rows or numbers of delta = first..first+w-1,
    and what stands for the deltas outside, "zero" or "edge" (the nearest row).
    """

    name: ClassVar[str]
    learned: bool = False

    @once
    def adds(self) -> bool:
        """Whether vectors are added to the token embeddings."""
        return self._has("absolute")

    @once
    def rotates(self) -> bool:
        """Whether q and k are rotated."""
        return self._has("rope_table")

    @once
    def in_attention(self) -> bool:
        """Whether attention layers differ from those without positions."""
        return self.rotates or self.in_scores

    @once
    def in_scores(self) -> bool:
        """Whether the scores are other than the products of q and k, rotated or not."""
        changed = self.terms or self.learns or self.has_temperature or self.window is not None
        return bool(changed) or self.has_vectors

    @once
    def learns(self) -> tuple[str, ...]:
        """The things that a model trains: a selection of the keys of `LEARNED`."""
        if not self.learned:
            return ()
        return tuple(key for key, method in LEARNED.items() if self._has(method))

    @once
    def reads_input(self) -> bool:
        """Whether the encoding reads the input of the attention layer."""
        return not set(FROM_INPUT).isdisjoint(self.learns)

    @once
    def has_temperature(self) -> bool:
        """Whether queries get a factor that depends on their position."""
        return self._has("temperature")

    @property
    def input_temperature(self) -> Methods | None:
        """The `temperature` that multiplies the queries of `input_query` alone, if any."""
        return None

    @once
    def has_vectors(self) -> bool:
        """Whether `score_vectors` makes other vectors of q and k."""
        return self._has("score_vectors")

    @property
    def window(self) -> int | None:
        """The distance at which keys are hidden, and beyond it; None hides none."""
        return None

    @once
    def terms(self) -> tuple[str, ...]:
        """The terms of the scores: a selection of "table", "slopes" and "bias"."""
        learns = self.learns
        return tuple(term for term in TERMS if term in learns or self._has(term))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without what is computed once, for copies and pickles."""
        cls, computed = type(self), functools.cached_property
        kept = [name for name in vars(self) if not isinstance(getattr(cls, name, None), computed)]
        return {name: getattr(self, name) for name in kept}

    def _has(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Methods, method)

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return the vectors to add to the token embeddings, float64 (..., dim)."""
        self._does_not_apply("absolute")

    def rope_table(
        self, positions: ArrayLike, head_dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return cosines and sines that rotate q and k at inference, each float32 (..., pairs)."""
        self._does_not_apply("rope_table")

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        """Return the table p of a relative encoding, float32 (w, head_dim).

        There may be fewer rows than distances. A learned encoding returns its initial values; of
        tables for each head, that of the first.
        """
        return Table(*self._initial_term("table", length, causal, head_dim=head_dim))

    def table_columns(self, head_dim: int) -> int:
        """Return the number of columns of the table: the head size, if the query itself reads it.

        Another number needs `learned_query` with a projection, or `input_query`.
        """
        return head_dim

    def slopes(self, heads: int) -> np.ndarray:
        """Return float64 slopes (heads,); the score loses slope * abs(delta)."""
        self._does_not_apply("slopes")

    def bias(self, length: int, heads: int, *, causal: bool = True) -> Bias:
        """Return the bias of each head and distance, float64 (heads, w).

        It is added to the score and not scaled. A learned encoding returns its initial values.
        """
        return Bias(*self._initial_term("bias", length, causal, heads=heads))

    def temperature(self, positions: ArrayLike) -> np.ndarray:
        """Return the factor on the query of each position, float64; Tensors give a Tensor.

        It multiplies the products with keys and tables, but no slope and no bias.
        """
        self._does_not_apply("temperature")

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the names and initial values, float64, of what a learned encoding learns.

        The front end turns them into tensors, owns them and trains them. Encodings that read the
        layer's input take one more argument: dim, the size of a token's vector. In a combination a
        name is <part>.<parameter>.
        """
        self._learns_not("parameters", "nothing")

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        """Return the table of a learned encoding for its parameters. It needs torch.

        It is (w, head_dim), or (heads, w, head_dim) with a table for each head, in the dtype of the
        parameters and differentiable in them.
        """
        self._learns_not("learned_table", "no table")

    def learned_bias(self, length: int, parameters: Tensors, *, causal: bool = True) -> Bias:
        """Return the bias (heads, w) of a learned encoding, as `learned_table` does its table."""
        self._learns_not("learned_bias", "no bias")

    def learned_query(self, parameters: Tensors) -> Query:
        """Return u, v and the projection of a learned encoding; `Query` has the formula."""
        self._learns_not("learned_query", "nothing for the queries")

    def learned_sinks(self, parameters: Tensors) -> Tensor:
        """Return numbers (heads,) that join the softmax, each as a score without a value."""
        self._learns_not("learned_sinks", "no sinks")

    def score_vectors(
        self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, parameters: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors whose products are the scores, with any number of columns.

        q is (B, heads, m, d), k (B, key heads, n, d), both rotated if the encoding rotates. Their
        places are the int64 Tensors `queries` (B|1, m) and `keys` (B|1, n), of which only the
        differences matter. The vectors are made when they are needed: a cache holds k itself. The
        factor on the products stays that of q's own size. An encoding that rotates gets the dims of
        a head that are rotated; the others stay as they are.
        """
        self._does_not_apply("score_vectors")

    def input_query(self, x: Tensor, parameters: Tensors) -> Tensor:
        """Return the queries of the table from the layer's input, (B, heads, m, columns).

        Their products with the table are added to the score, and not scaled.
        """
        self._learns_not("input_query", "no queries from the input")

    def input_decay(self, x: Tensor, parameters: Tensors) -> Tensor:
        """Return what each token adds to the scores of all earlier keys, (B, heads, m).

        The score of query i and key j gets the sum over the tokens j+1..i. It is not scaled, and
        float32 (float64 for float64 parameters).
        """
        self._learns_not("input_decay", "no decay from the input")

    def input_sinks(self, x: Tensor, parameters: Tensors) -> Tensor:
        """Return numbers (B, heads, m), one of each query, that join as `learned_sinks` do."""
        self._learns_not("input_sinks", "no sinks from the input")

    def _initial_term(
        self, term: str, length: int, causal: bool, head_dim: int = 2, heads: int = 1
    ) -> tuple[np.ndarray, int, str]:
        """Return a learned term at the initial values, for classes that write it in torch only."""
        if term not in self.learns:
            self._does_not_apply(term)
        length = checks.integer(f"{self.name} length", length, 1)
        causal = checks.flag("causal", causal)
        import torch

        initial = initial_parameters(self, head_dim, heads, 1)
        tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in initial.items()}
        method, size = f"learned_{term}", {"heads": heads, "head_dim": head_dim}
        returned = getattr(self, method)(length, tensors, causal=causal)
        rows, first, beyond = checked_return(self, method, returned, **size)
        rows = rows[0] if term == "table" and rows.dim() == 3 else rows
        return rows.numpy().astype(np.float32 if term == "table" else np.float64), first, beyond

    def _does_not_apply(self, method: str) -> NoReturn:
        methods = ["absolute"] * self.adds + ["rope_table"] * self.rotates + [*self.terms]
        methods += ["temperature"] * self.has_temperature
        raise NotImplementedError(
            f"{method}() does not apply to the encoding '{self}': it has "
            f"{' and '.join(f'{key}()' for key in methods) or 'no such method'}"
        )

    def _learns_not(self, method: str, learned: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() does not apply to the encoding '{self}': it learns {learned}"
        )


def input_queries(x: Tensor, r_proj: Tensor) -> Tensor:
    """Return W x of each head, (B, heads, m, columns); r_proj (heads, columns, dim) holds the W."""
    r = x @ r_proj.flatten(0, 1).to(x.device, x.dtype).mT
    return r.unflatten(-1, r_proj.shape[:2]).transpose(1, 2)


def initial_parameters(encoding: Methods, head_dim: int, heads: int, dim: int | None) -> Arrays:
    """Return `encoding.parameters`; ValueError if it needs the size of the layer's input."""
    if not encoding.reads_input:
        return encoding.parameters(head_dim, heads)
    if dim is None:
        raise ValueError(
            f"'{encoding}' reads the input of the attention layer and needs its size: give dim="
        )
    parameters_with_dim: Any = encoding.parameters
    return dict(parameters_with_dim(head_dim, heads, dim=dim))


def checked_return(
    encoding: Methods, method: str, returned: Any, *, heads: int, head_dim: int
) -> tuple[Any, int, str]:
    """Return what a method of an encoding returned; TypeError or ValueError if it is wrong."""
    is_bias = method.endswith("bias")

    def says() -> str:
        kind = "Bias(b, first, beyond)" if is_bias else "Table(p, first, beyond)"
        return f"'{encoding}': {method}() must return {kind}"

    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise TypeError(f"{says()}, got {type(returned).__name__}")
    rows, first, beyond = returned
    is_integer = isinstance(first, numbers.Integral) or type(first).__name__ == "SymInt"
    if isinstance(first, bool) or not is_integer:
        raise TypeError(f"{says()} with an integer first, got first={first!r}")
    if beyond not in BEYOND:
        raise ValueError(f"{says()} with beyond 'zero' or 'edge', got beyond={beyond!r}")
    shape, columns = tuple(rows.shape), 0 if is_bias else encoding.table_columns(head_dim)
    if is_bias:
        fits = len(shape) == 2 and shape[0] == heads
    else:
        fits = len(shape) == 2 or (len(shape) == 3 and shape[0] == heads)
        fits = fits and shape[-1] == columns
    if not fits:
        sizes = f"({heads}, w)" if is_bias else f"(w, {columns}) or ({heads}, w, {columns})"
        raise ValueError(f"{says()} of shape {sizes}, got {shape}")
    return returned
