"""Read the mutants: small faults, each with the tests that must find it.

A file `<area>.txt` begins with a comment and the area's tests. A mutant is a paragraph:

    python/wavepe/arrays/rope.py: pairs of the wrong half
    tests: tests/test_rope.py
    - half = size // 2
    + half = size // 2 - 1

The text behind `- ` must stand exactly once in the file; several lines are one text. `tests:` is
only there if the area's do not serve.
"""

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Mutant(NamedTuple):
    area: str
    path: str  # the file with the fault, from the root
    what: str
    tests: tuple[str, ...]  # files or node ids
    old: str
    new: str

    def __str__(self):
        return f"{self.area}: {self.path}: {self.what}"

    @property
    def files(self) -> set[str]:
        """Whatever the mutant depends on."""
        tests = {test.partition("::")[0] for test in self.tests}
        return {self.path, f"tests/mutants/{self.area}.txt", *tests}

    def apply(self, root: Path = ROOT) -> str:
        """Return the text of the file with the fault, from the tree at `root`."""
        text = (root / self.path).read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self}: its old text stands {found} times in the file, not once")
        return text.replace(self.old, self.new)


def read(file: Path) -> list[Mutant]:
    """Return the mutants of one area."""
    area, tests, mutants = file.stem, (), []
    for paragraph in re.split(r"\n\n+", file.read_text().strip()):
        lines = [line for line in paragraph.split("\n") if not line.startswith("#")]
        if lines and lines[0].startswith("tests:"):
            tests = tuple(lines[0].split()[1:])
        elif lines:
            mutants.append(read_mutant(area, tests, lines))
    return mutants


def read_mutant(area, tests, lines):
    path, what = re.fullmatch(r"(\S+): (.+)", lines[0]).groups()
    texts = {"-": [], "+": []}
    for line in lines[1:]:
        if line.startswith("tests:"):
            tests = tuple(line.split()[1:])
        elif line[:1] in texts and line[1:2] in ("", " "):
            texts[line[0]].append(line[2:])
        else:
            raise ValueError(f"{area}: {lines[0]}: not a line of a mutant: {line!r}")
    old, new = ("\n".join(texts[sign]) for sign in "-+")
    if not old or old == new or not tests:
        raise ValueError(f"{area}: {lines[0]}: it needs tests, `-` lines and a change")
    return Mutant(area, path, what, tests, old, new)


def read_all() -> list[Mutant]:
    return [mutant for file in sorted(HERE.glob("*.txt")) for mutant in read(file)]
