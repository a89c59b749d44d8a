"""Small arrays that a call needs on its device: copied there once, for compilers too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._common import in_new_thread


class DeviceConstant:
    """An array, and its tensors on the devices that asked for it.

    A compiler's graph takes such a tensor as an input that lies on the device: with `Tensor.to` in
    the graph, every call would copy. Copies and pickles hold the array alone.

    Attributes
    ----------
    tensor : Tensor
        On the CPU.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.key = (array.tobytes(), array.shape, array.dtype)
        # The first call may come from a tracer, and would keep one of its tensors.
        self.tensor: Tensor = in_new_thread(lambda: torch.from_numpy(array))
        self._names: dict[tuple[torch.device, torch.dtype], str] = {}

    def on(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device of `like`, of the array's dtype by default."""
        device = like.device
        if type(like) not in (Tensor, torch.nn.Parameter):  # a tracer's, which takes none kept
            compiling = torch.compiler.is_compiling()
            own = self.tensor if compiling else torch.from_numpy(self._array)
            return own.to(device=device, dtype=dtype)
        if dtype is None:
            if device.type == "cpu":
                return self.tensor
            dtype = self.tensor.dtype
        tensor: Tensor = getattr(self, self._attribute(device, dtype))
        return tensor

    # As in `RelativeTable`: a compiler calls this while it traces, and then reads the attribute.
    @torch.compiler.assume_constant_result
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
        return DeviceConstant, (self._array,)


@functools.lru_cache(maxsize=64)  # for those whose owner lives for a call
def _built(constant: DeviceConstant, device: torch.device, dtype: torch.dtype) -> Tensor:
    return in_new_thread(lambda: constant.tensor.to(device, dtype))


class _Named:
    """Holds constants as attributes, where a compiler finds them again."""


_named = _Named()
_names: dict[tuple[Any, ...], str] = {}


def device_constant(build: Callable[..., np.ndarray], *arguments: Any) -> DeviceConstant:
    """Return ``build(*arguments)`` as a constant, made once; a compiler does not trace `build`."""
    constant: DeviceConstant = getattr(_named, _name(build, *arguments))
    return constant


@torch.compiler.assume_constant_result
def _name(build: Callable[..., np.ndarray], *arguments: Any) -> str:
    name: str = _names.setdefault((build, arguments), f"constant_{len(_names)}")
    if not hasattr(_named, name):
        setattr(_named, name, DeviceConstant(build(*arguments)))
    return name
