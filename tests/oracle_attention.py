"""The reference of attention: dense float64 NumPy, forward and backward.

score[i, j] = (q_i . k_j + r_i . p[delta - first]) scale - slope |delta|, delta = i + offset - j
([W]; [S]; [X]; [A] for the slope), + bias[delta - bias_first], then softcap tanh(score / softcap);
softmax over the visible keys and the sink of the head, which has no value.
The package shares no code with this file.
"""

import math
from typing import NamedTuple

import numpy as np


class Forward(NamedTuple):
    """The arrays that the backward needs, (B, H, m, n), except out (B, H, m, dv), lse (B, H, m) and
    row. row is the table's row of every pair, and may be broadcast."""

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray  # softmax, before dropout
    factor: np.ndarray  # of dropout: 0, or 1 / (1 - dropout_p)
    visible: np.ndarray
    tanh: np.ndarray  # of score / softcap; 0 without softcap
    size: np.ndarray  # of the score: the sum of its terms' magnitudes
    row: np.ndarray
    inside: np.ndarray
    bias_row: np.ndarray  # the same of the bias
    bias_inside: np.ndarray


def heads_of(x, heads):
    """Repeat (B, Hk, n, c) to (B, H, n, c): query head h reads key head h // (H / Hk)."""
    if x.shape[1] == heads:
        return x
    return np.repeat(x, heads // x.shape[1] if x.shape[1] else 0, axis=1)


def deltas(m, n, offset):
    """Return i + offset - j, (B|1, 1, m, n). By default the last query is at the last key."""
    offset = np.asarray(n - m if offset is None else offset).astype(np.int64).reshape(-1, 1, 1, 1)
    return np.arange(m)[:, None] + offset - np.arange(n)


def seen(shape, delta, causal, window, key_mask, segments, mask):
    visible = np.ones(shape, bool)
    if causal:
        visible &= delta >= 0
    if window is not None:
        visible &= delta < window
    if key_mask is not None:
        visible &= key_mask[:, None, None, :]
    if segments is not None:
        visible &= (segments[:, :, None] == segments[:, None, :])[:, None]
    if mask is not None:
        visible &= mask
    return visible


def products(a, b):
    """Return a_i . b_j for all rows of both."""
    with np.errstate(all="ignore"):
        return a @ np.swapaxes(b, -1, -2)


def weighted(weights, visible, x):
    """Return the sum of weights[i, j] x[j] over the visible j; a hidden x[j] may be NaN."""
    if np.isfinite(x).all() and np.isfinite(weights).all():
        return weights @ x
    shape = (*visible.shape[:-1], x.shape[-1])
    x = np.broadcast_to(x, (*visible.shape[:-2], *x.shape[-2:]))
    out = np.zeros(shape)
    with np.errstate(all="ignore"):
        for index in np.ndindex(shape[:-1]):
            out[index] = weights[index][visible[index]] @ x[index[:-1]][visible[index]]
    return out


def rows(delta, w, first, beyond):
    """Return the table's row of every delta, and whether it counts."""
    row = delta - first
    inside = np.ones(row.shape, bool) if beyond == "edge" else (row >= 0) & (row < w)
    return np.clip(row, 0, max(w - 1, 0)), inside & (w > 0)


def taken(table_products, row, inside):
    """Return table_products[i, row[i, j]], or 0 where the row does not count."""
    shape = np.broadcast_shapes(table_products.shape[:2], row.shape[:2]) + row.shape[2:]
    if not table_products.shape[-1]:
        return np.zeros(shape)
    found = np.take_along_axis(table_products, np.broadcast_to(row, shape), -1)
    return np.where(inside, found, 0.0)


def forward(
    q,
    k,
    v,
    *,
    p=None,
    first=0,
    beyond="zero",
    q_rel=None,
    slopes=None,
    causal=True,
    window=None,
    softcap=None,
    scale=None,
    offset=None,
    key_mask=None,
    segments=None,
    mask=None,
    dropout_p=0.0,
    seed=None,
    bias=None,
    bias_first=0,
    bias_beyond="zero",
    sinks=None,
):
    (batch, heads, m, d), n = q.shape, k.shape[2]
    shape = (batch, heads, m, n)
    delta = deltas(m, n, offset)
    visible = seen(shape, delta, causal, window, key_mask, segments, mask)
    k, v, scale = heads_of(k, heads), heads_of(v, heads), scale_of(d, scale)

    score, size = products(q, k), products(abs(q), abs(k))
    row, inside = rows(delta, 0 if p is None else p.shape[-2], first, beyond)
    if p is not None:
        r = q if q_rel is None else q_rel
        score = score + taken(products(r, p), row, inside)
        size = size + taken(products(abs(r), abs(p)), row, inside)
    score, size = score * scale, size * abs(scale)
    if slopes is not None:
        steep = slopes[:, None, None] * abs(delta).astype(float)
        score, size = score - steep, size + abs(steep)
    numbers = np.zeros((1, 0)) if bias is None else np.atleast_2d(bias)  # (H|1, w')
    bias_row, bias_inside = rows(delta, numbers.shape[-1], bias_first, bias_beyond)
    if bias is not None:
        given = np.broadcast_to(numbers[None, :, None], (1, heads, m, numbers.shape[-1]))
        of_delta = taken(given, bias_row, bias_inside)
        score, size = score + of_delta, size + abs(of_delta)
    tanh = np.zeros(shape)
    if softcap is not None:
        tanh = np.tanh(score / softcap)
        score = softcap * tanh

    weights, lse = softmax(score, visible, sinks)
    factor = np.ones(shape)
    if dropout_p > 0:
        kept = dropout_kept(shape, dropout_p, seed)
        factor = kept / (1 - dropout_p) if dropout_p < 1 else np.zeros(shape)
    out = weighted(weights * factor, visible, v)
    found = (row, inside, bias_row, bias_inside)
    return Forward(out, lse, weights, factor, visible, tanh, size, *found)


def scale_of(d, scale):
    return (1 / math.sqrt(d) if d else 1.0) if scale is None else scale


def softmax(score, visible, sinks):
    """Apply the softmax over visible keys and the sink; without any, weights are 0, lse is -inf."""
    sink = -np.inf if sinks is None else sinks[:, None, None]
    with np.errstate(all="ignore"):
        score = np.where(visible, score, -np.inf)
        largest = np.maximum(score.max(-1, keepdims=True, initial=-np.inf), sink)
        largest = np.where(np.isneginf(largest), 0.0, largest)
        e = np.where(visible, np.exp(score - largest), 0.0)
        total = e.sum(-1, keepdims=True) + np.exp(sink - largest)
        weights = e / np.where(total == 0, 1.0, total)
        return weights, (largest + np.log(total))[..., 0]


def backward(grad_out, grad_lse, done, q, k, v, **options):
    """Gradients by name (q, k, v; p, q_rel, bias, sinks where given), and their terms' sizes.

    With w~ = weights factor: out = w~ v and lse = log sum exp(s), so
      dv_j = sum_i w~_ij do_i,    dw_ij = factor_ij do_i . v_j,
      ds_ij = w_ij (dw_ij - sum_l w_il dw_il + dlse_i)    (of s after softcap),
      ds_ij (1 - tanh^2) before it; then dq_i, dk_j and the table's are those of a bilinear form.
    The sink is a score with dw = 0.
    """
    heads, visible = q.shape[1], done.visible
    v = heads_of(v, heads)
    # The rounding of the score adds its size times the weight.
    swing = 1 + np.where(visible, done.size, 0.0).max(-1, keepdims=True, initial=0.0)

    def score_gradient(grad_out, grad_lse, sign, v):
        """Return ds. With sign = 1 and magnitudes, return the size of its terms."""
        dw = np.where(visible, done.factor * products(grad_out, v), 0.0)
        with np.errstate(all="ignore"):
            ds = done.weights * (
                dw + sign * (done.weights * dw).sum(-1, keepdims=True) + grad_lse[..., None]
            )
            # 1 - tanh^2 errs by the rounding of tanh, however small it is itself
            return np.where(visible, ds * (1 - done.tanh**2 if sign < 0 else 1), 0.0)

    def value_gradient(weights, grad_out):
        columns = flip(weights * done.factor)
        return {"v": summed(weighted(columns, flip(visible), grad_out), k.shape[1])}

    def sinks_gradient(grad_out, grad_lse, sign, v, swing=1.0):
        if options.get("sinks") is None:
            return {}
        dw = np.where(visible, done.factor * products(grad_out, v), 0.0)
        terms = sign * (done.weights * dw).sum(-1) + grad_lse
        return {"sinks": (sink_weights(done, options["sinks"]) * terms * swing).sum((0, 2))}

    ds = score_gradient(grad_out, grad_lse, -1, v)
    of = score_gradient(abs(grad_out), abs(grad_lse), 1, abs(v)) * swing
    grads = through(ds, done, q, k, **options) | value_gradient(done.weights, grad_out)
    grads |= sinks_gradient(grad_out, grad_lse, -1, v)
    sizes = through(of, done, q, k, magnitudes=True, **options)
    sizes |= sinks_gradient(abs(grad_out), abs(grad_lse), 1, abs(v), swing[..., 0])
    return grads, sizes | value_gradient(done.weights * swing, abs(grad_out))


def of_out(grad_out, error, done, q, k, v, **options):
    """Return the error of each gradient that an elementwise `error` of out causes.

    It comes through sum_l w_il dw_il, which is computed as do_i . out_i.
    """
    size = (abs(grad_out) * error).sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # 2^-22: the rounding of tanh
        ds = np.where(done.visible, done.weights * size * (1 - done.tanh**2 + 2.0**-22), 0.0)
    grads = through(ds, done, q, k, magnitudes=True, **options)
    if options.get("sinks") is not None:
        of_sinks = sink_weights(done, options["sinks"]) * size[..., 0]
        grads["sinks"] = of_sinks.sum((0, 2))
    return grads


def sink_weights(done, sinks):
    """Return the weight of the sink in each row, (B, H, m)."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(sinks)[:, None], 0.0, np.exp(sinks[:, None] - done.lse))


def through(ds, done, q, k, *, p=None, q_rel=None, scale=None, bias=None, magnitudes=False, **_):
    """Return the gradients of q, k, p, q_rel and bias, from that of the score before softcap."""
    scale, heads, kv_heads = scale_of(q.shape[-1], scale), q.shape[1], k.shape[1]
    if magnitudes:
        q, k, p, q_rel = (None if x is None else abs(x) for x in (q, k, p, q_rel))
        scale = abs(scale)
    grads = {"q": scale * weighted(ds, done.visible, heads_of(k, heads))}
    grads["k"] = summed(scale * weighted(flip(ds), flip(done.visible), q), kv_heads)
    if p is not None:
        r = q if q_rel is None else q_rel
        grad_r, grads["p"] = table_gradients(ds * scale, r, p, done)
        if q_rel is None:
            grads["q"] = grads["q"] + grad_r
        else:
            grads["q_rel"] = grad_r
    if bias is not None:
        grads["bias"] = bias_gradient(ds, bias, done)
    return grads


def bias_gradient(ds, bias, done):
    """Sum ds over the pairs that read each number of the bias; hidden pairs may be NaN."""
    row, inside = (np.broadcast_to(x, ds.shape) for x in (done.bias_row, done.bias_inside))
    inside = inside & done.visible
    grad = np.zeros((ds.shape[1], bias.shape[-1]))
    if grad.size:
        head = np.arange(ds.shape[1])[None, :, None, None]
        np.add.at(grad, (head, row), np.where(inside, ds, 0.0))
    return grad.sum(0) if bias.ndim == 1 else grad


def flip(x):
    return np.swapaxes(x, -1, -2)


def summed(x, kv_heads):
    """Sum over the query heads of each key head."""
    batch, heads, n, c = x.shape
    group = heads // kv_heads if kv_heads else 0
    return x.reshape(batch, kv_heads, group, n, c).sum(2)


def table_gradients(ds, r, p, done):
    """Return dr = e p and dp = e^T r; e[i, c] sums ds over the pairs (i, j) that read row c.

    dr is summed over the c that query i reads, and dp over the i that read row c. Other entries may
    be NaN.
    """
    batch, heads, m, n = ds.shape
    e, read = np.zeros((batch, heads, m, p.shape[-2])), None
    row, inside = (np.broadcast_to(x, ds.shape) for x in (done.row, done.inside))
    if e.size and n:
        b, h, i, _ = np.ogrid[:batch, :heads, :m, :n]
        np.add.at(e, (b, h, i, row), np.where(inside, ds, 0.0))
    if not all(np.isfinite(x).all() for x in (e, r, p)):
        read = np.zeros(e.shape, bool)
        pairs = np.nonzero(inside & done.visible)
        read[(*pairs[:3], row[pairs])] = True
    grad_p = weighted(flip(e), None if read is None else flip(read), r).sum(0)
    return weighted(e, read, p), grad_p.sum(0) if p.ndim == 2 else grad_p


def forward_sizes(done, v):
    """Return the sizes of the terms of out and lse."""
    swing = 1 + np.where(done.visible, done.size, 0.0).max(-1, initial=0.0)
    v = heads_of(abs(v), done.out.shape[1])
    out = weighted(done.weights * done.factor * swing[..., None], done.visible, v)
    return {"out": out, "lse": swing + math.log(1 + done.visible.shape[-1])}


# ---- dropout ------------------------------------------------------------------------------------
def dropout_kept(shape, dropout_p, seed):
    """Return which weights dropout keeps, (B, H, m, n).

    splitmix64 of seed and row gives two 32-bit keys. A 32-bit mix of them and of the key's index is
    compared with dropout_p 2^32.
    """
    batch, heads, m, n = shape
    with np.errstate(over="ignore"):
        z = np.arange(1, batch * heads * m + 1, dtype=np.uint64).reshape(batch, heads, m, 1)
        z = np.uint64(seed % 2**64) + np.uint64(0x9E3779B97F4A7C15) * z
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        key1, key2 = z.astype(np.uint32), (z >> np.uint64(32)).astype(np.uint32)
        x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + key1
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x ^= key2
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
    return x.astype(np.uint64) >= np.uint64(math.floor(dropout_p * 2**32))
