"""Audit the sdist and the wheels of a folder. A finding makes the exit code 1.

python tests/audit_dist.py dist                  what `make dist` has built
python tests/audit_dist.py dist --tag v0.1.0     what will be published under that tag

The tools print their own reports. Without a tag the wheel's platform is only printed: a release is
built in a manylinux image, whose older C library serves more machines.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

MODULES = ("wavepe/_numpy.abi3.so", "wavepe/_torch.abi3.so")
FREE_THREADED = r"-cp(3\d+)-cp\1t-"  # these wheels, and those for musl, hold the NumPy module alone
IN_WHEEL = ("wavepe/py.typed", "wavepe/hf/__init__.py", "wavepe/benchmarks/bench.py")
IN_SDIST = ("LICENSE", "README.md", "setup.py", "csrc/wavepe.h", "tests/conftest.py", "Makefile")
# Libraries that a module may need beside torch's own; a user may lack others.
MAY_NEED = r"lib(m|c|dl|gcc_s|stdc\+\+|pthread)\.so|ld-linux|libtorch(_cpu)?\.so|libc10\.so"
MAY_NEED += r"|libc\.musl-\w+\.so"
# Words that must not stand in a version that is on an index.
NOT_RELEASED = {
    "CHANGELOG.md": "(unreleased)",
    "README.md": "not on PyPI yet",
    "python/wavepe/common/runtime.py": "wavepe is on no package index",
}
OLDEST_IMAGES = "manylinux_2_28_|musllinux_1_2_"
LARGEST = 4 << 20  # bytes of a wheel without CUDA kernels


def run(*command):
    """Print a tool's report; return its output and whether it found nothing."""
    print("$", *(Path(word).name if "/" in word else word for word in command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    return done.stdout, done.returncode == 0


def tool(name):
    return str(Path(sys.executable).with_name(name))


def findings_of_module(path):
    """Yield what is wrong with the dynamic section of a module."""
    found = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", found)
    print(f"{path.name} needs {', '.join(needed)}")
    for name in needed:
        if not re.match(MAY_NEED, name):
            yield f"{path.name} needs {name}, which other machines may lack"
    for folder in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", found):
        yield f"{path.name} looks for libraries in {folder}, a folder of this machine"


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(about).decode()


def findings_of_wheel(wheel):
    """Yield what is wrong with a wheel."""
    yield from findings_of_description(metadata_of(wheel))
    names = zipfile.ZipFile(wheel).namelist()
    version = re.search(FREE_THREADED, wheel.name)
    modules = MODULES[: 1 if version or "-musllinux_" in wheel.name else None]
    if version:
        modules = [n for n in names if re.match(rf"wavepe/_numpy\.cpython-{version[1]}t-.*\.so", n)]
        modules = modules or ["the module of this Python"]
    yield from (f"{wheel.name} lacks {name}" for name in (*modules, *IN_WHEEL) if name not in names)
    if not version and "-cp310-abi3-" not in wheel.name:
        yield f"{wheel.name} is not tagged cp310-abi3, so it serves one version of Python only"
    if wheel.stat().st_size > LARGEST:
        yield f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST}"
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for name in modules:
            path = Path(folder, name)
            if path.exists():
                yield from findings_of_module(path)
        print(flush=True)
        if not run(tool("torch-abi-audit"), "--verbose", "--check", "both", f"{folder}/wavepe")[1]:
            yield "torch-abi-audit: not stable"
    if not version and not run(tool("abi3audit"), "--strict", "--summary", str(wheel))[1]:
        yield "abi3audit: violations"
    if not run(tool("auditwheel"), "show", str(wheel))[1]:
        yield "auditwheel cannot read the wheel"


def findings_of_description(metadata):
    """Yield the links in an index's page that lead nowhere."""
    for place in re.findall(r"\]\(([^)]+)\)", metadata):
        if not place.startswith(("http://", "https://", "#")):
            yield f"the description links to {place}, which an index does not have"


def findings_of_sdist(sdist):
    """Yield what is wrong with an sdist."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"{sdist.name} lacks {name}" for name in IN_SDIST if name not in names)
    yield from (f"{sdist.name} holds {n}" for n in names if n.endswith((".so", ".pyc", ".o")))


def findings_of_release(tag, sdist, wheels):
    """Yield what still says that this version is not published, or serves one machine alone."""
    root = sdist.name.removesuffix(".tar.gz")
    if root != f"wavepe-{tag.removeprefix('v')}":
        yield f"{sdist.name} is not what {tag} names"
    with tarfile.open(sdist) as archive:
        for name, words in NOT_RELEASED.items():
            if words in archive.extractfile(f"{root}/{name}").read().decode():
                yield f"{name} says {words!r}"
    for wheel in wheels:
        if not re.search(OLDEST_IMAGES, wheel.name):
            yield f"{wheel.name} was not built in one of the images {OLDEST_IMAGES}"
        if "\nProject-URL: " not in metadata_of(wheel):
            yield f"{wheel.name} has no address: fill in [project.urls] of pyproject.toml"


def main(folder, tag):
    sdists, wheels = sorted(Path(folder).glob("*.tar.gz")), sorted(Path(folder).glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        sys.exit(f"{folder} must hold one sdist and wheels: run make dist")
    found = [*findings_of_sdist(sdists[0]), *(f for w in wheels for f in findings_of_wheel(w))]
    if tag:
        found += findings_of_release(tag, sdists[0], wheels)
    paths = [*sdists, *wheels]
    if not run(tool("twine"), "check", "--strict", *map(str, paths))[1]:
        found.append("twine: the description would not be shown")
    for path in paths:
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    for finding in found:
        print(f"FINDING: {finding}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--tag")
    given = parser.parse_args()
    sys.exit(main(given.folder, given.tag))
