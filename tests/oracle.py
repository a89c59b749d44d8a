"""The one judge of every kernel: plain float64 expressions, written formula for formula.

mpmath takes over where float64 is not enough (angles of far positions).
Nothing here is shared with the package.
Source keys: [W] Oka et al., arXiv 2502.02004; [R] Su et al., arXiv 2104.09864; [A] Press et al.,
arXiv 2108.12409;
[V] Vaswani et al., arXiv 1706.03762.
"""

import math

import mpmath
import numpy as np

KINDS = ("ricker", "gaussian", "morlet", "haar")
EVEN = ("ricker", "gaussian", "morlet")

# exp(-u^2/2) is 0 in float64 from abs(u) = 39.4 on; beyond this the product with u^2 would only
# be inf * 0.
TAIL = 60.0

# Enough bits for position (32) * inv_freq (53) * attention_factor (53), and for the reduction by
# pi after it.
PRECISION = 240


# ------------------------------------------------------------------ wavelets [W]


def ricker(u):
    """[W] Eq. 10: (1 - u^2) exp(-u^2 / 2)."""
    return 0.0 if abs(u) > TAIL else (1 - u * u) * math.exp(-u * u / 2)


def gaussian(u):
    """[W]: exp(-u^2), no 1/2 in the exponent."""
    return 0.0 if abs(u) > TAIL else math.exp(-u * u)


def morlet(u, difference):
    """[W]: exp(-u^2) cos(t - b); the cosine is not scaled by a. math.cos reduces every finite
    argument exactly."""
    return 0.0 if abs(u) > TAIL else math.exp(-u * u) * math.cos(difference)


def haar(u):
    """[W] Eq. 15: +1 on [-0.5, 0), -1 on [-1, -0.5), 0 elsewhere."""
    return float(-0.5 <= u < 0) - float(-1 <= u < -0.5)


def psi(kind, t, scale, shift, dtype=np.float64):
    """psi((t - shift) / scale), elementwise in float64, of a difference rounded to `dtype`.

    haar jumps, so its quotient is rounded as the loop rounds it: to `dtype`, float32 for float16.
    """
    dtype = np.dtype(dtype)
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    with np.errstate(all="ignore"):
        t, scale, shift = (np.asarray(a).astype(dtype) for a in (t, scale, shift))
        difference = np.asarray(t - shift)
        scale, difference = np.broadcast_arrays(scale, difference)
        rounded = np.asarray(difference.astype(wide) / scale.astype(wide))
        exact = np.asarray(difference.astype(np.float64) / scale.astype(np.float64))
    out = np.empty(difference.shape)
    for index in np.ndindex(out.shape):
        u = float(rounded[index] if kind == "haar" else exact[index])
        if math.isnan(u) or scale[index] == 0:
            out[index] = math.nan
        elif kind == "morlet":
            out[index] = morlet(u, float(difference[index]))
        else:
            out[index] = {"ricker": ricker, "gaussian": gaussian, "haar": haar}[kind](u)
    return out


def wavelet_grid(dim, scales):
    """[W]: scales times shifts 0 .. dim/s - 1, scale major: column i * (dim/s) + j holds
    (scales[i], j)."""
    per_scale = dim // len(scales)
    columns = [(float(a), float(b)) for a in scales for b in range(per_scale)]
    return np.array([a for a, _ in columns]), np.array([b for _, b in columns])


def wavelet_table(offsets, scale, shift, kind="ricker", mirrored=None):
    """[W]: p[delta, c] = psi((t - b_c) / a_c), t = delta, or -delta if mirrored (the default for
    haar alone)."""
    if mirrored is None:
        mirrored = kind == "haar"
    deltas = range(offsets) if isinstance(offsets, int) else [int(o) for o in offsets]
    t = np.array([-o if mirrored else o for o in deltas], dtype=np.float64).reshape(-1, 1)
    return psi(kind, t, np.asarray(scale, np.float64), np.asarray(shift, np.float64))


# ------------------------------------------------------------------ relative bias [W]


def relative_bias(q, p, keys, first=0, beyond="zero"):
    """out[i, j] = q[i] . p[delta - first], delta = i + (keys - m) - j; the score term q_m . p_delta
    of [W]."""
    q, p = np.asarray(q, np.float64), np.asarray(p, np.float64)
    m, w = q.shape[-2], p.shape[-2]
    out = np.zeros((*np.broadcast_shapes(q.shape[:-2], p.shape[:-2]), m, keys))
    with np.errstate(all="ignore"):
        for i in range(m):
            for j in range(keys):
                row = i + (keys - m) - j - first
                if beyond == "edge":
                    row = min(max(row, 0), w - 1)
                if 0 <= row < w:
                    out[..., i, j] = (q[..., i, :] * p[..., row, :]).sum(-1)
    return out


# ------------------------------------------------------------------ rotary [R]


def rope_pairs(h, interleaved):
    """The two dims of every pair: (2i, 2i + 1), or (i, i + h) in the half-split layout."""
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + h) for i in range(h)]


def rope(x, cos, sin, interleaved=False, inverse=False):
    """[R] Eq. 34: pair (a, b) turned by its angle, (a cos - b sin, b cos + a sin); the rest of the
    head copied."""
    x, cos, sin = (np.asarray(a, np.float64) for a in (x, cos, sin))
    y = x.copy()
    sign = -1.0 if inverse else 1.0
    with np.errstate(all="ignore"):
        for i, (a, b) in enumerate(rope_pairs(cos.shape[-1], interleaved)):
            c, s = cos[..., i], sign * sin[..., i]
            y[..., a] = x[..., a] * c - x[..., b] * s
            y[..., b] = x[..., b] * c + x[..., a] * s
    return y


def rope_terms(x, cos, sin, interleaved=False):
    """abs(a cos) + abs(b sin), what the rounding errors of rope are measured by; 0 where it only
    copies."""
    x, cos, sin = (np.abs(np.asarray(a, np.float64)) for a in (x, cos, sin))
    terms = np.zeros_like(x)
    for i, (a, b) in enumerate(rope_pairs(cos.shape[-1], interleaved)):
        terms[..., a] = x[..., a] * cos[..., i] + x[..., b] * sin[..., i]
        terms[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
    return terms


def rope_frequencies(dim, theta=10000.0):
    """[R] Eq. 15: theta^(-2i/d), rounded once."""
    with mpmath.workprec(PRECISION):
        return np.array(
            [float(mpmath.power(theta, -mpmath.mpf(2 * i) / dim)) for i in range(dim // 2)]
        )


def pair_positions(positions, pairs, sections=None):
    """(..., h) array of Python ints: the coordinate that turns each pair (its axis' own with
    `sections`)."""
    positions = np.asarray(positions)
    if sections is None:
        columns = [positions] * pairs
    else:
        axis = [a for a, count in enumerate(sections) for _ in range(count)]
        columns = [positions[..., a] for a in axis]
    if not columns:
        return np.empty((*positions.shape[: positions.ndim - (sections is not None)], 0), object)
    return np.stack([np.asarray(c).astype(object) for c in columns], axis=-1)


def rope_table(positions, inv_freq, attention_factor=1.0, sections=None):
    """[R]: cos and sin of position * inv_freq times the factor: exact, then rounded once to
    float64."""
    inv_freq = np.asarray(inv_freq, np.float64)
    places = pair_positions(positions, len(inv_freq), sections)
    cos, sin = np.empty(places.shape), np.empty(places.shape)
    with mpmath.workprec(PRECISION):
        factor = mpmath.mpf(float(attention_factor))
        for index in np.ndindex(places.shape):
            angle = mpmath.mpf(int(places[index])) * mpmath.mpf(float(inv_freq[index[-1]]))
            c, s = mpmath.cos_sin(angle)
            cos[index], sin[index] = float(c * factor), float(s * factor)
    return cos, sin


def rope_table_hf(positions, inv_freq, attention_factor=1.0, sections=None):
    """What Hugging Face models compute: float32 position, float32 frequency, their float32 product,
    its cos and sin."""
    inv_freq = np.asarray(inv_freq).astype(np.float32)
    places = pair_positions(positions, len(inv_freq), sections)
    cos, sin = np.empty(places.shape), np.empty(places.shape)
    for index in np.ndindex(places.shape):
        angle = float(np.float32(int(places[index])) * inv_freq[index[-1]])
        cos[index] = math.cos(angle) * attention_factor
        sin[index] = math.sin(angle) * attention_factor
    return cos, sin


# ------------------------------------------------------------------ ALiBi [A], sinusoidal [V]


def alibi_slopes(heads):
    """[A]: geometric from 2^(-8/H); otherwise the lower power of two's, then every second of the
    next power's."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    upper = [2.0 ** (-8.0 * (i + 1) / (2 * lower)) for i in range(2 * lower)]
    return np.array(slopes + upper[0::2][: heads - lower])


def sinusoidal(positions, dim, theta=10000.0):
    """[V] 3.5: PE[m, 2i] = sin(m w_i), PE[m, 2i + 1] = cos(m w_i), w_i = theta^(-2i/d)."""
    positions = np.asarray(positions)
    out = np.empty((*positions.shape, dim))
    with mpmath.workprec(PRECISION):
        for i in range(dim // 2):
            w = mpmath.power(theta, -mpmath.mpf(2 * i) / dim)
            for index in np.ndindex(positions.shape):
                c, s = mpmath.cos_sin(int(positions[index]) * w)
                out[(*index, 2 * i)], out[(*index, 2 * i + 1)] = float(s), float(c)
    return out
