"""What the tests of wavepe.nn.SelfAttention share: encodings, modules, and the formula in float64.

Nothing of the formula is shared with the package.
"""

import math

import numpy as np
import oracle
import oracle_rope
import torch
from wavepe.nn import SelfAttention

HEAD_DIM = 8
YARN = "rope:type=yarn,factor=4,original_max_position_embeddings=16"


def turned(rotation, interleaved=False):
    """Rotary: frequencies, factor on cos and sin, layout."""
    return lambda module: (*rotation(), interleaved)


def kept_pairs(pairs):
    frequencies = oracle.rope_frequencies(HEAD_DIM)
    return np.where(np.arange(HEAD_DIM // 2) < pairs, frequencies, 0.0), 1.0


ROTARY = {
    "rope": turned(lambda: (oracle.rope_frequencies(HEAD_DIM), 1.0)),
    "rope:theta=50,interleaved=true": turned(
        lambda: (oracle.rope_frequencies(HEAD_DIM, 50.0), 1.0), interleaved=True
    ),
    "rope:fraction=0.5": turned(lambda: kept_pairs(2)),
    YARN: turned(lambda: oracle_rope.yarn(HEAD_DIM, 10000.0, 4.0, 16)),
}


def wavelet(scales, kind="ricker"):
    def row(parameters, head, delta):
        scale, shift = oracle.wavelet_grid(HEAD_DIM, scales)
        return oracle.wavelet_table([delta], scale, shift, kind)[0]

    return row


def learned_wavelet(parameters, head, delta):
    """[W] with a scale and a shift per column."""
    u = (delta - parameters["shift"]) / parameters["scale"]
    return (1 - u**2) * np.exp(-(u**2) / 2)


def shaw(parameters, head, delta):
    """[S]: a_clip(n - m), row 0 is n - m = -clip."""
    return parameters["table"][min(max(-delta, -3), 3) + 3]


def transformer_xl(parameters, head, delta):
    """[X]: sine waves of the distance times W_r."""
    projection = parameters["W_r"][head]
    return oracle.sinusoidal([delta], len(projection))[0] @ projection


def sine_waves(parameters, head, delta):
    return oracle.sinusoidal([delta], HEAD_DIM)[0]


# Constant tables are rounded to float32.
CONSTANT = {
    "wavelet:scales=4": wavelet([1, 2, 4, 8]),
    "wavelet:kind=haar,scales=2": wavelet([1, 2], "haar"),
    "transformer_xl:biases=false": sine_waves,
}
LEARNED = {
    "wavelet:scales=4,learned=true": learned_wavelet,
    "shaw:clip=3": shaw,
    "transformer_xl": transformer_xl,
}
# Of each head and distance.
BIASES = {
    "sandwich:dim=16": lambda parameters, heads, deltas, causal: oracle.sandwich(heads, deltas, 16),
    "t5:buckets=6,max_distance=9": lambda parameters, heads, deltas, causal: oracle.t5(
        parameters["b"], deltas, 9, causal
    ),
    "kerple": lambda parameters, heads, deltas, causal: oracle.kerple(
        "log", np.exp(parameters["log_r1"]), np.exp(parameters["log_r2"]), deltas
    ),
    "kerple:kind=power": lambda parameters, heads, deltas, causal: oracle.kerple(
        "power", np.exp(parameters["log_r1"]), 2 / (1 + np.exp(-parameters["logit_r2"])), deltas
    ),
}
SPECS = [*CONSTANT, *LEARNED, "alibi", *BIASES, *ROTARY, "none"]


def made(spec, dtype=torch.float64, seed=0, heads=4, kv_heads=2, **options):
    """A module in evaluation mode, with learned positions off their initial values; 4 heads of 8.

    Weights are larger than a new module's: scores must matter.
    """
    torch.manual_seed(seed)
    module = SelfAttention(HEAD_DIM * heads, heads, kv_heads, spec, **options).to(dtype).eval()
    with torch.no_grad():
        for x in module.parameters():
            x.mul_(2) if x.dim() == 2 and x.shape[-1] == HEAD_DIM * heads else None
        for x in module.position_encoding.parameters():
            x.add_(0.3 * torch.randn(x.shape, dtype=x.dtype))
    return module


def tokens(length=11, batch=2, dtype=torch.float64, dim=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype)


def array(x):
    return x.detach().double().numpy()


def exact(module, x, *, key_mask=None, positions=None, segments=None, window=None, rotation=None):
    """The module's output by the definition, float64 (B, L, dim); `rotation` (frequencies, factor,
    interleaved) is by default that of its encoding."""
    spec, causal = str(module.encoding), module.causal
    weights = {name: array(value) for name, value in module.state_dict().items()}
    prefix = "position_encoding."
    parameters = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    batch, length, _ = x.shape
    heads, kv_heads, d = module.heads, module.kv_heads, module.head_dim
    where = np.arange(length) if positions is None else np.asarray(positions)
    where = np.broadcast_to(where, (batch, length))

    def projected(name, count):
        y = array(x) @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)
        return y.reshape(batch, length, count, d).transpose(0, 2, 1, 3)

    q, k = projected("q_proj", heads), projected("k_proj", kv_heads)
    v = projected("v_proj", kv_heads)
    if rotation is None and spec in ROTARY:
        rotation = ROTARY[spec](module)
    if rotation is not None:
        inv_freq, factor, interleaved = rotation
        cos, sin = oracle.rope_table(where, inv_freq, factor)
        q, k = (oracle.rope(y, cos[:, None], sin[:, None], interleaved) for y in (q, k))

    def visible(b, i, j):
        hidden = (
            (causal and j > i)
            or (window is not None and i - j >= window)
            or (key_mask is not None and not key_mask[b][j])
            or (segments is not None and segments[b][i] != segments[b][j])
        )
        return not hidden

    row = {**CONSTANT, **LEARNED}.get(spec)
    u, r = (parameters.get(name, np.zeros((heads, d))) for name in ("u", "v"))
    out = np.zeros((batch, length, heads, d))
    if spec in BIASES:
        bias = BIASES[spec](parameters, heads, range(1 - length, length), causal)
    for h in range(heads):
        g = h // (heads // kv_heads)
        deltas = np.arange(1 - length, length)
        p = np.zeros((len(deltas), d))
        if row is not None:
            p = np.array([row(parameters, h, delta) for delta in deltas]).reshape(p.shape)
        for b, i in np.ndindex(batch, length):
            seen = np.array([j for j in range(length) if visible(b, i, j)], int)
            score = k[b, g, seen] @ (q[b, h, i] + u[h])
            score = (score + p[i - seen + length - 1] @ (q[b, h, i] + r[h])) / math.sqrt(d)
            if spec == "alibi":
                score -= oracle.alibi_slopes(heads)[h] * abs(i - seen)
            if spec in BIASES:
                score += bias[h, i - seen + length - 1]
            if len(seen):
                e = np.exp(score - max(score))
                out[b, i, h] = e @ v[b, g, seen] / e.sum()
    out = out.reshape(batch, length, heads * d)
    return out @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0)


def assert_exact(got, module, x, *, where=None, **options):
    """`got` against the formula, in units of the largest output; `where` picks tokens (B, L)."""
    assert got.dtype == x.dtype
    wanted = exact(module, x, **options)
    where = np.ones(wanted.shape[:2], bool) if where is None else np.asarray(where)
    rounded = 2.0**-22 if str(module.encoding) in CONSTANT else 2.0**-46
    bound = {
        torch.float64: rounded,
        torch.float32: 2.0**-19,
        torch.bfloat16: 2.0**-5,
        torch.float16: 2.0**-8,
    }[got.dtype]
    error = np.abs(array(got) - wanted)[where]
    assert error.max(initial=0) <= bound * np.abs(wanted).max(initial=1), error.max()
