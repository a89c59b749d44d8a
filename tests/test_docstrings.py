"""Docstrings of public names: every parameter is described, and examples, where they help, run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import wavepe
from cases import forget_registrations

MODULES = [importlib.import_module(f"wavepe{part}") for part in ("", ".encodings", ".nn", ".ops")]
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    # The docstrings of the ufuncs are in the C module.
    if callable(getattr(module, name)) and not isinstance(getattr(module, name), np.ufunc)
}
# Examples of these would show no more than a shape or a name; every other name has one.
PLAIN = """Bias build_info get_num_threads set_num_threads variant variants nn.AbsoluteEncoding
ops.RelativeTable ops.rope_ ops.rope_qk ops.rope_table ops.wavelet_table encodings.known_encodings
encodings.Query encodings.Bias encodings.Encoding encodings.ALiBi encodings.FoX encodings.Integer
encodings.NoPE encodings.Normalised encodings.PoPE encodings.Relative encodings.RoPE encodings.Shaw
encodings.Sink encodings.Sinusoidal encodings.T5 encodings.TransformerXL encodings.Wavelet
encodings.Window encodings.XPos"""


@pytest.fixture
def registers(monkeypatch):
    forget_registrations(monkeypatch)


HAVE_EXAMPLES = [name for name in PUBLIC if name.removeprefix("wavepe.") not in PLAIN.split()]


@pytest.mark.parametrize("name", HAVE_EXAMPLES)
def test_examples_run(name, registers):
    found = doctest.DocTestFinder().find(PUBLIC[name], name, module=False, globs={})
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


@pytest.mark.parametrize("folder", ["analysis", "hf"])
def test_examples_of_a_folder_run(folder, registers):
    """Where an example needs a model, not every name has one."""
    pytest.importorskip("transformers")
    package = Path(wavepe.__file__).parent
    files = [f for f in (package / folder).rglob("*.py") if ">>> " in f.read_text("utf-8")]
    assert files
    for file in files:
        name = ".".join(("wavepe", *file.relative_to(package).with_suffix("").parts))
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted
        assert not result.failed, name


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_described(name):
    sections = re.split(r"\n\n(\w+)\n-+\n", inspect.getdoc(PUBLIC[name]))
    of_tuple = isinstance(PUBLIC[name], type) and issubclass(PUBLIC[name], tuple)
    wanted = "Attributes" if of_tuple else "Parameters"
    parameters = dict(zip(sections[1::2], sections[2::2], strict=True)).get(wanted, "")
    headings = re.findall(r"^(\S[^:\n]*)", parameters, re.M)
    assert set(inspect.signature(PUBLIC[name]).parameters) <= set(re.findall(r"\w+", str(headings)))
