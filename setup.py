"""Builds the kernels once per instruction set and the two extension modules that call them.

WAVEPE_SANITIZE=1 builds all of it with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
import platform
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import numpy
from setuptools import Extension, find_packages, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

HEADERS = sorted(str(p) for p in Path("csrc").rglob("*.h"))
KERNELS = sorted(str(p) for p in Path("csrc/kernels").glob("*.c"))
# Python's own -fwrapv would hide overflows. The first finding ends the process. Less optimised, it
# compiles in half the time and reports the right lines.
SANITIZE = "-fno-wrapv -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
SANITIZE = [*SANITIZE.split(), "-g1", "-fno-omit-frame-pointer"]
SANITIZE = SANITIZE if os.environ.get("WAVEPE_SANITIZE", "0") != "0" else []
# gnu11, not c11: GCC's ISO modes switch FMA contraction off.
C_FLAGS = ["-std=gnu11", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall"]
C_FLAGS += ["-O1", *SANITIZE] if SANITIZE else ["-O3", "-g0"]
CXX_FLAGS = ["-std=c++20", "-fvisibility=hidden", "-Wall"]
CXX_FLAGS += ["-O0", *SANITIZE, "-DWPE_POISON"] if SANITIZE else ["-O2", "-g0"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
VARIANTS = {
    "portable": [],
    **({"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]} if X86 else {}),
}
LIMITED_API = ("Py_LIMITED_API", "0x030A0000")


def library(name, sources, flags=(), macros=()):
    return name, {
        "sources": sources,
        "cflags": [*C_FLAGS, *flags],
        "macros": list(macros),
        "include_dirs": ["csrc"],
        "obj_deps": {"": [*HEADERS, *KERNELS, "setup.py"]},
    }


# The archive that refers to the others comes first on the linker's line.
LIBRARIES = [library("wpe_dispatch", ["csrc/dispatch.c"], macros=[("WPE_X86", "1")] if X86 else [])]
LIBRARIES += [
    library(f"wpe_{name}", ["csrc/kernels/variant.c"], flags, [("VARIANT", name)])
    for name, flags in VARIANTS.items()
]


def torch_root():
    """The folder of the torch that the built modules will run with, or None.

    An isolated build cannot import the target environment's packages, but it is run by that
    environment's interpreter, so torch lies in its site-packages.
    """
    spec = find_spec("torch")
    candidates = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    candidates.append(Path(sysconfig.get_path("purelib")) / "torch")
    for root in candidates:
        if (root / "include/torch/csrc/stable/library.h").is_file():
            return root
    return None


EXTENSIONS = [
    Extension(
        "wavepe._numpy",
        ["csrc/numpy/module.c"],
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[
            LIMITED_API,
            ("NPY_TARGET_VERSION", "NPY_2_1_API_VERSION"),
            ("WPE_FLAGS", f'"{" ".join(C_FLAGS)}"'),
        ],
        extra_compile_args=C_FLAGS,
        extra_link_args=SANITIZE,
        depends=[*HEADERS, *KERNELS, "csrc/dispatch.c", "csrc/numpy/attention.c", "setup.py"],
        libraries=["m"],
        py_limited_api=True,
    )
]
TORCH = torch_root()
if TORCH:
    EXTENSIONS.append(
        Extension(
            "wavepe._torch",
            sorted(str(p) for p in Path("csrc/torch").glob("*.cpp")),
            include_dirs=["csrc", str(TORCH / "include")],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu", "m"],
            define_macros=[LIMITED_API, ("TORCH_TARGET_VERSION", "0x020a000000000000")],
            extra_compile_args=CXX_FLAGS,
            extra_link_args=SANITIZE,
            depends=[*HEADERS, "setup.py"],
            py_limited_api=True,
        )
    )


class BuildKernels(build_clib):
    """Gives each library its own object folder: all variants compile the same source."""

    def build_libraries(self, libraries):
        top = self.build_temp
        for name, info in libraries:
            self.build_temp = str(Path(top) / name)
            super().build_libraries([(name, info)])
        self.build_temp = top


class BuildExtensions(build_ext):
    def run(self):
        self.run_command("build_clib")  # `build_ext --inplace` alone would not
        if not TORCH:  # an earlier build with torch may have left its module here
            for stale in Path(self.build_lib).glob("wavepe/_torch*.so"):
                stale.unlink()
        super().run()
        if not TORCH:
            print(
                "wavepe: torch was not found, so this build is NumPy only. For wavepe.ops install "
                "torch first, then wavepe again without the cached wheel:\n"
                "    pip install torch\n"
                "    pip install --no-cache-dir --force-reinstall --no-deps wavepe",
                file=sys.stderr,
            )


setup(
    # the benchmarks are a folder of the repository and a part of the package: `wavepe bench`
    packages=[*find_packages("python"), "wavepe.benchmarks"],
    package_dir={"": "python", "wavepe.benchmarks": "benchmarks"},
    package_data={"wavepe": ["py.typed", "*.pyi"]},
    include_package_data=False,
    libraries=LIBRARIES,
    ext_modules=EXTENSIONS,
    cmdclass={"build_clib": BuildKernels, "build_ext": BuildExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
