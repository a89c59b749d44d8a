"""Hybrids: encodings by ranges of layers; those that are refused are in test_hf_patch.py."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from hf_model import close, logits, reference, tiny, tokens
from transformers import AutoModelForCausalLM, DynamicCache
from wavepe.hf.layers import Choice

IDS = tokens(2, 14)
WAVELET = "wavelet:scales=4"
HYBRIDS = [
    ({"0": WAVELET, "1": "alibi", "2": "none", "3": "rope"}, [WAVELET, "alibi", "none", "rope"]),
    ({"1-2": "none"}, ["rope", "none", "none", "rope"]),
    ({"0-2": "rope:theta=100", 3: WAVELET}, ["rope:theta=100"] * 3 + [WAVELET]),
    ({"0-3": "alibi"}, ["alibi"] * 4),
]


@pytest.mark.parametrize(("spec", "specs"), HYBRIDS)
def test_each_layer_has_its_own(spec, specs):
    model = tiny(num_hidden_layers=4)
    stock = logits(model, IDS)
    wavepe.hf.patch(model, spec)
    got = logits(model, IDS)
    for row in range(2):
        assert close(got[row], reference(model, IDS[row], specs)[0])
    cache, pieces = DynamicCache(config=model.config), []
    for piece in IDS.split((5, 1, 8), dim=1):
        pieces.append(logits(model, piece, past_key_values=cache))
    assert close(torch.cat(pieces, 1), got, 1e-5)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    padded = logits(model, IDS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert close(padded[0, 4:], reference(model, IDS[0, 4:], specs)[0])
    wavepe.hf.unpatch(model)
    assert torch.equal(logits(model, IDS), stock)


def test_layers_that_are_not_named_keep_their_own():
    """The stock module's own numbers: a scaling that wavepe would compute otherwise, too."""
    model = tiny(num_hidden_layers=2)
    model.model.rotary_emb.inv_freq *= 0.5
    stock = logits(model, IDS)
    wavepe.hf.patch(model, {"1": "rope"})
    one = logits(model, IDS)
    wavepe.hf.unpatch(model)
    wavepe.hf.patch(model, {"0-1": "rope"})
    both = logits(model, IDS)
    assert not close(one, stock, 1e-3)
    assert not close(both, one, 1e-3)
    model.model.rotary_emb.stock.inv_freq *= 2
    wavepe.hf.unpatch(model)
    assert close(both, logits(model, IDS), 1e-5)


def test_saved_loaded_and_converted(tmp_path):
    spec = {"0-1": WAVELET, "3": "shaw:clip=3"}
    model = wavepe.hf.patch(tiny(num_hidden_layers=4), spec)
    table = model.model.position_encoding.table
    with torch.no_grad():
        table += torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["position_encoding"] == spec
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.position_encoding == spec
    assert torch.equal(logits(loaded, IDS), wanted)
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", position_encoding={"0-1": WAVELET}
    )
    tiny(num_hidden_layers=4).save_pretrained(tmp_path / "stock")
    done = wavepe.hf.convert(tmp_path / "stock", tmp_path / "converted", {"0-1": WAVELET})
    assert done.encoding == {"0-1": WAVELET}
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert torch.equal(logits(converted, IDS), logits(other, IDS))


def test_options_beside_a_dict_are_refused():
    with pytest.raises(ValueError, match=r"options \(scales\) do not go with a dict"):
        wavepe.hf.patch(tiny(), {"0": "wavelet"}, scales=4)
    with pytest.raises(ValueError, match="one encoding for all layers"):
        wavepe.hf.patch_llama({"0": "none"})
    model = wavepe.hf.patch(tiny(), {"0": "none"})
    with pytest.raises(
        ValueError, match="a hybrid with the position encodings '0: none': unpatch it"
    ):
        wavepe.hf.set_theta(model, 500.0)


def test_how_it_is_written():
    choice = Choice({"4": "none", "0-3": {"name": "rope", "theta": 100}, 5: "alibi"})
    assert choice.stored() == {"4": "none", "0-3": "rope:theta=100", "5": "alibi"}
    assert str(choice) == "4: none; 0-3: rope:theta=100; 5: alibi"
    assert Choice(choice.stored()).stored() == choice.stored()
    by_layer = [str(one) for one in choice.by_layer(7)]
    assert by_layer == [*["rope:theta=100"] * 4, "none", "alibi", "None"]
    config = wavepe.hf.WavePELlamaConfig(position_encoding={0: "wavelet:scales=8"})
    assert config.position_encoding == {"0": "wavelet"}
