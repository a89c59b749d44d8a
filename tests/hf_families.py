"""A tiny model of each family, and a reference of it that shares no code with wavepe.

`each_family` runs a test with some families, and with --all with each of them.

The reference is the stock model in float64, with the same weights and a plain attention. That
computes all scores, gathers p from the oracle's table, and makes its own mask. The scaling, cap and
window of a family, and its layers without positions, are in `Family`, not read from transformers.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import oracle
import pytest
import torch
from encoding_cases import learned_by, parts_of, scores, softmax
from hf_model import HEAD, VOCABULARY, drawn
from rope_cases import ORIGINAL
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from wavepe.hf import families

WINDOW = 6
THETA = 50.0  # small, so that positions matter in short sequences
LOCAL_THETA = 7.0
LAYERS = 2
BY_TYPE = ("gemma3_text", "olmo3", "gemma4_text")  # families with a base for each type of layer
MIXED = ["sliding_attention", "full_attention"]


@dataclass
class Family:
    """A family: its smallest configuration, and the meaning of that for attention."""

    model_type: str
    options: dict = field(default_factory=dict)  # of the configuration, without sizes and bases
    partial: float = 1.0  # share of a head that the family rotates
    # The window of each layer: a key at this distance from the query, or farther, is hidden.
    windows: Sequence = (None, None)
    positions: Sequence = (True, True)  # False for a layer that has none
    scaling: float = HEAD**-0.5  # of the scores
    cap: float | None = None  # soft cap of the scores
    norm: float = 1.0  # usual weight of norms; 0 if the family adds 1 to it
    grouped: bool = True  # whether there can be fewer key heads than query heads
    reused: int = 0  # number of the last layers, which reuse the keys of others
    # Whether layers scale queries by their position. Without position_ids that counts padding.
    scales_queries: bool = False
    interleaved: bool = False  # whether pairs are (2i, 2i + 1)
    convolutions: bool = False  # over tokens: a cache holds their states, by the configuration
    # From the angles of the pairs to a table of the rotary module.
    table: Callable = lambda angles: torch.cat([angles, angles], -1)

    @property
    def uniform(self):
        """Whether all layers are alike, so that a test of one layer is enough."""
        return len(set(self.windows)) == len(set(self.positions)) == 1

    @property
    def rotated(self):
        """Number of elements of a head that the family rotates."""
        return int(HEAD * self.partial)

    def bases(self, theta, **scaling):
        """Options for the base of the rotation; by layer type, for that of full attention."""
        if self.model_type in UNROTATED:
            return {}
        if self.model_type == "gpt_neox":
            return {"rotary_emb_base": theta, "rotary_pct": self.partial}
        if self.model_type == "gemma4_text":
            scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
            return by_type(theta, LOCAL_THETA, scaling)
        if self.model_type == "granite_swa":
            return base(**scaling) | {"layer_rope_theta": [theta, LOCAL_THETA, 0]}
        if self.model_type in BY_TYPE:
            return by_type(theta, LOCAL_THETA)
        if self.model_type == "ministral3":
            # queries are scaled from the fifth position on
            scaling = {"llama_4_scaling_beta": 0.5, ORIGINAL: 5, **scaling}
        part = {} if self.partial == 1 else {"partial_rotary_factor": self.partial}
        return base(theta, **part, **scaling)


def by_type(full, sliding, scaling=None):
    """Bases of two layer types, and the scaling of that of full attention."""
    bases = {"full_attention": full, "sliding_attention": sliding}
    bases = {key: {"rope_type": "default", "rope_theta": x} for key, x in bases.items()}
    bases["full_attention"] |= scaling or {}
    return {"rope_parameters": bases}


def base(theta=THETA, **others):
    """The one base of a family, its scaling, and the share of the head that it rotates."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **others}}


EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip

SLIDING = {"sliding_window": WINDOW}
FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral", SLIDING, windows=(WINDOW, WINDOW)),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_mixed": Family(
        "qwen3",
        {**SLIDING, "use_sliding_window": True, "layer_types": MIXED[::-1]},
        windows=(None, WINDOW),
    ),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}, positions=(True, False)),
    "gemma": Family("gemma", norm=0.0),
    "gemma2": Family(
        "gemma2",
        {**SLIDING, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5},
        windows=(WINDOW, None),
        scaling=5**-0.5,
        cap=3.0,
        norm=0.0,
    ),
    "gemma3_text": Family(
        "gemma3_text",
        {**SLIDING, "layer_types": MIXED, "query_pre_attn_scalar": 5},
        windows=(WINDOW, None),
        scaling=5**-0.5,
        norm=0.0,
    ),
    "phi3": Family("phi3", partial=0.5),
    "olmo2": Family("olmo2"),
    "gpt_neox": Family("gpt_neox", partial=0.5, grouped=False),
    "stablelm": Family("stablelm", partial=0.5),
    "seed_oss": Family("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "granite": Family(
        "granite",
        {
            "attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
        scaling=0.5,
    ),
    "granite_swa": Family(
        "granite_swa",
        {
            **SLIDING, "layer_types": [MIXED[0], *MIXED], "num_hidden_layers": 3,
            "attention_multiplier": 0.5, "embedding_multiplier": 3.0,
        },
        windows=(WINDOW, WINDOW, None),
        positions=(True, True, False),
        scaling=0.5,
    ),
    "mixtral": Family(
        "mixtral",
        {**SLIDING, "num_local_experts": 3, "num_experts_per_tok": 2},
        windows=(WINDOW, WINDOW),
    ),
    "qwen2_moe": Family("qwen2_moe", EXPERTS),
    "qwen3_moe": Family("qwen3_moe", EXPERTS),
    "olmoe": Family("olmoe", {"num_experts": 3, "num_experts_per_tok": 2}),
    "olmo3": Family("olmo3", {**SLIDING, "layer_types": MIXED}, windows=(WINDOW, None)),
    "ministral3": Family("ministral3", SLIDING, windows=(WINDOW, WINDOW), scales_queries=True),
    "exaone4": Family(
        "exaone4",
        {**SLIDING, "layer_types": MIXED, "sliding_window_pattern": 2},
        windows=(WINDOW, None),
        positions=(True, False),
    ),
    "glm4": Family("glm4", partial=0.5, interleaved=True),
    "gemma4_text": Family(
        "gemma4_text",
        {
            **SLIDING, "layer_types": 2 * MIXED, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "global_head_dim": HEAD, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY,
        },
        windows=(WINDOW, None, WINDOW, None),
        positions=(True,) * 4,
        reused=2,
        scaling=1.0,
    ),
    "cohere2": Family(
        "cohere2",
        {**SLIDING, "layer_types": MIXED},
        windows=(WINDOW, None),
        positions=(True, False),
        interleaved=True,
        table=lambda angles: angles.repeat_interleave(2, -1),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {**SLIDING, "num_local_experts": 3, "num_experts_per_tok": 2},
        windows=(WINDOW, None),
        table=lambda angles: angles,
    ),
}  # fmt: skip
FAMILIES = {name: kind for name, kind in FAMILIES.items() if kind.model_type in families.FAMILIES}
# Families that rotate nothing: their own term is the encoding "relative".
UNROTATED = {
    "inkling_text": Family(
        "inkling_text",
        {
            "head_dim": HEAD, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3,
            "swa_head_dim": HEAD, "sliding_window_size": WINDOW, "local_layer_ids": [0], "d_rel": 4,
            "rel_extent": 9, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"],
            "logits_mup_width_multiplier": 1.0,
        },
        windows=(WINDOW, None),
        convolutions=True,
    ),
    "inkling2_text": Family(
        "inkling2_text",
        {
            "head_dim": HEAD, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3,
            "swa_head_dim": HEAD, "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 9,
            "layer_types": ["hybrid_sliding", "hybrid"], "moe_intermediate_size": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": VOCABULARY,
            "qk_l2_clip_threshold": 2.0, "rel_l2_clip_threshold": 1.0,  # most vectors are longer
        },
        windows=(WINDOW, None),
        convolutions=True,
    ),
}  # fmt: skip
UNROTATED = {name: kind for name, kind in UNROTATED.items() if name in families.FAMILIES}
# Families that `patch` refuses, for set_theta.
ROTARY = {
    "cohere": Family("cohere"),
    "glm": Family("glm", partial=0.5),
    "falcon": Family("falcon", grouped=False),
}


def by_turns(count=2, always=("llama",), more=()):
    """Return a decorator for the tests of one module: it runs a test with families, and `more`.

    Without --all these are `always` and, by turns, `count` others: one with windows, one without.
    """
    windows = [name for name, kind in FAMILIES.items() if any(kind.windows)]
    others = [name for name in FAMILIES if name not in (*windows, "llama")]
    turns = zip(itertools.cycle(windows), itertools.cycle(others), strict=False)
    turns = itertools.chain.from_iterable(turns)

    def each_family(test, also=()):
        chosen = {*always, *also, *itertools.islice(turns, count)}
        cases = [
            pytest.param(name, marks=() if name in chosen else pytest.mark.slow)
            for name in (*FAMILIES, *more)
        ]
        return pytest.mark.parametrize("family", cases)(test)

    return each_family


def build(family, theta=THETA, **options):
    """A stock model in evaluation mode, with weights large enough that positions matter."""
    kind = (FAMILIES | UNROTATED | ROTARY)[family]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if kind.grouped:
        sizes |= {"num_key_value_heads": 2, "head_dim": HEAD}
    sizes |= kind.bases(theta) | kind.options | options
    config = AutoConfig.for_model(kind.model_type, **sizes)
    # sdpa is refused with a cap
    attention = {} if kind.cap is None else {"attn_implementation": "eager"}
    return drawn(AutoModelForCausalLM.from_config(config, **attention), middle=kind.norm)


# ------------------------------------------------------------------ encodings
def stirred(model):
    """The model, with learned parameters that are not at their initial values."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "position_encoding." in name:
                weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    return model


# ------------------------------------------------------------------ the reference

NAME = "families_reference"


@dataclass
class Layer:
    """The arguments of the reference's attention in one layer."""

    reference: "Reference"
    window: int | None
    positions: bool


class Rotation(nn.Module):
    """Takes the place of a family's rotary module: no rotation, or one by a base of its own."""

    def __init__(self, stock, theta, family):
        super().__init__()
        self.stock, self.theta, self.family = stock, theta, family
        self.config = stock.config  # by which Granite SWA finds it

    def forward(self, x, position_ids, *args, **kwargs):
        cos, sin = self.stock(x, position_ids, *args, **kwargs)
        if self.theta is None:
            return torch.ones_like(cos), torch.zeros_like(sin)
        pairs = cos.shape[-1] // len(self.family.table(torch.zeros(1)))
        frequencies = torch.from_numpy(oracle.rope_frequencies(2 * pairs, self.theta))
        angles = self.family.table(position_ids[..., None] * frequencies)
        return angles.cos(), angles.sin()


def head_size(attention):
    return attention.head_size if hasattr(attention, "head_size") else attention.head_dim


class Reference:
    """A stock model in float64 whose attention is written out here.

    Parameters
    ----------
    family : str
    model : PreTrainedModel
        Its weights are taken, and its learned parameters of an encoding.
    spec : str, optional
        None for the stock encoding.
    **options
        Of `build`.
    """

    def __init__(self, family, model, spec=None, **options):
        self.family = FAMILIES[family]
        self.model = build(family, **options).double()
        if hasattr(self.model, "set_experts_implementation"):  # the others have no float64
            self.model.set_experts_implementation("eager")
        weights = {k: v for k, v in model.state_dict().items() if "position_encoding." not in k}
        self.model.load_state_dict(weights)
        self.model.set_attn_implementation(NAME)
        self.parts, self.added = {}, None  # head size -> its parts
        self.spec, self.learned = spec, learned_by(model)
        base_model = self.model.base_model
        if spec is not None:
            theta = float(spec.removeprefix("rope:theta=")) if spec.startswith("rope") else None
            for name, stock in list(base_model.named_modules()):
                if name.startswith("rotary_emb") and not isinstance(stock, nn.ModuleList):
                    base_model.set_submodule(name, Rotation(stock, theta, self.family))
        self.attentions = [
            layer.attention if hasattr(layer, "attention") else layer.self_attn
            for layer in base_model.layers
        ]
        described = zip(self.attentions, self.family.windows, self.family.positions, strict=True)
        for attention, window, positions in described:
            attention.layer_of_reference = Layer(self, window, positions)
        if hasattr(base_model, "embed_tokens_per_layer"):  # inputs of other layers see them, too
            base_model.embed_tokens.register_forward_hook(self.embedded)
        else:
            base_model.layers[0].register_forward_pre_hook(self.add, with_kwargs=True)

    def add(self, module, args, kwargs):
        """Absolute encodings: vectors added as the embeddings enter the first layer."""
        if self.added is None:
            return None
        if args:
            return (args[0] + self.added, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + self.added}

    def embedded(self, module, args, output):
        return output if self.added is None else output + self.added

    def __call__(self, ids, padding=None, segments=None):
        """Logits (B, L, vocabulary) and attention weights, a list of (B, H, L, L).

        Parameters
        ----------
        ids : Tensor (B, L)
        padding : Tensor (B, L), optional
            1 where a token counts. Positions count those.
        segments : Tensor (B, L), optional
            The number of each token's sequence. Positions begin at 0 in each.
        """
        batch, length = ids.shape
        place = torch.arange(length)
        delta = place[:, None] - place
        self.seen = (delta >= 0).expand(batch, -1, -1)
        positions = place.expand(batch, -1)
        if padding is not None:
            # A row that sees nothing would be NaN, and is not compared: it sees itself.
            self.seen = self.seen & (padding[:, None].bool() | (delta == 0))
            positions = (padding.cumsum(1) - 1).clamp(min=0)
        if segments is not None:
            self.seen = self.seen & (segments[:, :, None] == segments[:, None])
            positions = torch.stack(
                [place - (row[:, None] == row).int().argmax(1) for row in segments]
            )
        config = self.model.config
        for head in set(map(head_size, self.attentions)) if self.spec else ():
            sizes = {"dim": config.hidden_size, "trained_length": config.max_position_embeddings}
            made = parts_of(
                self.spec,
                length,
                config.num_attention_heads,
                learned=self.learned,
                head=head,
                **sizes,
            )
            made.pop("rotation", None)  # see Rotation
            self.parts[head] = {key: torch.as_tensor(x) for key, x in made.items()}
            added = self.parts[head].pop("added", None)
            self.added = None if added is None else added[positions]
        self.weights = []
        logits = self.model(ids, position_ids=positions, use_cache=False).logits
        return logits, self.weights


def attention(module, query, key, value, attention_mask, **kwargs):
    """softmax(cap(((q + u).k + (q + v).p_delta) * scaling - slope * |delta| + bias)) v, float64."""
    layer = module.layer_of_reference
    reference, family = layer.reference, layer.reference.family
    parts = reference.parts.get(query.shape[-1], {}) if layer.positions else {}
    assert attention_mask is None
    assert query.dtype == torch.float64
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    u = parts["u"][:, None] if "u" in parts else 0
    score = scores(parts, query + u, key, query, None, scaling=family.scaling)
    if family.cap is not None:
        score = family.cap * torch.tanh(score / family.cap)
    of_family = {"sinks": module.sinks[:, None]} if hasattr(module, "sinks") else {}
    if layer.window is not None:
        of_family["window"] = layer.window
    weights = softmax(of_family, score, ~reference.seen[:, None])
    reference.weights.append(weights)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
