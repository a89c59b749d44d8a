"""Find out what a call copies between a device and the host, and which values it waits for.

The device is "meta": its tensors have no values, so a call that needs one raises, or runs an
operator of `READS`. It needs no GPU, and to wavepe it is a device like another one.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique")
# From Python's numbers or NumPy's; no operator shows that they are copied.
MADE_ON_THE_HOST = (torch.tensor, torch.as_tensor, torch.asarray)


def tensors(*values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Traffic(TorchDispatchMode):
    """Notes in `found` what has tensors of both sides, or reads values of the device.

    `ran` has the names of all operators.
    """

    def __init__(self):
        super().__init__()
        self.found, self.ran = [], []
        self.functions = _Functions(self.found)

    def __enter__(self):
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.functions.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        self.ran.append(name)
        given = tensors(args, kwargs)
        if name.startswith(READS) and any(x.device == DEVICE for x in given):
            self.found.append(f"{name} reads")
        out = func(*args, **(kwargs or {}))
        given += tensors(out)
        if "copy" not in name:  # others take a number of the host as an argument
            given = [x for x in given if x.dim() or x.device == DEVICE]
        if {x.device for x in given} > {DEVICE}:
            self.found.append(f"{name} copies {[tuple(x.shape) for x in given]}")
        return out


class _Functions(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in MADE_ON_THE_HOST and out.device == DEVICE and out.numel():
            self.found.append(f"torch.{func.__name__} copies {tuple(out.shape)}")
        return out
