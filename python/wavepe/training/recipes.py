"""Which encoding a swapped model gets, and how it learns from the stock model.

In transfer steps, each attention layer learns the stock layer's output from the stock layer's
input.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .. import encodings
from ..common.spec import TYPE_PREFIX
from ..encodings import Encoding, RoPE, Wavelet
from ..encodings.wavelet import scale_hint
from ..hf import families, rope_config
from ..hf.config import CLASS_PREFIX
from ..hf.conversion import convert, empty_model
from ..hf.layers import LayerEncodings
from ..hf.patching import encoding_of, patch
from ..hf.rope_config import Slot
from ..hf.rotary import with_base
from .device import without_bars

RECIPES = ("auto", "plain", "transfer")
SHARE, MOST = 1 / 3, 30  # of transfer steps; more than 30 gain nothing
TURNS = 6  # within the training length, of a pair to keep: slower ones fail on longer text


class Recipe(NamedTuple):
    """A recipe for an encoding, with the pairs that are kept; and the reason."""

    name: str
    encoding: Encoding
    transfers: bool
    why: str

    def transfer(self, steps: int) -> int:
        """Return the number of transfer steps."""
        return min(int(steps * SHARE), MOST) if self.transfers else 0


def choose(name: str, spec: Any, base: Any, length: int, source: Any = None) -> Recipe:
    """Return the recipe `name` for a model with the decoder `base`.

    `spec` is the user's encoding, and `length` the tokens of a sequence in training. `source` is
    the encoding that the model has, a str or a dict of layers; None is the stock rotation.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    encoding, why = encodings.encoding(spec), "the encoding as it is given"
    size = math.gcd(*(heads.head_dim for heads in families.sizes(base)))
    if name == "plain":
        why += "; every step trains on the next token"
    elif name == "auto" and any(encoding.layers):
        why += ", because it is not that of all layers"
    elif name == "auto":
        encoding, why = _by_rule(encoding, base, size, length, source)
    with suppress(ValueError):  # `check_fit` says what does not fit
        if hint := scale_hint(encoding, size, length):
            why += f"; {hint}"
    return Recipe(name, encoding, name != "plain", f"{name}: {why}")


def _by_rule(
    wanted: Encoding, base: Any, size: int, length: int, source: Any
) -> tuple[Encoding, str]:
    """Return what "auto" takes: kept pairs, wavelets that learn, and scales that training sees."""
    rope, why = None, "it does not only add to all scores"
    if wanted.terms and not (wanted.rotary or wanted.adds):
        rope, why = _kept_rotation(base, length, source)
    parts: list[Any] = [_with_scales(part, size, length) for part in wanted.parts]
    counts = [x.scales for x, old in zip(parts, wanted.parts, strict=True) if x != old]
    if rope is None:
        why = f"the encoding as it is given, because {why}"
    else:
        learning = [_richer(part) for part in parts]
        kept = f"{int(rope.fraction * (size // 2))}/{size // 2}"
        why = f"keeps {why} ({kept} of all pairs)"
        if learning != parts:
            why += ", and gives wavelets biases and a projection"
        parts = [rope, *learning]
    if counts:
        why += f"; {counts[0]} scales, so that the largest is at most a quarter of {length} tokens"
    return encodings.encoding("+".join(map(str, parts))), why


def _with_scales(part: Encoding, size: int, length: int) -> Encoding:
    """Return a wavelet with fewer scales, if it has a number of them that is too large."""
    if not isinstance(part, Wavelet) or isinstance(part.scales, tuple):
        return part
    columns = part.table_columns(size)
    if columns % part.scales and part.scales != Wavelet.scales:
        return part  # a number that the user chose, which `check_fit` refuses
    fewer = (n for n in range(part.scales, 0, -1) if columns % n == 0)
    wavelets = (dataclasses.replace(part, scales=n) for n in fewer)
    return next((x for x in wavelets if not scale_hint(x, size, length)), part)


def _richer(part: Encoding) -> Encoding:
    if not isinstance(part, Wavelet) or part.learned:
        return part
    return dataclasses.replace(part, biases=True, projection=True)


def untrained(model: Any, longest: int) -> dict[str, str]:
    """Return YaRN and Self-Extend for `longest` tokens, the rivals that need no training.

    Those that fit: none on trained lengths or for other encodings, and for llama3 no YaRN.
    """
    config = families.decoder(model).config
    trained = config.max_position_embeddings
    kind = (config.rope_parameters or {}).get("rope_type")
    plain = kind in ("default", "llama3") and not families.of(config).is_partial
    if encoding_of(model) or not plain or longest <= trained:
        return {}
    extend = f"rope:self_extend={max(32, 2 * longest // trained)},neighbors={trained // 2}"
    yarn = {"yarn": f"rope:type=yarn,factor={longest / trained:g}"} if kind == "default" else {}
    return {**yarn, "self-extend": extend}


def _kept_rotation(base: Any, length: int, source: Any) -> tuple[RoPE | None, str]:
    """Return RoPE with the pairs to keep, and which they are; or None, and why none is kept."""
    config = base.config
    stock = families.of(config).encoding
    current = encodings.encoding(source or stock) if isinstance(source, str | None) else None
    rope: Any = None if current is None or any(current.layers) else current.rotary
    if not isinstance(rope, RoPE) or rope != RoPE(theta=rope.theta, fraction=rope.fraction):
        return None, f"{source or stock} is replaced"
    if rope.fraction != 1:  # an earlier adaptation, say, has chosen
        return rope, "the pairs that the model rotates"
    if families.of(config).is_partial:
        return None, "the model rotates a part of each head"
    scaled = rope
    if rope.theta is None:
        if list(rope_config.bases(config)) != [rope_config.ALL_LAYERS]:
            return None, "the layers of the model have several bases"
        scaled = with_base(rope, config, Slot())
    size = max(heads.head_dim for heads in families.sizes(base))
    lengths = {"length": length, "trained_length": config.max_position_embeddings}
    frequencies, factor = scaled.frequencies(size, **lengths)
    turning = int((frequencies * length >= TURNS * 2 * math.pi).sum())
    if not turning:
        return None, f"no pair turns {TURNS} times within {length} tokens"
    if scaled.type is not None:  # a fraction goes without a type, and with theta ours has none
        rope = RoPE(theta=scaled.theta)
        plain = rope.frequencies(size)[0]
        if factor != 1 or not np.allclose(frequencies[:turning], plain[:turning], 1e-9, 0):
            return None, f"the model scales its fast pairs, too (rope_type {scaled.type})"
    # rounded down, it would lose a pair
    rope = dataclasses.replace(rope, fraction=math.ceil(1e6 * turning / len(frequencies)) / 1e6)
    return rope, f"the pairs of the stock rotation that turn {TURNS} times within {length} tokens"


def check_fit(model: Any, encoding: Encoding) -> None:
    """Raise ValueError if the model cannot have the encoding, before the work begins."""
    config = model.config.to_dict()
    kind = TYPE_PREFIX + str(config["model_type"]).removeprefix(TYPE_PREFIX)
    name = CLASS_PREFIX + type(model).__name__.removeprefix(CLASS_PREFIX)
    config |= {"model_type": kind, "architectures": [name], "position_encoding": str(encoding)}
    empty_model("the model", config, LayerEncodings(encoding))


def swapped(model: Any, encoding: Encoding) -> Any:
    """Return the model with another encoding; only a stock model can change in place."""
    before = encoding_of(model)
    if before == str(encoding):
        return model
    with tempfile.TemporaryDirectory() as place, without_bars(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the largest scale is")  # the recipe has said so
        if before is None:
            return patch(model, encoding)
        model.save_pretrained(f"{place}/before")
        convert(f"{place}/before", f"{place}/after", encoding)
        new = AutoModelForCausalLM.from_pretrained(f"{place}/after", dtype=model.dtype)
    new.config._name_or_path = model.config._name_or_path
    return new.to(model.device)


class Teacher:
    """A frozen stock model whose attention layers are learned."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    def loss(self, student: nn.Module, bare: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the mean relative squared error of attention outputs.

        `student` is the patched model as it is trained, and `bare` that without any wrapper.
        """
        device = next(student.parameters()).device
        last = torch.tensor([-1], device=device)  # given a 1, a Gemma 4 leaves tokens out of layers
        batch = {"input_ids": inputs["input_ids"], "use_cache": False, "logits_to_keep": last}
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        with (
            torch.no_grad(),
            _recorded(families.attentions(families.decoder(self.model))) as wanted,
            _layer_inputs(self.model) as layer_inputs,
        ):
            self.model(**batch)
        with (
            _recorded(families.attentions(families.decoder(bare))) as learned,
            _recorded(families.decoder(bare).layers) as outputs,
            _layer_inputs(bare, layer_inputs),
            _attention_alone(bare),
        ):
            # As the output of the pass, so that wrappers see which parameters it depends on. FSDP2
            # gathers those of a layer when the gradient of the layer's output arrives.
            hook = bare.register_forward_hook(
                lambda *_: _error(learned, wanted) + 0 * sum(x.sum() for x in outputs)
            )
            try:
                return student(**batch)
            finally:
                hook.remove()


def _error(learned: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Return the mean over layers and rows, so that a batch may be cut into parts."""
    errors = []
    for got, want in zip(learned, wanted, strict=True):
        error, size = (x.float().flatten(1).pow(2).sum(-1) for x in (got - want, want))
        errors.append(error / size.clamp(min=1e-20))
    return torch.stack(errors).mean()


@contextmanager
def _recorded(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that gets the output of each module."""
    outputs: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        outputs.append(out[0] if isinstance(out, tuple) else out)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield outputs


@contextmanager
def _layer_inputs(
    model: nn.Module, replacements: list[Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Yield a list that gets the input of each decoder layer, or replace the inputs by others."""
    inputs: list[Tensor] = []
    rest = iter(replacements or ())

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        first, *others = args or (kwargs["hidden_states"],)
        if replacements is None:
            inputs.append(first)
            return None
        return (next(rest), *others), {k: v for k, v in kwargs.items() if k != "hidden_states"}

    with ExitStack() as stack:
        for layer in families.decoder(model).layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield inputs


@contextmanager
def _attention_alone(model: nn.Module) -> Iterator[None]:
    """Skip the MLPs, whose outputs no layer reads here; mixtures of experts still run.

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
