"""The encodings of the tests (arrays, wavepe.nn, Hugging Face, fairseq), by the oracle's formulas.

A row is the spec of a small model (head size 8) and a function. The function takes some arguments
of `parts_of` by name. It returns what the encoding adds to the model, in a dict:

    relative    p (deltas, 8) or (heads, deltas, 8)
    u, v, W     (heads, 8), (heads, 8), (heads, 8, 8), if any: (q + u).k + ((q + v) W).p
    slopes      (heads,); slope * abs(delta) is subtracted from the score
    bias        (heads, deltas); it is added to the score
    rotation    frequencies (4,), factor of cos and sin, whether the pairs are interleaved
    vectors     a function of q and k (..., heads, length, 8): the vectors whose product is taken
    temperature a function of the position: the factor on the query
    product     a function of the layer's input (..., length, dim): products of other queries with a
                table, (..., heads, length, length), which are not divided by sqrt(d)
    r_temperature   as temperature, but on these products alone
    decay       a function of the input, and of the visible tokens: added to the scores
    sinks       (heads, L or 1), a score without a value, or a function of the layer's input
    window      the distance at which keys are hidden
    added       (length, dim); it is added to the token embeddings

A row of `LEARNED` also has the shapes of the parameters, for 4 heads. Its formula is written for
torch tensors and keeps their gradients. `parts_of` adds up the parts of a combination: q is rotated
after u was added, and the other terms read it before.
"""

import itertools

import numpy as np
import oracle
import oracle_rope
import wavepe

try:
    import torch
except ImportError:  # the constant encodings do without
    torch = None

HEAD = 8


def wavelet(kind, scales, mirrored=None):
    """[W]: q.p_delta is added to q.k before the division by sqrt(d)."""

    def parts(deltas, head=HEAD, **_):
        scale, shift = oracle.wavelet_grid(head, scales)
        return {"relative": oracle.wavelet_table(deltas, scale, shift, kind, mirrored)}

    return parts


def sines(deltas, head=HEAD, **_):
    """[X] without u, v and W_r: the table is sine waves of the distance."""
    return {"relative": oracle.sinusoidal(deltas, head)}


def alibi(heads, **_):
    """[A]"""
    return {"slopes": oracle.alibi_slopes(heads)}


def sandwich(deltas, heads, **_):
    """[C]"""
    return {"bias": oracle.sandwich(heads, deltas, 16)}


def nothing(**_):
    """NoPE."""
    return {}


def rotary(theta, fraction=1.0, interleaved=False):
    """[R]; [B] leaves the pairs of lowest frequency alone; theta may depend on the lengths."""

    def parts(length, trained_length=None, head=HEAD, **_):
        base = theta(length, trained_length) if callable(theta) else theta
        frequencies = oracle.rope_frequencies(head, base)
        frequencies[int(fraction * head // 2) :] = 0
        return {"rotation": (frequencies, 1.0, interleaved)}

    return parts


def scaled(length, trained_length):
    """[F]: theta grows with the length."""
    return 20 * max(length / trained_length, 1)


def yarn(head=HEAD, **_):
    return {"rotation": (*oracle_rope.yarn(head, 10000.0, 4.0, 16), False)}


def pope(learned, **_):
    """[P]: magnitudes and phases, as complex numbers."""

    def vectors(q, k):
        length, size = q.shape[-2:]
        angles = torch.arange(length).double()[:, None] * 100.0 ** (
            -torch.arange(size).double() / size
        )
        turn = torch.exp(1j * angles)
        q = (1 + q.exp()).log() * turn * torch.exp(-1j * learned["delta"])[:, None]
        k = (1 + k.exp()).log() * turn
        # the real part of q times the conjugate of k
        return torch.cat([q.real, q.imag], -1), torch.cat([k.real, k.imag], -1)

    return {"vectors": vectors}


def xpos(length, head=HEAD, **_):
    """[Z]: pair i times zeta^(m - n), by factors of q and k that are its two halves."""
    zeta = [(2 * i / head + 0.4) / 1.4 for i in range(head // 2)] * 2
    size = np.array(zeta) ** (np.arange(length)[:, None] / 6)
    size = torch.from_numpy(size)
    return {**rotary(100.0)(length), "vectors": lambda q, k: (q * size, k / size)}


def temperature(kind, floor, alpha):
    """[I]"""
    rules = {
        "llama4": lambda m: np.log(1 + (m + 1) // floor),
        "ministral3": lambda m: np.log(1 + m // floor),
        "inkling": lambda m: np.log(np.maximum((m + 1) / floor, 1)),
    }
    return lambda **_: {"temperature": lambda m: 1 + alpha * rules[kind](m)}


def sink(learned, **_):
    """[O]"""
    return {"sinks": learned["sinks"][:, None]}


def input_sink(learned, **_):
    """[O], as in Inkling 2 [I]: the sink of each token."""
    return {"sinks": lambda x: (x @ learned["s_proj"].mT + learned["sinks"]).mT}


def fox(learned, **_):
    """[F]: log f of the tokens after the key, up to the query."""

    def added(x, shown):
        gate = torch.sigmoid(x @ learned["f_proj"].mT + learned["f_bias"]).log().mT
        gate = (
            gate * torch.from_numpy(np.array(shown, ndmin=1))[..., None, :]
        )  # padding forgets nothing
        length = gate.shape[-1]
        rows = [[gate[..., j + 1 : i + 1].sum(-1) for j in range(length)] for i in range(length)]
        return torch.stack([torch.stack(row, -1) for row in rows], -2)

    return {"decay": added}


def relative(l2_clip=np.inf, floor=np.inf, alpha=0, *, learned, length, **_):
    """[I]: the product of r(x) with row delta of the table, up to its extent."""

    rows = torch.cat([learned["table"], torch.zeros(length, learned["table"].shape[1])])
    rows = torch.cat([rows, 0 * rows])  # of negative distances, from the end
    return {
        **read_by_input(lambda delta: rows[delta], learned, l2_clip),
        "r_temperature": lambda m: 1 + alpha * np.log(np.maximum((m + 1) / floor, 1)),
    }


def read_by_input(p, learned, l2_clip=np.inf):
    """[I]: p(delta) (m, n, columns) by r(x)."""

    def product(x):
        r = torch.einsum("...id,hrd->...hir", x, learned["r_proj"].to(x))
        norm = r.pow(2).sum(-1, keepdim=True) ** 0.5 + 1e-6
        r = torch.where(norm > l2_clip, r * l2_clip / norm, r)
        delta = torch.arange(x.shape[-2])[:, None] - torch.arange(x.shape[-2])
        return torch.einsum("...hir,ijr->...hij", r, p(delta).to(x))

    return {"product": product}


def input_wavelet(learned, **_):
    """[W] of two columns, which the input reads; their scales and shifts may be learned."""
    scale, shift = map(torch.from_numpy, oracle.wavelet_grid(2, [1, 2]))
    columns = {"scale": scale, "shift": shift, **learned}

    def p(delta):
        return learned_wavelet(delta.flatten(), columns)["relative"].unflatten(0, delta.shape)

    return read_by_input(p, learned)


def narrow_wavelet(deltas, learned, **_):
    """[W] of two columns, which the query reads through a projection."""
    scale, shift = oracle.wavelet_grid(2, [1, 2])
    table = oracle.wavelet_table(deltas, scale, shift, "ricker", None)
    return {"relative": torch.from_numpy(table), "W": learned["projection"]}


def sinusoidal(theta=10000.0, count_back=False):
    """[V]; [L] takes the length as theta, or counts the positions from the end."""

    def parts(length, dim, **_):
        base = float(length) if theta == "length" else theta
        positions = [length - m if count_back else m for m in range(length)]
        return {"added": oracle.sinusoidal(positions, dim, base)}

    return parts


def counted(kind):
    """METHODS 4: position m, its share m/N of the length, or its bits."""

    def parts(length, dim, **_):
        if kind == "binary":
            rows = [[float(bit) for bit in format(m, f"0{dim}b")] for m in range(length)]
        else:
            rows = [[m / length if kind == "normalised" else float(m)] * dim for m in range(length)]
        return {"added": np.array(rows)}

    return parts


def learned_wavelet(deltas, learned, **_):
    """[W] with a scale and a shift per column."""
    u = (deltas[:, None] - learned["shift"]) / learned["scale"]
    return {"relative": (1 - u**2) * (-(u**2) / 2).exp()}


def asked_wavelet(deltas, learned, **_):
    """[W] with u, v and W of [X]; the table is constant."""
    table = wavelet("ricker", [1, 2, 4, 8])(deltas=deltas)["relative"]
    return {"relative": torch.from_numpy(table), **learned, "W": learned["projection"]}


def shaw(clip):
    """[S]: row clip(key - query) of a learned table, row 0 is -clip."""
    return lambda deltas, learned, **_: {
        "relative": learned["table"][clip - deltas.clamp(-clip, clip)]
    }


def transformer_xl(deltas, heads, learned, head=HEAD, **_):
    """[X]: r is a projection of heads * d sine waves per head."""
    waves = torch.from_numpy(oracle.sinusoidal(deltas, heads * head))
    return {"relative": waves @ learned["W_r"], "u": learned["u"], "v": learned["v"]}


def t5(deltas, learned, causal, **_):
    """[T], of the spec below."""
    return {"bias": oracle.t5(learned["b"], deltas, 9, causal)}


def kerple(deltas, learned, **_):
    """[K], log."""
    r1, r2 = learned["log_r1"].exp(), learned["log_r2"].exp()
    return {"bias": oracle.kerple("log", r1, r2, deltas)}


def kerple_power(deltas, learned, **_):
    """[K], power."""
    r1, r2 = learned["log_r1"].exp(), 2 * learned["logit_r2"].sigmoid()
    return {"bias": oracle.kerple("power", r1, r2, deltas)}


INTERLEAVED = "rope:theta=50,interleaved=true"
SCALED = "rope:theta=20,inference_theta=scaled"
YARN = "rope:type=yarn,factor=4,original_max_position_embeddings=16"
CONSTANT = {
    "wavelet:scales=4": wavelet("ricker", [1, 2, 4, 8]),
    "wavelet": wavelet("ricker", 2.0 ** np.arange(8)),
    "wavelet:scales=1+3": wavelet("ricker", [1, 3]),
    "wavelet:scales=2,min_scale=2,mirrored=true": wavelet("ricker", [2, 4], mirrored=True),
    "wavelet:kind=gaussian": wavelet("gaussian", 2.0 ** np.arange(8)),
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
    "rope:theta=100": rotary(100.0),
    "rope": rotary(10000.0),
    "rope:theta=100,fraction=0.5": rotary(100.0, fraction=0.5),
    INTERLEAVED: rotary(50.0, interleaved=True),
    "rope:theta=20,inference_theta=300": rotary(300.0),
    SCALED: rotary(scaled),
    YARN: yarn,
}
LEARNED = {
    "wavelet:scales=4,learned=true": (learned_wavelet, {"scale": (HEAD,), "shift": (HEAD,)}),
    "shaw:clip=3": (shaw(3), {"table": (7, HEAD)}),
    "transformer_xl": (
        transformer_xl,
        {"u": (4, HEAD), "v": (4, HEAD), "W_r": (4, 4 * HEAD, HEAD)},
    ),
    "t5:buckets=6,max_distance=9": (t5, {"b": (4, 6)}),
    "kerple": (kerple, {"log_r1": (4,), "log_r2": (4,)}),
    "kerple:kind=power": (kerple_power, {"log_r1": (4,), "logit_r2": (4,)}),
}
ASKED = "wavelet:scales=4,biases=true,projection=true"  # constant, read by a learned query
ABSOLUTE = [spec for spec in CONSTANT if wavepe.encoding(spec).adds]
# A cache keeps what was encoded for a shorter sequence.
FOLLOW_LENGTH = ("sinusoidal:theta=length", "sinusoidal:reversed=true", "normalised")
ENCODINGS = CONSTANT | {spec: parts for spec, (parts, _) in LEARNED.items()}
# More than a table, a bias or a rotation: they act on the call of attention.
IN_CALL = {
    "wavelet:scales=2,rank=2": narrow_wavelet,
    "wavelet:scales=2,rank=2,from_input=true": input_wavelet,
    "wavelet:scales=2,learned=true,rank=2,from_input=true": input_wavelet,
    "relative:extent=6,rank=3": relative,
    "relative:rank=3,l2_clip=0.5": lambda **x: relative(0.5, **x),
    "relative:rank=3,floor=4,alpha=0.3": lambda **x: relative(np.inf, 4, 0.3, **x),
    "fox": fox,
    "pope:theta=100": pope,
    "xpos:theta=100,scale_base=6": xpos,
    "sink:from_input=true": input_sink,
    "window:size=4": lambda **_: {"window": 4},
    "temperature:floor=3,alpha=0.5": temperature("llama4", 3, 0.5),
    "temperature:kind=ministral3,floor=3": temperature("ministral3", 3, 0.1),
    "temperature:kind=inkling,floor=4,alpha=0.3": temperature("inkling", 4, 0.3),
}
ENCODINGS |= {ASKED: asked_wavelet, "sink": sink} | IN_CALL


def parts_of(encoding, length, heads, *, causal=True, learned=None, **others):
    """Return what an encoding adds to a model. `encoding` is a row of `ENCODINGS`, a combination of
    them, or a function.

    `others` are head (size, 8 by default), and what the encoding needs of dim (of the token
    embeddings) and trained_length. `learned` is from `learned_by`. Deltas are 0..length-1, or
    1-length..length-1 if `causal` is False.
    """
    deltas = (torch or np).arange(0 if causal else 1 - length, length)
    args = {"length": length, "heads": heads, "deltas": deltas, "causal": causal, **others}
    if callable(encoding) or str(encoding) in ENCODINGS:
        parts = encoding if callable(encoding) else ENCODINGS[str(encoding)]
        return parts(**args, learned=learned)
    whole = {"tables": []}
    for part in wavepe.encoding(encoding).parts:
        own = {
            name.removeprefix(f"{part.name}."): value
            for name, value in (learned or {}).items()
            if name.startswith(f"{part.name}.")
        }
        found = ENCODINGS[str(part)](**args, learned=own)
        whole["tables"] += tables_of(found)
        summed = found.keys() & {"u", "slopes", "bias", "added"}
        for name in summed:
            whole[name] = whole.get(name, 0) + np.asarray(found[name])
        whole |= {name: found[name] for name in found.keys() - summed - {"relative", "v", "W"}}
    return whole


def tables_of(parts):
    """Return the tables of an encoding's parts: p, v and W, which may be None."""
    single = [parts] if "relative" in parts else []
    tables = [(one["relative"], one.get("v"), one.get("W")) for one in single]
    return parts.get("tables", []) + tables


def attention_weights(parts, q, k, x, hidden, *, where=None, causal=True, shown=True):
    """Return the weights (..., heads, L, L) of self-attention by the definition.

    Parameters
    ----------
    parts : dict
        As `parts_of` returns it.
    q, k : Tensor (..., heads, L, d)
        Not rotated. There may be fewer heads of k.
    x : Tensor (..., L, dim)
        The input of the layer.
    hidden : bool Tensor (..., L, L)
    where : int array (L,) or (B, L), optional
        Positions for the rotation; by default 0, 1, ...
    shown : bool array (..., L)
        False for padding.
    """
    plain = q
    if "u" in parts:
        q = q + torch.as_tensor(parts["u"]).to(q)[:, None]
    if "rotation" in parts:
        q, k = (rotated(y, where, *parts["rotation"]) for y in (q, k))
    if callable(parts.get("sinks")):
        parts = {**parts, "sinks": parts["sinks"](x)}
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    return softmax(parts, scores(parts, q, k, plain, x, causal, shown), hidden)


def rotated(x, where, frequencies, factor, interleaved):
    """[R]: turn each pair (a, b) of x (..., heads, L, d) by its angle."""
    where = np.arange(x.shape[-2]) if where is None else where
    cos, sin = (torch.from_numpy(t).to(x) for t in oracle.rope_table(where, frequencies, factor))
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    a, b = (list(i) for i in zip(*oracle.rope_pairs(cos.shape[-1], interleaved), strict=True))
    y = x.clone()
    y[..., a] = x[..., a] * cos - x[..., b] * sin
    y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


def scores(parts, q, k, plain, x, causal=True, shown=True, scaling=None):
    """Return the scores (..., heads, L, L) of q and k, with u and the rotation and equal numbers of
    heads, and of q without both, `plain`; the rest is as in `attention_weights`."""
    length, size = q.shape[-2:]
    delta = torch.arange(length)[:, None] - torch.arange(length)
    place = delta.clamp(min=0) if causal else delta + length - 1
    if "vectors" in parts:
        q, k = parts["vectors"](q, k)
    score = q @ k.mT
    for p, v, w in tables_of(parts):
        r = plain if v is None else plain + torch.as_tensor(v).to(q)[:, None]
        r = r if w is None else r @ torch.as_tensor(w).to(q)
        every = r @ torch.as_tensor(p).to(q).mT  # with each row of the table
        score = score + every.gather(-1, place.expand(score.shape))
    score = score * (size**-0.5 if scaling is None else scaling)
    if "product" in parts:
        of_r = parts.get("r_temperature", np.ones_like)(np.arange(length))
        score = score + parts["product"](x) * torch.as_tensor(of_r).to(q)[..., None]
    if "temperature" in parts:
        score = score * torch.as_tensor(parts["temperature"](np.arange(length))).to(q)[..., None]
    if "slopes" in parts:
        score = score - torch.as_tensor(parts["slopes"]).to(q)[:, None, None] * delta.abs()
    if "bias" in parts:
        score = score + torch.as_tensor(parts["bias"]).to(q)[:, place]
    if "decay" in parts:
        score = score + parts["decay"](x, shown)
    return score


def softmax(parts, score, hidden):
    """Return the weights of the scores; 0 in a row that sees no key."""
    length = score.shape[-1]
    delta = torch.arange(length)[:, None] - torch.arange(length)
    score = score.masked_fill(hidden | (delta >= parts.get("window", length)), -torch.inf)
    sinks = torch.as_tensor(parts.get("sinks", [[-torch.inf]])).to(score)[..., None]
    sinks = sinks.expand(*score.shape[:-1], 1)
    return torch.cat([score, sinks], -1).softmax(-1)[..., :-1].nan_to_num(0)


def learned_by(model, layer=None):
    """Return names and float64 values of the encoding's learned parameters; of those that layers
    have for themselves only those of `layer`."""
    found = {}
    for name, x in model.named_parameters():
        path, inside, own = name.rpartition("position_encoding.")
        if inside and (".layers." not in f".{path}" or f".layers.{layer}." in f".{path}"):
            found[own.removeprefix("attention.")] = x.detach().double()  # fairseq has this name
    return found


# One of each kind of term, and combinations of them; absolute ones beside, which modules refuse.
KINDS = (
    "rope:theta=100", "wavelet:scales=4", ASKED, "wavelet:scales=4,learned=true", "alibi",
    "sandwich:dim=16", "shaw:clip=3", "transformer_xl", "transformer_xl:biases=false",
    "t5:buckets=6,max_distance=9", "kerple",
)  # fmt: skip


def combinations(count, kinds=KINDS):
    """Return all combinations of so many kinds that can stand together: no name twice."""
    found = itertools.combinations(kinds, count)
    return ["+".join(specs) for specs in found if len({name_of(x) for x in specs}) == count]


def name_of(spec):
    return spec.partition(":")[0]


# A few of them, for the front ends: several queries and tables, biases, slopes, a rotation.
COMBINED = (
    "rope:theta=100+alibi",
    "rope:theta=100,fraction=0.5+" + ASKED,
    "wavelet:scales=4+sandwich:dim=16",
    "transformer_xl+rope:theta=100",
    ASKED + "+shaw:clip=3+alibi",
    "kerple+t5:buckets=6,max_distance=9+wavelet:scales=4,learned=true",
)
COMBINED_IN_CALL = (
    "rope:theta=100+sink+window:size=4+temperature:floor=3,alpha=0.5",
    "relative:extent=6,rank=3+wavelet:scales=4+rope:theta=100",
    "fox+pope:theta=100+alibi+sink:from_input=true",
    "wavelet:scales=2,rank=2,from_input=true+shaw:clip=3+xpos:theta=100,scale_base=6",
    "relative:extent=6,rank=3+temperature:kind=inkling,floor=4,alpha=0.3+kerple",
    f"{ASKED}+shaw:clip=3+temperature:floor=3,alpha=0.5",
)
