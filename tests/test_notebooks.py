"""The notebooks of docs run, and print and draw what is kept in them.

Their models are trained, and CPUs round differently. So words are compared, and numbers with a
tolerance; of pictures only that they are there. Numbers of a cell with the tag "varies" are not
compared: which head does what is another one after another rounding.
"""

import json
import math
import re
from pathlib import Path

import pytest
from cases import needs

from docs.writers.notebooks import run

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
NUMBER = re.compile(r"-?\d+\.?\d*")
# Words of one run: how long it took; where and on what version of the text it ran.
OF_ONE_RUN = re.compile(r"\d+ s\b|^Text: .*$", re.M)
# Kernel variants move a figure by at most 0.02. The sources of another Python's library, which the
# first notebook takes as its text, move it by up to 18% (3.10 and 3.13).
RELATIVE, ABSOLUTE = 0.25, 0.1


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def text_of(output):
    data = output.get("data", {})
    return "".join(output.get("text") or data.get("text/markdown") or data.get("text/plain", ""))


def differences(cell, found):
    """Return how the outputs of a run differ from those that the cell keeps."""
    kept = cell["outputs"]
    kinds = [[sorted(each.get("data", ["text"])) for each in outputs] for outputs in (kept, found)]
    if kinds[0] != kinds[1]:
        return [f"{kinds[0]} is kept, {kinds[1]} was shown"]
    wrong = []
    for one, other in zip(map(text_of, kept), map(text_of, found), strict=True):
        # Spaces align columns, and stars mark the best number of a column.
        one, other = (OF_ONE_RUN.sub("", text).replace("*", "") for text in (one, other))
        words = [" ".join(NUMBER.sub(" # ", text).split()) for text in (one, other)]
        if words[0] != words[1]:
            wrong.append(f"{one!r} is kept, {other!r} was shown")
        elif "varies" not in cell["metadata"].get("tags", []):
            pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
            wrong += [f"{a} is kept, {b} was shown" for a, b in pairs if not close(a, b)]
    return wrong


def close(one, other):
    return math.isclose(float(one), float(other), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


@pytest.mark.slow  # trains models: half a minute each
@every_notebook
def test_a_notebook_gives_what_it_keeps(path, monkeypatch, tmp_path):
    if any("adapt" in "".join(cell["source"]) for cell in code_cells(path)):
        needs("accelerate")
    monkeypatch.chdir(tmp_path)
    for cell, found in run(code_cells(path)):
        assert not differences(cell, found), f"{path.name} is stale: make notebooks"


@every_notebook
def test_a_kept_notebook_is_small_and_clean(path):
    text = path.read_text("utf-8")
    assert len(text) < 150_000
    assert json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n" == text
    assert any(cell["outputs"] for cell in code_cells(path))
    for cell in code_cells(path):
        assert cell["execution_count"] is None
        for output in cell["outputs"]:
            assert output.get("name") != "stderr"
            assert not re.search(r"/(home|root|tmp|usr)/|Warning", text_of(output))


def stream(text):
    return {"name": "stdout", "output_type": "stream", "text": [text]}


def test_a_cell_shows_what_jupyter_shows(capfd):
    codes = [
        "print('a')\nclass Table:\n    def _repr_markdown_(self): return '# b'",
        "Table()",
        "import sys\nfrom matplotlib import pyplot\npyplot.plot([1, 2])\npyplot.show()",
        "print('a bar', file=sys.stderr)\n1 + 1",
        "a = pyplot.get_fignums()\na.append(3)",
        "a",
    ]
    cells = [{"cell_type": "code", "source": [code]} for code in codes]
    shown = [outputs for _, outputs in run([{"cell_type": "markdown", "source": "c"}, *cells])]
    assert [[*map(text_of, outputs)] for outputs in shown] == [
        ["a\n"], ["# b"], [""], ["2"], [], ["[3]"]
    ]  # fmt: skip
    assert [*shown[2][0]["data"]] == ["image/png"]
    assert capfd.readouterr() == ("", "")
