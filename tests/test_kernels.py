"""The checker at the kernels' table (tests/kernels): all of csrc/wavepe.h in every variant.

`make check-kernels SECONDS=600` runs it for longer, with another seed.
"""

import fcntl
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import wavepe
from cases import compiler

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests/kernels"
PROGRAM = ROOT / "build/check-kernels/check"
builds = pytest.mark.slow  # in a minute


@pytest.fixture(scope="module")
def program() -> Path:
    """The checker, built where it is missing or older than a source."""
    if not (ROOT / "csrc/wavepe.h").is_file():
        pytest.skip("not run from a source tree")
    if not (shutil.which("make") and shutil.which(compiler()[0])):
        pytest.skip(f"no make, or no {compiler()[0]}")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    with open(PROGRAM.parent / "lock", "w") as lock:  # other workers of pytest build it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ("make", "-C", str(SOURCES), f"CC={shlex.join(compiler())}")
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return PROGRAM


def run(program, *words):
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=600)


@builds
def test_every_kernel_in_every_variant(program):
    """It fails, too, where a pointer of the table was never called."""
    done = run(program, "--seconds", "4", "--seed", "1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    variants = re.search(r"^calls +(.+)$", done.stdout, re.MULTILINE)[1].split()
    expected = set(wavepe.variants())
    assert set(variants) == expected | ({"avx2x2"} if "avx2" in expected else set())


@builds
def test_planted_faults_are_found(program):
    done = run(program, "--self-test")
    assert done.returncode == 0, done.stdout
    assert re.search(r"self-test: \d+ faults planted in \d+ calls each, all found", done.stdout)


@builds
def test_every_check_is_listed_and_has_cases(program):
    names = run(program, "--list").stdout.split()
    assert len(names) == len(set(names)) > 10
    for name in names:
        done = run(program, "--kernel", name, "--seed", "2", "--case", "0")
        assert done.returncode == 0, done.stdout
        assert re.search(rf"^{name} +1 cases", done.stdout, re.MULTILINE), done.stdout


def test_the_kernels_are_compiled_as_setup_compiles_them():
    """Other flags would give other roundings than those that are shipped."""
    setup, makefile = (ROOT / "setup.py").read_text(), (SOURCES / "Makefile").read_text()
    common = re.search(r"^C_FLAGS = \[(.+)\]\nC_FLAGS \+= .* else \[(.+)\]$", setup, re.MULTILINE)
    flags = re.findall(r'"([^"]+)"', ", ".join(common.groups()))
    assert re.search(r"^C_FLAGS +:= (.+)$", makefile, re.MULTILINE)[1].split() == flags
    listed = re.findall(r'"(avx\w+)"(?:\]|:) ?=? ?\[(.+?)\]', setup)
    assert [name for name, _ in listed] == ["avx2", "avx512", "avx2x2"]
    for name, of_variant in listed:
        wanted = re.findall(r'"([^"]+)"', of_variant)
        found = re.search(rf"^FLAGS_{name} +:= *(.*)$", makefile, re.MULTILINE)[1].split()
        assert found == wanted, name
