"""Inkling and Inkling 2, which rotate nothing: their own relative logits by the kernel, and other
encodings."""

import copy
import math
import pickle

import pytest
import torch
import wavepe.hf
from cases import by_turns
from hf_families import UNROTATED, build, stirred
from hf_model import VOCABULARY, close, gradients, logits
from transformers import AutoModelForCausalLM

if not UNROTATED:
    pytest.skip("this transformers has no Inkling", allow_module_level=True)

# Three layers; the queries grow within the texts of the tests.
OPTIONS = {
    "inkling_text": {"local_layer_ids": [0, 2], "mlp_layer_types": ["dense", "sparse", "dense"]},
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 2,
    },
}
IDS = torch.randint(1, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
# Parts beside the model's own term, or in its place. Heads differ by layer.
OTHERS = (
    "wavelet:scales=4", "alibi", "none", "sinusoidal", "relative+alibi", "relative:extent=5,rank=3",
    "relative+sink+window:size=7", "fox", "pope:theta=100", "relative@1+wavelet:scales=4@0.2",
    "relative+temperature:floor=3,alpha=0.5",
)  # fmt: skip


@pytest.fixture(params=UNROTATED)
def stock(request):
    options = {"num_hidden_layers": 3, "log_scaling_n_floor": 6, **OPTIONS[request.param]}
    return build(request.param, attn_implementation="eager", **options)


def tables(model):
    """The modules of the model's own term."""
    names = (".rel_logits_proj", ".relative_position_bias")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@torch.no_grad()
def in_steps(model):
    """Logits with a cache: a prompt of 7 tokens, and then one after the other."""
    out = model(IDS[:, :7], use_cache=True)
    found = [out.logits]
    for i in range(7, IDS.shape[1]):
        found.append(model(IDS[:, i : i + 1], cache=out.cache, use_cache=True).logits)
    return torch.cat(found, 1)


def padded(model):
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    return logits(model, ids, attention_mask=(torch.arange(23) >= 3).long().expand(2, -1))[:, 3:]


def whole(model):
    return logits(model, IDS, use_cache=False)


def test_values(stock):
    wanted = [f(stock) for f in (whole, in_steps, padded)]
    with torch.no_grad():
        weights = copy.deepcopy(stock)(IDS, output_attentions=True).attentions
    wavepe.hf.patch(stock, "relative")
    assert wavepe.hf.encoding_of(stock) == "relative"
    for f, exact in zip((whole, in_steps, padded), wanted, strict=True):
        assert close(f(stock), exact, 1e-5)
    assert torch.equal(whole(copy.deepcopy(stock)), whole(stock))
    assert torch.equal(whole(pickle.loads(pickle.dumps(stock))), whole(stock))
    found = stock(IDS, output_attentions=True)
    assert close(found.logits.detach(), wanted[0], 1e-5)
    assert all(map(close, map(torch.Tensor.detach, found.attentions), weights))
    wavepe.hf.unpatch(stock).set_attn_implementation("eager")
    assert torch.equal(whole(stock), wanted[0])


def test_gradients(stock):
    wanted = gradients(stock, IDS)
    for got, exact in zip(gradients(wavepe.hf.patch(stock, "relative"), IDS), wanted, strict=True):
        assert close(got, exact, 1e-4)


def in_float64(model, monkeypatch):
    """The model, whose layers compute in float32, and are let compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    model.set_experts_implementation("eager")
    return model.double()


def test_in_float64(stock, monkeypatch):
    model = in_float64(stock, monkeypatch)
    wanted = whole(model), gradients(model, IDS)
    wavepe.hf.patch(model, "relative")
    assert close(whole(model), wanted[0], 1e-11)
    assert close(in_steps(model), wanted[0], 1e-11)
    for got, exact in zip(gradients(model, IDS), wanted[1], strict=True):
        assert close(got, exact, 1e-10)


def test_its_options_are_those_of_inkling_2(monkeypatch):
    """A new table and sinks with the values of the model's own, its clip and factor: the same."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["hybrid"] * 2, "log_scaling_n_floor": 6}
    model = in_float64(build("inkling2_text", attn_implementation="eager", **kinds), monkeypatch)
    for table in tables(model):
        table.norm.scale.data.fill_(1)
    before, _ = whole(model), gradients(model, IDS)
    exact = {name: x.grad for name, x in model.named_parameters()}
    names = {x: name for name, x in model.named_parameters()}
    own = [(x.linear.weight, x.proj.T, x.linear.weight.grad, x.proj.grad.T) for x in tables(model)]
    wavepe.hf.patch(model, "relative:extent=9,rank=4,l2_clip=1,floor=6+sink:from_input=true")
    for layer, (linear, table, *wanted) in zip(model.model.layers, own, strict=True):
        new, sink = layer.self_attn.position_encoding.children()
        new.r_proj.data.copy_(linear.view(new.r_proj.shape))
        new.table.data.copy_(table)
        exact |= {new.r_proj: wanted[0].view(new.r_proj.shape), new.table: wanted[1]}
        stocks = layer.self_attn.sink_proj  # it stays, without a share from here on
        stocks.register_forward_hook(lambda module, args, out: out - torch.inf)
        sink.s_proj.data.copy_(stocks.weight)
        exact[sink.s_proj] = exact[names[stocks.weight]]
        exact[names[stocks.weight]] = torch.zeros_like(stocks.weight)
    assert close(whole(model), before, 1e-11)
    assert close(in_steps(model), before, 1e-11)
    gradients(model, IDS)
    for name, x in model.named_parameters():
        # the model's own are replaced, and it has no constants of sinks
        if x.grad is not None and not name.endswith(".sinks"):
            assert close(x.grad, exact[name if name in exact else x], 1e-10)


@pytest.mark.skipif("inkling2_text" not in UNROTATED, reason="transformers has no Inkling 2")
def test_sinks_of_tokens_join_those_of_the_model():
    stock = build("inkling2_text", attn_implementation="eager")
    model = wavepe.hf.patch(copy.deepcopy(stock), "relative+sink:from_input=true")
    for layer, other in zip(model.model.layers, stock.model.layers, strict=True):
        layer.self_attn.position_encoding.s_proj.data.copy_(other.self_attn.sink_proj.weight)
        other.self_attn.sink_proj.register_forward_hook(lambda module, args, out: out + math.log(2))
    assert close(whole(model), whole(stock), 1e-5)
    assert close(*(x(IDS, output_attentions=True).logits.detach() for x in (model, stock)))


@pytest.mark.parametrize(("spec", "stock"), by_turns(OTHERS, [*UNROTATED], 4), indirect=["stock"])
def test_other_encodings(stock, spec, tmp_path):
    before = whole(stock)
    stirred(wavepe.hf.patch(stock, spec))
    got = whole(stock)
    assert not close(got, before, 1e-3)
    assert close(in_steps(stock), got, 1e-5)
    assert stock.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    stock.save_pretrained(tmp_path)
    # A copy is aligned in memory, and weights in a file are not: torch's sums depend on it.
    loaded = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert torch.equal(whole(loaded), got)
    wavepe.hf.unpatch(stock).set_attn_implementation("eager")
    assert torch.equal(whole(stock), before)


@pytest.mark.parametrize("family", UNROTATED)
def test_padding_is_not_counted(family):
    """The layers get no position_ids; without a temperature of the model's own."""
    model = wavepe.hf.patch(build(family), "relative+temperature:floor=3,alpha=0.5")
    for f in (in_steps, padded):
        assert close(f(model), whole(model), 1e-5)


def test_memory_is_linear(stock):
    """The layer's relative logits are (B, H, m, rank), and not (B, H, m, n), nor are distances."""
    seen, distances = [], []
    before = whole(stock)
    patched = wavepe.hf.patch(copy.deepcopy(stock), "relative")
    for module in tables(patched):
        module.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
        module.register_forward_pre_hook(lambda module, args: distances.append(args[1:2]))
    whole(patched)
    assert seen == [4, 4, 4]
    if stock.config.model_type == "inkling2_text":
        assert all(distance.numel() == 0 for (distance,) in distances)
    patched.model.norm.register_forward_hook(failing)
    with pytest.raises(RuntimeError, match="a fault"):
        whole(patched)
    assert torch.equal(whole(stock), before)


def failing(*_):
    raise RuntimeError("a fault within the pass")


def test_what_does_not_fit(stock):
    with pytest.raises(ValueError, match="layer 0 of this model does not rotate"):
        wavepe.hf.patch(stock, "rope")
    with pytest.raises(ValueError, match="these have heads 4 and 6"):
        wavepe.hf.patch(stock, "kerple")
    stock.set_attn_implementation("wavepe")
    with pytest.raises(ValueError, match="got the argument 'position_bias'"):
        whole(stock)
    stock.set_attn_implementation("eager")
    wavepe.hf.patch(stock, "relative")
    stock.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="needs attn_implementation='wavepe'"):
        whole(stock)
