"""Combinations of encodings: their specs, their arrays, and what modules compute with them."""

import itertools
import json
import pickle
import random

import numpy as np
import pytest
import wavepe
from cases import every
from encoding_cases import ASKED, KINDS, LEARNED, combinations, name_of

encoding = wavepe.encoding


# --------------------------------------------------------------- specs
@pytest.mark.parametrize(
    ("spec", "parts", "layers"),
    [
        ("rope+alibi", ("rope", "alibi"), (None, None)),
        ("wavelet:scales=1+2+8+alibi", ("wavelet:scales=1+2+8", "alibi"), (None, None)),
        ("wavelet:scales=8++alibi", ("wavelet:scales=8+", "alibi"), (None, None)),
        ("alibi+wavelet:scales=1+2", ("alibi", "wavelet:scales=1+2"), (None, None)),
        ("rope:theta=1e20+none@5", ("rope:theta=1e20", "none"), None),
        ("rope@::2+wavelet@1::2", ("rope", "wavelet"), ("::2", "1::2")),
        ("rope+wavelet@-4:", ("rope", "wavelet"), (None, "-4:")),
        ("alibi@0.2.5", ("alibi",), ("0.2.5",)),
        ("rope:theta=5@::2+rope@1::2", ("rope:theta=5", "rope"), ("::2", "1::2")),
        ("sinusoidal+alibi@0", ("sinusoidal", "alibi"), (None, "0")),
    ],
)
def test_specs(spec, parts, layers):
    if layers is None:  # "none" beside another part in a layer
        with pytest.raises(ValueError, match=r"'none' is no position encoding.*'rope"):
            encoding(spec)
        return
    combination = encoding(spec)
    assert combination.parts == tuple(map(encoding, parts))
    assert combination.layers == layers
    assert str(combination) == spec
    for same in (
        encoding(str(combination)),
        encoding(combination),
        encoding(combination.to_dict()),
        type(combination).from_dict(json.loads(json.dumps(combination.to_dict()))),
        pickle.loads(pickle.dumps(combination)),
    ):
        assert same == combination
        assert hash(same) == hash(combination)
        assert str(same) == spec
    assert combination != encoding("rope")


def test_a_part_alone_is_no_combination():
    assert encoding({"version": 1, "parts": [{"name": "rope", "theta": 5}]}) == encoding(
        "rope:theta=5"
    )
    assert encoding("rope").parts == (encoding("rope"),)
    assert encoding("rope").layers == (None,)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("rope+rope:theta=5", "at most one part can rotate, got 'rope' and 'rope:theta=5'"),
        ("rope@0+rope:theta=5", "at most one part can rotate"),
        ("alibi+alibi", "a name can stand once in a combination, got 'alibi' and 'alibi'"),
        ("wavelet+wavelet:scales=4@0", "a name can stand once"),
        ("shaw@0+shaw:clip=3@1", "'shaw' and 'shaw:clip=3' are learned parts of one name"),
        ("none+alibi", "'none' is no position encoding, and the same layer has 'alibi'"),
        ("rope+none", "leave the layer out"),
        ("sinusoidal@0+rope", "'sinusoidal' is an absolute encoding.*got @0"),
        ("rope+", r"spec .* needs a name first"),
        ("rope+what", "unknown encoding 'what'.*known: "),
        ("rope+wavelet:scale=3", "unknown option 'scale' of encoding 'wavelet'"),
        ("rope@", "@ must name layers by indices or slices"),
        ("rope@x", "@x must name layers.*got 'x'"),
        ("rope@1:2:0", "slices with a step other than 0.*got '1:2:0'"),
        ("rope@1..2", "got ''"),
        ("rope@0@1", "@0@1 must name layers"),
        ("rope:fraction=.5+type=yarn", "needs a name first"),
    ],
)
def test_wrong_specs(spec, words):
    with pytest.raises(ValueError, match=words):
        encoding(spec)


def test_options_do_not_go_with_a_combination():
    with pytest.raises(ValueError, match=r"options \(theta\) do not go with the parts"):
        encoding("rope+alibi", theta=5)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"parts": []}, "a list of 'parts'"),
        ({"parts": "rope"}, "a list of 'parts'"),
        ({"parts": [{"name": "rope"}], "theta": 5}, "got the keys"),
        ({"parts": [{"name": "rope", "layers": "x"}]}, "must name layers"),
        ({"version": 2, "parts": [{"name": "rope"}]}, "needs version 1"),
    ],
)
def test_wrong_dicts(data, words):
    with pytest.raises(ValueError, match=words):
        encoding(data)


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("rope@::2+wavelet@1::2", ["rope", "wavelet"] * 3),
        ("rope+wavelet@-2:", ["rope"] * 4 + ["rope+wavelet"] * 2),
        ("alibi@0.-1", ["alibi", *["none"] * 4, "alibi"]),
        ("rope@::4+alibi@0.1", ["rope+alibi", "alibi", "none", "none", "rope", "none"]),
        ("rope@:9", ["rope"] * 6),  # a slice may reach beyond, as in Python
        ("rope@4:2:-1", ["none"] * 3 + ["rope"] * 2 + ["none"]),
        ("wavelet", ["wavelet"] * 6),
    ],
)
def test_layers(spec, wanted):
    assert [str(encoding(spec).at(layer, 6)) for layer in range(6)] == wanted


def test_layers_that_do_not_fit():
    for spec in ("rope@6", "rope@-7", "alibi@0.6"):
        with pytest.raises(ValueError, match=r"but the model has the layers 0\.\.5"):
            encoding(spec).at(0, 6)
    with pytest.raises(ValueError, match="layer must be below layers=6, got 6"):
        encoding("rope").at(6, 6)
    with pytest.raises(ValueError, match="'none' is no position encoding"):
        encoding("rope@::2+none@2").at(2, 6)
    with pytest.raises(ValueError, match="at most one part can rotate"):
        encoding("rope@::2+rope:theta=5@2").at(2, 6)


# --------------------------------------------------------------- arrays
def test_what_a_combination_does():
    combination = encoding("sinusoidal+rope+shaw+t5+alibi")
    assert (combination.adds, combination.rotates, combination.terms) == (
        True,
        True,
        ("table", "slopes", "bias"),
    )
    assert (combination.learned, combination.learns) == (True, ("table", "bias"))
    assert combination.rotary == encoding("rope")
    assert encoding("alibi+sandwich").rotary is None
    with pytest.raises(NotImplementedError, match=r"table\(\) does not apply.*slopes\(\) and bias"):
        encoding("alibi+sandwich").table(5, 8)


def test_with_part_and_trained_as():
    combination = encoding("rope:theta=5,inference_theta=9@::2+alibi")
    changed = combination.with_parts(
        lambda part: encoding("rope:theta=7") if part.rotates else part
    )
    assert str(changed) == "rope:theta=7@::2+alibi"
    assert str(combination.trained_as()) == "rope:theta=5@::2+alibi"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_arrays_are_sums(length, causal):
    combination = encoding(
        "sinusoidal+binary+rope:theta=9+wavelet:scales=4+shaw:clip=3+sandwich+t5"
    )
    parts = {part.name: part for part in combination.parts}
    got = combination.absolute(range(length), 8)
    summed = parts["sinusoidal"].absolute(range(length), 8) + parts["binary"].absolute(
        range(length), 8
    )
    assert np.array_equal(got, summed)
    for a, b in zip(combination.rope_table([3], 8), parts["rope"].rope_table([3], 8), strict=True):
        assert np.array_equal(a, b)
    deltas = np.arange(0 if causal else 1 - length, length)

    def all_rows(rows, first, beyond, axis):
        place = deltas - first
        inside = np.take(rows, place.clip(0, rows.shape[axis] - 1), axis)
        if beyond == "edge":
            return inside
        shape = (-1, 1) if axis == -2 else (-1,)
        return inside * ((place >= 0) & (place < rows.shape[axis])).reshape(shape)

    tables = [parts[name].table(length, 8, causal=causal) for name in ("wavelet", "shaw")]
    p, first, beyond = combination.table(length, 8, causal=causal)
    assert (first, beyond, p.dtype, len(p)) == (deltas[0], "zero", np.float32, len(deltas))
    assert np.array_equal(p, sum(all_rows(*table, -2) for table in tables))
    biases = [parts[name].bias(length, 3, causal=causal) for name in ("sandwich", "t5")]
    b, first, beyond = combination.bias(length, 3, causal=causal)
    assert (first, beyond, b.shape) == (deltas[0], "zero", (3, len(deltas)))
    assert np.array_equal(b, sum(all_rows(*bias, -1) for bias in biases))


def test_arrays_of_a_layer():
    combination = encoding("sinusoidal+rope+alibi@::2")
    assert combination.absolute([1], 4).shape == (1, 4)  # the embeddings come before all layers
    assert combination.rope_table([1], 4)[0].shape == (1, 2)
    with pytest.raises(ValueError, match=r"slopes\(\) needs one layer.*encoding.at"):
        combination.slopes(2)
    assert np.array_equal(combination.at(0, 2).slopes(2), wavepe.alibi_slopes(2))


def test_parameters_have_the_names_of_their_parts():
    combination = encoding("rope+t5+" + ASKED)
    names = {"t5.b": (4, 32)} | {f"wavelet.{key}": (4, 8) for key in "uv"}
    names["wavelet.projection"] = (4, 8, 8)
    assert {key: x.shape for key, x in combination.parameters(8, 4).items()} == names
    assert combination.per_layer == ("wavelet.u", "wavelet.v", "wavelet.projection")
    assert encoding(ASKED + ",shared=true").per_layer == ()
    for others in ("", ",from_input=true"):
        with pytest.raises(ValueError, match="shared=true needs biases=true or projection=true"):
            encoding(f"wavelet:shared=true{others}")
    for other in ("biases", "projection"):
        with pytest.raises(ValueError, match="not the query: leave out biases=true and proj"):
            encoding(f"wavelet:from_input=true,{other}=true")


# --------------------------------------------------------------- modules

import torch
from nn_cases import assert_exact, made, tokens
from wavepe import ops
from wavepe.nn import AbsoluteEncoding, Attention, KVCache, SelfAttention
from wavepe.positions import Rotated

LEFT = torch.ones(2, 11, dtype=torch.bool)
LEFT[0, :3] = False
SITUATIONS = {
    "plain": {},
    "padded": {"key_mask": LEFT},
    "packed": {"segments": torch.tensor([[3] * 4 + [1] * 5 + [2] * 2, [0] * 11])},
}
PAIRS = combinations(2)
TRIPLES = random.Random(7).sample(combinations(3), 40)


@pytest.mark.parametrize("spec", [*PAIRS, *TRIPLES])
def test_the_formula(spec):
    """In every situation, causal or not, against each part alone in the float64 oracle."""
    for causal, (name, args) in itertools.product((True, False), SITUATIONS.items()):
        if spec in TRIPLES and (name != "plain" or not causal):
            continue
        module, x = made(spec, causal=causal), tokens()
        assert_exact(module(x, **args), module, x, **args)


@pytest.mark.parametrize("spec", every(2, [*PAIRS, *TRIPLES]))
def test_a_cache_gives_the_same(spec):
    module, x = made(spec), tokens()
    whole, cache = module(x), KVCache()
    with torch.no_grad():
        steps = [module(part, cache=cache) for part in x.split([5, 1, 1, 3, 1], 1)]
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["alibi", "rope", *LEARNED, ASKED, *every(2, PAIRS, 1)])
def test_gradients(spec):
    """Check those of the queries and of what is learned, by differences; each kind alone, too."""
    attention = made(spec, heads=2, kv_heads=1)
    names = [name for name, _ in attention.position_encoding.named_parameters()]
    parameters = [x.detach() for x in attention.position_encoding.parameters()]
    x = tokens(5, dim=16)[:1]

    def run(x, *values):
        given = {f"position_encoding.{k}": v for k, v in zip(names, values, strict=True)}
        return torch.func.functional_call(attention, given, (x,)).sum(-1)

    assert torch.autograd.gradcheck(
        run, (x.requires_grad_(), *(p.requires_grad_() for p in parameters)), fast_mode=True
    )


@pytest.mark.parametrize("spec", every(2, PAIRS[::30]))
def test_compiled(spec):
    """Forward and backward in one graph, for two lengths."""
    torch.compiler.reset()
    module = made(spec)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (11, 17):
        x = tokens(length).requires_grad_()
        got, wanted = compiled(x), module(x)
        assert torch.equal(got, wanted)
        grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (got, wanted)]
        assert torch.equal(*grads)


@pytest.mark.parametrize("beside", ["", "rope:theta=100+", "alibi+", "shaw:clip=3+"])
def test_initial_queries_give_plain_wavelets(beside):
    plain = beside + "wavelet:scales=4"
    both = [Attention(spec, 8, 4, 2, dtype=torch.float64) for spec in (plain, beside + ASKED)]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 9, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    assert (both[0](q, k, v) - both[1](q, k, v)).abs().max() < 1e-12


def test_names_of_parameters():
    single, several = (Attention(spec, 8, 2) for spec in (ASKED, "rope+" + ASKED))
    names = ["u", "v", "projection"]
    assert [n for n, _ in single.named_parameters()] == [f"position_encoding.{n}" for n in names]
    assert [n for n, _ in several.named_parameters()] == [
        f"position_encoding.wavelet.{n}" for n in names
    ]
    half = Attention("rope+" + ASKED, 8, 2).to(torch.bfloat16)
    assert all(x.dtype == torch.float32 for x in half.parameters())
    half.position_encoding.wavelet.u.data.fill_(1)
    half.reset_parameters()
    assert not half.position_encoding.wavelet.u.any()


def test_what_modules_refuse():
    with pytest.raises(ValueError, match=r"differs by layer.*\.at\(layer, layers\)"):
        Attention("rope@::2+alibi@1::2", 8, 2)
    with pytest.raises(ValueError, match="is absolute"):
        Attention("sinusoidal+alibi", 8, 2)
    with pytest.raises(ValueError, match=r"must be absolute.*'alibi', belongs in wavepe.nn.A"):
        AbsoluteEncoding("sinusoidal+alibi", 8)
    added = AbsoluteEncoding("sinusoidal+binary", 8)(torch.zeros(1, 5, 8))
    assert torch.equal(
        added[0], torch.from_numpy(encoding("sinusoidal+binary").absolute(range(5), 8)).float()
    )


def test_every_kind_is_met():
    met = {name_of(part) for spec in PAIRS for part in spec.split("+")}
    assert met == {name_of(spec) for spec in KINDS}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_queries_are_rotated_back(interleaved, factor):
    """Also where cos and sin were rounded, as in bfloat16 models, or have a factor."""
    q = torch.randn(2, 3, 50, 16, dtype=torch.float64)
    angle = torch.rand(50, 6, dtype=torch.float64) * 6
    cos, sin = ((f(angle) * factor).bfloat16().double() for f in (torch.cos, torch.sin))
    rotated = ops.rope(q, cos, sin, interleaved=interleaved)
    found = Rotated(cos.bfloat16(), sin.bfloat16(), interleaved).unrotate(rotated)
    torch.testing.assert_close(found, q, rtol=0, atol=1e-14)


def test_one_of_two_parts_of_one_name_may_learn():
    for spec in ("wavelet@0+wavelet:learned=true@1", "wavelet:learned=true@1+wavelet@0"):
        assert encoding(spec).learns == ("table",)


def test_dicts_do_not_nest():
    inner = {"parts": [{"name": "rope", "layers": "0"}, {"name": "alibi"}]}
    with pytest.raises(ValueError, match="a part is one encoding with a 'name'"):
        encoding({"parts": [inner, {"name": "kerple"}]})


def test_parameters_are_those_of_a_part():
    with pytest.raises(NotImplementedError, match=r"learned_table\(\) takes .*'shaw\+rope'.parts"):
        encoding("shaw+rope").learned_table(5, {})
    with pytest.raises(NotImplementedError, match=r"slopes\(\) does not apply to .*'shaw\+rope'"):
        encoding("shaw+rope").slopes(2)


@pytest.mark.parametrize(
    "spec", ["kerple", "wavelet:learned=true", "wavelet+shaw", "kerple+t5", "rope"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens(spec, causal):
    layer = SelfAttention(32, 4, encoding=spec, causal=causal)
    assert layer(torch.randn(2, 0, 32)).shape == (2, 0, 32)
