"""Patched Llamas under torch.compile: one graph, right at every length."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from hf_model import (
    EACH_ENTRY,
    LENGTH,
    close,
    gradients,
    logits,
    patched_tiny,
    tiny,
    tokens,
)
from transformers import StaticCache
from wavepe.hf.rope_config import TRANSFORMERS_5


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_one_graph_for_every_length(spec):
    model = patched_tiny(spec, num_hidden_layers=1)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 12, 3 * LENGTH):
        ids = tokens(2, length)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        options = {"attention_mask": mask, "use_cache": False}
        assert torch.equal(logits(compiled, ids, **options), logits(model, ids, **options))
    assert len(graphs) == 1


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "transformer_xl"])
def test_export_for_every_length(spec):
    model, ids = patched_tiny(spec, num_hidden_layers=1), tokens(2, 9)
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=4096)}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes
    ).module()
    for length in (2, 9, 300):
        ids = tokens(2, length)
        wanted = logits(model, ids)
        assert close(logits(program, input_ids=ids, use_cache=False), wanted, 1e-5)


@pytest.mark.skipif(
    not TRANSFORMERS_5, reason="transformers 4.56 cannot be traced there, with any attention"
)
@pytest.mark.parametrize("spec", ["wavelet:scales=4", "shaw"])
def test_steps_with_a_static_cache(spec):
    model, ids, graphs = patched_tiny(spec, num_hidden_layers=1), tokens(2, 12), []
    cache = StaticCache(config=model.config, max_cache_len=20)

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    pieces = [logits(model, ids[:, :5], past_key_values=cache)]
    for start in range(5, 12):
        positions = torch.tensor([[start]])
        options = {"past_key_values": cache, "position_ids": positions}
        pieces.append(logits(compiled, ids[:, start : start + 1], **options))
    assert close(torch.cat(pieces, dim=1), logits(model, ids, use_cache=False), 1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "sinusoidal"])
def test_training(spec):
    model, ids = patched_tiny(spec, num_hidden_layers=1).train(), tokens(2, 9)
    wanted = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, gradient in zip(gradients(compiled, ids), wanted, strict=True):
        assert close(got, gradient, 1e-5)


@pytest.mark.parametrize("spec", ["alibi", "sinusoidal"])
def test_a_model_that_was_compiled_first_follows(spec):
    model, ids = tiny(num_hidden_layers=1), tokens(2, 9)
    stock = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, ids), stock)
    with wavepe.hf.patched(model, spec):
        assert torch.equal(logits(compiled, ids), logits(model, ids))
        assert not close(logits(model, ids), stock, 1e-2)
    assert torch.equal(logits(compiled, ids), stock)
