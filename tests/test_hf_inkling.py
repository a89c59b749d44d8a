"""Inkling, which rotates nothing: its own relative logits by the kernel, and other encodings."""

import pytest
from cases import needs

torch = needs("torch")
needs("transformers")

import wavepe.hf
from hf_model import close, gradients
from transformers import AutoModelForCausalLM
from wavepe.hf.families import SUPPORTED

if "inkling_text" not in SUPPORTED:
    pytest.skip("this transformers has no Inkling", allow_module_level=True)
from transformers import InklingForCausalLM, InklingTextConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8,
    "sliding_window_size": 5, "local_layer_ids": [0, 2], "d_rel": 4, "rel_extent": 9,
    "log_scaling_n_floor": 6, "max_position_embeddings": 64,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "dense"],
    "logits_mup_width_multiplier": 1.0, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
IDS = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1))
# Parts beside the model's own term, or in its place. Heads differ by layer.
OTHERS = (
    "wavelet:scales=4",
    "alibi",
    "none",
    "sinusoidal",
    "relative+alibi",
    "relative:extent=5,rank=3",
    "relative+sink+window:size=7",
    "fox",
    "pope:theta=100",
    "relative@1+wavelet:scales=4@0.2",
)


@pytest.fixture
def stock():
    generator = torch.Generator().manual_seed(2)
    model = InklingForCausalLM(InklingTextConfig(**SIZES))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            weight.copy_(middle + 0.3 * torch.randn(weight.shape, generator=generator))
    model.set_attn_implementation("eager")
    return model.eval()


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
    mask = (torch.arange(23) >= 3).long().expand(2, -1)
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[:, 3:]


def whole(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def test_it_is_the_stock_model(stock, tmp_path):
    wanted = [f(stock) for f in (whole, in_steps, padded)]
    slopes = gradients(stock, IDS)
    wavepe.hf.patch(stock, "relative")
    assert wavepe.hf.encoding_of(stock) == "relative"
    for f, exact in zip((whole, in_steps, padded), wanted, strict=True):
        assert close(f(stock), exact, 1e-5)
    for got, exact in zip(gradients(stock, IDS), slopes, strict=True):
        assert close(got, exact, 1e-4)
    found = stock(IDS, output_attentions=True)
    assert close(found.logits.detach(), wanted[0], 1e-5)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "WavePEInklingForCausalLM"
    assert torch.equal(whole(loaded.eval()), whole(stock))
    wavepe.hf.unpatch(stock).set_attn_implementation("eager")
    assert torch.equal(whole(stock), wanted[0])


@pytest.mark.parametrize("spec", OTHERS)
def test_other_encodings(stock, spec, tmp_path):
    before = whole(stock)
    wavepe.hf.patch(stock, spec)
    own = dict(stock.named_parameters())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in own.items():
            if "position_encoding" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    got = whole(stock)
    assert not close(got, before, 1e-3)
    assert close(in_steps(stock), got, 1e-5)
    assert stock.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    stock.save_pretrained(tmp_path)
    assert torch.equal(whole(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), got)
    wavepe.hf.unpatch(stock).set_attn_implementation("eager")
    assert torch.equal(whole(stock), before)


def test_memory_is_linear(stock):
    """The layer's relative logits are (B, H, m, rank), and not (B, H, m, n)."""
    seen = []
    wavepe.hf.patch(stock, "relative")
    for layer in stock.model.layers:
        layer.self_attn.rel_logits_proj.register_forward_hook(
            lambda module, args, out: seen.append(out.shape[-1])
        )
    whole(stock)
    assert seen == [4, 4, 4]


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
