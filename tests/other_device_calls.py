"""Run in a process of its own, because a device is registered for the whole process: every operator
on a device without kernels gives what the CPU gives. Prints a line for each that does not.

The argument is a dtype that the device lacks.
"""

import sys

import torch
from cases import generator
from op_cases import F32, F64, OPERATORS, normal
from other_device import OtherDevice, There, there
from torch.utils._pytree import tree_leaves
from wavepe import ops
from wavepe.ops import _wavelet

RAW = torch.ops.wavepe
LACKS = getattr(torch, *sys.argv[1:]) if sys.argv[1:] else None
DTYPES = (F32,) if LACKS == F64 else (F32, F64, torch.bfloat16)
WAIT = LACKS == F64  # for tables, which the CPU computes then

_wavelet.in_new_thread = lambda function: function()  # another thread would lack the device


def compare(name, function, arguments, dtype, close, waits=False):
    want = tree_leaves(function(**arguments))
    arguments = there(arguments)
    with OtherDevice(LACKS) as device:
        got = tree_leaves(function(**arguments))
    if not all(isinstance(x, There) for x in got):
        print(f"{name}: a result is not on the device")
        return
    if bool(device.copies) != waits:
        print(f"{name}: copies {device.copies}")
    for x, y in zip(got, want, strict=True):
        try:
            torch.testing.assert_close(x.here, y, equal_nan=True, **close)
        except AssertionError as error:
            print(f"{name}, {dtype}: {error}")


def gradients(rng, dtype):
    """Yield the operators that only autograd calls, with arguments."""
    offsets = torch.tensor([-50, -2, 0, 1, 2, 9, 2**40])
    scale = torch.tensor([0.7, 3.0, 1e-30, 0.0], dtype=dtype)
    shift = torch.tensor([0.0, 1.5, 0.0, 0.0], dtype=dtype)
    for kind in ("ricker", "gaussian", "morlet", "haar"):
        for mirrored in (None, True):
            arguments = {"grad": normal(rng, 7, 4, dtype=dtype), "offsets": offsets, "scale": scale}
            arguments |= {"shift": shift, "kind": kind, "mirrored": mirrored}
            yield "wavelet_table_backward", arguments
    for beyond, rows, first in (("zero", 4, -1), ("edge", 4, 1), ("edge", 1, 0), ("zero", 9, -20)):
        x = normal(rng, 2, 5, 7, dtype=dtype)
        if dtype != torch.bfloat16:
            options = {"first": first, "beyond": beyond}
            yield "relative_bias_unskew", {"skewed": x, "rows": rows, **options}
            yield "relative_bias_skew", {"t": x, "keys": rows, **options}


for dtype in DTYPES:
    close = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for op in OPERATORS.values():
        for form in op.forms:
            arguments = op.draw(generator("other", op.name, form), 6, dtype, **op.forms[form])
            angles = {"rtol": 0, "atol": 1e-6} if op.name == "rope_table" else {}
            waits = WAIT and op.name in ("rope_table", "wavelet_table")
            compare(f"{op.name}, {form}", op.function, arguments, dtype, close | angles, waits)
    rng = generator("other", str(dtype))
    for name, arguments in gradients(rng, dtype):
        by_cpu = name.startswith("wavelet")
        compare(name, getattr(RAW, name), arguments, dtype, close, waits=by_cpu)
    exact = {"rtol": 0, "atol": 0}
    arguments = {"offsets": torch.arange(-9, 40), "kind": "db2", "mirrored": True}
    arguments |= {
        "scale": torch.tensor([1, 3, 16, 2]).to(dtype),
        "shift": torch.arange(4).to(dtype),
    }
    compare("db2", ops.wavelet_table, arguments, dtype, exact, waits=True)
