"""What was compiled: instructions of each variant, imports, the source distribution."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
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


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.fixture(scope="module")
def functions():
    """Instructions of every function of the NumPy module, by name."""
    if not shutil.which("objdump"):
        pytest.skip("no objdump (binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", _numpy.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for part in listing.split("\n\n"):
        if match := re.search(r"<(\w[\w.]*)>:", part):
            found[match[1]] = part
    if not any("_portable" in name for name in found):
        pytest.skip("the module is stripped of its symbols")
    return found


def test_portable_objects_hold_no_wider_instruction(functions):
    wide = re.compile(r"%[yz]mm|\tv[a-z]+[ \t]")  # AVX registers, or VEX and EVEX encodings
    portable = {n: text for n, text in functions.items() if "_portable" in n}
    assert len(portable) > 10
    offending = {n: wide.search(text)[0] for n, text in portable.items() if wide.search(text)}
    assert not offending


@pytest.mark.parametrize(("variant", "register"), [("avx2", "ymm"), ("avx512", "zmm")])
def test_wide_objects_use_fma(functions, variant, register):
    """An ISO mode or a lost flag would switch contraction off, at half the speed."""
    if not any(name.endswith(f"_{variant}") for name in functions):
        pytest.skip(f"this build holds no {variant}")
    text = functions[f"relative_bias_f32_{variant}"]
    assert len(re.findall(rf"vfmadd\w+ps .*%{register}", text)) >= 12


def test_import_needs_numpy_alone():
    done = python(
        BLOCK_TORCH + "import wavepe; print(wavepe.wavelet_table(4, *wavepe.wavelet_grid(8)).shape)"
    )
    assert done.stdout.strip() == "(4, 8)", done.stderr
    done = python("import sys, wavepe; print({'torch', 'transformers'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("module", ["wavepe.ops", "wavepe.hf"])
def test_missing_parts_say_what_brings_them(module):
    done = python(BLOCK_TORCH + f"import {module}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert "pip install" in last


def test_build_without_torch_says_what_to_do():
    done = python(
        "import sys; sys.modules['wavepe._torch'] = None\nimport torch\nimport wavepe.ops"
    )
    assert "--no-cache-dir" in done.stderr, done.stderr
    assert done.stderr.rstrip().splitlines()[-3].startswith("ImportError")


def test_source_distribution_is_complete(tmp_path):
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tree = [*ROOT.glob("csrc/**/*"), *ROOT.glob("python/wavepe/**/*.py"), *ROOT.glob("tests/*.py")]
    needed = {str(path.relative_to(ROOT)) for path in tree if path.is_file()}
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"} <= names
