"""Options of `wavepe compare`: what they give, which are refused, and the tables and bars shown."""

import argparse
import errno
import io
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import wavepe
from compare_cases import refused, text
from wavepe.cli import compare
from wavepe.common.errors import UsageError
from wavepe.common.labels import fold
from wavepe.experiments import report
from wavepe.experiments.comparison import new_model, plan_of
from wavepe.experiments.presets import MODELS, PRESETS
from wavepe.experiments.progress import Report
from wavepe.experiments.settings import OPTIONS, Protocol, Row, Settings, chosen_settings, hints
from wavepe.experiments.tables import print_table


def settings(*words):
    """The settings of these words."""
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    options = vars(parser.parse_args(words)).items()
    return chosen_settings({k: v for k, v in options if k in OPTIONS})


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
    assert row.evaluated == wavepe.encoding(text.rpartition("/")[2])


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("whole", "whole", ("whole",)),
        ("blocks", "blocks:64", ("blocks", 64)),
        ("blocks:32", "blocks:32", ("blocks", 32)),
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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_comparison(name):
    whole = settings("--preset", name)
    assert whole.seeds >= {"larger": 2, "gpu": 1}.get(name, 3)  # hours of two cores, or of a GPU
    assert max(whole.lengths) >= 8 * whole.train_length
    assert whole.models
    assert Settings.from_dict(asdict(whole)) == whole
    few = settings("--preset", name, "--seeds", "1", "--encodings", "rope", "--lengths", "512")
    assert (few.seeds, few.encodings, few.lengths) == (1, ("rope",), (512,))


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
    assert name in MODELS
    with torch.device("meta"):
        model = new_model("none", 0, settings("--model", name))
    count = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert count == pytest.approx(1e6 * millions, rel=0.06)


def test_a_training_that_goes_on_sees_as_many_tokens_a_step():
    chosen = settings("--finetune", "512", "--steps", "100", "--keep", "3")
    plan = plan_of(chosen, "rope:theta=10000", 0)
    assert (plan.length, plan.batch, plan.steps) == (128, 8, 100)
    assert plan.kept_steps == (25, 50, 75)
    more = plan_of(chosen, "rope:theta=10000/rope:theta=500", 0, continued=True)
    assert (more.length, more.batch, more.steps, more.kept_steps) == (512, 2, 10, ())


def test_scales_that_are_too_large_get_a_hint():
    rows = ["wavelet:scales=6", "wavelet:scales=8", "wavelet:kind=db4,scales=6", "rope"]
    (hint,) = hints(settings("--encodings", *rows))
    assert hint.startswith(
        "wavelet: the largest scale is 128, which is above 32, a quarter of the "
    )


# ------------------------------------------------------------------ what is refused


NO_ROWS = ("rope/", "/rope", "rope/none/alibi", "rope/rotary", "/")
NO_PROTOCOLS = {
    "blocks:1": "1: needs 2 to", "blocks:x": "x: needs integers", "whole:3": "whole:3: ",
    "blocks:8/4": "blocks:8/4: ", "sliding:8/9": "sliding:8/9: ", "sliding:8/0": "0: needs 1 to",
    "a": "a: needs whole, blocks, sliding",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["--encodings", text], f"--encodings {text}: ") for text in NO_ROWS),
        (["--encodings", "binary", "--head-dim", "2"], r"positions must be below 2\^8, got 1023"),
        (["--encodings", "none/shaw"], r"none/shaw: .* must have the same learned param"),
        *((["--protocols", "whole", text], f"--protocols {x}") for text, x in NO_PROTOCOLS.items()),
        (["--task", "keys", "--finetune", "256"], "--task and --finetune"),
        (["--finetune-steps", "3"], "--finetune-steps: needs --finetune"),
        (["--finetune", "1"], "--finetune 1: needs 2 to"),
        (["--keep", "-1"], "--keep -1: needs 0 to"),
        (["--task", "keys", "--train-length", "64"], "--task keys: needs lengths of at least 96"),
        (["--task", "keys", "--lengths", "95", "128"], "got 95"),
        (["--protocols", ","], "--protocols: needs at least one"),
        (["--protocols", "whole", "whole"], "--protocols whole: given twice"),
        (["--task", "keys", "--protocols", "sliding"], "got sliding:128/64"),
        (["--task", "keys", "--bands"], "--task and --bands"),
        (["--bands", "--encodings", "rope/alibi", "none"], "that is evaluated with a rotar"),
        (["--bands", "--encodings", "rope", "rope:theta=1"], "bases above 1, got rope:theta=1"),
        (["--bands", "--lengths", "64"], "at least the trained length, 128"),
    ],
)
def test_what_does_not_go_together(words, message):
    with pytest.raises(UsageError) as caught:
        settings(*words)
    message = re.sub("--([a-z-]+)", lambda match: f"`{match[1].replace('-', '_')}`", message)
    assert re.search(message, str(caught.value))
    assert "--" not in str(caught.value)  # arguments of a function
    assert settings("--encodings", "none/shaw", "--finetune", "256").finetune == 256


@pytest.fixture
def out(tmp_path):
    """The folder of a comparison."""
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--encodings", "rotary"], "'rotary'"),
        (["--encodings", "none", "rope", "none"], "none: given twice"),
        (["--encodings", "wavelet:scales=3", "wavelet:scales=3,min_scale=1"], "given twice"),
        (["--encodings", "wavelet:scales=5"], "5"),
        (["--encodings", "rope:interleaved=true"], "interleaved=true is for models that"),
        (["--encodings", "rope:partial_rotary_factor=0.5"], "rotates 4 of 6 dims"),
        (["--lengths", "1"], "--lengths 1: needs 2 to"),
        (["--lengths", "16", "x"], "--lengths x: needs integers"),
        (["--lengths", "16", "32", "16"], "--lengths 16: given twice"),
        (["--lengths", "99999"], "too short"),
        (["--train-length", "99999"], "too short"),
        (["--steps", "0"], "--steps 0: needs 1 to"),
        (["--steps", "1.5"], "--steps: invalid whole_number value: '1.5'"),
        (["--encodings", "rope,", "none"], "; several specs are separated by blanks"),
        (["--head-dim", "7"], "--head-dim 7: needs an even number"),
        (["--threads", "20000"], "--threads 20000: needs 1 to 1024"),
        (["--save-every", "0"], "--save-every 0"),
        (["--lr", "0"], "--lr 0: needs a positive number"),
        (["--lr", "nan"], "--lr nan"),
        (["--data", "/does/not/exist"], "no such file or folder"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(out, capsys, wrong, words):
    assert words in refused(capsys, out, *wrong)
    assert not out.exists()


def test_short_empty_and_unreadable_text(out, tmp_path, capsys):
    short = tmp_path / "short.txt"
    for size in (0, 1, 32, 48):  # held out 32, so 17 too few to train on
        short.write_bytes(b"a" * size)
        message = refused(capsys, out, data=short)
        assert "too short" in message, size
        assert "needs at least 32 held out and 17 others" in message, size
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "binary").write_bytes(b"\0" * 9999)
    assert "no text files" in refused(capsys, out, data=empty)
    assert not out.exists()


@pytest.mark.parametrize("call", ["mkdir", "read_bytes"])
def test_files_and_folders_without_permission(out, capsys, monkeypatch, call):
    def denied(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    text()  # is written by now
    monkeypatch.setattr(Path, call, denied)  # the tests may run as root, who is refused nothing
    error = refused(capsys, out)
    assert "Permission denied" in error
    assert str(out if call == "mkdir" else text()) in error


# ------------------------------------------------------------------ tables and progress

SHORT = ["none", "rope", "rope:theta=10000,inference_theta=scaled", "wavelet:scales=6"]
LONG = [
    "rope:type=longrope,short_factor="
    + "+".join(str(1.0 + step * i) for i in range(24))
    + ",long_factor="
    + "+".join(str(2.0 + step * i) for i in range(24))
    for step in (0.25, 0.5)
]
FEW, MANY = (128, 256, 512, 1024), tuple(128 << i for i in range(12))


def runs_of(specs, lengths, seeds):
    return [
        {
            "encoding": spec,
            "seed": seed,
            "perplexity": {str(n): 2 + number + seed / 7 + n / 128 for n in lengths},
        }
        for seed in range(seeds)
        for number, spec in enumerate(specs)
    ]


def shown(runs, lengths):
    """Print the table, as `wavepe compare` does."""
    heads, rows = report.headings(lengths, 128), report.rows_of(runs, lengths)
    print_table(report.title(128), "encoding", heads, rows)


def printed(capsys, monkeypatch, width, runs, lengths):
    """The table as a terminal of this width gets it, without colours; None: as a pipe does."""
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown(runs, lengths)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).strip()


@pytest.mark.parametrize("width", [40, 80, 200, None])
@pytest.mark.parametrize("lengths", [FEW, MANY])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("specs", [SHORT, [SHORT[0], *LONG, SHORT[2]]])
def test_nothing_is_lost_and_nothing_is_cut(capsys, monkeypatch, width, lengths, seeds, specs):
    runs = runs_of(specs, lengths, seeds)
    out = printed(capsys, monkeypatch, width, runs, lengths)
    assert "…" not in out
    if width is not None:
        assert max(map(len, out.splitlines())) <= width
    _, *blocks = out.split("\n\n")
    tables = [block.splitlines() for block in blocks]
    shown = re.findall(r"\d+ \([\d.]+x\)", " ".join(table[0] for table in tables))
    assert shown == report.headings(lengths, 128)
    cells = [cell for _, row in report.rows_of(runs, lengths) for cell in row]
    assert sorted(cell for cell in cells if cell not in out) == []
    for heading, rule, *rows in tables:
        assert heading.split()[0] == "encoding"
        assert set(rule) == {"─"}
        labels = "".join(re.split(r"\s\s", row)[0] for row in rows)
        assert [spec for spec in specs if spec not in labels] == []
    if width is None:
        assert len(tables) == 1


def test_how_a_table_looks(capsys, monkeypatch):
    """One table where it fits; numbers near their names; and a name is not markup."""
    out = printed(capsys, monkeypatch, 80, runs_of(SHORT, FEW, 1), FEW)
    assert out.count("encoding ") == 1
    assert f"\n{SHORT[2]}  " in out
    out = printed(capsys, monkeypatch, 200, runs_of(["none", LONG[0]], FEW, 1), FEW)
    (line,) = (line for line in out.splitlines() if line.startswith("none "))
    assert len(line) - len(line.split(None, 1)[1]) < 75
    out = printed(capsys, monkeypatch, None, runs_of(["[red]own[/]", "none"], FEW, 1), FEW)
    assert "[red]own[/]" in out


@pytest.mark.parametrize(
    ("key", "cells"), [("perplexity", ["0.25*", "0.75"]), ("accuracy", ["0.25", "0.75*"])]
)
def test_the_best_has_the_star(key, cells):
    runs = [{"encoding": name, key: {"16": x}} for name, x in (("rope", 0.25), ("none", 0.75))]
    rows = [("rope", cells[:1]), ("none", cells[1:])]
    assert report.rows_of(runs, [16], key) == rows


def test_headings_and_numbers_of_a_training_that_went_astray_are_short():
    runs = [{"encoding": "rope", "perplexity": {"16": 999999.0, "32": 1e285}}]
    assert report.rows_of(runs, [16, 32]) == [("rope", ["999999.00*", "1.00e+285*"])]
    assert report.headings([128, 192, 1 << 18], 128) == ["128 (1x)", "192 (1.5x)", "262144 (2048x)"]


@pytest.mark.parametrize("width", [1, 7, 18, 40])
@pytest.mark.parametrize("text", ["", "a", "none", *SHORT, *LONG, "words of a text that is folded"])
def test_fold(width, text):
    lines = fold(text, width)
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [40, 80])
def test_progress_keeps_its_numbers(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Report([10, 10, 10], quiet=False) as progress:
        progress.skip(0, 10)
        progress.doing(1, LONG[0])
        progress.step(1, 1, 5.5)
        progress.step(1, 2, 5.25)
        progress._progress.refresh()
        progress.note(1, "a path:key:name")
    text = re.sub(r"\x1b\[[0-9;]*m", "", sys.stderr.getvalue())  # colours, then movements
    text = re.sub(r"\x1b\[[0-9?]*[A-Zhl]", "\n", text)
    assert "…" not in text
    (line, *_) = (line for line in text.splitlines() if "40%" in line)
    assert line.startswith("[2/3] rope:ty")
    assert line.rstrip().endswith(" left")
    assert ("loss 5.250" in line) == (width == 80)
    assert len(line) <= width
    assert "a path:key:name" in text


def test_no_bar_in_a_terminal_that_cannot_move_back(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Report([4, 900], quiet=False) as progress:
        progress.doing(0, "none")
        progress.step(0, 1, 6.5)
        progress.skip(1, 900)  # counts for no speed
        progress.step(0, 2, 5.5)
    first, second = sys.stderr.getvalue().splitlines()
    assert first.startswith("[1/2] none: step 1 of 4, loss 6.500")
    assert second == "[1/2] none: step 2 of 4, loss 5.500, -:--:-- left"
    assert "\x1b" not in sys.stderr.getvalue()
