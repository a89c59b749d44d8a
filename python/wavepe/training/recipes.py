"""How a swapped model is trained: which encoding, how many steps of transfer, which rates.

In a step of transfer each attention layer learns the output of the stock layer, on the input of the
stock layer. Steps of language follow, on the next token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import encodings
from ..encodings import Encoding, RoPE
from ..hf import families, rope_config
from ..hf.rope_config import Slot
from ..hf.rotary import with_base

RECIPES = ("auto", "plain", "transfer")
# Steps of transfer: a third of all, but no more than 30, which is as good as more of them.
SHARE, MOST = 1 / 3, 30
# A pair of the stock rotation is kept if it turns this often within the length of training. Slower
# pairs are what fails beyond the trained length.
TURNS = 6


class Recipe(NamedTuple):
    """What `adapt` does.

    Attributes
    ----------
    encoding : Encoding
        With the parts of the stock rotation that are kept.
    transfers : bool
        Whether the first steps are of transfer.
    why : str
        One sentence.
    """

    encoding: Encoding
    transfers: bool
    why: str

    def transfer(self, steps: int) -> int:
        """Return how many of the steps are of transfer."""
        return min(int(steps * SHARE), MOST) if self.transfers else 0


def choose(name: str, spec: Any, base: Any, length: int, source: Any = None) -> Recipe:
    """Return the recipe of that name for a model.

    Parameters
    ----------
    name : "auto", "plain" or "transfer"
    spec : str, dict or Encoding
        The encoding that the user names.
    base : Module
        The decoder of the model.
    length : int
        Tokens of a sequence in training.
    source : str or dict, optional
        The encoding that the model has; None is the stock rotation.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    found = encodings.encoding(spec)
    if name == "plain":
        why = "plain: the encoding as it is given; every step trains on the next token"
        return Recipe(found, False, why)
    if name == "transfer":
        return Recipe(found, True, "transfer: the encoding as it is given")
    if found.rotary is not None or found.adds or any(found.layers) or not found.terms:
        why = "auto: the encoding as it is given, because it does not only add to all scores"
        return Recipe(found, True, why)
    stock = families.stock_encoding(families.family(base.config))
    own = encodings.encoding(source or stock) if isinstance(source, str | None) else None
    rope: Any = None if own is None or any(own.layers) else own.rotary
    if not isinstance(rope, RoPE) or rope != RoPE(theta=rope.theta, fraction=rope.fraction):
        return Recipe(
            found, True, f"auto: the encoding as it is given, because {source or stock} is replaced"
        )
    which = "the pairs that the model rotates"
    if rope.fraction == 1:  # else an earlier adaptation, say, has chosen
        which = f"the pairs of the stock rotation that turn {TURNS} times within {length} tokens"
        rope = _kept(base, length, rope)
        if isinstance(rope, str):
            return Recipe(found, True, f"auto: the encoding as it is given, because {rope}")
    parts = [_richer(part) for part in found.parts]
    why = f"auto: keeps {which} (fraction {rope.fraction:g})"
    if parts != list(found.parts):
        why += ", and gives wavelets biases and a projection"
    return Recipe(encodings.encoding("+".join(map(str, [rope, *parts]))), True, why)


def _richer(part: Encoding) -> Encoding:
    if part.name != "wavelet" or part.learned:
        return part
    return dataclasses.replace(part, biases=True, projection=True)  # type: ignore[call-arg]


def _kept(base: Any, length: int, rope: RoPE) -> RoPE | str:
    """Return `rope` with the fraction of pairs that turn often enough, or why none is kept."""
    config = base.config
    if families.family(config) in families.PARTIAL:
        return "the model rotates a part of each head"
    own = rope
    if rope.theta is None:
        if list(rope_config.bases(config)) != [rope_config.ALL_LAYERS]:
            return "the layers of the model have several bases"
        own = with_base(rope, config, Slot())
    size = max(families.head_dims(base))
    lengths = {"length": length, "trained_length": config.max_position_embeddings}
    found, factor = own.frequencies(size, **lengths)
    turning = int((found * length >= TURNS * 2 * math.pi).sum())
    if not turning:
        return f"no pair turns {TURNS} times within {length} tokens"
    if own.type is not None:  # a fraction goes without a type, and with theta ours has none
        rope = RoPE(theta=own.theta)
        plain = rope.frequencies(size)[0]
        if factor != 1 or not np.allclose(found[:turning], plain[:turning], 1e-9, 0):
            return f"the model scales its fast pairs, too (rope_type {own.type})"
    # rounded down, it would lose a pair
    return dataclasses.replace(rope, fraction=math.ceil(1e6 * turning / len(found)) / 1e6)


# ---- transfer -----------------------------------------------------------------------------------


class Teacher:
    """A frozen stock model whose attention layers are learned."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    def loss(self, student: nn.Module, bare: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the mean relative squared error of attention outputs.

        Parameters
        ----------
        student : nn.Module
            The patched model as it is trained, wrapped or not.
        bare : nn.Module
            The patched model itself.
        inputs : dict
            A batch.
        """
        place = next(student.parameters()).device
        last = torch.tensor([-1], device=place)  # given a 1, a Gemma 4 leaves tokens out of layers
        given = {"input_ids": inputs["input_ids"], "use_cache": False, "logits_to_keep": last}
        if next(self.model.parameters()).device != place:
            self.model.to(place)
        with (
            torch.no_grad(),
            _recorded(_attentions(self.model)) as wanted,
            _hidden(self.model) as hidden,
        ):
            self.model(**given)
        layers = families.decoder(bare).layers
        with (
            _recorded(_attentions(bare)) as found,
            _recorded(layers) as outputs,
            _hidden(bare, hidden),
            _attention_alone(bare),
        ):
            # As the output of the pass, so that wrappers see which parameters it depends on. FSDP2
            # gathers those of a layer when the gradient of the layer's output arrives.
            hook = bare.register_forward_hook(
                lambda *_: _error(found, wanted) + 0 * sum(x.sum() for x in outputs)
            )
            try:
                return student(**given)
            finally:
                hook.remove()


def _error(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Return the mean over layers and rows, so that a batch may be cut into parts."""
    errors = []
    for got, want in zip(found, wanted, strict=True):
        error, size = (x.float().flatten(1).pow(2).sum(-1) for x in (got - want, want))
        errors.append(error / size.clamp(min=1e-20))
    return torch.stack(errors).mean()


def _attentions(model: nn.Module) -> list[Any]:
    return families.attentions(families.decoder(model))


@contextmanager
def _recorded(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that gets the output of each module."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield found


@contextmanager
def _hidden(model: nn.Module, given: list[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Yield a list that gets the input of each decoder layer, or give the layers these inputs."""
    found: list[Tensor] = []
    rest = iter(given or ())

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        first, *others = args or (kwargs["hidden_states"],)
        if given is None:
            found.append(first)
            return None
        return (next(rest), *others), {k: v for k, v in kwargs.items() if k != "hidden_states"}

    with ExitStack() as stack:
        for layer in families.decoder(model).layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield found


@contextmanager
def _attention_alone(model: nn.Module) -> Iterator[None]:
    """Leave out the MLPs, whose outputs no layer reads here; mixtures of experts still run.

    Recomputing in the backward pass would come after the hooks are gone, so layers keep all.
    """
    with ExitStack() as stack:
        for layer in families.decoder(model).layers:
            mlp: Any = getattr(layer, "mlp", None)
            if type(mlp).__name__.endswith("MLP"):
                mlp.forward = torch.zeros_like
                stack.callback(delattr, mlp, "forward")
            if layer.gradient_checkpointing:
                layer.gradient_checkpointing = False
                stack.callback(setattr, layer, "gradient_checkpointing", True)
        yield
