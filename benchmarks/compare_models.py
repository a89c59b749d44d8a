"""Measure p-RoPE at inference, and attention windows, of the models of a comparison.

The models are the checkpoints of `wavepe compare --preset wavelet`. This runs `wavepe sweep` and
`wavepe heatmap` on them, keeps the figures for docs/results/index.md, and draws its attention maps.

python -m benchmarks.compare_models FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import PICTURES, add_root, new_parser
from .compare_kept import KEPT

FRACTIONS = ("1", "0.9", "0.75", "0.5", "0.25", "0")
BASES = ("rope-theta-10000", "rope-theta-128")
# The threshold of a head's window. The papers' 0.001 is below even uniform attention at these
# lengths.
THRESHOLD = "0.01"
MAPPED = ("alibi", "rope-theta-10000", "wavelet-scales-6")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and keep the figures; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="the folder that wavepe compare wrote")
    add_root(parser)
    args = parser.parse_args(argv)
    results = json.loads((args.folder / "results.json").read_text("utf-8"))
    length, seeds = results["train_length"], results["environment"]["settings"]["seeds"]
    lengths = [str(length), str(4 * length)]
    checkpoints = args.folder / "checkpoints"
    sweeps = {
        name: [
            _command("sweep", checkpoints / f"{name}-seed{seed}", "--lengths", *lengths,
                     "--fraction", *FRACTIONS)["perplexity"]
            for seed in range(seeds)
        ]
        for name in BASES
    }  # fmt: skip
    folders = [checkpoints / f"{name}-seed0" for name in MAPPED]
    picture = args.root / PICTURES / "attention.png"
    picture.parent.mkdir(exist_ok=True)
    options = "--length", str(2 * length), "--threshold", THRESHOLD, "--png", picture
    maps = _command("heatmap", *folders, *options)
    windows = {name: model["windows"] for name, model in zip(MAPPED, maps["models"], strict=True)}
    kept = {
        "train_length": length,
        "fractions": [float(fraction) for fraction in FRACTIONS],
        "sweeps": sweeps,
        "windows": windows,
    }
    (args.root / KEPT / "models.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


def _command(*words: object) -> dict:
    """Run a command of `wavepe`; return its results."""
    command = [sys.executable, "-m", "wavepe", *map(str, words), "--quiet", "--json", "-"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    sys.exit(main())
