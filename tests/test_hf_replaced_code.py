"""Other programs that replace parts of a model: the model is right, or says what was replaced.

The replacements are made as Unsloth, Liger and kernels of the Hub make them.
"""

import copy
import functools
import types

import pytest
import torch
import wavepe.hf
from cases import needs
from hf_model import close, llamas, logits, patched_tiny, tiny, tokens
from processes import output
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama

IDS = tokens(2, 9)
SPECS = ("wavelet:scales=4", "alibi", "none", "rope:theta=30", "rope+alibi")


def own_attention(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    """A forward of its own, as Unsloth's, which knows RoPE alone."""
    size = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        part(hidden_states).view(size).transpose(1, 2)
        for part in (self.q_proj, self.k_proj, self.v_proj)
    )
    q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def own_layer(self, hidden_states, **kwargs):
    """A decoder layer that calls the attention's forward, and so leaves its hooks out."""
    found, _ = self.self_attn.forward(self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + found
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def layer_without_attention(self, hidden_states, position_embeddings=None, **kwargs):
    """A decoder layer that computes attention itself."""
    normed = self.input_layernorm(hidden_states)
    found, _ = own_attention(self.self_attn, normed, position_embeddings)
    hidden_states = hidden_states + found
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("how", ["class", "module"])
def test_attention_is_replaced_after_the_patch(spec, how, monkeypatch):
    model = patched_tiny(spec)
    before = logits(model, IDS)
    if how == "class":
        monkeypatch.setattr(llama.LlamaAttention, "forward", own_attention)
    else:
        layer = model.model.layers[1].self_attn
        layer.forward = types.MethodType(own_attention, layer)
    with pytest.raises(ValueError, match=rf"forward of this LlamaAttention.*{spec[:5]}.*unpatch"):
        model(IDS)
    monkeypatch.undo()
    vars(model.model.layers[1].self_attn).pop("forward", None)
    assert torch.equal(logits(model, IDS), before)


@pytest.mark.parametrize("forward", [own_layer, layer_without_attention])
@pytest.mark.parametrize("how", ["class", "module"])
def test_a_decoder_layer_is_replaced_after_the_patch(forward, how, monkeypatch):
    model = patched_tiny("alibi")
    if how == "class":
        monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", forward)
    else:
        for layer in model.model.layers:
            layer.forward = types.MethodType(forward, layer)
    says = {own_layer: "what calls this LlamaAttention", layer_without_attention: "a forward of"}
    with pytest.raises(ValueError, match=rf"{says[forward]}.* is not that of .*'alibi' out"):
        model(IDS)


def test_a_base_model_that_computes_all_itself(monkeypatch):
    def forward(self, input_ids=None, **kwargs):
        return llama.BaseModelOutputWithPast(last_hidden_state=self.embed_tokens(input_ids))

    model = patched_tiny("alibi")
    monkeypatch.setattr(llama.LlamaModel, "forward", forward)
    with pytest.raises(ValueError, match=r"a forward of this LlamaModel is not that of"):
        model(IDS)


def test_attention_replaced_before_the_patch(monkeypatch):
    monkeypatch.setattr(llama.LlamaAttention, "forward", own_attention)
    with pytest.raises(TypeError, match=r"must call transformers' attention interface"):
        wavepe.hf.patch(tiny(), "alibi")
    monkeypatch.undo()
    model = tiny()
    layer = model.model.layers[1].self_attn
    layer.forward = types.MethodType(own_attention, layer)
    wavepe.hf.patch(model, "alibi")
    with pytest.raises(ValueError, match="forward of this LlamaAttention"):
        model(IDS)


def test_the_forward_of_a_lone_layer(monkeypatch):
    config = tiny().config
    with llamas("alibi"):
        layer = llama.LlamaAttention(config, 0)
    x = torch.zeros(1, 5, layer.config.hidden_size)
    layer(x)
    monkeypatch.setattr(llama.LlamaAttention, "forward", own_attention)
    with pytest.raises(ValueError, match=r"forward of this LlamaAttention.*'alibi' out"):
        layer(x)


@pytest.mark.parametrize("spec", SPECS)
def test_wrappers_of_forwards_are_right(spec, monkeypatch):
    """A wrapper that calls the old forward, as accelerate's hooks and profilers do."""
    model = patched_tiny(spec)
    before = logits(model, IDS)
    for cls in (llama.LlamaAttention, llama.LlamaDecoderLayer, llama.LlamaModel):

        def wrapper(self, *args, old=cls.forward, **kwargs):
            return old(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", wrapper)
    assert torch.equal(logits(model, IDS), before)
    monkeypatch.undo()
    for module in (model.model, *model.model.layers):
        module.forward = functools.partial(type(module).forward, module)
    assert torch.equal(logits(model, IDS), before)
    assert torch.equal(logits(copy.deepcopy(model), IDS), before)


def rope_with_its_own_angles(q, k, cos, sin, *rest, **options):
    """As Unsloth's: it takes cos and sin from a table of its own."""
    position = torch.arange(q.shape[-2])[:, None] * torch.ones(cos.shape[-1])
    return old_apply(q, k, position.cos()[None], position.sin()[None])


def rope_in_one_call(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """As Liger's: the same rotation, by other code."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


old_apply = llama.apply_rotary_pos_emb


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("first", [False, True])
def test_the_function_that_rotates(spec, first, monkeypatch):
    stock = tiny()
    if not first:
        wavepe.hf.patch(stock, spec)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rope_in_one_call)
    model = wavepe.hf.patch(stock, spec) if first else stock
    found = logits(model, IDS)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rope_with_its_own_angles)
    with pytest.raises(ValueError, match=r"function apply_rotary_pos_emb of .*llama"):
        model(IDS)
    monkeypatch.undo()
    assert close(found, logits(model, IDS), 1e-5)


class Hidden(torch.nn.Module):
    """A wrapper that shows nothing of its layer, as programs that steer a model have it."""

    def __init__(self, layer):
        super().__init__()
        self.block = layer

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


class Ablated(torch.nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


@pytest.mark.parametrize("spec", ["rope:theta=30", "wavelet:scales=4"])
def test_layers_that_are_wrapped_or_left_out(spec):
    """A layer that is left out as a whole has no attention without positions."""
    model = patched_tiny(spec)
    before = logits(model, IDS)
    layers = model.model.layers
    first, second = layers
    layers[0] = Hidden(first)
    assert torch.equal(logits(model, IDS), before)
    layers[0] = Ablated()
    found = logits(model, IDS)
    layers[0] = first
    first.forward = lambda hidden_states, *args, **kwargs: hidden_states
    assert torch.equal(logits(model, IDS), found)
    del first.forward
    layers[1] = Hidden(second)
    assert torch.equal(logits(model, IDS), before)


@pytest.mark.parametrize("how", ["layer", "forward", "base"])
def test_parts_that_are_compiled(how):
    model = patched_tiny("wavelet:scales=4", num_hidden_layers=1)
    before = logits(model, IDS)
    if how == "base":
        model.model.forward = torch.compile(model.model.forward, backend="eager")
    for index, layer in enumerate(model.model.layers):
        if how == "layer":
            model.model.layers[index] = torch.compile(layer, backend="eager")
        if how == "forward":
            layer.forward = torch.compile(layer.forward, backend="eager")
    assert close(logits(model, IDS), before, 1e-5)


@pytest.mark.parametrize("spec", ["rope", "alibi"])
@pytest.mark.parametrize("before", [False, True], ids=["after the patch", "before"])
def test_ligers_own_rotation(spec, before, tmp_path):
    """Its kernel, in Triton's interpreter; its other kernels cannot be interpreted."""
    needs("liger_kernel")
    model = tiny()
    torch.save({"model": model, "ids": IDS}, tmp_path / "given.pt")
    script = """
import sys, torch, wavepe.hf
from liger_kernel.transformers import apply_liger_kernel_to_llama
given, spec, before = torch.load("given.pt", weights_only=False), *sys.argv[1:]
model, off = given["model"], ("rms_norm", "swiglu", "fused_linear_cross_entropy")
def liger():
    apply_liger_kernel_to_llama(model=model, rope=True, **dict.fromkeys(off, False))
def swap():
    wavepe.hf.patch(model, spec)
for step in (liger, swap) if before == "True" else (swap, liger):
    step()
with torch.no_grad():
    torch.save(model(given["ids"]).logits, "out.pt")
"""
    output("-c", script, spec, before, cwd=tmp_path)
    got = torch.load(tmp_path / "out.pt")
    assert close(got, logits(wavepe.hf.patch(model, spec), IDS), 1e-5)
