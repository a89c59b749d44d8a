"""Complete what MkDocs does: pages from elsewhere, links, formulas and generated texts.

A page may link to any file of the repository. A link to a file outside docs leads to the
repository's address, if pyproject.toml has one. Else the site brings the examples, and a page only
names another file.
"""

import contextlib
import html as characters
import inspect
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import wavepe
import wavepe.cli
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
sys.path.insert(0, str(ROOT))
from docs.writers.pages import addresses  # noqa: E402

PAGES = {  # of the root's files
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
UFUNCS = ("ricker", "gaussian", "morlet", "haar")
METHODS = "reference/methods.md"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
REPOSITORY = re.compile(r"^.* <!-- repository -->\n\n?", re.M)  # what the site does not need to say
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)
SOURCE = re.compile(r"^- \*\*\[(\w)\]\*\* (.+)$", re.M)
FIRST = re.compile(r"<p>((?:<strong>)?\w.*?)</p>", re.S)  # its first sentence describes a page
# TeX, as pymdownx.arithmatex leaves it: \(...\) in a line, \[...\] between paragraphs.
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>(?P<word>\w)?',
    re.S,
)
BARS = re.compile(r"\\lvert\b(.*?)\\rvert\b", re.S)  # latex2mathml forgets which side a bar is on
# log x and log_2 x: MathML puts no space behind log
FUNCTION = re.compile(
    r"(<msub><mi>\w{2,}</mi><m[in]>[^<]*</m[in]></msub>|(?<!<msub>)(?<!<msup>)<mi>\w{2,}</mi>)"
    r"(?=<m(i|n|sub|sup|frac)\b)"
)
# Where a line may end: not within an option, in a cell after a comma or plus of a long spec, and
# between a verdict and its figure.
INLINE = re.compile(r"<pre\b.*?</pre>|<code>([^<]*)</code>", re.S)
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
CELL = re.compile(r"<td\b.*?</td>", re.S)
LONG = re.compile(r"<code>([^<>]{25,})</code>")
PICTURE = re.compile(r'<img [^>]*?src="([^"]+\.png)"[^>]*>(?!</a>)')
VERDICT = re.compile(r"(<td[^>]*>(?:<strong>)?\w+,) ([\d.]+<)")
# Blanks and dashes that mkdocstrings puts around types of parameters, and backticks in such types.
SPACED = re.compile(
    r'(?<=\()\s+(?=<code>)|(?<=</code>)\s+(?=\))|(?<=\))\s+\S\s+<div class="doc-md-desc\S+\s+</div>'
)
TICKED = re.compile(r"(?<!</span>)<code>[^<>]*`[^<>]*</code>")
HEADING = re.compile(r"^#+ (.+)$", re.M)
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # of a terminal
# Names in code and keys of sources become links, but not in the parts listed above.
TARGET = re.compile(
    r'<(a|pre|h\d|b)\b.*?</\1>|<(span|div) class="arithmatex">.*?</\2>'
    r"|<code>(?P<name>[A-Za-z_][\w.]*)(\(\))?</code>|<code.*?</code>|<[^>]*>|\[(?P<key>[A-Z])\]",
    re.S,
)
TAG = re.compile(r"<([A-Za-z_]\w*)>")
FETCHED = re.compile(  # what a browser loads with a page
    r'<(?:script|img|iframe)\b[^>]*?\ssrc="((?:https?:)?//[^"]*)'
    r'|<link\b(?=[^>]*rel="(?:stylesheet|icon|preconnect|preload)")[^>]*?\shref="((?:https?:)?//[^"]*)'
)
HTML = re.compile(
    "a|article|b|blockquote|br|code|details|div|em|h[1-6]|hr|img|li|ol|p|pre|small|span|strong|summary|"
    "table|tbody|td|th|thead|tr|ul"
)
log = get_plugin_logger("docs")


def on_config(config: MkDocsConfig) -> None:
    """Take the addresses from [project.urls], the one place that has them."""
    urls = addresses(ROOT)
    config.site_url, config.repo_url = urls.get("Documentation"), urls.get("Repository")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are files of the repository's root, and those that are notebooks."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in [] if config.repo_url else sorted(EXAMPLES.glob("*.py")):
        name, shown = path.relative_to(ROOT).as_posix(), InclusionLevel.INCLUDED
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=shown))
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        page = path.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=_notebook(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated texts, and turn links to files into links to pages."""
    markdown = REPOSITORY.sub("", markdown)
    for name, text in GENERATED.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", text())
    place = page.file.src_uri
    if place in ("index.md", "changelog.md"):
        page.meta["hide"] = ["navigation"]  # no other page is beside it
    parts = FENCED.split(markdown)
    for i, part in enumerate(parts):
        if part.startswith("```"):
            _check_commands(part, place)
        else:
            parts[i] = LINK.sub(lambda match: _link(match, place, config.repo_url), part)
    return "".join(parts)


def _check_commands(block: str, place: str) -> None:
    """Warn of commands of wavepe, in a block of code, whose arguments do not exist."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("wavepe ") and not re.search(r"\.\.\.|\$|--help", line):
            words = shlex.split(line, comments=True)
            try:
                if words[1] in wavepe.cli.COMMANDS:  # or an output
                    wavepe.cli._parser(words[1], {}).parse_args(words[1:])
            except ValueError as error:
                log.warning(f"{place} has a wrong command: {error}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link public names and keys of sources; keep text that looks like a tag: wavepe_<family>.

    Formulas become MathML, which browsers draw without a script. A page without a description gets
    its first sentence.
    """
    place = page.file.src_uri
    module = next((name for name in MODULES if API[name] == place), None)

    def linked(match: re.Match) -> str:
        short, key = match["name"], match["key"]
        if key in SOURCES and place != METHODS:
            return f'<a href="{_to(place, METHODS)}#sources" title="{SOURCES[key]}">{match[0]}</a>'
        for name in (short, f"{module}.{short}", f"wavepe.{short}" if "." in str(short) else ""):
            if name in API and name != "wavepe":
                anchor = "" if name in MODULES else f"#{name}"
                return f'<a href="{_to(place, API[name])}{anchor}">{match[0]}</a>'
        if str(short).startswith("wavepe."):
            log.warning(f"{place} names {short}, which no page of the API has")
        return match[0]

    html = TICKED.sub(lambda code: code[0].replace("`", ""), SPACED.sub("", html))
    if first := FIRST.search(html):
        description = " ".join(characters.unescape(re.sub("<.*?>", "", first[1])).split())
        page.meta.setdefault("description", re.split(r"(?<=[.:])\s", description)[0].rstrip(":"))
    html = TARGET.sub(linked, html)
    html = TAG.sub(lambda tag: tag[0] if HTML.fullmatch(tag[1]) else f"&lt;{tag[1]}&gt;", html)
    html = PICTURE.sub(r'<a href="\1">\g<0></a>', html)  # on a phone a picture is small
    html = INLINE.sub(_options, CELL.sub(_cell, html))
    return FORMULA.sub(lambda match: _formula(match, place), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would fetch something from the network."""
    for match in FETCHED.finditer(output):
        log.warning(f"{page.file.src_uri} fetches {match[1] or match[2]}")
    return output


def _cell(match: re.Match) -> str:
    """A cell of a table, with the places where it may be broken."""
    cell = VERDICT.sub(r"\1<br>\2", match[0])
    return LONG.sub(lambda code: re.sub(r"(?<=[,+])(?=\w)", "<wbr>", code[0]), cell)


def _options(match: re.Match) -> str:
    """Code within a text, whose options are not broken."""
    return OPTION.sub(r'<span class="option">\g<0></span>', match[0]) if match[1] else match[0]


def _formula(match: re.Match, place: str) -> str:
    """A formula of the page `place` in MathML."""
    tag, tex = match["tag"], characters.unescape(match["tex"]).strip()
    tex = BARS.sub(r"\\left\\lvert\1\\right\\rvert", tex)
    if match["word"]:  # not $b=$a: GitHub, too, wants no letter behind the second sign
        return f"${match['tex']}${match['word']}"
    try:
        mathml = convert(tex, display="block" if tag == "div" else "inline")
    except Exception as error:  # each mistake in TeX has a class of its own
        mathml = f"\\{type(error).__name__}"
    if "\\" in mathml:  # a command that latex2mathml does not know stays as it is
        log.warning(f"{place} has a formula that cannot be drawn: {tex}")
    mathml = FUNCTION.sub(r'\g<0><mspace width="0.167em" />', mathml)
    return f'<{tag} class="arithmatex">{mathml}</{tag}>'


def _to(place: str, page: str) -> str:
    """The address of a page, seen from the page `place`."""
    return os.path.relpath(page, Path(place).parent).replace(".md", ".html")


def _sources() -> dict[str, str]:
    """Return the reference of each source key."""
    listed = SOURCE.findall((DOCS / METHODS).read_text("utf-8"))
    return {key: re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text) for key, text in listed}


def _api() -> dict[str, str]:
    """Every public name that has a docstring on a page of the API, and that page."""
    pages = {}
    for path in (DOCS / "reference" / "api").glob("*.md"):
        names = r"^(?:::: |<span id=\")([\w.]+)"
        for name in re.findall(names, path.read_text("utf-8"), re.M):
            pages[name] = path.relative_to(DOCS).as_posix()
    return pages | {f"wavepe.{name}": pages["wavepe"] for name in UFUNCS}


def _link(match: re.Match, place: str, repository: str | None) -> str:
    """A link of the page `place`, as the site needs it."""
    text, target, anchor = match[1], match[2], match[3] or ""
    sources = {page: ROOT / source for source, page in PAGES.items()}
    source = sources.get(place, DOCS / place)
    path = Path(os.path.normpath(source.parent / target))
    if not path.exists():
        log.warning(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
        return match[0]
    name = path.relative_to(ROOT).as_posix()
    page = path.relative_to(DOCS).as_posix() if DOCS in path.parents else PAGES.get(name)
    if page and path.suffix == ".ipynb" and path.stem != Path(place).stem:
        page = page.replace(".ipynb", ".md")  # its own page has a link to the file
    if page:
        return f"[{text}]({os.path.relpath(page, Path(place).parent)}{anchor})"
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{name})"
    if path.parent == EXAMPLES:
        return f"[{text}]({os.path.relpath(name, Path(place).parent)})"
    return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"


# ------------------------------------------------------------------ generated texts


def _notebook(path: Path) -> str:
    """A notebook as Markdown: its texts, its code, and the output that is kept in it."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text:
            parts += [_fence("python", text), *map(_output, cell["outputs"])]
    return "\n\n".join([*parts, f"[This page as a notebook]({path.name})"])


def _output(output: dict) -> str:
    """An output of a cell: a picture, a text in Markdown, or what was printed."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    if "text/markdown" in data:  # its headings do not belong to the page
        return HEADING.sub(r"**\1**", "".join(data["text/markdown"]))
    text = output.get("text") or output.get("traceback") or data.get("text/plain", "")
    return _fence("{.text .output}", COLOUR.sub("", "".join(text)).rstrip())


def _fence(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```"


def commands() -> str:
    """The help of every command."""
    os.environ["COLUMNS"] = "88"  # where argparse breaks lines
    parts = []
    for command in ("", *wavepe.cli.COMMANDS):
        help_text = io.StringIO()
        with contextlib.redirect_stdout(help_text):
            code = wavepe.cli.main([*command.split(), "--help"])
        if code:
            raise PluginError(f"wavepe {command} --help failed")
        parts.append(f"## wavepe {command}".rstrip() + f"\n\n```text\n{help_text.getvalue()}```")
    return "\n\n".join(parts)


def ufuncs() -> str:
    """The docstrings of the mother wavelets, which are C functions and have no Python source."""
    parts = []
    for name in UFUNCS:
        _, ours = inspect.getdoc(getattr(wavepe, name)).split("\n\n", 1)  # the first is NumPy's
        signature, text = ours.split("\n", 1)
        heading = f"### `wavepe.{name}` {{ #wavepe.{name} }}"
        parts.append(f"{heading}\n\n```python\n{signature}\n```\n\n{text.strip()}")
    return "\n\n".join(parts)


GENERATED = {"commands": commands, "ufuncs": ufuncs}
SOURCES = _sources()
API = _api()
MODULES = {name for name in API if any(other.startswith(f"{name}.") for other in API)}
