"""docs/internals/rooms.md: the rooms of the package, which imports which, and their sizes.

All of it is read from the sources, without running them. tests/test_rooms.py asks the same
functions for circles and for names that are private to another room.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import table

PACKAGE = "wavepe"
PAGE = Path("docs", "internals", "rooms.md")
PICTURE = Path("docs", "internals", "rooms.png")
BINDINGS = (f"{PACKAGE}._numpy", f"{PACKAGE}._torch")  # compiled


class Import(NamedTuple):
    """An import statement's effect: a module reads another, or a name of it."""

    importer: str
    imported: str
    name: str  # "" for the module itself
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported} {self.name}".rstrip()


class Source(NamedTuple):
    """A module's file."""

    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def sources(root: Path) -> dict[str, Source]:
    """Return the modules of the package and of benchmarks, by name: wavepe.hf.masks."""
    modules = {}
    for folder in (root / "python" / PACKAGE, root / "benchmarks"):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).parts
            if "user_dir" in inside or inside[0] == "benchmarks":
                continue  # a folder for fairseq's --user-dir; a copy for the wheel
            words = (folder.name, *path.relative_to(folder).with_suffix("").parts)
            name = ".".join(words[:-1] if words[-1] == "__init__" else words)
            modules[name] = Source(path, ast.parse(path.read_text("utf-8")))
    return modules


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module, which several functions look at."""
    return list(ast.walk(tree))


def room_of(module: str) -> str:
    """Return the room of a module: the folder in the package; "wavepe" for the package itself."""
    words = module.split(".")
    if module in BINDINGS:
        return "csrc"
    if module == f"{PACKAGE}.__main__":
        return "cli"
    return words[1] if words[0] == PACKAGE and len(words) > 1 else words[0]


# The public names wavepe.hf.adapt and check_rope are looked up in rooms above at their first use,
# and `import wavepe.hf` lets a room above register with transformers.
ABOVE_HF = ("wavepe.training.adapting", "wavepe.analysis.rope_check", "wavepe.serving")
FORWARDED = {("wavepe.hf", module) for module in ABOVE_HF}


def imports(modules: Mapping[str, Source]) -> list[Import]:
    """Return all imports between modules, but for `FORWARDED`, which must be there."""
    listed = [x for name, source in modules.items() for x in _imports(name, source, modules)]
    for pair in FORWARDED - {each[:2] for each in listed}:
        if pair[0] in modules:
            raise ValueError(f"{pair[0]} no longer looks up {pair[1]}: change FORWARDED")
    return [each for each in listed if each[:2] not in FORWARDED]


def _imports(importer: str, source: Source, modules: Mapping[str, Source]) -> Iterator[Import]:
    package = importer if source.is_package else importer.rpartition(".")[0]

    def target(module: str, name: str, line: int) -> Iterator[Import]:
        module = module.replace(f"{PACKAGE}.benchmarks", "benchmarks")  # as the wheel has them
        inner = f"{module}.{name}"
        if inner in modules or inner in BINDINGS:
            yield Import(importer, inner, "", line)
        elif module in modules or module in BINDINGS:
            yield Import(importer, module, name, line)

    for node in _nodes(source.tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from target(alias.name, "", node.lineno)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                words = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
                base = ".".join([*words, *([module] if module else [])])
                for alias in aliases:
                    yield from target(base, alias.name, node.lineno)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(m))]
            ):
                yield from target(m, "", node.lineno)


def circles(edges: Collection[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of nodes that reach one another."""
    after = defaultdict(set)
    for start, end in edges:
        after[start].add(end)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(after[start])
        while waiting:
            if (node := waiting.pop()) not in seen:
                seen.add(node)
                waiting += after[node]
        return seen

    reach = {node: reached(node) for node in list(after)}
    groups = {
        frozenset({node, *(other for other in ends if node in reach.get(other, ()))})
        for node, ends in reach.items()
        if node in ends
    }
    return sorted(sorted(group) for group in groups)


class Private(NamedTuple):
    """A name with an underscore that is read in another room than its own."""

    module: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} reads {self.name}"


def private_reads(modules: Mapping[str, Source]) -> list[Private]:
    """Return the reads of names and of attributes that are private to another room."""
    attributes, names = defaultdict(set), defaultdict(set)  # private name -> rooms that bind it
    for module, source in modules.items():
        for name, of_object in _bound(source.tree):
            (attributes if of_object else names)[name].add(room_of(module))
    reads = [
        Private(each.importer, each.line, f"{each.imported}.{each.name}")
        for each in imports(modules)
        if is_private(each.name) and room_of(each.importer) != room_of(each.imported)
    ]
    for module, source in modules.items():
        imported = {each.asname or each.name for each in _aliases(source.tree)}
        for node in _nodes(source.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                of_module = isinstance(node.value, ast.Name) and node.value.id in imported
                rooms = attributes[node.attr] | (names[node.attr] if of_module else set())
                if rooms and room_of(module) not in rooms | names[node.attr]:
                    reads.append(Private(module, node.lineno, ast.unparse(node)))
    return reads


def private_modules(modules: Mapping[str, Source]) -> dict[str, list[str]]:
    """Return modules whose path has an underscore, with those of other rooms that import them."""
    readers = defaultdict(list)
    for each in imports(modules):
        outside = room_of(each.importer) != room_of(each.imported)
        if outside and any(map(is_private, each.imported.split("."))):
            readers[each.imported].append(each.importer)
    return {name: sorted(set(names)) for name, names in readers.items() if name not in BINDINGS}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _bound(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the private names that a module binds, and whether they are those of objects."""
    classes = (node.body for node in _nodes(tree) if isinstance(node, ast.ClassDef))
    members = {statement for body in classes for statement in body}
    for node in _nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                of_object = node in members
            case ast.Name(id=name, ctx=ast.Store()):
                of_object = False
            case ast.Attribute(attr=name, ctx=ast.Store()):
                of_object = True
            case _:
                continue
        if is_private(name):
            yield name, of_object


def _aliases(tree: ast.Module) -> Iterator[ast.alias]:
    for node in _nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from node.names


def arrows(modules: Mapping[str, Source]) -> Counter[tuple[str, str]]:
    """Return how many names each room imports from each other room."""
    rooms = ((room_of(each.importer), room_of(each.imported)) for each in imports(modules))
    return Counter(pair for pair in rooms if pair[0] != pair[1])


# ------------------------------------------------------------------ the page and the picture


def lines(modules: Mapping[str, Source]) -> Counter[str]:
    """Return the lines of Python in each room."""
    counts: Counter[str] = Counter()
    for name, source in modules.items():
        counts[room_of(name)] += len(source.path.read_text("utf-8").splitlines())
    return counts


def levels(edges: Collection[tuple[str, str]]) -> dict[str, int]:
    """Return the height of each room: one more than that of the highest room that it imports."""
    below = defaultdict(set)
    for start, end in edges:
        below[start].add(end)
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max(map(height, below.get(room, ())), default=-1)
        return heights[room]

    if not circles(edges):
        for edge in edges:
            height(edge[0])
    return heights


def blocks(root: Path) -> dict[str, str]:
    """Return the table of rooms, the highest first, with what each one holds and imports."""
    modules = sources(root)
    edges = arrows(modules)
    heights = levels(edges)
    rows = []
    for room in sorted(heights, key=lambda room: (-heights[room], room)):
        package = {PACKAGE: PACKAGE, "benchmarks": "benchmarks"}.get(room, f"{PACKAGE}.{room}")
        if room == "csrc":
            words = "The kernels, and their bindings to NumPy and torch."
        else:
            words = (ast.get_docstring(modules[package].tree) or "").split("\n\n")[0]
        reads = ", ".join(f"`{end}`" for start, end in sorted(edges) if start == room)
        rows.append((f"`{room}`", " ".join(words.replace("``", "`").split()), reads))
    return {"rooms": table(("room", "what it holds", "imports"), rows, "l")}


def draw(root: Path) -> None:
    """Draw the rooms, with an arrow wherever no longer way through other rooms leads."""
    import matplotlib.pyplot as plt

    modules = sources(root)
    edges, counts = arrows(modules), lines(modules)
    heights = levels(edges)
    rows = defaultdict(list)
    for room in sorted(heights):
        rows[heights[room]].append(room)
    places = {
        room: ((column + 0.5) / len(row), float(height))
        for height, row in rows.items()
        for column, room in enumerate(row)
    }
    direct = [
        (start, end)
        for start, end in edges
        if not any((start, room) in edges and (room, end) in edges for room in heights)
    ]
    figure, axes = plt.subplots(figsize=(7, 0.8 * (max(rows) + 1)))
    style = {"boxstyle": "round,pad=0.4", "facecolor": "#dfe6f2", "edgecolor": "#5b7bb4"}
    center = {"ha": "center", "va": "center"}
    boxes = {
        room: axes.text(
            *place,
            f"{room}\n{counts[room]:,} lines" if room in counts else room,
            **center,
            fontsize=10,
            color="#303030",
            bbox=style,
        )
        for room, place in places.items()
    }
    for start, end in direct:
        arrow = {"arrowstyle": "-|>", "color": "#707070", "shrinkA": 0, "shrinkB": 0}
        arrow |= {"patchA": boxes[start].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch()}
        axes.annotate("", xy=places[end], xytext=places[start], arrowprops=arrow, zorder=1)
        x, y = ((a + b) / 2 for a, b in zip(places[start], places[end], strict=True))
        axes.text(
            x + 0.025,
            y + 0.15 * (x != places[start][0]),
            str(edges[start, end]),
            fontsize=9,
            **center,
        )
    axes.set(xlim=(0, 1), ylim=(-0.5, max(rows) + 0.5))
    axes.axis("off")
    figure.savefig(root / PICTURE, bbox_inches="tight", dpi=160)
    plt.close(figure)
