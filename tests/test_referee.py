"""The RoPE referee: right engines pass, and each planted mistake is named, alone.

The engines are small formulas of this file and of oracle_rope.py, which share nothing with the
package.
"""

import doctest
import json
import struct

import numpy as np
import oracle_rope as oracle
import pytest
import torch
import wavepe
from rope_cases import ORIGINAL
from safetensors.torch import save_file
from wavepe.cli import main
from wavepe.referee import report as module
from wavepe.referee.engine import MISTAKES

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = ml_dtypes.bfloat16
DTYPES = (np.float64, np.float32, np.float16, BF16)
DIM, THETA, TRAINED, BEFORE, LENGTH = 64, 5e5, 8192, 2048, 6000
POSITIONS = np.concatenate([np.arange(40), np.arange(41, LENGTH, 61)])
SHORT, LONG = 1 + np.arange(32) / 50, 1 + np.arange(32) / 3
# rope type -> its parameters, and the right frequencies and factor
RULES = {
    "default": ({}, oracle.default(DIM, THETA)),
    "linear": ({"factor": 4.0}, oracle.linear(DIM, THETA, 4.0)),
    "dynamic": ({"factor": 4.0}, oracle.dynamic(DIM, THETA, 4.0, LENGTH, 4096)),
    "yarn": ({"factor": 4.0, ORIGINAL: BEFORE}, oracle.yarn(DIM, THETA, 4.0, BEFORE)),
    "longrope": (
        {"short_factor": SHORT.tolist(), "long_factor": LONG.tolist(), ORIGINAL: BEFORE},
        oracle.longrope(DIM, THETA, LONG, 4.0, BEFORE),
    ),
    "llama3": (
        {"factor": 4.0, ORIGINAL: BEFORE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        oracle.llama3(DIM, THETA, 4.0, BEFORE, 1.0, 4.0),
    ),
    "proportional": ({"partial_rotary_factor": 0.5}, oracle.proportional(DIM, THETA, 0.5)),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.5}, oracle.default(32, THETA)),
}  # fmt: skip
PLAIN, YARN = RULES["default"][1], RULES["yarn"][1]


def report(kind="default", config=None, length=LENGTH, **changes):
    parameters = {"rope_type": kind, "rope_theta": THETA, **RULES[kind][0], **changes}
    longest = 4096 if kind == "dynamic" else TRAINED
    sizes = {"head_dim": DIM, "max_position_embeddings": longest, "rope_parameters": parameters}
    return wavepe.rope_report({**sizes, **(config or {})}, length=length)


def tables(inv_freq, factor, positions=POSITIONS):
    angles = positions[:, None] * inv_freq
    return factor * np.cos(angles), factor * np.sin(angles)


def rotate(q, cos, sin, interleaved=False):
    """Rotate in the dtype of q, which rounds after every operation."""
    out, n = q.copy(), cos.shape[-1]
    one, two = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(n), slice(n, 2 * n))
    )
    a, b, cos, sin = q[..., one], q[..., two], cos.astype(q.dtype), sin.astype(q.dtype)
    out[..., one], out[..., two] = a * cos - b * sin, b * cos + a * sin
    return out


def queries(dtype=np.float32):
    rows = np.random.default_rng(0).standard_normal((2, POSITIONS.size, DIM))
    return rows.astype(dtype)


def checks_of(referee, inv_freq, factor, cos_sin=None, dtype=np.float32):
    """Return the verdicts on frequencies, tables, wide tables, and rotated queries."""
    cos, sin = cos_sin or tables(inv_freq, factor)
    wide = [np.concatenate([x, x], -1).astype(dtype) for x in (cos, sin)]
    q = queries(dtype)
    at = {"positions": POSITIONS}
    return (
        referee.check(inv_freq=inv_freq.astype(dtype)),
        referee.check(cos=cos.astype(dtype), sin=sin.astype(dtype), **at),
        referee.check(cos=wide[0][None], sin=wide[1][None], **at),
        referee.check(q=q, rotated=rotate(q, cos, sin), **at),
    )


def named(verdict, name):
    """Whether a verdict gives this mistake, and no other."""
    assert (verdict.agrees, verdict.mistakes) == (False, (name,)), verdict
    return str(verdict).startswith(f"{name}: ")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", RULES)
def test_right_engines_agree(kind, dtype):
    for verdict in checks_of(report(kind), *RULES[kind][1], dtype=dtype):
        assert verdict, verdict
        assert str(verdict).startswith("agrees")
        assert not verdict.mistakes
    narrow = [x.astype(dtype).astype(np.float32) for x in tables(*RULES[kind][1])]  # as in a file
    assert report(kind).check(cos=narrow[0], sin=narrow[1], positions=POSITIONS)


SCALED = ("dynamic", "yarn", "longrope", "llama3")
# The name of a mistake -> rope type -> the frequencies and the factor of an engine that makes it
PLANTED = {
    "scaling ignored (plain RoPE)": dict.fromkeys((*SCALED, "linear"), PLAIN),
    "linear scaling in place of the rule": dict.fromkeys(SCALED, RULES["linear"][1]),
    "NTK base in place of the rule": dict.fromkeys(
        SCALED, oracle.default(DIM, THETA * 4 ** (64 / 62))
    ),
    "yarn in place of the rule": dict.fromkeys(("llama3", "longrope"), YARN),
    "llama3 in place of the rule": {"yarn": RULES["llama3"][1]},
    "base 10000 in place of theta": {
        "default": oracle.default(DIM, 1e4), "linear": oracle.linear(DIM, 1e4, 4.0),
        "yarn": oracle.yarn(DIM, 1e4, 4.0, BEFORE), "partial": oracle.default(32, 1e4),
        "llama3": oracle.llama3(DIM, 1e4, 4.0, BEFORE, 1.0, 4.0),
        "longrope": oracle.longrope(DIM, 1e4, LONG, 4.0, BEFORE),
        "proportional": oracle.proportional(DIM, 1e4, 0.5),
        "dynamic": oracle.dynamic(DIM, 1e4, 4.0, LENGTH, 4096),
    },
    "yarn bounds not truncated": {"yarn": oracle.yarn(DIM, THETA, 4.0, BEFORE, truncate=False)},
    "beta_fast and beta_slow swapped": {"yarn": oracle.yarn(DIM, THETA, 4.0, BEFORE, 1, 32)},
    "original length missing": {
        "yarn": oracle.yarn(DIM, THETA, 4.0, TRAINED),
        "llama3": oracle.llama3(DIM, THETA, 4.0, TRAINED, 1.0, 4.0),
    },
    "short and long factors swapped": {
        "longrope": oracle.longrope(DIM, THETA, SHORT, 4.0, BEFORE)
    },
    "partial rotation ignored": dict.fromkeys(("partial", "proportional"), PLAIN),
    "partial rotation of a quarter of the head": {
        "partial": oracle.default(16, THETA), "proportional": oracle.proportional(DIM, THETA, 0.25)
    },
    "partial rotation of half of the head": {"default": oracle.default(32, THETA)},
    "partial rotation of three quarters": {"partial": oracle.default(48, THETA)},
    "partial rotation with the exponents of the other kind": {
        "partial": (PLAIN[0][:16], 1.0),
        "proportional": (np.pad(RULES["partial"][1][0], (0, 16)), 1.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in PLANTED.items() for kind in kinds]
)
def test_wrong_frequencies_are_named(name, kind, dtype):
    for verdict in checks_of(report(kind), *PLANTED[name][kind], dtype=dtype):
        assert named(verdict, name)


# The name of a mistake -> a configuration that an engine misreads, and what it computes
CHANGED = {
    "yarn bounds truncated": (report("yarn", truncate=False), YARN),
    "dynamic NTK base in place of the rule": (
        report("linear", {"max_position_embeddings": 4096}), RULES["dynamic"][1]
    ),
    "attention factor computed from factor, its own keys ignored": (
        report("yarn", attention_factor=1.0), YARN
    ),
    "scaling ignored (plain RoPE), with the attention factor of the rule": (
        report("yarn"), (PLAIN[0], YARN[1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_other_configurations_are_misread(name):
    *_, cos, _, rotated = checks_of(CHANGED[name][0], *CHANGED[name][1])
    assert named(cos, name)
    assert named(rotated, name)


def rounding(to, *names):
    """An engine that rounds frequencies, positions or angles."""

    def make(inv_freq, factor):
        def r(name, x):
            return x.astype(to).astype(np.float64) if name in names else x

        places = r("positions", POSITIONS.astype(np.float64))
        angles = r("angles", places[:, None] * r("frequencies", inv_freq))
        return factor * np.cos(angles), factor * np.sin(angles)

    return make


def exact(change):
    return lambda inv_freq, factor: change(*tables(inv_freq, factor), inv_freq, factor)


EACH = ("frequencies", "positions", "angles")
# The name of a mistake -> the tables of an engine that makes it
TABLES = {
    "attention factor dropped": exact(lambda c, s, w, factor: (c / factor, s / factor)),
    "attention factor squared": exact(lambda c, s, w, factor: (c * factor, s * factor)),
    "not rotated": exact(lambda c, s, *x: (np.ones_like(c), np.zeros_like(s))),
    "rotated twice": exact(lambda c, s, *x: (c * c - s * s, 2 * c * s)),
    "positions off by one (too large)": exact(lambda c, s, *x: tables(*x, POSITIONS + 1)),
    "positions off by one (too small)": exact(lambda c, s, *x: tables(*x, POSITIONS - 1)),
    "cos and sin swapped": exact(lambda c, s, *x: (s, c)),
    "sign (the inverse rotation)": exact(lambda c, s, *x: (c, -s)),
    "float32 angles": rounding(np.float32, *EACH),
    **{
        f"{name} {' '.join(what)}".replace("s positions ", "s, positions and "): rounding(to, *what)
        for name, to in (("float16", np.float16), ("bfloat16", BF16))
        for what in (("frequencies",), ("positions",), ("angles",), EACH)
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, x) for name in TABLES for x in RULES if name[:9] != "attention" or RULES[x][1][1] != 1],
)
def test_wrong_tables_are_named(name, kind, dtype):
    inv_freq, factor = RULES[kind][1]
    verdicts = checks_of(report(kind), inv_freq, factor, TABLES[name](inv_freq, factor), dtype)
    for verdict in verdicts[1:]:
        if name == "float32 angles" and dtype in DTYPES[2:]:
            assert verdict  # these dtypes hide it up to a position of some thousands
            assert "cannot exclude: " in str(verdict)
        else:
            assert named(verdict, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_order_of_pairs(kind, dtype, interleaved):
    """In a table of twice the width, too."""
    cos, sin = tables(*RULES[kind][1])
    q = queries(dtype)
    referee = report(kind, {"model_type": "llama" if interleaved else "cohere"})
    at = {"positions": POSITIONS}
    name = ORDERS[not interleaved]
    assert named(referee.check(q=q, rotated=rotate(q, cos, sin, interleaved), **at), name)
    assert referee.check(q=q, rotated=rotate(q, cos, sin, not interleaved), **at)
    twice = np.repeat if interleaved else lambda x, n, axis: np.concatenate([x, x], axis)
    cos, sin = (twice(x, 2, -1).astype(dtype) for x in (cos, sin))
    assert named(referee.check(cos=cos, sin=sin, **at), name)


ORDERS = ("half-split read as interleaved", "interleaved read as half-split")


def test_every_mistake_is_planted():
    assert {*MISTAKES} == {*PLANTED, *CHANGED, *TABLES, *ORDERS} - {[*CHANGED][-1]}


@pytest.mark.parametrize("kind", RULES)
def test_an_unknown_mistake_differs(kind):
    inv_freq, factor = RULES[kind][1]
    cos, sin = tables(inv_freq, factor)
    one = (np.arange(cos.size) == 70).reshape(cos.shape)
    noise = np.sin(np.arange(cos.size)).reshape(cos.shape) / 1e4
    for wrong in ((1.01 * cos, 1.01 * sin), (cos + one / 10, sin), (cos + noise, sin)):
        for verdict in checks_of(report(kind), inv_freq, factor, wrong)[1:]:
            assert verdict[:2] == (False, ())
            assert str(verdict).startswith("differs: ")
    odd = np.where(np.arange(inv_freq.size) == 5, inv_freq * 1.001, inv_freq)
    verdict = report(kind).check(inv_freq=odd)
    assert str(verdict).startswith("differs: inv_freq is off by 0.001 of itself at pair 5 ")
    assert str(verdict).endswith("wrong in pairs 5 to 5")


def test_the_verdict_says_how_much_and_where():
    positions = np.arange(100, 800)
    cos, sin = tables(*PLAIN, positions)
    cos[142, 7] += 0.25  # not among the positions by which mistakes are told apart
    verdict = report().check(cos=cos, sin=sin, positions=positions)
    assert str(verdict).startswith("differs: cos is off by 0.25 at position 242, pair 7 (")
    assert str(verdict).endswith("wrong in pairs 7 to 7, positions 242 to 242")


def test_a_long_table():
    positions = np.arange(8192)
    cos, sin = tables(*PLAIN, positions)
    assert str(report().check(cos=cos, sin=sin)).endswith("cos (float64), sin (float64)")
    cos, sin = tables(*PLAIN, positions.astype(BF16).astype(float))
    assert named(report().check(cos=cos, sin=sin), "bfloat16 positions")


def test_one_of_several_layers():
    cos, sin = (np.stack([np.tile(x, 2)] * 4).astype(np.float32) for x in tables(*YARN))
    assert report("yarn").check(cos=cos, sin=sin, positions=POSITIONS)
    cos[2], sin[2] = cos[2] / YARN[1], sin[2] / YARN[1]
    verdict = report("yarn").check(cos=cos, sin=sin, positions=POSITIONS)
    assert verdict[:2] == (False, ())
    assert str(verdict).startswith("differs: cos[2] is off by 0.139 at position ")
    stack = np.stack([YARN[0], YARN[0], PLAIN[0]])
    assert str(report("yarn").check(inv_freq=stack)).startswith("differs: inv_freq[2] is off by ")
    assert report("yarn").check(inv_freq=stack[:2])


def test_shapes_and_positions():
    cos, sin = tables(RULES["proportional"][1][0][:16], 1.0)  # without the pairs that do not turn
    assert report("proportional").check(cos=cos, sin=sin, positions=POSITIONS)
    cos, sin = tables(*PLAIN, np.array([7]))
    assert report().check(cos=cos, sin=sin, positions=7)
    for dtype in ("uint8", "uint64"):
        positions = np.arange(256).astype(dtype)
        cos, sin = tables(*PLAIN, np.arange(1, 257))
        wrong = report().check(cos=cos, sin=sin, positions=positions)
        assert named(wrong, "positions off by one (too large)")
        far = positions[:, None].astype(int) + (np.arange(1, 9) << 20)  # beyond float16
        cos, sin = (x.reshape(256, 8, 32) for x in tables(*PLAIN, far.ravel()))
        assert report().check(cos=cos, sin=sin, positions=far)
        assert named(report().check(cos=sin, sin=cos, positions=far), "cos and sin swapped")


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_narrow_frequencies(dtype):
    inv_freq, name = PLAIN[0].astype(dtype), f"{np.dtype(dtype).name} frequencies"
    assert str(report().check(inv_freq=inv_freq)).endswith(f"; cannot exclude: {name}")
    assert str(report().check(inv_freq=1.02 * inv_freq)).startswith("differs")
    assert named(report().check(inv_freq=inv_freq.astype(np.float32)), name)


def test_float32_angles_hide_no_other_mistake():
    for factor, mistake in ((1.0, "attention factor dropped"), (YARN[1], "float32 angles")):
        cos, sin = (x.astype(np.float32) for x in rounding(np.float32, *EACH)(YARN[0], factor))
        arrays = {"cos": cos, "sin": sin, "positions": POSITIONS}
        assert named(report("yarn").check(**arrays), mistake)
        accepted = report("yarn").check(**arrays, float32_angles=True)
        assert bool(accepted) == (factor != 1)
        assert "float32 angles" not in str(accepted)


ONES, ZEROS = np.ones((4, 32)), np.zeros((4, 32))
REFUSED = [
    ({}, ValueError, r"check needs inv_freq \(..., 32\), or cos .* got the shapes {'positions'"),
    ({"positions": [1]}, ValueError, "check needs inv_freq"),
    ({"cos": ONES}, ValueError, r"got the shapes {'cos': \(4, 32\)"),
    ({"cos": ONES, "sin": ONES[:2]}, ValueError, r"'sin': \(2, 32\)"),
    ({"q": np.ones((4, DIM))}, ValueError, r"or q and rotated \(..., L, 64\)"),
    ({"q": np.ones((4, 60)), "rotated": np.ones((4, 60))}, ValueError, "L, 64.* got the shapes"),
    ({"cos": ONES * np.nan, "sin": ONES}, ValueError, "cos must be finite and below"),
    ({"inv_freq": ONES[0] * np.inf}, ValueError, "inv_freq must be finite"),
    ({"q": np.full((4, DIM), 1e308), "rotated": np.ones((4, DIM))}, ValueError, "below 1e100"),
    ({"inv_freq": []}, ValueError, r"got the shapes {'inv_freq': \(0,\)}"),
    ({"cos": ONES[0], "sin": ONES[0]}, ValueError, r"got the shapes {'cos': \(32,\)}"),
    ({"inv_freq": ONES[0, :31]}, ValueError, r"inv_freq \(..., 32\).*\(31,\)"),
    ({"cos": ONES[:, :31], "sin": ONES[:, :31]}, ValueError, "L, 32 or 64"),
    ({"cos": ONES, "sin": ONES, "positions": [1, 2, 3]}, ValueError, "do not broadcast"),
    ({"cos": ONES, "sin": ONES, "positions": [0.5]}, TypeError, "positions must hold integers"),
    ({"inv_freq": ["a"]}, TypeError, "inv_freq must hold real numbers"),
    ({"cos": ONES, "sin": ZEROS, "positions": [0]}, ValueError, "cannot show a rotation"),
    ({"cos": ONES, "sin": ZEROS, "inv_freq": PLAIN[0], "positions": [0]}, ValueError, "cannot sh"),
    ({"cos": ONES, "sin": ZEROS, "positions": [0] * 4}, ValueError, "cannot show a rotation"),
    ({"q": np.zeros((4, DIM)), "rotated": np.zeros((4, DIM))}, ValueError, "cannot show a rot"),
    ({"cos": ONES[:, None], "sin": ZEROS[:, None]}, ValueError, "with positions if L is 1"),
]


@pytest.mark.parametrize(("arrays", "error", "words"), REFUSED)
def test_what_cannot_be_compared_is_refused(arrays, error, words):
    with pytest.raises(error, match=words):
        report().check(**arrays)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_need_it(kind):
    arrays = dict(zip(("cos", "sin"), tables(*RULES[kind][1]), strict=True), positions=POSITIONS)
    assert report(kind).check(**arrays)
    with pytest.raises(ValueError, match="position 5958 rope_report needs a length above"):
        report(kind, length=None).check(**arrays)


# ---------------------------------------------------------------- configurations

LLAMA = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": TRAINED}
GEMMA = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"type": "linear", "factor": 8.0},
}
TYPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "none": None,
}  # fmt: skip
PHI = {
    "rope_scaling": {"type": "su", "short_factor": [1.5] * 32, "long_factor": [3.0] * 32,
                     ORIGINAL: 7}, ORIGINAL: BEFORE,
}  # fmt: skip
CONFIGS = [
    ({"rope_theta": 3e4}, oracle.default(DIM, 3e4)),
    ({"rope_scaling": None}, oracle.default(DIM, 1e4)),
    ({"head_dim": 16, "rope_theta": 3e4}, oracle.default(16, 3e4)),
    ({"rotary_emb_base": 3e4, "rotary_pct": 0.25}, oracle.default(16, 3e4)),
    ({"rotary_dim": 30, "head_dim": 44}, oracle.default(30, 1e4)),
    ({"qk_rope_head_dim": 16, "head_dim": 24}, oracle.default(16, 1e4)),
    ({"text_config": {**LLAMA, "rope_theta": 3e4}}, oracle.default(DIM, 3e4)),
    ({"rope_theta": 3e4, "rope_scaling": {"type": "mrope"}}, oracle.default(DIM, 3e4)),
    (PHI, oracle.longrope(DIM, 1e4, [1.5] * 32, 4.0, BEFORE)),
    (GEMMA, oracle.linear(DIM, 1e6, 8.0)),
    ({"rope_parameters": TYPES}, oracle.linear(DIM, 1e6, 8.0)),
    ({"global_rope_theta": 3e4, "local_rope_theta": 5.0}, oracle.default(DIM, 3e4)),
]


@pytest.mark.parametrize(("config", "wanted"), CONFIGS)
def test_keys_of_configurations(config, wanted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    for source in ({**LLAMA, **config}, tmp_path, str(tmp_path / "config.json")):
        referee = wavepe.rope_report(source)
        np.testing.assert_allclose(referee.inv_freq, wanted[0], rtol=1e-14)
        assert referee.attention_factor == pytest.approx(wanted[1], rel=1e-15)
        np.testing.assert_allclose(referee.turns, wanted[0] * TRAINED / (2 * np.pi), rtol=1e-14)
    assert json.loads(referee.to_json())["inv_freq"] == referee.inv_freq.tolist()


@pytest.mark.parametrize("config", [GEMMA, {"rope_parameters": TYPES}])
def test_layer_types_are_told_apart(config):
    full, sliding = (
        wavepe.rope_report({**LLAMA, **config}, layer_type=x) for x in TYPES if x != "none"
    )
    verdict = full.check(inv_freq=sliding.inv_freq)
    assert named(verdict, "rotation of the layer type sliding_attention")
    assert str(full).startswith("layers full_attention (others: sliding_attention)")
    with pytest.raises(ValueError, match=r"unknown layer_type 'none'.*full_attention"):
        wavepe.rope_report({**LLAMA, **config}, layer_type="none")


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"hidden_size": None}, ValueError, "needs head_dim, or hidden_size .* got the keys hid"),
        ({"rope_parameters": 3}, TypeError, "rope_parameters must be a dict, got 3"),
        ({"rope_parameters": {"rope_type": "spiral"}}, ValueError, "unknown rope_type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, ValueError, "llama3' needs factor"),
        ({"head_dim": "64"}, TypeError, "head_dim must be an integer"),
        ({"hidden_size": "64"}, TypeError, "hidden_size must be an integer"),
        ({"max_position_embeddings": "9", "rotary_dim": 4}, TypeError, "max_length must be an int"),
        ({"rotary_dim": 0}, ValueError, "needs a pair that turns"),
        ({"model_type": "bert"}, ValueError, "needs rope_theta, the base of RoPE; got the keys"),
        ({"rope_ratio": 500}, ValueError, "needs rope_theta, the base of RoPE; got the keys"),
        ({"rope_theta": 1e4, "alibi": True}, ValueError, "with RoPE, and this one has 'alibi'"),
        ({"position_embedding_type": "absolute"}, ValueError, "this one has 'absolute'"),
    ],
)
def test_wrong_configurations_are_refused(config, error, words):
    with pytest.raises(error, match=words):
        wavepe.rope_report({**LLAMA, **config})


def test_the_text_says_where_the_rule_changes():
    def rows(text):
        return [line.split() for line in str(text).split("tokens per turn")[1].splitlines()[1:]]

    inv_freq, divided = YARN[0], PLAIN[0] / YARN[0]
    kept, whole = (divided == 1).sum(), np.isclose(divided, 4, rtol=1e-12).sum()
    text = str(report("yarn", unknown_key=1))
    divisors = {int(row[0]): row[1] for row in rows(text)}
    assert divisors[kept - 1] == divisors[0] == "1"
    assert divisors[kept] == f"{divided[kept]:.5g}" != "1"
    assert divisors[32 - whole] == divisors[31] == "4"
    assert divisors[31 - whole] == f"{divided[31 - whole]:.5g}" != "4"
    assert "unknown keys in scaling for rope_type 'yarn': unknown_key\n" in text
    assert "attention factor 1.1386" in text
    turns = [f"{length * inv_freq[-1] / (2 * np.pi):.5g}" for length in (TRAINED, LENGTH)]
    assert rows(text)[-1] == ["31", "4", f"{2 * np.pi / inv_freq[-1]:.5g}", *turns]
    assert rows(report("proportional"))[-1] == ["31", "inf", "inf", "0", "0"]
    assert "gives no base: 10000" in str(wavepe.rope_report({**LLAMA, "rope_scaling": None}))


# ---------------------------------------------------------------- files and the command


def gguf(values, tensors=(), version=3, kind=0):
    """Write metadata (name, struct's letter or "s" or "a", value) and float32 tensors as GGUF."""
    kinds = {"I": 4, "f": 6, "s": 8, "a": 9}

    def text(x):
        return struct.pack("<Q", len(x)) + x.encode()

    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for name, letter, value in values:
        data += text(name) + struct.pack("<I", kinds[letter])
        if letter == "a":
            data += struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value))
        else:
            data += text(value) if letter == "s" else struct.pack(f"<{letter}", value)
    offset = 0
    for name, numbers in tensors:
        data += text(name) + struct.pack("<IQIQ", 1, len(numbers), kind, offset)
        offset += -(-4 * len(numbers) // 32) * 32
    for _, numbers in tensors:
        data += b"\0" * (-len(data) % 32) + np.asarray(numbers, "<f4").tobytes()
    return data


META = [
    ("general.architecture", "s", "llama"), ("tokenizer.ggml.tokens", "a", ["a", "bc"]),
    ("llama.context_length", "I", TRAINED), ("llama.embedding_length", "I", 512),
    ("llama.attention.head_count", "I", 8), ("llama.rope.freq_base", "f", THETA),
]  # fmt: skip
SCALING = [
    ("llama.rope.scaling.type", "s", "yarn"), ("llama.rope.scaling.factor", "f", 4.0),
    ("llama.rope.scaling.original_context_length", "I", BEFORE),
]  # fmt: skip


def test_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(META + SCALING))
    referee = wavepe.rope_report(path)
    np.testing.assert_allclose(referee.inv_freq, YARN[0], rtol=1e-14)
    cos, sin = tables(*YARN)
    q, at = queries(), {"positions": POSITIONS}
    for interleaved in (False, True):  # the metadata does not say which
        assert referee.check(q=q, rotated=rotate(q, cos, sin, interleaved), **at)
        wrong = referee.check(q=q, rotated=rotate(q, cos, -sin, interleaved), **at)
        assert named(wrong, "sign (the inverse rotation)")
    divisors = PLAIN[0] / RULES["llama3"][1][0]  # llama3's rule is a tensor there
    tensors = [("other.weight", [1.0] * 9), ("rope_freqs.weight", divisors)]
    path.write_bytes(data := gguf(META, tensors))
    np.testing.assert_allclose(wavepe.rope_report(path).inv_freq, RULES["llama3"][1][0], rtol=1e-7)
    for end in range(4, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="is not a whole GGUF file"):
            wavepe.rope_report(path)
    for data, words in (
        (gguf([*META, ("general.alignment", "I", 0)]), "is not a whole GGUF file of a model"),
        (gguf(META, version=1), "needs the version 2 or 3, little-endian; got 1"),
        (gguf(META, tensors, kind=1), "rope_freqs.weight must hold float32, got the GGUF type 1"),
        (gguf(META[:5]), "needs rope_theta"),  # a model without RoPE
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            wavepe.rope_report(path)


@pytest.mark.parametrize("suffix", ["npz", "npy", "json", "safetensors", "bf16.safetensors"])
def test_the_command(suffix, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": THETA}))
    command, file = ["rope", str(tmp_path)], tmp_path / f"engine.{suffix}"
    assert main(command) == 0
    assert capsys.readouterr().out == f"{wavepe.rope_report(tmp_path)}\n"
    dtype = BF16 if suffix.startswith("bf16") else np.float32
    for theta, code, words in ((THETA, 0, "agrees"), (1e4, 1, "base 10000 in place of theta")):
        inv_freq = oracle.default(DIM, theta)[0].astype(dtype)
        cos, sin = (x.astype(dtype) for x in tables(*oracle.default(DIM, theta), np.arange(9)))
        arrays = {"inv_freq": inv_freq, "cos": cos, "sin": sin, "positions": np.arange(9)}
        if suffix == "npy":
            np.save(file, inv_freq)
        elif suffix == "npz":
            np.savez(file, **arrays, other=np.ones(2))
        elif suffix == "json":
            file.write_text(json.dumps({name: x.tolist() for name, x in arrays.items()}))
        else:
            narrow = torch.bfloat16 if dtype is BF16 else torch.float32
            tensors = {k: torch.tensor(x.astype(float), dtype=narrow) for k, x in arrays.items()}
            tensors["positions"] = torch.arange(9)
            save_file(tensors, file, {"format": "pt"})
        assert main([*command, "--check", str(file)]) == code
        assert capsys.readouterr().out.startswith(words)


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


def test_a_dump_is_what_an_engine_must_give(tmp_path, capsys):
    config, dump = tmp_path / "config.json", str(tmp_path / "right.npz")
    rope = {**RULES["yarn"][0], "rope_type": "yarn", "rope_theta": THETA}
    config.write_text(json.dumps({**LLAMA, "rope_parameters": rope}))
    command = ["rope", str(config), "--length", "100"]
    assert main([*command, "--dump", dump]) == 0
    assert np.load(dump)["positions"].tolist() == [0, *(2**k for k in range(7)), 99]
    assert main([*command, "--check", dump]) == 0
    cos = tables(*YARN, np.load(dump)["positions"])[0]
    np.testing.assert_allclose(np.load(dump)["cos"], cos, rtol=1e-13)
    far = (np.float32([[99], [9999]]) * YARN[0].astype(np.float32)).astype(float)
    np.savez(dump, cos=YARN[1] * np.cos(far), sin=YARN[1] * np.sin(far), positions=[99, 9999])
    capsys.readouterr()
    assert main([*command, "--check", dump]) == 1
    assert capsys.readouterr().out.startswith("float32 angles: ")
    assert main([*command, "--check", dump, "--float32-angles"]) == 0


def test_examples():
    assert doctest.testmod(module).failed == 0
