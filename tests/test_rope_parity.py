"""rope_frequencies against transformers' own functions: the configurations of the benchmark."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent))  # the benchmarks are no part of the package

import wavepe

pytest.importorskip("rich")  # the page is written with README's own functions

from benchmarks import rope_parity, rope_parity_page
from benchmarks.command import RESULTS
from benchmarks.rope_parity import LIMITS, Configuration, differences


@pytest.fixture(scope="module")
def rows():
    return rope_parity.compare()


def test_every_type_agrees(rows):
    assert {row["type"] for row in rows} == set(wavepe._rope_frequencies.ROPE_TYPES)
    assert sum(row["configurations"] for row in rows) >= 1000
    for row in rows:
        assert row["ok"], row
        assert row["float64"] <= 1e-13, row
        assert row["factor"] <= 1e-15 or row["known exception"], row


def test_few_are_excused(rows):
    """Those whose ramp has lost bits in float32; all others hold the bound."""
    assert {row["type"] for row in rows if row["excused"]} <= {"yarn", "llama3"}
    assert sum(row["excused"] for row in rows) <= 5


def test_report(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rope_parity, "compare", lambda: rows)
    file = tmp_path / "parity.json"
    assert rope_parity.main(["--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["wavepe"] == wavepe.__version__
    for row in written["rows"]:
        assert f"{row['type']:14}{row['configurations']:15}" in printed


def test_another_formula_fails(monkeypatch):
    """A wrong frequency or factor must not pass, and cannot be excused."""
    given = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 64}
    case = Configuration(64, given)
    assert all(differences(case)[key] <= limit for key, limit in LIMITS.items())
    own = wavepe.rope_frequencies

    def wrong(dim, **options):
        inv_freq, factor = own(dim, **options)
        return inv_freq * (1 + 3e-6), factor * (1 + 3e-6)

    monkeypatch.setattr(wavepe, "rope_frequencies", wrong)
    found = differences(case)
    assert found["inv_freq"] > LIMITS["inv_freq"]
    assert found["factor"] > LIMITS["factor"]
    assert not rope_parity.is_excused(found)
    monkeypatch.setattr(rope_parity, "configurations", lambda: [case])
    assert rope_parity.main([]) == 1


def test_page_is_current(rows, tmp_path, capsys):
    """And it is what the kept results and the markers make of it; the kept results are these."""
    assert rope_parity_page.main(["--check"]) == 0, capsys.readouterr().err
    page = tmp_path / rope_parity_page.PAGE
    page.parent.mkdir(parents=True)
    page.write_text("<!-- parity:begin -->\n<!-- parity:end -->\n")
    options = ["--root", str(tmp_path)]
    assert rope_parity_page.main([*options, "--write"]) == 1
    assert "no rope-parity-*.json" in capsys.readouterr().err
    results = tmp_path / RESULTS
    results.parent.mkdir()
    results.symlink_to(Path(__file__).parent.parent / RESULTS)
    assert rope_parity_page.main([*options, "--check"]) == 1
    assert rope_parity_page.main([*options, "--write"]) == 0
    assert rope_parity_page.main([*options, "--check"]) == 0
    for path in results.glob("rope-parity-*.json"):
        kept = json.loads(path.read_text())["rows"]
        assert all(row["ok"] for row in kept)
        assert sum(r["configurations"] + r["absent"] for r in kept) == sum(
            r["configurations"] + r["absent"] for r in rows
        )
