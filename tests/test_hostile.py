"""Public functions with arguments that they should refuse (hostile_calls.py).

They must raise an error that names what is needed. They must not crash, hang or change arguments.
"""

import re
from pathlib import Path

import hostile_calls
import pytest
import wavepe.analysis.plots
from cases import HAS_TORCH
from processes import forked

CALLS = Path(hostile_calls.__file__)
slow = pytest.mark.slow
COUNTS = [("numpy", 400), ("torch", 300)]
COUNTS += [pytest.param("numpy", 4000, marks=slow), pytest.param("torch", 2600, marks=slow)]
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"
)


@pytest.mark.parametrize(("side", "count"), COUNTS)
def test_hostile_arguments(side, count):
    if side == "torch":
        if not HAS_TORCH:
            pytest.skip("wavepe was built without torch")
        pytest.importorskip("transformers")
    done = forked(CALLS, side, "suite", 0, count)
    message = f"exit status {done.returncode}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, message
    made, failures = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert failures == 0
    assert made > count / 2


def test_every_public_function_is_called():
    """A new function needs a line in hostile_calls.py."""
    text = hostile_calls.NUMPY + hostile_calls.TORCH
    without_arguments = {"wavepe.__version__", "wavepe.Bias", "wavepe.Table"}
    without_arguments |= {"ops.standard_operators"}
    names = {f"wavepe.{name}" for name in wavepe.__all__}
    names |= {f"analysis.{name}" for name in wavepe.analysis.__all__}
    names |= {f"plots.{name}" for name in wavepe.analysis.plots.__all__}
    if HAS_TORCH:
        names |= {f"ops.{name}" for name in wavepe.ops.__all__}
        names |= {f"nn.{name}" for name in wavepe.nn.__all__}
    assert not [name for name in sorted(names - without_arguments) if f"{name}(" not in text]


def test_a_wrong_exception_is_a_failure():
    """A function raises the wrong type of error, at a line of the table."""
    code = (
        "import sys, runpy, wavepe; sys.argv[1:] = ['numpy', 'suite', '0', '1']\n"
        "def wrong(heads): raise KeyError(heads)\n"
        "wavepe.alibi_slopes = wrong\n"
        f"runpy.run_path({str(CALLS)!r}, run_name='__main__')"
    )
    done = forked("-c", code, PYTHONPATH=str(CALLS.parent))
    assert done.returncode == 1, done.stderr
    assert "FAILED 0: raised" in done.stdout
    assert "again: python tests/hostile_calls.py numpy suite 0 1" in done.stdout
