"""Calls that are the first ones of wavepe which a compiler traces.

As a program, this compiles each call in a fork of its own, and compares with the call itself. Its
arguments are the names of calls, by default all.
"""

import functools
import os
import sys
import traceback

import pytest
import torch
import torch._dynamo  # once, before the forks
from cases import generator
from op_cases import OPERATORS
from wavepe import nn, ops
from wavepe.encodings import TransformerXL

XL = TransformerXL()
X = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
TABLE = ops.relative_table(torch.ones(5, 4))
ARGUMENTS = {
    name: op.draw(generator("first trace"), 4, **op.forms[next(iter(op.forms))])
    for name, op in OPERATORS.items()
}
ROTARY = nn.Rotary(4, scaling={"rope_type": "dynamic", "factor": 2.0}, trained_length=4)


def call_of(op, x):
    return op.function(**ARGUMENTS[op.name])


WHOLE = {
    "attention": lambda x: ops.attention(x, x, x, p=TABLE),
    "attention_bf16": lambda x: ops.attention(*[x.bfloat16()] * 3, p=TABLE),
    "tensors": lambda x: x * TABLE.tensors(torch.float64, "cpu")[0],
    "device_constant": lambda x: XL.learned_table(2, {"W_r": x[:, 0, :4]}, causal=False).p,
    **{name: functools.partial(call_of, op) for name, op in OPERATORS.items()},
}
# The compiler must not trace a part of these.
BROKEN = {
    "relative_table": lambda x: ops.attention(x, x, x, p=ops.relative_table(torch.ones(5, 4))),
    "rotary": lambda x: ROTARY(x, x)[0],
}


def check(name):
    call = (WHOLE | BROKEN)[name]
    compiled = torch.compile(call, backend="eager", fullgraph=name in WHOLE)
    for x in (X, 2 * X):
        torch.testing.assert_close(compiled(x), call(x))
    if name in BROKEN:
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outside of the compiled|follows"):
            torch.compile(call, backend="eager", fullgraph=True)(X)


def main():
    torch.compile(torch.sin, backend="eager")(X)  # loads the compiler, once for all forks
    assert "wavepe.ops._set_marks" not in sys.modules, "wavepe has been traced already"
    children = {}
    for name in sys.argv[1:] or WHOLE | BROKEN:
        child = os.fork()
        if child == 0:
            try:
                check(name)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children[name] = child
    failed = [name for name, child in children.items() if os.waitpid(child, 0)[1]]
    assert not failed, failed


if __name__ == "__main__":
    main()
