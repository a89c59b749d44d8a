"""Install the wheel of `make dist` in fresh environments, and run the tests against it.

`make test-wheel` runs every session whose Python is at hand, and prints the result of each.
`make test-torches` runs each_torch, which on Linux takes gigabytes of CUDA for each torch of PyPI.
"""

import os
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, "tests")
nox.options.error_on_missing_interpreters = "CI" in os.environ
nox.options.reuse_existing_virtualenvs = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]
# Each with another Python as far as they go; `make test` has 3.11 and 2.13.
TORCHES = [("3.10", "2.10.0"), ("3.11", "2.11.0"), ("3.12", "2.12.1"),
           ("3.13", "2.14.1"), ("3.13", "2.15.0")]  # fmt: skip
TORCH = os.environ.get("TORCH", "torch==2.13.0")
# The interpreter that runs nox: for others a plain torch would bring gigabytes of CUDA.
OWN = ".".join(map(str, sys.version_info[:2]))
OF_TORCH = ["ops_every", "ops_rope", "ops_wavelet", "ops_relative_bias", "ops_attention",
            "ops_attention_values", "ops_attention_compile", "nn_attention"]  # fmt: skip
IMPORT_TIMES = """
import importlib, sys, time
began = time.perf_counter()
importlib.import_module(sys.argv[1])
print(f"import {sys.argv[1]}: {time.perf_counter() - began:.2f} s")
"""


def wheel(extras="test"):
    (found,) = Path("dist").glob("*.whl")
    return f"{found}[{extras}]"


def run_tests(session, *tests):
    for module in ("wavepe", *(("torch", "wavepe.ops") if tests else ())):
        session.run("python", "-c", IMPORT_TIMES, module)
    session.run("pytest", "-q", "-n", "auto", "--maxprocesses", "8", *tests)


@nox.session(python=PYTHONS)
@nox.parametrize("numpy", ["oldest", "newest"])
def without_torch(session, numpy):
    """NumPy alone: the oldest one that wavepe takes, and the newest."""
    session.install(wheel(), *(["numpy==2.1.0", "ml_dtypes==0.5.0"] if numpy == "oldest" else []))
    run_tests(session)


@nox.session(python=OWN)
@nox.parametrize("first", ["torch", "wavepe"])
def with_torch(session, first):
    """A wheel serves every order: torch before wavepe, and after it."""
    for package in sorted([TORCH, wheel()], key=lambda name: name.startswith("torch"),
                          reverse=first == "torch"):  # fmt: skip
        session.install(package)
    run_tests(session, *(f"tests/test_{name}.py" for name in OF_TORCH))


@nox.session(default=False)
@nox.parametrize("python, version", TORCHES)
def each_torch(session, version):
    """One wheel serves every torch from 2.10 on: operators, modules and Llamas."""
    session.install(f"torch=={version}")
    session.install(wheel("test,hf"))
    from second_build import torch_tests  # it needs wavepe, as nox in .venv has it

    kinds = ("nn_*", "encodings*", "hf", "hf_masks", "hf_patch")
    files = [path for kind in kinds for path in Path("tests").glob(f"test_{kind}.py")]
    files += [Path("tests", name) for name in torch_tests()]
    run_tests(session, *sorted(map(str, files)))
    shutil.rmtree(session.virtualenv.location)  # some gigabytes
