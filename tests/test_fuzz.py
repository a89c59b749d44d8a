"""Seeded random calls of the NumPy functions on every variant (fuzz.py).

A call must give a right result, a ValueError or a TypeError. The reports of `make fuzz` are tested
too.
"""

import re
import subprocess
import sys
from pathlib import Path

import fuzz
import fuzz_numpy
import numpy as np
import pytest
import wavepe
from cases import generator
from fuzz_draw import NONSENSE, pick

FUZZ = Path(fuzz.__file__)
FEW, CALLS = 60, 250
REFUSED = (ValueError, TypeError)


@pytest.mark.parametrize("name", fuzz_numpy.TARGETS)
@pytest.mark.parametrize("calls", fuzz.parts(FEW, CALLS))
def test_random_calls(every_variant, name, calls):
    fuzz.make_calls(name, calls)


@pytest.mark.parametrize("name", ["alibi_slopes", "rope_frequencies", "wavelet_grid", "sinusoidal"])
def test_random_arguments_of_the_small_functions(name):
    """Every argument gives a result, a ValueError or a TypeError."""
    rng = generator("small", name)
    values = (*NONSENSE, 0, 1, 2, 8, 24, -1, 2.5, np.nan, np.inf, True)
    values += ([1, 2], np.arange(4), np.ones((2, 2)))
    kept = 0
    for _ in range(250):
        args = [pick(rng, *values) for _ in range(rng.integers(1, 4))]
        try:
            getattr(wavepe, name)(*args)
        except REFUSED:
            continue
        kept += 1
    assert 0 < kept < 250


@pytest.fixture
def wrong_rope(monkeypatch):
    """Make the first element of rope wrong on one variant."""
    target = fuzz.target_of("rope")
    right = target.call

    def call(arguments):
        found = right(arguments)
        if found.size and wavepe.variant() == "portable":
            found[(0,) * found.ndim] += 1
        return found

    monkeypatch.setattr(target, "call", call)


def test_a_failure_says_what_repeats_it(wrong_rope):
    with pytest.raises(fuzz.Failure) as caught:
        fuzz.make_calls("rope", range(20), seed="failing")
    message = str(caught.value)
    assert "on portable: AssertionError" in message
    assert re.search(r"^    x = float\d\d\(.*\) strides", message, re.M)
    number = re.search(r"again: python tests/fuzz.py --seed failing --call rope:(\d+)", message)[1]
    with pytest.raises(fuzz.Failure) as again:
        fuzz.make_call("rope", int(number), "failing")
    assert str(again.value) == message


def test_an_accepted_bad_argument_is_a_failure(monkeypatch):
    monkeypatch.setattr(fuzz.target_of("rope"), "refuse", lambda arguments: None)
    with pytest.raises(fuzz.Failure, match="accepted a bad argument"):
        fuzz.make_call("rope", 0, "failing")


@pytest.mark.slow  # three processes that import torch, for seconds
def test_the_command_repeats_a_call_and_counts_calls():
    once = ("--functions", "psi,rope", "--workers", "2", "--minutes", "0.01", "--seed", "7")
    for arguments in (("--call", "rope:3", "--seed", "7"), once):
        done = subprocess.run(
            [sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    first, *counts, last = done.stdout.splitlines()
    assert first.startswith(f"seed 7, variants {', '.join(fuzz.variants())}:")
    made = [int(line.split()[0]) for line in counts]
    assert [line.split()[1:] for line in counts] == [["calls", "of", n] for n in ("psi", "rope")]
    assert min(made) > 0
    assert last == f"seed 7: 0 failures in {sum(made)} calls"


@pytest.mark.slow
def test_a_crash_says_which_call_it_was(monkeypatch, capfd):
    """Workers that end, here at their third call, are counted and replaced."""

    def start(seed, names, first, step, seconds, place):
        code = (
            "import os, fuzz; target = fuzz.target_of('rope')\n"
            "def judge(a, right=target.judge, made=[]):\n"
            "    made.append(1)\n"
            "    return right(a) if len(made) < 3 else os._exit(9)\n"
            "target.judge = judge\n"
            f"fuzz.work({seed!r}, {names!r}, {first}, {step}, {seconds}, {str(place)!r})"
        )
        return subprocess.Popen([sys.executable, "-c", code], cwd=FUZZ.parent)

    monkeypatch.setattr(fuzz, "start", start)
    monkeypatch.setattr(fuzz, "ENOUGH", 2)
    count, failures = fuzz.run_workers("7", ["rope"], 60, 1)
    assert failures == 2
    assert count["rope"] == 4
    message = capfd.readouterr().out
    assert "FAILED rope:2: the process ended with 9" in message
    assert "--seed 7 --call rope:5" in message
