"""Llamas with learned encodings, against the same model written out in float64."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import wavepe.hf
from encoding_cases import HEAD, LEARNED
from hf_model import (
    LENGTH,
    close,
    gradients,
    logits,
    patched_tiny,
    recompute,
    reference,
    tiny,
    tokens,
    worst,
)
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache

pytestmark = pytest.mark.parametrize("spec", LEARNED)


def parameters_of(model):
    return dict(model.base_model.position_encoding.named_parameters())


def trained(spec, dtype=None, **options):
    """A patched model whose parameters are not the initial ones."""
    model = wavepe.hf.patch(tiny(**options).to(dtype), spec)
    shake(model)
    return model


def shake(model):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters_of(model).values():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (2, 1)], ids=str)
def test_logits_equal_the_written_out_model(spec, heads):
    model = trained(spec, heads=heads[0], kv_heads=heads[1])
    for length in (1, 7, 3 * LENGTH):
        row = tokens(1, length)
        assert close(logits(model, row)[0], reference(model, row[0], spec)[0])


def test_first_values_are_those_of_the_encoding(spec):
    model = patched_tiny(spec)
    initial = wavepe.encoding(spec).parameters(HEAD, 4)
    got = parameters_of(model)
    assert {name: tuple(x.shape) for name, x in got.items()} == LEARNED[spec][1]
    assert list(got) == list(initial)
    for name, value in initial.items():
        assert torch.equal(got[name], torch.from_numpy(value).float())
    row = tokens(1, 2 * LENGTH)
    assert close(logits(model, row)[0], reference(model, row[0], spec)[0])
    assert not close(logits(trained(spec), row), logits(model, row), 1e-2)


def test_float64_model(spec):
    model, row = trained(spec).double(), tokens(1, LENGTH)
    assert all(x.dtype == torch.float64 for x in parameters_of(model).values())
    assert close(logits(model, row)[0], reference(model, row[0], spec)[0], 1e-6)


def test_bfloat16_is_as_good_as_the_stock_model(spec):
    stock, row = tiny().bfloat16(), tokens(1, LENGTH)
    wanted = reference(stock, row[0], "rope")[0]
    error = worst(logits(stock, row)[0].double(), wanted)
    model = trained(spec, torch.bfloat16)
    assert all(x.dtype == torch.float32 for x in parameters_of(model).values())
    got = logits(model, row)[0].double()
    assert worst(got, reference(model, row[0], spec)[0]) <= 2 * error


def test_gradients_are_those_of_the_written_out_model(spec):
    """By differences of the loss of the float64 model, at the largest entries and a few others."""
    model, ids = trained(spec).train(), tokens(1, 9)
    gradients(model, ids)
    found = {name: x.grad.clone() for name, x in parameters_of(model).items()}

    def loss():
        row = reference(model, ids[0], spec)[0][:-1]
        row = row - row.max(axis=1, keepdims=True)
        chosen = row[np.arange(8), ids[0, 1:].numpy()]
        return (np.log(np.exp(row).sum(axis=1)) - chosen).mean()

    model.double()
    for name, parameter in parameters_of(model).items():
        gradient, entries = found[name].flatten(), parameter.data.view(-1)
        for place in [*gradient.abs().topk(3).indices.tolist(), 0, -1]:
            middle, step = entries[place].item(), 1e-5
            losses = []
            for value in (middle + step, middle - step):
                entries[place] = value
                losses.append(loss())
            entries[place] = middle
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - gradient[place].item()) < 1e-3 * gradient.abs().max()
        assert gradient.abs().max() > 1e-4


def test_attention_weights_on_request(spec):
    model, row = trained(spec), tokens(1, 9)
    found = model(row, output_attentions=True)
    wanted, weights = reference(model, row[0], spec)
    assert close(found.logits[0].detach(), wanted)
    assert close(torch.cat(found.attentions).detach(), weights)


def test_masks_of_the_users_own(spec):
    model, ids = trained(spec), tokens(2, 7)
    seen = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    wanted = logits(model, ids)
    assert close(logits(model, ids, attention_mask=seen), wanted, 1e-5)
    assert close(logits(model, ids, attention_mask=added), wanted, 1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_equals_its_rows(spec, side):
    model, ids = trained(spec), tokens(3, 12)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 11)):
        mask[row, :padding] = 0
    mask = mask if side == "left" else mask.flip(1)
    got = logits(model, ids, attention_mask=mask)
    assert torch.isfinite(got).all()
    for row, kept in enumerate(mask.bool()):
        assert close(got[row][kept], reference(model, ids[row][kept], spec)[0])


def test_packed_sequences(spec):
    model, ids = trained(spec), tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    got = logits(model, ids, position_ids=positions, use_cache=False)[0]
    assert close(got[:5], reference(model, ids[0, :5], spec)[0])
    assert close(got[5:], reference(model, ids[0, 5:], spec)[0])


# ------------------------------------------------------------------ caches


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_sequence_in_pieces(spec, cache):
    model, ids = trained(spec), tokens(2, 12)
    wanted = logits(model, ids, use_cache=False)
    options = {"max_cache_len": 20} if cache == "static" else {}
    filled = (StaticCache if cache == "static" else DynamicCache)(config=model.config, **options)
    pieces = [
        logits(model, ids[:, start:stop], past_key_values=filled)
        for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12))
    ]
    assert close(torch.cat(pieces, dim=1), wanted, 1e-5)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_with_and_without_a_cache(spec, how):
    model, ids = trained(spec), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": LENGTH - 9, "do_sample": False}
    wanted = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options, **how), wanted)


# ------------------------------------------------------------------ training and tools


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(spec, reentrant):
    model, ids = trained(spec).train(), tokens(2, LENGTH)
    wanted = gradients(model, ids)
    recompute(model, reentrant)
    for got, gradient in zip(gradients(model, ids), wanted, strict=True):
        assert close(got, gradient, 1e-5 if reentrant else 0)
        assert gradient.any()


def test_autocast_trains(spec):
    model, ids = trained(spec).train(), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for parameter in parameters_of(model).values():
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.any()


def test_compiled_whole(spec):
    torch._dynamo.reset()
    model, graphs = trained(spec, num_hidden_layers=1), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 12, 3 * LENGTH, 200):
        ids = tokens(2, length)
        options = {"use_cache": False}
        assert torch.equal(logits(compiled, ids, **options), logits(model, ids, **options))
    assert len(graphs) == 1
    torch._dynamo.reset()
    model, ids = model.train(), tokens(2, 9)
    wanted = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, gradient in zip(gradients(compiled, ids), wanted, strict=True):
        assert close(got, gradient, 1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_keep_what_was_learned(spec, dtype, tmp_path):
    model = trained(spec, getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert not any(report.values())
    assert loaded.config.position_encoding == spec
    for name, value in parameters_of(model).items():
        assert torch.equal(parameters_of(loaded)[name], value)  # in dtype too
        assert value.dtype == torch.float32
    ids = tokens(2, 12)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.filterwarnings("ignore")  # transformers reports the missing keys
def test_a_stock_checkpoint_gets_the_initial_values(spec, tmp_path):
    tiny().save_pretrained(tmp_path)
    own = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding=spec)
    wavepe.hf.patch_llama(spec)
    try:
        between = LlamaForCausalLM.from_pretrained(tmp_path)
    finally:
        wavepe.hf.unpatch_llama()
    ids = tokens(2, 12)
    for model in (own, between):
        assert torch.equal(logits(model, ids), logits(patched_tiny(spec), ids))


def test_unpatch_restores_everything(spec):
    model, ids = tiny(), tokens(2, 12)
    before, names = logits(model, ids), list(model.state_dict())
    attributes = [sorted(vars(module)) for module in model.modules()]
    wavepe.hf.patch(model, spec)
    added = [name for name in model.state_dict() if name not in names]
    assert added == [f"model.position_encoding.{name}" for name in LEARNED[spec][1]]
    shake(model)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, ids), logits(model, ids))
    assert torch.equal(logits(wavepe.hf.unpatch(model), ids), before)
    assert list(model.state_dict()) == names
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert not close(logits(other, ids), before, 1e-2)


def test_casts_to_float8_stop_at_what_is_learned(spec):
    model = patched_tiny(spec)
    model.to(torch.float8_e4m3fn)
    assert model.lm_head.weight.dtype == torch.float8_e4m3fn
    assert {x.dtype for x in model.model.position_encoding.parameters()} == {torch.float32}
