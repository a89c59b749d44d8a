"""The compiled files: instructions of each variant, imports, the source distribution."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from processes import forked, output, python
from wavepe import _numpy

ROOT = Path(__file__).parent.parent
BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "rich", "matplotlib"):
            raise ImportError("blocked " + name, name=name)
sys.meta_path.insert(0, Blocker())
"""


def without(module):
    """Code after which a module cannot be imported, nor what is in it."""
    names = f"[n for n in ({module!r}, *sys.modules) if f'{{n}}.'.startswith('{module}.')]"
    return f"import sys; sys.modules.update(dict.fromkeys({names}))\n"


def last_line(code):
    """The last line of a run that fails."""
    return forked("-c", code).stderr.rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def functions():
    """Instructions of every function of the NumPy module, by name; a list, since helpers without a
    variant in their name are there once for each."""
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


@pytest.mark.parametrize("variant", ["avx2", "avx2x2"])
def test_objects_for_avx2_hold_no_avx512(functions, variant):
    """The test-only variant, whose vectors are as long as AVX-512's, must not hold any either."""
    texts = [text for n, texts in functions.items() if n.endswith(f"_{variant}") for text in texts]
    if not texts:
        pytest.skip(f"this build holds no {variant}")
    evex = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3\d)|%k[0-7]")
    assert not [text[:200] for text in texts if evex.search(text)]


def test_import_where_torch_is_missing():
    code = "import wavepe; print(wavepe.wavelet_table(4, *wavepe.wavelet_grid(8)).shape)"
    assert output("-c", BLOCK_TORCH + code).strip() == "(4, 8)"


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
    assert last.startswith("ImportError: ")
    assert "pip install" in last
    from_checkout = last.endswith("(in the folder of the wavepe checkout)")
    assert from_checkout or (IMPORTS[module] == "torch" and last.endswith(": pip install torch"))


def test_nothing_tells_to_install_wavepe_from_an_index():
    """Neither `pip install wavepe` nor `pip install "wavepe[extra]"`, with options or without."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    files = [
        *ROOT.glob("python/**/*.py"),
        *ROOT.glob("csrc/**/*.[ch]*"),
        *ROOT.glob("docs/**/*.md"),
    ]
    wrong = re.compile(r"pip install[^\n&,:;#(]* \W?wavepe\b(?!/)")
    for file in (*files, ROOT / "setup.py", ROOT / "README.md"):
        text = re.sub(r'"\s*\n\s*f?"', "", file.read_text())  # one string over several lines
        assert not wrong.search(text), file


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
    assert command.startswith("uv pip install --no-build-isolation "), done.stderr


def test_source_distribution_is_complete(tmp_path):
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    patterns = ("csrc/**/*", "python/wavepe/**/*.py*", "tests/*.py", "benchmarks/*.py")
    patterns += ("tests/**/*.[ch]", "tests/**/Makefile")
    tree = [path for pattern in patterns for path in ROOT.glob(pattern) if path.suffix != ".pyc"]
    needed = {str(path.relative_to(ROOT)) for path in tree if path.is_file()}
    assert "python/wavepe/_numpy.pyi" in needed
    needed |= {"python/wavepe/py.typed"}
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"} <= names


def test_the_benchmarks_of_a_wheel_are_what_wavepe_bench_imports(tmp_path):
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    output("setup.py", "--quiet", "build_py", f"--build-lib={tmp_path}", cwd=ROOT)
    held = {path.stem for path in (tmp_path / "wavepe" / "benchmarks").iterdir()}
    folder = ROOT / "benchmarks"
    needed = {"__init__", "bench", *(path.stem for path in folder.glob("bench_*.py"))}
    new = needed
    while new:
        texts = [(folder / f"{name}.py").read_text() for name in new]
        new = {n for text in texts for n in re.findall(r"^ *from \.(\w+) import", text, re.M)}
        new -= needed
        needed = needed | new
    assert held == needed
