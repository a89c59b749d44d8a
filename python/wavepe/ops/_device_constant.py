"""Small constant arrays that calls need on their device, copied there once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._common import in_new_thread
from ._compiler import constant_result, is_compiling


class DeviceConstant:
    """A constant array, with a copy as a tensor on each device that asked for it.

    The graph of a compiler takes the device's tensor as an input. With `Tensor.to` in the graph,
    every call would copy. Copies and pickles of the object hold the array alone.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.key: tuple[Any, ...] = (array.tobytes(), array.shape, array.dtype)
        # In a new thread, because a tracer may make this object and the tensor must not be its own.
        self.tensor: Tensor = in_new_thread(lambda: torch.from_numpy(array))
        self._names: dict[tuple[torch.device, torch.dtype], str] = {}

    def on(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device of `like`; its dtype is `dtype` or the array's."""
        device = like.device
        if type(like) not in (Tensor, torch.nn.Parameter):  # never mix a kept one with a tracer's
            tensor = self.tensor if is_compiling() else torch.from_numpy(self.array)
            return tensor.to(device=device, dtype=dtype)
        if dtype is None:
            if device.type == "cpu":
                return self.tensor
            dtype = self.tensor.dtype
        is_compiling()
        tensor = getattr(self, self._attribute(device, dtype))
        return tensor

    # As in `RelativeTable`: a compiler calls this while it traces, and then reads the attribute.
    @constant_result
    def _attribute(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the name of the attribute that holds the tensor."""
        name = self._names.get((device, dtype))
        if name is None:
            name = f"_{dtype}_{device}".replace(".", "_").replace(":", "_")
            self.__dict__[name] = _built(self, device, dtype)
            self._names[device, dtype] = name
        return name

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, DeviceConstant) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceConstant, (self.array,)


@functools.lru_cache(maxsize=64)  # equal constants share it, even if each lives for one call
def _built(constant: DeviceConstant, device: torch.device, dtype: torch.dtype) -> Tensor:
    return in_new_thread(lambda: constant.tensor.to(device, dtype))


class _Named:
    """Constants as attributes: a compiler reads them again at each call."""


_named = _Named()
_names: dict[tuple[Any, ...], str] = {}
_naming = threading.RLock()  # two threads give no two constants one name; `build` may name others


def device_constant(build: Callable[..., np.ndarray], *arguments: Any) -> DeviceConstant:
    """Return ``build(*arguments)`` as a constant, the same one for equal arguments."""
    is_compiling()
    constant: DeviceConstant = getattr(_named, _name(build, *arguments))
    return constant


@constant_result
def _name(build: Callable[..., np.ndarray], *arguments: Any) -> str:
    key = build, arguments
    if key not in _names:
        with _naming:
            if key not in _names:
                constant, name = DeviceConstant(build(*arguments)), f"constant_{len(_names)}"
                setattr(_named, name, constant)
                _names[key] = name
    return _names[key]
