"""Draw the pictures of docs/results again, from the figures that are kept.

python -m benchmarks.pictures

attention.png is not among them: it shows trained models, which `benchmarks.compare_models` reads.
"""

from __future__ import annotations

import json
import sys

import matplotlib

from . import attention_page, compare_page, score_parts
from .command import new_parser
from .compare_kept import kept
from .compare_page import PICTURES
from .readme import add_root


def main() -> int:
    """Draw all; return 0."""
    parser = new_parser(__doc__)
    add_root(parser)
    root = parser.parse_args().root
    matplotlib.rc_file(root / "docs" / "matplotlibrc")
    sys.path.insert(0, str(root / "examples"))
    import fairseq_demo
    import rope_images

    compare_page.draw(root)
    attention_page.draw(root)
    score_parts.draw(kept(root, score_parts.NAME), root / PICTURES / "score-parts.png")
    for name, draw in (
        ("fairseq-demo", fairseq_demo.draw),
        ("rope-images", lambda results, path: rope_images.picture(results["runs"], path)),
    ):
        draw(
            json.loads((root / PICTURES / f"{name}.json").read_text("utf-8")),
            root / PICTURES / f"{name}.png",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
