"""The rows, protocols, sizes and presets that the options of `wavepe compare` give."""

import argparse
from dataclasses import asdict

import pytest

pytest.importorskip("rich")

import wavepe
from wavepe.cli import compare
from wavepe.cli.compare.comparison import models_of
from wavepe.cli.compare.plan import plan_of
from wavepe.cli.compare.presets import MODELS, PRESETS
from wavepe.cli.compare.protocols import Protocol
from wavepe.cli.compare.rows import Row
from wavepe.cli.compare.settings import Settings, comparisons, hints
from wavepe.cli.errors import UsageError


def parsed(*words):
    """The settings of each part, of these words."""
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return comparisons(parser.parse_args(words))


def settings(*words):
    return parsed(*words)[""]


@pytest.mark.parametrize(
    ("text", "name", "trained"),
    [
        ("rope", "rope", "rope:theta=10000"),
        ("rope:theta=500,inference_theta=scaled", None, "rope:theta=500"),
        ("rope:type=dynamic,factor=2", None, "rope:theta=10000"),
        ("rope:type=yarn,factor=scaled,theta=500", None, "rope:theta=500"),
        ("rope:type=yarn,factor=4", None, "rope:theta=10000,type=yarn,factor=4"),
        ("rope/rope:factor=4,type=yarn", "rope/rope:type=yarn,factor=4", "rope:theta=10000"),
        ("alibi/none", "alibi/none", "alibi"),
    ],
)
def test_rows(text, name, trained):
    row = Row.parse(text)
    assert row.name == (name or str(wavepe.encoding(text)))
    assert str(row.trained) == trained
    assert row.read == wavepe.encoding(text.rpartition("/")[2])


@pytest.mark.parametrize("text", ["rope/", "/rope", "rope/none/alibi", "rope/rotary", "/"])
def test_rows_that_name_no_encoding(text):
    with pytest.raises(UsageError, match=f"--encodings {text}: "):
        Row.parse(text)


def test_rows_trained_alike_share_a_training():
    rows = ["rope", "rope/rope:type=yarn,factor=4", "rope:type=yarn,factor=scaled", "rope/none"]
    (model,) = models_of(settings("--encodings", *rows))
    assert [row.name for row in model.rows] == rows


def test_a_model_is_read_with_parameters_that_it_has():
    with pytest.raises(UsageError, match=r"none/shaw: .* must have the same learned param"):
        settings("--encodings", "none/shaw")
    assert settings("--encodings", "none/shaw", "--finetune", "256").finetune == 256


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("whole", "whole", ("whole", None, None)),
        ("blocks", "blocks:64", ("blocks", 64, None)),
        ("blocks:32", "blocks:32", ("blocks", 32, None)),
        ("sliding", "sliding:64/32", ("sliding", 64, 32)),
        ("sliding:32", "sliding:32/16", ("sliding", 32, 16)),
        ("sliding:32/5", "sliding:32/5", ("sliding", 32, 5)),
    ],
)
def test_protocols(text, name, options):
    protocol = Protocol.parse(text, 64)
    assert str(protocol) == name
    assert tuple(protocol.options.values()) == options
    assert Protocol.parse(name, 7) == protocol


@pytest.mark.parametrize(
    "text", ["", "blocks:1", "blocks:x", "whole:3", "blocks:8/4", "sliding:8/9", "sliding:8/0", "a"]
)
def test_no_protocol(text):
    with pytest.raises(UsageError, match=f"--protocols {text}: "):
        Protocol.parse(text, 64)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_comparison(name):
    parts = parsed("--preset", name)
    assert list(parts) == list(PRESETS[name].parts)
    for part in parts.values():
        assert part.seeds >= 3
        assert max(part.lengths) >= 8 * part.train_length
        assert models_of(part)
        assert Settings.from_dict(asdict(part)) == part
    few = parsed("--preset", name, "--seeds", "1", "--encodings", "rope", "--lengths", "512")
    for part in few.values():
        assert (part.seeds, part.encodings, part.lengths) == (1, ("rope",), (512,))


def test_rows_follow_the_trained_length():
    """A row follows it if its base is the trained length."""
    for preset in ([], ["--preset", "theta"], ["--preset", "wavelet"]):
        rows = settings(*preset, "--train-length", "256").encodings
        assert "rope:theta=256,inference_theta=scaled" in rows
        assert not any("theta=128" in row for row in rows)
    assert settings("--protocols", "whole,blocks").protocols == ("whole", "blocks:128")


def test_an_option_wins_over_a_preset_and_that_over_a_size():
    scales = settings("--preset", "scales", "--model", "small")
    assert (scales.layers, scales.heads, scales.head_dim) == (4, 1, 128)
    assert settings("--preset", "scales", "--heads", "2").heads == 2
    assert settings("--model", "small", "--batch", "3").batch == 3
    assert settings("--steps", "50", "--finetune", "256").finetune_steps == 5


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 0.22), ("small", 1.77), ("medium", 10.6), ("25m", 24), ("100m", 99)],
)
def test_sizes_are_what_they_are_called(name, millions):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from wavepe.cli.compare.training import new_model

    assert name in MODELS
    with torch.device("meta"):
        model = new_model("none", 0, settings("--model", name))
    count = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert count == pytest.approx(1e6 * millions, rel=0.06)


def test_a_training_that_goes_on_sees_as_many_tokens_a_step():
    chosen = settings("--finetune", "512", "--steps", "100", "--keep", "3")
    plan = plan_of(chosen, "rope:theta=10000", 0)
    assert (plan.length, plan.batch, plan.steps, plan.batches_before) == (128, 8, 100, 0)
    assert plan.kept_steps == (25, 50, 75)
    more = plan_of(chosen, "rope:theta=10000/rope:theta=500", 0, base="folder")
    assert (more.spec, more.length, more.batch, more.steps) == ("rope:theta=500", 512, 2, 10)
    assert (more.batches_before, more.kept_steps) == (100, ())


def test_scales_that_are_too_large_get_a_hint():
    rows = ["wavelet:scales=6", "wavelet:scales=8", "wavelet:kind=db4,scales=6", "rope"]
    (hint,) = hints(settings("--encodings", *rows))
    assert hint.startswith("wavelet: the largest scale is 128, above a quarter of the trained len")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "keys", "--finetune", "256"], "--task and --finetune"),
        (["--finetune-steps", "3"], "--finetune-steps: needs --finetune"),
        (["--finetune", "1"], "--finetune 1: needs 2 to"),
        (["--keep", "-1"], "--keep -1: needs 0 to"),
        (["--task", "keys", "--train-length", "64"], "--task keys: needs lengths of at least 96"),
        (["--task", "keys", "--lengths", "95", "128"], "got 95"),
        (["--protocols", ","], "--protocols: needs at least one"),
        (["--protocols", "whole", "whole"], "--protocols whole: given twice"),
        (["--protocols", "blocks", "blocks:128"], "blocks:128: given twice"),
        (["--task", "keys", "--protocols", "whole", "blocks"], "needs --protocols whole"),
        (["--task", "keys", "--protocols", "sliding"], "got sliding:128/64"),
        (["--task", "keys", "--bands"], "--task and --bands"),
        (["--bands", "--encodings", "rope/alibi", "none"], "that is evaluated with a rotar"),
        (["--bands", "--encodings", "rope", "rope:theta=1"], "bases above 1, got rope:theta=1"),
        (["--bands", "--lengths", "64"], "at least the trained length, 128"),
        (["--preset", "bands", "--train-length", "64"], "--train-length: --preset bands compares"),
        (["--preset", "tasks", "--task", "keys"], "--task: --preset tasks compares several"),
    ],
)
def test_what_does_not_go_together(words, said):
    with pytest.raises(UsageError, match=said):
        settings(*words)
