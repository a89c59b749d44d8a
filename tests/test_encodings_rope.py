"""The encoding "rope": its bases and scalings at each length, against wavepe.rope_frequencies."""

import dataclasses

import numpy as np
import pytest
import wavepe
from rope_cases import LONG, ORIGINAL, SHORT
from wavepe.encodings import RoPE

TRAINED = 100
SCALINGS = {  # spec: the parameters of wavepe.rope_frequencies
    "rope:type=default": {"rope_type": "default"},
    "rope:theta=500,type=linear,factor=4": {"rope_type": "linear", "factor": 4.0},
    "rope:type=dynamic,factor=2.5": {"rope_type": "dynamic", "factor": 2.5},
    f"rope:theta=500,type=yarn,factor=4,{ORIGINAL}=128,truncate=false": {
        "rope_type": "yarn", "factor": 4.0, ORIGINAL: 128, "truncate": False},
    "rope:type=yarn,factor=8,beta_fast=20,beta_slow=2.5,mscale=0.7,mscale_all_dim=1": {
        "rope_type": "yarn", "factor": 8, "beta_fast": 20, "beta_slow": 2.5, "mscale": 0.7,
        "mscale_all_dim": 1},
    f"rope:type=longrope,{ORIGINAL}=64,attention_factor=1.19,short_factor=1+1.5+2+3.25,"
    "long_factor=4+5.5+7+11": {
        "rope_type": "longrope", ORIGINAL: 64, "attention_factor": 1.19, "short_factor": SHORT,
        "long_factor": LONG},
    f"rope:type=llama3,factor=8,{ORIGINAL}=64,low_freq_factor=1,high_freq_factor=4": {
        "rope_type": "llama3", "factor": 8, ORIGINAL: 64, "low_freq_factor": 1,
        "high_freq_factor": 4},
    "rope:type=proportional,partial_rotary_factor=0.5": {
        "rope_type": "proportional", "partial_rotary_factor": 0.5},
    "rope:theta=500,partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
}  # fmt: skip
# spec: theta and scaling of a length, if it is beyond the trained one
FOLLOWING = {
    "rope:inference_theta=scaled": lambda n: (1e4 * n / TRAINED, {}),
    "rope:theta=500,inference_theta=scaled": lambda n: (500 * n / TRAINED, {}),
    "rope:theta=500,inference_theta=scaled,type=linear,factor=2": lambda n: (
        500 * n / TRAINED,
        {"rope_type": "linear", "factor": 2.0},
    ),
    "rope:theta=500,type=linear,factor=scaled,partial_rotary_factor=0.5": lambda n: (
        500,
        {"rope_type": "linear", "factor": n / TRAINED, "partial_rotary_factor": 0.5},
    ),
    "rope:theta=500,type=yarn,factor=scaled": lambda n: (
        500,
        {"rope_type": "yarn", "factor": n / TRAINED, ORIGINAL: TRAINED},
    ),
    f"rope:theta=500,type=yarn,factor=scaled,{ORIGINAL}=64": lambda n: (
        500,
        {"rope_type": "yarn", "factor": n / 64, ORIGINAL: 64},
    ),
}
SPECS = [*SCALINGS, "rope:theta=500,inference_theta=4096", *FOLLOWING]


def parameters(spec, length, training):
    """Return theta and scaling of wavepe.rope_frequencies."""
    encoding = wavepe.encoding(spec)
    trained, scaling = encoding.theta or 1e4, SCALINGS.get(spec, {})
    if spec not in FOLLOWING:
        return trained if training else encoding.inference_theta or trained, scaling
    limit = encoding.original_max_position_embeddings or TRAINED
    theta, scaling = FOLLOWING[spec](length)
    if length <= limit and encoding.factor == "scaled":
        scaling = {key: scaling[key] for key in scaling if key == "partial_rotary_factor"}
    return trained if training or length <= limit else theta, scaling


@pytest.mark.parametrize("spec", SPECS)
def test_frequencies_of_each_length(spec):
    encoding = wavepe.encoding(spec)
    assert str(encoding) == spec
    assert eval(repr(encoding), {"RoPE": RoPE}) == encoding
    follows = any(word in spec for word in ("scaled", "dynamic", "longrope"))
    assert encoding.follows_length == follows
    for length in (1, 64, 65, 99, 100, 101, 300):
        lengths = {"length": length, "trained_length": TRAINED}
        for training in (True, False):
            theta, scaling = parameters(spec, length, training)
            wanted, factor = wavepe.rope_frequencies(
                8, theta, scaling=scaling, length=length, max_length=TRAINED
            )
            got, got_factor = encoding.frequencies(8, **lengths, training=training)
            np.testing.assert_array_equal(got, wanted)
            assert got_factor == factor
        tables = wavepe.rope_table(np.arange(length), wanted, attention_factor=factor)
        whole = encoding.rope_table(np.arange(length), 8, trained_length=TRAINED)
        np.testing.assert_array_equal(whole, tables)
        for part in (slice(length - 1, length), slice(0, 10)):  # with a cache
            got = encoding.rope_table(np.arange(length)[part], 8, **lengths)
            np.testing.assert_array_equal(got, np.stack(tables)[:, part])


@pytest.mark.parametrize("spec", SCALINGS)
def test_inference_theta_replaces_the_base(spec):
    encoding, lengths = wavepe.encoding(spec), {"length": 300, "trained_length": TRAINED}
    other = dataclasses.replace(encoding, inference_theta=7000)
    got, factor = other.frequencies(8, **lengths)
    wanted = wavepe.rope_frequencies(
        8, 7000, scaling=SCALINGS[spec], length=300, max_length=TRAINED
    )
    np.testing.assert_array_equal(got, wanted[0])
    assert factor == wanted[1]
    trained = other.frequencies(8, **lengths, training=True)[0]
    np.testing.assert_array_equal(trained, encoding.frequencies(8, **lengths)[0])


def test_partial_rotary_factor_gives_fewer_pairs():
    cos, sin = RoPE(partial_rotary_factor=0.5).rope_table(np.arange(5), 16)
    assert cos.shape == sin.shape == (5, 4)
    np.testing.assert_array_equal((cos, sin), RoPE().rope_table(np.arange(5), 8))
    whole, _ = RoPE(type="proportional", partial_rotary_factor=0.5).frequencies(16)
    np.testing.assert_array_equal(whole, RoPE(fraction=0.5).frequencies(16)[0])


def test_repr_shows_what_differs():
    assert repr(RoPE()) == "RoPE()"
    assert repr(RoPE(type="linear", factor=2)) == "RoPE(type='linear', factor=2.0)"


@pytest.mark.parametrize(
    ("spec", "trained"),
    [
        ("rope", "rope:theta=10000"),
        ("rope:type=default", "rope:theta=10000"),
        ("rope:inference_theta=scaled", "rope:theta=10000"),
        ("rope:theta=128,inference_theta=scaled", "rope:theta=128"),
        ("rope:fraction=0.5,inference_theta=7", "rope:theta=10000,fraction=0.5"),
        ("rope:type=linear,factor=2,inference_theta=7", "rope:theta=10000,type=linear,factor=2"),
        ("rope:type=yarn,factor=scaled,beta_fast=9", "rope:theta=10000"),
        ("rope:type=dynamic,factor=2", "rope:theta=10000"),
        ("rope:theta=7,type=linear,factor=scaled,partial_rotary_factor=0.5",
         "rope:theta=7,partial_rotary_factor=0.5"),
        *((spec, spec) for spec in ("none", "sinusoidal", "alibi", "wavelet:scales=6", "shaw")),
    ],
)  # fmt: skip
def test_trained_as(spec, trained):
    encoding = wavepe.encoding(spec).trained_as()
    assert encoding == wavepe.encoding(trained) == encoding.trained_as()


SCALED, LISTS = RoPE(inference_theta="scaled"), {"short_factor": SHORT, "long_factor": LONG}


@pytest.mark.parametrize(
    ("encoding", "lengths", "error", "words"),
    [
        (SCALED, {"length": 4}, ValueError, "needs trained_length"),
        (SCALED, {"trained_length": 4}, ValueError, "needs length, a number"),
        (SCALED, {"length": 4, "trained_length": 0}, ValueError, "trained_length must be at least"),
        (SCALED, {"length": 4.0, "trained_length": 4}, TypeError, "length must be an integer"),
        (RoPE(type="linear", factor="scaled"), {"trained_length": 4}, ValueError,
         "needs length, a number"),
        *(
            (RoPE(type=kind, **keys), {"length": 4}, ValueError, "trained_length of an encoding")
            for kind, keys in (
                ("dynamic", {"factor": 2.0}),
                ("yarn", {"factor": 2.0}),
                ("longrope", LISTS),
                ("longrope", {ORIGINAL: 9, **LISTS}),
            )
        ),
        (RoPE(type="longrope", short_factor=[1, 2], long_factor=[1, 2]),
         {"length": 4, "trained_length": 100}, ValueError, "4 for head size 8"),
    ],
)  # fmt: skip
def test_wrong_lengths(encoding, lengths, error, words):
    with pytest.raises(error, match=words):
        encoding.frequencies(8, **lengths)
    if "trained_length" not in lengths:
        with pytest.raises(error, match="trained_length"):
            encoding.rope_table(np.arange(4), 8)
        encoding.rope_table(np.arange(4), 8, trained_length=100)
        assert encoding is not SCALED or encoding.frequencies(8, training=True)[1] == 1.0
