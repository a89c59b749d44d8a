"""The examples in the docstrings of wavepe.analysis and wavepe.hf run."""

import doctest
import importlib
from pathlib import Path

import pytest
import wavepe

pytest.importorskip("torch")
pytest.importorskip("transformers")

PACKAGE = Path(wavepe.__file__).parent
MODULES = [
    ".".join(("wavepe", *file.relative_to(PACKAGE).with_suffix("").parts))
    for folder in ("analysis", "hf")
    for file in sorted((PACKAGE / folder).rglob("*.py"))
    if ">>> " in file.read_text("utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
