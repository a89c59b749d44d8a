"""Check the sentences of docstrings, comments and pages, and the names of local variables.

python -m docs.sentences [--words] [PATH ...]

Prints each line to be rewritten, then a count per file, and returns 1 if there is one. --words
lists names of locals that fit anything, too. Without a path, all of the tree is checked, and those
names are counted per folder: no more than WORDS_LEFT.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("python/wavepe", "python/wavepe_vllm", "csrc", "benchmarks", "docs", "examples", "tests")


class Rule(NamedTuple):
    """A pattern that no text may have, what to write, and a sentence that it refuses."""

    pattern: str
    advice: str
    example: str


# The first words of a docstring or comment.
BEGINNINGS = (
    Rule(r"What\b(?!.*\?)", "name the thing, or begin with a verb", "What two calls share."),
    Rule(r"Those\b", "name the thing", "Those of the layers above."),
    Rule(r"That of\b", "name the thing", "That of the first layer."),
    Rule(r"Of\b(?! course)", "begin with the noun or a verb", "Of sequences that are short."),
)
PHRASES = (
    Rule(r"\b(?:is|are|was|were) none\b", "say what is missing", "None if there is none."),
    Rule(
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more\b)[a-z]",
        "negate the verb: `is not a ...`",
        "This is no class.",
    ),
    Rule(
        r"\bmakes? (?!use\b|part\b|sure\b|calls\b)(?:(?!a\b|an\b|the\b)\w+ )?of\b",
        "computes ... from, turns ... into",
        "What a part makes of its parameters.",
    ),
    Rule(r"\b(?:say|says|said) of\b", "says about, stores for", "What the input says of a token."),
    Rule(
        r"\b[Ss]teps? of (?:transfer|language|decoding|training)\b",
        "transfer step, ...",
        "a step of decoding",
    ),
    Rule(
        r"\b(?:length|text|tokens|seconds?|hours?) of training\b",
        "training length, ...",
        "the length of training",
    ),
    Rule(r"\bthe rule of who\b", "a compound noun", "the rule of who sees whom"),
    Rule(r"\b[Ii]n the place of\b", "instead of", "In the place of the rotation"),
    Rule(r"\bsomebody\b", "a user, a caller", "a class that somebody derived"),
    Rule(
        r"\btakes? no (?:kept|others)\b",
        "a verb that says what happens",
        "a tensor takes no kept one",
    ),
    Rule(r"\bat no place\b", "nowhere, or name the place", "a patched one is at no place"),
    Rule(r"\b(?:is|are) what it is for\b", "serves", "Few queries are what it is for."),
    Rule(r"\bmakes? (?:two|three|one) \w+ of one\b", "splits ... into", "makes two calls of one"),
)
# Names of locals and parameters that fit anything, and how many of them are left: lower the number
# when some have gone.
WORDS = ("found", "given", "own", "told", "said")
WORDS_LEFT = {"python/wavepe": 0, "python/wavepe_vllm": 0, "benchmarks": 0, "docs": 0, "tests": 282}


class Fault(NamedTuple):
    """A line of a file, the text that a rule refuses, and the rule's advice."""

    path: Path
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: {self.advice}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, with those of attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text


def comments(lines: Iterable[tuple[int, str, bool]]) -> Iterator[tuple[int, str]]:
    """Join comments on successive lines, if they stand alone there; yield line and text."""
    block: list[str] = []
    first = last = 0
    for line, text, alone in lines:
        if block and not (alone and line == last + 1):
            yield first, "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(text.strip())
        last = line if alone else -1
    if block:
        yield first, "\n".join(block)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings and comments of Python."""
    yield from docstrings(ast.parse(source))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from comments(
        (token.start[0], token.string.lstrip("#: -"), not token.line[: token.start[1]].strip())
        for token in tokens
        if token.type == tokenize.COMMENT
    )


def c_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments of C."""
    for match in re.finditer(r"/\*(.*?)\*/", source, re.S):
        text = "\n".join(line.strip(" *") for line in match[1].splitlines())
        yield source.count("\n", 0, match.start()) + 1, text
    lines = enumerate(source.splitlines(), 1)
    matches = ((line, re.search(r"(?<![:\"])//(.*)", text), text) for line, text in lines)
    yield from comments(
        (line, match[1], not text[: match.start()].strip())
        for line, match, text in matches
        if match
    )


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs of Markdown, without code."""
    source = re.sub(r"(?ms)^ *```.*?^ *```", lambda match: "\n" * match[0].count("\n"), source)
    for match in re.finditer(r"(?ms)^\S.*?(?=\n\s*\n|\Z)", source):
        yield source.count("\n", 0, match.start()) + 1, match[0]


def faults_of(path: Path) -> list[Fault]:
    """Return the sentences of a file to be rewritten."""
    is_page = path.suffix == ".md"
    texts = {".py": python_texts, ".md": page_texts}.get(path.suffix, c_texts)
    faults = []
    for first, text in texts(path.read_text("utf-8")):
        lines = [line for line, part in enumerate(text.split("\n"), first) for _ in part.split()]
        words = " ".join(text.split())
        masked = re.sub(r"`[^`]*`", lambda match: "`" * len(match[0]), words)  # code is not prose
        matches = [(rule, re.search(rule.pattern, masked)) for rule in PHRASES]
        if not is_page:
            matches += [(rule, re.match(rule.pattern, masked)) for rule in BEGINNINGS]
        for rule, match in matches:
            if match:
                line = lines[masked.count(" ", 0, match.start())]
                shown = " ".join(words[match.start() :].split()[:7])
                faults.append(Fault(path, line, shown, rule.advice))
    return faults


def words_of(path: Path) -> list[Fault]:
    """Return the names of locals and parameters of a file that fit anything."""
    if path.suffix != ".py":
        return []
    faults = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in WORDS:
                faults.append(Fault(path, node.lineno, name, "a noun that says what it holds"))
    return faults


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the sources and pages below the paths."""
    for path in paths:
        if path.is_dir():
            below = sorted(path.rglob("*"))
            yield from (
                file
                for file in below
                if file.suffix in {".py", ".c", ".h", ".cu", ".cpp", ".md"}
                and "results" not in file.parts
            )
        else:
            yield path


def too_many_words() -> list[str]:
    """Return a message for each folder with more of WORDS than it may have."""
    messages = []
    for folder, most in WORDS_LEFT.items():
        count = sum(len(words_of(path)) for path in files([ROOT / folder]))
        if count > most:
            messages.append(
                f"{folder} binds {' and '.join(WORDS)} {count} times, and may {most} times: say "
                f"what they hold (python -m docs.sentences --words {folder})"
            )
    return messages


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 1 if a sentence or a name is to be rewritten."""
    parser = argparse.ArgumentParser("python -m docs.sentences", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--words", action="store_true", help="names of locals, too")
    args = parser.parse_args(argv)
    counts: Counter[Path] = Counter()
    for path in files(args.paths or [ROOT / folder for folder in FOLDERS]):
        for fault in faults_of(path) + (words_of(path) if args.words else []):
            print(fault)
            counts[path] += 1
    for path, count in counts.most_common():
        print(f"{count:5} {path}")
    messages = [] if args.paths else too_many_words()
    print(*messages, sep="\n", end="\n" * bool(messages))
    return 1 if counts or messages else 0


if __name__ == "__main__":
    sys.exit(main())
