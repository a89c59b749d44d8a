"""learned=true: scales and shifts as parameters, from the encoding to checkpoints and compare."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_same_bits, forget_registrations

KINDS = ("ricker", "gaussian", "morlet")
SPEC = "wavelet:scales=4,learned=true"
PLAIN = "wavelet:scales=4"


@pytest.fixture(autouse=True)
def register(monkeypatch):
    """register_wavelet, with a register that forgets what the test adds."""
    forget_registrations(monkeypatch)
    return wavepe.register_wavelet


def bump(u):
    return np.exp(-u * u) * (1 + u)


def bump_slope(u):
    return np.exp(-u * u) * (1 - 2 * u * (1 + u))


@pytest.mark.parametrize("options", ["scales=6", "scales=1+3,min_scale=1", "scales=3,min_scale=4"])
def test_initial_parameters_are_the_grid_s(options):
    learned, plain = (wavepe.encoding(f"wavelet:{options}{end}") for end in (",learned=true", ""))
    parameters = learned.parameters(24, 4)
    assert list(parameters) == ["scale", "shift"]
    grid = wavepe.wavelet_grid(24, plain.scales, plain.min_scale)
    for got, want in zip(parameters.values(), grid, strict=True):
        assert_same_bits(got, want)
    for causal in (True, False):
        table, *rest = learned.table(9, 24, causal=causal)
        want, *wanted = plain.table(9, 24, causal=causal)
        assert np.array_equal(table, want)
        assert rest == wanted
    with pytest.raises(ValueError, match="23 is not divisible"):
        learned.parameters(23, 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("kind=haar", "kind=haar is piecewise constant: its gradient is zero"),
        ("kind=own", r"kind=own was registered without a derivative.*derivative="),
    ],
)
def test_kinds_without_a_gradient_are_refused(register, options, reason):
    register("own", bump)
    with pytest.raises(ValueError, match=reason):
        wavepe.encoding(f"wavelet:{options},learned=true")
    register("own", bump, derivative=bump_slope)
    wavepe.encoding("wavelet:kind=own,learned=true")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mirrored", [None, True])
@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_values_and_derivatives(register, torch, kind, mirrored, causal):
    register("own", bump, derivative=bump_slope)
    encoding = wavepe.encoding("wavelet", kind=kind, scales=3, mirrored=mirrored, learned=True)
    rng = np.random.default_rng(5)
    scale, shift = (  # not the initial ones
        value * rng.uniform(0.8, 1.3, 6) + rng.normal(0, 0.1, 6)
        for value in encoding.parameters(6, 2).values()
    )

    def table(scale, shift):
        return encoding.learned_table(7, {"scale": scale, "shift": shift}, causal=causal)

    leaves = [torch.from_numpy(x).requires_grad_() for x in (scale, shift)]
    p, first, beyond = table(*leaves)
    assert (first, beyond) == (0 if causal else -6, "zero")
    t = np.arange(first, 7.0)[:, None] * (-1 if mirrored else 1)
    want = bump((t - shift) / scale) if kind == "own" else oracle.psi(kind, t, scale, shift)
    assert p.shape == want.shape
    assert np.abs(p.detach().numpy() - want).max() < 1e-14
    assert torch.autograd.gradcheck(lambda *leaves: table(*leaves)[0], leaves)


def parameters_of(model):
    base = model.base_model
    return base.position_encoding.scale, base.position_encoding.shift


def shake(torch, model):
    """Move the parameters away from their initial values."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters_of(model):
            parameter += 0.3 * torch.rand(parameter.shape, generator=generator)
    return model


def test_a_change_shows_at_once(torch, hf):
    """No table outlives the parameters it came from."""
    model, row = hf.patched_tiny(SPEC), hf.tokens(1, 12)
    first = hf.logits(model, row)
    assert torch.equal(first, hf.logits(hf.patched_tiny(PLAIN), row))
    shake(torch, model)
    assert not hf.close(hf.logits(model, row), first, 1e-2)
    assert hf.close(hf.logits(model, row)[0], hf.reference(model, row[0], SPEC)[0])
    assert torch.equal(hf.logits(hf.patched_tiny(SPEC), row), first)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_parameters_stay_float32_in_a_narrow_model(torch, hf, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype)
    model = shake(torch, hf.patched_tiny(SPEC))
    wanted = [x.detach().clone() for x in parameters_of(model)]
    model.to(dtype)
    after = wavepe.hf.patch(hf.tiny().to(dtype), SPEC)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    recast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(dtype)
    for narrow in (model, loaded, recast):
        assert narrow.dtype == dtype
        for parameter, value in zip(parameters_of(narrow), wanted, strict=True):
            assert torch.equal(parameter, value)  # in dtype too
    assert all(x.dtype == torch.float32 for x in parameters_of(after))
    ids = hf.tokens(2, 12)
    assert torch.equal(hf.logits(loaded, ids), hf.logits(model, ids))
    if dtype == torch.bfloat16:
        model.train()(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-4).step()
        for parameter, value in zip(parameters_of(model), wanted, strict=True):
            assert parameter.grad.dtype == torch.float32
            assert not torch.equal(parameter, value)


@pytest.mark.filterwarnings("ignore")  # transformers reports the missing keys
def test_a_stock_checkpoint_read_in_bfloat16(torch, hf, tmp_path):
    """Learned parameters begin with the float32 values of the grid."""
    hf.tiny().save_pretrained(tmp_path)
    options = {"position_encoding": SPEC, "dtype": torch.bfloat16}
    own = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path, **options)
    with hf.llamas(SPEC):
        from transformers import LlamaForCausalLM

        between = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids, grid = hf.tokens(2, 12), wavepe.wavelet_grid(hf.HEAD, 4)
    wanted = hf.logits(wavepe.hf.patch(hf.tiny().bfloat16(), SPEC), ids)
    for model in (own, between):
        assert model.dtype == torch.bfloat16
        for got, want in zip(parameters_of(model), grid, strict=True):
            assert torch.equal(got, torch.from_numpy(want).float())  # in dtype too
        assert torch.equal(hf.logits(model, ids), wanted)


def test_llamas_made_in_between(torch, hf):
    with hf.llamas(SPEC):
        model = hf.tiny()
    learned = [name for name in model.state_dict() if "position_encoding" in name]
    assert learned == ["model.position_encoding.scale", "model.position_encoding.shift"]
    ids = hf.tokens(2, 12)
    patched = hf.patched_tiny(SPEC)
    model.load_state_dict(patched.state_dict())  # tiny() fills all it finds at random
    assert torch.equal(hf.logits(model, ids), hf.logits(patched, ids))
    assert torch.equal(hf.logits(wavepe.hf.unpatch(model), ids), hf.logits(hf.tiny(), ids))


def test_an_attention_layer_alone_learns_its_own(torch, hf):
    from transformers.models.llama.modeling_llama import LlamaAttention

    whole, config = hf.patched_tiny(SPEC), hf.tiny_config()
    inside = whole.model.layers[0].self_attn
    with hf.llamas(SPEC):
        layer = LlamaAttention(config, 0).eval()
    names = [name for name, _ in layer.named_parameters() if "position_encoding" in name]
    assert names == ["position_encoding.scale", "position_encoding.shift"]
    missing = layer.load_state_dict(inside.state_dict(), strict=False).missing_keys
    assert missing == names
    hidden, positions = torch.randn(2, 7, config.hidden_size), torch.arange(7)[None]
    own = whole.model.rotary_emb(hidden, positions)
    wanted = inside(hidden, position_embeddings=own, position_ids=positions)[0]
    got = layer(hidden)[0]
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert layer.position_encoding.shift.grad.any()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_registered_wavelet_learns_in_a_model(register, torch, hf, compiled):
    register("own", bump, derivative=bump_slope)
    model, ids = hf.patched_tiny("wavelet:kind=own,scales=4,learned=true"), hf.tokens(2, 9)
    gradients = hf.gradients(model.train(), ids)
    assert all(parameter.grad.any() for parameter in parameters_of(model))
    if compiled:
        torch._dynamo.reset()
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        for got, gradient in zip(hf.gradients(graph, ids), gradients, strict=True):
            assert hf.close(got, gradient, 1e-5)
        torch._dynamo.reset()
