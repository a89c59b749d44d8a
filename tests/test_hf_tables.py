"""Constant tables of a patched Llama: made once for a length, shared, and used in the scores."""

import dataclasses

import pytest
from cases import forget_registrations

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import wavepe.hf
from hf_model import HEAD, LENGTH, close, logits, patched_tiny, reference, tokens
from wavepe.encodings import Encoding
from wavepe.positions import tables

WAVELET = "wavelet:scales=4"


def test_tables_grow_and_are_shared():
    spec = "wavelet:kind=haar,scales=1+300"  # one that no other test has asked for
    encoding = wavepe.encoding(spec)
    for length in (3, 1000, 2500, 5):
        table = tables.constant_table(length, encoding, 8, True)
        assert tables.constant_table(length, encoding, 8, True) is table
        wanted = encoding.table(length, 8)[0]
        p, first, _ = table.tensors(torch.float32, "cpu")
        assert (first, table.beyond) == (0, "zero")
        both = min(length, len(p))
        assert np.array_equal(p[:both].numpy(), wanted[:both])
        assert not wanted[both:].any()
        given = (length, 8, torch.float32, torch.device("cpu"))
        rows = tables._constant_rows(tables.name_of(encoding), True, *given)
        assert np.array_equal(rows.numpy(), wanted)
        rows = tables._constant_rows(tables.name_of(encoding), False, *given)
        assert np.array_equal(rows.numpy(), encoding.table(length, 8, causal=False)[0])
    both = (tables.constant_table(length, encoding, 8, True) for length in (100, 5))
    assert next(both) is next(both)


@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_a_table_of_ones_own_may_begin_and_end_anywhere(monkeypatch, beyond):
    forget_registrations(monkeypatch)
    rows = np.random.default_rng(0).normal(size=(3, HEAD)).astype(np.float32)

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True)
    class Three(Encoding):
        name = f"three_{beyond}"
        entry = "relative"

        def table(self, length, head_dim, *, causal=True):
            return rows, 2, beyond

    def parts(length, **_):
        place = np.arange(length) - 2
        table = rows[place.clip(0, 2)].astype(np.float64)
        return {
            "relative": table if beyond == "edge" else table * (place == place.clip(0, 2))[:, None]
        }

    model, row = patched_tiny(f"three_{beyond}"), tokens(1, 2 * LENGTH)
    wanted = reference(model, row[0], parts)[0]
    assert close(logits(model, row)[0], wanted)
    assert close(logits(model, row, output_attentions=True)[0], wanted)
    given = (f"three_{beyond}", True, 9, HEAD, torch.float32, torch.device("cpu"))
    got = tables._constant_rows(*given)
    assert np.array_equal(got.numpy(), parts(9)["relative"].astype(np.float32))


def test_a_table_made_in_inference_mode_serves_training():
    """The tables are shared; a forward under inference_mode must not spoil them for others."""
    model = patched_tiny("wavelet:scales=4,min_scale=3")  # no other test's table
    with torch.inference_mode():
        model(tokens(1, 300))
    model.train()
    model(tokens(1, 20), labels=tokens(1, 20)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_scores_of_bfloat16_are_added_up_in_float32():
    """A bias of hundreds, rounded to bfloat16, would shift the softmax by whole units."""
    layer = patched_tiny(WAVELET).model.layers[0].self_attn
    generator = torch.Generator().manual_seed(2)
    shape = (1, 4, LENGTH, layer.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    q, k, v = 64 * q, k[:, :2], v[:, :2]
    with torch.no_grad():
        got, _ = wavepe.hf.attention.attention_forward(layer, q, k, v, None, scaling=layer.scaling)
    assert got.dtype == torch.bfloat16
    table = torch.from_numpy(wavepe.encoding(WAVELET).table(LENGTH, layer.head_dim)[0])
    table = table.bfloat16()  # the operator's operands have one dtype
    place = torch.arange(LENGTH)
    delta = place[:, None] - place
    q, k, v = (x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    score = q @ k.mT + (q[..., None, :] * table.double()[delta.clamp(min=0)]).sum(-1)
    score = (score * layer.scaling).masked_fill(delta < 0, -torch.inf)
    wanted = (score.softmax(-1) @ v).transpose(1, 2)
    assert (got.double() - wanted).abs().max() <= 2 * 2.0**-9 * v.abs().max()
