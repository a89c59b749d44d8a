"""Transformer-XL's encoding [X]: sine waves of the distance, projected per head, and u and v."""

import dataclasses

import numpy as np
import pytest
import wavepe
from wavepe.encodings import TransformerXL

PLAIN = "transformer_xl:biases=false"


def waves(delta, dim):
    """METHODS 4: sin and cos of delta * 10000^(-2i/dim), interleaved."""
    angle = np.asarray(delta)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(-1, dim)


def printed_scores(q, k, parameters, offset):
    """[X] as printed, of one batch row: (q + u).k + (q + v).r, before the division by sqrt(d)."""
    heads, queries, dim = q.shape
    keys = k.shape[1]
    out = np.empty((heads, queries, keys))
    for h in range(heads):
        for i in range(queries):
            for j in range(keys):
                r = waves([i + offset - j], heads * dim)[0] @ parameters["W_r"][h]
                content = (q[h, i] + parameters["u"][h]) @ k[h, j]
                out[h, i, j] = content + (q[h, i] + parameters["v"][h]) @ r
    return out


# ------------------------------------------------------------------ the encoding


def test_specs():
    encoding = wavepe.encoding("transformer_xl")
    assert str(wavepe.encoding("transformer_xl:biases=true")) == "transformer_xl"
    assert encoding == TransformerXL(biases=True) == encoding.trained_as()
    assert encoding.to_dict() == {"version": 1, "name": "transformer_xl"}
    plain = wavepe.encoding(PLAIN)
    assert str(plain) == PLAIN
    assert wavepe.encoding(plain.to_dict()) == plain != encoding
    assert (encoding.learned, plain.learned) == (True, False)
    assert [field.name for field in dataclasses.fields(encoding)] == ["biases"]
    with pytest.raises(TypeError, match="biases must be true or false"):
        TransformerXL(biases=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 2), (9, 6), (300, 64)])
def test_plain_table_is_the_formula(length, head_dim, causal):
    p, first, beyond = wavepe.encoding(PLAIN).table(length, head_dim, causal=causal)
    assert (first, beyond, p.dtype) == (0 if causal else 1 - length, "zero", np.float32)
    want = waves(np.arange(first, length), head_dim)
    assert p.shape == want.shape
    np.testing.assert_allclose(p, want, rtol=0, atol=2**-24)
    learned = wavepe.encoding("transformer_xl").table(length, head_dim, causal=causal)
    assert np.array_equal(learned[0], p)  # what its first head begins with
    assert learned[1:] == (first, beyond)


@pytest.mark.parametrize(("head_dim", "heads"), [(2, 1), (6, 4), (8, 3)])
def test_initial_parameters(head_dim, heads):
    encoding = wavepe.encoding("transformer_xl")
    parameters = encoding.parameters(head_dim, heads)
    shapes = {"u": (heads, head_dim), "v": (heads, head_dim)}
    shapes["W_r"] = (heads, heads * head_dim, head_dim)
    assert {name: value.shape for name, value in parameters.items()} == shapes
    assert all(value.dtype == np.float64 for value in parameters.values())
    assert not parameters["u"].any()
    assert not parameters["v"].any()
    assert parameters["u"] is not parameters["v"]
    # Head h begins with the waves of pairs h, h + heads, h + 2 heads, ...: as large as all waves.
    r = waves(np.arange(20), heads * head_dim) @ parameters["W_r"]
    for head in range(heads):
        pair = head + heads * np.arange(head_dim // 2)
        angle = np.arange(20)[:, None] * 10000.0 ** (-2 * pair / (heads * head_dim))
        assert np.abs(r[head, :, 0::2] - np.sin(angle)).max() < 1e-14
        assert np.abs(r[head, :, 1::2] - np.cos(angle)).max() < 1e-14
    assert np.abs(r[0] - waves(np.arange(20), head_dim)).max() < 1e-14
    square = np.concatenate(list(parameters["W_r"]), axis=1)
    assert np.array_equal(square @ square.T, np.eye(heads * head_dim))
    again = encoding.parameters(head_dim, heads)
    assert all(np.array_equal(parameters[name], again[name]) for name in shapes)


def test_without_biases_nothing_is_learned():
    encoding = wavepe.encoding(PLAIN)
    assert encoding.query_biases({}) is None
    with pytest.raises(NotImplementedError, match=f"{PLAIN}' *: it learns nothing"):
        encoding.parameters(8, 2)
    with pytest.raises(NotImplementedError, match="it learns no table"):
        encoding.learned_table(3, {})


def test_query_biases_are_the_parameters():
    parameters = wavepe.encoding("transformer_xl").parameters(4, 2)
    u, v = wavepe.encoding("transformer_xl").query_biases(parameters)
    assert u is parameters["u"]
    assert v is parameters["v"]
    for spec in ("wavelet", "rope", "alibi", "shaw", "none"):
        assert wavepe.encoding(spec).query_biases({}) is None


@pytest.mark.parametrize("spec", ["transformer_xl", PLAIN])
@pytest.mark.parametrize(
    ("length", "head_dim", "error", "message"),
    [
        (0, 8, ValueError, "transformer_xl length must be at least 1"),
        (2.0, 8, TypeError, "transformer_xl length must be an integer"),
        (2, 7, ValueError, "transformer_xl head_dim must be even, got 7"),
        (2, 0, ValueError, "transformer_xl head_dim must be at least 2"),
    ],
)
def test_wrong_sizes(spec, length, head_dim, error, message):
    with pytest.raises(error, match=message):
        wavepe.encoding(spec).table(length, head_dim)


def test_wrong_sizes_of_parameters():
    with pytest.raises(ValueError, match="head_dim must be even"):
        wavepe.encoding("transformer_xl").parameters(5, 2)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        wavepe.encoding("transformer_xl").parameters(4, 0)


# ------------------------------------------------------------------ in torch


def trained(torch, head_dim, heads, seed=0):
    """Parameters that are not the initial ones."""
    rng = np.random.default_rng(seed)
    start = wavepe.encoding("transformer_xl").parameters(head_dim, heads)
    return {
        name: torch.from_numpy(value + 0.3 * rng.normal(size=value.shape)).requires_grad_()
        for name, value in start.items()
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "heads", "length"), [(2, 1, 1), (4, 3, 9), (8, 2, 70)])
def test_table_is_the_formula(torch, head_dim, heads, length, causal):
    parameters = trained(torch, head_dim, heads)
    encoding = wavepe.encoding("transformer_xl")
    p, first, beyond = encoding.learned_table(length, parameters, causal=causal)
    assert (first, beyond) == (0 if causal else 1 - length, "zero")
    want = waves(np.arange(first, length), heads * head_dim) @ parameters["W_r"].detach().numpy()
    assert p.shape == want.shape == (heads, length - first, head_dim)
    assert np.abs(p.detach().numpy() - want).max() < 1e-13
    low, _, _ = encoding.learned_table(
        length, {name: x.detach().float() for name, x in parameters.items()}, causal=causal
    )
    assert low.dtype == torch.float32
    assert np.abs(low.numpy() - want).max() < 2e-6 * np.abs(want).max()
    narrow, _, _ = encoding.learned_table(
        length, {name: x.detach().bfloat16() for name, x in parameters.items()}, causal=causal
    )
    assert narrow.dtype == torch.bfloat16
    assert np.abs(narrow.double().numpy() - want).max() < 2**-5 * np.abs(want).max()


def test_derivative_of_the_table(torch):
    projection = trained(torch, 4, 2)["W_r"]

    def table(projection):
        return wavepe.encoding("transformer_xl").learned_table(5, {"W_r": projection})[0]

    assert torch.autograd.gradcheck(table, (projection,))


def test_scores_and_gradients_of_every_parameter(torch):
    """Against [X]'s formula, and its differences; from the initial values on."""
    encoding, rng = wavepe.encoding("transformer_xl"), np.random.default_rng(4)
    heads, length, dim = 2, 5, 4
    q, k = (rng.normal(size=(heads, length, dim)) for _ in range(2))
    grad = np.tril(rng.normal(size=(heads, length, length)))
    initial = {
        name: torch.from_numpy(value).requires_grad_()
        for name, value in encoding.parameters(dim, heads).items()
    }
    for parameters in (initial, trained(torch, dim, heads)):
        p, first, beyond = encoding.learned_table(length, parameters)
        u, v = encoding.query_biases(parameters)
        queries, keys = torch.from_numpy(q), torch.from_numpy(k)
        content = (queries + u[:, None]) @ keys.mT
        position = wavepe.ops.relative_bias(
            queries + v[:, None], p, length, first=first, beyond=beyond
        )
        values = {name: x.detach().numpy() for name, x in parameters.items()}
        want = np.tril(printed_scores(q, k, values, 0))
        assert np.abs((content + position).tril().detach().numpy() - want).max() < 1e-12
        (content + position).backward(torch.from_numpy(grad))
        for name, parameter in parameters.items():
            place = np.unravel_index(int(parameter.grad.abs().argmax()), parameter.shape)
            changed = []
            for step in (1e-4, -1e-4):  # the scores are linear in each parameter
                other = {key: value.copy() for key, value in values.items()}
                other[name][place] += step
                changed.append((printed_scores(q, k, other, 0) * grad).sum())
            slope = (changed[0] - changed[1]) / 2e-4
            assert abs(slope) > 1e-3, "trainable from its first value on"
            assert parameter.grad[place].item() == pytest.approx(slope, rel=1e-8)


def test_waves_that_a_tracer_asked_for_first():
    """Later calls take no tensor of the tracer's, and the tracer none of theirs."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from wavepe.encodings._waves import sine_waves

    dim = 34  # that no other test asks for
    for _ in range(2):
        with FakeTensorMode():
            assert sine_waves(0, 5, dim, torch.empty(1)).shape == (5, dim)
        found = sine_waves(0, 5, dim, torch.empty(1))
        assert type(found) is torch.Tensor
        np.testing.assert_allclose(found, wavepe.sinusoidal(np.arange(5), dim), atol=1e-6)
