"""The RoPE referee: right engines pass, and each planted mistake is named, alone.

The engines are small formulas of this file and of oracle_rope.py, which share nothing with the
package.
"""

import json
import re
import struct

import numpy as np
import oracle_rope as oracle
import pytest
import wavepe
from rope_cases import ORIGINAL
from wavepe.cli import main
from wavepe.referee.engine import MISTAKES

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = ml_dtypes.bfloat16
DTYPES = (np.float64, np.float32, np.float16, BF16)
DIM, THETA, TRAINED, BEFORE, LENGTH = 64, 5e5, 4096, 1024, 6000
POSITIONS = np.concatenate([np.arange(40), np.arange(41, LENGTH, 61)])
SHORT, LONG = 1 + np.arange(32) / 50, 1 + np.arange(32) / 3
FACTOR, HALF = {"factor": 4.0}, {"partial_rotary_factor": 0.5}
SCALED = {**FACTOR, ORIGINAL: BEFORE}
LLAMA3 = {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DIVISORS = {"short_factor": SHORT.tolist(), "long_factor": LONG.tolist(), ORIGINAL: BEFORE}
YARN_OF_1, EXACT = {**SCALED, "attention_factor": 1.0}, {**SCALED, "truncate": False}
# The rope type, and what it is with -> its parameters; the right rule of head size and base; more
RULES = {
    "default": ({}, oracle.default),
    "linear": (FACTOR, oracle.linear, 4.0),
    "dynamic": (FACTOR, oracle.dynamic, 4.0, LENGTH, TRAINED),
    "yarn": (SCALED, oracle.yarn, 4.0, BEFORE),
    "yarn with exact bounds": (EXACT, oracle.yarn, 4.0, BEFORE, 32, 1, False),
    "yarn with factor 1": (YARN_OF_1, lambda *sizes: (oracle.yarn(*sizes, 4.0, BEFORE)[0], 1.0)),
    "longrope": (DIVISORS, oracle.longrope, LONG, 4.0, BEFORE),
    "llama3": (LLAMA3, oracle.llama3, 4.0, BEFORE, 1.0, 4.0),
    "proportional": (HALF, oracle.proportional, 0.5),
    "default with half": (HALF, lambda dim, base: oracle.default(dim // 2, base)),
}


def rules(base):
    """Return the frequencies and the attention factor of each."""
    return {kind: rule(DIM, base, *more) for kind, (_, rule, *more) in RULES.items()}


RIGHT = rules(THETA)
PLAIN, YARN = RIGHT["default"], RIGHT["yarn"]
Q = np.random.default_rng(0).standard_normal((2, POSITIONS.size, DIM))


def report(kind="default", length=LENGTH, model_type="llama", **changes):
    rope = {"rope_type": kind.split()[0], "rope_theta": THETA, **RULES[kind][0], **changes}
    sizes = {"head_dim": DIM, "max_position_embeddings": TRAINED, "model_type": model_type}
    return wavepe.rope_report({**sizes, "rope_parameters": rope}, length=length)


def tables(inv_freq, factor, positions=POSITIONS):
    angles = positions[..., None] * inv_freq
    return factor * np.cos(angles), factor * np.sin(angles)


def given(rule, made=POSITIONS, at=..., dtype=float):
    """The tables of an engine for the positions `made`, which it gives for those at `at`."""
    cos, sin = (x.astype(dtype) for x in tables(*rule, made))
    return {"cos": cos, "sin": sin, "positions": made if at is ... else at}


def rotate(q, cos, sin, interleaved=False):
    """Rotate in the dtype of q, which rounds after every operation."""
    out, n = q.copy(), cos.shape[-1]
    one = np.s_[..., : 2 * n : 2] if interleaved else np.s_[..., :n]
    two = np.s_[..., 1 : 2 * n : 2] if interleaved else np.s_[..., n : 2 * n]
    cos, sin = cos.astype(q.dtype), sin.astype(q.dtype)
    out[one], out[two] = q[one] * cos - q[two] * sin, q[two] * cos + q[one] * sin
    return out


def says(verdict, start, end=""):
    """Whether a verdict and its text are as said: "agrees", "differs", or one mistake's name."""
    name = start.partition(":")[0]
    mistakes = () if name in ("agrees", "differs") else (name,)
    assert (bool(verdict), *verdict[:2]) == (name == "agrees", name == "agrees", mistakes), verdict
    return str(verdict).startswith(start) and str(verdict).endswith(end)


RESCALED = ("dynamic", "yarn", "longrope", "llama3")
NTK_BASE = THETA * 4 ** (DIM / (DIM - 2))
# The name of a mistake -> rope type -> the frequencies and the factor of an engine that makes it
PLANTED = {
    "scaling ignored (plain RoPE)": dict.fromkeys((*RESCALED, "linear"), PLAIN),
    "scaling ignored (plain RoPE), with the attention factor of the rule": {
        "yarn": (PLAIN[0], YARN[1])
    },
    "attention factor computed from factor, its own keys ignored": {"yarn with factor 1": YARN},
    "linear scaling in place of the rule": dict.fromkeys(RESCALED, RIGHT["linear"]),
    "NTK base in place of the rule": dict.fromkeys(RESCALED, rules(NTK_BASE)["default"]),
    "dynamic NTK base in place of the rule": {"linear": RIGHT["dynamic"]},
    "yarn in place of the rule": dict.fromkeys(("llama3", "longrope"), YARN),
    "llama3 in place of the rule": {"yarn": RIGHT["llama3"]},
    "base 10000 in place of theta": rules(1e4),
    "yarn bounds truncated": {"yarn with exact bounds": YARN},
    "yarn bounds not truncated": {"yarn": RIGHT["yarn with exact bounds"]},
    "beta_fast and beta_slow swapped": {"yarn": oracle.yarn(DIM, THETA, 4.0, BEFORE, 1, 32)},
    "original length missing": {
        "yarn": oracle.yarn(DIM, THETA, 4.0, TRAINED),
        "llama3": oracle.llama3(DIM, THETA, 4.0, TRAINED, 1.0, 4.0),
    },
    "short and long factors swapped": {"longrope": oracle.longrope(DIM, THETA, SHORT, 4.0, BEFORE)},
    "partial rotation ignored": dict.fromkeys(("default with half", "proportional"), PLAIN),
    "partial rotation of a quarter of the head": {
        "default with half": oracle.default(16, THETA),
        "proportional": oracle.proportional(DIM, THETA, 0.25),
    },
    "partial rotation of half of the head": {"default": oracle.default(32, THETA)},
    "partial rotation of three quarters": {"default with half": oracle.default(48, THETA)},
    "partial rotation with the exponents of the other kind": {
        "default with half": (PLAIN[0][:16], 1.0),
        "proportional": (np.pad(RIGHT["default with half"][0], (0, 16)), 1.0),
    },
}  # fmt: skip


def rounding(to, names):
    """An engine that rounds what `names` names: frequencies, positions or angles."""

    def rounded(name, x):
        return x.astype(to).astype(np.float64) if name in names else x

    def make(cos, sin, inv_freq, factor):
        places = rounded("positions", POSITIONS[:, None].astype(np.float64))
        angles = rounded("angles", places * rounded("frequencies", inv_freq))
        return factor * np.cos(angles), factor * np.sin(angles)

    return make


EACH = "frequencies, positions and angles"
# The verdict -> the tables of an engine, from the right ones, the frequencies and the factor
TABLES = {
    "agrees": lambda c, s, *rule: (c, s),
    "differs: larger": lambda c, s, *rule: (1.05 * c, 1.05 * s),
    "differs: one number": lambda c, s, *rule: (c + 0.1 * (np.indices(c.shape) == 3).all(0), s),
    "differs: noise": lambda c, s, *rule: (c + np.sin(1e5 * s) / 20, s),
    "attention factor dropped": lambda c, s, w, factor: (c / factor, s / factor),
    "attention factor squared": lambda c, s, w, factor: (c * factor, s * factor),
    "not rotated": lambda c, s, *rule: (np.ones_like(c), np.zeros_like(s)),
    "rotated twice": lambda c, s, *rule: (c * c - s * s, 2 * c * s),
    "positions off by one (too large)": lambda c, s, *rule: tables(*rule, POSITIONS + 1),
    "positions off by one (too small)": lambda c, s, *rule: tables(*rule, POSITIONS - 1),
    "cos and sin swapped": lambda c, s, *rule: (s, c),
    "sign (the inverse rotation)": lambda c, s, *rule: (c, -s),
    "float32 angles": rounding(np.float32, EACH),
    **{
        f"{name} {what}": rounding(to, what)
        for name, to in (("float16", np.float16), ("bfloat16", BF16))
        for what in ("frequencies", "positions", "angles", EACH)
    },
}
IN_TURN = "agrees: interleaved"
ORDERS = ("half-split read as interleaved", "interleaved read as half-split")
ENGINES = [(name, kind) for name, kinds in PLANTED.items() for kind in kinds] + [
    (name, kind) for name in (*TABLES, *ORDERS, IN_TURN) for kind, (_, factor) in RIGHT.items()
    if not name.startswith("attention") or factor != 1
]  # fmt: skip


# How arrays are given: "as float64" as files often hold narrow numbers
FORMS = ("inv_freq", "tables", "as float64", "wide", "rotated")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), ENGINES)
def test_engines(name, kind, dtype, form):
    rule = PLANTED.get(name, RIGHT)[kind]
    turns = name in (ORDERS[0], IN_TURN)  # the engine rotates pairs (2i, 2i+1)
    model = "cohere" if name in (ORDERS[1], IN_TURN) else "llama"
    check = report(kind, model_type=model).check
    if form == "inv_freq":
        right = np.array_equal(rule[0], RIGHT[kind][0])
        verdict = check(inv_freq=rule[0].astype(dtype))
        assert says(verdict, "agrees" if right else name.partition(",")[0])
        return
    made = TABLES.get(name, TABLES["agrees"])(*tables(*rule), *rule)
    if form == "rotated":
        q = Q.astype(dtype)
        arrays = {"q": q, "rotated": rotate(q, *made, turns)}
    else:
        narrow = [x.astype(dtype).astype(float if form == "as float64" else dtype) for x in made]
        if form == "wide":
            narrow = [np.repeat(x, 2, -1) if turns else np.tile(x, 2) for x in narrow]
        arrays = dict(zip(("cos", "sin"), narrow, strict=True))
    verdict = check(**arrays, positions=POSITIONS)
    if name == "float32 angles" and dtype in DTYPES[2:]:
        assert says(verdict, "agrees")  # up to a position of some thousands
        assert "cannot exclude: " in str(verdict)
    elif name in ORDERS and form in ("tables", "as float64"):
        assert says(verdict, "agrees")  # a pair has one column
    else:
        assert says(verdict, name.partition(":")[0])


def test_every_mistake_is_planted():
    others = ("agrees", "differs", "scaling ignored (plain RoPE), with")
    assert {*MISTAKES} == {x for x in (*PLANTED, *TABLES, *ORDERS) if not x.startswith(others)}


def layers(*factors):
    """The tables of layers, each with YaRN's times a factor."""
    wide = given(YARN, dtype=np.float32)
    wide |= {k: np.stack([np.tile(x * wide[k], 2) for x in factors]) for k in ("cos", "sin")}
    return wide


ONE_WRONG = given(PLAIN, np.arange(100, 800))
ONE_WRONG["cos"][142, 7] += 0.25  # not among the positions by which mistakes are told apart
ODD = np.where(np.arange(32) == 5, PLAIN[0] * 1.001, PLAIN[0])
ODD_PAIR = "differs: inv_freq is off by 0.001 of itself at pair 5 "
WORST = "differs: cos is off by 0.25 at position 242, pair 7 ("
NARROW = np.arange(8192).astype(BF16).astype(float)
FAR = given(PLAIN, np.arange(256)[:, None] + (np.arange(1, 9) << 20))  # beyond float16
TOO_LARGE = "positions off by one (too large)"
NARROW_FREQUENCIES = {"float16 frequencies": np.float16, "bfloat16 frequencies": BF16}
# The rope type, the arrays of an engine, and the start and the end of the verdict
VERDICTS = [
    ("default", {"inv_freq": ODD}, ODD_PAIR, "wrong in pairs 5 to 5"),
    ("default", ONE_WRONG, WORST, "wrong in pairs 7 to 7, positions 242 to 242"),
    ("default", given(PLAIN, np.arange(8192), None), "agrees", "cos (float64), sin (float64)"),
    ("default", given(PLAIN, NARROW, None), "bfloat16 positions: ", ""),
    ("yarn", layers(1, 1, 1, 1), "agrees", ""),
    ("yarn", layers(1, 1, 1 / YARN[1], 1), "differs: cos[2] is off by 0.139 at position ", ""),
    ("yarn", {"inv_freq": [YARN[0], YARN[0]]}, "agrees", ""),
    ("yarn", {"inv_freq": [YARN[0], YARN[0], PLAIN[0]]}, "differs: inv_freq[2] is off by ", ""),
    # without the pairs that do not turn
    ("proportional", given((RIGHT["proportional"][0][:16], 1.0)), "agrees", ""),
    ("default", given(PLAIN, np.array([7]), 7), "agrees", ""),
    ("default", given(PLAIN, np.arange(1, 257), np.arange(256, dtype="u1")), TOO_LARGE, ""),
    ("default", given(PLAIN, np.arange(1, 257), np.arange(256, dtype="u8")), TOO_LARGE, ""),
    ("default", FAR, "agrees", ""),
    ("default", {"inv_freq": 1.02 * PLAIN[0].astype(BF16)}, "differs: ", ""),
    *(("default", {"inv_freq": PLAIN[0].astype(dtype)}, "agrees", f"; cannot exclude: {name}")
      for name, dtype in NARROW_FREQUENCIES.items()),
    *(("default", {"inv_freq": PLAIN[0].astype(dtype).astype(np.float32)}, name, "")
      for name, dtype in NARROW_FREQUENCIES.items()),
    ("default", {**FAR, "cos": FAR["sin"], "sin": FAR["cos"]}, "cos and sin swapped: ", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arrays", "start", "end"), VERDICTS)
def test_verdicts(kind, arrays, start, end):
    assert says(report(kind).check(**arrays), start, end)


LLAMA = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": TRAINED}
LLAMA["model_type"] = "llama"
YARN_KEYS = {**SCALED, "rope_type": "yarn", "rope_theta": THETA}
LLAMA_WITH_YARN = {**LLAMA, "rope_parameters": YARN_KEYS}


def test_float32_angles_hide_no_other_mistake(tmp_path):
    for factor, mistake in ((1.0, "attention factor dropped"), (YARN[1], "float32 angles")):
        cos, sin = (x.astype(np.float32) for x in TABLES["float32 angles"](0, 0, YARN[0], factor))
        arrays = {"cos": cos, "sin": sin, "positions": POSITIONS}
        assert says(report("yarn").check(**arrays), mistake)
        accepted = report("yarn").check(**arrays, float32_angles=True)
        assert says(accepted, mistake if factor == 1 else "agrees")
        assert "float32 angles" not in str(accepted)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_WITH_YARN))
    np.savez(tmp_path / "engine.npz", **arrays)
    command = ["rope", str(tmp_path), "--check", str(tmp_path / "engine.npz")]
    assert (main(command), main([*command, "--float32-angles"])) == (1, 0)


ONES, ZEROS, HEADS = np.ones((4, 32)), np.zeros((4, 32)), np.ones((4, DIM))
TOO_FAR = "position 5958 rope_report needs a length above"
NO_TURN = "cannot show a rotation"
NO_BASE = r"needs rope_theta, as in to_dict\(\) of a loaded model; got the keys"
NO_ROPE = "needs RoPE by theta and type alone, the same in all layers, got"
# The encodings of wavepe's models that are more than a rotation by theta and type
MORE = ("alibi", "rope+alibi", "rope@0", "rope:fraction=0.5", "rope:type=yarn,factor=scaled",
        "rope:type=proportional", "rope:inference_theta=9", "rotary", {"0": "rope"})  # fmt: skip
# Arrays or a configuration, and the error that names what is wrong with them
REFUSED = [
    ({}, r"check needs inv_freq \(..., 32\), or cos .* got the shapes {'positions'"),
    ({"cos": ONES}, r"got the shapes {'cos': \(4, 32\)"),
    ({"cos": ONES, "sin": ONES[:2]}, r"'sin': \(2, 32\)"),
    ({"q": HEADS}, r"or q and rotated \(..., L, 64\)"),
    ({"q": HEADS[:, :60], "rotated": HEADS[:, :60]}, "L, 64.* got the shapes"),
    ({"cos": ONES * np.nan, "sin": ONES}, "cos must be finite and below"),
    ({"q": 1e308 * HEADS, "rotated": HEADS}, "q must be finite and below 1e100"),
    ({"inv_freq": []}, r"got the shapes {'inv_freq': \(0,\)}"),
    ({"cos": ONES[0], "sin": ONES[0]}, r"got the shapes {'cos': \(32,\)}"),
    ({"inv_freq": ONES[0, :31]}, r"inv_freq \(..., 32\).*\(31,\)"),
    ({"cos": ONES[:, :31], "sin": ONES[:, :31]}, "L, 32 or 64"),
    ({"cos": ONES, "sin": ONES, "positions": [1, 2, 3]}, "do not broadcast"),
    ({"cos": ONES, "sin": ONES, "positions": [0.5]}, "TypeError: positions must hold integers"),
    ({"inv_freq": ["a"]}, "TypeError: inv_freq must hold real numbers"),
    ({"cos": ONES, "sin": ZEROS, "positions": [0]}, NO_TURN),
    ({**given(PLAIN, np.array([0])), "inv_freq": PLAIN[0]}, NO_TURN),
    ({"q": 0 * HEADS, "rotated": 0 * HEADS}, NO_TURN),
    ({"cos": ONES[:, None], "sin": ZEROS[:, None]}, "with positions if L is 1"),
]
MISCONFIGURED = [
    ({"hidden_size": None}, "needs head_dim, or hidden_size .* got the keys hid"),
    ({"rope_parameters": 3}, "TypeError: rope_parameters must be a dict, got 3"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "unknown rope_type"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "llama3' needs factor"),
    ({"head_dim": "64"}, "TypeError: head_dim must be an integer"),
    ({"hidden_size": "64"}, "TypeError: hidden_size must be an integer"),
    ({"max_position_embeddings": "9", "rotary_dim": 4}, "TypeError: max_length must be an int"),
    ({"rotary_dim": 0}, "needs a pair that turns"),
    ({"model_type": "bert"}, NO_BASE),
    ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8}}, NO_BASE),
    ({"rope_scaling": {"type": "dynamic", "factor": 1, "alpha": 1000}}, "rotation with alpha"),
    ({"model_type": "nanochat"}, f"{NO_ROPE} 'the inverse rotation'"),
    ({"model_type": "ernie4_5_vl_moe_text"}, f"{NO_ROPE} 'pairs in another order'"),
    ({"model_type": "pixtral", "patch_size": 16}, f"{NO_ROPE} 'positions of images'"),
    ({"rope_theta": 1e4, "alibi": True}, f"{NO_ROPE} 'alibi'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 2}}, "with attn_factor"),
    ({"position_embedding_type": "absolute"}, f"{NO_ROPE} 'absolute'"),
    *(({"position_encoding": x}, f"{NO_ROPE} {re.escape(repr(x))}$") for x in MORE),
]


def configured(**keys):
    return wavepe.rope_report({**LLAMA, **keys})


@pytest.mark.parametrize(
    ("call", "wrong", "words"),
    [
        *((report().check, *row) for row in REFUSED),
        *((configured, *row) for row in MISCONFIGURED),
        *((report(x, None).check, given(RIGHT[x]), TOO_FAR) for x in ("dynamic", "longrope")),
    ],
)
def test_what_is_refused(call, wrong, words):
    _, of_type, words = words.rpartition("TypeError: ")
    with pytest.raises(TypeError if of_type else ValueError, match=words):
        call(**wrong)


GLOBAL, LOCAL = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default", "rope_theta": 1e4}
TYPES = {"full_attention": {**GLOBAL, "rope_theta": 1e6}, "sliding_attention": LOCAL, "none": None}
LAYERED = [
    {"rope_parameters": TYPES},
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": GLOBAL},  # Gemma 3
    {"rope_theta": 1e6, "rope_scaling": GLOBAL, "model_type": "gemma3_text"},
]
HEADS_BY_LAYER = {"per_layer_config": {"01": {"head_dim": 64}}, "layer_types": [*TYPES][1::-1]}
PHI = {"rope_scaling": {**DIVISORS, "type": "su", ORIGINAL: 7}, ORIGINAL: BEFORE}
OWN = {"model_type": "wavepe_llama", "rope_theta": 3e4, "rope_scaling": GLOBAL}
P_ROPE = {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.25}
CONFIGS = [
    ({"rope_theta": 3e4}, oracle.default(DIM, 3e4)),
    ({"rope_theta": 3e4, "patch_size": 14, "vocab_size": 9}, oracle.default(DIM, 3e4)),  # MiniCPM
    ({"rope_scaling": None}, oracle.default(DIM, 1e4)),
    ({"head_dim": 16, "rope_theta": 3e4}, oracle.default(16, 3e4)),
    ({"rotary_emb_base": 3e4, "rotary_pct": 0.25}, oracle.default(16, 3e4)),
    ({"model_type": "glm4", "rope_theta": 3e4}, oracle.default(DIM // 2, 3e4)),
    ({"model_type": "gpt_neox", "rotary_pct": 1.0}, oracle.default(DIM, 1e4)),
    ({"rotary_dim": 30, "head_dim": 44}, oracle.default(30, 1e4)),
    ({"qk_rope_head_dim": 16, "head_dim": 24}, oracle.default(16, 1e4)),
    ({"qk_rope_head_dim": 16, "partial_rotary_factor": 0.5}, oracle.default(16, 1e4)),
    ({"kv_channels": 32, "attention_head_dim": 16}, oracle.default(16, 1e4)),
    ({"head_dim": 32, "rope_parameters": TYPES, **HEADS_BY_LAYER}, oracle.linear(DIM, 1e6, 8.0)),
    ({"text_config": {**LLAMA, "rope_theta": 3e4}}, oracle.default(DIM, 3e4)),
    ({"rope_theta": 3e4, "rope_scaling": {"type": "mrope"}}, oracle.default(DIM, 3e4)),
    (PHI, oracle.longrope(DIM, 1e4, SHORT, 4.0, BEFORE)),
    *((config, oracle.linear(DIM, 1e6, 8.0)) for config in LAYERED),
    ({"global_rope_theta": 3e4, "local_rope_theta": 5.0}, oracle.default(DIM, 3e4)),
    # those of wavepe: a theta or a type replaces the model's scaling, and not its part
    ({**OWN, "position_encoding": "rope"}, oracle.linear(DIM, 3e4, 8.0)),
    ({**OWN, "position_encoding": "rope:type=yarn,factor=4"}, oracle.yarn(DIM, 3e4, 4.0, TRAINED)),
    ({**OWN, "position_encoding": "rope:theta=9,interleaved=false"}, oracle.default(DIM, 9)),
    ({**OWN, "model_type": "wavepe_glm4", "position_encoding": "rope:type=linear,factor=2"},
     oracle.linear(DIM // 2, 3e4, 2.0)),
    ({"rope_parameters": P_ROPE, "position_encoding": "rope:theta=9"}, oracle.default(DIM, 9)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "wanted"), CONFIGS)
def test_keys_of_configurations(config, wanted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    for source in ({**LLAMA, **config}, tmp_path, str(tmp_path / "config.json")):
        referee = wavepe.rope_report(source)
        np.testing.assert_allclose(referee.inv_freq, wanted[0], rtol=1e-14)
        assert referee.attention_factor == pytest.approx(wanted[1], rel=1e-15)
        trained = config.get(ORIGINAL, TRAINED)
        np.testing.assert_allclose(referee.turns, wanted[0] * trained / (2 * np.pi), rtol=1e-14)
    assert json.loads(referee.to_json())["inv_freq"] == referee.inv_freq.tolist()


@pytest.mark.parametrize("config", LAYERED)
def test_layer_types_are_told_apart(config):
    full, sliding = (wavepe.rope_report({**LLAMA, **config}, layer_type=x) for x in [*TYPES][:2])
    verdict = full.check(inv_freq=sliding.inv_freq)
    assert says(verdict, "rotation of the layer type sliding_attention: ")
    assert str(full).startswith("layers full_attention (others: sliding_attention)")
    with pytest.raises(ValueError, match=r"unknown layer_type 'none'.*full_attention"):
        wavepe.rope_report({**LLAMA, **config}, layer_type="none")


def test_old_modernbert_scales_layers_of_both_types():
    bases = {"global_rope_theta": 1e6, "local_rope_theta": 1e4}
    config = {**LLAMA, **bases, "model_type": "modernbert", "rope_scaling": GLOBAL}
    for kind, base in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        inv_freq = wavepe.rope_report(config, layer_type=kind).inv_freq
        np.testing.assert_allclose(inv_freq, oracle.linear(DIM, base, 8.0)[0], rtol=1e-14)


def test_the_text_says_where_the_rule_changes():
    def rows(text):
        return [line.split() for line in str(text).split("tokens per turn")[1].splitlines()[1:]]

    inv_freq, divided = YARN[0], PLAIN[0] / YARN[0]
    kept, whole = (divided == 1).sum(), np.isclose(divided, 4, rtol=1e-12).sum()
    text = str(report("yarn", unknown_key=1))
    divisors = {int(row[0]): row[1] for row in rows(text)}
    assert 0 < kept < 32 - whole < 31
    for pair in (0, kept - 1, kept, 31 - whole, 32 - whole, 31):
        assert divisors[pair] == f"{divided[pair]:.5g}"
    assert "unknown keys in scaling for rope_type 'yarn': unknown_key\n" in text
    assert "attention factor 1.1386" in text
    assert f"turns in {BEFORE}    turns in {LENGTH}\n" in text  # before a raise, which the rule has
    turns = [f"{length * inv_freq[-1] / (2 * np.pi):.5g}" for length in (BEFORE, LENGTH)]
    assert rows(text)[-1] == ["31", "4", f"{2 * np.pi / inv_freq[-1]:.5g}", *turns]
    assert rows(report("proportional"))[-1] == ["31", "inf", "inf", "0", "0"]
    own = {"model_type": "wavepe_cohere2", "position_encoding": "rope"}
    for keys, halves in (({}, False), ({"rope_interleave": False}, True), (own, False)):
        text = str(configured(**{"model_type": "deepseek_v3", "rope_theta": 1e4, **keys}))
        assert "(i, i+32)" * halves + "(2i, 2i+1)" * (not halves) in text
    assert "gives no base, so 10000" in str(wavepe.rope_report({**LLAMA, "rope_scaling": None}))


def packed(x):
    """Return the number of a value's type in GGUF, and its bytes."""
    if isinstance(x, str):
        return 8, struct.pack("<Q", len(x)) + x.encode()
    if isinstance(x, list):
        return 9, struct.pack("<IQ", 8, len(x)) + b"".join(packed(y)[1] for y in x)
    return (4, struct.pack("<I", x)) if isinstance(x, int) else (6, struct.pack("<f", x))


def gguf(values, tensors=None, version=3, kind=0):
    """Write metadata and float32 tensors as GGUF."""
    tensors = tensors or {}
    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for name, value in values.items():
        number, written = packed(value)
        data += packed(name)[1] + struct.pack("<I", number) + written
    offset = 0
    for name, numbers in tensors.items():
        data += packed(name)[1] + struct.pack("<IQIQ", 1, len(numbers), kind, offset)
        offset += -(-4 * len(numbers) // 32) * 32
    for numbers in tensors.values():
        data += b"\0" * (-len(data) % 32) + np.asarray(numbers, "<f4").tobytes()
    return data


MODEL = {
    "general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "bc"],
    "llama.context_length": TRAINED, "llama.embedding_length": 512, "llama.attention.head_count": 8,
}  # fmt: skip
META = {**MODEL, "llama.rope.freq_base": THETA}
SCALING = {"type": "yarn", "factor": 4.0, "original_context_length": BEFORE}


def of_llama(values):
    return {f"llama.{key}": x for key, x in values.items()}


def test_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    yarn = {f"rope.scaling.{k}": x for k, x in SCALING.items()}
    path.write_bytes(gguf(META | of_llama(yarn)))
    referee = wavepe.rope_report(path)
    np.testing.assert_allclose(referee.inv_freq, YARN[0], rtol=1e-14)
    cos, sin = tables(*YARN)
    for interleaved in (False, True):  # the metadata does not say which
        for sign, start in ((1, "agrees"), (-1, "sign (the inverse rotation): ")):
            rotated = rotate(Q, cos, sign * sin, interleaved)
            assert says(referee.check(q=Q, rotated=rotated, positions=POSITIONS), start)
    divisors = PLAIN[0] / RIGHT["llama3"][0]  # llama3's rule is a tensor there
    tensors = {"other.weight": [1.0] * 9, "rope_freqs.weight": divisors}
    whole = gguf(META, tensors)
    phi = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    gemma = {"rope.freq_base_swa": 1e4, "attention.key_length_swa": 16}
    for keys, more, wanted in (
        ({}, tensors, RIGHT["llama3"]),
        ({"rope.scaling.attn_factor": 1.25}, phi, (PLAIN[0] / SHORT, 1.25)),  # has no type
        ({**yarn, "rope.scaling.yarn_log_multiplier": 0.1}, {}, (YARN[0], 1.0)),  # DeepSeek
        (gemma, {}, oracle.default(16, 1e4)),
        ({"rope.scale_linear": 4.0}, {}, RIGHT["linear"]),
        ({"rope.scale_linear": 4.0, "rope.scaling.type": "none"}, {}, PLAIN),
    ):
        path.write_bytes(gguf(META | of_llama(keys), more))
        kind = "sliding_attention" if keys is gemma else None
        referee = wavepe.rope_report(path, layer_type=kind)
        np.testing.assert_allclose(referee.inv_freq, wanted[0], rtol=1e-6)
        assert referee.attention_factor == pytest.approx(wanted[1])
    oss = {key.replace("llama.", "gpt-oss."): x for key, x in (META | of_llama(yarn)).items()}
    path.write_bytes(gguf({**oss, "general.architecture": "gpt-oss"}))
    np.testing.assert_allclose(
        wavepe.rope_report(path).inv_freq, RIGHT["yarn with exact bounds"][0]
    )
    for data, words in (
        *((whole[:end], "is not a whole GGUF file") for end in range(4, len(whole))),
        (gguf({**META, "general.alignment": 0}), "is not a whole GGUF file of a model"),
        (gguf(META, version=1), "needs the version 2 or 3, little-endian; got 1"),
        (gguf(META, tensors, kind=1), "rope_freqs.weight must hold float32, got the GGUF type 1"),
        (gguf({**MODEL, "general.architecture": "bert"}), "needs head_dim"),
        *(
            (gguf(META | of_llama({**more, f"rope.scaling.{key}_factor": 2.0})), "with attn_factor")
            for key in ("attn", "yarn_attn", "yarn_ext")
            for more in ({}, yarn)
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            wavepe.rope_report(path)


@pytest.mark.parametrize("suffix", ["npz", "npy", "json", "safetensors", "bf16.safetensors"])
def test_the_command(suffix, tmp_path, capsys):
    torch, safetensors = map(pytest.importorskip, ("torch", "safetensors.torch"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_WITH_YARN))
    command, file = ["rope", str(tmp_path), "--length", "100"], tmp_path / f"engine.{suffix}"
    dump = tmp_path / "right"  # without .npz, which NumPy would append
    assert main([*command, "--dump", str(dump)]) == 0
    report = wavepe.rope_report(tmp_path, length=100)
    assert capsys.readouterr().out == f"arrays: {dump}\n{report}\n"
    right, wrong = dict(np.load(dump)), rules(1e4)["yarn"]
    at = np.array([0, *(2**k for k in range(7)), 99])
    for name, wanted in {"inv_freq": YARN[0], **given(YARN, at)}.items():
        np.testing.assert_allclose(right[name], wanted, rtol=1e-13)
    dtype = torch.bfloat16 if suffix.startswith("bf16") else torch.float32
    for arrays, code, start in (
        (right, 0, "agrees"),
        ({"inv_freq": wrong[0], **given(wrong, at)}, 1, "base 10000 in place of theta: "),
    ):
        tensors = {k: torch.tensor(x, dtype=dtype) for k, x in arrays.items()}
        tensors["positions"] = torch.from_numpy(at)
        if "safetensors" in suffix:
            safetensors.save_file(tensors, file, {"format": "pt"})
        elif suffix == "npz":
            np.savez(file, **tensors, other=np.ones(2))
        elif suffix == "npy":
            np.save(file, tensors["inv_freq"])
        else:
            file.write_text(json.dumps({name: x.tolist() for name, x in tensors.items()}))
        assert main([*command, "--check", str(file)]) == code
        assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize("suffix", ["npz", "npy", "json", "safetensors", "txt", "gone"])
def test_what_cannot_be_read_has_the_exit_code_2(suffix, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / f"file.{suffix}"
    for text in ("{", "{}", "", "\x93NUMPY", "\x08\0\0\0\0\0\0\0[1, 2]]"):
        if suffix != "gone":
            file.write_text(text)
        for argv in (["rope", str(tmp_path), "--check", str(file)], ["rope", str(file)]):
            assert main(argv) == 2
            assert capsys.readouterr().err.startswith("wavepe rope: error: ")
