"""Calls whose results must not depend on which private names torch has.

As a program, this imports wavepe in a torch without some names, once for each set of names, and
saves the results of the calls. Each import is in a fork of its own, after torch is imported once.
"""

import importlib
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, before the forks
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

NAMES = {
    "below_autograd": (torch._C, "_AutoDispatchBelowADInplaceOrView"),
    "levels": (torch._C._functorch, "get_interpreter_stack"),
    "forward_mode": (torch.autograd, "forward_ad"),
    "assert_async": (torch, "_assert_async"),
    "check": (torch, "_check"),
    "version": (torch.Tensor, "_version"),
    "modes": (torch._C, "_len_torch_dispatch_stack"),
    "recorder": (torch.utils._python_dispatch, "TorchDispatchMode"),
}
RUNS = {"nothing": (), **{name: (name,) for name in NAMES}, "all": tuple(NAMES)}

FIXED = torch.nn.Parameter(torch.zeros(1))


def take_away(name, patch):
    """Let torch lack this name, until `patch` is undone: its own compiler needs some of them."""
    place, attribute = NAMES[name]
    if name == "forward_mode":  # whose functions need it themselves: without the private names
        public = {n: value for n, value in vars(forward_ad).items() if not n.startswith("_")}
        patch.setattr(place, attribute, types.SimpleNamespace(**public))
    elif name == "version":  # read at each call, so it stays away
        place._version = hidden(torch._C.TensorBase._version.__get__)
    else:
        patch.delattr(place, attribute)


def is_replaced(name):
    """Return whether wavepe uses its replacement of this name."""
    from wavepe.ops import _torch_private

    return {
        "below_autograd": not _torch_private.CAN_GO_BELOW_AUTOGRAD,
        "levels": _torch_private.transformed is _torch_private.under_transforms,
        "forward_mode": _torch_private.transformed is _torch_private.under_transforms,
        "assert_async": _torch_private.assert_async is _torch_private._assert_now,
        "check": _torch_private._check is bool,
        "version": _torch_private.stamps([FIXED]) != _torch_private.stamps([FIXED]),
        "modes": _torch_private.count_modes() > 0,
        "recorder": _torch_private.DispatchMode is None,
    }[name]


def hidden(read):
    """An attribute of torch's objects that torch finds and wavepe does not."""

    def found(x):
        if sys._getframe(1).f_globals["__name__"].startswith("wavepe."):
            raise AttributeError("this torch lacks it")
        return read(x)

    return property(found)


def results():
    """Return the operators' results by name: tensors, or the errors that they raise."""
    from cases import generator
    from op_cases import OPERATORS
    from tensors import normal, table
    from wavepe import nn, ops
    from wavepe.nn._sequences import check_order

    found = {}

    def keep(name, call, *args):
        try:
            value = call(*args)
        except (RuntimeError, NotImplementedError) as error:
            value = f"{type(error).__name__}: {error}"
        found[name] = (
            [value] if isinstance(value, (torch.Tensor, str)) else tree_leaves(list(value))
        )

    rng = generator("private names")
    x, k, v = (normal(rng, 2, heads, 5, 4, dtype=torch.float64) for heads in (2, 1, 1))
    p, bias = normal(rng, 5, 4, dtype=torch.float64), normal(rng, 2, 5, dtype=torch.float64)
    cos, sin = table(rng, 5, 2, dtype=torch.float64)
    constant = ops.relative_table(p)
    calls = {
        "attention": (lambda *qkv: ops.attention(*qkv, p=constant), (x, k, v)),
        "learned": (lambda q, k, v, p, b: ops.attention(q, k, v, p=p, bias=b), (x, k, v, p, bias)),
    }
    for name, op in OPERATORS.items():
        a = op.draw(rng, 3, torch.float64)
        keep(name, lambda op=op, a=a: op.call(a).values())
        if op.leaves:
            calls[name] = op.of_leaves(a)
    for name, (call, args) in calls.items():
        leaves = [arg.clone().requires_grad_() for arg in args]
        directions = [torch.cos(arg) for arg in args]

        def loss(*args, call=call):
            out = call(*args)
            return sum(y.sin().sum() for y in (out if isinstance(out, tuple) else (out,)))

        def dual(call=call, args=args, directions=directions):
            with forward_ad.dual_level():
                pairs = map(forward_ad.make_dual, args, directions)
                out = call(*pairs)
                out = out if isinstance(out, tuple) else (out,)
                return [x for y in out for x in forward_ad.unpack_dual(y)]

        keep(f"{name}, detached", call, *args)
        with torch.inference_mode():
            keep(f"{name}, inference", call, *args)
        keep(f"{name}, gradients", lambda f, xs: torch.autograd.grad(f(*xs), xs), loss, leaves)
        keep(f"{name}, vmap", torch.vmap(call), *(torch.stack([arg, 2 * arg]) for arg in args))
        keep(f"{name}, func.grad", torch.func.grad(loss), *args)
        keep(f"{name}, func.jvp", torch.func.jvp, call, args, tuple(directions))
        keep(f"{name}, forward mode", dual)

    def in_place(x):
        saved = x * x.detach().requires_grad_()
        ops.rope_(x, cos, sin)
        return saved.sum().backward() or x  # backward through overwritten values

    keep("rope_ of a leaf", lambda: ops.rope_(x.clone().requires_grad_(), cos, sin))
    keep("rope_ of what is saved", in_place, x.clone())
    keep("rope_, vmap", torch.vmap(lambda x: ops.rope_(x.clone(), cos, sin)), x)
    keep("rope_, func.grad", torch.func.grad(lambda x: ops.rope_(x.clone(), cos, sin).sum()), x)
    with forward_ad.dual_level():
        keep("raw, forward mode", torch.ops.wavepe.rope, forward_ad.make_dual(x, x), cos, sin)

    # A generation, whose learned bias is kept while its parameters are the same.
    torch.manual_seed(0)
    layer, tokens = nn.SelfAttention(8, 2, encoding="kerple"), normal(rng, 1, 6, 8)
    cache = nn.KVCache()

    def step(tokens):
        with torch.no_grad():
            return layer(tokens, cache=cache)

    keep("prompt", step, tokens[:, :3])
    keep("step", step, tokens[:, 3:4])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    keep("step after a change", step, tokens[:, 4:])

    def ordered(x, positions):
        check_order(positions, None, None, False)
        return ops.rope(x, cos, sin)

    compiled = torch.compile(ordered, backend="eager")
    keep("compiled", compiled, x, torch.arange(5)[None])
    keep("compiled, falling", compiled, x, torch.arange(5).flip(0)[None])
    return found


def main(folder):
    children = {}
    for name, taken in RUNS.items():
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as patch:
                for each in taken:
                    take_away(each, patch)
                importlib.import_module("wavepe.nn")
            for each in taken:
                assert is_replaced(each), each
            torch.save(results(), Path(folder) / name)
            os._exit(0)
        children[name] = child
    failed = [name for name, child in children.items() if os.waitpid(child, 0)[1]]
    assert not failed, failed


if __name__ == "__main__":
    main(sys.argv[1])
