"""benchmarks/score_parts.py: content and position are all that weights of attention come from."""

import numpy as np
import pytest
import torch
import wavepe.hf
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import score_parts

LENGTH = 24
SPECS = (
    "none", "rope", "alibi", "kerple", "t5", "transformer_xl", "relative:extent=8,rank=4",
    "wavelet:scales=2", "wavelet:scales=2,biases=true,projection=true",
    "rope:fraction=0.5+wavelet:scales=2,biases=true",
)  # fmt: skip


def patched(spec):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = wavepe.hf.patch(LlamaForCausalLM(config), spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # what is learned is not 0
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_the_parts_give_the_weights(spec):
    model, tokens = patched(spec), torch.arange(7, 7 + LENGTH)[None]
    with torch.no_grad(), score_parts.recorded() as calls:
        model(tokens, use_cache=False)
    expected = model(tokens, use_cache=False, output_attentions=True).attentions
    assert len(calls) == len(expected) == 2
    for call, weights in zip(calls, expected, strict=True):
        parts = score_parts.content_term(call), score_parts.position_term(call)
        found = score_parts.weights_of(*parts)
        wanted = score_parts.by_distance(weights[0]) * score_parts.visible(LENGTH)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_the_means_of_alibi(tmp_path):
    model, text = patched("alibi"), np.arange(2 * 16, dtype=np.uint8)
    model.save_pretrained(tmp_path)
    found = score_parts.measured(tmp_path, text, length=16, sequences=2)
    slopes = 2.0 ** -np.arange(2, 9, 2)
    middles = [0, 1, 2.5, 5.5, 11.5]  # of 0, 1, 2..3, 4..7, 8..15
    assert found["position"] == pytest.approx([-slopes.mean() * x for x in middles], rel=1e-5)
    assert found["of_query"] == pytest.approx([0] * 5, abs=1e-6)
    assert sum(found["weight"]) == pytest.approx(1)
    kept = {"train_length": 4, "edges": score_parts.edges_of(16), "models": {"alibi": found}}
    score_parts.draw(kept, tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000
    far = 100 * sum(found["weight"][3:])
    assert f"| {far:.0f} % |" in score_parts.table(kept)
