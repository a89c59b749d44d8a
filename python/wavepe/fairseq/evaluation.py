"""``eval-lm`` that refuses to print the perplexity of no tokens, or of a part of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from . import compat  # fairseq cannot be imported before

from fairseq.distributed import utils  # isort: skip
from fairseq.tasks import FairseqTask  # isort: skip
from fairseq_cli import eval_lm as command  # isort: skip


def refuse_skipped_tokens() -> None:
    """Let fairseq's command raise where it would leave tokens out.

    It drops blocks that are longer than the model's positions, says so in a line of its log, and
    where that is all of them prints "Evaluated 0 tokens" and a perplexity of 1.00. Of several
    processes, one on each GPU by default, each evaluates its part, and one prints that.
    """

    @compat.wrap(command, "eval_lm")
    def eval_lm(evaluate: Any, *args: Any, batch_iterator: Iterable[Any], **kwargs: Any) -> Any:
        tokens = 0

        def counted() -> Iterator[Any]:
            nonlocal tokens
            for batch in batch_iterator:
                tokens += int(batch.get("ntokens", 0))
                yield batch

        results = evaluate(*args, batch_iterator=counted(), **kwargs)
        if tokens == 0:
            raise ValueError("eval-lm: no token was evaluated: is the --gen-subset empty?")
        return results

    @compat.wrap(FairseqTask, "filter_indices_by_size")
    def filter_indices_by_size(
        select: Any, task: Any, indices: Any, dataset: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kept = select(task, indices, dataset, *args, **kwargs)
        if len(kept) < len(indices):
            limit = args[0] if args else kwargs.get("max_positions")
            longest = max(int(dataset.num_tokens(index)) for index in set(indices) - set(kept))
            raise ValueError(
                f"eval-lm: {len(indices) - len(kept)} of {len(indices)} blocks are longer than the "
                f"{limit} positions of this model (up to {longest} tokens) and would be "
                "left out: where its positions are fairseq's sinusoidal ones, give "
                f"--model-overrides \"{{'max_target_positions': {longest}}}\"; else shorter blocks"
            )
        return kept

    @compat.wrap(utils, "call_main")
    def call_main(launch: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        processes = max(processes, cfg.distributed_training.distributed_world_size)
        if processes > 1 or cfg.dataset.num_shards > 1:
            raise ValueError(
                f"eval-lm: {processes} processes and {cfg.dataset.num_shards} shards would "
                "evaluate a part of the tokens each: give --distributed-world-size 1, no "
                "--num-shards, and no torchrun"
            )
        return launch(cfg, *args, **kwargs)
