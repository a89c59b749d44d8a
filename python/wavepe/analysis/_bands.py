"""The frequency band of a rotary head: the pair that is largest, by theory and in a model [F]."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from ..common.errors import require
from ._models import check_tokens, evaluating, outputs

if TYPE_CHECKING:
    import torch

# V has its maximum at this angle, in radians.
_BAND_ANGLE = 3.6572100979832105
# Names of the functions of transformers that rotate queries and keys of text.
_ROTATES = re.compile(r"apply_(?!.*vision).*(rotary|rope)")
# These families rotate one tensor at a time, and the key first.
_KEY_FIRST = ("gptj", "codegen")
# Neither 0 nor 1, so that a rotated dim depends on both dims of its pair.
_COS, _SIN = 0.6, 0.8
_one_at_a_time = threading.Lock()


def band_variance(x: ArrayLike) -> np.ndarray:
    """Return the variance of a cosine over the angle from 0 to x, float64 in the shape of x.

    V(x) = 1/2 + sin(2x)/(4x) - (sin(x)/x)^2, with an error of at most 1e-15. A pair with a large
    variance tells positions apart best. V(0) is 0, and the largest value is V(3.6572) = 0.5405.

    Parameters
    ----------
    x : array (...) of real numbers
        Angle in radians that a pair turns over the trained length.

    References
    ----------
    Oka et al., "Frequency Bands in RoPE", ICLR 2026.

    Examples
    --------
    >>> import wavepe.analysis
    >>> wavepe.analysis.band_variance([0.0, 3.6572]).round(4)
    array([0.    , 0.5405])
    """
    x = checks.real_array("x", x).astype(np.float64)
    return 0.5 + 0.5 * np.sinc(2 * x / np.pi) - np.sinc(x / np.pi) ** 2


def predicted_band(dim: int, theta: float, length: int) -> float:
    """Return j*, the index of the rotary pair at which keys are predicted to be largest.

    j* = (dim/2) log_theta(length / 3.6572), not rounded. The cosine of this pair varies most over
    the trained length; see `band_variance`, also for the source. j* lies outside 0..dim/2-1 if no
    pair turns so slowly or so fast.

    Parameters
    ----------
    dim : int
        Head size, even.
    theta : float
        The base, above 1.
    length : int
        The trained length in tokens, at least 1.

    Examples
    --------
    >>> import wavepe.analysis
    >>> round(wavepe.analysis.predicted_band(128, 10000.0, 4096), 2)
    48.79
    """
    dim = checks.even("dim", dim, 1)
    theta = checks.positive("theta", theta)
    if theta <= 1:
        raise ValueError(f"theta must be above 1, got {theta}")
    length = checks.integer("length", length, 1)
    return dim / 2 * math.log(length / _BAND_ANGLE) / math.log(theta)


def measured_band(
    model: torch.nn.Module, tokens: torch.Tensor, *, of: str = "key"
) -> dict[str, Any]:
    """Return the frequency band of each head: the rotary pair that is largest most often.

    At each position, one pair of the key (or query) has the largest L2 norm. The band i_band of a
    head is the index of the pair for which this is so at most positions. If two pairs are equal,
    it is the lower index.

    Parameters
    ----------
    model, tokens : as for all analyses (`wavepe.analysis`)
        A causal model of transformers with a rotary embedding: pairs (i, i + h) or (2i, 2i + 1), in
        the whole head or a part of it. The positions of the tokens are 0..n-1.
    of : {"key", "query"}
        Measure the keys or the queries.

    Returns
    -------
    dict
        "band": int array (layers, heads), where "key" counts key heads. Pair 0 turns fastest. Rows
        of layers that do not rotate hold -1. "mean": float, the mean of all bands. "heatmap":
        float64 array (n, pairs), the norm of each pair at each position, as a mean over layers and
        heads.

    Notes
    -----
    The norms are taken of the vectors that the model rotates. A norm or a scaling that a family
    applies after the rotation is not in them. Pairs that p-RoPE leaves unrotated count as pairs. A
    model without rotary pairs raises ValueError.

    References
    ----------
    Oka et al., "Frequency Bands in RoPE", ICLR 2026.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from wavepe.analysis import measured_band
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...     num_attention_heads=4))
    >>> bands = measured_band(model, torch.arange(16))
    >>> bands["band"].shape, bands["heatmap"].shape
    ((2, 4), (16, 4))
    """
    require("wavepe.analysis.measured_band", torch="torch", transformers="hf")
    checks.choice("of", of, ("key", "query"))
    tokens = check_tokens(model, tokens, 1, "one")
    rotations = _Rotations(model, of, len(tokens))
    with evaluating(model), rotations.watching(model):
        if rotations.layers:
            outputs(model, tokens[None], 1)
    return rotations.result()


class _Rotations:
    """Measures the queries or keys that the layers of a model rotate, while the model runs."""

    def __init__(self, model: torch.nn.Module, of: str, length: int) -> None:
        self.model = type(model).__name__
        # Index of the argument to measure, in a function that rotates both tensors.
        self.argument = 1 if of == "key" else 0
        kind = getattr(getattr(model, "config", None), "model_type", None)
        # Number of the call to measure, for a function that rotates one tensor.
        self.call = 0 if (of == "key") == (kind in _KEY_FIRST) else 1
        self.unrotated = _unrotated(model)
        self.layers: list[torch.nn.Module] = []
        self.running: Any = (None, None)  # the layer, and its thread
        self.calls: Counter[torch.nn.Module] = Counter()
        self.bands: dict[torch.nn.Module, np.ndarray] = {}
        self.total, self.heads = np.zeros((length, 0)), np.zeros(0)

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Replace the functions that rotate in the forward of layers: they measure these layers."""
        import torch

        with _one_at_a_time, ExitStack() as restore:
            if "torch._dynamo" in sys.modules:
                restore.enter_context(torch.compiler.set_stance("force_eager"))
            for module in model.modules():
                forward: Any = inspect.unwrap(type(module).forward)
                known = getattr(forward, "__globals__", {})
                names = filter(_ROTATES.match, forward.__code__.co_names if known else ())
                if not (rotating := [name for name in names if callable(known.get(name))]):
                    continue
                self.layers.append(module)
                restore.callback(module.register_forward_pre_hook(self._begin).remove)
                for name in rotating:
                    if not hasattr(known[name], "measures"):
                        restore.callback(known.__setitem__, name, known[name])
                        known[name] = self._measuring(known[name])
            yield

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        self.running = module, threading.get_ident()

    def _measuring(self, function: Any) -> Any:
        def measured(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            module, thread = self.running
            if thread != threading.get_ident():  # of another model
                return out
            bound = inspect.signature(function).bind(*args, **kwargs)
            both = isinstance(out, tuple)
            index = self.argument if both else self.call
            if both or self.calls[module] == index:
                rotated = list(bound.arguments)[: len(out) if both else 1]
                self._measure(module, function, bound, rotated, index if both else 0)
            self.calls[module] += 1
            return out

        measured.measures = True  # type: ignore[attr-defined]
        return measured

    def _measure(
        self, module: torch.nn.Module, function: Any, bound: Any, rotated: list[str], index: int
    ) -> None:
        """Add the norms of one argument of a call, `rotated[index]`, to the sums."""
        if getattr(module, "layer_idx", None) in self.unrotated:
            return
        x = bound.arguments[rotated[index]]
        heads_axis, pairs = _pairs(function, bound, rotated, index)
        x = x[0].movedim(heads_axis - 1, 0).double().cpu().numpy()
        norms = np.hypot(x[..., pairs[:, 0]], x[..., pairs[:, 1]])  # (heads, n, pairs)
        largest = norms.argmax(axis=-1)
        self.bands[module] = np.array([np.bincount(row).argmax() for row in largest])
        if norms.shape[-1] > self.heads.size:  # layers may differ in their number of pairs
            more = norms.shape[-1] - self.heads.size
            self.total = np.pad(self.total, ((0, 0), (0, more)))
            self.heads = np.pad(self.heads, (0, more))
        self.total[:, : len(pairs)] += norms.sum(axis=0)
        self.heads[: len(pairs)] += len(norms)

    def result(self) -> dict[str, Any]:
        if not self.bands:
            raise ValueError(
                f"this {self.model} has no rotary pairs: needs a causal model of transformers "
                "whose attention layers rotate queries and keys (RoPE)"
            )
        if any(self.calls[module] > 2 for module in self.bands):
            raise ValueError(f"this {self.model} rotates more than queries and keys in a layer")
        kinds = {type(module) for module in self.bands}
        layers = [module for module in self.layers if type(module) in kinds]
        most = max(map(len, self.bands.values()))
        band = np.full((len(layers), most), -1)
        for row, module in zip(band, layers, strict=True):
            if module in self.bands:
                row[: len(self.bands[module])] = self.bands[module]
        mean = float(band[band >= 0].mean())
        return {"band": band, "mean": mean, "heatmap": self.total / self.heads}


def _unrotated(model: torch.nn.Module) -> set[int]:
    """Return the layers with an encoding of wavepe that is not rotary; ValueError if all are."""
    from .. import hf
    from ..hf.layers import LayerEncodings

    spec = hf.encoding_of(model)
    if spec is None:
        return set()
    chosen = LayerEncodings(spec)
    if chosen.everywhere is not None and not chosen.everywhere.rotates:
        raise ValueError(
            f"this model has the position encoding {spec!r}, which is not rotary: its queries and "
            "keys have no pairs"
        )
    config: Any = next(m.config for m in model.modules() if hasattr(m, "config"))
    by_layer = chosen.by_layer([True] * config.num_hidden_layers)
    return {i for i, part in enumerate(by_layer) if part is not None and not part.rotates}


def _pairs(function: Any, bound: Any, rotated: list[str], index: int) -> tuple[int, np.ndarray]:
    """Return the axis of the heads, 1 or 2, and the two dims of each pair, an array (pairs, 2).

    In rotated unit vectors, each dim depends on the two dims of its pair. The pairs are sorted by
    their first dims, which is the order of falling frequency.
    """
    import torch

    tokens, heads = 2, 3  # they differ, to tell the axes apart
    for heads_axis in (1, 2):
        call = copy.copy(bound)
        call.arguments = dict(bound.arguments)
        for name, value in bound.arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            dim = value.shape[-1]
            if name in rotated:
                unit = torch.eye(dim, device=value.device)[:, None, None]
                shape = (heads, tokens) if heads_axis == 1 else (tokens, heads)
                call.arguments[name] = unit.expand(dim, *shape, dim).clone()
            elif value.is_floating_point() or value.is_complex():
                turn = complex(_COS, _SIN) if value.is_complex() else _COS
                shape = (*value.shape[:-2], tokens, dim)
                call.arguments[name] = torch.full(shape, turn, device=value.device)
        try:
            out = function(*call.args, **call.kwargs)
        except RuntimeError:  # shapes do not match: try the other order of the axes
            continue
        out = out[index] if isinstance(out, tuple) else out
        depends = out[:, 0, 0].cpu().numpy() != 0  # (of the dim given, the dim returned)
        pairs = {tuple(np.flatnonzero(column)) for column in depends.T if column.sum() == 2}
        dims = [dim for pair in pairs for dim in pair]
        if pairs and len(set(dims)) == len(dims) and depends.sum(axis=0).max() == 2:
            return heads_axis, np.array(sorted(pairs))
    raise ValueError(f"{function.__module__}.{function.__name__} rotates no pairs of dims")
