"""Tables of docs are current, their figures are judged rightly, and the text on them is true.

That every Python example of every page runs is test_readme.py's part; `make docs` checks links.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import TestCase

import mpmath
import numpy as np
import oracle
import pytest
import wavepe

ROOT = Path(__file__).parent.parent

from wavepe.cli.plot import PICTURES

from benchmarks import exact_angles, rope_accuracy
from benchmarks.command import RESULTS
from docs.writers import WRITERS, images, rope_exactness, rope_speed
from docs.writers.__main__ import main as write

KEPT = json.loads((ROOT / rope_exactness.ACCURACY).read_text("utf-8"))


@pytest.mark.parametrize("writer", WRITERS)
def test_tables_are_current(writer, capsys):
    assert write(["--check", writer]) == 0, capsys.readouterr().err


def test_every_writer_is_in_the_list():
    folder = ROOT / "docs" / "writers"
    found = {path.stem for path in folder.glob("*.py") if "\ndef blocks(" in path.read_text()}
    assert found == set(WRITERS)


def test_every_marker_has_a_writer():
    pages = {importlib.import_module(f"docs.writers.{name}").PAGE for name in WRITERS}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        marked = re.search(r"^<!-- [\w-]+:begin -->$", path.read_text("utf-8"), re.M)
        assert bool(marked) == (path.relative_to(ROOT) in pages), path


@pytest.mark.parametrize(
    ("writer", "names"),
    [(rope_exactness, ("accuracy", "parity")), (rope_speed, ("roofline", "multiscale"))],
)
def test_a_stale_table_is_noticed_and_mended(writer, names, tmp_path, capsys):
    page = tmp_path / writer.PAGE
    page.parent.mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / RESULTS).symlink_to(ROOT / RESULTS)
    markers = "\n".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->" for name in names)
    page.write_text(f"before\n{markers}\nafter\n")
    words = ["--root", str(tmp_path), writer.__name__.rpartition(".")[2]]
    assert write([*words, "--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert write([*words, "--write"]) == 0
    assert write([*words, "--check"]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n<!-- {names[0]}:begin -->\n| ")
    assert text.endswith(f"<!-- {names[-1]}:end -->\nafter\n")
    page.write_text("no markers")
    assert write([*words, "--write"]) == 1
    assert f"{writer.PAGE} needs <!-- {names[0]}:begin -->" in capsys.readouterr().err


def test_missing_sources_are_named(tmp_path, capsys):
    named = {
        "rope_exactness": "no rope-parity-*.json",
        "rope_speed": "no results in",
        "families": "no hf-families-*.json",
        "swap": "hf-swap.json is missing",
    }
    for writer, words in named.items():
        page = tmp_path / importlib.import_module(f"docs.writers.{writer}").PAGE
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("")
        assert write(["--root", str(tmp_path), "--write", writer]) == 1
        assert words in capsys.readouterr().err


def test_kept_figures_hold_the_claims():
    for row in KEPT["rows"]:
        found = row["errors"]
        if row["to"] <= 2**31:
            assert found["wavepe"]["ulp"] <= 0.5001
            assert found["wavepe"]["absolute"] <= 2.0**-25
            assert found["from theta"]["absolute"] <= 2e-7
            assert found["transformers"]["ulp"] > 100 < found["recurrence"]["ulp"]
        else:  # 2^-53 of an angle below the position, and the rounding to float32
            assert found["wavepe"]["absolute"] <= row["to"] * 2.0**-53 + 2.0**-24
        assert row["nearest_to_a_quarter_turn"] > 2.0**-86, "the judge itself needs more places"
        if row["from"] >= 1000:
            assert found["bf16 positions"]["absolute"] > 1 < found["bf16 inv_freq"]["absolute"]


def test_measuring_gives_what_is_kept():
    """Measure a few positions again, with the same rivals."""
    anew = rope_accuracy.measure(count=60, bounds=(1, 10, 100, 10**4, 10**5))
    kept = {row["from"]: row["errors"] for row in KEPT["rows"]}
    assert anew["environment"]["variants"] == wavepe.variants()
    for row in anew["rows"]:
        assert set(row["errors"]) == set(kept[row["from"]])
        assert row["errors"]["wavepe"]["ulp"] <= 0.5001
        assert row["errors"]["transformers"]["ulp"] > 100
    assert rope_accuracy.table(anew).count("\n| ") == len(anew["rows"])


def test_the_judge():
    """Compare integers modulo a turn to mpmath, next to zeros and at both ends."""
    rng, inv_freq = np.random.default_rng(0), oracle.rope_frequencies(64, 5e5)
    exact = exact_angles.Exact(inv_freq)
    positions = [1, 2, 2**31, 2**53, 2**53 - 1, *map(int, rng.integers(1, 2**53, 9))]
    for quarter in exact.quarters[::5]:
        for low, high in ((1, 10), (10**3, 10**4), (10**9, 2**31), (10**15, 2**53)):
            positions += exact_angles.near_quarter_turns(quarter, low, high, 2)
    positions = np.array(positions) * rng.choice([-1, 1], len(positions))
    cos, sin = exact(positions)
    with mpmath.workprec(400):
        for i, m in enumerate(positions):
            for j in range(0, 32, 3):
                right = mpmath.cos_sin(int(m) * mpmath.mpf(float(inv_freq[j])))
                for got, value in zip((cos[i, j], sin[i, j]), right, strict=True):
                    assert abs(got - value) <= 2.0**-49 * abs(value)
    assert exact.nearest < 1e-15


def test_pictures_are_those_of_the_command_and_the_example():
    pages = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/**/*.md"))
    shown = set(re.findall(r"pictures/(\w+)\.png\)", pages))
    example = (ROOT / "examples/theory_pictures.py").read_text("utf-8")
    written = re.findall(r"(\w+)\.png", example.split('"""')[1])
    assert shown == {*PICTURES, *written}
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} == {f"{n}.png" for n in shown}
    named = set(re.findall(r"wavepe plot ([\w:=,]+)", pages)) - {"NAME"}
    assert named
    assert named <= {*PICTURES}


def test_kept_images_hold_what_the_page_says():
    runs = json.loads((ROOT / images.IMAGES).read_text("utf-8"))["runs"]
    by_encoding = {
        name: np.array([list(r["accuracy"].values()) for r in runs if r["encoding"] == name])
        for name in ("none", "1-D", "2-D")
    }
    assert np.abs(by_encoding["none"] - 1 / 8).max() < 0.05
    assert by_encoding["1-D"][:, 0].min() > 0.99 < by_encoding["2-D"][:, 0].min()
    assert by_encoding["1-D"][:, 1:].max() < 0.7
    assert by_encoding["2-D"][:, 1].min() > 0.99
    assert by_encoding["2-D"][:, 2].min() > 0.9


API = ROOT / "docs" / "reference" / "api"
MODULES = ("", ".encodings", ".ops", ".nn", ".hf", ".fairseq", ".analysis", ".analysis.plots")
# Pages that docs/hooks.py completes from docstrings that no source holds.
GENERATED = {"wavepe.ricker", "wavepe.gaussian", "wavepe.morlet", "wavepe.haar"}
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"), meta={})
CONFIG = SimpleNamespace(repo_url=None)


def model_types(text):
    """The classes of the table of model types: the beginning of a name, and its endings."""
    for begin, endings in re.findall(r"^\| `(WavePE\w+)` \| (.*) \|$", text, re.M):
        yield from (begin + ending for ending in re.findall(r"`(\w+)`", endings))


@pytest.mark.parametrize("name", [f"wavepe{part}" for part in MODULES])
def test_every_public_name_has_its_docstring_on_a_page(name):
    text = "".join(page.read_text("utf-8") for page in API.glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(listed) == len(set(listed))
    listed = {*listed, *GENERATED, *(f"wavepe.hf.{each}" for each in model_types(text))}
    module = importlib.import_module(name)
    public = set(module.__all__)
    if name != "wavepe":  # what wavepe shows, too, stands on its page
        public = {each for each in public if getattr(module, each) is not vars(wavepe).get(each)}
    for each in public:  # or where it is defined, as wavepe.hf.adapt
        home = getattr(getattr(module, each), "__module__", name)
        assert {f"{name}.{each}", f"{home}.{each}"} & listed, each


def test_the_navigation_calls_pages_what_they_call_themselves():
    for name, page in re.findall(r"^ +- (.+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M):
        path = ROOT / "docs" / page
        if path.with_suffix(".ipynb").exists():
            text = "".join(json.loads(path.with_suffix(".ipynb").read_text())["cells"][0]["source"])
        elif path.exists() and "reference/api" not in page:
            text = path.read_text("utf-8")
        else:
            continue
        assert text.startswith(f"# {name.strip(chr(34))}\n"), page


@pytest.fixture
def hooks(monkeypatch):
    for name in ("latex2mathml", "markdown", "mkdocs", "pymdownx"):
        pytest.importorskip(name)
    monkeypatch.setattr("sys.path", [*sys.path])
    return importlib.import_module("docs.hooks")


@pytest.fixture
def rendered(hooks):
    """Turn a text into HTML, by docs/hooks.py and the extensions of mkdocs.yml."""
    import markdown
    import yaml

    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["markdown_extensions"]
    options = {name: o for each in listed if isinstance(each, dict) for name, o in each.items()}
    names = [each if isinstance(each, str) else next(iter(each)) for each in listed]

    def render(text):
        html = markdown.markdown(text, extensions=names, extension_configs=options)
        return hooks.on_page_content(html, PAGE, None, None)

    return render


def test_formulas_become_mathml(rendered):
    assert "<msup><mi>u</mi><mn>2</mn></msup>" in rendered("Where $u^2$ is small.")
    block = rendered("$$\n\\frac{q \\cdot k}{\\sqrt{d}} < [K]\n$$")
    assert "<mfrac>" in block
    assert 'display="block"' in block
    assert "$" not in block
    assert "href" not in block
    assert rendered("Set `$k=7q;` and `$x$`.").count("$") == 3
    for text in ("One $n=7; alone.", "All of $a=7q; $b=$a; $c=$b; here.", "From $5 to $6."):
        assert rendered(text) == f"<p>{text}</p>"


def test_a_formula_that_cannot_be_drawn_is_told(rendered):
    with TestCase().assertLogs() as logs:
        rendered("Where $\\nothing{a}$ is.")
    assert r"page.md has a formula that cannot be drawn: \nothing{a}" in logs.output[0]


def test_a_warning_stays_a_quote(rendered):
    assert "<blockquote>" in rendered("> **Two limits.** Text.")


def test_the_site_leaves_out_what_only_the_repository_needs(hooks):
    text = "# Title\n\n`make docs` fills it in. <!-- repository -->\n\nText."
    assert hooks.on_page_markdown(text, PAGE, CONFIG, None) == "# Title\n\nText."


def test_a_command_that_does_not_exist_is_told(hooks):
    text = "```\nwavepe plot bias --png a.png  # right\nwavepe plot bias \\\n    --jpg a.jpg\n```"
    with TestCase().assertLogs() as logs:
        assert hooks.on_page_markdown(text, PAGE, CONFIG, None) == text
    (line,) = logs.output
    assert line.count("wrong command") == line.count("arguments: --jpg a.jpg") == 1


def test_parameters_of_one_entry_have_their_own_defaults(tmp_path):
    griffe = pytest.importorskip("griffe")
    text = '"""F.\n\n    Parameters\n    ----------\n    a, b\n        Text."""'
    encoding = "@register_encoding\nclass E:\n    a: int = 1\n"
    (tmp_path / "one.py").write_text(f'{encoding}def f(a: int = 1, b: str = "x"):\n    {text}')
    ours = griffe.load_extensions("dataclasses", str(ROOT / "docs/signatures.py"))
    one = griffe.load("one", search_paths=[tmp_path], docstring_parser="numpy", extensions=ours)
    named = [*one["f"].docstring.parsed[1].value, one["E"].parameters["a"]]
    assert [f"{x.annotation} {x.default}" for x in named] == ["int 1", "str 'x'", "int 1"]


def test_a_page_fetches_nothing_from_the_network(hooks):
    own = '<script src="a.js"></script> <a href="https://a.org">a</a> <link rel="icon" href="i">'
    with TestCase().assertNoLogs():
        assert hooks.on_post_page(own, PAGE, None) == own
    foreign = '<script defer src="https://a.org/b"> <img src="//a.org/c.png">'
    with TestCase().assertLogs() as logs:
        hooks.on_post_page(f'{foreign} <link rel="stylesheet" href="https://a.org/d">', PAGE, None)
    addresses = re.findall(r"page.md fetches (\S+)", "\n".join(logs.output))
    assert addresses == ["https://a.org/b", "//a.org/c.png", "https://a.org/d"]


BROWSERS = [*filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "chrome")))]


@pytest.mark.skipif(not BROWSERS, reason="needs Chromium")
def test_a_worker_answers_in_a_page_from_a_folder(tmp_path):
    shutil.copy(ROOT / "docs/iframe-worker.js", tmp_path)
    script = 'addEventListener("message", (event) => postMessage(event.data + " answered"))'
    (tmp_path / "worker.js").write_text(script)
    page = tmp_path / "page.html"
    page.write_text("""<body><script src="iframe-worker.js"></script><script>
        const worker = new Worker("worker.js");
        worker.addEventListener("message", (event) => (document.title = event.data));
        worker.postMessage("question");</script>""")
    options = ("--headless", "--no-sandbox", "--virtual-time-budget=10000", "--dump-dom")
    command = [BROWSERS[0], *options, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "<title>question answered</title>" in shown


def test_a_notebook_is_a_page_with_its_kept_output(hooks, tmp_path):
    shown = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[31m5.25\x1b[0m\n", "5.36\n"]},
        {"output_type": "display_data", "data": {"image/png": "iVBO\nRw==", "text/plain": "<F>"}},
        {"output_type": "execute_result", "data": {"text/plain": ["'", "a'"]}},
        {"output_type": "execute_result", "data": {"text/markdown": ["# A # b\n", "c"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Swap\n", "and $x$"]},
        {"cell_type": "code", "source": "swap()", "outputs": shown},
    ]
    (tmp_path / "swap.ipynb").write_text(json.dumps({"cells": cells}))
    assert hooks._notebook(tmp_path / "swap.ipynb").split("\n\n") == [
        "# Swap\nand $x$", "```python\nswap()\n```", "```{.text .output}\n5.25\n5.36\n```",
        "![](data:image/png;base64,iVBORw==)", "```{.text .output}\n'a'\n```", "**A # b**\nc",
        "[This page as a notebook](swap.ipynb)",
    ]  # fmt: skip
