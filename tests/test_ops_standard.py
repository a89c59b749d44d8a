"""Torch's own operators alone: in programs (`ops.standard_operators`), and on other devices."""

from pathlib import Path

import pytest
import torch
from attention_cases import OPTIONS, Shape
from attention_cases import draw as draw_attention
from cases import by_turns, every, generator, soon
from op_cases import F32, F64, OPERATORS, tensors_of
from processes import forked, output
from wavepe import ops

CASES = [(op, form) for op in OPERATORS.values() for form in op.forms]
CLOSE = {F32: {"rtol": 2e-6, "atol": 2e-6}, F64: {"rtol": 1e-12, "atol": 1e-12}}
SOON = ("plain", "everything", "dropout, table", "edge from 2, per head", "bias, both sides, edge")


def words(value):
    return (
        f"{value[0].name}, {value[1]}" if isinstance(value, tuple) else getattr(value, "name", None)
    )


class Call(torch.nn.Module):
    """A call as a module: its tensors are inputs."""

    def __init__(self, function, given):
        super().__init__()
        self.function = function
        self.constant = {name: x for name, x in given.items() if name not in tensors_of(given)}

    def forward(self, tensors):
        torch.manual_seed(0)  # of dropout
        return self.function(**tensors, **self.constant)


def program_of(module, *args, **options):
    with ops.standard_operators():
        program = torch.export.export(module, args, **options)
    assert not [node for node in program.graph.nodes if "wavepe" in str(node.target)]
    return program.module()


@pytest.mark.parametrize(("case", "dtype"), by_turns(CASES, [F32, F64], 4), ids=words)
def test_every_operator(case, dtype):
    op, form = case
    given = op.draw(generator("standard", op.name, form), 6, dtype, **op.forms[form])
    module, tensors = Call(op.function, given), tensors_of(given)
    got, want = program_of(module, tensors)(tensors), module(tensors)
    # Angles are products in float64 there, and positions are drawn up to 2^31.
    close = {"rtol": 0, "atol": 1e-6} if op.name == "rope_table" else CLOSE[dtype]
    torch.testing.assert_close(got, want, **close, equal_nan=True)


@pytest.mark.parametrize(("op", "form"), every(4, CASES), ids=words)
def test_another_device(op, form):
    """No constant of a program lies on the CPU: a GPU would refuse it, and so does meta."""
    given = op.draw(generator("standard", op.name, form), 6, F32, **op.forms[form])
    tensors = {name: x.to("meta") for name, x in tensors_of(given).items()}
    program = program_of(Call(op.function, given), tensors)
    assert {x.device.type for x in torch.utils._pytree.tree_leaves(program(tensors))} == {"meta"}


@pytest.mark.parametrize("option", soon(list(OPTIONS), *SOON))
def test_attention(option):
    given = draw_attention(
        generator("standard", option), Shape(2, 4, 2, 5, 6, 8, 4), OPTIONS[option]
    )
    module, tensors = Call(ops.attention, {"return_lse": True} | given), tensors_of(given)
    got, want = program_of(module, tensors)(tensors), module(tensors)
    if not given.get("dropout_p"):  # a program draws a seed of its own
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ devices without kernels

OTHER = Path(__file__).parent / "other_device_calls.py"
ON_ROCM = """
import torch
torch.version.hip = "7.0"
import wavepe.ops
for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
    if name.startswith("wavepe::"):
        (line,) = [x for x in torch._C._dispatch_dump_table(name).splitlines() if x[:5] == "CUDA:"]
        print(name, ".py" in line)
"""


@pytest.mark.parametrize("lacks", [[], ["float64"]], ids=str)
def test_another_kind_of_device(lacks):
    """As ROCm, MPS, XPU: values and places of results are those of the CPU, and nothing is copied
    but for tables where float64 is missing."""
    assert output(OTHER, *lacks, start=forked) == ""


def test_rocm_does_not_call_the_driver_of_cuda():
    lines = output("-c", ON_ROCM, start=forked).splitlines()
    assert len(lines) > 8, lines
    assert all(line.endswith("True") for line in lines), lines
