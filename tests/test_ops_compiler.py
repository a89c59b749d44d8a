"""torch's compiler: wavepe marks its functions at the first trace."""

from pathlib import Path

import torch
import wavepe
from processes import forked, output
from wavepe.ops import _compiler

PATH = {"PYTHONPATH": str(Path(wavepe.__file__).parents[1])}


def test_the_first_trace_sets_the_marks():
    """Each operator, a table, a constant, and a part that is not traced."""
    output(Path(__file__).with_name("first_trace_calls.py"), start=forked, **PATH)


def test_later_marks_are_set_at_once():
    x = torch.ones(1)
    assert torch.compile(lambda x: x + _compiler.is_compiling(), backend="eager")(x) == 2
    calls = []

    @_compiler.constant_result
    def constant():
        calls.append(None)
        return 2

    compiled = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert (compiled(x), compiled(x)) == (2, 2)
    assert len(calls) == 1  # the compiler called it once

    @_compiler.disable("not this one")
    def left_out(x):
        calls.append(torch.compiler.is_compiling())
        return x

    assert torch.compile(lambda x: 2 * left_out(x), backend="eager")(x) == 2
    assert calls[1:] == [False]
