"""Attention's tests again, in a process where fresh memory holds NaN.

Kernels work in scratch memory that nobody clears: what they read before they have written it would
be zero in most runs, and no sanitizer sees it.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import wavepe
from cases import load_torch
from processes import output

load_torch()

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
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


@pytest.mark.parametrize(
    ("name", "choice", "tests"),
    [
        (
            "test_ops_attention.py",
            "not composed",
            {"every_option", "every_size", "more_than_one_block"},
        ),
        ("test_ops_attention_fuzz.py", "calls and 0", {"random_calls"}),
        (
            "test_ops_attention_values.py",
            "not composed",
            {"padding_of_nan", "zones", "large_logits"},
        ),
    ],
)
def test_nothing_is_read_before_it_is_written(fill, name, choice, tests):
    options = ("-q", "-p", "no:cacheprovider", "-rA", "-k", choice)
    shown = output("-m", "pytest", *options, HERE / name, LD_PRELOAD=str(fill))
    assert tests <= set(re.findall(r"^PASSED \S+::test_(\w+)", shown, re.M))
    (variants,) = re.findall(r"^variants tested: (.*)", shown, re.M)
    assert all(f"{variant} (" in variants for variant in wavepe.variants())


def test_it_would_be_seen(fill):
    output("-c", "import torch; assert torch.empty(1000).isnan().all()", LD_PRELOAD=str(fill))
