"""Helpers of the tests of wavepe.nn: modules, and their formula in float64.

Nothing of the formula is shared with the package.
"""

import numpy as np
import torch
import wavepe
from encoding_cases import ENCODINGS, HEAD, SCALED, attention_weights, learned_by, parts_of
from wavepe.nn import SelfAttention

SPECS = [spec for spec in ENCODINGS if not wavepe.encoding(spec).adds and spec != SCALED]
# The others see where a sequence begins.
RELATIVE = [spec for spec in SPECS if "floor=" not in spec]
ROTARY = [spec for spec in SPECS if spec.startswith("rope")]


def made(spec, dtype=torch.float64, seed=0, heads=4, kv_heads=2, **options):
    """A module in evaluation mode, with learned positions off their initial values; 4 heads of 8.

    Weights are larger than a new module's: scores must matter.
    """
    torch.manual_seed(seed)
    module = SelfAttention(HEAD * heads, heads, kv_heads, spec, **options).to(dtype).eval()
    with torch.no_grad():
        for x in module.parameters():
            x.mul_(2) if x.dim() == 2 and x.shape[-1] == HEAD * heads else None
        for x in module.position_encoding.parameters():
            x.add_(0.3 * torch.randn(x.shape, dtype=x.dtype))
    return module


def tokens(length=11, batch=2, dtype=torch.float64, dim=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype)


def array(x):
    return x.detach().double().numpy()


def exact(module, x, *, key_mask=None, positions=None, segments=None, window=None, parts=None):
    """The module's output by the definition, float64 (B, L, dim). `parts` are as in encoding_cases,
    by default those of its encoding; rows of the other options are for all of the batch, or (B, L).
    """
    causal = module.causal
    weights = {name: array(value) for name, value in module.state_dict().items()}
    batch, length, _ = x.shape
    heads, kv_heads, d = module.heads, module.kv_heads, module.head_dim

    def by_row(given):
        return np.broadcast_to(np.asarray(given), (batch, length))

    where = by_row(np.arange(length) if positions is None else positions)
    shown = by_row(True if key_mask is None else key_mask)
    of_sequence = by_row(0 if segments is None else segments)

    def projected(name, count):
        y = array(x) @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)
        return y.reshape(batch, length, count, d).transpose(0, 2, 1, 3)

    q, k = projected("q_proj", heads), projected("k_proj", kv_heads)
    v = projected("v_proj", kv_heads)
    if parts is None:
        learned = learned_by(module)
        parts = parts_of(module.encoding, length, heads, learned=learned, causal=causal)
    for name in {"temperature", "r_temperature"} & parts.keys():  # by positions, and not by places
        counted = where.astype(np.int64)
        if positions is None:  # without padding, and anew in each sequence
            same = of_sequence[:, :, None] == of_sequence[:, None]
            seen = np.tril(np.ones((length, length))) * same
            counted = ((seen @ shown[..., None])[..., 0] - 1).clip(0)
        factors = parts[name](counted)[:, None]
        parts = {**parts, name: lambda _, factors=factors: factors}
    i, j = np.arange(length)[:, None], np.arange(length)
    hidden = ~shown[:, None] | (of_sequence[:, :, None] != of_sequence[:, None])
    hidden = hidden | (causal & (j > i)) | (False if window is None else i - j >= window)
    hidden = torch.from_numpy(hidden)[:, None]
    args = *map(torch.from_numpy, (q, k)), x.detach().double(), hidden
    weight = attention_weights(parts, *args, where=where, causal=causal, shown=shown).numpy()
    out = (weight @ np.repeat(v, heads // kv_heads, axis=1)).transpose(0, 2, 1, 3)
    out = out.reshape(batch, length, heads * d)
    return out @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0)


def assert_exact(got, module, x, *, where=None, **options):
    """`got` against the formula, in units of the largest output; `where` picks tokens (B, L)."""
    assert got.dtype == x.dtype
    wanted = exact(module, x, **options)
    where = np.ones(wanted.shape[:2], bool) if where is None else np.asarray(where)
    # Constant tables are rounded to float32.
    constant = any(
        "table" in part.terms and "table" not in part.learns for part in module.encoding.parts
    )
    rounded = 2.0**-22 if constant else 2.0**-46
    bound = {
        torch.float64: rounded,
        torch.float32: 2.0**-19,
        torch.bfloat16: 2.0**-5,
        torch.float16: 2.0**-8,
    }[got.dtype]
    error = np.abs(array(got) - wanted)[where]
    assert error.max(initial=0) <= bound * np.abs(wanted).max(initial=1), error.max()
