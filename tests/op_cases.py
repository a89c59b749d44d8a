"""The operators of wavepe.ops but attention, a row each, for the tests that all of them share.

`draw` returns the arguments of a call by name, in the order of the operator's schema; `forms` are
options, and sizes beside n (the head size, or pairs of it) and length. `judge` returns the right
results, and gradients by their arguments' names, with bounds. `bad` lists changes of a call's
arguments that must be refused, each with words of the message. `random` draws the rest of a random
call. test_ops_every.py and fuzz_ops.py run all of this; what is special of an operator is in its
own file.
"""

import math

import numpy as np
import oracle
import wavepe
from cases import UNIT, assert_within, load_torch, psi_bound
from fuzz_numpy import FAR, judge_bias, judge_rope_table
from tensors import FLOATS, LOW, arrays, judge_rope, normal, rounded, table, wide

torch, ops = load_torch()

F32, F64 = torch.float32, torch.float64
ONES = torch.ones


# ruff: noqa: RUF012 - the rows are constants


class Operator:
    """The base class of the rows."""

    outputs = ("out",)
    leaves = ()  # arguments with a gradient
    constants = ()  # arguments whose gradient is refused, with words of `refused`
    refused = None
    integers = ()  # tensors of integers
    spoilt = ()  # arguments whose NaN and Inf reach the results of their own row only
    forward = True  # whether the operator has forward mode; else torch says that it lacks jvp
    twice = True  # whether it has second derivatives; else "second derivative" is refused
    exact = {"rtol": 0, "atol": 0}  # how vmap and compiled calls agree with others
    empty = ({"n": 0}, {"length": 0})
    large = {"n": 17, "length": 1301}  # enough for several threads
    most = 1 << 30  # n * length that the oracle judges in time
    keeps_types = True  # under autocast
    numpy = None  # the function for arrays, of the arguments as arrays

    def __init__(self, name):
        self.name, self.function = name, getattr(ops, name)
        self.raw = getattr(getattr(torch.ops.wavepe, name, None), "default", None)

    def __str__(self):
        return self.name

    def call(self, a, grads=()):
        """Return the results by name; with incoming gradients those of the leaves, too."""
        leaves = {name: a[name].detach().requires_grad_() for name in self.leaves if grads}
        out = self.function(**a | leaves)
        out = out if isinstance(out, tuple) else (out,)
        found = dict(zip(self.outputs, out, strict=True))
        if leaves:
            gradients = torch.autograd.grad(out, list(leaves.values()), grads)
            found |= zip(leaves, gradients, strict=True)
        return {name: x.detach() for name, x in found.items()}

    def check(self, found, exact, a, what=""):
        for name, (value, bound) in exact.items():
            dtype = a[name].dtype if name in self.leaves else self.dtype(a)[name]
            assert found[name].dtype == dtype, f"{name} is {found[name].dtype}, {what}"
            assert_within(*arrays(found[name]), value, bound, f"{name} {what}")

    def incoming(self, rng, a):
        """Draw gradients that come in from later operations."""
        return [normal(rng, *x.shape, dtype=x.dtype) for x in self.call(fake(a)).values()]

    def of_leaves(self, a):
        """Return (the operator as a function of the leaves, a tuple of them)."""

        def function(*leaves):
            out = self.function(**a | dict(zip(self.leaves, leaves, strict=True)))
            return out if isinstance(out, tuple) else (out,)

        return function, tuple(a[name].detach() for name in self.leaves)


def tensors_of(a):
    return {name: x for name, x in a.items() if isinstance(x, torch.Tensor)}


def fake(a):
    """Return the same call with tensors that have layouts and no values."""
    return a | {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name, x in tensors_of(a).items()
    }


# ---- rotary --------------------------------------------------------------------------------------
def of_a_copy(x, *args, **options):
    return ops.rope_(x.clone() if isinstance(x, torch.Tensor) else x, *args, **options)


class Rope(Operator):
    """rope, rope_ and rope_qk. A gradient is the inverse rotation of the one that comes in."""

    constants, refused = ("cos", "sin"), "not differentiable in cos and sin"
    empty = (*Operator.empty, {"lead": (0, 3)}, {"lead": (2, 0)}, {"n": 0, "rest": 0})
    forms = {
        "half-split": {"lead": (2, 3), "rest": 0},
        "interleaved": {"interleaved": True, "batch": (2,)},
        "inverse": {"inverse": True, "lead": (), "rest": 9},
        "interleaved, inverse": {"interleaved": True, "inverse": True, "lead": (3,)},
        "a batch of one table": {"batch": (1,), "of_table": F64, "rest": 0},
    }

    def __init__(self, name):
        super().__init__(name)
        self.inputs = ("q", "k") if name == "rope_qk" else ("x",)
        self.outputs = ("out", "out of k")[: len(self.inputs)]
        if name == "rope_":
            self.function = of_a_copy
        else:
            self.leaves = self.inputs
        self.spoilt = self.inputs

    def dtype(self, a):
        return dict.fromkeys(self.outputs, a[self.inputs[0]].dtype)

    def draw(
        self, rng, n, dtype=F32, length=3, lead=(2, 2), rest=1, batch=(), of_table=F32, **form
    ):
        leads = lead, (*lead[:-1], 1)  # fewer heads of keys
        shape = length, 2 * n + rest
        x = {
            name: normal(rng, *some, *shape, dtype=dtype)
            for name, some in zip(self.inputs, leads, strict=False)
        }
        cos, sin = table(rng, *batch, length, n, dtype=of_table)
        return {**x, "cos": cos, "sin": sin, "interleaved": False, "inverse": False} | form

    def judge(self, a, grads=()):
        tables, interleaved, inverse = (a["cos"], a["sin"]), a["interleaved"], a["inverse"]
        exact = [judge_rope(a[name], *tables, interleaved, inverse) for name in self.inputs]
        exact = dict(zip(self.outputs, exact, strict=True))
        if grads and self.leaves:
            back = [judge_rope(grad, *tables, interleaved, not inverse) for grad in grads]
            exact |= zip(self.leaves, back, strict=True)
        return exact

    def numpy(self, a):
        kind = wide(a[self.inputs[0]].dtype)
        tables = (t.numpy().astype(kind) for t in (a["cos"], a["sin"]))
        tables = [t[:, None] if t.ndim == 3 else t for t in tables]
        options = {name: a[name] for name in ("interleaved", "inverse")}
        return [wavepe.rope(a[name].numpy(), *tables, **options) for name in self.inputs]

    def bad(self, a):
        x, (n, h) = a[self.inputs[-1]], a["cos"].shape[-2:]
        d = x.shape[-1]

        def both(*shape):
            return dict.fromkeys(("cos", "sin"), ONES(shape))

        def every(x):
            return dict.fromkeys(self.inputs, x)

        errors = [
            (f"cos holds {d // 2 + 1} pairs", both(n, d // 2 + 1)),
            (f"cos must be .*L, h.*{n + 1}", both(n + 1, h)),
            (f"sin must be .*L, h.*{n + 1}", {"sin": ONES(n + 1, h)}),
            ("pairs", {"sin": ONES(n, h + 1)}),
            (r"cos must be .*L, h.*5, ", both(5, n, h)),
            (r"cos must be .*L, h.*got \(2, 3, ", both(2, 3, n, h, 1)),
            (r"cos must be .*L, h.*got \(4", both(4)),
            (r"cos must be .*L, h.*got \(\)", both()),
            (r"[xq] must be \(L, d\).* got .*\(\)", every(ONES(()))),
            (r"[xq] must be \(L, d\).* got .*\(8", every(ONES(8))),
            (r"[xq] must be \(L, d\).* got ", every(ONES(1, 1, 1, n, d))),
            ("pairs", every(x.new_ones(n, max(2 * h - 1, 0)))) if h else ("pairs", both(n, d)),
        ]
        if self.name == "rope_qk":
            other = torch.float16 if x.dtype != torch.float16 else F32
            errors += [
                (rf"for q of shape \(.*{n + 1}, ", {"q": a["q"].new_ones(n + 1, d)}),
                (rf"for k of shape \(.*{n + 1}, ", {"k": x.new_ones(n + 1, d)}),
                ("pairs|5", {"k": x[..., : 2 * h - 1]} if h else both(5, n, h)),
                ("[Ff]loat16|Half|one dtype", {"k": x.to(other)}),
            ]
        return errors

    def random(self, rng, n, length, leading, pick):
        rest = pick(rng, 0, 0, int(rng.integers(0, 20)))
        lead = leading(rng, 40_000, length * (2 * n + rest))
        batch = pick(rng, (), (1,), (lead[0] if len(lead) == 2 else 1,))
        flags = {name: pick(rng, False, True) for name in ("interleaved", "inverse")}
        return {"lead": lead, "rest": rest, "batch": batch, "of_table": pick(rng, *FLOATS), **flags}


class RopeTable(Operator):
    outputs, integers, most = ("cos", "sin"), ("positions",), 300
    constants, refused = ("inv_freq",), "rope_table has no gradient to inv_freq"
    empty = (*Operator.empty, {"lead": (3,), "length": 0}, {"lead": (0,)})
    large = {"n": 17, "length": 5000}
    forms = {
        "exact": {},
        "hf": {"precision": "hf", "lead": (2,)},
        "sections": {"axes": 3, "lead": (2,)},
        "sections, hf": {"axes": 2, "precision": "hf", "of_inv_freq": F32},
        "one position": {"scalar": True},
        "float32, factor": {"of_inv_freq": F32, "attention_factor": 1.25},
    }

    def dtype(self, a):
        return dict.fromkeys(self.outputs, a["dtype"])

    def draw(
        self, rng, n, dtype=F32, length=3, lead=(), axes=0, of_inv_freq=F64, scalar=False, **form
    ):
        sections = [n // axes] * (axes - 1) + [n - n // axes * (axes - 1)] if axes else None
        shape = () if scalar else (*lead, length, *([axes] if axes else []))
        return {
            "positions": torch.from_numpy(np.asarray(rng.integers(-FAR, FAR, shape))),
            "inv_freq": torch.from_numpy(rng.uniform(0, 1, n)).to(of_inv_freq),
            "attention_factor": 1.0,
            "precision": "exact",
            "sections": sections,
            "dtype": dtype,
        } | form

    def judge(self, a, grads=()):
        dtype, places = a["dtype"], a["positions"].numpy()
        both = judge_rope_table(places, *arrays(a["inv_freq"]), a, wide(dtype))
        return {k: rounded(*x, dtype) for k, x in zip(self.outputs, both, strict=True)}

    def numpy(self, a):
        return wavepe.rope_table(
            a["positions"].numpy(), a["inv_freq"].double().numpy(),
            **{name: a[name] for name in ("attention_factor", "precision", "sections")},
            dtype=wide(a["dtype"]),
        )  # fmt: skip

    def bad(self, a):
        h, axes = len(a["inv_freq"]), a["positions"].shape[-1] if a["positions"].dim() else 0
        return [
            (rf"inv_freq must be 1-D .* got .*\({h}, 1\)", {"inv_freq": ONES(h, 1)}),
            (f"{h} pairs", {"sections": [h + 1]}),
            (f"a last axis of {axes + 1}|coordinate per section", {"sections": [h] + [0] * axes}),
            ("-1", {"sections": [h + 1, -1]}),
            ("sections", {"sections": [2**63 - 1, 2**63 - 1, h + 2]}),  # whose sum wraps to h
            ("sections must be a list", {"sections": range(2**58)}),
            ("unknown precision.*exact", {"precision": "fast"}),
            ("unknown precision 3", {"precision": 3}),
            ("dtype must be .*float.* got .*int32", {"dtype": torch.int32}),
            ("dtype must be a torch.dtype, got 6", {"dtype": 6}),  # the schema would take it
            ("attention_factor ", {"attention_factor": 10**400}),
        ]

    def random(self, rng, n, length, leading, pick):
        sections = [int(x) for x in rng.multinomial(n, [0.3, 0.3, 0.4])]
        return {
            "lead": leading(rng, 60, n * max(length, 1)),
            **pick(rng, {}, {"axes": 3, "sections": sections}),
            "precision": pick(rng, "exact", "exact", "hf"),
            "of_inv_freq": pick(rng, F64, F64, *FLOATS),
            "attention_factor": pick(rng, 1.0, 0.5, 1.25),
        }


# ---- wavelets ------------------------------------------------------------------------------------
class WaveletTable(Operator):
    leaves, integers = ("scale", "shift"), ("offsets",)
    forward, twice, most = False, False, 4000
    large = {"n": 33, "length": 1500}
    forms = {
        "ricker": {"count": True},
        "gaussian": {"kind": "gaussian", "mirrored": False},
        "morlet": {"kind": "morlet", "count": True},
        "haar": {"kind": "haar"},
        "ricker, mirrored": {"mirrored": True},
        "gaussian, mirrored": {"kind": "gaussian", "mirrored": True, "count": True},
        "morlet, mirrored": {"kind": "morlet", "mirrored": True},
        "haar, not mirrored": {"kind": "haar", "mirrored": False, "count": True},
    }

    def dtype(self, a):
        return {"out": a["scale"].dtype}

    def draw(self, rng, n, dtype=F32, length=6, count=False, **form):
        offsets = torch.from_numpy(rng.integers(-100, 200, length))
        return {
            "offsets": length if count else offsets,
            "scale": torch.from_numpy(rng.uniform(0.7, 40, n)).to(dtype),
            "shift": torch.from_numpy(rng.uniform(-5, 20, n)).to(dtype),
            "kind": "ricker",
            "mirrored": None,
        } | form

    def judge(self, a, grads=()):
        offsets, (scale, shift) = a["offsets"], arrays(a["scale"], a["shift"])
        offsets = np.arange(offsets) if isinstance(offsets, int) else offsets.numpy()
        kind, dtype = a["kind"], a["scale"].dtype
        flip = (kind == "haar") if a["mirrored"] is None else a["mirrored"]
        u = ((-offsets if flip else offsets)[:, None] - shift) / scale
        values = oracle.wavelet_table(offsets, scale, shift, kind, flip)
        exact = {"out": once(values, psi_bound(kind, u, np.float64), dtype)}
        if grads:
            (grad,) = arrays(*grads)
            sums = oracle.wavelet_table_gradients(grad, offsets, scale, shift, kind, flip)
            # exp is 0 below e^-708; powers of u multiply it
            dropped = 1e-300 * np.abs(grad).sum(0)
            for name, (value, size) in zip(self.leaves, sums, strict=True):
                bound = 2 * (len(offsets) + 16) * UNIT[np.dtype(float)] * size + dropped
                exact[name] = once(value, bound, dtype)
        return exact

    def numpy(self, a):
        args = {k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in a.items()}
        args |= zip(self.leaves, arrays(a["scale"], a["shift"]), strict=True)
        return [wavepe.wavelet_table(**args, dtype=wide(a["scale"].dtype))]

    def bad(self, a):
        dim, one = len(a["scale"]), a["scale"].new_ones
        both = dict.fromkeys(self.leaves, one(2, 2))
        return [
            (rf"of one size, got \({dim + 2}\b", {"scale": one(dim + 2)}),
            (r"scale and shift must be 1-D .* got .*\(2, 2\)", both),
            (r"scale and shift must be 1-D", {"shift": one(dim, 1)}),
            (r"offsets must be 1-D, got .*\(1, 5\)", {"offsets": torch.arange(5)[None]}),
            ("offsets must be an int from 0 .*-1", {"offsets": -1}),
            (f"{2**62}", {"offsets": 2**62}),
            ("ricker", {"kind": "mexican"}),
            ("kind must be a string, got 3", {"kind": 3}),
        ]

    def random(self, rng, n, length, leading, pick):
        kind, mirrored = pick(rng, *oracle.KINDS), pick(rng, None, False, True)
        return {"count": pick(rng, False, True), "kind": kind, "mirrored": mirrored}


def once(exact, bound, dtype):
    """Return the bound of a float64 result rounded to dtype; low precision goes through float32."""
    if dtype == F32:
        step = np.maximum(np.ldexp(1.0, np.frexp(np.abs(exact) + bound)[1] - 24), 2.0**-149)
        bound = bound + step / 2
    return rounded(exact, bound, dtype)


# ---- relative bias -------------------------------------------------------------------------------
class RelativeBias(Operator):
    leaves = spoilt = ("q", "p")
    empty = (*Operator.empty, {"more": -3}, {"w": 0}, {"lead": (0, 3)})
    large = {"n": 17, "length": 270}
    keeps_types = False
    forms = {
        "one row": {"lead": (), "w": 1},
        "zero": {"more": 4, "w": 4, "first": -1},
        "edge": {"more": 4, "w": 4, "first": -1, "beyond": "edge"},
        "more rows, per head": {"lead_p": (2,), "more": -1, "w": 20, "first": -6},
        "per head, edge": {"lead_p": (2,), "w": 7, "first": 2, "beyond": "edge"},
        "many keys": {"lead": (4,), "more": 30, "w": 33},
        "both sides": {"lead": (1, 2), "lead_p": (2,), "w": 31, "first": -15},
        "both sides, edge": {"w": 5, "first": -2, "beyond": "edge"},
    }

    def dtype(self, a):
        return {"out": a["q"].dtype}

    def draw(self, rng, n, dtype=F32, length=3, lead=(2, 2), lead_p=(), more=0, w=6, **form):
        """`more` is the number of keys beyond queries."""
        q = normal(rng, *lead, length, n, dtype=dtype)
        p = normal(rng, *lead_p, w, n, dtype=dtype)
        keys = max(length + more, 0)
        return {"q": q, "p": p, "keys": keys, "first": 0, "beyond": "zero"} | form

    def judge(self, a, grads=()):
        (q, p), dtype = arrays(a["q"], a["p"]), a["q"].dtype
        kind, keys, place = wide(dtype), a["keys"], (a["first"], a["beyond"])
        exact = {"out": rounded(*judge_bias(q, p, keys, *place, kind), dtype)}
        # Gradients are torch's matrix products, in any order: not of NaN and low precision.
        if not grads or dtype in LOW or not (np.isfinite(q).all() and np.isfinite(p).all()):
            return exact
        (grad,) = arrays(*grads)
        values = oracle.relative_bias_gradients(grad, q, p, *place)
        sizes = oracle.relative_bias_gradients(*(np.abs(x) for x in (grad, q, p)), *place)
        row, inside = oracle.relative_rows(q.shape[-2], keys, p.shape[-2], *place)
        shared = q[..., 0, 0].size // max(p[..., 0, 0].size, 1) if q.size and p.size else 1
        most = np.bincount(row[inside]).max(initial=0) * shared  # pairs of one row
        for name, value, size, terms in zip("qp", values, sizes, (keys, most), strict=True):
            exact[name] = value, 2 * (terms + 1) * UNIT[np.dtype(kind)] * size
        return exact

    def numpy(self, a):
        return [wavepe.relative_bias(**a | {name: a[name].numpy() for name in self.leaves})]

    def bad(self, a):
        q, p = a["q"], a["p"]
        (w, d), new = p.shape[-2:], q.new_ones
        dtype = F32 if q.dtype == F64 else F64
        return [
            (rf"head size.*\b{d + 1}\b", {"p": new(w, d + 1)}),
            ("heads", {"p": new(7, w, d)}),
            (r"needed, got .* and \(4", {"p": new(4)}),
            (r"needed, got .*\(7, 2, ", {"p": new(7, 2, w, d)}),
            (r"needed, got \(4,?\) and ", {"q": new(4)}),
            (r"needed, got \(\) and ", {"q": new(())}),
            ("[Dd]ouble|float64", {"p": p.to(dtype)}),
            ("edge", {"p": new(0, d), "beyond": "edge"}),
            ("unknown beyond.*edge", {"beyond": "wrap"}),
            ("unknown beyond 1; known: zero, edge", {"beyond": 1}),
            ("-1", {"keys": -1}),
            ("keys must be an integer, got 7.0", {"keys": 7.0}),
        ]

    def random(self, rng, n, length, leading, pick):
        more, w = int(rng.integers(-length, 420)), int(rng.integers(1, 420))
        lead = leading(rng, 200_000, length * max(length + more, w))
        return {
            "lead": lead,
            "lead_p": pick(rng, (), lead[-1:]),
            "more": more,
            "w": w,
            "first": pick(rng, 0, -w // 2, int(rng.integers(-length - 9, length + more + 9))),
            "beyond": pick(rng, "zero", "edge"),
        }


# ---- parts of attention --------------------------------------------------------------------------
class MergeAttention(Operator):
    outputs, leaves = ("out", "lse"), ("outs", "lses")
    exact = {}  # it is composed of torch's operators
    empty = (*Operator.empty, {"lead": (2, 0)}, {"lead": (4, 5, 0, 6)})
    forms = {"1 part": {"parts": 1}, "3 parts": {}, "unseen": {"parts": 5, "unseen": 0.4}}

    def dtype(self, a):
        dtype = a["outs"].dtype
        return {"out": dtype, "lse": F64 if dtype == F64 else F32}

    def draw(self, rng, n, dtype=F32, length=3, lead=(2,), parts=3, unseen=0.0):
        of_lse = F64 if dtype == F64 else F32
        outs = normal(rng, parts, *lead, length, n, dtype=dtype)
        lses = 2 * normal(rng, parts, *lead, length, dtype=of_lse)
        hidden = torch.from_numpy(np.asarray(rng.random(lses.shape) < unseen))
        if unseen:
            hidden[..., :1] = True  # a row that no part has seen
        return {"outs": outs, "lses": lses.masked_fill(hidden, -math.inf)}

    def judge(self, a, grads=()):
        (outs, lses), dtype = arrays(a["outs"], a["lses"]), a["outs"].dtype
        top = np.max(lses, 0)
        seen = top != -math.inf
        weights = np.where(seen, np.exp(lses - np.where(seen, top, 0)), 0)
        total = np.where(seen, weights.sum(0), 1)
        with np.errstate(divide="ignore"):
            lse = np.where(seen, top + np.log(total), -math.inf)
        terms = (weights / total)[..., None] * outs
        # lse rounds in and out; so do the weights' exponents, each part and the sum.
        work = UNIT[np.dtype(wide(dtype))]
        bound = (32 + len(outs)) * work * np.abs(terms).sum(0)
        return {
            "out": rounded(terms.sum(0), bound, dtype),
            "lse": (lse, 16 * work * (2 + np.where(seen, np.abs(lse), 0))),
        }

    def bad(self, a):
        outs, lses = a["outs"], a["lses"]
        out, lse, (*lead, n) = outs[0], lses[0], outs.shape[1:]
        wider, longer = (
            out.new_ones(*lead, n + 1),
            torch.cat([out, out.new_ones(*lead[:-1], 1, n)], -2),
        )
        other = torch.bfloat16 if out.dtype != torch.bfloat16 else F32
        return [
            (words, {"outs": some_outs, "lses": some_lses})
            for words, some_outs, some_lses in (
                ("0 outs and 0 lses", [], []),
                ("0 outs and 0 lses", outs[:0], lses[:0]),
                ("2 outs and 1 lses", [out, out], [lse]),
                (rf"part 1 has out .*{n + 1}\)", [out, wider], [lse, lse]),
                ("part 1 has out ", [out, longer], [lse, lse]),
                (r"part 1 .* lse \(", [out, out], [lse, lse[None]]),
                (r"lse \(.*\)", [out], [out]),
                (r"lse \(.*; pass zip\(\*parts\)", (out, lse), (out, lse)),
                ("float32.*bfloat16|one dtype", [out, out.to(other)], [lse, lse]),
                ("int64", [out.long()], [lse]),
                ("int64", [out], [lse.long()]),
                (r"lses\[0\].*list", [out], [[1.0]]),
                ("sequence.*float", [out], 1.0),
                ("sequence", ONES(()), [lse]),
            )
        ]

    def random(self, rng, n, length, leading, pick):
        lead, unseen = leading(rng, 40_000, n * length), pick(rng, 0.0, 0.4)
        return {"lead": lead, "parts": int(rng.integers(1, 6)), "unseen": unseen}


OPERATORS = {
    op.name: op
    for op in (
        Rope("rope"), Rope("rope_"), Rope("rope_qk"), RopeTable("rope_table"),
        WaveletTable("wavelet_table"), RelativeBias("relative_bias"),
        MergeAttention("merge_attention"),
    )
}  # fmt: skip


# ---- programs in which only values tell a size ---------------------------------------------------

PROGRAMS = ("exported", "strict", "compiled")


def of_values(call, axes):
    """A module of a count and tensors, whose `axes` (tensor, axis) get that size by its value."""

    class OfValues(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.call = call  # registered, if it is a module: strict export wants its parameters

        def forward(self, count, *inputs):
            inputs, size = list(inputs), count.item()
            for tensor, axis in axes:
                inputs[tensor] = inputs[tensor].index_select(axis, torch.arange(size))
            return self.call(size, *inputs)

    return OfValues()


def program_of(module, inputs, mode):
    """The module as a program of that mode, which takes no value of `inputs` for a constant."""
    if mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        whole = torch._dynamo.config.patch(capture_scalar_outputs=True)
        return whole(lambda *inputs: compiled(*inputs))
    return torch.export.export(module, inputs, strict=mode == "strict").module()
