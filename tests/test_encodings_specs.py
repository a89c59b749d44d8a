"""Specs, options and dicts of encodings: reading, errors and round trips."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import wavepe
from encoding_cases import ENCODINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import MINIMAL, ORIGINAL
from wavepe.common import spec
from wavepe.encodings import (
    ALiBi,
    Encoding,
    NoPE,
    RoPE,
    Shaw,
    Sinusoidal,
    TransformerXL,
    Wavelet,
    known_encodings,
)

steady = settings(derandomize=True, deadline=None, max_examples=100)

KINDS = ["ricker", "gaussian", "morlet", "haar"]


# Encodings with options drawn from all they may be, given as a user may give them.

numbers = st.integers(1, 10**6) | st.floats(1e-300, 1e300) | st.floats(0.5, 2e4).map(np.float32)
scale_lists = st.lists(numbers, min_size=1, max_size=5)


def drawn(cls, **options):
    return st.fixed_dictionaries({}, optional=options).map(lambda given: cls(**given))


def rope_of_type(kind, factor, lists, theta):
    keys = {**MINIMAL[kind], "factor": factor}
    if kind == "longrope":
        keys |= {"short_factor": lists, "long_factor": np.array(lists)}
    return RoPE(type=kind, theta=theta, **keys)


encodings = st.one_of(
    drawn(
        Wavelet,
        kind=st.sampled_from(KINDS),
        scales=st.integers(1, 128),
        min_scale=st.integers(1, 512) | st.floats(1e-3, 1e3),
        fixed_scale=st.booleans(),
        mirrored=st.none() | st.booleans(),
    ),
    drawn(Wavelet, scales=scale_lists | scale_lists.map(tuple) | scale_lists.map(np.array)),
    drawn(
        RoPE,
        theta=st.none() | numbers,
        fraction=st.floats(0, 1) | st.sampled_from([0, 1]),
        interleaved=st.booleans() | st.booleans().map(np.bool_),
        inference_theta=st.none() | numbers | st.just("scaled"),
    ),
    st.builds(
        rope_of_type,
        kind=st.sampled_from([kind for kind in MINIMAL if kind != "default"]),
        factor=st.floats(1, 1e3) | st.integers(1, 100),
        lists=scale_lists,
        theta=st.none() | numbers,
    ),
    drawn(Sinusoidal, theta=numbers | st.just("length"), reversed=st.booleans()),
    drawn(Shaw, clip=st.integers(1, 2**20) | st.integers(1, 99).map(np.int32)),
    drawn(TransformerXL, biases=st.booleans() | st.booleans().map(np.bool_)),
    st.just(ALiBi()),
    st.just(NoPE()),
)


# Specs


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        *((spec, spec) for spec in ENCODINGS),
        ("wavelet:scales=8", "wavelet"),
        ("wavelet:scales=1+2+8", "wavelet:scales=1+2+8"),
        ("wavelet:scales=1.50+.25", "wavelet:scales=1.5+0.25"),
        ("wavelet:scales=128+", "wavelet:scales=128+"),
        ("wavelet:mirrored=false,kind=haar", "wavelet:kind=haar,mirrored=false"),
        ("wavelet:fixed_scale=true,min_scale=4.0", "wavelet:min_scale=4,fixed_scale=true"),
        ("rope:fraction=1,interleaved=false", "rope:interleaved=false"),
        ("rope:theta=10000", "rope:theta=10000"),  # of None
        ("rope:theta=128.0,inference_theta=scaled", "rope:theta=128,inference_theta=scaled"),
        ("rope:theta=5e5", "rope:theta=500000"),
        ("rope:theta=1e+20", "rope:theta=1e20"),
        ("rope:fraction=.75", "rope:fraction=0.75"),
        ("shaw:clip=16", "shaw"),
        ("transformer_xl:biases=true", "transformer_xl"),
        ("sinusoidal:theta=10000,reversed=false", "sinusoidal"),
        ("sinusoidal:theta=length,reversed=true", "sinusoidal:theta=length,reversed=true"),
        # blanks around marks
        (" rope\n", "rope"),
        ("wavelet: scales=4, biases = true", "wavelet:scales=4,biases=true"),
        ("rope @::2 + wavelet:scales=1 + 2@ 1::2", "rope@::2+wavelet:scales=1+2@1::2"),
    ],
)
def test_canonical_spec(text, canonical):
    encoding = wavepe.encoding(text)
    assert str(encoding) == canonical
    assert wavepe.encoding(canonical) == encoding


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # spelling
        ("", "needs a name"),
        ("rope alibi", "needs a name"),
        ("rope,theta=1", "needs a name"),
        (":theta=1", "needs a name"),
        ("rope:", "key=value"),
        ("rope:theta", "key=value"),
        ("rope:theta=", "key=value"),
        ("rope:=1", "key=value"),
        ("rope:theta=1,", "key=value"),
        ("rope:,theta=1", "key=value"),
        ("rope:th eta=1", "key=value after the colon, got 'th eta=1'"),
        ("rope:theta=1:fraction=1", "theta"),
        ("rope:theta=1=2", "theta"),
        ("rope:theta=1 fraction=.5", "theta: a value must not .* hold a blank"),
        ("rope:theta=1,theta=1", "theta twice"),
        ("wavelet:scales=1++2", "scales"),
        ("wavelet:scales=+1", "scales"),
        ("wavelet:scales=+", "scales"),
        ("wavelet:scales=1+2+", "scales"),
        ("rope:theta=" + "9" * 5000, "theta"),
        # values
        ("rope:theta=abc", "theta must be a number"),
        ("rope:theta=0", "theta must be above 0"),
        ("rope:theta=inf", "theta must be a number"),
        ("rope:theta=nan", "theta must be a number"),
        ("rope:theta=1e999", "theta must be finite"),
        ("rope:theta=1" + "0" * 400, "theta must be finite"),
        ("rope:theta=1_000", "theta must be a number"),
        ("rope:theta=true", "theta must be a number"),
        ("rope:theta=1+2", "theta must be a number"),
        ("rope:theta=\u0661", "theta must be a number"),
        ("rope:theta=none", "theta must be a number"),
        ("rope:fraction=1.01", "fraction must be a number from 0 to 1"),
        ("rope:fraction=-0.5", "fraction must be a number from 0 to 1"),
        ("rope:interleaved=1", "interleaved must be true or false"),
        ("rope:interleaved=TRUE", "interleaved must be true or false"),
        ("rope:inference_theta=scale", "inference_theta must be a number or scaled"),
        ("sinusoidal:theta=len", "theta must be a number or length"),
        ("wavelet:kind=mexican", "unknown wavelet kind .* known: ricker, gaussian, morlet, haar"),
        ("wavelet:kind=1", "kind must be a string"),
        ("wavelet:scales=0", "scales must be at least 1"),
        ("wavelet:scales=8.0", "scales must be an integer"),
        ("wavelet:scales=all", "scales must be an integer"),
        ("wavelet:scales=1+0", "scales must be above 0"),
        ("wavelet:scales=x+1", "scales must be a number"),
        ("wavelet:scales=1+x", "unknown encoding 'x'"),  # a part
        ("wavelet:min_scale=0", "min_scale must be above 0"),
        ("wavelet:scales=2000", "must be finite in float64"),
        ("wavelet:scales=1+2,min_scale=2", "min_scale and fixed_scale need a number of scales"),
        ("wavelet:scales=1+2,fixed_scale=true", "need a number of scales"),
        ("transformer_xl:biases=1", "biases must be true or false"),
        ("shaw:clip=0", "shaw clip must be at least 1, got 0"),
        ("shaw:clip=1000000000", "shaw clip must be at most 1048576, got 1000000000"),
        ("relative:alpha=0.2", "relative alpha=0.2 needs floor"),
        ("shaw:learned=false", "unknown option 'learned' of encoding 'shaw'"),
        ("t5:clip=3", "unknown option 'clip'"),
        ("t5:buckets=1", "t5 buckets must be at least 2, got 1"),
        ("t5:buckets=3000000000", "t5 buckets must be at most"),
        ("t5:max_distance=16", "above 16, half of the buckets; got 16"),
        ("kerple:kind=linear", "'linear'"),
        ("sandwich:dim=3", "sandwich dim must be even"),
        ("sandwich:dim=0", "sandwich dim must be at least 2"),
        ("rope:base=1e6", "unknown option 'base' of encoding 'rope'; known: theta, "),
        ("alibi:base=2", "'base' of encoding 'alibi'; "),
        # types of rope
        ("rope:type=YaRN,factor=2", "unknown rope type 'YaRN', did you mean 'yarn'"),
        ("rope:type=linear", "'linear' needs factor"),
        (f"rope:type=yarn,{ORIGINAL}=64", "'yarn' needs factor"),
        ("rope:type=longrope,short_factor=1+2", "'longrope' needs long_factor"),
        ("rope:type=longrope,long_factor=1+2", "'longrope' needs short_factor"),
        ("rope:type=llama3,factor=8", "'llama3' needs low_freq_factor, high_freq_factor"),
        ("rope:type=ntk", "'ntk'; known: default, linear, dynamic, yarn, longrope, llama3, prop"),
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
        ("rope:type=longrope,short_factor=1+2,long_factor=2+", "one value per pair, got 2 and 1"),
        ("rope:type=llama3,factor=8,low_freq_factor=4,high_freq_factor=4", "must be above low"),
        ("rope:partial_rotary_factor=1.5", "partial_rotary_factor must be a number from 0 to 1"),
        ("rope:fraction=0.5,type=default", "fraction=0.5 cannot be combined with type"),
        ("rope:fraction=0.5,type=linear,factor=2", "fraction=0.5 cannot be combined with type"),
        ("rope:fraction=0.5,partial_rotary_factor=1", "combined with partial_rotary_factor"),
        # what was meant
        ("wavlet", "unknown encoding 'wavlet', did you mean 'wavelet'"),
        ("alibi+YaRN:factor=4", "'YaRN', did you mean 'rope:type=yarn,...'"),
        *((kind, f"{kind!r}, did you mean 'rope:type={kind},...'") for kind in MINIMAL),
        ("rope:tehta=1", "'tehta' of encoding 'rope', did you mean 'theta'"),
        ("rope:rope_theta=1", "'rope_theta' of encoding 'rope', did you mean 'theta'"),
        ("rope:rope_type=linear,factor=2", "'rope_type' of encoding 'rope', did you mean 'type'"),
    ],
)
def test_refused_specs(text, message):
    with pytest.raises(ValueError, match=message):
        wavepe.encoding(text)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("rope", {"theta": "abc"}, TypeError),
        ("rope", {"theta": True}, TypeError),
        ("rope", {"theta": 1j}, TypeError),
        ("rope", {"theta": math.nan}, ValueError),
        ("rope", {"theta": -math.inf}, ValueError),
        ("rope", {"theta": 10**400}, ValueError),
        ("rope", {"fraction": None}, TypeError),
        ("rope", {"interleaved": 1}, TypeError),
        ("wavelet", {"kind": None}, TypeError),
        ("wavelet", {"scales": True}, TypeError),
        ("wavelet", {"scales": 8.0}, TypeError),
        ("wavelet", {"scales": "8"}, TypeError),
        ("wavelet", {"scales": {1, 2}}, TypeError),
        ("wavelet", {"scales": [1, "2"]}, TypeError),
        ("wavelet", {"scales": []}, ValueError),
        ("wavelet", {"scales": [1, -2]}, ValueError),
        ("wavelet", {"scales": 10**30}, ValueError),
        ("sinusoidal", {"theta": None}, TypeError),
        ("shaw", {"clip": 10**30}, ValueError),
        ("shaw", {"clip": 2.0}, TypeError),
        ("shaw", {"clip": True}, TypeError),
    ],
)
def test_wrong_option(name, options, error):
    key = next(iter(options))
    with pytest.raises(error, match=f"{name} .*{key}"):
        wavepe.encoding(name, **options)
    with pytest.raises(error, match=f"{name} .*{key}"):
        wavepe.encoding({"version": 1, "name": name, **options})


def test_known_names():
    assert set(known_encodings()) >= {"wavelet", "rope", "alibi", "sinusoidal", "none"}
    for name in known_encodings():
        assert wavepe.encoding(name).name == name
        assert str(wavepe.encoding(name)) == name
    for unknown in ("ropee", {"name": "ropee"}, {"name": 7}, {"name": ["rope"]}):
        with pytest.raises(ValueError, match="unknown encoding") as caught:
            wavepe.encoding(unknown)
        assert all(name in str(caught.value) for name in known_encodings())


@pytest.mark.parametrize("name", known_encodings())
def test_unknown_option_lists_the_known(name):
    cls = type(wavepe.encoding(name))
    known = [field.name for field in dataclasses.fields(cls)] or ["none"]
    for call in (
        lambda: wavepe.encoding(f"{name}:colour=1"),
        lambda: wavepe.encoding(name, colour=1),
        lambda: wavepe.encoding({"name": name, "colour": 1}),
    ):
        with pytest.raises(ValueError, match=f"unknown option 'colour' of encoding '{name}'") as e:
            call()
        assert all(option in str(e.value) for option in known)


@pytest.mark.parametrize("wrong", [None, 7, b"rope", ["rope"], RoPE, ("rope", {})])
def test_spec_of_wrong_type(wrong):
    with pytest.raises(TypeError, match="spec, a dict or an Encoding"):
        wavepe.encoding(wrong)


def test_options_as_arguments():
    expected = wavepe.encoding("rope:theta=128,fraction=0.5")
    assert wavepe.encoding("rope", theta=128, fraction=0.5) == expected
    assert wavepe.encoding("rope:theta=128", fraction=0.5) == expected
    assert wavepe.encoding("rope:theta=128", theta=128.0, fraction=0.5) == expected
    assert wavepe.encoding({"name": "rope", "theta": 128}, fraction=0.5) == expected
    assert wavepe.encoding(RoPE(theta=128), fraction=0.5) == expected
    assert wavepe.encoding("wavelet", scales=np.array([1, 2])) == Wavelet(scales=(1, 2))


@pytest.mark.parametrize(
    "given", ["rope:theta=128", {"name": "rope", "theta": 128}, RoPE(theta=128)]
)
def test_conflicting_argument(given):
    with pytest.raises(ValueError, match=r"theta is given twice, as 128\.0 and as 256\.0"):
        wavepe.encoding(given, theta=256)
    assert dataclasses.replace(wavepe.encoding(given), theta=256) == RoPE(theta=256)


# Round trips


@given(encodings)
@steady
def test_round_trips(encoding):
    text = str(encoding)
    again = wavepe.encoding(text)
    assert again == encoding
    assert hash(again) == hash(encoding)
    assert str(again) == text
    assert repr(again) == repr(encoding)
    data = encoding.to_dict()
    assert data["version"] == 1
    assert data["name"] == encoding.name
    assert wavepe.encoding(json.loads(json.dumps(data))) == encoding
    assert Encoding.from_dict(data) == type(encoding).from_dict(data) == encoding
    assert wavepe.encoding(encoding) is encoding
    assert pickle.loads(pickle.dumps(encoding)) == encoding == copy.deepcopy(encoding)


words = st.from_regex(spec._WORD, fullmatch=True)
values = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words


@dataclasses.dataclass(frozen=True)
class Holder(Encoding):
    name = "holder"
    value: object = None


@given(values | st.lists(values, min_size=1, max_size=4).map(tuple))
@steady
def test_written_values_read_back_or_are_refused(value):
    try:
        held = Holder(value)
    except ValueError:  # only text that reads as something else, or as a further part
        parts = value if isinstance(value, tuple) else (value,)
        assert any(isinstance(part, str) for part in parts) or any(
            isinstance(part, bool) for part in parts[1:]
        )
    else:
        assert held.value == value
        assert spec.split_spec(str(held)) == [(str(held), None)]
        assert spec.read_spec(str(held)) == ("holder", {"value": value})


@given(st.text(alphabet="ab1.+-=,:e tru", max_size=16))
@steady
def test_any_text_is_read_or_refused(text):
    try:
        name, options = spec.read_spec(text)
    except ValueError:
        return
    assert spec.read_spec(spec.write_spec(name, options)) == (name, options)


@given(st.text(max_size=12), st.text(max_size=12))
@steady
def test_no_text_crashes(name, value):
    for text in (name, f"rope:{name}", f"rope:theta={value}", f"wavelet:scales={value}"):
        try:
            encoding = wavepe.encoding(text)
        except ValueError:
            continue
        assert wavepe.encoding(str(encoding)) == encoding


def test_dicts():
    assert wavepe.encoding("shaw:clip=4").to_dict() == {"version": 1, "name": "shaw", "clip": 4}
    assert wavepe.encoding("shaw:clip=16").to_dict() == {"version": 1, "name": "shaw"}
    assert wavepe.encoding({"name": "rope", "theta": 128}) == RoPE(theta=128)
    assert wavepe.encoding({"version": 1, "name": "rope", "theta": None}) == RoPE()
    for version in (0, 2, "1", None, True, 1.0):
        with pytest.raises(ValueError, match="version 1"):
            wavepe.encoding({"version": version, "name": "rope"})
    with pytest.raises(ValueError, match="'name'"):
        wavepe.encoding({"version": 1})
    with pytest.raises(ValueError, match=r"RoPE\.from_dict needs a rope, got 'alibi'"):
        RoPE.from_dict({"version": 1, "name": "alibi"})
    with pytest.raises(TypeError, match="mapping"):
        Encoding.from_dict("rope")
    data = {"version": 1, "name": "wavelet", "scales": [1, 2]}
    wavepe.encoding(data, kind="haar")
    assert data == {"version": 1, "name": "wavelet", "scales": [1, 2]}, "left as it was"


# Objects


def test_equal_options_make_equal_objects():
    assert RoPE(theta=128) == RoPE(theta=128.0) == RoPE(theta=np.float32(128))
    assert Wavelet(scales=[1, 2]) == Wavelet(scales=(1.0, 2.0)) == Wavelet(scales=np.array([1, 2]))
    assert RoPE() != RoPE(theta=10000)
    assert ALiBi() != NoPE()
    assert len({RoPE(), RoPE(theta=128), RoPE(theta=128.0), ALiBi(), NoPE()}) == 4


def test_objects_do_not_change():
    encoding = RoPE(theta=128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoding.theta = 256
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoding.other = 1
    scales = [1, 2]
    wavelet = Wavelet(scales=scales)
    scales.append(4)
    assert wavelet.scales == (1.0, 2.0)
