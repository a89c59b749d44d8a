"""Random calls of torch's operators but attention, with gradients; see fuzz_numpy.py.

The rows of op_cases.py say what is drawn, what is right, and what must be refused.
"""

from cases import load_torch
from fuzz_draw import NONSENSE, chance, leading, length, pick, spoil_rows, strided, width
from fuzz_numpy import SPECIAL
from op_cases import OPERATORS, tensors_of
from tensors import LOW

torch, _ = load_torch()

NO_TENSOR = (*NONSENSE[:5], torch.ones(2, dtype=torch.complex64))
TAKES_MUCH = ("mirrored", "sections", "interleaved", "inverse")  # None, or anything as a bool


class Calls:
    """Calls of an operator: `arguments` has the gradients that come in, too."""

    # RuntimeError by the contract; the others for an argument that is not a tensor or a number.
    refused = (RuntimeError, TypeError, ValueError)

    def __init__(self, op):
        self.op = op

    def draw(self, rng):
        op, n = self.op, width(rng)
        rows = min(length(rng), op.most // max(n, 1))
        dtype = pick(rng, torch.float32, torch.float32, torch.float64, *LOW)
        a = op.draw(rng, n, dtype, length=rows, **op.random(rng, n, rows, leading, pick))
        if op.spoilt and chance(rng, 0.1):
            x, value = a[pick(rng, *op.spoilt)], pick(rng, *SPECIAL)
            if x.numel():
                spoil_rows(rng, x, value)
        a |= {name: strided(rng, x) for name, x in tensors_of(a).items()}
        return a | {"grads": [strided(rng, x) for x in op.incoming(rng, a)]}

    def call(self, arguments):
        a = dict(arguments)
        return self.op.call(a, a.pop("grads"))

    def judge(self, arguments):
        a = dict(arguments)
        return self.op.judge(a, a.pop("grads"))

    def check(self, found, exact, arguments):
        self.op.check(found, exact, arguments)

    def spoilt(self, rng, arguments):
        """Move one argument to another device, or replace some by what the contract refuses."""
        a = {name: x for name, x in arguments.items() if name != "grads"}
        if chance(rng, 0.6):
            return a | pick(rng, *self.op.bad(a))[1]
        name = pick(rng, *(name for name in a if name not in TAKES_MUCH))
        if isinstance(a[name], torch.Tensor) and chance(rng, 0.4):
            return a | {name: a[name].to("meta")}
        return a | {name: pick(rng, *NO_TENSOR)}

    def refuse(self, arguments):
        self.op.function(**arguments)


TARGETS = {f"ops.{name}": Calls(op) for name, op in OPERATORS.items()}
