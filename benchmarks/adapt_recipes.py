"""Compare ways to swap the encoding of small models that were trained with RoPE.

FOLDER is what `wavepe compare --encodings rope --seeds 3 --out FOLDER` wrote. Each of its models is
adapted by `wavepe.hf.adapt`, once for each arm. `--json FILE` keeps a row for each arm and seed;
rows that are there are not measured again.

python -m benchmarks.adapt_recipes FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from .command import add_json, keep, new_parser
from .machine import surroundings

RICH = "wavelet:biases=true,projection=true"
RATE = 1e-3
STEPS = 300
BATCH_TOKENS = 2048  # tokens of a step
TRAINING_TOKENS = 3_000_000
HELD_OUT = 16384  # bytes, which adapt measures on
LENGTHS = (1, 2, 4, 8, 16)  # times the trained length


class Arm(NamedTuple):
    """An encoding and how it is trained; without a spec the stock model (the control)."""

    spec: str | None
    transfer: int = 0  # the first steps, which are of transfer
    steps: int = STEPS
    lora: int | None = None

    @property
    def label(self) -> str:
        return " | ".join(map(str, self))


def arms(rope: str) -> Iterator[Arm]:
    """Yield the arms, the most important first; `rope` is what `auto` keeps of the rotation."""
    chosen = f"{rope}+{RICH}"
    yield Arm(None)
    for transfer in (0, 30, 100):
        yield Arm(chosen, transfer)
    yield Arm(None, steps=100)
    for transfer in (0, 30):
        yield Arm(chosen, transfer, steps=100)
    yield Arm(rope)  # without wavelets
    # Rounded up: int(fraction * pairs) pairs rotate.
    for other in (f"rope:fraction={x}" for x in (0.083334, 0.166667, 0.333334, 0.5)):
        if other != rope:
            yield Arm(f"{other}+{RICH}")
    for spec in (RICH, "wavelet", "none", "alibi"):
        yield Arm(spec)
    for other in ("wavelet", "wavelet:biases=true", "alibi", "kerple", "transformer_xl"):
        yield Arm(f"{rope}+{other}")
    for spec in (RICH, chosen):
        yield Arm(f"{spec}+kerple")
    yield Arm(f"{chosen},shared=true", 30)
    yield Arm(f"rope@::2+{RICH}@1::2", 30)  # by layer
    yield Arm(RICH, 30)
    yield Arm(chosen, 30, lora=16)
    yield Arm(None, steps=1000)
    for transfer in (0, 30, 300):
        yield Arm(chosen, transfer, steps=1000)
    yield Arm(f"{chosen}+kerple", steps=1000)


def stock_model(folder: Path) -> Any:
    """Return transformers' Llama with the weights of a checkpoint of `wavepe compare`."""
    import wavepe.hf  # noqa: F401 (it knows models of compare)
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    other = {"position_encoding", "auto_map", "model_type", "architectures"}
    options = {
        k: v for k, v in model.config.to_dict().items() if k not in other and "attn" not in k
    }
    stock = LlamaForCausalLM(LlamaConfig(**options))
    stock.load_state_dict(model.state_dict())
    return stock


def measure(arm: Arm, stock: Any, ids: torch.Tensor, length: int, seed: int) -> dict[str, Any]:
    """Return the row of an arm."""
    import wavepe.hf
    from wavepe.training import recipes

    with mock.patch.multiple(recipes, SHARE=1, MOST=arm.transfer):
        done = wavepe.hf.adapt(
            copy.deepcopy(stock),
            arm.spec or "none",
            ids,
            tokens=arm.steps * BATCH_TOKENS,
            length=length,
            batch_size=BATCH_TOKENS // length,
            learning_rate=RATE,
            recipe="transfer" if arm.transfer else "plain",
            lora=arm.lora,
            seed=seed,
            control=arm.spec is None,
            lengths=[n * length for n in LENGTHS],
            use_cpu=True,
            save_strategy="no",
        )
    name = "control" if arm.spec is None else "adapted"
    perplexities: dict[str, Any] = {
        "perplexity": done.perplexity[name],
        "stock": done.perplexity["stock"],
    }
    if arm.spec is not None:
        perplexities |= {"swapped": done.perplexity["swapped"], "seconds": done.seconds}
    return json.loads(json.dumps(perplexities))  # lengths are texts, as in the rows that are read


def means(rows: list[dict[str, float]]) -> str:
    """Return the mean of each length, as cells."""
    return " | ".join(f"{statistics.fmean(each[n] for each in rows):.2f}" for n in rows[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="the folder that wavepe compare wrote")
    parser.add_argument("--data", metavar="PATH", help="the text that the models were trained on")
    parser.add_argument("--arms", type=int, nargs="+", metavar="N", help="only these (from 0)")
    add_json(parser)
    args = parser.parse_args(argv)
    return run(args)


def run(args: argparse.Namespace) -> int:
    from wavepe.experiments.data import load_text
    from wavepe.hf import families
    from wavepe.training import recipes

    about = json.loads((args.folder / "results.json").read_text("utf-8"))
    settings, length = about["environment"]["settings"], about["train_length"]
    results: dict[str, Any] = {
        "length": length,
        "layers": settings["layers"],
        **surroundings("torch", "transformers"),
    }
    results["rows"] = []
    if args.json and args.json.exists():
        results["rows"] = json.loads(args.json.read_text("utf-8"))["rows"]
    text = load_text(args.data, max(LENGTHS) * length, length)
    parts = text.train[-TRAINING_TOKENS:], text.held_out[:HELD_OUT]
    ids = torch.cat([torch.tensor(part) for part in parts])
    there = {(row["arm"], row["seed"]) for row in results["rows"]}
    folders = sorted((args.folder / "checkpoints").glob("rope*-seed*"))
    stocks = [stock_model(folder) for folder in folders]
    kept = recipes.choose("auto", RICH, families.decoder(stocks[0]), length).encoding.rotary
    for number, arm in enumerate(arms(str(kept))):
        if args.arms is not None and number not in args.arms:
            continue
        for seed, stock in enumerate(stocks):
            if (arm.label, seed) in there:
                continue
            row = measure(arm, stock, ids.long(), length, seed)
            results["rows"].append({"arm": arm.label, **arm._asdict(), "seed": seed, **row})
            keep(results, args.json)
        perplexities = [row["perplexity"] for row in results["rows"] if row["arm"] == arm.label]
        print(f"{arm.label}: {means(perplexities)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
