"""Encodings by distance and head, t5 [T], kerple [K] and sandwich [C]: the published formulas."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import load_torch


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 40, 300])
def test_sandwich(length, causal):
    """As the appendix of [C] computes it: all positions, then the product of the matrix."""
    for heads, dim in ((12, 128), (3, 2), (8, 6)):
        i, positions = np.arange(dim // 2), np.arange(length)[:, None]
        angles = positions / 1e4 ** (2 * i / dim)
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
        matrix = (waves @ waves.T) / (np.arange(1, heads + 1) * 8 / heads)[:, None, None]
        bias, first, beyond = wavepe.encoding("sandwich", dim=dim).bias(
            length, heads, causal=causal
        )
        assert (first, beyond) == (0 if causal else 1 - length, "zero")
        assert bias.dtype == np.float64
        assert bias.shape == (heads, length - first)
        for m in range(0, length, 7):
            row = matrix[:, m] if not causal else matrix[:, m, : m + 1]
            delta = m - np.arange(row.shape[1])
            assert np.abs(bias[:, delta - first] - row).max() < 1e-10 * dim


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple(kind):
    """-r1 log(1 + r2 |delta|) and -r1 |delta|^r2; learned parameters keep r1, r2 positive."""
    encoding = wavepe.encoding("kerple", kind=kind)
    for heads in (1, 4, 7):
        values = encoding.parameters(16, heads)
        assert [x.shape for x in values.values()] == [(heads,), (heads,)]
        r1, other = (np.asarray(x) for x in values.values())
        r2 = np.exp(other) if kind == "log" else 2 / (1 + np.exp(-other))
        for causal in (True, False):
            bias, first, beyond = encoding.bias(50, heads, causal=causal)
            assert (first, beyond, bias.shape) == (
                0 if causal else -49,
                "zero",
                (heads, 50 - first),
            )
            wanted = oracle.kerple(kind, np.exp(r1), r2, np.arange(first, 50))
            assert np.abs(bias - wanted).max() < 1e-12 * np.abs(wanted).max()
    assert 0 < r2.min() < r2.max() < 2


def test_t5_is_that_of_transformers():
    torch, _ = load_torch()
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    for buckets, farthest in ((32, 128), (2, 16), (8, 64), (10, 1000), (64, 100), (6, 9), (32, 17)):
        encoding = wavepe.encoding("t5", buckets=buckets, max_distance=farthest)
        b = np.random.default_rng(0).normal(size=(3, buckets))
        for causal in (True, False) if buckets > 2 else (True,):
            bias, first, beyond = encoding.learned_bias(
                9, {"b": torch.from_numpy(b)}, causal=causal
            )
            assert beyond == "edge"
            last = first + bias.shape[1] - 1
            delta = torch.arange(first - (0 if causal else 500), last + 500)
            index = T5Attention._relative_position_bucket(
                -delta, bidirectional=not causal, num_buckets=buckets, max_distance=farthest
            )
            got = bias[:, delta.clamp(first, last) - first]
            assert torch.equal(got, torch.from_numpy(b)[:, index]), (buckets, farthest, causal)


def test_t5_by_its_definition():
    for buckets, farthest in ((32, 128), (6, 9), (9, 300)):
        encoding = wavepe.encoding("t5", buckets=buckets, max_distance=farthest)
        bias, first, beyond = encoding.bias(5, 4)
        assert not bias.any()
        assert (first, beyond, bias.shape) == (0, "edge", (4, farthest + 1))
        wanted = [oracle.t5_bucket(delta, buckets, farthest) for delta in range(farthest + 1)]
        assert encoding._buckets_by_delta(True)[1].tolist() == wanted


@pytest.mark.parametrize("spec", ["t5:buckets=6,max_distance=9", "kerple", "kerple:kind=power"])
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_learned_begins_as_bias_says(spec, causal):
    torch, _ = load_torch()
    encoding = wavepe.encoding(spec)
    parameters = {
        name: torch.from_numpy(x).requires_grad_() for name, x in encoding.parameters(8, 3).items()
    }
    bias, first, beyond = encoding.learned_bias(7, parameters, causal=causal)
    wanted = encoding.bias(7, 3, causal=causal)
    assert (first, beyond) == wanted[1:]
    assert np.abs(bias.detach().numpy() - wanted[0]).max() < 1e-12
    bias.square().sum().backward()
    bias = encoding.learned_bias(7, parameters, causal=causal)[0].sum()
    for gradient in torch.autograd.grad(bias, list(parameters.values())):
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("spec", ["sandwich:dim=8", "kerple"])
def test_numpy_attention_takes_it(variant, spec):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(4, 9, 8)) for _ in range(3))
    bias, first, beyond = wavepe.encoding(spec).bias(9, 4)
    got = wavepe.attention(q, k, v, bias=bias, bias_first=first, bias_beyond=beyond)
    delta = np.arange(9)[:, None] - np.arange(9)
    score = q @ k.swapaxes(1, 2) / np.sqrt(8) + bias[:, delta.clip(0)]
    score = np.where(delta < 0, -np.inf, score)
    weights = np.exp(score - score.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ v
    assert np.abs(got - wanted).max() < 1e-12


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("t5:buckets=1", "t5 buckets must be at least 2, got 1"),
        ("t5:buckets=3000000000", "t5 buckets must be at most"),
        ("t5:max_distance=16", "above 16, half of the buckets; got 16"),
        ("kerple:kind=linear", "'linear'"),
        ("sandwich:dim=3", "sandwich dim must be even"),
        ("sandwich:dim=0", "sandwich dim must be at least 2"),
        ("t5:clip=3", "unknown option 'clip'"),
    ],
)
def test_options_that_are_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        wavepe.encoding(spec)


@pytest.mark.parametrize("name", ["t5", "kerple", "sandwich"])
def test_sizes_that_are_refused(name):
    encoding = wavepe.encoding(name)
    assert encoding.entry == "bias"
    for arguments in ((0, 2), (3, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            encoding.bias(*arguments)
    with pytest.raises(TypeError, match="causal"):
        encoding.bias(3, 2, causal="yes")
