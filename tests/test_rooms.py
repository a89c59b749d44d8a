"""The rooms of the package: imports go one way, nothing reads another room's private names, and
the budgets of lines."""

from pathlib import Path

import pytest

from docs.writers import rooms

ROOT = Path(__file__).resolve().parent.parent
LOW = "arrays common"
TORCH = f"positions encodings ops {LOW}"
# room -> the rooms that it may import: front ends, positions, encodings, ops, arrays, common
MAY_IMPORT = {
    "common": "csrc",
    "arrays": "common csrc",
    "ops": f"{LOW} csrc",
    "encodings": f"ops {LOW}",
    "positions": f"encodings ops {LOW}",
    "referee": LOW,
    "wavepe": f"encodings referee {LOW}",
    "nn": TORCH,
    "hf": TORCH,
    "fairseq": TORCH,
    "serving": f"hf {TORCH}",
    "analysis": f"wavepe hf referee {TORCH}",
    "training": f"wavepe hf analysis {TORCH}",
    "experiments": f"wavepe hf analysis training {TORCH}",
    "benchmarks": f"wavepe nn hf fairseq analysis training serving experiments {TORCH}",
    "cli": f"wavepe hf analysis training experiments benchmarks referee {TORCH}",
}
LINES = {
    "python/wavepe": 28_000,
    "python/wavepe/hf": 4_800,
    "python/wavepe_vllm": 300,
    "tests": 40_900,
}


@pytest.fixture(scope="module")
def modules():
    return rooms.sources(ROOT)


@pytest.fixture
def package(tmp_path):
    """Return a function that writes modules of a package `wavepe`, and reads them."""

    def write(**texts):
        for name, text in {"__init__": "", **texts}.items():
            path = tmp_path.joinpath("python/wavepe", *name.split("__", 1 - name.startswith("__")))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        return rooms.sources(tmp_path)

    return write


def test_modules_do_not_import_in_circles(modules):
    edges = {(each.importer, each.imported) for each in rooms.imports(modules)}
    assert len(edges) > 500
    assert not rooms.circles(edges)


def test_imports_go_one_way(modules):
    upward = {
        (rooms.room_of(each.importer), rooms.room_of(each.imported)): str(each)
        for each in rooms.imports(modules)
    }
    for room in set(upward):
        if room[0] == room[1] or room[1] in MAY_IMPORT[room[0]].split():
            del upward[room]
    assert not upward, "\n".join(upward.values())


def test_private_names_stay_in_their_room(modules):
    reads = rooms.private_reads(modules)
    assert not reads, "\n".join(map(str, reads))


@pytest.mark.parametrize("folder", LINES)
def test_lines_stay_within_their_budget(folder):
    paths = [path for path in (ROOT / folder).rglob("*.py") if "kept" not in path.parts]
    count = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
    assert 0 < count <= LINES[folder], f"{folder} has {count} lines"


@pytest.mark.parametrize(
    "line",
    [
        "import wavepe.b.y", "from wavepe.b import y", "from wavepe.b.y import name",
        "from ..b import y as z", "from ..b.y import name", "def f():\n    from ..b.y import name",
        "if TYPE_CHECKING:\n    from ..b.y import name", "importlib.import_module('wavepe.b.y')",
    ],
)  # fmt: skip
def test_each_kind_of_import_is_found(line, package):
    modules = package(a____init__="", a__x=line, b____init__="", b__y="from .. import a\n")
    assert ("wavepe.a.x", "wavepe.b.y") in {each[:2] for each in rooms.imports(modules)}
    assert rooms.arrows(modules) == {("a", "b"): 1, ("b", "a"): 1}


def test_circles_have_all_their_members():
    edges = [(1, 2), (2, 3), (3, 1), (3, 4), (4, 5), (5, 4), (6, 6), (0, 1)]
    assert rooms.circles(edges) == [[1, 2, 3], [4, 5], [6]]


PRIVATE = "_name = 1\nclass Class:\n    def __init__(self):\n        self._value = 1\n"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("from ..b.y import _name", 1),
        ("from ..b import y\ny._name", 1),
        ("x = object()\nx._value", 1),
        ("x = object()\nx._name", 0),  # of a module, and so of another package's object
        ("from ..b import y\ny.__name__", 0),
        ("import torch\ntorch._C", 0),
        ("_name = 1\nx = object()\nx._name", 0),
    ],
)
def test_each_kind_of_read_is_found(line, count, package):
    modules = package(a____init__="", a__x=line, b____init__="", b__y=PRIVATE)
    assert len(rooms.private_reads(modules)) == count


def test_private_modules_are_named_with_their_readers(package):
    modules = package(a____init__="", a__x="from ..b._y import f", b____init__="", b___y="")
    assert rooms.private_modules(modules) == {"wavepe.b._y": ["wavepe.a.x"]}
