"""Run the tests of compiled code on a build by clang, in build/clang: `make test-clang`.

python tests/clang_build.py clang-19 -n 2    # the words after the compiler go to pytest
"""

import subprocess
import sys

from cases import HAS_TORCH
from second_build import ROOT, SecondBuild, numpy_tests, torch_tests


def main(clang, *words):
    how = {"CC": clang, "CXX": "clang++".join(clang.rsplit("clang", 1))}
    how |= {"WAVEPE_TEST_VARIANT": "1", "WAVEPE_NVCC": ""}
    environment = SecondBuild("clang", how).environment()
    ask = "import wavepe; print(wavepe.__file__, wavepe.build_info()['compiler'])"
    command = [sys.executable, "-c", ask]
    message = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    print(message.stdout, end="", flush=True)
    file, compiler = message.stdout.split(maxsplit=1)
    if not file.startswith(str(ROOT / "build" / "clang")) or "clang" not in compiler.lower():
        sys.exit(f"not the build by {clang}")
    names = [*numpy_tests(), "test_build.py"]
    names += torch_tests(["private_names"]) if HAS_TORCH else []
    files = [str(ROOT / "tests" / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", *words, *files]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
