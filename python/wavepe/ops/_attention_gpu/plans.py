"""Fused attention on a GPU: plans, which repeat a call without its thought.

The first call of a signature (shapes, strides, dtypes, devices, alignments, options) is checked and
runs `call`, while a `_Tape` writes down its steps: allocations, operators of torch, and launches.
They depend on the signature alone, so later calls repeat them with their own tensors. With few
queries n is not in the signature: numbers that follow it are arguments of the plan, like tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._attention_checks import Arguments, check_arguments
from .._common import check
from .._torch_private import DispatchMode
from . import call, decode, launches

MOST = 256  # then all plans are dropped: lengths that change at each step would fill the memory
RECORDS = True  # False: each call is worked out anew, as benchmarks compare
_OPTIONS = frozenset((int, float, bool, str, type(None)))
_plans: dict[Any, Callable[[list[Any]], tuple[Any, ...]]] = {}


class _Number(int):
    """A number that differs between calls of one plan."""


def attend(role: str, arguments: Sequence[Any], missing_kernel: Any) -> Any:
    """Return the forward or backward of `call`; None for a tensor that only torch can read."""
    inputs: list[Any] = []
    few = role == "forward"
    arguments, numbers, parts = decode.lengths(arguments) if few else (arguments, [], {})
    signature = _signature(arguments, inputs, parts)
    if signature is None:
        return None
    key = role, *signature
    plan = _plans.get(key)
    inputs += numbers
    with torch.cuda.device_of(inputs[0]):
        if plan is None:
            return _first(role, arguments, inputs, key, missing_kernel)
        return plan(inputs)


def _signature(values: Sequence[Any], tensors: list[Any], parts: dict) -> list[Any] | None:
    """Return what a plan depends on, and list the tensors; None: one is not as in its memory.

    `parts` has, by place, what stands for the shape and the strides of a value.
    """
    key: list[Any] = []
    for place, x in enumerate(values):
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            at = x.data_ptr()
            if x.is_neg() or not (at or not x.numel()):
                return None
            tensors.append(x)
            key += parts.get(place) or (x.shape, x.stride())
            key += x.dtype, x.get_device(), at % 16
        elif kind in _OPTIONS:
            key.append(x)
        else:
            inner = _signature(x, tensors, {}) if kind is list or kind is tuple else None
            if inner is None:
                return None
            key.append(tuple(inner))
    return key


def _first(
    role: str, arguments: Sequence[Any], inputs: list[Any], key: Any, missing_kernel: Any
) -> Any:
    """Check a call, run it, and keep a plan of it."""
    start = 4 if role == "backward" else 0  # grad_out, grad_lse, out and lse come before
    checked = Arguments(*arguments[start : start + len(Arguments._fields)])
    check_arguments(checked)
    missing = missing_kernel(checked.q, checked.v, checked.p)
    check(
        not missing,
        f"attention_{role} has no fused kernel for this call ({missing}): call "
        "wavepe.ops.attention, which uses PyTorch's operators then",
    )
    # Constants made while a graph is captured would belong to the graph.
    if not RECORDS or (checked.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return getattr(call, role)(*arguments)
    # Aliases, because one tensor may be given twice, and two the next time.
    inputs = [x.detach() if isinstance(x, Tensor) else _Number(x) for x in inputs]
    numbers = [x for x in inputs if isinstance(x, _Number)]
    tape, aliases = _Tape(inputs), iter(inputs)
    arguments = [
        next(aliases) if isinstance(x, Tensor)
        else [next(aliases) for _ in x] if isinstance(x, (list, tuple)) else x
        for x in arguments
    ]  # fmt: skip
    launches.maker.make = tape.launch
    try:
        with tape:
            results = getattr(call, role)(*arguments, **({"numbers": numbers} if numbers else {}))
    finally:
        launches.maker.make = None
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = tape.plan(results)
    return results


class _Tape(DispatchMode):
    """Writes down steps: a function and keys of its arguments and result, below 0 if constant."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.count, self.paused = len(inputs), False
        self.constants: dict[int, Any] = {}
        self.steps: list[tuple[Any, Any, int, list[int]]] = []  # the last: keys that it needs last
        self.last: dict[int, list[int]] = {}  # that list of the step that needs a key last
        self.known: dict[Any, int] = {}  # keys of constants, addresses and tuples
        # By the id of a tensor. All tensors are entered, so an id may be that of another one later.
        self.keys: dict[int, int] = {}
        self.roots: dict[int, tuple[int, tuple[Any, ...]]] = {}  # of what it is a view, or itself
        for key, x in enumerate(inputs):
            self._enter(x, key)

    def _enter(self, x: Any, key: int) -> None:
        self.keys[id(x)] = key
        if isinstance(x, Tensor):
            self.roots[id(x)] = key, _place(x)

    def _constant(self, x: Any) -> int:
        name = (type(x), x) if type(x) in _OPTIONS else id(x)
        key = self.known.setdefault(name, -1 - len(self.constants))
        self.constants.setdefault(key, x)
        return key

    def _step(self, function: Callable[..., Any] | None, *keys: int) -> int:
        """Write down a step, and return the key of its result; None returns the arguments."""
        self.count, done = self.count + 1, list[int]()
        self.last |= dict.fromkeys((*keys, self.count), done)
        self.steps.append((function, _getter(keys), self.count, done))
        return self.count

    def _named(self, function: Callable[..., Any] | None, *keys: int) -> int:
        """Return the key of a result that stays the same during a call."""
        if (function, keys) not in self.known:
            self.known[function, keys] = self._step(function, *keys)
        return self.known[function, keys]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.paused:
            return out
        if func.is_view:
            for x in [out] if isinstance(out, Tensor) else out:
                self.keys.pop(id(x), None)
                self.roots[id(x)] = self.roots[id(args[0])]
        elif "empty" in func.name():
            like = {"dtype": out.dtype, "device": out.device}
            make = functools.partial(torch.empty_strided, out.shape, out.stride(), **like)
            self._enter(out, self._step(make))
        else:
            keys = [self._tensor(x) if isinstance(x, Tensor) else self._constant(x) for x in args]
            fixed = all(key < 0 for key in keys)  # it follows from the lengths
            run = functools.partial(func, **(kwargs or {}))
            self._enter(out, self._constant(out) if fixed else self._step(run, *keys))
        return out

    def _tensor(self, x: Tensor) -> int:
        """Return the key of a tensor. A view of another one is made when it is first needed."""
        base, root = self.roots[id(x)]
        if id(x) not in self.keys and _place(x) == root:
            return base
        if id(x) not in self.keys:
            shape, stride, start = x.shape, x.stride(), x.storage_offset() - root[2]
            view = lambda y: y.as_strided(shape, stride, y.storage_offset() + start)  # noqa: E731
            self.keys[id(x)] = self._constant(x) if base < 0 else self._step(view, base)
        return self.keys[id(x)]

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Any, options: dict) -> None:
        """Launch a kernel and write it down."""
        self.paused = True  # an interpreter runs operators, too
        compiled = kernel[grid](*map(_plain, arguments), **options)
        self.paused = False
        bound = launches.bound(kernel, grid, len(arguments), options, compiled)
        run, more = bound or (functools.partial(kernel[grid], **options), [])
        roots: list[int] = []

        def encoded(x: Any) -> int:
            keys = [encoded(y) for y in x] if isinstance(x, tuple) else []
            if any(key >= 0 for key in keys):
                return self._named(None if bound else type(x), *keys)
            if isinstance(x, _Number):
                return self.keys[id(x)]
            if not isinstance(x, Tensor):
                return self._constant(x)
            base, root = self.roots[id(x)]
            roots.append(base)
            offset = self._constant((x.storage_offset() - root[2]) * x.itemsize)
            if bound:
                return self._named(lambda x, offset: x.data_ptr() + offset, base, offset)
            return self._tensor(x)

        self._step(run, *[encoded(x) for x in (*arguments, *more)])
        self.last |= dict.fromkeys(roots, self.steps[-1][-1])  # whose addresses it has

    def plan(self, results: Sequence[Any]) -> Callable[[list[Any]], tuple[Any, ...]]:
        """Return a function of the tensors and numbers of a call that repeats the steps."""
        keys = [self._constant(None) if x is None else self._tensor(x) for x in results]
        for key, done in self.last.items():
            if key >= 0 and key not in keys:
                done.append(key)
        constants, steps, last = self.constants, self.steps, _getter(keys)

        def run(inputs: list[Any]) -> tuple[Any, ...]:
            values = constants | dict(enumerate(inputs))
            for function, members, result, done in steps:
                read = members(values)
                values[result] = function(*read) if function else read
                for key in done:
                    del values[key]
            return last(values)

        return run


def _plain(x: Any) -> Any:
    """Return a number as an int; Triton takes no other class. Tuples have names for all values."""
    if isinstance(x, tuple):
        return type(x)(*map(_plain, x))
    return int(x) if isinstance(x, _Number) else x


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def _getter(keys: Sequence[int]) -> Callable[[dict[int, Any]], tuple[Any, ...]]:
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return (lambda values: (values[keys[0]],)) if keys else lambda values: ()
