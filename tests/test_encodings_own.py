"""A user's own encodings: how they are registered and checked, and the examples of the docs."""

import dataclasses
import math

import numpy as np
import pytest
import wavepe
import wavepe.encodings
from wavepe.encodings import ALiBi, Encoding, Query, RoPE, option, register_encoding


@pytest.fixture
def attention(own, torch):
    return wavepe.nn.Attention


def learner(name, initial, **methods):
    """Register a class that learns what `initial(head_dim, heads)` returns."""
    methods |= {"name": name, "learned": True, "parameters": lambda self, *sizes: initial(*sizes)}
    register_encoding(type(name.title(), (Encoding,), methods))


def test_own_encoding(own):
    @register_encoding
    class Even(Encoding):
        name = "even"
        slope: float = 0.1

        def slopes(self, heads):
            return np.full(heads, self.slope)

    encoding = wavepe.encoding("even:slope=1")
    assert encoding == Even(1.0) != Even()
    assert str(encoding) == "even:slope=1"
    assert wavepe.encoding(encoding.to_dict()) == encoding == encoding.trained_as()
    assert (encoding.terms, encoding.learns) == (("slopes",), ())
    assert (encoding.adds, encoding.rotates) == (False, False)
    np.testing.assert_array_equal(encoding.slopes(3), [1.0, 1.0, 1.0])
    assert wavepe.encodings.known_encodings()[-1] == "even"
    with pytest.raises(ValueError, match="even slope must be a number"):
        wavepe.encoding("even:slope=steep")
    with pytest.raises(NotImplementedError, match="'even:slope=1'"):
        encoding.table(3, 8)
    register_encoding(Even)  # once more is fine


def test_learned_may_be_a_constant_or_an_option(own):
    @register_encoding
    class Trained(Encoding):
        name = "trained"
        learned: bool = True

        def bias(self, length, heads, *, causal=True):
            return np.zeros((heads, 1)), 0, "edge"

        def parameters(self, head_dim, heads):
            return {"b": np.zeros((heads, 1))}

        def learned_bias(self, length, parameters, *, causal=True):
            return parameters["b"], 0, "edge"

    cases = {"trained": ("bias",), "trained:learned=false": (), "shaw": ("table",), "alibi": ()}
    for spec, learns in cases.items():
        assert wavepe.encoding(spec).learned is bool(learns)
        assert wavepe.encoding(spec).learns == learns


def test_own_rotary_encoding(own):
    @register_encoding
    class Halved(RoPE):
        name = "halved"

        def frequencies(self, head_dim, **lengths):
            inv_freq, factor = super().frequencies(head_dim, **lengths)
            return inv_freq / 2, factor

    encoding = wavepe.encoding("halved:theta=100,inference_theta=scaled")
    dynamic = wavepe.encoding("halved:theta=100,type=dynamic,factor=2")
    assert str(encoding.trained_as()) == str(dynamic.trained_as()) == "halved:theta=100"
    assert encoding != wavepe.encoding("rope:theta=100,inference_theta=scaled")
    table = encoding.rope_table(np.arange(20), 16, trained_length=10)
    angle = np.arange(20)[:, None] * 200.0 ** (-np.arange(8) / 8) / 2
    np.testing.assert_allclose(table, (np.cos(angle), np.sin(angle)), rtol=0, atol=2**-23)


def test_own_options_are_checked(own):
    def even(label, value):
        if value % 2:
            raise ValueError(f"{label} must be even, got {value!r}")
        return value

    @register_encoding
    @dataclasses.dataclass(frozen=True)
    class Checked(Encoding):
        name = "checked"
        entry = "none"  # as wavepe 0.1 wanted it; it means nothing
        count: int = 1
        wide: bool = False
        title: str = "plain"
        sizes: tuple = (1, 2.5)
        free: object = None
        pairs: int = option(2, even)

        def slopes(self, heads):
            return np.zeros(heads)

    options = {"count": 3, "wide": True, "title": "x-1", "sizes": ("a", 2.5), "free": 2.5}
    encoding = wavepe.encoding("checked", **options, pairs=4)
    assert encoding.options() == {**options, "pairs": 4}
    assert encoding.terms == ("slopes",)
    text = "checked:count=3,wide=true,title=x-1,sizes=a+2.5,free=2.5,pairs=4"
    assert str(encoding) == text
    assert wavepe.encoding(text) == encoding
    for key, wrong, error in [
        ("count", 1.0, TypeError),
        ("count", True, TypeError),
        ("wide", 0, TypeError),
        ("title", 1, TypeError),
        ("title", "two words", ValueError),
        ("title", "1", ValueError),
        ("title", "true", ValueError),
        ("title", "a@b", ValueError),
        ("title", "", ValueError),
        ("title", None, TypeError),
        ("sizes", (), ValueError),
        ("sizes", ((1, 2), 3), TypeError),
        ("sizes", ("1e", 5), ValueError),
        ("sizes", (1, "a"), ValueError),  # "1+a" would be two parts
        ("sizes", (1, True), ValueError),
        ("sizes", "ab", TypeError),
        ("free", math.inf, ValueError),
        ("free", {}, TypeError),
        ("pairs", 3, ValueError),
    ]:
        with pytest.raises(error, match=f"checked {key} must be"):
            wavepe.encoding("checked", **{key: wrong})


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ({"name": "a:b"}, ValueError, "no blank and no : , = \\+ @; got 'a:b'"),
        ({"name": "a@b"}, ValueError, "no blank and no"),
        ({"name": "a b"}, ValueError, "no blank"),
        ({"name": ""}, ValueError, "no blank"),
        ({"name": None}, ValueError, "got None"),
        ({"name": "rope"}, ValueError, "'rope' is taken"),
        (
            {"slopes": None},
            TypeError,
            "needs one of the methods absolute, rope_table, table, slopes, bias, temperature, "
            "score_vectors, window, learned_table, learned_bias, learned_query, learned_sinks, "
            "input_query, input_decay",
        ),
        ({"rope_table": len}, TypeError, "derive it from RoPE"),
        ({"options": [("size", int)]}, TypeError, "size needs a default"),
        ({"options": [("table", int, 1)]}, TypeError, "not be called table"),
        ({"options": [("version", int, 1)]}, TypeError, "not be called version"),
        ({"options": [("size", str, "a,b")]}, ValueError, "own size must be"),
        ({"parameters": len}, TypeError, r"has parameters\(\) and needs learned = True"),
        ({"parameters": len, "learned_bias": len}, TypeError,
         r"has learned_bias\(\) and needs learned = True"),
        *(
            (
                {"learned": True, method: len},
                TypeError,
                r"needs parameters\(\) and one of learned_table, learned_bias, learned_query",
            )
            for method in ("slopes", "parameters", "learned_table", "learned_query")
        ),
        ({"options": [("learned", bool, True)]}, TypeError, r"learned and needs parameters\(\)"),
        ({"learned": True, "parameters": len, "input_decay": len}, TypeError,
         r"input_decay\(\), which each layer calls: name its parameters in per_layer"),
        ({"learned": True, "parameters": len, "input_query": len, "per_layer": ("w",)}, TypeError,
         r"has input_query\(\) and needs table\(\) or learned_table\(\)"),
        ({"per_layer": "u"}, TypeError, "per_layer must be a tuple of names, got 'u'"),
    ],
)  # fmt: skip
def test_unfit_own_class(own, body, error, message):
    before = wavepe.encodings.known_encodings()
    body = {"name": "own", "slopes": len, "options": (), **body}
    options = body.pop("options")
    body = {key: value for key, value in body.items() if value is not None}
    cls = dataclasses.make_dataclass("Own", options, bases=(Encoding,), frozen=True, namespace=body)
    with pytest.raises(error, match=message):
        register_encoding(cls)
    assert wavepe.encodings.known_encodings() == before


def test_what_is_no_class_of_an_encoding(own):
    for wrong in (ALiBi(), int):
        with pytest.raises(TypeError, match="class derived from Encoding"):
            register_encoding(wrong)


@pytest.mark.parametrize("name", ["u", "v", "projection"])
def test_queries_of_other_shapes_are_refused(attention, torch, name):
    """They would be added as they broadcast, along the tokens."""

    def learned_query(self, parameters):
        return Query(**{name: parameters["x"]})

    learner("flat", lambda size, _: {"x": np.ones(size)}, learned_query=learned_query)
    q = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match=rf"'flat': learned_query must return {name} of shape"):
        attention("flat", 8, 2)(q, q, q)


def test_layers_that_read_their_input_have_parameters(attention):
    learner("all", dict, input_sinks=len, per_layer=property(lambda self: ()))
    with pytest.raises(ValueError, match="'all' reads the input of each layer and needs per_layer"):
        attention("all", 8, 2, dim=4)


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        ("table", r"Table\(p, first, beyond\), got ndarray"),
        ("bias", r"Bias\(b, first, beyond\), got ndarray"),
        ("learned_table", r"Table\(p, first, beyond\), got Parameter"),
        ("learned_bias", r"Bias\(b, first, beyond\), got Parameter"),
        ("learned_query", r"Query\(u, v, projection\), got Parameter"),
    ],
)
def test_arrays_without_their_range_are_refused(attention, torch, method, needed):
    class Bare(Encoding):
        name = "bare"

        def parameters(self, head_dim, heads):
            return {"x": np.ones((heads, head_dim))}

    def wrong(self, *args, **options):
        return next((x for x in args if isinstance(x, dict)), {}).get("x", np.ones((3, 8)))

    setattr(Bare, method, wrong)
    Bare.learned = method.startswith("learned")
    if not Bare.learned:
        del Bare.parameters
    register_encoding(Bare)
    q = torch.zeros(1, 2, 8, 8)
    with pytest.raises(TypeError, match=rf"'bare': {method}\(\) must return {needed}"):
        attention("bare", 8, 2)(q, q, q)


@pytest.mark.parametrize("slopes", [[1.0], [1.0, math.nan], [1.0, -1e39], 1.0], ids=str)
def test_slopes_that_do_not_fit_are_refused(attention, slopes):
    register_encoding(type("Odd", (ALiBi,), {"name": "o", "slopes": lambda *_: slopes}))
    with pytest.raises(ValueError, match=r"'o': slopes\(\) must be 2 finite float32 numbers, got"):
        attention("o", 8, 2)


def asking(name):
    """Register `asked`, which learns u or v alone."""
    learner("asked", lambda *d: {name: np.zeros(d[::-1])}, learned_query=lambda _, x: Query(**x))


def test_tables_of_heads_have_a_first_one(own, torch):
    def learned_table(self, length, parameters, *, causal=True):
        return parameters["x"], 0, "zero"

    def initial(size, heads):
        return {"x": np.arange(heads * 3.0 * size).reshape(heads, 3, size)}

    learner("each", initial, learned_table=learned_table)
    np.testing.assert_array_equal(wavepe.encoding("each").table(3, 2).p, [[0, 1], [2, 3], [4, 5]])


def test_an_encoding_that_learns_queries_alone_is_one(own):
    """It adds no term, and is no "none": it may stand beside others, and in layers of its own."""
    asking("u")
    both = wavepe.encoding("alibi+asked")
    assert (both.terms, both.learns, both.in_attention) == (("slopes",), ("query",), True)
    with pytest.raises(ValueError, match=r"'none' is no position encoding.*'asked'"):
        wavepe.encoding("none+asked")
    pytest.importorskip("transformers")
    from wavepe.hf.layers import LayerEncodings

    found = LayerEncodings("alibi+asked@1:").by_layer([True, True, False, False])
    assert [str(one) for one in found] == ["alibi", "alibi+asked", "asked", "asked"]


@pytest.mark.parametrize("name", ["2d", "_x", "a.b"])
def test_names_that_cannot_be_parts(own, name):
    """ "rope+2d" is a list, and torch names no module "a.b"."""
    register_encoding(type("Named", (ALiBi,), {"name": name}))
    assert str(wavepe.encoding(name)) == name
    with pytest.raises(ValueError, match=f"begin with a letter and hold no dot, got '{name}'"):
        wavepe.encoding({"parts": [{"name": "rope"}, {"name": name}]})


@pytest.mark.parametrize("spec", ["edged", "edged+alibi", "edged+t5", "edged+sandwich"])
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ((np.zeros((2, 3)), 0, "Edge"), ValueError, "beyond 'zero' or 'edge', got beyond='Edge'"),
        ((np.zeros((2, 3)), 0.5, "edge"), TypeError, "an integer first, got first=0.5"),
        ((np.zeros((1, 3)), 0, "edge"), ValueError, r"of shape \(2, w\), got \(1, 3\)"),
    ],
)
def test_wrong_rows_are_refused(attention, spec, returned, error, message):
    """Alone and in sums, which would broadcast them."""
    register_encoding(
        type("Edged", (Encoding,), {"name": "edged", "bias": lambda self, *_, **__: returned})
    )
    with pytest.raises(error, match=message):
        attention(spec, 8, 2)


def test_u_alone_does_not_reach_the_table_of_another_part(attention, torch):
    asking("u")
    module = attention("asked+wavelet:scales=2", 8, 2)
    u = module.position_encoding.asked.u.data.normal_()
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    p = torch.from_numpy(wavepe.encoding("wavelet:scales=2").table(5, 8).p).float()
    want = wavepe.ops.attention(q + u[:, None], k, v, p=p, q_rel=q)
    torch.testing.assert_close(module(q, k, v), want)


def test_queries_need_what_reads_them(attention, torch):
    asking("v")
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"'asked': .* queries of a table, and .* has no"):
        attention("asked", 8, 2)(q, q, q)


def test_names_that_modules_have(attention):
    def learned_bias(self, length, parameters, *, causal=True):
        return next(iter(parameters.values()))[:, None], 0, "edge"

    for name, parameter in (("half", "x"), ("plain", "half")):
        learner(name, lambda *_, x=parameter: {x: np.zeros(2)}, learned_bias=learned_bias)
        with pytest.raises(ValueError, match="cannot be called 'half'"):
            attention(f"alibi+{name}", 8, 2)


def test_an_encoding_of_two_kinds_has_no_module(attention):
    """It would lose one of the two in silence."""
    from wavepe.nn import AbsoluteEncoding

    class Both(ALiBi):
        name = "both"

        def absolute(self, positions, dim, *, length=None, trained_length=None):
            return np.zeros((*np.shape(positions), dim))

    register_encoding(Both)
    with pytest.raises(ValueError, match="absolute and nothing else, got 'both'"):
        AbsoluteEncoding("both", 8)
    with pytest.raises(ValueError, match="'both' is absolute"):
        attention("both", 8, 2)


@pytest.mark.parametrize("spec", ["shaw:clip=3", "t5:buckets=8,max_distance=12"])
def test_sums_have_what_their_parts_have_for_later_keys(own, torch, hf, spec):
    """A mask of one's own may show later keys to a causal model (a prefix)."""

    class Zeros(Encoding):
        name = "zeros"

        def table(self, length, head_dim, *, causal=True):
            return np.zeros((3, head_dim), np.float32), 0, "zero"

        def bias(self, length, heads, *, causal=True):
            return np.zeros((heads, 1)), 0, "edge"

    register_encoding(Zeros)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:5, :5] = True
    args = {"attention_mask": mask[None, None], "use_cache": False}
    found = []
    for one in (spec, f"{spec}+zeros"):
        model = hf.patched_tiny(one)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "position_encoding." in name:
                    value.copy_(torch.arange(value.numel()).view_as(value).sin())
        found.append(hf.logits(model, hf.tokens(1, 12), **args))
    assert hf.close(*found, 1e-5)
