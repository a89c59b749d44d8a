"""Run the tests of threads on a build with ThreadSanitizer, in build/threads: `make test-races`.

python tests/races.py -x    the words go to pytest; -k would replace what is left out

A race ends the process with a report. First a program that has a race must end so.
"""

import platform
import subprocess
import sys

from cases import HAS_TORCH, compiler
from sanitizer_build import runtimes
from second_build import ROOT, SecondBuild

BUILD = SecondBuild("threads", {"WAVEPE_SANITIZE": "thread", "WAVEPE_NVCC": ""})
NAMES = ["threads"]
NAMES += [f"ops_attention_{name}" for name in ("bits", "gradients", "values")]
NAMES += [f"ops_{name}" for name in ("every", "relative_bias", "relative_table", "rope", "wavelet")]
# Left out: what compiles starts processes of its own; numerical derivatives repeat small calls.
LEFT_OUT = "compile or compiled or opcheck or gradcheck or transforms"
# glibc frees the memory of a thread that ended; nothing of ours
SUPPRESSED = "race:_dl_deallocate_tls\n"
RACE = """
import threading, numpy as np, wavepe
x = np.ones(1 << 20, np.float32)
out = np.empty_like(x)
calls = [threading.Thread(target=lambda: wavepe.ricker(x, 1, 0, out=out)) for _ in range(2)]
for call in calls: call.start()
for call in calls: call.join()
"""
FOUND = 66  # the exit code of a process with a race


def environment():
    """Return the environment in which `import wavepe` brings this build."""
    variables = BUILD.environment()
    order, suppressed = BUILD.folder / "openmp_order.so", BUILD.folder / "suppressed"
    suppressed.write_text(SUPPRESSED)
    source = str(ROOT / "tests" / "openmp_order.c")
    subprocess.run([*compiler(), "-shared", "-fPIC", "-O1", "-o", str(order), source], check=True)
    return {
        **variables,
        "LD_PRELOAD": " ".join([*runtimes("libtsan.so"), str(order)]),
        "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:allocator_may_return_null=1:"
        f"die_after_fork=0:suppressions={suppressed}",
        "OMP_NUM_THREADS": "4",
    }


def main(*words):
    # Without random addresses (-R): GCC 12's ThreadSanitizer expects memory at certain ones.
    python = ["setarch", platform.machine(), "-R", sys.executable]
    variables = environment()
    racing = subprocess.run([*python, "-c", RACE], env=variables, capture_output=True, text=True)
    if racing.returncode != FOUND or "data race" not in racing.stderr:
        sys.exit(f"the race was not found (exit code {racing.returncode}): {racing.stderr[-2000:]}")
    names = NAMES if HAS_TORCH else NAMES[:1]
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
    # -s: the report would end with the process, in pytest's buffer
    command = [*python, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-k"]
    command += [f"not ({LEFT_OUT})", *words, *files]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
