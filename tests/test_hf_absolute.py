"""Absolute encodings in a Llama: lengths, caches, and positions that an encoding does not have."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import wavepe.hf
from encoding_cases import FOLLOW_LENGTH
from hf_model import close, logits, patched_tiny, reference, tiny, tiny_config, tokens
from wavepe.hf.absolute import AddAbsolute

STEADY = ("binary", "integer", "sinusoidal")


def hook(model):
    hooks = model.model._forward_pre_hooks.values()
    return next(hook for hook in hooks if isinstance(hook, AddAbsolute))


@pytest.mark.parametrize("spec", [*STEADY, *FOLLOW_LENGTH])
def test_what_is_found_to_follow_the_length(spec):
    for width in (4, 512):  # of the token embedding
        base = tiny().model
        base.config.hidden_size = width
        adds = AddAbsolute(wavepe.encoding(spec), base)
        assert adds.vectors.follows_length == (spec in FOLLOW_LENGTH)


@pytest.mark.parametrize("spec", ["normalised"])
def test_each_row_has_its_own_length(spec):
    model, ids = patched_tiny(spec), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    got = logits(model, ids, attention_mask=mask, use_cache=False)
    assert close(got[0], reference(model, ids[0], spec)[0])
    assert close(got[1, 5:], reference(model, ids[1, 5:], spec)[0])
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert model.generate(ids, max_new_tokens=2, use_cache=False).shape == (2, 14)


@pytest.mark.parametrize("spec", ["binary", "integer"])
def test_a_cache_serves_what_does_not_follow_the_length(spec):
    model, ids = patched_tiny(spec), tokens(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options), wanted)


def test_binary_ends_where_the_bits_do():
    # width 4: sixteen positions, fewer than the tables hold at first
    model, row = patched_tiny("binary", hidden_size=4), tokens(1, 16)
    assert close(logits(model, row)[0], reference(model, row[0], "binary")[0])
    with pytest.raises(ValueError, match=r"with 4 dims .* got 16, which has 5 bits"):
        logits(model, tokens(1, 17))
    assert close(logits(model, row)[0], reference(model, row[0], "binary")[0])
    with pytest.raises(ValueError, match="at least 0"):
        logits(model, row[:, :2], position_ids=torch.tensor([[-1, 0]]))


@pytest.mark.parametrize("spec", STEADY)
def test_far_positions(spec):
    model = patched_tiny(spec)
    far = torch.tensor([[3, 0, 1 << 20, 70000]])  # beyond any table
    wanted = wavepe.encoding(spec).absolute(far[0].numpy(), model.config.hidden_size)
    assert np.array_equal(hook(model).vectors(far)[0], wanted.astype(np.float32))


@pytest.mark.parametrize("spec", ["binary", "integer", "normalised"])
def test_saved_and_loaded(spec, tmp_path):
    config = tiny_config(wavepe.hf.WavePELlamaConfig, position_encoding=spec)
    model, ids = tiny(wavepe.hf.WavePELlamaForCausalLM, config), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.position_encoding == spec
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_compare(tmp_path):
    for part in ("rich", "matplotlib"):
        pytest.importorskip(part)
    from wavepe.cli import main

    def compare(lengths, out):
        sizes = "--train-length 16 --steps 2 --batch 2 --layers 1 --heads 1 --head-dim 6"
        specs = ["--encodings", "binary", "integer", "normalised"]
        rest = ["--eval-bytes", "128", "--threads", "1", "--out", str(tmp_path / out)]
        return main(["compare", *specs, *sizes.split(), "--lengths", *lengths, *rest])

    assert compare(["16", "32"], "done") == 0
    results = json.loads((tmp_path / "done" / "results.json").read_text())
    assert [run["encoding"] for run in results["runs"]] == ["binary", "integer", "normalised"]
    assert compare(["16", "128"], "too_long") == 2  # told before anything is trained
    assert not (tmp_path / "too_long").exists()
