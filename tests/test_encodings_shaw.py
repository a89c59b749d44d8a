"""Shaw's table [S]: rows by clipped distance, from the spec to torch and its gradients."""

import dataclasses

import numpy as np
import pytest
import wavepe
from wavepe.encodings import Shaw


def shaw_term(q, table, clip, queries, keys):
    """[S] as printed: q_i . a_clip(j - i), query i standing at i + keys - queries."""
    out = np.empty((queries, keys))
    for i in range(queries):
        for j in range(keys):
            place = j - (i + keys - queries)
            out[i, j] = q[i] @ table[min(max(place, -clip), clip) + clip]
    return out


# ------------------------------------------------------------------ the encoding


def test_specs():
    assert Shaw().clip == 16
    assert str(wavepe.encoding("shaw:clip=16")) == "shaw"
    encoding = wavepe.encoding("shaw:clip=4")
    assert encoding == Shaw(clip=4) == encoding.trained_as()
    assert wavepe.encoding(str(encoding)) == encoding
    assert wavepe.encoding(encoding.to_dict()) == encoding
    assert encoding.to_dict() == {"version": 1, "name": "shaw", "clip": 4}
    assert encoding.learned
    assert encoding.entry == "relative"


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        (0, ValueError, "shaw clip must be at least 1, got 0"),
        (-3, ValueError, "shaw clip must be at least 1, got -3"),
        (10**9, ValueError, "shaw clip must be at most 1048576, got 1000000000"),
        (10**30, ValueError, "shaw clip"),
        (2.0, TypeError, "shaw clip must be an integer"),
        (True, TypeError, "shaw clip must be an integer"),
    ],
)
def test_wrong_clips(clip, error, message):
    with pytest.raises(error, match=message):
        wavepe.encoding("shaw", clip=clip)


def test_learned_is_no_option():
    assert [field.name for field in dataclasses.fields(Shaw)] == ["clip"]
    with pytest.raises(ValueError, match="unknown option 'learned' of encoding 'shaw'"):
        wavepe.encoding("shaw:learned=false")


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("clip", "head_dim"), [(1, 3), (16, 8)])
def test_initial_parameters(clip, head_dim, heads):
    encoding = Shaw(clip)
    parameters = encoding.parameters(head_dim, heads)
    assert list(parameters) == ["table"]
    table = parameters["table"]
    assert (table.dtype, table.shape) == (np.float64, (2 * clip + 1, head_dim))
    assert np.array_equal(table, encoding.parameters(head_dim, heads)["table"])
    # Row n - m + clip is the sine waves of m - n.
    assert np.abs(table - sines(np.arange(clip, -clip - 1, -1), head_dim)).max() < 1e-14


def sines(delta, dim):
    """METHODS 4, with the last sine of an odd size left without its cosine."""
    pair = np.arange(dim) // 2
    angle = delta[:, None] * 10000.0 ** (-2.0 * pair / (dim + dim % 2))
    return np.where(np.arange(dim) % 2 == 0, np.sin(angle), np.cos(angle))


@pytest.mark.parametrize("length", [1, 2, 40])
def test_initial_table(length):
    encoding = Shaw(4)
    initial = encoding.parameters(6, 1)["table"].astype(np.float32)
    p, first, beyond = encoding.table(length, 6)
    assert (p.dtype, first, beyond) == (np.float32, 0, "edge")
    assert np.array_equal(p, [initial[4 - delta] for delta in range(5)])
    p, first, beyond = encoding.table(length, 6, causal=False)
    assert (p.dtype, first, beyond) == (np.float32, -4, "edge")
    assert np.array_equal(p, [initial[4 - delta] for delta in range(-4, 5)])


@pytest.mark.parametrize(
    ("length", "head_dim", "error", "message"),
    [
        (0, 8, ValueError, "shaw length must be at least 1"),
        (2.0, 8, TypeError, "shaw length must be an integer"),
        (2, 0, ValueError, "shaw head_dim must be at least 1"),
    ],
)
def test_wrong_sizes(length, head_dim, error, message):
    with pytest.raises(error, match=message):
        Shaw().table(length, head_dim)


def test_no_query_biases():
    assert Shaw().query_biases({}) is None


# ------------------------------------------------------------------ in torch


def trained(torch, clip, head_dim, seed=0):
    """A table that is not the initial one."""
    values = np.random.default_rng(seed).normal(size=(2 * clip + 1, head_dim))
    return torch.from_numpy(values).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("clip", [1, 3, 16])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (7, 7), (4, 30)])
def test_scores_are_the_printed_ones(torch, clip, causal, queries, keys):
    table, rng = trained(torch, clip, 6), np.random.default_rng(1)
    q = rng.normal(size=(queries, 6))
    p, first, beyond = Shaw(clip).learned_table(keys, {"table": table}, causal=causal)
    assert beyond == "edge"
    got = wavepe.relative_bias(q, p.detach().numpy(), keys, first=first, beyond=beyond)
    want = shaw_term(q, table.detach().numpy(), clip, queries, keys)
    seen = np.tri(queries, keys, keys - queries, dtype=bool) if causal else np.ones_like(want, bool)
    assert np.abs(got - want)[seen].max() < 1e-13


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_the_rows_that_were_met(torch, causal):
    encoding, table, length = Shaw(3), trained(torch, 3, 4), 9
    rng = np.random.default_rng(2)
    q, grad = rng.normal(size=(length, 4)), rng.normal(size=(length, length))
    if causal:
        grad = np.tril(grad)
    p, first, beyond = encoding.learned_table(length, {"table": table}, causal=causal)
    out = wavepe.ops.relative_bias(torch.from_numpy(q), p, length, first=first, beyond=beyond)
    out.backward(torch.from_numpy(grad))
    want = np.zeros((7, 4))
    for i in range(length):
        for j in range(length):
            want[min(max(j - i, -3), 3) + 3] += grad[i, j] * q[i]
    assert np.abs(table.grad.numpy() - want).max() < 1e-13
    assert table.grad[:4].all()
    assert causal != bool(table.grad[4:].any())  # the rows of the future


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_and_initial_values(torch, dtype):
    dtype = getattr(torch, dtype)
    encoding = Shaw(4)
    initial = torch.from_numpy(encoding.parameters(8, 2)["table"])
    for causal in (True, False):
        p, *rest = encoding.learned_table(5, {"table": initial.to(dtype)}, causal=causal)
        want, *plain = encoding.table(5, 8, causal=causal)
        assert p.dtype == dtype
        assert rest == plain
        assert torch.equal(p.float(), torch.from_numpy(want))
