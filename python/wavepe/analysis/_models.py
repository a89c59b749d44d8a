"""What the analyses that run a model share: its tokens, its mode, and a look into its layers."""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .._runtime import command_for

if TYPE_CHECKING:
    import torch

# Told after each pass how many tokens of how many are done.
Progress = Callable[[int, int], object]


def need_torch(function: str) -> None:
    """Raise ImportError with the command that brings torch, where it is missing."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ImportError(
            f"wavepe.analysis.{function} needs torch: {command_for('torch')}"
        ) from None


def need_transformers(function: str) -> None:
    """Raise ImportError with the command that brings transformers, where it is missing."""
    need_torch(function)
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ImportError(
            f"wavepe.analysis.{function} needs transformers: {command_for('hf')}"
        ) from None


def check_integer(name: str, value: int, least: int) -> int:
    """Return `value` as an int of at least `least`."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: needs an integer") from None
    if value < least:
        raise ValueError(f"{name} is {value}: needs at least {least}")
    return value


def check_model(model: torch.nn.Module) -> None:
    """Raise TypeError for what is no module."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: needs a torch.nn.Module")


def check_tokens(
    model: torch.nn.Module, tokens: torch.Tensor, least: int, what: str
) -> torch.Tensor:
    """Return `tokens` as int64 on the model's device; `what` names the `least` of them."""
    import torch

    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"tokens is a {type(tokens).__name__}: needs a 1-D integer torch.Tensor")
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise TypeError(f"tokens has dtype {tokens.dtype}: needs an integer one")
    if tokens.layout is not torch.strided or tokens.is_nested:
        raise TypeError("tokens is sparse or nested: needs a plain tensor")
    if tokens.dim() != 1:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}: needs one dimension")
    if len(tokens) < least:
        raise ValueError(f"tokens holds {len(tokens)}: needs at least {what}")
    check_model(model)
    tokens = tokens.to(device=device_of(model), dtype=torch.int64)
    low, high = tokens.min().item(), tokens.max().item()
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or high + 1
    if low < 0 or high >= vocabulary:
        raise ValueError(f"tokens hold ids {low}..{high}: needs ids in 0..{vocabulary - 1}")
    return tokens


def device_of(model: torch.nn.Module) -> torch.device | None:
    """Return where the model's first parameter is; None for a model without parameters."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; each module's own mode comes back."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # not inference_mode: a table the model caches now must stay usable in training
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def last_logits(model: torch.nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logits of the last `count` places, (B, count, vocabulary).

    A model that can leaves the others out: those of a long context may not fit into memory.
    """
    given = inspect.signature(model.forward).parameters
    few = {"logits_to_keep": count} if "logits_to_keep" in given else {}
    return model(input_ids=ids, use_cache=False, **few).logits[:, -count:]


@contextmanager
def other_globals(
    model: torch.nn.Module, choose: Callable[[torch.nn.Module, Any], dict[str, Any]]
) -> Iterator[None]:
    """Within, layers run with other globals; the model is restored at the end.

    `choose(module, forward)` returns what the forward of this one module shall see in place of its
    globals, or an empty dict. Other models of the same class, and other threads, see nothing of it.
    What was compiled runs as it was written.

    Raises
    ------
    ValueError
        A chosen module has a forward of its own that hides the class's.
    """
    import torch

    with ExitStack() as restore:
        if "torch._dynamo" in sys.modules:
            restore.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            forward: Any = inspect.unwrap(type(module).forward)
            if not isinstance(forward, types.FunctionType):
                continue
            new = choose(module, forward)
            if new:
                _replace_forward(module, forward, new, restore)
        yield


def _replace_forward(
    module: torch.nn.Module, forward: Any, new: dict[str, Any], restore: ExitStack
) -> None:
    held = vars(module)
    # A hook of accelerate keeps there what it calls.
    name = "_old_forward" if "_old_forward" in held else "forward"
    own = held.get(name)
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(
            f"this {type(module).__name__} has a forward of its own, which hides what it computes: "
            "restore the class's forward first"
        )
    function = types.FunctionType(
        forward.__code__, {**forward.__globals__, **new}, "forward", forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    function.__kwdefaults__ = forward.__kwdefaults__
    held[name] = types.MethodType(function, module)
    if own is None:
        restore.callback(held.pop, name)
    else:
        restore.callback(held.__setitem__, name, own)
