"""wavepe.nn.Attention and wavepe.nn.AbsoluteEncoding, for a user's own layers."""

import dataclasses
import pickle

import numpy as np
import pytest
from cases import forget_registrations, load_torch

torch, ops = load_torch()

import wavepe
from encoding_cases import YARN
from self_attention_cases import SPECS, made, tokens
from wavepe.encodings import Encoding
from wavepe.nn import AbsoluteEncoding, Attention, KVCache, SelfAttention


def parts(module, x):
    """Queries, keys and values of a SelfAttention, and its attention by itself."""
    q, k, v = (
        projection(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    own = Attention(
        str(module.encoding), module.head_dim, module.heads, module.kv_heads, causal=module.causal
    ).eval()
    own.position_encoding = module.position_encoding
    return own, q, k, v


def projected(module, out):
    return module.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_self_attention_without_projections(spec, causal):
    module, x = made(spec, causal=causal), tokens()
    attention, *qkv = parts(module, x)
    assert torch.equal(projected(module, attention(*qkv)), module(x))
    mask = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) > 0.3
    segments = torch.tensor([0] * 5 + [1] * 6)
    for options in (
        {"key_mask": mask},
        {"segments": segments},
        {"positions": torch.arange(11) + 3},
    ):
        assert torch.equal(projected(module, attention(*qkv, **options)), module(x, **options))


@pytest.mark.parametrize("spec", SPECS)
def test_the_last_queries_alone(spec):
    attention, q, k, v = parts(made(spec), tokens())
    whole = attention(q, k, v)
    for count in (0, 1, 4):
        last = attention(q[:, :, 11 - count :], k, v)
        assert last.shape == (2, 4, count, 8)
        assert (last - whole[:, :, 11 - count :]).abs().max().item() < 1e-12 if count else True
    shifted = attention(q[:, :, 7:], k, v, positions=torch.arange(11) + 5)
    assert (shifted - whole[:, :, 7:]).abs().max() < 1e-6


@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_gives_the_numbers_of_the_full_pass(spec):
    attention, q, k, v = parts(made(spec), tokens())
    whole, cache = attention(q, k, v), KVCache()
    with torch.inference_mode():
        for place in (slice(0, 6), slice(6, 7), slice(7, 11)):
            out = attention(q[:, :, place], k[:, :, place], v[:, :, place], cache=cache)
            assert (out - whole[:, :, place]).abs().max() < 1e-6
    assert cache.length == 11


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi", "rope"])
def test_window_softcap_and_value_size(spec):
    attention, q, k, _ = parts(made(spec), tokens())
    v = torch.randn(2, 2, 11, 5, dtype=q.dtype)
    got = attention(q, k, v, window=4, softcap=2.0)
    turned = attention.position_encoding.rotate(q, k, None, None)
    given = attention.position_encoding.arguments(turned[0], 11, None)
    wanted = ops.attention(**given, k=turned[1], v=v, window=4, softcap=2.0)
    assert got.shape == (2, 4, 11, 5)
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, attention(q, k, v))


def test_dropout_in_training_alone():
    torch.manual_seed(0)
    attention = Attention("none", 8, 2, dropout=0.5)
    q = torch.randn(1, 2, 9, 8)
    assert not torch.equal(attention(q, q, q), attention(q, q, q))
    attention.eval()
    assert torch.equal(attention(q, q, q), attention(q, q, q))


def test_trained_length_reaches_the_encoding():
    spec = "rope:inference_theta=scaled"
    q = torch.randn(1, 2, 40, 8)
    short, long = (Attention(spec, 8, 2, trained_length=n).eval() for n in (10, 40))
    plain = Attention("rope", 8, 2).eval()
    assert torch.equal(long(q, q, q), plain(q, q, q))
    assert not torch.allclose(short(q, q, q), plain(q, q, q))
    with pytest.raises(ValueError, match="trained_length"):
        Attention(YARN.replace(",original_max_position_embeddings=16", ""), 8, 2)


def test_what_is_learned_has_gradients_and_a_state():
    attention = Attention("shaw:clip=3", 8, 2)
    assert list(attention.state_dict()) == ["position_encoding.table"]
    q = torch.randn(1, 2, 9, 8)
    attention(q, q, q).square().sum().backward()
    assert attention.position_encoding.table.grad.abs().max() > 0
    assert str(attention).startswith("Attention(\n  'shaw:clip=3', head_dim=8, heads=2\n")


def test_one_compiled_graph():
    attention = Attention("wavelet:scales=4", 8, 4, 2).eval()
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, k), attention(q, k, k))


@pytest.mark.parametrize(
    "specs", [("wavelet:scales=4", "wavelet:scales=2"), ("sandwich:dim=4", "sandwich")]
)
def test_graphs_of_two_encodings_are_told_apart(specs):
    torch._dynamo.reset()
    q = torch.randn(1, 2, 7, 8)
    modules = [Attention(spec, 8, 2, causal=causal) for spec in specs for causal in (True, False)]
    for module in (*modules, *modules):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, q, q), module(q, q, q))
    copied = pickle.loads(pickle.dumps(modules[0]))
    assert torch.equal(torch.compile(copied, backend="eager")(q, q, q), modules[0](q, q, q))


def test_a_class_registered_anew_compiles(monkeypatch):
    forget_registrations(monkeypatch)
    q, modules = torch.randn(1, 2, 7, 8), []
    for size in (0.1, 0.2):

        @wavepe.register_encoding
        @dataclasses.dataclass(frozen=True)
        class Anew(Encoding):
            name, entry = "anew", "relative"

            def table(self, length, head_dim, *, causal=True, size=size):
                return np.arange(length)[:, None] * np.full(head_dim, size), 0, "zero"

        modules.append(Attention("anew", 8, 2).eval())
    assert not torch.allclose(*(module(q, q, q) for module in modules))
    for module in modules:
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, q, q), module(q, q, q))


Q, K = torch.zeros(2, 4, 7, 8), torch.zeros(2, 2, 7, 8)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((Q[:, :2], K, K), {}, r"q must be \(B, 4, tokens, 8\), got \(2, 2, 7, 8\)"),
        ((Q, Q, K), {}, r"k must be \(B, 2, tokens, 8\), got \(2, 4, 7, 8\)"),
        ((Q, K[..., :4], K), {}, "k must be"),
        ((Q, K, Q), {}, r"v must be \(B, 2, tokens, dv\)"),
        ((Q[0], K, K), {}, "q must be"),
        ((Q, K, torch.zeros(())), {}, "v must be"),
        ((Q, None, K), {}, "k must be a torch.Tensor, got NoneType"),
        ((Q, K[:, :, :3], K[:, :, :3]), {}, "needs m <= n, .* m = 7 queries and n = 3 keys"),
        ((Q[:, :, :3], K, K), {"cache": KVCache()}, "needs m = n with a cache"),
        ((Q, K, K), {"cache": 3}, "cache must be a KVCache"),
        ((Q, K, K), {"positions": torch.zeros(3)}, "positions must hold integers"),
        ((Q, K, K), {"positions": torch.arange(3)}, r"positions must be \(L,\)"),
        ((Q, K, K), {"key_mask": torch.ones(2, 7)}, "key_mask must be bool"),
        ((Q, K, K), {"window": -1}, "window"),
        ((Q, K, K), {"softcap": 0.0}, "softcap"),
    ],
)
def test_wrong_calls(given, options, words):
    with pytest.raises(RuntimeError, match=words):
        Attention("alibi", 8, 4, 2)(*given, **options)


def test_absolute_encodings_are_refused():
    with pytest.raises(ValueError, match="AbsoluteEncoding"):
        Attention("sinusoidal", 8, 4)
    with pytest.raises(
        ValueError, match=r"must be absolute, got 'rope', which is rotary: .*wavepe\.nn\.Attention"
    ):
        AbsoluteEncoding("rope", 8)


# AbsoluteEncoding

ABSOLUTE = ["sinusoidal", "sinusoidal:theta=50", "binary", "integer", "normalised"]


@pytest.mark.parametrize("spec", [*ABSOLUTE, "sinusoidal:theta=length"])
def test_absolute_vectors_are_added(spec):
    module, x = AbsoluteEncoding(spec, 8), tokens(dim=8)
    places = torch.tensor([[*range(3, 14)], [5] * 11])
    for positions, rows in ((None, [range(11)] * 2), (places, places.tolist())):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            got = module(x.to(dtype), positions)
            assert got.dtype == dtype
            for b, row in enumerate(rows):
                vectors = wavepe.encoding(spec).absolute(np.array(row), 8, length=max(row) + 1)
                wanted = x[b].to(dtype) + torch.from_numpy(vectors).float().to(dtype)
                assert torch.equal(got[b], wanted)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        assert torch.equal(module(x, places.to(dtype)), module(x, places))
    assert module(x[:, :0]).shape == (2, 0, 8)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert spec in str(module)


def test_absolute_vectors_and_attention_are_a_model():
    torch.manual_seed(0)
    embed, positions = torch.nn.Embedding(50, 32), AbsoluteEncoding("sinusoidal", 32)
    layer = SelfAttention(32, 4, encoding="none")
    ids = torch.arange(9)[None]
    loss = layer(positions(embed(ids))).square().sum()
    loss.backward()
    assert embed.weight.grad.abs().max() > 0
    compiled = torch.compile(positions, backend="eager", fullgraph=True)
    x = embed(ids).detach()
    assert torch.equal(compiled(x), positions(x))


@pytest.mark.parametrize(
    ("x", "positions", "words"),
    [
        (torch.zeros(2, 5, 4), None, r"x must be \(B, L, 8\), got \(2, 5, 4\)"),
        (None, None, "x must be a torch.Tensor"),
        (torch.zeros(2, 5, 8), torch.zeros(5), "positions must hold integers"),
        (torch.zeros(2, 5, 8), torch.arange(4), r"positions must be \(L,\)"),
    ],
)
def test_wrong_calls_of_absolute(x, positions, words):
    with pytest.raises(RuntimeError, match=words):
        AbsoluteEncoding("sinusoidal", 8)(x, positions)


def test_an_encodings_own_layers_keep_their_digits_under_autocast(monkeypatch):
    """Without care, a matrix product in `learned_bias` would be bfloat16."""
    forget_registrations(monkeypatch)

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True)
    class Layers(Encoding):
        name = "layers"
        entry = "bias"
        learned = True

        def bias(self, length, heads, *, causal=True):
            return np.zeros((heads, length)), 0, "zero"

        def parameters(self, head_dim, heads):
            return {"w": np.linspace(-1.1, 1.3, 3 * heads).reshape(heads, 3)}

        def learned_bias(self, length, parameters, *, causal=True):
            delta = torch.arange(length, dtype=torch.float32)
            return parameters["w"] @ torch.stack([delta, delta.sqrt(), 1 / (1 + delta)]), 0, "zero"

    encoding = Attention("layers", head_dim=8, heads=2).position_encoding
    q = torch.randn(1, 2, 20, 8)
    exact = encoding.arguments(q, 20)["bias"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoding.arguments(q, 20)["bias"], exact)
