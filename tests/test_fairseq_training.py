"""Training with --pos-enc, compared to attention that is written out in torch.

Without --pos-enc it is the stock training. fairseq's own options are tested too.
"""

import contextlib
from unittest import mock

import numpy as np
import pytest
from fairseq_cases import (
    BARE,
    GPT,
    MARKS,
    NO_DROPOUT,
    WIKI103,
    dense,
    evaluate,
    parts_in,
    torch,
    train,
    without_plugin,
)
from wavepe.fairseq.attention import CausalSelfAttention

pytestmark = MARKS

RECIPES = {"transformer_lm_wiki103": WIKI103, "transformer_lm": BARE}


def assert_same_parameters(state, other):
    assert state.keys() == other.keys()
    for name, x in state.items():
        if not name.endswith("_float_tensor"):  # fairseq's, of memory that nobody sets
            assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("arch", RECIPES)
def test_without_pos_enc_it_is_stock_fairseq(arch, tmp_path, monkeypatch):
    recipe = RECIPES[arch]
    ours = train(tmp_path / "ours", recipe=recipe)
    perplexity = evaluate(ours.path)["perplexity"]
    without_plugin(monkeypatch)
    stock = train(tmp_path / "stock", recipe=recipe)
    assert ours.losses == stock.losses
    assert_same_parameters(ours.state["model"], stock.state["model"])
    assert evaluate(ours.path)["perplexity"] == perplexity == evaluate(stock.path)["perplexity"]
    with pytest.raises(SystemExit):
        train(tmp_path / "unknown", "--pos-enc", "alibi", recipe=recipe)


# --------------------------------------------------------------- fused attention, and all scores


def of_scores(encoding):
    """The forward of self-attention by `dense`."""

    def forward(self, query, *_, key_padding_mask=None, **__):
        hidden = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        return dense(self, query, parts_in(encoding, len(query)), hidden), None

    return mock.patch.object(CausalSelfAttention, "forward", forward)


@pytest.mark.slow
def test_training_is_that_of_attention_written_out(tmp_path):
    """Losses of 200 updates agree to a few float32 ulp.

    The learning rate is small, so rounding errors do not grow.
    """
    given = ("--pos-enc", "wavelet", *NO_DROPOUT, "--max-tokens", 128, "--max-update", 200)
    fused = train(tmp_path / "fused", *given, recipe=GPT)
    with of_scores("wavelet"):
        scores = train(tmp_path / "scores", *given, recipe=GPT)
    assert len(fused.losses) == 200
    assert np.mean(fused.losses[-20:]) < fused.losses[0] - 2  # it has learned
    assert np.abs(np.subtract(fused.losses, scores.losses)).max() <= 1e-5


@pytest.mark.slow
def test_training_with_dropout_is_close_to_it(tmp_path):
    """fairseq's own dropout drops other weights, so losses agree only in the mean.

    The means of 50 updates were 0.003 apart, and 0.26 from those without dropout.
    """
    given = ("--pos-enc", "wavelet", *NO_DROPOUT, "--max-tokens", 128, "--max-update", 50)
    means = [np.mean(train(tmp_path / "none", *given, recipe=GPT).losses)]
    for patched in (contextlib.nullcontext(), of_scores("wavelet")):
        with patched:
            run = train(tmp_path / "dropout", *given, "--attention-dropout", 0.9, recipe=GPT)
        (tmp_path / "dropout" / "checkpoint_last.pt").unlink()
        means.append(np.mean(run.losses))
    none, fused, scores = means
    assert abs(fused - scores) < 0.05 < 0.15 < fused - none


# --------------------------------------------------------------- next to options of fairseq's


def test_checkpoint_activations(tmp_path):
    """The same updates, dropout included, with less memory."""
    given = ("--pos-enc", "wavelet:learned=true")
    runs = [
        train(tmp_path / str(i), *given, *x)
        for i, x in enumerate([(), ["--checkpoint-activations"]])
    ]
    assert runs[0].losses == runs[1].losses
    assert_same_parameters(runs[0].state["model"], runs[1].state["model"])


def test_accumulated_gradients(tmp_path):
    given = ("--pos-enc", "rope", "--max-tokens", 128, "--update-freq", 2, "--max-update", 12)
    run = train(tmp_path, *given, recipe=GPT)
    assert len(run.losses) == 24
    assert np.mean(run.losses[-4:]) < run.losses[0] - 0.5


def test_shared_embeddings(tmp_path):
    run = train(tmp_path, "--pos-enc", "alibi", "--share-decoder-input-output-embed", recipe=GPT)
    weights = run.state["model"]
    assert torch.equal(
        weights["decoder.embed_tokens.weight"], weights["decoder.output_projection.weight"]
    )
    assert evaluate(run.path)["perplexity"] < 400


def test_layer_drop(tmp_path):
    """Trained with layers left out, evaluated with all of them or with those that are kept."""
    run = train(tmp_path, "--pos-enc", "wavelet", "--decoder-layerdrop", 0.5, recipe=GPT)
    whole = evaluate(run.path)["perplexity"]
    part = evaluate(run.path, overrides={"decoder_layers_to_keep": "1"})["perplexity"]
    assert whole < 420
    assert part != whole


def test_half_precision(tmp_path):
    """Training and evaluation; what an encoding learns, and its tables, stay in float32."""
    forward, seen = CausalSelfAttention.forward, set()

    def recorded(self, query, *args, **kwargs):
        learned = {x.dtype for x in self.positions[0].parameters()}
        seen.add((query.dtype, self.q_proj.weight.dtype, *learned))
        return forward(self, query, *args, **kwargs)

    half, single = torch.float16, torch.float32
    with mock.patch.object(CausalSelfAttention, "forward", recorded):
        run = train(
            tmp_path, "--pos-enc", "wavelet:learned=true", "--memory-efficient-fp16", recipe=GPT
        )
        assert seen == {(half, half, single)}
        assert run.losses[-1] < run.losses[0] - 0.5
        wide = evaluate(run.path)["loss"]
        assert seen == {(half, half, single), (single, single, single)}
        seen.clear()
        narrow = evaluate(run.path, "--fp16")["loss"]
        assert seen == {(half, half, single)}
    assert wide != narrow
    assert abs(wide - narrow) < 0.01
