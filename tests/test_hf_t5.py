"""T5, mT5 and UMT5 with their own bias of one row, against the stock models."""

import copy
import filecmp

import pytest
import torch
import wavepe.hf
from hf_model import VOCABULARY, close, drawn, logits, pickled, recompute, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    EncoderDecoderCache,
    StaticCache,
)

if "t5" not in wavepe.hf.supported_families():
    pytest.skip("this T5 does not call transformers' attention", allow_module_level=True)

SIZES = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 3, "num_heads": 3,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "pad_token_id": 0,
    "relative_attention_max_distance": 12, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
SOURCE, TARGET = tokens(2, 21), tokens(2, 18, seed=1)  # both go beyond max_distance
PADDED = torch.ones_like(SOURCE)
PADDED[0, :5] = PADDED[1, 17:] = 0
SHORT = torch.ones_like(TARGET)
SHORT[1, 15:] = 0
BATCH = {"attention_mask": PADDED, "decoder_attention_mask": SHORT, "labels": TARGET}
MT5 = pytest.param("mt5", marks=pytest.mark.slow)  # T5 under other names
EACH = pytest.mark.parametrize("kind", ["t5", MT5, "umt5"])


def build(kind="t5", automatic=AutoModelForSeq2SeqLM, scale=0.4):
    """A stock model in float64, with weights so large that positions matter."""
    config = AutoConfig.for_model(kind, **SIZES)
    model = automatic.from_config(config, attn_implementation="eager").double()
    return drawn(model, scale, dtype=torch.float64)


def patched(model):
    return wavepe.hf.patch(copy.deepcopy(model), "t5")


def trained(model, **batch):
    """The logits, and the gradients of all weights."""
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    out = model(input_ids=SOURCE, **batch)
    out.loss.backward()
    return [out.logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


def all_close(got, wanted, bound=1e-10):
    return all(close(x, y, bound) for x, y in zip(got, wanted, strict=True))


@EACH
@pytest.mark.parametrize("batch", [BATCH, {"labels": TARGET}], ids=["padded", "whole"])
def test_values_and_gradients(kind, batch):
    stock = build(kind)
    assert all_close(trained(patched(stock), **batch), trained(stock, **batch))


@EACH
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
)
def test_generate(kind, options):
    stock = build(kind)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, **options}
    found, wanted = (
        model.generate(SOURCE, attention_mask=PADDED, **options)
        for model in (patched(stock), stock)
    )
    assert torch.equal(found, wanted)


@EACH
def test_weights_and_masks_of_queries_and_keys(kind):
    stock = build(kind)
    model = patched(stock)
    call = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
    for mask in (PADDED, None):
        with torch.no_grad():
            options = {"attention_mask": mask, "output_attentions": True}
            found, wanted = (x(**call, **options) for x in (model, stock))
        for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            assert all_close(found[name], wanted[name])
    see = torch.rand(2, 1, 18, 18, generator=torch.Generator().manual_seed(3)) < 0.7
    see |= torch.eye(18, dtype=torch.bool)
    added = torch.zeros(see.shape).double().masked_fill(~see, torch.finfo(torch.float64).min)
    wanted = logits(stock, **call, decoder_attention_mask=added)
    for mask in (see, added):
        assert close(logits(model, **call, decoder_attention_mask=mask), wanted, 1e-10)
    wanted = logits(stock, **call, attention_mask=PADDED)
    got = logits(model, **call, attention_mask=PADDED.bool()[:, None, None])
    assert close(got, wanted, 1e-10)


def test_pieces_in_a_static_cache():
    model = patched(build())
    caches = (StaticCache(config=model.config, max_cache_len=21) for _ in range(2))
    options = {"encoder_outputs": model.get_encoder()(SOURCE), "use_cache": True}
    options["past_key_values"] = EncoderDecoderCache(*caches)
    pieces = [logits(model, decoder_input_ids=x, **options) for x in TARGET.split([7, 10, 1], 1)]
    whole = logits(model, input_ids=SOURCE, decoder_input_ids=TARGET, use_cache=False)
    assert close(torch.cat(pieces, 1), whole, 1e-10)


@EACH
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout(kind, reentrant):
    model = patched(build(kind)).train()
    wanted = trained(model, **BATCH)
    assert not all_close(wanted, trained(model.eval(), **BATCH), 1e-3)
    recompute(model.train(), reentrant)
    assert all_close(trained(model, **BATCH), wanted)


@EACH
def test_no_tensor_of_queries_and_keys(kind):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            self.elements = max(self.elements, *sizes, 0)
            return out

    stock, counts = build(kind), []
    ids, mask = tokens(1, 700), torch.ones(1, 700, dtype=torch.long)
    mask[0, :9] = 0
    for model in (patched(stock), stock):
        with Largest() as largest:
            model(ids, attention_mask=mask, labels=ids).loss.backward()
        counts.append(largest.elements)
    assert counts[0] <= 700 * VOCABULARY < 700 * 700 <= counts[1]


def test_other_models_of_the_family():
    call = {"input_ids": SOURCE, "attention_mask": PADDED}
    target = {"decoder_input_ids": TARGET}
    for model, more in (build().encoder, {}), (build(automatic=AutoModel), target):
        wanted = model(**call, **more)[0]
        assert close(patched(model)(**call, **more)[0].detach(), wanted.detach(), 1e-10)


def test_bfloat16():
    model, call = patched(build(scale=0.15)).float(), {"input_ids": SOURCE, "labels": TARGET}
    wanted = logits(model, **call)
    assert close(logits(model.bfloat16(), **call).float(), wanted, 0.05)


def test_there_and_back(tmp_path):
    stock = build("umt5")
    wanted = logits(stock, input_ids=SOURCE, **BATCH)
    with wavepe.hf.patched(stock, "t5"):
        assert wavepe.hf.encoding_of(stock) == "t5"
        assert close(logits(stock, input_ids=SOURCE, **BATCH), wanted, 1e-10)
        stock.save_pretrained(tmp_path / "patched")
        copied = pickled(copy.deepcopy(stock))
    stock.save_pretrained(tmp_path / "stock")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert filecmp.cmpfiles(tmp_path / "patched", tmp_path / "stock", names, False)[0] == names
    for model in (stock, wavepe.hf.unpatch(copied)):
        assert wavepe.hf.encoding_of(model) is None
        assert torch.equal(logits(model, input_ids=SOURCE, **BATCH), wanted)


@pytest.mark.slow
@EACH
def test_compile(kind):
    model = patched(build(kind))
    step = torch.compile(lambda **x: model(**x).loss, fullgraph=True, dynamic=True, backend="eager")
    for count in (18, 15):
        call = {"input_ids": SOURCE[:, :count].clone(), "labels": TARGET[:, :count].clone()}
        assert close(step(**call).detach(), model(**call).loss.detach(), 1e-10)


@EACH
def test_a_shared_configuration_and_new_weights(kind):
    one, config = build(kind), copy.deepcopy(build(kind).config)
    models = [type(one)(config).double().eval() for _ in range(2)]
    encoders = [type(one.encoder)(models[0].encoder.config).double().eval() for _ in range(2)]
    for pair in (models, encoders):
        for model in pair:
            wavepe.hf.patch(model, "t5")
            model.init_weights()  # the flags of initialised weights stop it
            for module in model.modules():
                module._is_hf_initialized = False
                model._init_weights(module)
        call = {"decoder_input_ids": TARGET} if pair is models else {}
        wanted = pair[0](SOURCE, **call)[0].detach()
        wavepe.hf.unpatch(pair[1])
        assert torch.equal(pair[0](SOURCE, **call)[0].detach(), wanted)
        assert close(wavepe.hf.unpatch(pair[0])(SOURCE, **call)[0].detach(), wanted, 1e-10)


def test_errors(monkeypatch):
    stock = build()
    for spec in ("alibi", "t5:buckets=8", {"0": "t5"}):
        with pytest.raises(ValueError, match="keeps its own position encoding"):
            wavepe.hf.patch(stock, spec)
    with pytest.raises(ValueError, match="is not patched"):
        wavepe.hf.unpatch(stock)
    model = patched(stock)
    with pytest.raises(ValueError, match="patched already"):
        wavepe.hf.patch(model.encoder, "t5")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="needs attn_implementation='wavepe', got 'sdpa'"):
        trained(model, **BATCH)
    stock.set_attn_implementation("wavepe")
    with pytest.raises(ValueError, match="got the argument 'position_bias'"):
        trained(stock, **BATCH)
    monkeypatch.setitem(SIZES, "relative_attention_max_distance", 4)  # 4 buckets of one distance
    with pytest.raises(ValueError, match="relative_attention_max_distance > 4, got 4"):
        wavepe.hf.patch(build(), "t5")
    monkeypatch.setattr(wavepe.hf.families, "calls_interface", lambda layer: False)
    with pytest.raises(TypeError, match="not built like that of transformers"):
        wavepe.hf.patch(stock, "t5")
