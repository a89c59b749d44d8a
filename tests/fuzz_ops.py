"""Random calls of torch's operators but attention, with gradients; see fuzz_numpy.py."""

import numpy as np
import oracle
from cases import UNIT, assert_within, load_torch, psi_bound, turn
from fuzz_draw import (
    NONSENSE,
    chance,
    leading,
    length,
    pick,
    spoil_rows,
    strided,
    width,
)
from fuzz_numpy import FAR, SPECIAL, judge_bias, judge_rope, judge_rope_table

torch, ops = load_torch()

WIDE = {torch.float32: np.float32, torch.float64: np.float64}
LOW = {torch.bfloat16: (8, 2.0**-133), torch.float16: (11, 2.0**-24)}  # bits, smallest number
DROPPED = 1e-300  # exp is 0 below e^-708; powers of u multiply it
NO_TENSOR = (*NONSENSE[:5], torch.ones(2, dtype=torch.complex64))


def dtype_of(rng):
    return pick(rng, torch.float32, torch.float32, torch.float64, *LOW)


def wide(dtype):
    """Return the NumPy dtype of the computation."""
    return WIDE.get(dtype, np.float32)


def arrays(*tensors):
    return tuple(t.detach().double().numpy() for t in tensors)


def rounded(exact, bound, dtype):
    """Return the bound; for low precision, add twice the error of rounding the exact result."""
    if dtype not in LOW:
        return exact, bound
    bits, smallest = LOW[dtype]
    step = np.maximum(np.ldexp(1.0, np.frexp(np.nan_to_num(exact))[1] - bits), smallest)
    return exact, bound + step * (bound != 0)


def tensor(rng, values, dtype):
    if not values.size:  # empty ones from NumPy have strides 0, and rope_ refuses these
        return torch.empty(values.shape, dtype=dtype)
    return strided(rng, torch.from_numpy(values).to(dtype))


class Operator:
    """The base class of the targets of this module: results and gradients by name."""

    # RuntimeError by the contract; the others for an argument that is not a tensor or a number.
    refused = (RuntimeError, TypeError, ValueError)

    def check(self, found, exact, arguments):
        for name, got in found.items():
            assert got.dtype == self.dtype(arguments), f"{name} is {got.dtype}"
            assert_within(got.detach().double().numpy(), *exact[name], name)

    def spoilt(self, rng, arguments):
        """Move one argument to another device, or replace it by one that the contract refuses."""
        name = pick(rng, *self.needed)
        if chance(rng, 0.6):
            name, value = pick(rng, *self.bad(arguments))
        elif isinstance(arguments[name], torch.Tensor) and chance(rng, 0.4):
            value = arguments[name].to("meta")
        else:
            value = pick(rng, *NO_TENSOR)
        return arguments | {name: value}

    def refuse(self, arguments):
        self.function(**{k: v for k, v in arguments.items() if k != "grad"})


# ---- relative bias -------------------------------------------------------------------------------


class RelativeBias(Operator):
    needed = ("q", "p", "keys", "first", "beyond")
    function = staticmethod(ops.relative_bias)

    def dtype(self, a):
        return a["q"].dtype

    def draw(self, rng):
        m, keys, w, d = length(rng), length(rng), max(length(rng), 1), width(rng)
        lead, dtype = leading(rng, 200_000, m * max(keys, w)), dtype_of(rng)
        q, p = (rng.normal(size=s) for s in ((*lead, m, d), (*pick(rng, (), lead[-1:]), w, d)))
        if chance(rng, 0.1):
            spoil_rows(rng, pick(rng, q, p), pick(rng, *SPECIAL))
        return {
            "q": tensor(rng, q, dtype),
            "p": tensor(rng, p, dtype),
            "keys": keys,
            "first": pick(rng, 0, -w // 2, int(rng.integers(-m - 9, keys + 9))),
            "beyond": pick(rng, "zero", "edge"),
            "grad": tensor(rng, rng.normal(size=(*lead, m, keys)), dtype),
        }

    def call(self, arguments):
        a = dict(arguments)
        grad = a.pop("grad")
        leaves = [a[name].detach().requires_grad_() for name in ("q", "p")]
        found = {"out": ops.relative_bias(**a | dict(zip("qp", leaves, strict=True)))}
        if self.differentiated(arguments):
            found |= zip("qp", torch.autograd.grad(found["out"], leaves, grad), strict=True)
        return found

    def differentiated(self, a):
        """Return whether gradients are compared.

        They are torch's matrix products, in any order, so NaN and low precision are left out.
        """
        finite = a["q"].isfinite().all() and a["p"].isfinite().all()
        return finite and a["q"].dtype in WIDE

    def judge(self, a):
        kind, (q, p, grad) = wide(a["q"].dtype), arrays(a["q"], a["p"], a["grad"])
        keys, place = a["keys"], (a["first"], a["beyond"])
        exact = {"out": rounded(*judge_bias(q, p, keys, *place, kind), a["q"].dtype)}
        if not self.differentiated(a):
            return exact
        values = oracle.relative_bias_gradients(grad, q, p, *place)
        sizes = oracle.relative_bias_gradients(*(np.abs(x) for x in (grad, q, p)), *place)
        row, inside = oracle.relative_rows(q.shape[-2], keys, p.shape[-2], *place)
        shared = q[..., 0, 0].size // max(p[..., 0, 0].size, 1) if q.size and p.size else 1
        most = np.bincount(row[inside]).max(initial=0) * shared  # pairs of one row
        for name, value, size, terms in zip("qp", values, sizes, (keys, most), strict=True):
            exact[name] = value, 2 * (terms + 1) * UNIT[np.dtype(kind)] * size
        return exact

    def bad(self, a):
        q, p = a["q"], a["p"]
        return [
            ("p", p.new_ones(p.shape[-2], p.shape[-1] + 1)),
            ("p", p.new_ones(7, 2, *p.shape[-2:])),
            ("p", p.new_ones(p.shape[-2:], dtype=torch.int64)),
            ("q", q.new_ones(q.shape[-1])),
            ("keys", -1),
            ("beyond", "both"),
        ]


# ---- rotary --------------------------------------------------------------------------------------


class Rope(Operator):
    """rope, rope_ and rope_qk; the gradient is the inverse rotation of the one that comes in."""

    needed = ("x", "cos", "sin")

    def dtype(self, a):
        return a["x"].dtype

    def draw(self, rng):
        n, h, rest = length(rng), max(width(rng), 1), pick(rng, 0, 0, int(rng.integers(0, 20)))
        lead = leading(rng, 40_000, n * (2 * h + rest))
        x, dtype = rng.normal(size=(*lead, n, 2 * h + rest)), dtype_of(rng)
        if chance(rng, 0.1):
            spoil_rows(rng, x, pick(rng, *SPECIAL))
        batch = lead[0] if len(lead) == 2 else 1
        tables = turn(rng, (*pick(rng, (), (1,), (batch,)), n, h), np.float64)
        of_table = pick(rng, torch.float32, dtype)
        return {
            "name": pick(rng, "rope", "rope_", "rope_qk"),
            "x": tensor(rng, x, dtype),
            **{k: tensor(rng, t, of_table) for k, t in zip(("cos", "sin"), tables, strict=True)},
            "interleaved": chance(rng, 0.5),
            "inverse": chance(rng, 0.5),
            "grad": tensor(rng, rng.normal(size=x.shape), dtype),
        }

    def function(self, name, x, cos, sin, **options):
        if name == "rope_qk":
            return ops.rope_qk(x, x, cos, sin, **options)
        return getattr(ops, name)(x, cos, sin, **options)

    def call(self, arguments):
        a = dict(arguments)
        grad, in_place = a.pop("grad"), a["name"] == "rope_"
        x = a.pop("x").clone() if in_place else a.pop("x").detach().requires_grad_()
        out = self.function(x=x, **a)
        out = out if isinstance(out, tuple) else (out,)
        found = {f"out {i}": y for i, y in enumerate(out)}
        if x.requires_grad:
            (found["x"],) = torch.autograd.grad(out[-1], x, grad)
        return found

    def judge(self, a):
        dtype, kind = a["x"].dtype, wide(a["x"].dtype)
        x, grad = arrays(a["x"], a["grad"])
        cos, sin = (t.double().numpy().astype(kind) for t in (a["cos"], a["sin"]))
        cos, sin = (t[:, None] if t.ndim == 3 else t for t in (cos, sin))
        forms = a["interleaved"], a["inverse"]
        out = rounded(*judge_rope(x, cos, sin, *forms, kind), dtype)
        by_x = rounded(*judge_rope(grad, cos, sin, forms[0], not forms[1], kind), dtype)
        return {"out 0": out, "out 1": out, "x": by_x}

    def bad(self, a):
        x, n, h = a["x"], *a["cos"].shape[-2:]
        return [
            ("cos", torch.ones(n, h + 1)),
            ("sin", torch.ones(n + 1, h)),
            ("cos", torch.ones(5, n, h)),
            ("x", x.new_ones(1, 1, n, 2 * h - 1)),
            ("x", x.new_ones(1, 1, n, 2 * h, dtype=torch.int32)),
        ]


class RopeTable(Operator):
    needed = ("positions", "inv_freq", "attention_factor", "precision")
    function = staticmethod(ops.rope_table)

    def dtype(self, a):
        return a["dtype"]

    def draw(self, rng):
        h, sections = pick(rng, int(rng.integers(0, 7)), min(width(rng), 40)), None
        if chance(rng, 0.5):
            sections = [int(n) for n in rng.multinomial(h, [0.3, 0.3, 0.4])]
        shape = (*leading(rng, 60, h), *([3] if sections else []))
        positions = torch.from_numpy(np.asarray(rng.integers(-FAR, FAR, shape)))
        return {
            "positions": strided(rng, positions),
            "inv_freq": strided(rng, torch.from_numpy(rng.uniform(0, 1, h))),
            "attention_factor": pick(rng, 1.0, 0.5, 1.25),
            "precision": pick(rng, "exact", "exact", "hf"),
            "sections": sections,
            "dtype": dtype_of(rng),
        }

    def call(self, arguments):
        return dict(zip(("cos", "sin"), ops.rope_table(**arguments), strict=True))

    def judge(self, a):
        dtype = a["dtype"]
        places, inv_freq = a["positions"].numpy(), a["inv_freq"].numpy()
        both = judge_rope_table(places, inv_freq, a, wide(dtype))
        return {k: rounded(*x, dtype) for k, x in zip(("cos", "sin"), both, strict=True)}

    def bad(self, a):
        h, axes = len(a["inv_freq"]), a["positions"].shape[-1] if a["positions"].dim() else 0
        return [
            ("inv_freq", torch.ones(h, 1)),
            ("sections", [h + 1]),
            ("sections", [h] + [0] * axes),
            ("precision", "half"),
            ("dtype", torch.int8),
        ]


# ---- wavelets ------------------------------------------------------------------------------------


class WaveletTable(Operator):
    needed = ("offsets", "scale", "shift", "kind")
    function = staticmethod(ops.wavelet_table)

    def dtype(self, a):
        return a["scale"].dtype

    def draw(self, rng):
        dim, dtype = width(rng), dtype_of(rng)
        w = min(length(rng), 4000 // max(dim, 1))
        offsets = strided(rng, torch.from_numpy(rng.integers(-300, 300, w)))
        return {
            "offsets": w if chance(rng, 0.5) else offsets,
            "scale": tensor(rng, rng.uniform(0.5, 99, dim), dtype),
            "shift": tensor(rng, rng.uniform(-9, 9, dim), dtype),
            "kind": pick(rng, *oracle.KINDS),
            "mirrored": pick(rng, None, False, True),
            "grad": tensor(rng, rng.normal(size=(w, dim)), dtype),
        }

    def call(self, arguments):
        a = dict(arguments)
        grad = a.pop("grad")
        leaves = [a[name].detach().requires_grad_() for name in ("scale", "shift")]
        out = ops.wavelet_table(**a | dict(zip(("scale", "shift"), leaves, strict=True)))
        by_scale, by_shift = torch.autograd.grad(out, leaves, grad)
        return {"out": out, "scale": by_scale, "shift": by_shift}

    def judge(self, a):
        offsets, (scale, shift, grad) = a["offsets"], arrays(a["scale"], a["shift"], a["grad"])
        offsets = np.arange(offsets) if isinstance(offsets, int) else offsets.numpy()
        kind, mirrored, dtype = a["kind"], a["mirrored"], a["scale"].dtype
        flip = (kind == "haar") if mirrored is None else mirrored
        u = ((-offsets if flip else offsets)[:, None] - shift) / scale
        table = oracle.wavelet_table(offsets, scale, shift, kind, flip)
        exact = {"out": once(table, psi_bound(kind, u, np.float64), dtype)}
        gradients = oracle.wavelet_table_gradients(grad, offsets, scale, shift, kind, flip)
        dropped = DROPPED * np.abs(grad).sum(0)
        for name, (value, size) in zip(("scale", "shift"), gradients, strict=True):
            bound = 2 * (len(offsets) + 16) * UNIT[np.dtype(float)] * size + dropped
            exact[name] = once(value, bound, dtype)
        return exact

    def bad(self, a):
        dim = len(a["scale"])
        return [
            ("offsets", -1),
            ("offsets", torch.ones(3)),
            ("offsets", torch.ones(2, 2, dtype=torch.int64)),
            ("scale", torch.ones(dim + 2)),
            ("shift", torch.ones(dim, 1)),
            ("kind", "daubechies"),
        ]


def once(exact, bound, dtype):
    """Return the bound of a float64 result rounded to dtype; low precision goes through float32."""
    if dtype == torch.float32:
        step = np.maximum(np.ldexp(1.0, np.frexp(np.abs(exact) + bound)[1] - 24), 2.0**-149)
        bound = bound + step / 2
    return rounded(exact, bound, dtype)


TARGETS = {
    "ops.relative_bias": RelativeBias(),
    "ops.rope": Rope(),
    "ops.rope_table": RopeTable(),
    "ops.wavelet_table": WaveletTable(),
}
