"""A build with AddressSanitizer and UndefinedBehaviorSanitizer in build/sanitizer, with CUDA's
kernels compiled for the CPU and the test-only variant. Later runs compile what has changed."""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cases import compiler

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "sanitizer"
LIBRARY, STAMP = BUILD / "lib", BUILD / "built-from"
HOW = {"WAVEPE_SANITIZE": "1", "WAVEPE_EMULATE_CUDA": "1", "WAVEPE_TEST_VARIANT": "1"}

_lock = None  # held as long as this process may use the build


class Unavailable(Exception):
    """Sanitized builds are not possible here; the message says why."""


def environment():
    """The environment in which `import wavepe` brings the sanitized build, which is brought up to
    date first. Other processes that use it keep it as it is until they end."""
    preload = runtimes()
    use()
    return {
        **os.environ,
        "PYTHONPATH": str(LIBRARY),
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


def runtimes():
    """The libraries that must be in the process before Python's own allocations."""
    if not (ROOT / "setup.py").is_file():
        raise Unavailable("not run from a source tree")
    if not shutil.which(compiler()[0]):
        raise Unavailable(f"no compiler {compiler()[0]}")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            raise Unavailable(f"{shlex.join(compiler())} has no {name}: not GCC, or without it")
        found.append(path)
    return found


def use():
    """Share the lock of the build; alone with it, build where sources have changed."""
    global _lock
    if _lock is None:
        BUILD.parent.mkdir(exist_ok=True)
        _lock = os.open(f"{BUILD}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(_lock, fcntl.LOCK_SH)
    while not is_current():
        fcntl.flock(_lock, fcntl.LOCK_EX)
        if not is_current():
            build()
        fcntl.flock(_lock, fcntl.LOCK_SH)


def is_current():
    return STAMP.is_file() and STAMP.read_text() == sources()


def sources():
    """Return what the build depends on: the interpreter, and each file with its time."""
    patterns = ("csrc/**/*", "python/wavepe/**/*.py*", "benchmarks/*.py", "setup.py")
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix != ".pyc"}
    files = [f"{p.relative_to(ROOT)} {p.stat().st_mtime_ns}" for p in sorted(paths) if p.is_file()]
    return "\n".join([sys.version, shlex.join(compiler()), *files])


def build():
    before = sources()  # what changes from here on, the next run compiles
    for module in LIBRARY.rglob("*.py"):  # one that has gone would stay there
        module.unlink()
    places = (f"--build-base={BUILD}", f"--build-lib={LIBRARY}")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--parallel=2", *places],
        cwd=ROOT,
        env={**os.environ, **HOW},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    STAMP.write_text(before)
