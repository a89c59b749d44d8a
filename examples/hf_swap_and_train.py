"""Swap the encoding of a trained Llama from RoPE to wavelets, and train it a little more.

    python examples/hf_swap_and_train.py --out runs/hf-swap

This trains a small byte-level Llama with RoPE on the sources of Python's standard library (about
two minutes) and saves it. Then it converts the folder with `wavepe.hf.convert`, and continues the
training for half as many steps (about a minute). The model with RoPE is also trained further, with
the same steps, batches and learning rates. The difference between the two is the effect of the
swap. Perplexity is measured on held-out text, at the trained length and at four times that length.

The checkpoints and results.json go to --out. The figures depend on the options and on the text,
which differs between versions of Python, and not on the speed of the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import wavepe
import wavepe.hf
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from wavepe.analysis import perplexity
from wavepe.common.errors import CommandError
from wavepe.experiments.data import batch_at, evaluation_bytes, load_text
from wavepe.experiments.environment import environment
from wavepe.experiments.report import headings, rows_of
from wavepe.experiments.tables import print_table

TIMES = (1, 4)  # evaluated lengths, as multiples of the trained one
HEADS = 4
WARM_UP_SHARE = 0.1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("runs/hf-swap"),
        metavar="DIR",
        help="new folder for models and results (default: %(default)s)",
    )
    add("--data", metavar="PATH", help="a text file, or a folder of text files (default: the "
        "sources of Python's standard library)")  # fmt: skip
    add("--encoding", default="wavelet:scales=6,biases=true,projection=true+kerple", metavar="SPEC",
        help="the new encoding (default: %(default)s)")  # fmt: skip
    add("--length", type=int, default=128, metavar="N",
        help="trained length in bytes (default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=2400, metavar="N",
        help="training steps before the swap (default: %(default)s)")  # fmt: skip
    add("--more", type=int, default=1200, metavar="N",
        help="training steps after the swap (default: %(default)s)")  # fmt: skip
    add("--batch", type=int, default=8, metavar="N",
        help="sequences in a step (default: %(default)s)")  # fmt: skip
    add("--layers", type=int, default=2, metavar="N",
        help="number of layers (default: %(default)s)")  # fmt: skip
    add("--hidden", type=int, default=96, metavar="N",
        help=f"hidden size, a multiple of the {HEADS} heads (default: %(default)s)")  # fmt: skip
    add("--lr", type=float, default=3e-3, metavar="X",
        help="highest learning rate (default: %(default)s)")  # fmt: skip
    add(
        "--eval-bytes",
        type=int,
        default=65536,
        metavar="N",
        help="approximate number of held-out bytes to evaluate (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N",
        help="seed of weights and batches (default: %(default)s)")  # fmt: skip
    return parser.parse_args(argv)


def new_llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return an untrained stock Llama, which has RoPE."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=8 * args.hidden // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        initializer_range=0.06,  # small models train faster with more than the default, 0.02
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate as a fraction: linear warm-up, then a cosine to a twentieth."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train(
    model: torch.nn.Module, text: np.ndarray, args: argparse.Namespace, steps: int, first: int
) -> float:
    """Train for `steps` with the batches `first`, `first` + 1, ...; return the seconds."""
    groups = wavepe.hf.parameter_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, steps))
    began = time.perf_counter()
    model.train()
    for step in range(steps):
        tokens = torch.from_numpy(batch_at(text, first + step, args.seed, args.batch, args.length))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return time.perf_counter() - began


def run(args: argparse.Namespace) -> dict:
    """Train, swap, train further and evaluate; return the results."""
    wavepe.encoding(args.encoding)  # raise an error for a wrong spec now
    lengths = [times * args.length for times in TIMES]
    text = load_text(args.data, max(lengths), args.length)
    held_out = evaluation_bytes(text.held_out, lengths, args.eval_bytes)
    held_out = torch.from_numpy(held_out.astype(np.int64))
    became = f"rope -> {args.encoding}"
    stock, swapped = args.out / "llama", args.out / "llama-swapped"
    if stock.exists() or swapped.exists():
        raise CommandError(f"--out {args.out} holds models already: give another folder")
    runs: list[dict] = []

    def evaluate(name: str, model: torch.nn.Module, steps: int, seconds: float) -> None:
        found = {str(length): perplexity(model, held_out, length) for length in lengths}
        runs.append({"encoding": name, "steps": steps, "perplexity": found, "seconds": seconds})
        cells = ", ".join(f"{value:.2f} at {length}" for length, value in found.items())
        print(f"{name}: perplexity {cells}", flush=True)

    print(f"text: {text.description}")
    model = new_llama(args)
    seconds = train(model, text.train, args, args.steps, 0)
    evaluate("rope", model, args.steps, seconds)
    model.save_pretrained(stock)

    wavepe.hf.convert(stock, swapped, args.encoding)  # the swap: one line
    model = AutoModelForCausalLM.from_pretrained(swapped)
    evaluate(became, model, args.steps, 0.0)
    for name, folder in (("rope", stock), (became, swapped)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        seconds = train(model, text.train, args, args.more, args.steps)
        evaluate(f"{name}, fine-tuned", model, args.steps + args.more, seconds)
        model.save_pretrained(f"{folder}-trained")
    about = environment()
    return {
        "train_length": args.length,
        "encoding": args.encoding,
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "data", "encoding")},
        "text": {"description": text.description, "sha256": text.sha256},
        "evaluated_bytes": len(held_out),
        "parameters": model.num_parameters(),
        "runs": runs,
        "environment": {**about, "threads": torch.get_num_threads(),
                        "date": datetime.date.today().isoformat()},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return 0, or 1 if the text is too short or the folder is in use."""
    args = arguments(argv)
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # more threads gain little here, and change the rounding of sums
    try:
        results = run(args)
    except (CommandError, ValueError, OSError) as error:
        print(f"hf_swap_and_train: {getattr(error, 'message', error)}", file=sys.stderr)
        return 1
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nPerplexity per byte of held-out text, trained on {args.length} bytes (* best)")
    lengths = list(map(int, results["runs"][0]["perplexity"]))
    rows = rows_of(results["runs"], lengths)
    print_table("", "encoding", headings(lengths, args.length), rows)
    print(f"wrote {args.out / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
