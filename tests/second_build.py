"""A build of this tree beside the one in use, in build/<name>, for the tests of compiled code.

Later runs compile what has changed.
"""

import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

from cases import compiler

ROOT = Path(__file__).parent.parent
KERNELS = (
    "attention",
    "attention_bits",
    "attention_inputs",
    "relative_bias",
    "rope",
    "rope_reduction",
    "rope_table",
    "wavelet",
    "wavelet_table",
)
NUMPY_TESTS = [f"test_{name}.py" for name in (*KERNELS, "fuzz", "threads")]
OF_THE_GPU = ("interpreted", "compiled", "attention_gpu")  # no C in them


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
        while not self.is_current():
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if not self.is_current():
                self.build()
            fcntl.flock(self.lock, fcntl.LOCK_SH)

    def is_current(self):
        return self.stamp.is_file() and self.stamp.read_text() == self.sources()

    def sources(self):
        """Return what the build depends on: interpreter, compiler, each file with its time."""
        patterns = ("csrc/**/*", "python/wavepe/**/*.py*", "benchmarks/*.py", "setup.py")
        paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
        paths = sorted(path for path in paths if path.suffix != ".pyc" and path.is_file())
        files = [f"{path.relative_to(ROOT)} {path.stat().st_mtime_ns}" for path in paths]
        return "\n".join([sys.version, shlex.join(compiler()), str(self.how), *files])

    def build(self):
        before = self.sources()  # what changes from here on, the next run compiles
        for module in self.library.rglob("*.py"):  # one that has gone would stay there
            module.unlink()
        places = (f"--build-base={self.folder}", f"--build-lib={self.library}")
        done = subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build", "--parallel=2", *places],
            cwd=ROOT,
            env={**os.environ, **self.how},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        self.stamp.write_text(before)
