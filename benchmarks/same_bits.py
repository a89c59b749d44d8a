"""Compare digests of all numbers that wavepe computes, to show that a change leaves every bit.

    PYTHONHASHSEED=0 PYTHONPATH=OLD/python python benchmarks/same_bits.py write old.json
    PYTHONHASHSEED=0 PYTHONPATH=NEW/python python benchmarks/same_bits.py write new.json
    python benchmarks/same_bits.py compare old.json new.json

OLD and NEW are two trees with their built modules; PYTHONPATH wins over an installed wavepe, and
`write` prints which one it took. Take the same Python, machine and copy of this file for both. The
seed keeps the order in which a message lists a set. A run takes about five minutes of one core.
`--only WORDS` takes the cases whose name holds each of the WORDS: nn/ alibi, or ops/ for the
operators on each variant of the kernels, which take a minute.

A case is a text: its parts, each with its dtype, shape and the start of a sha256, and behind "!"
the error that ended it, if any. `compare` lists apart what differs in numbers, in errors alone, and
what only one file has. It exits 1 if there is anything.

Only public names of wavepe are used, and nothing else of benchmarks, so that one copy of this file
serves both trees. Learned parameters are moved off their initial values by noise that depends on
their names alone. PyWavelets, transformers and fairseq are left out where they are missing.
"""

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import importlib.util
import inspect
import json
import random
import sys
import time
import types
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import wavepe
from wavepe import ops
from wavepe.nn import AbsoluteEncoding, Attention, KVCache, Rotary, SelfAttention

HAS_HF, HAS_FAIRSEQ = map(importlib.util.find_spec, ("transformers", "fairseq"))
if HAS_HF:
    import transformers
    import wavepe.hf
    from transformers.models.llama.modeling_llama import LlamaAttention
if HAS_FAIRSEQ:
    import wavepe.fairseq

    wavepe.fairseq.register()
    from fairseq import data, models

TRAINED, HEADS, HEAD = 16, 4, 8  # trained length, query heads, head size
DIM, VOCABULARY = HEADS * HEAD, 50
SPECS = """
    rope rope:theta=500 rope:theta=50,fraction=0.5 rope:theta=50,inference_theta=scaled
    rope:inference_theta=5000 rope:type=linear,factor=2 rope:type=linear,factor=scaled
    rope:type=yarn,factor=4 rope:type=yarn,factor=scaled rope:type=dynamic,factor=2
    rope:type=longrope,ORIGINAL,short_factor=1+1+2+2,long_factor=2+3+4+5
    rope:type=llama3,factor=8,ORIGINAL,low_freq_factor=1,high_freq_factor=4
    rope:type=proportional,partial_rotary_factor=0.5 rope:interleaved=true
    wavelet wavelet:scales=4 wavelet:scales=1+3 wavelet:scales=2,fixed_scale=true
    wavelet:kind=haar,scales=2 wavelet:kind=morlet wavelet:kind=gaussian,min_scale=0.5
    wavelet:mirrored=true wavelet:kind=db4 wavelet:learned=true wavelet:scales=4,learned=true
    shaw:clip=4 transformer_xl transformer_xl:biases=false alibi none
    t5 t5:buckets=6,max_distance=9 kerple kerple:kind=power sandwich sandwich:dim=16
    sinusoidal sinusoidal:theta=length sinusoidal:reversed=true binary integer normalised
    relative pope fox xpos rope:self_extend=4 temperature+rope window:size=6+rope rope+alibi
    wavelet:scales=4,biases=true,projection=true+kerple wavelet:scales=4,rank=2,from_input=true
""".replace("ORIGINAL", "original_max_position_embeddings=16").split()
DTYPES = (*3 * [torch.float32], torch.float64, torch.bfloat16, torch.float16)
HEAD_SIZES = (8, 24, 32, 33, 64, 64, 80, 128)
if importlib.util.find_spec("pywt") is None:
    SPECS.remove("wavelet:kind=db4")
ABSOLUTE = [x for x in SPECS if x.startswith(("sinusoidal", "binary", "integer", "normalised"))]
ATTENTION = [spec for spec in SPECS if spec not in ABSOLUTE]
HYBRIDS = [  # of three layers
    {"0": "rope:theta=500", "2": "none"},
    {"0": "wavelet:scales=4", "1-2": "alibi"},
    {"0-1": "transformer_xl", "2": "rope:theta=500"},
    {"0": "kerple", "2": "sandwich:dim=16"},
    {"0": "wavelet:scales=4,learned=true", "1": "rope", "2": "wavelet:scales=4,learned=true"},
    {"1": "shaw:clip=4"},
    {"0": "rope:type=yarn,factor=4", "1": "rope:theta=50,inference_theta=scaled"},
    {"0": "shaw:clip=4", "1": "t5"},
    {"0": "sinusoidal"},
]


# ------------------------------------------------------------------ digests


def described(value):
    """A short text of a tensor, an array, or of numbers and texts, or of many of them."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping) and value:
        texts = [f"{key}={described(value[key])}" for key in sorted(value)]
        return f"{len(texts)} of them {hashlib.sha256(' '.join(texts).encode()).hexdigest()[:16]}"
    elif isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    else:
        return repr(value)
    kind, shape = str(value.dtype).removeprefix("torch."), ",".join(map(str, value.shape))
    return f"{kind}[{shape}] {hashlib.sha256(data).hexdigest()[:16]}"


def digest(case):
    """The text of a case: a function that returns or yields the names and values of its parts."""
    parts, error = [], ""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, value in case():
                parts.append(f"{name}: {described(value)}")
    except Exception as raised:
        error = f"!{type(raised).__name__}: {raised}"
    return "; ".join(parts) + error


def noise(name, shape, dtype=torch.float32):
    """Numbers that depend on a name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tokens(rows, length):
    generator = torch.Generator().manual_seed(rows + length)
    return torch.randint(4, 44, (rows, length), generator=generator)


def stirred(module, center=0.0, norm=1.0):
    """The module in evaluation mode, its learned positions moved, other weights drawn anew."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            random = 0.3 * noise(name, weight.shape, weight.dtype)
            if "position_encoding" in name:
                weight.add_(random)
            elif center is not None:
                weight.copy_(random + (norm if "norm" in name and "weight" in name else center))
    return module.eval()


def trained(module, run):
    """Yield what a module gives in training mode, and the gradients of all parameters."""
    module.train()
    module.zero_grad()
    out = run()
    (out.float() * noise("loss", out.shape)).sum().backward()
    module.eval()
    yield "training", out
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    yield "gradients", {name: x for name, x in gradients.items() if "position_encoding" not in name}
    if learned := {name: x for name, x in gradients.items() if "position_encoding" in name}:
        yield "learned", learned


def in_model(case, make, *arguments):
    return case(make(*arguments))


# ------------------------------------------------------------------ NumPy


def numpy_cases():
    for spec in SPECS:
        for length in (1, 7, 40):
            for causal in (True, False):
                name = f"numpy/{spec}/{length}{'' if causal else ' both ways'}"
                yield name, functools.partial(methods, wavepe.encoding(spec), length, causal)


def methods(made, length, causal):
    """The results of the methods that an encoding has."""
    yield "texts", (str(made), made.to_dict(), str(made.trained_as()), made.learned)
    where, way, known = np.arange(length), {"causal": causal}, {"trained_length": TRAINED}
    calls = [
        ("absolute", made.absolute, (where, DIM), known),
        ("rope_table", made.rope_table, (where, HEAD), known),
        ("rope_table 2-D", made.rope_table, ([[3, 0], [9, 2]], HEAD), known | {"length": 41}),
        ("table", made.table, (length, HEAD), way),
        ("bias", made.bias, (length, HEADS), way),
        ("slopes", made.slopes, (HEADS + 2,), {}),
        ("parameters", made.parameters, (HEAD, HEADS), {}),
        ("learned table", learned, (made, made.learned_table, length), way),
        ("learned bias", learned, (made, made.learned_bias, length), way),
    ]
    if made.name == "rope":
        for training in (False, True):
            options = known | {"length": length, "training": training}
            calls.append(("frequencies", made.frequencies, (HEAD,), options))
    for name, method, arguments, options in calls:
        with contextlib.suppress(NotImplementedError):
            yield name, method(*arguments, **options)


def learned(made, method, length, causal):
    """The results of a learned encoding with moved parameters, and their gradients."""
    initial = made.parameters(HEAD, HEADS)
    moved = {name: torch.from_numpy(x) + noise(name, x.shape) for name, x in initial.items()}
    moved = {name: x.requires_grad_() for name, x in moved.items()}
    rows, first, beyond = method(length, moved, causal=causal)
    (rows * noise("loss", rows.shape)).sum().backward()
    return rows, first, beyond, [x.grad for x in moved.values()]


# ------------------------------------------------------------------ operators


def operator_cases():
    """1,000 random calls on each variant of the kernels."""
    for variant in wavepe.variants():
        for seed in range(1000):
            call = CALLS[seed % len(CALLS)]
            name = f"ops/{variant}/{call.__name__} {seed}"
            yield name, functools.partial(operator_call, variant, call, seed)


def operator_call(variant, call, seed):
    before, generator = wavepe.variant(), torch.Generator().manual_seed(seed)
    wavepe.use_variant(variant)
    try:
        drawn = functools.partial(torch.randn, generator=generator)
        return [call(random.Random(seed), drawn)]
    finally:
        wavepe.use_variant(before)


def attention(rng, random_tensor, queries, keys):
    """The kind, outputs and gradients of one call of attention with random options."""
    dtype, d = rng.choice(DTYPES), rng.choice(HEAD_SIZES)
    key_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
    dv = rng.choice((d, d, d, 40))
    heads, wide = key_heads * group, torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (
        random_tensor(2, n, h, size).to(dtype).transpose(1, 2)  # as projections leave it
        for n, h, size in ((queries, heads, d), (keys, key_heads, d), (keys, key_heads, dv))
    )
    inputs, options = [q, k, v], {"causal": rng.random() < 0.8}
    kind = rng.choice(("none", "tensor", "tensor", "heads", "wavelet", "wavelet", "slopes", "bias"))
    rows = rng.choice((keys, keys, 17, 2 * keys + 5))
    first = rng.choice((0, 0, 0, -7))
    if kind in ("tensor", "heads"):
        shape = (heads, rows, d) if kind == "heads" else (rows, d)
        options |= {"p": random_tensor(*shape).to(dtype), "first": first}
        options["beyond"] = rng.choice(("zero", "edge"))
        inputs.append(options["p"])
        if rng.random() < 0.3:
            options["q_rel"] = random_tensor(*q.shape).to(dtype)
            inputs.append(options["q_rel"])
    elif kind == "wavelet":
        p, *rest = wavepe.encoding("wavelet").table(keys, 128)
        options["p"] = ops.relative_table(p[:, :d], *rest)
    elif kind == "slopes":
        options["slopes"] = random_tensor(heads).abs()
    elif kind == "bias":
        options |= {"bias": random_tensor(heads, rows).to(wide), "bias_beyond": "edge"}
        inputs.append(options["bias"])
    if rng.random() < 0.2:
        options["window"] = rng.randrange(1, keys + 1)
    if rng.random() < 0.2:
        options["softcap"] = 5.0
    if rng.random() < 0.2:
        options["dropout_p"] = 0.3
    if rng.random() < 0.2:
        options["key_mask"] = random_tensor(2, keys) > -1
    if rng.random() < 0.2 and queries == keys:
        options["segments"] = (random_tensor(1, keys) > 1).cumsum(1)
    torch.manual_seed(rng.randrange(1 << 30))  # dropout's
    for x in inputs:
        x.requires_grad_()
    out, lse = ops.attention(q, k, v, **options, return_lse=True)
    with torch.no_grad():
        grad_out = random_tensor(*out.shape).to(dtype)
    return kind, [out, lse, *torch.autograd.grad(out, inputs, grad_out)]


def square(rng, random_tensor):
    n = rng.choice((1, 5, 31, 96, 97, 130, 192, 193, 300, 500))
    return attention(rng, random_tensor, n, n)


def cached(rng, random_tensor):
    return attention(rng, random_tensor, rng.randrange(2, 17), rng.randrange(20, 700))


def one_query(rng, random_tensor):
    return attention(rng, random_tensor, 1, rng.randrange(1, 1500))


def relative_bias(rng, random_tensor):
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
    d, m, n = rng.choice(HEAD_SIZES), rng.randrange(1, 200), rng.randrange(1, 300)
    q, p = random_tensor(2, m, d).to(dtype), random_tensor(rng.randrange(1, 400), d).to(dtype)
    beyond = rng.choice(("zero", "edge"))
    return beyond, [ops.relative_bias(q, p, n, first=rng.choice((0, -9)), beyond=beyond)]


def rope(rng, random_tensor):
    d, n = rng.choice((8, 32, 64, 128)), rng.randrange(1, 200)
    x = random_tensor(2, n, 3, d).to(rng.choice(DTYPES)).transpose(1, 2)
    if rng.random() < 0.5:
        x = x.contiguous()
    half = rng.choice((d, d // 2)) // 2
    position = torch.arange(n) * rng.choice((1, 1000))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(2 * half)[0])
    cos, sin = ops.rope_table(position, inv_freq, dtype=wide)
    layout = rng.random() < 0.5
    return str(layout), [
        cos,
        sin,
        ops.rope(x, cos, sin, interleaved=layout),
        ops.rope(x, cos, sin, interleaved=layout, inverse=True),
    ]


CALLS = (square, square, square, cached, one_query, relative_bias, rope)


# ------------------------------------------------------------------ wavepe.nn


def nn_cases():
    """Attention, SelfAttention, Rotary and AbsoluteEncoding, in float32 and bfloat16."""
    for spec in ATTENTION:
        for causal, kv_heads, dtype in (
            (True, 2, torch.float32), (False, 4, torch.float32),
            (True, 4, torch.bfloat16), (False, 2, torch.bfloat16),
        ):  # fmt: skip
            way = "causal" if causal else "both ways"
            name = f"nn/{spec}/{way} {kv_heads} {str(dtype)[6:]}"
            options = {"causal": causal, "dtype": dtype, "kv_heads": kv_heads, "encoding": spec}
            for case in (self_calls, self_packed, attention_calls, *(self_cached,) * causal):
                yield f"{name}/{case.__name__}", functools.partial(case, options)
    rotary = [{}, {"theta": 500.0}, {"fraction": 0.5}, {"interleaved": True}]
    for kind in ("yarn", "dynamic", "linear"):
        rotary.append({"scaling": {"rope_type": kind, "factor": 2.0}})
    for options in rotary:
        for precision in ("exact", "hf"):
            name = f"nn/Rotary/{options}, {precision}"
            yield name, functools.partial(rotary_calls, {**options, "precision": precision})
    for spec in ABSOLUTE:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"nn/{spec}/{str(dtype)[6:]}", functools.partial(absolute_calls, spec, dtype)


def trained_length(module):
    """Modules have had two names for this argument."""
    known = inspect.signature(module).parameters
    return {"trained_length" if "trained_length" in known else "max_length": TRAINED}


def layer(options, length, **more):
    """A layer, and vectors of tokens for it."""
    made = SelfAttention(DIM, HEADS, **options, **more, **trained_length(SelfAttention))
    return stirred(made), noise("x", (2, length, DIM), options["dtype"]).requires_grad_()


def no_grad(module, *args, **named):
    with torch.no_grad():
        return module(*args, **named)


def self_calls(options):
    """Short and long, with a mask of keys, with a window, in training with dropout."""
    made, x = layer(options, 21)
    for length in (1, 11, 21):
        yield f"{length}", no_grad(made, x[:, :length])
    mask = torch.arange(21) >= torch.tensor([[0], [4]])
    for named in ({}, {"key_mask": mask}, {"positions": torch.arange(21) + 3}):
        yield from trained(made, functools.partial(made, x, **named))
    yield "gradient of x", x.grad
    made, x = layer(options, 11, window=5, dropout=0.25, bias=True)
    yield "window", no_grad(made, x)
    yield from trained(made, lambda: made(x, key_mask=mask[:, :11]))


def self_packed(options):
    made, x = layer(options, 21)
    begin = torch.tensor([[7], [12]])
    segments = (torch.arange(21) >= begin).long()
    for named in ({}, {"positions": torch.arange(21) - segments * begin}):
        yield from trained(made, functools.partial(made, x, segments=segments, **named))


def self_cached(options):
    """A prompt, tokens one by one, some at once; without gradients and through the cache."""
    made, x = layer(options, 15)
    cuts = ((0, 5), (5, 6), (6, 7), (7, 8), (8, 11), (11, 15))
    for first in ({}, {"key_mask": torch.arange(5) >= torch.tensor([[0], [2]])}):
        cache = KVCache()
        for start, stop in cuts:
            named = first if start == 0 else {}
            yield f"to {stop}", no_grad(made, x[:, start:stop], cache=cache, **named)
    cache.reorder(torch.tensor([1, 1]))
    yield "reordered", no_grad(made, x[:, :1], cache=cache)
    cache = KVCache()
    yield from trained(made, lambda: torch.cat([made(x[:, a:b], cache=cache) for a, b in cuts], 1))


def attention_calls(options):
    """Fewer queries than keys, a soft cap, a window, masks, drawn positions."""
    options = dict(options)
    spec, dtype, kv_heads = (options.pop(key) for key in ("encoding", "dtype", "kv_heads"))
    sizes = {"head_dim": HEAD, "heads": HEADS, "kv_heads": kv_heads, "trained_length": TRAINED}
    made = stirred(Attention(spec, **sizes, **options))
    q, k, v = (
        noise(name, (2, heads, 11, HEAD), dtype).requires_grad_()
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads))
    )
    yield from trained(made, lambda: made(q, k, v, softcap=3.0, window=6))
    yield "gradients of q, k, v", (q.grad, k.grad, v.grad)
    yield "last 4", no_grad(made, q[:, :, -4:], k, v)
    yield "last 1", no_grad(made, q[:, :, -1:], k, v, key_mask=torch.arange(11)[None] > 3)
    where = torch.tensor([0, 2, 3, 4, 9, 11, 14, 15, 20, 21, 30])
    yield "positions", no_grad(made, q, k, v, positions=where)


def rotary_calls(options):
    made = Rotary(HEAD, **options, **trained_length(Rotary))
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (noise(f"q{n}", (2, n, 21, HEAD), dtype).requires_grad_() for n in (4, 2))
        for where in (None, torch.arange(21) % 7, torch.arange(42).reshape(2, 21)):
            made.reset()
            out = made(q, k, where)
            sum((x.float() * noise("loss", x.shape)).sum() for x in out).backward()
            yield "rotated", (*out, q.grad, k.grad)
    made.theta = 77.0
    yield "theta=77", made(q, k)


def absolute_calls(spec, dtype):
    made, x = AbsoluteEncoding(spec, DIM, trained_length=TRAINED), noise("x", (2, 21, DIM), dtype)
    for where in (None, torch.arange(21) % 7, torch.arange(42).reshape(2, 21)):
        yield "sum", made(x, where)


# ------------------------------------------------------------------ Hugging Face

WINDOW = {"sliding_window": 6}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# A name begins with the model_type.
FAMILIES = {
    "llama": {},
    "llama of dropout": {"attention_dropout": 0.25},
    "llama of yarn": {"scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama of dynamic": {"scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "qwen3 windows": {**WINDOW, "use_sliding_window": True, "layer_types": MIXED},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma2": {**WINDOW, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5},
    "gemma3_text": {**WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 5},
    "phi3": {"part": 0.5},
    "olmo2": {},
    "gpt_neox": {"part": 0.5},
    "granite": {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "mixtral": {**WINDOW, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS,
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
}
STOCK_ROTARY = ("cohere", "glm")  # only set_theta takes them
# For the Llamas "of".
SOME = (
    *("rope", "rope:theta=500", "rope:type=linear,factor=2", "wavelet:scales=4", "transformer_xl"),
    *("alibi", "kerple", "none", "normalised", *map(json.dumps, HYBRIDS[:6])),
)
REFUSED = ("rope:interleaved=true", *map(json.dumps, HYBRIDS[-2:]))  # by all families
ROPES = ("rope", "rope:theta=500", "rope:type=yarn,factor=4")
OWN_TYPE = ("wavelet:scales=4", "transformer_xl", "rope:theta=500", "sinusoidal", HYBRIDS[2])


def configuration(family, kind=None, **options):
    """The configuration of a tiny model of three layers; `kind` is another model_type."""
    model_type, options = family.split()[0], FAMILIES.get(family, {}) | options
    options, v5 = dict(options), int(transformers.__version__.split(".")[0]) >= 5
    part, scaling = options.pop("part", None), options.pop("scaling", {})
    part = {} if part is None else {"partial_rotary_factor": part}
    bases = {"rope_theta": 50.0, **part, "rope_scaling": scaling or None}
    if v5:
        bases = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, **part, **scaling}}
    if model_type == "gpt_neox":
        bases = {"rotary_emb_base": 50.0, "rotary_pct": part["partial_rotary_factor"]}
    if model_type == "gemma3_text":
        bases = {"rope_theta": 50.0, "rope_local_base_freq": 7.0}
        if v5:
            of = {"full_attention": 50.0, "sliding_attention": 7.0}
            of = {key: {"rope_type": "default", "rope_theta": base} for key, base in of.items()}
            bases = {"rope_parameters": of}
    if model_type != "gpt_neox":
        bases |= {"num_key_value_heads": 2, "head_dim": HEAD}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": DIM, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": HEADS}
    sizes |= {"max_position_embeddings": TRAINED, "pad_token_id": 0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    settings = sizes | ends | bases | options
    return transformers.AutoConfig.for_model(kind or model_type, **settings)


def built(family):
    """A tiny stock model, with weights large enough that positions matter."""
    return copy.deepcopy(_built(family))


@functools.lru_cache(maxsize=1)
def _built(family, kind=None, **options):
    config = configuration(family, kind, **options)
    eager = {"attn_implementation": "eager"} if family == "gemma2" and kind is None else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **eager)
    return stirred(model, norm=0.0 if family.startswith("gemma") else 1.0)


@functools.lru_cache(maxsize=1)
def patched(family, spec):
    """A patched model; the situations of one encoding share it."""
    read = json.loads(spec) if spec.startswith("{") else spec
    return stirred(wavepe.hf.patch(built(family), read), center=None)


def logits(model, ids, **named):
    return no_grad(model, ids, **named).logits


def hf_forward(model):
    for length in (1, 13, 21):
        yield f"{length}", logits(model, tokens(2, length))
    yield "without a cache", logits(model, tokens(2, 21), use_cache=False)


def hf_train(model):
    yield from trained(model, lambda: model(tokens(2, 13)).logits)
    yield from trained(model, lambda: model(tokens(2, 21), use_cache=False).logits)


def hf_cached(model, cache=None):
    """A prompt, three tokens one by one, three at once, twice; beyond the trained length."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    ids = tokens(2, 18)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12), (12, 15), (15, 18)):
        yield f"to {stop}", logits(model, ids[:, start:stop], past_key_values=cache)


def hf_static(model):
    yield from hf_cached(model, transformers.StaticCache(config=model.config, max_cache_len=20))


def hf_padded(model):
    """Padding on the left and on the right, and on the left with a cache."""
    ids, lengths = tokens(3, 15), torch.tensor([[15], [11], [4]])
    left = (torch.arange(15) >= 15 - lengths).long()
    right = left.flip(1)
    for name, mask in (("left", left), ("right", right)):
        yield name, logits(model, ids, attention_mask=mask)
    places = (left.cumsum(1) - 1).clamp(min=0)
    named = {"attention_mask": left, "position_ids": places}
    yield "left, positions", logits(model, ids, **named)
    yield from trained(model, lambda: model(ids, **named, use_cache=False).logits)
    cache = transformers.DynamicCache(config=model.config)
    for start, stop in ((0, 12), (12, 13), (13, 15)):
        named = {"attention_mask": left[:, :stop], "position_ids": places[:, start:stop]}
        yield f"to {stop}", logits(model, ids[:, start:stop], past_key_values=cache, **named)


def hf_packed(model):
    """Positions that begin again, also in training; then ends as collators give them."""
    ids, places = tokens(1, 13), torch.cat([torch.arange(7), torch.arange(6)])[None]
    yield "positions", logits(model, ids, position_ids=places)
    yield from trained(model, lambda: model(ids, position_ids=places).logits)
    yield "ends", logits(model, ids, cu_seq_lens_q=torch.tensor([0, 7, 13]))


def hf_weights(model):
    out = no_grad(model, tokens(2, 13), output_attentions=True)
    yield "logits", out.logits
    yield "weights", out.attentions


def hf_own_masks(model):
    """Masks (B, 1, m, n) of the user's own, bool and added; and token embeddings."""
    ids = tokens(2, 13)
    seen = torch.ones(13, 13).tril().bool() & (torch.arange(13) != 2) | torch.eye(13).bool()
    yield "bool", logits(model, ids, attention_mask=seen[None, None])
    added = torch.where(seen, noise("mask", (13, 13)), torch.finfo(torch.float32).min)
    yield from trained(model, lambda: model(ids, attention_mask=added[None, None]).logits)
    vectors_ = model.get_input_embeddings()(ids)
    yield "embeddings", no_grad(model, inputs_embeds=vectors_).logits


def hf_generate(model):
    """Greedy tokens and their scores, with padding on the left, up to the trained length."""
    mask = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
    named = {"do_sample": False, "max_new_tokens": 6, "disable_compile": True}
    named |= {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(tokens(2, 9), attention_mask=mask, **named)
    yield "tokens", out.sequences
    yield "logits", out.logits
    yield "beams", model.generate(tokens(2, 9), num_beams=2, **named).sequences


def hf_bfloat16(model):
    model = copy.deepcopy(model).to(torch.bfloat16)
    for case in (hf_train, hf_cached, hf_weights):
        yield from case(model)


def hf_recompute(model):
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield from hf_train(model)


def hf_fixed_length(model):
    wavepe.hf.fix_length(model, 20)
    try:
        for case in (hf_cached, hf_train):
            yield from case(model)
    finally:
        wavepe.hf.fix_length(model, None)


def hf_unpatched(model):
    model = wavepe.hf.unpatch(copy.deepcopy(model))
    yield from hf_train(model)
    yield from hf_cached(model)


def situations(family, spec):
    """The functions above that take a patched model of this family."""
    if (spec not in SOME and " of " in family) or (spec in REFUSED and family != "llama"):
        return ()
    usual = (hf_forward, hf_train, hf_cached, hf_static, hf_padded, hf_packed, hf_weights)
    if family in ("llama", "gemma2"):
        usual += (hf_generate, hf_bfloat16, hf_recompute, hf_fixed_length, hf_unpatched)
    return (*usual, hf_own_masks, *(hf_generate,) * (family == "phi3"))


def hf_cases():
    """All families, encodings and situations; own types, bases, `patch_llama`."""
    gc.collect()
    gc.freeze()  # `patch` looks for caches among all objects that are not frozen
    known = wavepe.hf.supported_families()
    families = [name for name in FAMILIES if name.split()[0] in known]
    specs = [*SPECS, *map(json.dumps, HYBRIDS)]
    for family in families:
        for spec in specs:
            for case in situations(family, spec):
                name = f"hf/{family}/{spec}/{case.__name__[3:]}"
                yield name, functools.partial(in_model, case, patched, family, spec)
        for spec in OWN_TYPE:
            yield f"hf/{family}/{spec}/own type", functools.partial(own_type, family, spec)
    for family in (*families, *STOCK_ROTARY):
        for spec in (None, *ROPES) if family in families else (None,):
            case = functools.partial(changed_rope, family, spec)
            yield f"hf/{family}/{spec or 'stock'}/theta", case
    for spec in SPECS:
        yield f"hf/llama/{spec}/patch_llama", functools.partial(patch_llama, spec)


def own_type(family, spec):
    kind = f"wavepe_{family.split()[0]}"
    model = _built.__wrapped__(family, kind, position_encoding=spec)
    for case in (hf_train, hf_cached, hf_packed):
        yield from case(model)


def changed_rope(family, spec):
    """A stock model, or one with a rope, with another base."""
    model = built(family) if spec is None else wavepe.hf.patch(built(family), spec)
    by_type = family == "gemma3_text" and spec is None
    wavepe.hf.set_theta(model, {"full_attention": 77.0} if by_type else 77.0)
    for case in (hf_train, hf_cached, hf_packed if spec else hf_weights):
        yield from case(model)


def patch_llama(spec):
    """A whole model that is made under `patch_llama`, and an attention layer alone."""
    wavepe.hf.patch_llama(spec)
    try:
        model = stirred(_built.__wrapped__("llama"), center=None)
        alone = LlamaAttention(configuration("llama"), 0)
    finally:
        wavepe.hf.unpatch_llama()
    for case in (hf_train, hf_cached):
        yield from case(model)
    hidden = noise("hidden", (2, 21, DIM))
    named = {"position_embeddings": None, "attention_mask": None}
    yield from trained(stirred(alone), lambda: alone(hidden, **named)[0])


# ------------------------------------------------------------------ fairseq


def fairseq_cases():
    for spec in SPECS:
        for case in (fs_values, fs_padded, fs_incremental):
            name = f"fairseq/{spec}/{case.__name__[3:]}"
            yield name, functools.partial(in_model, case, language_model, spec)


@functools.lru_cache(maxsize=1)
def language_model(spec):
    words = data.Dictionary()
    for index in range(44):
        words.add_symbol(f"w{index}")
    options = models.MODEL_DATACLASS_REGISTRY["transformer_lm"]()
    sizes = {"decoder_embed_dim": DIM, "decoder_input_dim": DIM, "decoder_output_dim": DIM}
    sizes |= {"decoder_ffn_embed_dim": 48, "decoder_layers": 3, "decoder_attention_heads": HEADS}
    sizes |= {"tokens_per_sample": TRAINED, "max_target_positions": TRAINED, "dropout": 0.0}
    sizes |= {"add_bos_token": False, "tpu": False, "attention_dropout": 0.25, "pos_enc": spec}
    for key, value in sizes.items():
        setattr(options, key, value)
    task = types.SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return stirred(models.MODEL_REGISTRY["transformer_lm"].build_model(options, task))


def fs_values(model):
    for length in (1, 13, 21):
        yield f"{length}", no_grad(model, tokens(2, length))[0]
    yield from trained(model, lambda: model(tokens(2, 13))[0])
    made = copy.deepcopy(model).to(torch.bfloat16)
    yield "bfloat16", no_grad(made, tokens(2, 13))[0]


def fs_padded(model):
    ids, lengths = tokens(3, 13), torch.tensor([[13], [9], [4]])
    for name, hidden in (
        ("left", torch.arange(13) < 13 - lengths), ("right", torch.arange(13) >= lengths),
    ):  # fmt: skip
        row = ids.masked_fill(hidden, 1)
        yield name, no_grad(model, row)[0]
        yield from trained(model, lambda row=row: model(row)[0])


def fs_incremental(model):
    state, ids = {}, tokens(2, 21)
    for stop in (9, 10, 11, 12, 16, 17, 18):
        named = {"incremental_state": state}
        yield f"to {stop}", no_grad(model.decoder, ids[:, :stop], **named)[0]


# ------------------------------------------------------------------ the commands


def all_cases():
    yield from numpy_cases()
    yield from operator_cases()
    yield from nn_cases()
    if HAS_HF:
        yield from hf_cases()
    if HAS_FAIRSEQ:
        yield from fairseq_cases()


def write(path, only):
    torch.set_num_threads(1)
    began, digests = time.time(), {}
    for name, case in all_cases():
        if all(word in name for word in only):
            assert name not in digests, name
            digests[name] = digest(case)
    gc.unfreeze()
    Path(path).write_text(json.dumps(digests, indent=0) + "\n")
    raised = sum("!" in text for text in digests.values())
    print(f"{wavepe.__file__}: {len(digests)} cases, {raised} of them end with an error")
    print(f"{path} written in {time.time() - began:.0f} s")


def halves(text):
    """The parts of a case, and its error."""
    parts, _, error = text.partition("!")
    return [part for part in parts.split("; ") if part], error


def compare(*paths):
    """Print what differs, and return the exit code."""
    old, new = (json.loads(Path(path).read_text()) for path in paths)
    numbers, errors = [], {}
    different = [name for name in old if name in new and old[name] != new[name]]
    for name in different:
        (parts, error), (parts2, error2) = halves(old[name]), halves(new[name])
        pairs = [(one, two) for one, two in zip(parts, parts2, strict=False) if one != two]
        if not pairs and not (error or error2):
            pairs = [(parts, parts2)]
        if pairs:
            numbers.append("\n    ".join((name, *map(str, pairs[0]))))
        else:  # the parts that both computed are equal
            errors.setdefault((error or "no error", error2 or "no error"), []).append(name)
    show("numbers differ", numbers)
    for (error, error2), names in errors.items():
        show(f"errors differ, numbers do not\n  - {error}\n  + {error2}", names, 3)
    alone = [[name for name in one if name not in two] for one, two in ((old, new), (new, old))]
    for path, names in zip(paths, alone, strict=True):
        show(f"only in {path}", names)
    equal, others = len(old.keys() & new.keys()) - len(different), sum(map(len, alone))
    print(f"{equal} cases are equal; in {len(numbers)} numbers differ, in", end=" ")
    print(f"{len(different) - len(numbers)} only errors; {others} are in one file only")
    return int(equal < max(len(old), len(new)))


def show(title, names, most=20):
    if names:
        print(f"{title}: {len(names)}", *sorted(names)[:most], sep="\n  ")
        print("  ..." if len(names) > most else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path")
    writing.add_argument("--only", nargs="+", default=[], metavar="WORD")
    comparing = commands.add_parser("compare")
    comparing.add_argument("paths", nargs=2)
    args = parser.parse_args()
    if args.command == "write":
        write(args.path, args.only)
    else:
        sys.exit(compare(*args.paths))
