"""Split the scores of trained models into content and position, by distance.

The models are checkpoints of `wavepe compare` with the presets `combinations` and `recent`, read on
held-out text of 16 times the trained length. Means are taken over queries, heads and layers:

content    q . k; RoPE's rotation counts here, as it cannot be told from the content
position   what the encoding adds: its mean over the queries, and how far a query's value is from it
weight     the weight of the keys, for the last 64 queries

python -m benchmarks.score_parts FOLDER ...    keep the figures, and draw the picture

Models that are in none of the folders keep their figures.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import wavepe.hf  # noqa: F401 (it knows models of compare)
from torch import Tensor
from transformers import AutoModelForCausalLM
from wavepe import ops
from wavepe.analysis.plots.drawing import COLOURS, GRID, WIDTH, new_figure
from wavepe.common.labels import fold
from wavepe.experiments.data import load_text
from wavepe.ops._scores import rows_at

from .command import PICTURES, add_root, new_parser
from .command import table as markdown
from .compare_kept import KEPT

FACTOR = 16  # lengths over the trained one
SEQUENCES = 8
LAST = 64  # queries whose weights count
NAME = "score-parts"
SPECS = (
    "rope:theta=10000",
    "kerple",
    "transformer_xl",
    "wavelet:scales=6",
    "wavelet:scales=6,projection=true",
    "wavelet:scales=6,biases=true,projection=true",
    "wavelet:scales=6,biases=true,projection=true+kerple",
    "wavelet:rank=24,from_input=true",
)


# ------------------------------------------------------------------ the parts of one call


@contextmanager
def recorded() -> Iterator[list[dict]]:
    """Collect the arguments of all calls of `ops.attention`."""
    calls, attention = [], ops.attention

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor | tuple:
        calls.append({"q": q, "k": k, **options})
        return attention(q, k, v, **options)

    with mock.patch.object(ops, "attention", record):
        yield calls


def position_term(call: dict) -> Tensor:
    """Return what the encoding adds to the score of each query at each distance: (H, n, n).

    Column delta of query i belongs to the key i - delta; columns from i + 1 on have no key.
    """
    q = call["q"][0]
    heads, n, _ = q.shape
    distances = torch.arange(n)
    term = torch.zeros(heads, n, n)
    if call.get("slopes") is not None:
        term -= call["slopes"].float()[:, None, None] * distances
    if call.get("bias") is not None:
        bias = call["bias"].float()
        place = call.get("bias_first", 0), call.get("bias_beyond", "zero")
        values = rows_at(bias[..., None], *place, distances)[..., 0]  # (n,) or (H, n)
        term += values.expand(heads, n)[:, None]
    p, first, beyond = (call.get(key) for key in ("p", "first", "beyond"))
    if isinstance(p, ops.RelativeTable):
        beyond = p.beyond
        p, first, _ = p.tensors(torch.float32, "cpu")
    if p is not None:
        r = q if call.get("q_rel") is None else call["q_rel"][0]
        rows = rows_at(p.float(), first or 0, beyond or "zero", distances)
        term += scale_of(call) * (r.float() @ rows.mT)
    return term


def scale_of(call: dict) -> float:
    return call["q"].shape[-1] ** -0.5 if call.get("scale") is None else call["scale"]


def content_term(call: dict) -> Tensor:
    """Return scale q . k in the layout of `position_term`."""
    q, k = call["q"][0].float(), call["k"][0].float()
    products = scale_of(call) * (q @ k.repeat_interleave(len(q) // len(k), 0).mT)
    return by_distance(products)


def by_distance(x: Tensor) -> Tensor:
    """Return x (H, query, key) as (H, query, distance); columns without a key repeat key 0."""
    n = x.shape[-1]
    keys = torch.arange(n)[:, None] - torch.arange(n)
    return x.gather(-1, keys.clamp(0).expand_as(x))


def visible(n: int) -> Tensor:
    """Return which (query, distance) has a key."""
    return torch.arange(n)[:, None] >= torch.arange(n)


def weights_of(content: Tensor, position: Tensor) -> Tensor:
    """Return the attention's weights in the layout of `position_term`."""
    hidden = ~visible(content.shape[-1])
    return (content + position).masked_fill(hidden, -torch.inf).softmax(-1)


# ------------------------------------------------------------------ means by distance


def edges_of(length: int) -> list[int]:
    """Return the first distance of each bin, and the length: 0, 1, 2, 4, 8, ..."""
    return [0, *(2**i for i in range(length.bit_length() - 1)), length]


def parts_of(call: dict) -> dict[str, list[float]]:
    """Return the means of one layer and sequence for each bin of distances."""
    content, position = content_term(call), position_term(call)
    n = content.shape[-1]
    sees = visible(n)
    counted = sees.sum(0)
    mean = (position * sees).sum(1) / counted  # (H, distance)
    spread = ((position - mean[:, None]) * sees).square().sum(1) / counted
    weights = weights_of(content, position)[:, -LAST:]  # they see nearly all distances
    means = {
        "content": ((content * sees).sum(1) / counted).mean(0),
        "position": mean.mean(0),
        "of_query": spread.sqrt().mean(0),
    }
    edges = edges_of(n)
    bins = [slice(*pair) for pair in itertools.pairwise(edges)]
    by_distance = {name: [values[b].mean().item() for b in bins] for name, values in means.items()}
    by_distance["weight"] = [weights[..., b].sum(-1).mean().item() for b in bins]
    return by_distance


def measured(folder: Path, text: np.ndarray, length: int, sequences: int) -> dict:
    """Return the means of a checkpoint over its layers and some sequences."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    layers: list[dict] = []
    for start in range(0, sequences * length, length):
        tokens = torch.from_numpy(text[start : start + length].astype(np.int64))[None]
        with torch.no_grad(), recorded() as calls:
            model(tokens, use_cache=False)
        layers += map(parts_of, calls)
    return {name: np.mean([x[name] for x in layers], axis=0).tolist() for name in layers[0]}


# ------------------------------------------------------------------ table and picture


def table(kept: dict) -> str:
    """Return the encoding's part at four distances, and the weight far away, as Markdown."""
    edges, trained = kept["edges"], kept["train_length"]
    shown = (1, trained // 4, trained, edges[-1] // 2)
    heads = [f"position at {distance}" for distance in shown]
    rows = []
    for name, parts in kept["models"].items():
        at = map(edges.index, shown)
        cells = [f"{parts['position'][i]:.1f} ± {parts['of_query'][i]:.1f}" for i in at]
        far = sum(parts["weight"][edges.index(trained) :])
        rows.append((f"`{name}`", *cells, f"{100 * far:.0f} %"))
    return markdown(("encoding", *heads, f"weight beyond {trained}"), rows)


def draw(kept: dict, path: Path) -> None:
    """Draw a panel for each model: content and position over the distance."""
    models, length = kept["models"], kept["train_length"]
    rows = (len(models) + 1) // 2
    figure = new_figure(WIDTH, 1 + 1.9 * rows)
    grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    middles = [0.5, *(a * 2**0.5 for a in kept["edges"][1:-1])]  # 0 stands at 0.5
    ticks = [1, length // 8, length, 8 * length]
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes, (name, parts) in zip(grid.flat, models.items(), strict=False):
        position, spread = (np.array(parts[key]) for key in ("position", "of_query"))
        axes.plot(middles, parts["content"], color=COLOURS[0], label="content")
        axes.plot(middles, position, color=COLOURS[1], label="position, mean of the queries")
        axes.fill_between(
            middles, position - spread, position + spread, color=COLOURS[1], alpha=0.2,
            label="position, spread of the queries",
        )  # fmt: skip
        axes.axvline(length, color="0.5", linestyle=":", label="trained length")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set_title("\n".join(fold(name, 30)), fontsize="small", loc="left")
        axes.grid(True, **GRID)
    for axes in grid[:, 0]:
        axes.set_ylabel("part of the score")
    for axes in grid[-1]:
        axes.set_xlabel("distance")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=2)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep and draw; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="a folder that wavepe compare wrote")
    add_root(parser)
    args = parser.parse_args(argv)
    results = json.loads((args.folder[0] / "results.json").read_text("utf-8"))
    trained = results["train_length"]
    length = FACTOR * trained
    text = load_text(None, SEQUENCES * length, trained).held_out
    folders = {
        json.loads(file.read_text("utf-8"))["spec"]: file.parent
        for folder in args.folder
        for file in folder.glob("checkpoints/*-seed0/training.json")
    }
    file = args.root / KEPT / f"{NAME}.json"
    models = json.loads(file.read_text("utf-8"))["models"] if file.exists() else {}
    for spec in folders.keys() & SPECS:
        models[spec] = measured(folders[spec], text, length, SEQUENCES)
    models = {spec: models[spec] for spec in SPECS}
    kept = {"train_length": trained, "edges": edges_of(length), "models": models}
    file.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    draw(kept, args.root / PICTURES / f"{NAME}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
