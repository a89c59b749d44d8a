"""The site's pages of the API have every public name; `make docs` itself is a step of its own."""

import importlib
import re
from pathlib import Path

import pytest
import wavepe

API = Path(__file__).parent.parent / "docs" / "reference" / "api"
MODULES = {
    "wavepe": (),
    "wavepe.encodings": (),
    "wavepe.ops": ("torch",),
    "wavepe.nn": ("torch",),
    "wavepe.hf": ("torch", "transformers"),
    "wavepe.fairseq": (),
    "wavepe.analysis": ("torch",),
    "wavepe.analysis.plots": ("matplotlib",),
}
# Pages that docs/hooks.py completes from docstrings that no source holds.
GENERATED = {"wavepe.ricker", "wavepe.gaussian", "wavepe.morlet", "wavepe.haar"}


def model_types(text):
    """The classes of the table of model types: the beginning of a name, and its endings."""
    for begin, endings in re.findall(r"^\| `(WavePE\w+)` \| (.*) \|$", text, re.M):
        yield from (begin + ending for ending in re.findall(r"`(\w+)`", endings))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_its_docstring_on_a_page(name):
    for needed in MODULES[name]:
        pytest.importorskip(needed)
    text = "".join(page.read_text("utf-8") for page in API.glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(listed) == len(set(listed))
    listed = {*listed, *GENERATED, *(f"wavepe.hf.{each}" for each in model_types(text))}
    module = importlib.import_module(name)
    public = set(module.__all__)
    if name != "wavepe":  # what wavepe shows, too, stands on its page
        public = {each for each in public if vars(module)[each] is not vars(wavepe).get(each)}
    assert {f"{name}.{each}" for each in public} <= listed
