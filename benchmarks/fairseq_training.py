"""Measure training in fairseq in words per second, with wavelets and with its own positions.

`python -m benchmarks.fairseq_training` prints the table; `--json FILE` keeps the figures. It needs
fairseq (docs/guides/fairseq.md); `make .venv-fairseq/built` makes an environment that has it.

The models are small forms of `transformer_lm_wiki103`, with the same sizes and dropouts. fairseq's
Trainer trains them on the same random words (forward, loss, backward, clipping, NAG). Their updates
take turns in one process. A word is a token of the batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from wavepe import fairseq as plugin

from .command import measuring_command
from .command import table as markdown
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

ENCODINGS = {"sinusoidal, fairseq": None, "wavelet": "wavelet", "alibi": "alibi", "rope": "rope"}
STOCK = next(iter(ENCODINGS))
LENGTHS = (128, 512, 2048)
TOKENS = 2048  # in a batch
VOCABULARY = 10_000
# The recipe of [A] and of fairseq's README, with other sizes.
RECIPE = (
    "--task language_modeling --arch transformer_lm_wiki103 --criterion adaptive_loss --cpu "
    "--ddp-backend legacy_ddp --optimizer nag --lr 0.1 --lr-scheduler fixed --clip-norm 0.1 "
    "--adaptive-input-cutoff 2000,6000 --adaptive-softmax-cutoff 2000,6000 --no-progress-bar"
)
SIZES = {"layers": 4, "embed_dim": 256, "ffn_embed_dim": 1024, "attention_heads": 4}


def update(spec: str | None, length: int, tokens: int) -> Callable[[], Any]:
    """Return a call that makes one update of a new model.

    Parameters
    ----------
    spec : str or None
        The position encoding; None is fairseq's own.
    length, tokens : int
        Tokens in a sample, and in the batch.
    """
    from fairseq import options  # after `register`, which makes it importable
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.tasks.language_modeling import LanguageModelingTask
    from fairseq.trainer import Trainer

    words = ["none", *RECIPE.split(), "--tokens-per-sample", str(length)]
    for name, size in SIZES.items():
        words += [f"--decoder-{name.replace('_', '-')}", str(size)]
    words += ["--decoder-input-dim", str(SIZES["embed_dim"])]
    words += ["--decoder-output-dim", str(SIZES["embed_dim"])]
    words += [] if spec is None else ["--pos-enc", spec]
    parser = options.get_training_parser("language_modeling")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
    dictionary = Dictionary()
    for number in range(VOCABULARY):
        dictionary.add_symbol(str(number))
    torch.manual_seed(0)
    task = LanguageModelingTask(cfg.task, dictionary, dictionary, targets=["future"])
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    text = torch.randint(dictionary.nspecial, len(dictionary), (tokens // length, length + 1))
    sample = {
        "id": torch.arange(len(text)),
        "nsentences": len(text),
        "ntokens": text[:, 1:].numel(),
        "net_input": {
            "src_tokens": text[:, :-1].contiguous(),
            "src_lengths": torch.full((len(text),), length),
        },
        "target": text[:, 1:].contiguous(),
    }
    return lambda: trainer.train_step([sample])


def row(length: int, tokens: int, repeats: int) -> dict:
    """Measure every encoding at one length; return the row."""
    tokens = max(tokens, length)
    calls = {name: update(spec, length, tokens) for name, spec in ENCODINGS.items()}
    timings = take_turns(calls, repeats=repeats, budget=120, warm_up=2)
    stock = timings[STOCK]
    return {
        "length": length,
        "samples": tokens // length,
        "seconds": {name: timing.summary() for name, timing in timings.items()},
        "words_per_second": {
            name: tokens // length * length / min(timing.seconds)
            for name, timing in timings.items()
        },
        "speed_up": {
            name: min(stock.seconds) / min(timing.seconds) for name, timing in timings.items()
        },
        "rounds": {name: stock.over(timing).median for name, timing in timings.items()},
    }


def measure(
    threads: int, repeats: int, lengths: Sequence[int] = LENGTHS, tokens: int = TOKENS
) -> dict:
    """Measure all rows; return them ready for JSON."""
    plugin.register()
    logging.disable(logging.WARNING)
    about = {**surroundings("wavepe", "torch", "fairseq"), "threads": threads}
    try:
        with prepared(threads):
            rows = [row(length, tokens, repeats) for length in lengths]
    finally:
        logging.disable(logging.NOTSET)
    return {"environment": about, "sizes": SIZES, "vocabulary": VOCABULARY, "rows": rows}


def table(results: dict) -> str:
    """Return words per second, and in brackets the ratio to fairseq's own, as Markdown."""
    rows = []
    for row in results["rows"]:
        rates, ratios = row["words_per_second"], row["speed_up"]
        cells = (f"{rates[name]:,.0f} ({ratios[name]:.2f})" for name in ENCODINGS)
        rows.append((f"{row['samples']} x {row['length']}", *cells))
    return markdown(("samples x length", *ENCODINGS), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    tiny = {"lengths": (16,), "tokens": 32}
    return measuring_command(__doc__, measure, table, argv, threads=1, repeats=15, quick=tiny)


if __name__ == "__main__":
    sys.exit(main())
