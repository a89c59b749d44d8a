"""RoPE in two dimensions, on images: in which direction from the cross is the square?

    python examples/rope_images.py [--out DIR]

The images have 8 x 8 patches, with a cross, a square near it, and two bars that do not matter. A
transformer of two layers reads the patches and answers with one of eight directions. Only the
position encoding tells it where a patch is. There are three: no positions ("none"), distances in
one row after the other ("1-D"), and distances down and across ("2-D"). The model is trained on this
size, and also tested on larger images, where the square is as near to the cross as in training.

The example prints a table, and writes a picture and the figures to DIR. Its nine trainings take
about four minutes on one core.
"""

import argparse
import datetime
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import nn
from wavepe.experiments.environment import environment

GRID, PATCH = 8, 5  # patches down and across, pixels down and across a patch
GRIDS = (GRID, GRID * 3 // 2, GRID * 2)  # sizes of the test images
DIM, HEADS, LAYERS = 64, 2, 2
THETA = 100.0
BATCH, STEPS, SEEDS = 32, 1000, 3
LEARNING_RATE = 3e-3
TEST_IMAGES = 1024
ENCODINGS = ("none", "1-D", "2-D")
COLOURS = ("#7F7F7F", "#E8A87C", "#D55E00")  # as elsewhere: none grey, RoPE vermilion

PICTURES = (
    "..#.. ..#.. ##### ..#.. ..#..",  # the cross
    "##### #...# #...# #...# #####",  # the square
    "#.... .#... ..#.. ...#. ....#",  # the two bars that do not matter
    "..... ..... ##### ..... .....",
)
SHAPES = np.array([[[c == "#" for c in row] for row in text.split()] for text in PICTURES], float)
REACH = 3  # the largest distance from the cross to the square, in patches down and across
NEAR = [(y, x) for y in range(-REACH, REACH + 1) for x in range(-REACH, REACH + 1) if y or x]
SIGNS = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if y or x]  # the eight answers
WORDS = ("up left", "up", "up right", "left", "right", "down left", "down", "down right")


def draw(count, grid, rng):
    """Return images as patches (count, grid * grid, pixels), and the direction of each image."""
    patches = rng.normal(0, 0.2, (count, grid, grid, PATCH, PATCH))
    answers = rng.integers(len(SIGNS), size=count)
    for image, answer in zip(patches, answers, strict=True):
        offsets = [o for o in NEAR if tuple(np.sign(o)) == SIGNS[answer]]
        down, across = offsets[rng.integers(len(offsets))]
        row = rng.integers(max(0, -down), grid - max(0, down))
        column = rng.integers(max(0, -across), grid - max(0, across))
        places = [(row, column), (row + down, column + across)]
        while len(places) < 4:
            place = tuple(rng.integers(grid, size=2))
            if place not in places:
                places.append(place)
        for shape, place in zip(SHAPES, places, strict=True):
            image[place] += shape
    images = torch.from_numpy(patches.reshape(count, grid * grid, -1)).float()
    return images, torch.from_numpy(answers)


def tables(encoding, grid, pairs):
    """Return cos and sin of the rotation, each (patches, pairs), or None."""
    if encoding == "none":
        return None
    row, column = torch.arange(grid * grid) // grid, torch.arange(grid * grid) % grid
    if encoding == "1-D":
        inv_freq, _ = wavepe.rope_frequencies(2 * pairs, THETA)
        return ops.rope_table(row * grid + column, torch.from_numpy(inv_freq))
    # Each axis has half of the pairs, with a whole spectrum of frequencies.
    inv_freq, _ = wavepe.rope_frequencies(pairs, THETA)
    both = torch.from_numpy(np.concatenate([inv_freq, inv_freq]))
    positions = torch.stack([row, column], -1)
    return ops.rope_table(positions, both, sections=[pairs // 2, pairs // 2])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def forward(self, x, rotation):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = ops.rope_qk(q, k, *rotation)
        heads = ops.attention(q, k, v, causal=False)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding
        self.embedding = nn.Linear(PATCH * PATCH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, len(SIGNS)))

    def forward(self, patches):
        rotation = tables(self.encoding, math.isqrt(patches.shape[1]), DIM // HEADS // 2)
        x = self.embedding(patches)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(x).amax(1)  # for each direction, the patch with the highest score counts


def train(encoding, seed, steps):
    """Return the trained model; images and initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Model(encoding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=max(steps, 2)
    )
    for _ in range(steps):
        images, answers = draw(BATCH, GRID, rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), answers).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model, grid, count):
    """Return the share of right answers, on images that are not in the training."""
    images, answers = draw(count, grid, np.random.default_rng(10**6))
    given = torch.cat([model(part).argmax(-1) for part in images.split(BATCH)])
    return (given == answers).float().mean().item()


def run(steps, seeds, count):
    """Train and test all models, and print a table; return the figures, ready for JSON."""
    runs = []
    print(f"{'encoding':10}" + "".join(f"{f'{n} x {n}':>16}" for n in GRIDS))
    for encoding in ENCODINGS:
        for seed in range(seeds):
            began = time.perf_counter()
            model = train(encoding, seed, steps)
            seconds = round(time.perf_counter() - began, 3)
            found = {str(grid): accuracy(model, grid, count) for grid in GRIDS}
            runs.append({"encoding": encoding, "seed": seed, "accuracy": found, "seconds": seconds})
        cells = [f"{mean:.3f} ± {spread:.3f}" for mean, spread in summary(runs, encoding)]
        print(f"{encoding:10}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    settings = {"steps": steps, "batch": BATCH, "learning_rate": LEARNING_RATE, "dim": DIM}
    settings |= {"heads": HEADS, "layers": LAYERS, "theta": THETA, "test_images": count}
    about = {**environment(), "threads": torch.get_num_threads()}
    about["date"] = datetime.date.today().isoformat()
    return {"grid": GRID, "grids": GRIDS, "runs": runs, "settings": settings, "environment": about}


def summary(runs, encoding):
    """Yield mean and standard deviation over the seeds, for each size of the images."""
    for grid in GRIDS:
        shares = [r["accuracy"][str(grid)] for r in runs if r["encoding"] == encoding]
        yield statistics.fmean(shares), statistics.stdev(shares) if len(shares) > 1 else 0.0


def picture(runs, path):
    """Draw images of the smallest and the largest size, and the shares of right answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 5), layout="constrained")
    places = figure.subplot_mosaic([["small", "large"], ["shares", "shares"]])
    *examples, axes = places.values()
    for place, grid in zip(examples, (GRIDS[0], GRIDS[-1]), strict=True):
        patches, answers = draw(1, grid, np.random.default_rng(5))
        image = patches.reshape(grid, grid, PATCH, PATCH).transpose(1, 2).reshape(grid * PATCH, -1)
        place.imshow(image, cmap="gray_r", vmin=-0.5, vmax=1.2)
        edges = np.arange(grid + 1) * PATCH - 0.5
        place.set_xticks(edges, [])
        place.set_yticks(edges, [])
        place.grid(color="0.6", linewidth=0.4)
        place.tick_params(length=0)
        place.set_title(f"{grid} x {grid} patches: {WORDS[answers]}", fontsize="medium")
    for number, encoding in enumerate(ENCODINGS):
        places = np.arange(len(GRIDS)) + 0.26 * (number - 1)
        means = [mean for mean, _ in summary(runs, encoding)]
        axes.bar(places, means, 0.24, color=COLOURS[number], label=encoding)
        for found in (r["accuracy"] for r in runs if r["encoding"] == encoding):
            axes.plot(places, list(found.values()), "o", ms=3, mfc="w", mec="0.3", mew=0.7)
    axes.axhline(1 / len(SIGNS), color="0.5", linestyle=(0, (4, 3)), linewidth=1, label="chance")
    axes.set_xticks(range(len(GRIDS)), [f"{n} x {n}" for n in GRIDS])
    axes.set_xlabel(f"patches of the test images (trained on {GRID} x {GRID})")
    axes.set_ylabel("share of right answers")
    axes.set_ylim(0, 1.03)
    figure.legend(loc="outside right center", frameon=False, title="RoPE")
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/rope-images"), metavar="DIR",
        help="folder for picture and figures (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=STEPS, metavar="N",
        help="steps of each training (default: %(default)s)")  # fmt: skip
    add("--seeds", type=int, default=SEEDS, metavar="N",
        help="number of trainings for each encoding (default: %(default)s)")  # fmt: skip
    add("--images", type=int, default=TEST_IMAGES, metavar="N",
        help="number of images in a test (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = run(args.steps, args.seeds, args.images)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    picture(results["runs"], args.out / "rope-images.png")
    print(f"figures and picture in {args.out}")


if __name__ == "__main__":
    main()
