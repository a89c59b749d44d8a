"""Build the kernels once per instruction set, and the two extension modules that call them.

With nvcc, the CUDA kernels are compiled, too, and put into the torch module. Environment variables:

WAVEPE_NVCC: the nvcc to use; the empty string means none.
WAVEPE_SANITIZE=1: build everything with AddressSanitizer and UndefinedBehaviorSanitizer.
WAVEPE_SANITIZE=thread: with ThreadSanitizer instead.
WAVEPE_EMULATE_CUDA=1: compile the CUDA kernels for the CPU, for tests.
WAVEPE_TEST_VARIANT=1: add the variant avx2x2, for tests (see csrc/dispatch.c).
_PYTHON_HOST_PLATFORM: the platform to build for, such as linux-aarch64, with CC its compiler.
"""

import atexit
import copy
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import numpy
from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HEADERS = sorted(str(p) for p in Path("csrc").rglob("*.h"))
KERNELS = sorted(str(p) for p in Path("csrc/kernels").glob("*.c"))
# Python's own flag -fwrapv would hide overflows, hence -fno-wrapv. The first error ends the
# process. Less optimisation (below) halves the compile time and keeps line numbers right.
SANITIZE = "-fno-wrapv -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
SANITIZE = {"0": "", "thread": "-fsanitize=thread"}.get(
    os.environ.get("WAVEPE_SANITIZE", "0"), SANITIZE
)
SANITIZE = [*SANITIZE.split(), "-g1", "-fno-omit-frame-pointer"] if SANITIZE else []
# gnu11 and not c11, because GCC's ISO modes switch FMA contraction off.
C_FLAGS = ["-std=gnu11", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall"]
C_FLAGS += ["-O1", "-DWPE_ASSERT=1", *SANITIZE] if SANITIZE else ["-O3", "-g0"]
CXX_FLAGS = ["-std=c++20", "-fvisibility=hidden", "-Wall"]
CXX_FLAGS += ["-O0", *SANITIZE, "-DWPE_POISON"] if SANITIZE else ["-O2", "-g0"]
TARGET = sysconfig.get_platform()
X86 = TARGET.endswith(("x86_64", "amd64"))
# Flags that are left out of CFLAGS and the like, and of what Python was built with. They round in
# another way, or have the linker switch the whole process to flushing subnormal numbers.
INEXACT = (
    "-O.*|-[f-](no-)?(fast-math|finite-math-only|unsafe-math-optimizations|associative-math"
    "|reciprocal-math|signed-zeros|approx-func|honor-nans|honor-infinities|float-store"
    "|single-precision-constant)|-f(fp-|excess-precision=|denormal-fp-math|veclib=).*"
    "|-mdaz-ftz|-mpc(32|64|80)|-mrecip.*|--?use_fast_math|--?(ftz|prec-div|prec-sqrt|fmad)=.*"
)
# Others mix the instruction sets, one of which is chosen at run time.
SETS = "avx|evex|s?sse|fma|f16c|bmi|xop|lzcnt|abm|tbm|popcnt|movbe|apx"
MIXING = "|-flto.*" + f"|-m(arch|fpmath)=.*|-m(no-)?({SETS}).*" * X86
LEFT_OUT = re.compile(INEXACT + MIXING)


def sort_out(words):
    """Return the words that are kept, and those that are left out, with an -Xlinker before them."""
    kept, left_out = [], []
    for word in words:
        if not LEFT_OUT.fullmatch(word):
            kept.append(word)
            continue
        left_out.append(word)
        if kept and re.fullmatch(r"-X\w+", kept[-1]):
            kept.pop()
    return kept, left_out


VARIANTS = {
    "portable": ["-march=x86-64"] * X86,  # the compiler's default may be more
    **({"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]} if X86 else {}),
}
TEST_VARIANT = X86 and os.environ.get("WAVEPE_TEST_VARIANT", "0") != "0"
if TEST_VARIANT:
    VARIANTS["avx2x2"] = ["-march=x86-64-v3", "-DVECTOR_BYTES=64", "-Wno-psabi"]
# One binary for every Python from 3.10 on. Free-threaded Python has no limited API: there each
# version gets a build of its own.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIMITED_API = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030A0000")]


def library(name, sources, flags=(), macros=()):
    return name, {
        "sources": sources,
        "cflags": [*C_FLAGS, *flags],
        "macros": list(macros),
        "include_dirs": ["csrc"],
        "obj_deps": {"": [*HEADERS, *KERNELS, "setup.py"]},
    }


# The linker needs the archive that refers to the others first.
MACROS = [("WPE_X86", "1")] * X86 + [("WPE_TEST_VARIANT", "1")] * TEST_VARIANT
DISPATCH = "wpe_dispatch_test" if TEST_VARIANT else "wpe_dispatch"  # so objects are not mixed up
LIBRARIES = [library(DISPATCH, ["csrc/dispatch.c"], macros=MACROS)]
LIBRARIES += [
    library(f"wpe_{name}", ["csrc/kernels/variant.c"], flags, [("VARIANT", name)])
    for name, flags in VARIANTS.items()
]


def torch_root():
    """Return the folder of the torch, 2.10 or later, that the built modules will run with, or None.

    An isolated build cannot import the packages of the target environment. But the interpreter of
    that environment runs the build, so it is asked without the variables that isolate it: it knows
    the user's packages, and those of the system behind a virtual environment. None of them is for
    another platform.
    """
    if platform.machine().lower() not in TARGET:
        return None
    spec = find_spec("torch")
    candidates = list(spec.submodule_search_locations or ()) if spec else []
    isolated = ("PYTHONPATH", "PYTHONNOUSERSITE")
    environment = {name: text for name, text in os.environ.items() if name not in isolated}
    ask = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    candidates += [Path(line).parent for line in done.stdout.splitlines()]
    for root in map(Path, candidates):
        headers, about = root / "include/torch/csrc/stable/library.h", root / "version.py"
        if headers.is_file() and about.is_file():
            version = re.search(r"__version__ = '(\d+)\.(\d+)", about.read_text())
            if version and tuple(map(int, version.groups())) >= (2, 10):
                return root
    return None


# The GPU architectures that get machine code. Newer GPUs translate the intermediate code (PTX).
CUDA_ARCHS = (80, 90, 100, 120)
CUDA = sorted(str(p) for p in Path("csrc/cuda").iterdir())
EMULATE = os.environ.get("WAVEPE_EMULATE_CUDA", "0") != "0"


def find_nvcc():
    """Return the path of nvcc, or None: from WAVEPE_NVCC, CUDA_HOME, PATH or NVIDIA's wheels."""
    if "WAVEPE_NVCC" in os.environ:
        return os.environ["WAVEPE_NVCC"] or None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    wheels = TORCH.parent.glob("nvidia/cu*/bin/nvcc")  # they lie beside torch
    candidates = [Path(home, "bin/nvcc")] if home else []
    candidates += [Path(p) for p in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if p]
    return next((str(p) for p in (*candidates, *sorted(wheels)) if os.access(p, os.X_OK)), None)


def run_nvcc(nvcc, *arguments):
    """Return nvcc's output, or None if it fails. With WAVEPE_NVCC a failure ends the build."""
    environment = dict(os.environ)
    for name in {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"} & set(environment):
        joined = re.sub(
            r"(?<!\S)(-O|--?(ftz|prec-div|prec-sqrt|fmad)) +(?=\w)", r"\1=", environment[name]
        )
        environment[name] = " ".join(sort_out(joined.split())[0])
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, env=environment)
        said, failed = done.stderr.strip(), done.returncode != 0
    except OSError as error:
        said, failed = str(error), True
    if not failed:
        return done.stdout
    print(f"wavepe: {nvcc} failed: {said}", file=sys.stderr)
    if "WAVEPE_NVCC" in os.environ:
        sys.exit("wavepe: to build without CUDA kernels, set WAVEPE_NVCC= (the empty string)")
    print("wavepe: this build has no CUDA kernels", file=sys.stderr)
    return None


TORCH = torch_root()
EXTENSIONS = [
    Extension(
        "wavepe._numpy",
        ["csrc/numpy/module.c"],
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[
            *LIMITED_API,
            ("NPY_TARGET_VERSION", "NPY_2_1_API_VERSION"),
        ],
        extra_compile_args=C_FLAGS,
        extra_link_args=SANITIZE,
        depends=[
            *HEADERS,
            *KERNELS,
            "csrc/dispatch.c",
            "csrc/numpy/attention.c",
            "csrc/numpy/relative_bias.c",
            "setup.py",
        ],
        libraries=["m"],
        py_limited_api=not FREE_THREADED,
    )
]
if TORCH:
    EXTENSIONS.append(
        Extension(
            "wavepe._torch",
            [
                *sorted(str(p) for p in Path("csrc/torch").glob("*.cpp")),
                f"csrc/cuda/{'emulation' if EMULATE else 'loader'}.cpp",
            ],
            include_dirs=["csrc", str(TORCH / "include")],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu", "m", *["dl"] * sys.platform.startswith("linux")],
            define_macros=[
                *LIMITED_API,
                ("TORCH_TARGET_VERSION", "0x020a000000000000"),
                *([("WPE_EMULATE_CUDA", "1")] if EMULATE else []),
            ],
            extra_compile_args=CXX_FLAGS,
            extra_link_args=SANITIZE,
            depends=[*HEADERS, *CUDA, "setup.py"],
            py_limited_api=not FREE_THREADED,
        )
    )


TOOL_NAMES = ("CC", "CXX", "LDSHARED", "LDCXXSHARED", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
TOOLS = " ".join([*(os.environ.get(name, "") for name in TOOL_NAMES), *SANITIZE])


def clean_commands(compiler):
    """Leave words out of the compiler's commands, and return those that somebody asked for.

    pyenv has the linker write its own library folder into every module, and no other machine has
    that folder. It goes, too. conda's stays: its libraries are newer than the system's.
    """
    conda = Path(sys.base_prefix, "conda-meta").exists()
    shared = (sysconfig.get_config_var("LDSHARED") or "").split()
    dropped = {w for w in shared if w.startswith("-Wl,-rpath") and not conda}
    asked = {}  # in their order
    for name in ("compiler_so", "compiler_so_cxx", "compiler_cxx", "linker_so", "linker_so_cxx"):
        words = getattr(compiler, name, None) or []
        kept, left_out = sort_out(word for word in words if word not in dropped)
        asked |= dict.fromkeys(w for w in left_out if not re.fullmatch("-O[0-3gsz]?", w))
        if words:
            compiler.set_executable(name, kept)
    return list(asked)


def write_stamp(path, text):
    """Return this file. It is newer than earlier objects if the text has changed."""
    stamp = path.resolve()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    if not stamp.exists() or stamp.read_bytes() != os.fsencode(text):
        stamp.write_bytes(os.fsencode(text))
    return stamp


@cache
def take_turn(folder):
    """Keep other builds out of the folder until this one ends, and distrust what a killed one left.

    That may be half a file, newer than its sources. Without the stamps all is built again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = (folder / "running").open("a")
    if fcntl:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(mark, fcntl.LOCK_EX)
    if os.fstat(mark.fileno()).st_size:
        for name in ("tools", "configuration"):
            (folder / name).unlink(missing_ok=True)
    print(os.getpid(), file=mark, flush=True)
    atexit.register(mark.truncate, 0)  # not if the process is killed


def each(call, items):
    """Return the results of a call with each item, several at once: compilers are processes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(call, items))


class Build(build):
    def run(self):
        take_turn(Path(self.build_temp))  # also before files are copied and removed
        super().run()


class BuildKernels(build_clib):
    """Give each library an object folder of its own: all variants compile the same source."""

    def finalize_options(self):
        folders = [("build_temp", "build_temp"), ("build_temp", "build_clib")]
        self.set_undefined_options("build_ext", *folders)
        super().finalize_options()

    def build_libraries(self, libraries):
        top = self.build_temp
        clean_commands(self.compiler)
        take_turn(Path(top))
        stamp = write_stamp(Path(top, "tools"), TOOLS)

        def build(library):
            name, info = library
            info["obj_deps"][""].append(str(stamp))
            one = copy.copy(self)
            one.build_temp = str(Path(top) / name)
            super(BuildKernels, one).build_libraries([library])

        each(build, libraries)


# What `wavepe bench` runs, beside bench_<op>.py, of the repository's folder benchmarks.
BENCH = {"__init__", "attention_inputs", "bench", "case", "machine", "memory", "report", "timing"}


class BuildPython(build_py):
    def run(self):
        """Copy all, and remove what an earlier build has copied and the sources no longer have."""
        self.force = True  # a file of an older release may be older than its copy
        if not self.editable_mode:
            outputs = {Path(path) for path in self.get_outputs(include_bytecode=False)}
            for path in Path(self.build_lib, "wavepe").rglob("*.*"):
                if path.is_file() and path.suffix != ".so" and path not in outputs:
                    path.unlink()
        super().run()

    def find_package_modules(self, package, package_dir):
        """Leave out the modules of benchmarks that `wavepe bench` does not need."""
        found = super().find_package_modules(package, package_dir)
        if package != "wavepe.benchmarks":
            return found
        return [one for one in found if one[1] in BENCH or one[1].startswith("bench_")]


class BuildExtensions(build_ext):
    def finalize_options(self):
        super().finalize_options()
        if self.editable_mode:  # pip's folder is new each time, so all would be compiled again
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}{'t' * FREE_THREADED}"
            self.build_temp = str(Path("build", f"temp.{tag}"))

    def run(self):
        self.run_command("build_clib")  # `build_ext --inplace` alone would not run it
        nvcc = find_nvcc() if TORCH and not (EMULATE or SANITIZE) else None
        known = (nvcc and run_nvcc(nvcc, "--list-gpu-code")) or ""
        archs = [arch for arch in CUDA_ARCHS if f"sm_{arch}" in known.split()]
        configuration = f"{nvcc} {known} {EMULATE} {TOOLS}"
        stamp = write_stamp(Path(self.build_temp, "configuration"), configuration)
        variants = write_stamp(Path(self.build_temp, "variants"), " ".join(VARIANTS))
        fatbin = self.compile_cuda(nvcc, archs, stamp) if archs else None
        numpy_side, *torch_side = self.extensions
        named = " ".join(f"sm_{arch}" for arch in archs) if fatbin else ""
        numpy_side.define_macros.append(("WPE_CUDA_ARCHS", f'"{named}"'))
        if fatbin and torch_side:
            torch_side[0].define_macros.append(("WPE_FATBIN", f'"{fatbin}"'))
        for extension in self.extensions:
            extension.depends.append(str(stamp))
        numpy_side.depends.append(str(variants))
        if not TORCH:  # an earlier build with torch may have left its module here
            for stale in Path(self.build_lib).glob("wavepe/_torch*.so"):
                stale.unlink()
        super().run()
        if not TORCH:
            print(
                "wavepe: no torch 2.10 or later was found, so this build is NumPy only. For "
                "wavepe.ops install it first, then wavepe again without the cached wheel, in its "
                "checkout. An isolated build does not see PYTHONPATH, so:\n"
                '    pip install torch "setuptools>=77" "numpy>=2.1"\n'
                "    pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps .",
                file=sys.stderr,
            )

    def build_extensions(self):
        if asked := clean_commands(self.compiler):
            print(
                f"wavepe: left out {' '.join(asked)}, as they would change numbers, or mix the "
                "instruction sets, one of which is chosen at run time",
                file=sys.stderr,
            )
        # for build_info(), without the paths of this machine
        words = [w for w in self.compiler.compiler_so if re.fullmatch(r"-[fms][\w=,.+-]*", w)]
        flags = " ".join([*words, *C_FLAGS])
        self.extensions[0].define_macros.append(("WPE_FLAGS", f'"{flags}"'))
        compile = self.compiler.compile

        def compile_apart(sources, **options):
            return each(lambda source: compile([source], **options)[0], sources)

        self.compiler.compile = compile_apart
        super().build_extensions()

    def compile_cuda(self, nvcc, archs, stamp):
        """Compile all CUDA kernels to one file for the loader. Return its path, or None."""
        target = stamp.with_name("kernels.fatbin")
        newest = max(Path(p).stat().st_mtime for p in (*HEADERS, *CUDA, "setup.py", stamp))
        if target.exists() and target.stat().st_mtime >= newest:
            return target
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        codes += [f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}"]
        options = ["-O3", "-std=c++17", "-fatbin", "--threads=2", "-Xfatbin=-compress-all", *codes]
        made = target.with_suffix(".part")
        if run_nvcc(nvcc, *options, "-Icsrc", "csrc/cuda/kernels.cu", "-o", str(made)) is None:
            return None
        return made.replace(target)


def description():
    """Return README for an index, where links to files of the repository lead nowhere.

    They become addresses, if pyproject.toml has the repository's. Else only their text stays.
    """
    text, project = (Path(name).read_text("utf-8") for name in ("README.md", "pyproject.toml"))
    address = re.search(r'^Repository = "(.+?)/?"', project, re.M)
    version = re.search(r'^version = "(.+?)"', project, re.M)[1]

    def linked(match):
        mark, words, place = match.groups()
        if not address:
            return "" if mark else words
        return f"{mark}[{words}]({address[1]}/{'raw' if mark else 'blob'}/v{version}/{place})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", linked, text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    # `wavepe bench` needs some of the repository's folder benchmarks inside the package
    packages=[*find_packages("python"), "wavepe.benchmarks"],
    package_dir={"": "python", "wavepe.benchmarks": "benchmarks"},
    package_data={"wavepe": ["py.typed", "*.pyi"], "wavepe.fairseq": ["user_dir/*/*.py"]},
    include_package_data=False,
    libraries=LIBRARIES,
    ext_modules=EXTENSIONS,
    cmdclass={
        "build": Build,
        "build_clib": BuildKernels,
        "build_ext": BuildExtensions,
        "build_py": BuildPython,
    },
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
