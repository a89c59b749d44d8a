"""The kernel variants: which this CPU should run, and which this build lets us run."""

import platform
from pathlib import Path

import wavepe

KNOWN = ("portable", "avx2", "avx512")
# 64-byte vectors compiled for AVX2: avx512's logic of lanes on any machine with AVX2. Only builds
# made with WAVEPE_TEST_VARIANT=1 hold it, and `wavepe.variants()` does not list it.
TEST_ONLY = "avx2x2"
WIDE = ("avx2", TEST_ONLY, "avx512")

# x86-64-v3 and -v4, as Linux names what they consist of; what it lists the system saves, too.
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
FLAGS = {"avx2": _V3, "avx512": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")}


def of_this_cpu():
    """Return the variants that a build should run here, as far as known: on Linux and x86."""
    found = ["portable"]
    cpu = Path("/proc/cpuinfo")
    if platform.machine().lower() in ("x86_64", "amd64") and cpu.exists():
        lines = [line for line in cpu.read_text().splitlines() if line.startswith("flags")]
        flags = set(lines[0].partition(":")[2].split()) if lines else set()
        found += [name for name, needed in FLAGS.items() if flags.issuperset(needed)]
    return found


def runs(name):
    """Whether this build holds the variant and this CPU runs it."""
    before = wavepe.variant()
    try:
        wavepe.use_variant(name)
    except ValueError:
        return False
    wavepe.use_variant(before)
    return True


def all_of_them():
    """Every variant that can be run here, the test-only one too."""
    return [name for name in ("portable", *WIDE) if runs(name)]


def usual(names):
    """These variants, without the test-only one where avx512 tests its logic of lanes."""
    return [name for name in names if name != TEST_ONLY or "avx512" not in names]
