"""Seeded random calls of every torch op: the NumPy function's bits, or an error of torch's kind."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_agrees, generator, load_torch, turn

torch, ops = load_torch()

CASES = 150
# RuntimeError by the contract; TypeError and ValueError for what is no tensor or number at all.
REFUSED = (RuntimeError, TypeError, ValueError)
NONSENSE = (None, "x", object(), 1j, {}, torch.ones(2, dtype=torch.complex64))


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def strided(rng, t):
    """The same values with other strides: transposed storage, steps, an offset, or expanded."""
    if not t.numel() or not t.ndim:
        return t
    how, axis = rng.integers(5), int(rng.integers(t.ndim))
    if how == 0:
        return t.contiguous()
    if how == 1:
        return t.transpose(0, axis).contiguous().transpose(0, axis)
    if how == 2:
        return t.repeat_interleave(3, axis).unfold(axis, 1, 3).squeeze(-1)
    if how == 3:
        return torch.cat([t.flatten()[:1].new_zeros(3), t.flatten()])[3:].view(t.shape)
    return t.narrow(axis, 0, 1).expand(t.shape)


def normal(rng, shape, dtype):
    return strided(rng, torch.from_numpy(rng.normal(size=shape)).to(dtype))


def arrays(*tensors):
    return tuple(t.numpy() for t in tensors)


def rope_case(rng):
    batch, heads, length = (int(n) for n in rng.integers(0, 6, 3))
    h, rest, dtype = (
        int(rng.integers(1, 20)),
        int(rng.integers(0, 9)),
        pick(rng, torch.float32, torch.float64),
    )
    x = normal(rng, (batch, heads, length, 2 * h + rest), dtype)
    shape = pick(rng, (length, h), (1, length, h), (batch, length, h))
    of_table = pick(rng, torch.float32, dtype)
    cos, sin = (
        strided(rng, torch.from_numpy(a).to(of_table)) for a in turn(rng, shape, np.float64)
    )
    good = {
        "x": x,
        "cos": cos,
        "sin": sin,
        "interleaved": bool(rng.integers(2)),
        "inverse": bool(rng.integers(2)),
    }
    bad = [
        ("cos", torch.ones(length, h + 1)),
        ("sin", torch.ones(length + 1, h)),
        ("cos", torch.ones(batch + 2, length, h)),
        ("x", torch.ones(batch, heads, length, 2 * h - 1)),
        ("x", torch.ones(batch, heads, length, 2 * h, dtype=torch.int32)),
        ("cos", cos.to("meta")),
        ("x", x.to("meta")),
    ]
    return good, bad, ("x", "cos", "sin")


def call_rope(a):
    a = dict(a)
    return ops.rope(a.pop("x"), a.pop("cos"), a.pop("sin"), **a)


def want_rope(a):
    x, cos, sin = arrays(a["x"], a["cos"], a["sin"])
    cos, sin = (t.astype(x.dtype) for t in (cos, sin))
    cos, sin = (t[:, None] if t.ndim == 3 else t for t in (cos, sin))
    return wavepe.rope(x, cos, sin, interleaved=a["interleaved"], inverse=a["inverse"])


def relative_bias_case(rng):
    m, keys, w, d = (int(n) for n in rng.integers(0, 30, 4))
    lead, dtype = pick(rng, (), (2,), (2, 3), (0, 3)), pick(rng, torch.float32, torch.float64)
    w = max(w, 1)
    good = {
        "q": normal(rng, (*lead, m, d), dtype),
        "p": normal(rng, (*pick(rng, (), lead[-1:]), w, d), dtype),
        "keys": keys,
        "first": int(rng.integers(-40, 40)),
        "beyond": pick(rng, "zero", "edge"),
    }
    bad = [
        ("p", torch.ones(w, d + 1, dtype=dtype)),
        ("p", torch.ones(7, w, d, dtype=dtype)),
        ("p", torch.ones(w, d, dtype=torch.int64)),
        ("p", good["p"].to("meta")),
        ("q", torch.ones(d, dtype=dtype)),
        ("keys", -1),
        ("beyond", "both"),
    ]
    return good, bad, ("q", "p", "keys", "first", "beyond")


def call_relative_bias(a):
    a = dict(a)
    return ops.relative_bias(a.pop("q"), a.pop("p"), a.pop("keys"), **a)


def want_relative_bias(a):
    q, p = arrays(a["q"], a["p"])
    return wavepe.relative_bias(q, p, a["keys"], first=a["first"], beyond=a["beyond"])


def rope_table_case(rng):
    h = int(rng.integers(0, 7))
    sections = [int(n) for n in rng.multinomial(h, [0.3, 0.3, 0.4])] if rng.integers(2) else None
    shape = (*(int(n) for n in rng.integers(0, 5, rng.integers(0, 3))), *([3] if sections else []))
    good = {
        "positions": strided(
            rng, torch.from_numpy(np.asarray(rng.integers(-(2**24), 2**24, shape)))
        ),
        "inv_freq": strided(rng, torch.from_numpy(rng.uniform(0, 1, h))),
        "attention_factor": pick(rng, 1.0, 0.5, 1.25),
        "precision": pick(rng, "exact", "hf"),
        "sections": sections,
    }
    bad = [
        ("inv_freq", torch.ones(h, 1)),
        ("sections", [h + 1]),
        ("sections", [h, 0, 0, 0, 0, 0, 0]),
        ("precision", "half"),
        ("dtype", torch.int8),
        ("inv_freq", torch.ones(h, device="meta")),
    ]
    return good, bad, ("positions", "inv_freq", "attention_factor", "precision")


def call_rope_table(a):
    a = dict(a)
    return ops.rope_table(a.pop("positions"), a.pop("inv_freq"), **a)


def want_rope_table(a):
    a = dict(a)
    return wavepe.rope_table(*arrays(a.pop("positions"), a.pop("inv_freq")), **a)


def wavelet_table_case(rng):
    dim, w = int(rng.integers(0, 20)), int(rng.integers(0, 20))
    dtype = pick(rng, torch.float32, torch.float64)
    offsets = strided(rng, torch.from_numpy(rng.integers(-300, 300, w)))
    good = {
        "offsets": w if rng.integers(2) else offsets,
        "scale": strided(rng, torch.from_numpy(rng.uniform(0.5, 99, dim)).to(dtype)),
        "shift": strided(rng, torch.from_numpy(rng.uniform(-9, 9, dim)).to(dtype)),
        "kind": pick(rng, *oracle.KINDS),
        "mirrored": pick(rng, None, False, True),
    }
    bad = [
        ("offsets", -1),
        ("offsets", torch.ones(3)),
        ("offsets", torch.ones(2, 2, dtype=torch.int64)),
        ("scale", torch.ones(dim + 2)),
        ("shift", torch.ones(dim, 1)),
        ("kind", "daubechies"),
        ("shift", good["shift"].to("meta")),
    ]
    return good, bad, ("offsets", "scale", "shift", "kind")


def call_wavelet_table(a):
    a = dict(a)
    return ops.wavelet_table(a.pop("offsets"), a.pop("scale"), a.pop("shift"), **a)


def want_wavelet_table(a):
    scale, shift = arrays(a["scale"], a["shift"])
    offsets = a["offsets"] if isinstance(a["offsets"], int) else a["offsets"].numpy()
    options = {"kind": a["kind"], "mirrored": a["mirrored"], "dtype": scale.dtype}
    return wavepe.wavelet_table(offsets, scale, shift, **options)


OPS = {
    "relative_bias": (relative_bias_case, call_relative_bias, want_relative_bias),
    "rope": (rope_case, call_rope, want_rope),
    "rope_table": (rope_table_case, call_rope_table, want_rope_table),
    "wavelet_table": (wavelet_table_case, call_wavelet_table, want_wavelet_table),
}


@pytest.mark.parametrize("name", OPS)
def test_good_and_bad_input(variant, name):
    case, call, want = OPS[name]
    rng = generator("fuzz", name)
    for number in range(CASES):
        good, bad, keys = case(rng)
        got, exact = call(good), want(good)
        for a, b in zip(
            *((v,) if not isinstance(v, tuple) else v for v in (got, exact)), strict=True
        ):
            assert_agrees(a.numpy(), b, f"{name} {number}")
        if rng.random() < 0.6:
            key, value = bad[rng.integers(len(bad))]
        else:
            key, value = pick(rng, *keys), pick(rng, *NONSENSE)
        with pytest.raises(REFUSED):
            call(good | {key: value})
