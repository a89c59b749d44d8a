"""The compiled files: flags, instructions of each variant, imports, the source distribution."""

import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from cases import HAS_TORCH, compiler
from processes import forked, output, python
from wavepe import _numpy

ROOT = Path(__file__).parent.parent
in_sources = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not in a source tree")
compiles = pytest.mark.skipif(not shutil.which(compiler()[0]), reason="no compiler")
of_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")


def without(module):
    """Code after which a module cannot be imported, nor what is in it."""
    names = f"[n for n in ({module!r}, *sys.modules) if f'{{n}}.'.startswith('{module}.')]"
    return f"import sys; sys.modules.update(dict.fromkeys({names}))\n"


def last_line(code):
    """The last line of a run that fails."""
    return forked("-c", code).stderr.rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def functions():
    """Instructions of the NumPy module's functions by name, of a helper once for each variant."""
    if not shutil.which("objdump"):
        pytest.skip("no objdump (binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", _numpy.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for part in listing.split("\n\n"):
        if match := re.search(r"<(\w[\w.]*)>:", part):
            # a compiler's clone for constant arguments, helper.constprop.0, is a copy of the helper
            found.setdefault(match[1].partition(".")[0], []).append(part)
    if not any("_portable" in name for name in found):
        pytest.skip("the module is stripped of its symbols")
    return found


def test_portable_objects_hold_no_wider_instruction(functions):
    """Nor do the module and the dispatcher: what runs before a variant is chosen."""
    wide = re.compile(r"%[yz]mm|\tv[a-z]+[ \t]")  # AVX registers, or VEX and EVEX encodings
    baseline = {n: texts for n, texts in functions.items() if not re.search("_avx(2|512)", n)}
    assert sum("_portable" in name for name in baseline) > 10
    assert {"PyInit__numpy", "wpe_use_variant", "psi_loop_f32"} <= set(baseline)
    # of a helper that is there once for each variant, one copy is the baseline's
    offending = [n for n, texts in baseline.items() if all(wide.search(text) for text in texts)]
    assert not offending


@pytest.mark.parametrize(
    ("variant", "register"), [("avx2", "ymm"), ("avx2x2", "ymm"), ("avx512", "zmm")]
)
def test_wide_objects_use_fma(functions, variant, register):
    """An ISO mode or a lost flag would switch contraction off, at half the speed."""
    if not any(name.endswith(f"_{variant}") for name in functions):
        pytest.skip(f"this build holds no {variant}")
    (text,) = functions[f"bias_rows_f32_{variant}"]  # the loops of relative_bias
    assert len(re.findall(rf"vfmadd\w+ps .*%{register}", text)) >= 12


@pytest.mark.slow
@in_sources
def test_neon_objects_use_fma_on_full_lanes(tmp_path):
    """Compiled for aarch64: the emulator says that results are right, and not how they came."""
    gcc, listing = "aarch64-linux-gnu-gcc", tmp_path / "variant.s"
    if not shutil.which(gcc):
        pytest.skip(f"no {gcc} (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)")
    _, commands = recorded(tmp_path, _PYTHON_HOST_PLATFORM="linux-aarch64")
    (words,) = (words for words in commands if "-DVARIANT=portable" in words)
    words[words.index("-c")], words[words.index("-o") + 1] = "-S", str(listing)
    words = [word for word in words if word not in ("", "-march=native")]  # as `recorded` adds it
    subprocess.run([gcc, *words], cwd=ROOT, check=True)
    found = re.findall(r"^(\w+)[\w.]*:\n(.*?)^\t\.size\t", listing.read_text(), re.M | re.S)
    loops = ("bias_rows", "gemm_rows", "gemm_columns", "gemm_transposed", "softmax_row", "rope")
    for name in (f"{loop}_{dtype}_portable" for loop in loops for dtype in ("f32", "f64")):
        text = "".join(body for function, body in found if function == name)
        lanes = "4s" if "_f32_" in name else "2d"
        whole = len(re.findall(rf"\tfmla\tv\d+\.{lanes}", text))
        alone = len(re.findall(r"\tf(?:n?m(?:add|sub)|ml[as])\t[sd]\d", text))
        assert whole >= max(12, 2 * alone), f"{name}: {whole} on full lanes, {alone} on one"


@pytest.mark.parametrize("variant", ["avx2", "avx2x2"])
def test_objects_for_avx2_hold_no_avx512(functions, variant):
    """The test-only variant, whose vectors are as long as AVX-512's, must not hold any either."""
    texts = [text for n, texts in functions.items() if n.endswith(f"_{variant}") for text in texts]
    if not texts:
        pytest.skip(f"this build holds no {variant}")
    evex = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3\d)|%k[0-7]")
    assert not [text[:200] for text in texts if evex.search(text)]


def test_import_where_torch_is_missing():
    code = "".join(map(without, ("torch", "transformers", "rich", "matplotlib")))
    code += "import wavepe; print(wavepe.wavelet_table(4, *wavepe.wavelet_grid(8)).shape)"
    assert output("-c", code).strip() == "(4, 8)"


IMPORTS = {
    "wavepe.ops": "torch",
    "wavepe.nn": "torch",
    "wavepe.hf": "torch",
    "wavepe.fairseq.compat": "torch",
    "wavepe.fairseq.attention": "torch",
    "wavepe.analysis; wavepe.analysis.perplexity(None, None, 4)": "torch",
    "wavepe.analysis; wavepe.analysis.needle(None, None, [4], [0])": "torch",
    "wavepe.analysis; wavepe.analysis.attention_map(None, None)": "transformers",
    "wavepe.analysis; wavepe.analysis.measured_band(None, None)": "transformers",
    "wavepe.analysis.plots as p; p.band_heatmap([[1]], '')": "matplotlib",
    "wavepe.analysis.plots as p; p.bias('')": "matplotlib",
    "wavepe.analysis.plots as p; p.wavelets('')": "matplotlib",
    "wavepe.analysis; wavepe.encoding('wavelet:kind=db4').table(4, 8)": "pywt",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_missing_parts_say_what_brings_them(module):
    """The message installs it from a checkout, because no index has wavepe. It is one line."""
    last = last_line(without(IMPORTS[module]) + f"import {module}")
    kinds = ("ImportError: ", "wavepe.common.errors.MissingPackage: ")  # the second is one, too
    assert last.startswith(kinds)
    assert "pip install" in last
    from_checkout = last.endswith("(in the folder of the wavepe checkout)")
    assert from_checkout or (IMPORTS[module] == "torch" and last.endswith(": pip install torch"))


@in_sources
def test_nothing_tells_to_install_wavepe_from_an_index():
    """Neither `pip install wavepe` nor `pip install "wavepe[extra]"`, with options or without."""
    files = [
        *ROOT.glob("python/**/*.py"),
        *ROOT.glob("csrc/**/*.[ch]*"),
        *ROOT.glob("docs/**/*.md"),
    ]
    wrong = re.compile(r"pip install[^\n&,:;#(]* \W?wavepe\b(?!/)")
    for file in (*files, ROOT / "setup.py", ROOT / "README.md"):
        text = re.sub(r'"\s*\n\s*f?"', "", file.read_text())  # one string over several lines
        assert not wrong.search(text), file


# They change numbers, have the process flush subnormal ones (at the link), or mix the variants.
DANGEROUS = (
    "-ffast-math -Ofast -ffinite-math-only -funsafe-math-optimizations -fno-signed-zeros "
    "-freciprocal-math -fassociative-math -mdaz-ftz -mpc32 --fast-math -ffp-contract=off -O0 "
    "-fsingle-precision-constant -fexcess-precision=16 -march=native -mno-avx2 -mavx512f "
    "-mfpmath=387 -mlzcnt -mapxf -flto -flto=auto"
)
DANGEROUS = DANGEROUS.split()


def recorded(folder, *start, **environment):
    """The commands of a build whose compiler only writes them down, as lists of words."""
    tool = folder / "a compiler"
    tool.write_text(
        """#!/bin/sh
        [ "$1" = --list-gpu-code ] && set -- "$@" $NVCC_APPEND_FLAGS
        line=$(printf '%s\\t' "$@"); echo "$line" >> "$LOG"  # at once: others write here, too
        flock -n "${LOG%log}running" true && exit 3  # nobody keeps other builds out
        [ -z "$KILL" ] || kill -9 $PPID
        while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done"""
    )
    tool.chmod(0o755)
    environment |= {"CC": f"env '{tool}' -march=native", "CXX": f"'{tool}'", "AR": "true"}
    environment |= {"WAVEPE_NVCC": tool, "LOG": folder / "log", "WAVEPE_TEST_VARIANT": "0"}
    words = ["--quiet", "build_ext", f"--build-lib={folder}", f"--build-temp={folder}"]
    done = python(*(start or ["setup.py"]), *words, cwd=ROOT, **environment)
    assert done.returncode == (-9 if "KILL" in environment else 0), done.stderr
    return done.stderr, [line.split("\t") for line in (folder / "log").read_text().splitlines()]


@in_sources
@of_x86
def test_flags_of_a_distribution_change_no_number(tmp_path):
    """Nor the instructions of a variant, nor how the whole process rounds. Compiling would take
    minutes for each flag; the commands show what the compiler and the linker get of all of them."""
    how = f"{' '.join(DANGEROUS)} -Xlinker -O1 -fstack-protector -DX='a b' -Wl,-O1"
    how = dict.fromkeys(("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"), how)
    of_nvcc = "-use_fast_math -ftz true -O 2 -Xptxas -O1 -g"
    messages, commands = recorded(tmp_path, NVCC_APPEND_FLAGS=of_nvcc, **how)
    assert all(flag in messages for flag in DANGEROUS if flag != "-O0"), messages
    levels = {"portable": "-march=x86-64", "avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4"}
    nvcc = [words for words in commands if "--list-gpu-code" in words]
    assert nvcc == [["--list-gpu-code", "-g", ""]] * HAS_TORCH
    for words in (words for words in commands if words not in nvcc):
        assert not set(words) & {*DANGEROUS, "-Xlinker"}, words
        names = {word.partition("=")[2] for word in words if word.startswith("-DVARIANT=")}
        march = {word for word in words if word.startswith("-march=")}
        assert march == {levels[name] for name in names}
        assert {"-fstack-protector", "-DX=a b", "-Wl,-O1"} <= set(words)
    assert any("-shared" in words for words in commands)
    (info,) = (word for words in commands for word in words if word.startswith("-DWPE_FLAGS="))
    assert {"-fstack-protector", "-O3"} <= set(re.split('[ "]', info))


@in_sources
def test_a_build_for_another_machine(tmp_path):
    """It takes no flag of this machine's processor, and not this machine's torch."""
    machine = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    _, commands = recorded(tmp_path, _PYTHON_HOST_PLATFORM=f"linux-{machine}")
    words = {word for command in commands for word in command}
    assert {"-DVARIANT=portable", "-lm"} <= words
    assert ("-DWPE_X86=1" in words) == (machine == "x86_64")
    wrong = "torch|-ldl" if machine == "x86_64" else "torch|-ldl|-march=x86"
    assert not [word for word in words if re.search(wrong, word)]


@in_sources
def test_a_build_that_was_killed_is_begun_again(tmp_path):
    """It may have left half a file, which is newer than its sources."""
    once = len(recorded(tmp_path)[1])
    for path in (tmp_path / "csrc/numpy/module.o", *tmp_path.rglob("*.so")):
        path.unlink()
    before = len(recorded(tmp_path, KILL="1")[1])
    assert len(recorded(tmp_path)[1]) >= before + once


@in_sources
@compiles
@pytest.mark.parametrize("flag", [*DANGEROUS[:6], pytest.param("-mavx2", marks=of_x86)])
def test_a_compiler_that_is_not_exact_is_refused(flag):
    """One whose wrapper or configuration adds the flag: no build sees it in CFLAGS."""
    command = [*compiler(), "-fsyntax-only", "-DVARIANT=portable", "csrc/kernels/variant.c"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version and flag in DANGEROUS[3:6]:
        pytest.skip("clang defines no macro for this part of -ffast-math")
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    done = subprocess.run([*command, flag], cwd=ROOT, capture_output=True, text=True)
    words = "an -march of its own" if flag == "-mavx2" else "wavepe needs exact arithmetic"
    assert words in done.stderr


@in_sources
@compiles
@pytest.mark.parametrize(("apple", "oldest"), [([], 18), (["-D__apple_build_version__=1"], 17)])
def test_a_clang_that_is_too_old_is_refused(apple, oldest):
    """Apple's has versions of its own. No machine of ours has it, so macros play its part."""
    command = [*compiler(), "-E", "-w", "csrc/compiler.h", "-D__clang__", *apple]
    for version in (oldest, oldest - 1):
        words = [*command, f"-D__clang_major__={version}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode == 0) == (version == oldest)
        assert ("Apple's clang 17 or newer" in done.stderr) == (version < oldest), done.stderr


@in_sources
def test_an_isolated_build_asks_the_interpreter_for_torch(tmp_path):
    """It cannot import torch, and has a PYTHONPATH of its own. No other test builds so."""
    torch = pytest.importorskip("torch")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    code = without("torch") + "import runpy; runpy.run_path('setup.py', run_name='__main__')"
    _, commands = recorded(tmp_path, "-c", code, PYTHONPATH=str(tmp_path))
    assert any(f"-I{torch.__path__[0]}/include" in words for words in commands)


def test_build_without_torch_says_what_to_do():
    pytest.importorskip("torch")
    done = forked("-c", without("wavepe._torch") + "import torch\nimport wavepe.ops")
    assert "--no-cache-dir" in done.stderr, done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("ImportError: this wavepe was built without torch")
    assert last.endswith("--no-deps . (in the folder of the wavepe checkout)")


def test_an_older_torch_is_named():
    torch = pytest.importorskip("torch")
    last = last_line(
        "from importlib.machinery import ExtensionFileLoader as loader\n"
        "create = loader.create_module\n"
        "def create_module(self, spec):\n"
        "    if spec.name == 'wavepe._torch': raise ImportError('undefined symbol: torch_new')\n"
        "    return create(self, spec)\n"
        "loader.create_module = create_module\nimport wavepe.ops"
    )
    assert last == (
        f"ImportError: wavepe.ops needs torch 2.10 or later, got {torch.__version__}: "
        "undefined symbol: torch_new"
    )


def test_what_uv_installed_is_built_again_by_uv():
    done = forked(
        "-c",
        "import importlib.metadata as metadata\n"
        "read = metadata.PathDistribution.read_text\n"
        "def read_text(self, name): return 'uv' if name == 'INSTALLER' else read(self, name)\n"
        "metadata.PathDistribution.read_text = read_text\n"
        "from wavepe.common.runtime import BUILD_AGAIN, __version__\n"
        "print(__version__, BUILD_AGAIN)",
    )
    version, _, command = done.stdout.partition(" ")
    if version == "0+unknown":
        pytest.skip("wavepe is not installed")
    assert "&& uv pip install --no-build-isolation " in command, done.stderr


@in_sources
def test_source_distribution_is_complete(tmp_path):
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    patterns = ("csrc/**/*", "python/wavepe/**/*.py*", "tests/*.py", "benchmarks/*.py")
    patterns += ("tests/**/*.[ch]", "tests/**/Makefile", "python/wavepe/py.typed")
    tree = [path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix != ".pyc"]
    needed = {str(path.relative_to(ROOT)) for path in tree if path.is_file()}
    assert "python/wavepe/_numpy.pyi" in needed
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"} <= names


@in_sources
def test_the_benchmarks_of_a_wheel_are_what_wavepe_bench_imports(tmp_path):
    """And not what an earlier build had, and the sources no longer have, or have older."""
    stale = [tmp_path / "wavepe" / name for name in ("gone.py", "gone.pyi", "gone/__init__.py")]
    module, newer = (tmp_path / "wavepe" / name for name in ("_numpy.abi3.so", "__init__.py"))
    (tmp_path / "wavepe" / "gone").mkdir(parents=True)
    for path in (*stale, module, newer):
        path.touch()
    output("setup.py", "--quiet", "build_py", f"--build-lib={tmp_path}", cwd=ROOT)
    assert module.exists()
    assert newer.read_text() == (ROOT / "python/wavepe/__init__.py").read_text()
    assert not any(path.exists() for path in stale)
    held = {path.stem for path in (tmp_path / "wavepe" / "benchmarks").iterdir()}
    folder = ROOT / "benchmarks"
    new = needed = {"__init__", "bench", *(path.stem for path in folder.glob("bench_*.py"))}
    while new:
        texts = [(folder / f"{name}.py").read_text() for name in new]
        new = {n for text in texts for n in re.findall(r"^ *from \.(\w+) import", text, re.M)}
        new -= needed
        needed = needed | new
    assert held == needed
