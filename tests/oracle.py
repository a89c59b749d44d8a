"""The reference of every kernel: the published formulas in plain float64.

For angles of far positions, where float64 is not enough, mpmath is used. The package shares no code
with this file.
Source keys: [W] Oka et al., arXiv 2502.02004; [R] Su et al., arXiv 2104.09864; [A] Press et al.,
arXiv 2108.12409;
[V] Vaswani et al., arXiv 1706.03762.
"""

import functools
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


def wavelet_table_gradients(grad, offsets, scale, shift, kind="ricker", mirrored=None):
    """Return the gradients of sum(grad p): (d/da, sizes of its terms) and (d/db, sizes).

    With u = (t - b) / a, du/da = -u / a and du/db = -1 / a. Morlet's cosine depends on b alone.
    The sizes include the rounding of u.
    """
    if mirrored is None:
        mirrored = kind == "haar"
    t = np.asarray(offsets, np.float64)[:, None] * (-1 if mirrored else 1)
    u = np.clip((t - shift) / scale, -TAIL, TAIL)
    bell = np.exp(-(u**2) / (2 if kind == "ricker" else 1))
    turning, size, along = 1.0, 2 * np.abs(u), 0.0
    if kind == "ricker":
        turning, size = (u**2 - 3) / -2, np.abs(u) ** 3 + 3 * np.abs(u)
    elif kind == "morlet":
        turning, along = np.cos(t - shift), bell * np.sin(t - shift)
    elif kind == "haar":
        bell = 0.0 * u
    by_u = -2 * u * bell * turning
    size = np.abs(grad) * bell * (1 + u**2) * (size / np.abs(scale) + (kind == "morlet"))
    by_scale, by_shift = grad * by_u * -u / scale, grad * (along - by_u / scale)
    return [(by_scale.sum(0), (size * np.abs(u)).sum(0)), (by_shift.sum(0), size.sum(0))]


# ------------------------------------------------------------------ relative bias [W]
def relative_rows(m, keys, w, first, beyond):
    """Return the row delta - first for delta = i + (keys - m) - j, and whether the table has it.

    Both are (m, keys). The table has w rows; with beyond="edge" the row is the nearest one.
    """
    first = max(-(2**61), min(2**61, first))  # beyond, the result is the same; sums fit int64
    row = np.arange(m)[:, None] + (keys - m) - np.arange(keys) - first
    if beyond == "edge":
        row = np.clip(row, 0, w - 1)
    return row, (row >= 0) & (row < w)


def relative_bias(q, p, keys, first=0, beyond="zero"):
    """out[i, j] = q[i] . p[delta - first]; the score term q_m . p_delta of [W]."""
    q, p = np.asarray(q, np.float64), np.asarray(p, np.float64)
    m, w = q.shape[-2], p.shape[-2]
    lead = np.broadcast_shapes(q.shape[:-2], p.shape[:-2])
    row, inside = relative_rows(m, keys, w, first, beyond)
    if not inside.any():
        return np.zeros((*lead, m, keys))
    with np.errstate(all="ignore"):
        products = np.broadcast_to(q @ np.swapaxes(p, -1, -2), (*lead, m, w))
        of_rows = np.broadcast_to(np.where(inside, row, 0), (*lead, m, keys))
        return np.where(inside, np.take_along_axis(products, of_rows, -1), 0.0)


def relative_bias_gradients(grad, q, p, first=0, beyond="zero"):
    """Return dq[i] = sum_j grad[i, j] p[row], and dp[r] = the sum of grad[i, j] q[i] over row r.

    dp is also summed over the axes that p is broadcast to.
    """
    grad, q, p = (np.asarray(x, np.float64) for x in (grad, q, p))
    (*lead, m, keys), w = grad.shape, p.shape[-2]
    row, inside = relative_rows(m, keys, w, first, beyond)
    i, j = np.nonzero(inside)
    summed = np.zeros((m, w, *lead))  # of grad, by query and row
    np.add.at(summed, (i, row[i, j]), np.moveaxis(grad, (-2, -1), (0, 1))[i, j])
    summed = np.moveaxis(summed, (0, 1), (-2, -1))
    grad_p = np.swapaxes(summed, -1, -2) @ q
    return summed @ p, grad_p.sum(tuple(range(grad_p.ndim - p.ndim)))


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
    """Return abs(a cos) + abs(b sin), which bounds rope's rounding errors; 0 where rope copies."""
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
    """Return the coordinate that rotates each pair, as (..., h) Python ints.

    With `sections` it is the coordinate of the pair's axis.
    """
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
    factor = float(attention_factor)
    for index in np.ndindex(places.shape):
        cos[index], sin[index] = turn(int(places[index]), float(inv_freq[index[-1]]), factor)
    return cos, sin


@functools.lru_cache(1 << 16)
def turn(position, frequency, factor=1.0):
    """Return cos and sin times the factor of an angle of float64 frequency, or of (theta, 2i, d).

    Most tests ask for the same small positions, and mpmath is slow.
    """
    with mpmath.workprec(PRECISION):
        if isinstance(frequency, tuple):
            theta, twice, dim = frequency
            frequency = mpmath.power(theta, -mpmath.mpf(twice) / dim)
        c, s = mpmath.cos_sin(position * mpmath.mpf(frequency))
        return float(c * mpmath.mpf(factor)), float(s * mpmath.mpf(factor))


def rope_table_hf(positions, inv_freq, attention_factor=1.0, sections=None):
    """Return cos and sin as Hugging Face models compute them, from a float32 product."""
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
    """[A]: a geometric sequence from 2^(-8/H) if H is a power of two.

    Otherwise the slopes of the lower power of two, then every second one of the next power.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    upper = [2.0 ** (-8.0 * (i + 1) / (2 * lower)) for i in range(2 * lower)]
    return np.array(slopes + upper[0::2][: heads - lower])


def t5_bucket(delta, buckets, max_distance):
    """[T], causal: half of the buckets hold one distance, the others grow with its logarithm."""
    exact = buckets // 2
    if delta < exact:
        return delta
    with mpmath.workprec(PRECISION):
        share = mpmath.log(mpmath.mpf(delta) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact)
        return min(exact + int(mpmath.floor(share * (buckets - exact))), buckets - 1)


def t5(b, deltas, max_distance, causal=True):
    """(heads, deltas), of b (heads, buckets); without a mask half of them are for keys behind."""
    own = np.shape(b)[1] // (1 if causal else 2)
    index = [
        t5_bucket(abs(d), own, max_distance) + own * (d < 0 and not causal)
        for d in map(int, deltas)
    ]
    return b[:, index]


def kerple(kind, r1, r2, deltas):
    """[K]: (heads, deltas), of r1 and r2 (heads,). All are arrays, or all are tensors, whose
    gradients are kept."""
    r1, r2, far = r1[:, None], r2[:, None], abs(deltas)
    if kind == "power":
        return -r1 * far**r2
    grown = 1 + r2 * far
    return -r1 * (np.log(grown) if isinstance(grown, np.ndarray) else grown.log())


def sandwich(heads, deltas, dim):
    """[C]: (heads, deltas): the product of two sinusoidal encodings, divided by 8 h / H."""
    product = sinusoidal(deltas, dim) @ sinusoidal([0], dim)[0]
    return np.array([product / (8 * (h + 1) / heads) for h in range(heads)])


def sinusoidal(positions, dim, theta=10000.0):
    """[V] 3.5: PE[m, 2i] = sin(m w_i), PE[m, 2i + 1] = cos(m w_i), w_i = theta^(-2i/d)."""
    positions = np.asarray(positions)
    out = np.empty((*positions.shape, dim))
    for index in np.ndindex(positions.shape):
        for i in range(0, dim // 2 * 2, 2):
            cos, sin = turn(int(positions[index]), (theta, i, dim))
            out[(*index, i)], out[(*index, i + 1)] = sin, cos
    return out
