"""Seeded random calls of ops.attention on every variant (fuzz.py), forward and backward; and tests
again in a process where fresh memory holds NaN.

Some calls cross the kernels' blocks. A call with a spoilt argument must be refused.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import fuzz
import pytest
import wavepe
from attention_cases import composed, torch
from cases import generator, soon
from fuzz_attention import Attention
from processes import output

HERE = Path(__file__).parent
CALLS = 300 if fuzz.SANITIZED else 1600  # those of the sanitizers take ten times as long
PARTS = 20  # a failure names a call, which is quick to make again


@pytest.mark.parametrize("part", soon(range(PARTS), 0))
def test_random_calls(every_variant, part):
    share = CALLS // PARTS
    fuzz.make_calls("ops.attention", range(part * share, part * share + share))


class Composition(Attention):
    """The composition, which runs without a kernel: no constant tables, and NaN spreads further."""

    function = staticmethod(composed)
    rounds_out = False

    def takes(self, arguments):
        small = arguments["q"].shape[2] * arguments["k"].shape[2] < 1000
        tensors = arguments.get("p") is None or torch.is_tensor(arguments["p"])
        return small and tensors and not arguments["spoilt"]


def test_random_calls_of_the_composition():
    target, made = Composition(), 0
    for number in range(400):
        arguments = target.draw(generator("fuzz", "composition", number))
        if target.takes(arguments):
            target.check(target.call(arguments), target.judge(arguments), arguments)
            made += 1
    assert made > 80


@pytest.mark.slow
def test_the_calls_cross_blocks():
    """Such calls once found wrong rows: a window, an offset, segments larger than a tile."""
    target, all_three, beyond = Attention(), 0, 0
    for number in range(500):
        arguments = target.draw(generator("fuzz", "blocks", number))
        if arguments["k"].shape[2] > 192:
            beyond += 1
            all_three += {"window", "offset", "segments"} <= arguments.keys()
    assert beyond > 100
    assert all_three > 10


FILL = r"""
#include <stddef.h>
#include <string.h>
extern void *__libc_malloc(size_t);
extern void *__libc_memalign(size_t, size_t);
static void *filled(void *p, size_t n) { return p ? memset(p, 0xff, n) : p; }
void *malloc(size_t n) { return filled(__libc_malloc(n), n); }
void *memalign(size_t a, size_t n) { return filled(__libc_memalign(a, n), n); }
void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) { return (*p = memalign(a, n)) ? 0 : 12; }
"""


@pytest.fixture(scope="module")
def fill(tmp_path_factory):
    """A library that fills every allocation with the bits of NaN."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if platform.libc_ver()[0] != "glibc" or not shutil.which(compiler[0]):
        pytest.skip(f"needs glibc and {compiler[0]}")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has its own malloc")
    folder = tmp_path_factory.mktemp("fill")
    (folder / "fill.c").write_text(FILL)
    command = [*compiler, "-O1", "-fno-builtin", "-shared", "-fPIC", "fill.c", "-o", "fill.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "fill.so"


FILLED = [  # a file, what of it, and tests that must be among them
    ("fuzz", "test_random_calls and 0", {"random_calls"}),
    ("", "not composed and not chunks", {"every_option", "every_size", "more_than_one_block"}),
    ("values", "not composed", {"padding_of_nan", "zones", "large_logits"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "choice", "tests"), FILLED)
def test_nothing_is_read_before_it_is_written(fill, name, choice, tests):
    """Kernels work in scratch memory that nobody clears: what they read before they have written it
    would be zero in most runs, and no sanitizer sees it."""
    file = HERE / f"test_ops_attention{'_' * bool(name)}{name}.py"
    words = ("-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", "-rA", "-k", choice, file)
    shown = output(*words, LD_PRELOAD=str(fill))
    assert tests <= set(re.findall(r"^PASSED \S+::test_(\w+)", shown, re.M))
    (variants,) = re.findall(r"^variants tested: (.*)", shown, re.M)
    assert all(f"{variant} (" in variants for variant in wavepe.variants())


SOME_CALLS = """
import torch, fuzz
assert torch.empty(1000).isnan().all()
fuzz.make_calls("ops.attention", range(10))
"""


def test_random_calls_read_nothing_before_it_is_written(fill):
    output("-c", SOME_CALLS, cwd=HERE, LD_PRELOAD=str(fill))
