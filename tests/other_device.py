"""A device that torch knows and that wavepe has no kernels for, made of tensors on the CPU.

PyTorch keeps a place for such devices ("privateuseone"). In `OtherDevice` an operator of torch runs
there by its kernel for the CPU, and one of wavepe by the kernel that torch finds for the device.
"""

import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# what torch asks of the module of a device, here for autocast
_MODULE = types.SimpleNamespace(get_amp_supported_dtype=lambda: [torch.bfloat16])
_setup_privateuseone_for_python_backend(backend_module=_MODULE)
DEVICE = torch.device("privateuseone:0")
CPU = torch.device("cpu")
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class There(torch.Tensor):
    """A tensor of the device; `here` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here):
        layout = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        there = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, dtype=here.dtype, device=DEVICE, **layout
        )
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, func, classes, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of OtherDevice")


class OtherDevice(TorchDispatchMode):
    """While it is active the device exists.

    `copies` has the operators that cross between device and CPU. `lacks`: a dtype that it refuses.
    """

    def __init__(self, lacks=None):
        super().__init__()
        self.copies, self.lacks = [], lacks

    def __torch_dispatch__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        there = [x for x in leaves if isinstance(x, There)]
        if func.namespace == "wavepe" and there:
            with self:
                return func.redispatch(KEYS, *args, **kwargs)
        asked = [x for x in leaves if isinstance(x, torch.device)]
        on_device = asked == [DEVICE] if asked else bool(there)
        if bool(there) != on_device and any(isinstance(x, torch.Tensor) for x in leaves):
            self.copies.append(func._schema.name)
        if func._schema.name == "aten::_local_scalar_dense" and there:
            self.copies.append(func._schema.name)
        if "copy_" in func._schema.name and there:  # the first argument says where the result is
            on_device = isinstance(args[0], There)
            if len(there) < 2:
                self.copies.append(func._schema.name)

        def here(x):
            if isinstance(x, There):
                return x.here
            return CPU if isinstance(x, torch.device) else x

        out = func(*tree_map(here, args), **tree_map(here, kwargs))
        known = {id(x.here): x for x in there}  # an operator in place returns its argument

        def wrapped(x):
            if not isinstance(x, torch.Tensor):
                return x
            if x.dtype == self.lacks:
                raise TypeError(f"the device has no {x.dtype}")
            return known[id(x)] if id(x) in known else There(x)

        return tree_map(wrapped, out) if on_device else out


def there(values):
    """Return the same arguments, by name, with tensors of the device."""
    return {n: There(x) if isinstance(x, torch.Tensor) else x for n, x in values.items()}
