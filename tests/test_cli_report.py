"""What `wavepe compare` shows in terminals of any width, and without one: table and progress."""

import io
import re
import sys

import pytest

pytest.importorskip("rich")

from wavepe._labels import fold, shortened
from wavepe.cli.compare import report
from wavepe.cli.compare.progress import Report

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
    report.Section(report.title(128), heads, rows).show()


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
    tables = [block.splitlines() for block in blocks if block.startswith("encoding ")]
    notes = ["".join(map(str.strip, block.splitlines())) for block in blocks[len(tables) :]]
    shown = re.findall(r"\d+ \([\d.]+x\)", " ".join(table[0] for table in tables))
    assert shown == report.headings(lengths, 128)
    cells = [cell for _, row in report.rows_of(runs, lengths) for cell in row]
    assert sorted(cell for cell in cells if cell not in out) == []
    for heading, rule, *rows in tables:
        assert heading.split()[0] == "encoding"
        assert set(rule) == {"─"}
        labels = "".join(re.split(r"\s\s", row)[0] for row in rows)
        for spec in specs:
            if spec in labels:
                continue
            number = re.search(re.escape(spec[:20]) + r"[^\]]*?\.\.\. \[(\d)\]", labels)[1]
            assert width is not None
            assert spec in LONG
            labels = labels.replace(f"... [{number}]", "", 1)
            assert notes[int(number) - 1] == f"[{number}] {spec}".replace("] ", "] ", 1)
    if width is None:
        assert len(tables) == 1
        assert notes == []


def test_one_table_where_it_fits(capsys, monkeypatch):
    out = printed(capsys, monkeypatch, 80, runs_of(SHORT, FEW, 1), FEW)
    assert out.count("encoding ") == 1
    assert f"\n{SHORT[2]}  " in out


def test_numbers_stand_near_their_names(capsys, monkeypatch):
    out = printed(capsys, monkeypatch, 200, runs_of(["none", LONG[0]], FEW, 1), FEW)
    (line,) = (line for line in out.splitlines() if line.startswith("none "))
    assert len(line) - len(line.split(None, 1)[1]) < 75


def test_a_name_is_no_markup(capsys, monkeypatch):
    out = printed(capsys, monkeypatch, None, runs_of(["[red]own[/]", "none"], FEW, 1), FEW)
    assert "[red]own[/]" in out


def test_ascii_alone_where_stdout_takes_no_more(capsys, monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    shown(runs_of(SHORT, FEW, 3), FEW)
    ascii_only.flush()
    text = ascii_only.buffer.getvalue().decode("ascii")
    assert text.count("+-") >= len(SHORT) * len(FEW)
    assert "±" in "".join(row for _, cells in report.rows_of(runs_of(SHORT, FEW, 3), FEW)
        for row in cells)  # fmt: skip


def test_numbers_of_a_training_that_went_astray_are_short():
    runs = [{"encoding": "rope", "perplexity": {"16": 999999.0, "32": 1e285}}]
    assert report.rows_of(runs, [16, 32]) == [("rope", ["999999.00*", "1.00e+285*"])]


def test_headings_are_plain_numbers():
    assert report.headings([128, 192, 1 << 18], 128) == ["128 (1x)", "192 (1.5x)", "262144 (2048x)"]


@pytest.mark.parametrize("width", [1, 7, 18, 40])
@pytest.mark.parametrize("text", ["", "a", "none", *SHORT, *LONG, "words of a text that is folded"])
def test_fold(width, text):
    lines = fold(text, width)
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    labels, notes = shortened([text, "none"], max(width, 10))
    assert max(len(line) for label in labels for line in label.split("\n")) <= max(width, 10)
    assert len(notes) == (len(fold(text, max(width, 10))) > 3)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [40, 80])
def test_progress_keeps_its_numbers(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Report([10, 10, 10], quiet=False) as progress:
        progress.model(0, "none").starts_at(10)
        model = progress.model(1, LONG[0])
        model.step(1, 5.5)
        model.evaluating(LONG[0])
        model.step(2, 5.25)
        progress._progress.refresh()
        model.note("a path:key:name")
    text = re.sub(r"\x1b\[[0-9;]*m", "", sys.stderr.getvalue())  # colours, then movements
    text = re.sub(r"\x1b\[[0-9?]*[A-Zhl]", "\n", text)
    assert "…" not in text
    (line, *_) = (line for line in text.splitlines() if "40%" in line)
    assert line.startswith("[2/3] evaluating rope" if width == 80 else "[2/3] rope:ty")
    assert line.rstrip().endswith(" left")
    assert ("loss 5.250" in line) == (width == 80)
    assert len(line) <= width
    assert "a path:key:name" in text


def test_no_bar_in_a_terminal_that_cannot_move_back(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Report([4], quiet=False, part="keys") as progress:
        progress.model(0, "none").step(2, 5.5)
    assert sys.stderr.getvalue().startswith("[keys 1/1] none: step 2 of 4, loss 5.500")
    assert "\x1b" not in sys.stderr.getvalue()
