"""A tiny Llama, and the same model in float64, for the Hugging Face tests."""

import contextlib
import io

import numpy as np
import pytest
import torch
import wavepe.hf
from encoding_cases import CONSTANT, HEAD, INTERLEAVED, attention_weights, learned_by, parts_of
from rope_cases import LONG, ORIGINAL, SHORT
from transformers import LlamaConfig, LlamaForCausalLM
from wavepe.hf.passes import Pass

LENGTH = 16  # trained length
VOCABULARY = 50
# Warnings of Trainer and accelerate in each training
TRAINER_WARNS = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore::FutureWarning:accelerate.*", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
# Options of a scaled RoPE for this length, by its type.
SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, ORIGINAL: LENGTH // 2},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, ORIGINAL: LENGTH // 2},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 0.25, "high_freq_factor": 2.0, ORIGINAL: LENGTH // 2},
}  # fmt: skip


def tiny_config(cls=LlamaConfig, *, heads=4, kv_heads=2, **options):
    """Return a configuration of two layers, with an unusual head size and grouped queries."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 12 * heads // 2, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": HEAD, "max_position_embeddings": LENGTH, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    return cls(**sizes | options)


def tiny(cls=LlamaForCausalLM, config=None, **options):
    """Return a model in evaluation mode, with weights so large that positions matter."""
    return drawn(cls(tiny_config(**options) if config is None else config))


def drawn(model, scale=0.3, middle=1.0, dtype=None):
    """Give a model random weights, those of norms around `middle`, and set evaluation mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = scale * torch.randn(weight.shape, generator=generator, dtype=dtype)
            weight.copy_(noise + middle * ("norm" in name and name.endswith("weight")))
    return model.eval()


def patched_tiny(spec, **options):
    """Return a tiny stock model with another encoding."""
    return wavepe.hf.patch(tiny(**options), spec)


def own_tiny(spec, **options):
    """Return a tiny model of the type wavepe_llama."""
    config = tiny_config(wavepe.hf.WavePELlamaConfig, position_encoding=spec, **options)
    return tiny(wavepe.hf.WavePELlamaForCausalLM, config)


@contextlib.contextmanager
def llamas(spec):
    """Give this encoding to all Llamas that are made in a block."""
    wavepe.hf.patch_llama(spec)
    try:
        yield
    finally:
        wavepe.hf.unpatch_llama()


def begun_pass():
    """Return what the hook of a layer gives its attention function."""
    pass_ = Pass((), (), {})
    pass_.waiting = True
    return pass_


def recompute(model, reentrant=False):
    """Switch gradient checkpointing on; its old name warns until transformers 6."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})


def pickled(thing):
    """Save an object by torch.save, and return it as torch.load reads it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def tokens(rows, length, seed=0):
    """Return random tokens, without the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


class Logits(torch.nn.Module):
    """A model from tokens to logits, without a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def logits(model, *args, **kwargs):
    """Return the model's logits, without gradients."""
    with torch.no_grad():
        return model(*args, **kwargs).logits


def gradients(model, ids, **options):
    """Return the gradients of all weights, of the loss of predicting `ids`."""
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    return kept_gradients(model)


# Parameters of Inkling: they have no gradient where another encoding takes the place of its own.
REPLACED = (
    ".self_attn.r_proj.", ".self_attn.rel_logits_proj.", ".self_attn.relative_position_bias.",
)  # fmt: skip


def kept_gradients(model):
    """Return copies of the gradients of all weights, which must be there."""
    found = []
    for name, weight in model.named_parameters():
        if weight.grad is None:
            assert any(part in name for part in REPLACED), f"{name} has no gradient"
        else:
            found.append(weight.grad.clone())
    return found


def worst(got, wanted):
    """Return the largest difference."""
    got, wanted = (np.asarray(array, dtype=np.float64) for array in (got, wanted))
    assert got.shape == wanted.shape
    return np.abs(got - wanted).max()


def close(got, wanted, bound=1e-4):
    """Return whether all differences are at most `bound` times the largest wanted value."""
    return worst(got, wanted) <= bound * np.abs(np.asarray(wanted)).max()


SPECS = [spec for spec in CONSTANT if spec != INTERLEAVED]  # which a Llama refuses
# One of each entry point, for tests that are not about the encoding's own numbers.
EACH_ENTRY = (
    "wavelet:scales=4", "alibi", "sandwich:dim=16", "none", "sinusoidal", "rope:theta=100",
)  # fmt: skip


def parts_in(model, encoding, length, layer=0):
    """Return what `encoding` adds to a layer of a model, see encoding_cases.parts_of."""
    return parts_of(
        encoding,
        length,
        model.config.num_attention_heads,
        dim=model.config.hidden_size,
        learned=learned_by(model, layer),
        trained_length=LENGTH,
    )


def reference(model, row, encoding):
    """Return logits (L, vocabulary) and weights (layers, heads, L, L) of one row of tokens.

    `encoding` is that of all layers, or a list of one for each.
    """
    weights = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}
    config, eps = model.config, model.config.rms_norm_eps
    of_layers = encoding if isinstance(encoding, list) else [encoding] * config.num_hidden_layers
    of_layers = [parts_in(model, one, len(row), i) for i, one in enumerate(of_layers)]
    x = weights["model.embed_tokens.weight"][np.asarray(row)] + of_layers[0].get("added", 0)
    seen = []
    for index, parts in enumerate(of_layers):
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
    """Return output (L, hidden) and weights (heads, L, L) of one attention layer."""
    length, heads = len(h), config.num_attention_heads
    groups = heads // config.num_key_value_heads

    q, k, v = (
        (h @ layer[f"self_attn.{name}_proj.weight"].T).reshape(length, -1, HEAD).swapaxes(0, 1)
        for name in "qkv"
    )
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    attention = attention_weights(parts, *map(torch.from_numpy, (q, k, h)), hidden).numpy()
    out = (attention @ np.repeat(v, groups, axis=0)).swapaxes(0, 1).reshape(length, -1)
    return out @ layer["self_attn.o_proj.weight"].T, attention
