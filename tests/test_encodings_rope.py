"""The encoding "rope" with a length scaling: options, what they compute, and round trips."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import wavepe
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import LONG, MINIMAL, ORIGINAL, SHORT
from wavepe.encodings import RoPE

LENGTHS = {"length": 300, "trained_length": 100}
SPECS = {
    "rope:type=default": {"rope_type": "default"},
    "rope:theta=500,type=linear,factor=4": {"rope_type": "linear", "factor": 4.0},
    "rope:type=dynamic,factor=2.5": {"rope_type": "dynamic", "factor": 2.5},
    f"rope:theta=500,type=yarn,factor=4,{ORIGINAL}=128,truncate=false": {
        "rope_type": "yarn",
        "factor": 4.0,
        ORIGINAL: 128,
        "truncate": False,
    },
    "rope:type=yarn,factor=8,beta_fast=20,beta_slow=2.5,mscale=0.7,mscale_all_dim=1": {
        "rope_type": "yarn",
        "factor": 8,
        "beta_fast": 20,
        "beta_slow": 2.5,
        "mscale": 0.7,
        "mscale_all_dim": 1,
    },
    f"rope:type=longrope,{ORIGINAL}=64,attention_factor=1.19,short_factor=1+1.5+2+3.25,"
    "long_factor=4+5.5+7+11": {
        "rope_type": "longrope",
        ORIGINAL: 64,
        "attention_factor": 1.19,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
    f"rope:type=llama3,factor=8,{ORIGINAL}=64,low_freq_factor=1,high_freq_factor=4": {
        "rope_type": "llama3",
        "factor": 8,
        ORIGINAL: 64,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
    },
    "rope:type=proportional,partial_rotary_factor=0.5": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
    },
    "rope:theta=500,partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("spec", SPECS)
def test_frequencies_are_those_of_the_parameters(spec):
    encoding, theta = wavepe.encoding(spec), 500.0 if "theta" in spec else 1e4
    for length in (1, 64, 65, 100, 101, 300):
        want = wavepe.rope_frequencies(8, theta, scaling=SPECS[spec], length=length, max_length=100)
        for training in (True, False):
            got = encoding.frequencies(8, length=length, trained_length=100, training=training)
            np.testing.assert_array_equal(got[0], want[0])
            assert got[1] == want[1]
        positions = np.arange(length)
        table = encoding.rope_table(positions, 8, trained_length=100)
        angles = wavepe.rope_table(positions, want[0], attention_factor=want[1])
        for a, b in zip(table, angles, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", SPECS)
def test_round_trips(spec):
    encoding = wavepe.encoding(spec)
    assert str(encoding) == spec
    assert wavepe.encoding(json.loads(json.dumps(encoding.to_dict()))) == encoding
    assert pickle.loads(pickle.dumps(encoding)) == encoding
    assert eval(repr(encoding), {"RoPE": RoPE}) == encoding
    assert len({encoding, wavepe.encoding(spec)}) == 1
    again = wavepe.encoding("rope", **encoding.options())
    assert again == encoding


numbers = st.floats(1e-3, 1e6) | st.integers(1, 10**6)


@given(
    kind=st.sampled_from([kind for kind in MINIMAL if kind != "default"]),
    factor=st.floats(1, 1e3) | st.integers(1, 100),
    lists=st.lists(numbers, min_size=1, max_size=4),
    theta=st.none() | numbers,
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_drawn_options_round_trip(kind, factor, lists, theta):
    keys = {**MINIMAL[kind], "factor": factor}
    if kind == "longrope":
        keys |= {"short_factor": lists, "long_factor": np.array(lists)}
    encoding = wavepe.encoding("rope", type=kind, theta=theta, **keys)
    assert wavepe.encoding(str(encoding)) == encoding
    assert wavepe.encoding(encoding.to_dict()) == encoding
    assert repr(wavepe.encoding(str(encoding))) == repr(encoding)


def test_repr_shows_what_differs():
    assert repr(RoPE()) == "RoPE()"
    assert repr(RoPE(type="linear", factor=2)) == "RoPE(type='linear', factor=2.0)"


def test_a_cached_step_has_the_numbers_of_the_full_pass():
    for spec in SPECS:
        encoding = wavepe.encoding(spec)
        full = encoding.rope_table(np.arange(300), 8, trained_length=100)
        step = encoding.rope_table([299], 8, **LENGTHS)
        early = encoding.rope_table(np.arange(70), 8, **LENGTHS)
        for whole, last, first in zip(full, step, early, strict=True):
            np.testing.assert_array_equal(whole[-1:], last)
            np.testing.assert_array_equal(whole[:70], first)


def test_frequencies_depend_on_the_current_length_alone():
    """transformers keeps the base of the longest sequence seen until one within the trained length
    comes."""
    encoding = RoPE(type="dynamic", factor=2.0)
    positions = {n: np.arange(n) for n in (20, 200, 150, 99, 100, 101)}
    first = {n: encoding.rope_table(p, 8, trained_length=100) for n, p in positions.items()}
    for n in reversed(positions):
        again = encoding.rope_table(positions[n], 8, trained_length=100)
        np.testing.assert_array_equal(again, first[n])
    whole = RoPE().rope_table(positions[100], 8)
    np.testing.assert_array_equal(first[100], whole)
    assert not np.array_equal(first[200][0][:150], first[150][0])


def test_partial_rotary_factor_gives_fewer_pairs():
    cos, sin = RoPE(partial_rotary_factor=0.5).rope_table(np.arange(5), 16)
    assert cos.shape == sin.shape == (5, 4)
    np.testing.assert_array_equal((cos, sin), RoPE().rope_table(np.arange(5), 8))
    whole, _ = RoPE(type="proportional", partial_rotary_factor=0.5).frequencies(16)
    np.testing.assert_array_equal(whole, RoPE(fraction=0.5).frequencies(16)[0])


def test_inference_theta_replaces_the_base():
    for spec, scaling in SPECS.items():
        encoding = dataclasses.replace(wavepe.encoding(spec), inference_theta=7000)
        got, factor = encoding.frequencies(8, **LENGTHS)
        want = wavepe.rope_frequencies(8, 7000, scaling=scaling, length=300, max_length=100)
        np.testing.assert_array_equal(got, want[0])
        assert factor == want[1]
        trained = encoding.frequencies(8, **LENGTHS, training=True)[0]
        np.testing.assert_array_equal(trained, wavepe.encoding(spec).frequencies(8, **LENGTHS)[0])
    scaled = RoPE(theta=500, type="linear", factor=2, inference_theta="scaled")
    got = scaled.rope_table(np.arange(300), 8, trained_length=100)
    want = RoPE(theta=1500, type="linear", factor=2).rope_table(np.arange(300), 8)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="each raises the base"):
        RoPE(type="dynamic", factor=2, inference_theta="scaled")


@pytest.mark.parametrize(("kind", "original"), [("linear", None), ("yarn", None), ("yarn", 64)])
def test_a_scaled_factor_follows_the_length(kind, original):
    """Beyond the trained length (or the original one) it is length / that; within it RoPE."""
    more = {} if original is None else {"original_max_position_embeddings": original}
    encoding = wavepe.encoding("rope", type=kind, factor="scaled", theta=500.0, **more)
    trained = original or 128
    for length in (1, trained, trained + 1, 5 * trained):
        found, factor = encoding.frequencies(16, length=length, trained_length=128)
        if length <= trained:
            expected, expected_factor = wavepe.rope_frequencies(16, 500.0)
        else:
            scaling = {"rope_type": kind, "factor": length / trained}
            if kind == "yarn":
                scaling["original_max_position_embeddings"] = trained
            expected, expected_factor = wavepe.rope_frequencies(16, 500.0, scaling=scaling)
        np.testing.assert_array_equal(found, expected)
        assert factor == expected_factor
    assert encoding.follows_length
    with pytest.raises(ValueError, match="needs length, a number"):
        encoding.frequencies(16, trained_length=128)


def test_trained_as():
    assert RoPE(type="default").trained_as() == RoPE().trained_as()
    linear = RoPE(type="linear", factor=2, inference_theta=7.0)
    assert linear.trained_as() == RoPE(theta=1e4, type="linear", factor=2)
    assert linear.trained_as() != RoPE().trained_as()
    for later in (
        RoPE(type="yarn", factor="scaled", beta_fast=9.0),
        RoPE(type="dynamic", factor=2),
    ):
        assert later.trained_as() == RoPE().trained_as()
    half = RoPE(type="linear", factor="scaled", theta=7.0, partial_rotary_factor=0.5)
    assert half.trained_as() == RoPE(theta=7.0, partial_rotary_factor=0.5)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("rope:type=linear", "'linear' needs factor"),
        ("rope:type=dynamic", "'dynamic' needs factor"),
        (f"rope:type=yarn,{ORIGINAL}=64", "'yarn' needs factor"),
        ("rope:type=longrope,short_factor=1+2", "'longrope' needs long_factor"),
        ("rope:type=longrope,long_factor=1+2", "'longrope' needs short_factor"),
        ("rope:type=llama3,factor=8", "'llama3' needs low_freq_factor, high_freq_factor"),
        ("rope:type=warped", "known: default, linear, dynamic, yarn, longrope, llama3, prop"),
        ("rope:type=3", "rope type must be a string"),
        ("rope:factor=2", "factor needs a type that has it: linear, dynamic, yarn.*got type None"),
        ("rope:type=default,factor=2", "factor needs a type that has it"),
        ("rope:type=linear,factor=2,beta_fast=3", "beta_fast needs a type that has it: yarn; got"),
        ("rope:type=linear,factor=0", "rope factor must be above 0"),
        ("rope:type=linear,factor=two", "rope factor must be a number"),
        ("rope:type=linear,factor=true", "rope factor must be a number"),
        ("rope:type=yarn,factor=2,truncate=1", "rope truncate must be true or false"),
        ("rope:type=dynamic,factor=scaled", "factor=scaled needs type=linear or yarn, got dynamic"),
        ("rope:type=linear,factor=scaled,inference_theta=scaled", "give one of"),
        ("rope:type=yarn,factor=2+3", "rope factor must be a number"),
        ("rope:type=longrope,short_factor=1,long_factor=2", "short_factor must be a list"),
        ("rope:type=longrope,short_factor=1+0,long_factor=2+3", r"short_factor\[1\] must be above"),
        (
            "rope:type=longrope,short_factor=1+2,long_factor=2+",
            "one value per pair, got 2 and 1",
        ),
        ("rope:type=llama3,factor=8,low_freq_factor=4,high_freq_factor=4", "must be above low"),
        ("rope:partial_rotary_factor=1.5", "partial_rotary_factor must be a number from 0 to 1"),
        ("rope:fraction=0.5,type=default", "fraction=0.5 cannot be combined with type"),
        ("rope:fraction=0.5,type=linear,factor=2", "fraction=0.5 cannot be combined with type"),
        ("rope:fraction=0.5,partial_rotary_factor=1", "combined with partial_rotary_factor"),
        ("rope:rope_type=linear,factor=2", "unknown option 'rope_type'"),
        ("rope:rope_theta=100", "unknown option 'rope_theta'"),
    ],
)
def test_refused_as_it_is_made(text, needs):
    with pytest.raises(ValueError, match=needs):
        wavepe.encoding(text)


def test_lengths_that_a_type_needs():
    lists = {"short_factor": SHORT, "long_factor": LONG}
    for encoding in (
        RoPE(type="dynamic", factor=2.0),
        RoPE(type="yarn", factor=2.0),
        RoPE(type="longrope", **lists),
        RoPE(type="longrope", original_max_position_embeddings=9, **lists),
    ):
        with pytest.raises(ValueError, match="trained_length of an encoding"):
            encoding.rope_table(np.arange(4), 8)
        encoding.rope_table(np.arange(4), 8, trained_length=100)
    with pytest.raises(ValueError, match="4 for head size 8"):
        RoPE(type="longrope", short_factor=[1, 2], long_factor=[1, 2]).rope_table(
            [0], 8, trained_length=100
        )
