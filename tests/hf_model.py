"""A tiny Llama, and the same model written out in float64, as the Hugging Face tests share them."""

import numpy as np
import oracle
import torch
import wavepe.hf
from transformers import LlamaConfig, LlamaForCausalLM
from wavepe.hf.rope_config import TRANSFORMERS_5

LENGTH = 16  # trained length
HEAD = 8  # head size
VOCABULARY = 50


def tiny_config(cls=LlamaConfig, *, heads=4, kv_heads=2, **options):
    """Two layers; all that may differ from the usual relation of sizes does (head size, GQA)."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12 * heads // 2,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "max_position_embeddings": LENGTH,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    given = {**sizes, **options}
    if not TRANSFORMERS_5 and (rope := given.pop("rope_parameters", None)):
        given["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        given["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return cls(**given)


def tiny(cls=LlamaForCausalLM, config=None, **options):
    """A model in evaluation mode with weights large enough that positions matter."""
    model = cls(tiny_config(**options) if config is None else config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            weight.copy_(middle + 0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def patched_tiny(spec, **options):
    """A tiny stock model with another encoding."""
    return wavepe.hf.patch(tiny(**options), spec)


def recompute(model, reentrant=False):
    """Switch gradient checkpointing on; its old name warns until transformers 6."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})


def tokens(rows, length, seed=0):
    """Random tokens other than the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


def logits(model, *args, **kwargs):
    """The model's logits, without gradients."""
    with torch.no_grad():
        return model(*args, **kwargs).logits


def gradients(model, ids):
    """Of all weights, for predicting `ids`."""
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


def worst(got, wanted):
    """The largest difference."""
    got, wanted = (np.asarray(array, dtype=np.float64) for array in (got, wanted))
    assert got.shape == wanted.shape
    return np.abs(got - wanted).max()


def close(got, wanted, bound=1e-4):
    """Whether all differences are at most `bound` of the largest wanted value."""
    return worst(got, wanted) <= bound * np.abs(np.asarray(wanted)).max()


# --------------------------------------------------------------- encodings, from METHODS


def wavelet(kind, scales, mirrored=None):
    """[W]: q.p_delta joins q.k before the division by sqrt(d)."""

    def parts(length, heads, dim):
        scale, shift = oracle.wavelet_grid(HEAD, scales)
        table = oracle.wavelet_table(range(length), scale, shift, kind, mirrored)
        return {"relative": table}

    return parts


def sines(length, heads, dim):
    """[X] without u, v and W_r: the table is sine waves of the distance."""
    return {"relative": oracle.sinusoidal(range(length), HEAD)}


def shaw(table, clip):
    """[S]: row clip(key - query) of a learned table."""

    def parts(length, heads, dim):
        return {"relative": np.asarray(table)[clip - np.minimum(np.arange(length), clip)]}

    return parts


def transformer_xl(u, v, projection):
    """[X]: (q + u).k + (q + v).r, where r is a projection of heads * HEAD sine waves per head."""

    def parts(length, heads, dim):
        waves = oracle.sinusoidal(range(length), heads * HEAD)
        r = np.stack([waves @ np.asarray(projection[head]) for head in range(heads)])
        return {"relative": r, "u": np.asarray(u)[:, None], "v": np.asarray(v)[:, None]}

    return parts


def alibi(length, heads, dim):
    """[A]: slope * delta leaves the score, after the division."""
    return {"slopes": oracle.alibi_slopes(heads)}


def sandwich(length, heads, dim):
    """[C]: a number for each head and distance joins the score, after the division."""
    return {"bias": oracle.sandwich(heads, range(length), 16)}


def t5(b, max_distance):
    """[T]: a learned number for each head and bucket."""
    return lambda length, heads, dim: {"bias": oracle.t5(b, range(length), max_distance)}


def kerple(log_r1, log_r2):
    """[K]: r1 log(1 + r2 delta) leaves the score."""
    r1, r2 = np.exp(log_r1), np.exp(log_r2)
    return lambda length, heads, dim: {"bias": oracle.kerple("log", r1, r2, range(length))}


def nothing(length, heads, dim):
    """NoPE."""
    return {}


def sinusoidal(theta=10000.0, count_back=False):
    """[V]; [L] takes the length as theta, or counts the positions from the end."""

    def parts(length, heads, dim):
        base = float(length) if theta == "length" else theta
        positions = [length - m if count_back else m for m in range(length)]
        return {"added": oracle.sinusoidal(positions, dim, base)}

    return parts


def counted(kind):
    """METHODS 4: position m, its share m/N of the length, or its bits."""

    def parts(length, heads, dim):
        if kind == "binary":
            rows = [[float(bit) for bit in format(m, f"0{dim}b")] for m in range(length)]
        else:
            rows = [[m / length if kind == "normalised" else m] * dim for m in range(length)]
        return {"added": np.array(rows)}

    return parts


def rotary(theta, fraction=1.0):
    """[R]; [B] leaves the pairs of lowest frequency alone; theta may depend on the length."""

    def parts(length, heads, dim):
        base = theta(length) if callable(theta) else theta
        frequencies = oracle.rope_frequencies(HEAD, base)
        frequencies[int(fraction * HEAD // 2) :] = 0
        return {"angles": np.arange(length)[:, None] * frequencies}

    return parts


ENCODINGS = {
    "wavelet:scales=4": wavelet("ricker", [1, 2, 4, 8]),
    "wavelet:scales=2,min_scale=2,mirrored=true": wavelet("ricker", [2, 4], mirrored=True),
    "wavelet:kind=gaussian,scales=8": wavelet("gaussian", 2.0 ** np.arange(8)),
    "wavelet:kind=morlet,scales=1+3": wavelet("morlet", [1, 3]),
    "wavelet:kind=haar,scales=2": wavelet("haar", [1, 2]),
    "wavelet:kind=haar,scales=2,fixed_scale=true": wavelet("haar", [1, 1]),
    "transformer_xl:biases=false": sines,
    "alibi": alibi,
    "sandwich:dim=16": sandwich,
    "none": nothing,
    "sinusoidal": sinusoidal(),
    "sinusoidal:theta=length": sinusoidal("length"),
    "sinusoidal:reversed=true": sinusoidal(count_back=True),
    "binary": counted("binary"),
    "integer": counted("integer"),
    "normalised": counted("normalised"),
    "rope": rotary(10000.0),
    "rope:theta=100": rotary(100.0),
    "rope:theta=100,fraction=0.5": rotary(100.0, fraction=0.5),
    "rope:theta=20,inference_theta=300": rotary(300.0),
    "rope:theta=20,inference_theta=scaled": rotary(lambda length: 20 * max(length / LENGTH, 1)),
}
# One of each entry point, for tests that are not about the encoding's own numbers.
EACH_ENTRY = (
    "wavelet:scales=4",
    "alibi",
    "sandwich:dim=16",
    "none",
    "sinusoidal",
    "rope:theta=100",
)


# --------------------------------------------------------------- the model, in float64


def reference(model, row, parts):
    """Logits (L, vocabulary) and attention weights (layers, heads, L, L) of one row of tokens."""
    weights = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}
    config = model.config
    parts = parts(len(row), config.num_attention_heads, config.hidden_size)
    eps = config.rms_norm_eps
    x = weights["model.embed_tokens.weight"][np.asarray(row)] + parts.get("added", 0)
    seen = []
    for index in range(config.num_hidden_layers):
        layer = {
            name.split(".", 3)[3]: weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        h = rms_norm(x, layer["input_layernorm.weight"], eps)
        out, attention = attend(h, layer, config, parts)
        seen.append(attention)
        x = x + out
        h = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = h @ layer["mlp.gate_proj.weight"].T
        silu = gate / (1 + np.exp(-gate))
        x = x + (silu * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T, np.stack(seen)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def attend(h, layer, config, parts):
    """Output (L, hidden) and weights (heads, L, L) of one attention layer."""
    length, heads = len(h), config.num_attention_heads
    groups = heads // config.num_key_value_heads

    def project(name):
        return (h @ layer[f"self_attn.{name}.weight"].T).reshape(length, -1, HEAD).swapaxes(0, 1)

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    if "angles" in parts:
        q, k = turn(q, parts["angles"]), turn(k, parts["angles"])
    k, v = np.repeat(k, groups, axis=0), np.repeat(v, groups, axis=0)
    score = (q + parts.get("u", 0)) @ k.swapaxes(1, 2)
    delta = np.arange(length)[:, None] - np.arange(length)
    if "relative" in parts:
        p = parts["relative"][..., np.maximum(delta, 0), :]  # (L, L, d), or one for each head
        p = np.broadcast_to(p, (heads, length, length, HEAD))
        score += np.einsum("hid,hijd->hij", q + parts.get("v", 0), p)
    score /= np.sqrt(HEAD)
    if "slopes" in parts:
        score -= parts["slopes"][:, None, None] * delta
    if "bias" in parts:
        score += parts["bias"][:, np.maximum(delta, 0)]
    score = np.where(delta < 0, -np.inf, score)
    attention = np.exp(score - score.max(axis=-1, keepdims=True))
    attention /= attention.sum(axis=-1, keepdims=True)
    out = (attention @ v).swapaxes(0, 1).reshape(length, -1)
    return out @ layer["self_attn.o_proj.weight"].T, attention


def turn(x, angles):
    """Llama's layout: the pairs are (i, i + d/2)."""
    z = (x[..., : HEAD // 2] + 1j * x[..., HEAD // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=-1)
