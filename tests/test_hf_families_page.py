"""docs/reference/families.md agrees with the kept results."""

import json
from pathlib import Path

import pytest
from hf_families import FAMILIES, UNROTATED
from test_hf_situations import UPSTREAM_OF_CONVOLUTIONS

from benchmarks import hf_families
from benchmarks.command import RESULTS
from docs.writers import families as page
from docs.writers.__main__ import main as write

ROOT = Path(__file__).parent.parent
VERSIONS = (
    '<properties><property name="transformers" value="5.0.1"/>'
    '<property name="torch" value="2.10"/><property name="cell" value="{}"/></properties>'
)


def kept(cases, folder, *options):
    """Keep a run with these test cases; return the results."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    file = folder / "junit.xml"
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", "utf-8")
    code = hf_families.main([str(file), "--root", str(folder), *options])
    results = folder / RESULTS / "hf-families-5.0.1.json"
    return code, json.loads(results.read_text("utf-8"))["families"] if results.exists() else None


def case(name, inside=""):
    return f'<testcase name="{name}">{inside}</testcase>'


def test_each_cell_of_the_newest_is_a_test_that_passed():
    files = (ROOT / RESULTS).glob("hf-families-*.json")
    runs = [json.loads(path.read_text("utf-8")) for path in files]
    newest = max(runs, key=lambda run: [int(n) for n in run["transformers"].split(".")])
    assert set(newest["families"]) == {*FAMILIES, *UNROTATED}
    for family, row in newest["families"].items():
        assert set(row) == set(hf_families.COLUMNS)
        # Whether a stock model fails in the same way, their tests show.
        more = UPSTREAM_OF_CONVOLUTIONS if family in UNROTATED else ()
        for name in {"trainer_resumes", "checkpointing", *more}:
            assert row.pop(name) in ("right", "upstream")
        assert set(row.values()) == {"right"}


def test_what_a_run_says(tmp_path):
    right, upstream = VERSIONS.format("right"), VERSIONS.format("upstream")
    cases = [
        case("test_beams[llama]", right),
        case("test_beams[qwen3_mixed]", upstream),
        case("test_export[llama]", right + "<failure/>"),
        case("test_export[qwen3_mixed]", "<skipped/>"),
        case("test_values[alibi-llama]"),
        case("test_values[wavelet:scales=4-llama]", "<error/>"),
        case("test_values[none-llama]"),
        case("test_something_else[llama]", "<failure/>"),
    ]
    code, families = kept("".join(cases), tmp_path)
    assert code == 0
    assert families == {
        "llama": {"beams": "right", "export": "fails", "values": "fails"},
        "qwen3_mixed": {"beams": "upstream", "export": "not run"},
    }
    added = kept(case("test_beams[gemma]", right), tmp_path, "--add")
    assert added == (0, {**families, "gemma": {"beams": "right"}})
    assert kept("".join(cases), tmp_path) == (0, families)
    (tmp_path / page.PAGE).parent.mkdir(parents=True)
    (tmp_path / page.PAGE).write_text("<!-- families:begin -->\n<!-- families:end -->\n", "utf-8")
    options = ["families", "--root", str(tmp_path)]
    assert write([*options, "--check"]) == 1
    assert write([*options, "--write"]) == 0
    assert write([*options, "--check"]) == 0
    text = (tmp_path / page.PAGE).read_text("utf-8")
    assert "**transformers 5.0.1** (torch 2.10)" in text
    assert "all 18 situations work in all 2 families, except these:" in text
    assert "| *beams* | upstream | qwen3_mixed |" in text
    assert "| *full pass*; *export* | fails | llama |" in text
    assert "| *full pass*; *export* | not run | qwen3_mixed |" in text


def test_what_works_everywhere_is_one_sentence():
    run = {"transformers": "5.0.1", "torch": "2.10", "families": {}}
    run["families"]["llama"] = dict.fromkeys(hf_families.COLUMNS, "right")
    (line,) = page.exceptions(run).splitlines()
    assert line.endswith("all 18 situations work in all 1 families.")


@pytest.mark.parametrize("cases", ["", "<broken", case("test_beams[llama]")])
def test_no_results(cases, tmp_path, capsys):
    assert kept(cases, tmp_path) == (1, None)
    assert "junit.xml" in capsys.readouterr().err
