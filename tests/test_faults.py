"""Faults at writes of `wavepe compare` and `wavepe convert`; `make faults` tries all of them."""

import platform
import re

import pytest
from processes import python

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import faults

EVERY = {"compare": 17, "parts": 121, "copied": 11, "rewritten": 11, "bin": 11}
pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="faults.c is for Linux"
)


@pytest.mark.parametrize("case", faults.CASES)
def test_a_fault_at_a_write(case):
    done = python(faults.__file__, "--cases", case, "--every", EVERY[case])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    writes, runs, _ = map(int, re.findall(r"(\d+) [wf]", done.stdout))
    assert writes > 30
    assert runs >= len(faults.FAULTS) * (writes // EVERY[case])
