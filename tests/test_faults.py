"""Faults at writes of `wavepe compare` and `wavepe convert`; `make faults` tries all of them, and
`pytest --all` some of each case."""

import platform
import re

import faults
import pytest
from processes import forked

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="faults.c is for Linux"
)
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in faults.CASES.items()]


@pytest.mark.parametrize(("case", "every"), [("copied", 97), *SLOW])
def test_a_fault_at_a_write(case, every):
    done = forked(faults.__file__, "--cases", case, "--every", every)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    writes, runs, _ = map(int, re.findall(r"(\d+) [wf]", done.stdout))
    assert writes > 30
    assert runs >= len(faults.FAULTS) * (writes // every)
