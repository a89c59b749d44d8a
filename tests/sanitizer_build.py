"""A build with AddressSanitizer and UndefinedBehaviorSanitizer in build/sanitizer, with CUDA's
kernels compiled for the CPU and the test-only variant.

python tests/sanitizer_build.py -m pytest -q tests/test_hf.py    runs Python with that build
"""

import os
import shlex
import shutil
import subprocess
import sys

from cases import compiler
from second_build import ROOT, SecondBuild

HOW = {"WAVEPE_SANITIZE": "1", "WAVEPE_EMULATE_CUDA": "1", "WAVEPE_TEST_VARIANT": "1"}
BUILD = SecondBuild("sanitizer", HOW)


class Unavailable(Exception):
    """Sanitized builds are not possible here; the message says why."""


def environment():
    """Return the environment in which `import wavepe` brings the sanitized build."""
    preload = runtimes("libasan.so", "libubsan.so")
    return {
        **BUILD.environment(),
        "LD_PRELOAD": " ".join(preload),
        # LeakSanitizer does not see what Python's own allocator refers to: see leaks()
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def leaks():
    """Return variables to add to the environment to look for leaks.

    With them Python allocates every object by malloc. Python keeps some objects to the end, so a
    process reports its leaks, but does not fail.
    """
    options = "detect_leaks=1:allocator_may_return_null=1:exitcode=0"
    return {"ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}


def runtimes(*names):
    """Return the paths of libraries that must be in the process before Python's allocations."""
    if not (ROOT / "setup.py").is_file():
        raise Unavailable("not run from a source tree")
    if not shutil.which(compiler()[0]):
        raise Unavailable(f"no compiler {compiler()[0]}")
    found = []
    for name in names:
        command = [*compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            raise Unavailable(f"{shlex.join(compiler())} has no {name}: not GCC, or without it")
        found.append(path)
    return found


if __name__ == "__main__":
    command = [sys.executable, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment()).returncode)
