"""English text from Debian's packages: manuals, a FAQ and a glossary.

The command fetches one of them, an anarchist FAQ, by apt-get, and writes FOLDER/prose.txt: 11 MB of
essays, in a random order. The other packages have much of their text twice.

python -m benchmarks.prose FOLDER
"""

from __future__ import annotations

import gzip
import html
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .command import new_parser

BOOKS = ("anarchism", "apache2-doc", "bash-doc", "debian-reference-en", "developers-reference")
BOOKS += ("git-doc", "jargon-text", "postgresql-doc-15")
# Pages in other languages, and pages that are lists of links.
NOT_PROSE = re.compile(
    r"\.(de|fr|es|ja|ko|tr|pt-br|zh-cn|da|cs|ru)(\.|$)|_static|genindex|search|/(de|fr|ja|ru|zh)/"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="a folder for the text, 23 MB")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "prose.txt"
    path.write_text("\n\n".join(texts(books(args.folder, BOOKS[:1]))), "utf-8")
    print(path)
    return 0


def text_of(page: str) -> str:
    """Return the text of an HTML page, without code."""
    page = re.sub(r"(?is)<(script|style|pre|head|nav)\b.*?</\1>", " ", page)
    page = re.sub(r"(?i)</?(p|br|div|li|h\d|tr|dd|dt|ul|ol|table)\b[^>]*>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page))
    page = re.sub(r" ?\n ?", "\n", re.sub(r"[ \t\r]+", " ", page))
    return re.sub(r"\n{2,}", "\n\n", page).strip()


def books(folder: Path, names: Sequence[str] = BOOKS) -> list[Path]:
    """Fetch Debian's packages; return a text file for each, with form feeds between documents."""
    paths = []
    for name in names:
        paths.append(folder / "books" / f"{name}.txt")
        if paths[-1].exists():
            continue
        paths[-1].parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            quiet = ["-qq", "-o", "APT::Sandbox::User=root"]  # root may not be able to write here
            subprocess.run(["apt-get", *quiet, "download", name], cwd=place, check=True)
            (package,) = Path(place).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, place], check=True)
            paths[-1].write_text("\f".join(documents(Path(place))), "utf-8")
    return paths


def documents(place: Path) -> list[str]:
    """Return the different texts of some length in a folder."""
    by_beginning: dict[str, str] = {}
    for path in sorted(place.rglob("*")):
        name = path.name.removesuffix(".gz")
        wanted = name.endswith((".html", ".htm", ".xhtml", ".txt"))
        if path.is_symlink() or not wanted or NOT_PROSE.search(str(path)):
            continue
        stored = path.read_bytes() if name == path.name else gzip.decompress(path.read_bytes())
        text = stored.decode("utf-8", "replace")
        text = text if name.endswith(".txt") else text_of(text)
        if len(text) >= 2000:
            by_beginning.setdefault(text[:3000], text.replace("\f", ""))
    return list(by_beginning.values())


def texts(files: Sequence[Path]) -> list[str]:
    """Return the documents of the files, in a random order."""
    documents = [text for file in files for text in file.read_text("utf-8").split("\f")]
    random.Random(0).shuffle(documents)
    return documents


if __name__ == "__main__":
    sys.exit(main())
