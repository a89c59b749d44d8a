"""docs/results/index.md: what is kept of comparisons, and the tables that come from it."""

import json

import pytest
from compare_cases import arguments, results
from wavepe.cli import main
from wavepe.experiments.presets import rows_for
from wavepe.experiments.settings import Row

from benchmarks import compare_kept
from docs.writers import claims
from docs.writers.compare import tables
from docs.writers.runs import comparison


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison with two seeds, as it is left behind."""
    out = tmp_path_factory.mktemp("runs") / "out"
    assert main(arguments(out, "--seeds", "2", specs=["none", "alibi"])) == 0
    return out


def keep(folder, root, name="wavelet"):
    (root / compare_kept.KEPT).mkdir(parents=True)
    assert compare_kept.main(["--root", str(root), str(folder), name]) == 0
    return comparison(root, name)


def test_what_is_kept(folder, tmp_path):
    kept = keep(folder, tmp_path)
    assert kept["train_length"] == 16
    assert kept["trainings"] == 4
    for run, whole in zip(kept["runs"], results(folder)["runs"], strict=True):
        assert run["encoding"] == whole["encoding"]
        assert run["perplexity"]["32"] == pytest.approx(whole["perplexity"]["32"], abs=1e-4)
    table = tables(tmp_path, "wavelet")
    assert "| encoding | 16 (1x) | 32 (2x) |" in table
    assert "4 trainings of 6 steps" in table
    assert "2 seeds." in table


def test_what_is_not_complete_is_not_kept(folder, tmp_path):
    path = tmp_path / "out" / "results.json"
    path.parent.mkdir()
    found = results(folder)
    found["environment"]["complete"] = False
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="not complete"):
        keep(path.parent, tmp_path)


def test_rows_are_added(folder, tmp_path):
    found = results(folder)
    found["runs"] = [run for run in found["runs"] if run["encoding"] == "alibi"]
    found["runs"] += [dict(run, encoding="shaw") for run in found["runs"]]
    for run in found["runs"]:
        run["perplexity"] = dict.fromkeys(run["perplexity"], 7.0)
    found["environment"]["settings"]["encodings"] = ["alibi", "shaw"]
    found["environment"]["machine"] = "Another machine"
    old, folder = keep(folder, tmp_path), tmp_path / "newer"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(found))
    add = ["--root", str(tmp_path), str(folder), "wavelet", "--add"]
    for _ in range(2):  # the second time its rows take the place of themselves
        assert compare_kept.main(add) == 0
        kept = comparison(tmp_path, "wavelet")
        assert [run["encoding"] for run in kept["runs"]] == 2 * ["none", "alibi", "shaw"]
        assert kept["environment"]["settings"]["encodings"] == ["none", "alibi", "shaw"]
        assert kept["runs"][::3] == old["runs"][::2]
        newer_rows = kept["runs"][1:3] + kept["runs"][4:]
        assert {run["perplexity"]["32"] for run in newer_rows} == {7.0}
        assert [one["rows"] for one in kept["added"]] == [["alibi", "shaw"]]
    table = tables(tmp_path, "wavelet")
    assert "Newer rows: `alibi`, `shaw`." in table
    assert "Another machine" in " ".join(table.split())
    found["environment"]["settings"]["steps"] = 7
    (folder / "results.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="steps"):
        compare_kept.main(add)
    assert comparison(tmp_path, "wavelet") == kept


def test_claims_name_rows_of_their_presets():
    for claim in claims.CLAIMS:
        rows = compare_kept.preset_of(claim.preset).options["encodings"]
        names = [Row.parse(spec).name for spec in rows_for(rows, 128)]
        assert claim.better in names
        assert names.count(claim.better) == 1
        assert {claim.worse} <= {*names} or {*claim.worse} <= {*names}
