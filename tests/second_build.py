"""A build of this tree beside the one in use, in build/<name>, for the tests of compiled code.

Later runs compile what has changed. What counts is the contents of files and not their times, so
the folder may be carried to another clone.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from cases import HAS_TORCH, compiler

ROOT = Path(__file__).parent.parent
OF_THE_GPU = ("interpreted", "compiled", "attention_gpu")  # no C in them
COMPILED = ("csrc/**/*", "setup.py")
TORCH = ("torch",) * HAS_TORCH
COPIED = ("python/wavepe/**/*.py*", "benchmarks/*.py")


TAKES_VARIANT = re.compile(r"^def test_\w+\((?:.*, )?(?:every_)?variant\b", re.M)
ELSEWHERE = ("ops_", "sanitizers", "large", "variants", "build", "rope_known")


def numpy_tests():
    """Return the files of the NumPy kernels' tests, which take the fixture `variant`."""
    return sorted(
        path.name
        for path in ROOT.glob("tests/test_*.py")
        if not path.name.startswith(tuple(f"test_{word}" for word in ELSEWHERE))
        and TAKES_VARIANT.search(path.read_text("utf-8"))
    )


def torch_tests(left_out=()):
    """Return the files of the operators' tests, without names that contain one of these words."""
    words = (*left_out, *OF_THE_GPU)
    names = sorted(path.name for path in ROOT.glob("tests/test_ops_*.py"))
    return [name for name in names if not any(word in name for word in words)]


class SecondBuild:
    """The build of this name, with variables for setup.py or a compiler in `how`."""

    def __init__(self, name, how):
        self.folder, self.how = ROOT / "build" / name, how
        self.library, self.stamp = self.folder / "lib", self.folder / "built-from"
        self.lock = None  # held as long as this process may use the build

    def environment(self):
        """Return the environment in which `import wavepe` brings this build.

        The build is brought up to date first. Other processes that use it keep it as it is until
        they end.
        """
        self.use()
        return {**os.environ, "PYTHONPATH": str(self.library)}

    def use(self):
        """Share the lock of the build; alone with it, build where sources have changed."""
        if self.lock is None:
            self.folder.parent.mkdir(exist_ok=True)
            self.lock = os.open(f"{self.folder}.lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        while self.built_from() != self.sources():
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if self.built_from() != self.sources():
                self.build()
            fcntl.flock(self.lock, fcntl.LOCK_SH)

    def built_from(self):
        return json.loads(self.stamp.read_text()) if self.stamp.is_file() else {}

    def sources(self):
        """Return what the build depends on: tools, versions, and the contents of each file."""
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", *TORCH)]
        command = [*compiler(), "--version"]
        tools = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[:1]
        tools += [sys.version, *compiler(), str(self.how), *versions]
        return {"tools": tools, "compiled": hashes(COMPILED), "copied": hashes(COPIED)}

    def build(self):
        now, before = self.sources(), self.built_from()  # what changes now, the next run compiles
        words = [f"--build-lib={self.library}"]
        if all(before.get(key) == now[key] for key in ("tools", "compiled")):
            words = ["build_py", *words]
        else:
            words = ["build", "--parallel=2", f"--build-base={self.folder}", *words]
            words += ["--force"] * self.looks_unchanged(before, now)
        self.stamp.unlink(missing_ok=True)  # an interrupted build does not count
        done = subprocess.run(
            [sys.executable, "setup.py", "--quiet", *words],
            cwd=ROOT,
            env={**os.environ, **self.how},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        self.stamp.write_text(json.dumps(now))

    def looks_unchanged(self, before, now):
        """Whether a changed file is older than the build, so that setuptools would skip it."""
        if not before:
            return self.library.exists()
        changed = dict(now["compiled"].items() - before["compiled"].items())
        built = self.stamp.stat().st_mtime
        return before["tools"] != now["tools"] or any(
            (ROOT / name).stat().st_mtime < built for name in changed
        )


def hashes(patterns):
    """Return the hash of each file, by its path."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
        if path.suffix not in (".pyc", ".so")
    }
