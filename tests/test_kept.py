"""Models that earlier versions saved load, and compute the same. See keep_version.py."""

import json

import pytest
import safetensors.torch
import wavepe
import wavepe.hf
from hf_model import close, logits
from keep_version import KEPT, described
from transformers import AutoModelForCausalLM
from wavepe.hf.layers import LayerEncodings

VERSIONS = sorted(folder.name for folder in KEPT.iterdir())
# Transformers' releases, and CPUs, add in another order.
BOUND = 1e-5


def test_this_version_is_kept():
    assert ".".join(wavepe.__version__.split(".")[:2]) + ".0" in VERSIONS, "see keep_version.py"


@pytest.mark.parametrize("version", VERSIONS)
def test_specs_and_dicts(version):
    kept = json.loads((KEPT / version / "encodings.json").read_text())
    for spec, was in kept.items():
        now = described(spec)
        assert {name: now["options"][name] for name in was["options"]} == was["options"], spec
        assert now["parameters"] == was["parameters"], spec
        assert now["numbers"] == pytest.approx(was["numbers"], rel=BOUND, abs=BOUND), spec
        assert wavepe.encodings.Encoding.from_dict(was["dict"]) == wavepe.encoding(spec)


@pytest.mark.parametrize("version", VERSIONS)
def test_hybrids(version):
    kept = json.loads((KEPT / version / "hybrids.json").read_text())
    assert kept
    for hybrid in kept:
        ranges = {(first, last): wavepe.encoding(spec) for first, last, spec in hybrid["ranges"]}
        assert LayerEncodings(hybrid["stored"]).ranges == ranges


def load(version, name):
    expected = safetensors.torch.load_file(KEPT / version / name / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(KEPT / version / name).eval()
    return model, expected.pop("tokens"), expected


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_logits(version):
    """The logits of stock transformers, by models that are patched."""
    stock, ids, expected = load(version, "stock")
    assert close(logits(stock, ids), expected["rope"], BOUND)
    for spec, wanted in expected.items():
        model = wavepe.hf.patch(load(version, "stock")[0], spec)
        assert close(logits(model, ids), wanted, BOUND), spec


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_with_a_learned_encoding(version):
    model, ids, expected = load(version, "learned")
    ((spec, wanted),) = expected.items()
    assert model.config.position_encoding == str(wavepe.encoding(spec))
    assert close(logits(model, ids), wanted, BOUND)
