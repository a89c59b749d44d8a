"""Tiny models of families of transformers, each with a base of its own."""

from hf_model import tiny, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM
from wavepe.hf.rope_config import TRANSFORMERS_5

THETA = 50.0  # of these models, small, so that positions matter in short sequences
OTHER = 7.0
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "gemma2": {"sliding_window": 6},
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": THETA, "hidden_size": 32},
    "granite": {},
    "cohere": {"hidden_size": 32},
    "glm": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5, "hidden_size": 32},
    "falcon": {"hidden_size": 32},
    "gemma3_text": LAYERS,
}


def bases(theta=THETA, **scaling):
    """The fields of a configuration that name a base, as this transformers reads them."""
    if TRANSFORMERS_5:
        scaling = {"rope_type": "default", **scaling}
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def build(family, theta=THETA, **options):
    """A tiny model of a family, with `theta` (for Gemma 3: of its full attention)."""
    options = {**FAMILIES[family], **options}
    if "rotary_emb_base" in options:
        options["rotary_emb_base"] = theta
    elif family != "gemma3_text":
        options = {**bases(theta), **options}
    elif TRANSFORMERS_5:
        full, local = ({"rope_type": "default", "rope_theta": x} for x in (theta, 10000.0))
        options["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    else:
        options |= {"rope_theta": theta, "rope_local_base_freq": 10000.0}
    if "partial_rotary_factor" in options and TRANSFORMERS_5:
        options["rope_parameters"]["partial_rotary_factor"] = options.pop("partial_rotary_factor")

    def config(head_dim, **sizes):
        head = {} if family == "falcon" else {"head_dim": head_dim}  # it takes none
        return AutoConfig.for_model(family, **head, **sizes)

    return tiny(AutoModelForCausalLM.from_config, tiny_config(config, **options))
