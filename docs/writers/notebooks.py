"""Run the notebooks of docs, and keep in them what their cells print and draw.

python -m docs.writers.notebooks [NAME ...]

It needs no Jupyter. The cells run in one namespace, in a folder that is removed at the end.
tests/test_notebooks.py runs them by the same function.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.command import add_root, new_parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOKS = Path("docs", "notebooks")
STYLE = Path(__file__).parent.parent / "matplotlibrc"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a notebook is missing, else 0."""
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file of docs/notebooks; or all")
    add_root(parser)
    args = parser.parse_args(argv)
    folder = (args.root / NOTEBOOKS).resolve()
    known = sorted(path.stem for path in folder.glob("*.ipynb"))
    if unknown := set(args.names) - set(known):
        parser.error(f"no notebook is called {', '.join(sorted(unknown))}")
    for name in args.names or known:
        path = folder / f"{name}.ipynb"
        content = json.loads(path.read_text("utf-8"))
        warnings.simplefilter("error")
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            for cell, outputs in run(content["cells"]):
                cell["outputs"], cell["execution_count"] = outputs, None
        text = json.dumps(content, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
    return 0


def run(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run the cells of code in the current folder; yield each one and its outputs.

    As in Jupyter, the value of a last line is shown, and all figures of pyplot are. What goes to
    stderr is not kept: bars of progress.
    """
    import matplotlib
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        matplotlib.rc_context(fname=STYLE),
        mock.patch.object(pyplot, "show", return_value=None),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        pyplot.switch_backend("agg")
        pyplot.close("all")  # a notebook begins without figures
        for cell in cells:
            if cell["cell_type"] == "code":
                yield cell, _outputs("".join(cell["source"]), names)


def _outputs(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the code of a cell; return what it printed, what it drew and its value."""
    from matplotlib import pyplot

    body, printed, value = ast.parse(code).body, io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_markdown_"):
            data = {"text/markdown": _lines(value._repr_markdown_()), **data}
        outputs.append({
            "data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result",
        })  # fmt: skip
    for number in pyplot.get_fignums():
        data = {"image/png": base64.b64encode(_png(pyplot.figure(number))).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


def _png(figure: Figure) -> bytes:
    """Return the figure as PNG of at most 256 colours, which takes half the room."""
    from PIL import Image  # matplotlib needs it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).quantize(256, Image.Quantize.FASTOCTREE).save(small, "png", optimize=True)
    return small.getvalue()


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
