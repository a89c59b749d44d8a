"""``eval-lm`` that raises if it would evaluate only a part of the tokens, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from . import compat  # it must come before fairseq

from fairseq.distributed import utils  # isort: skip
from fairseq.tasks import FairseqTask  # isort: skip
from fairseq_cli import eval_lm as command  # isort: skip


def refuse_skipped_tokens() -> None:
    """Let fairseq's ``eval-lm`` raise if it would skip tokens.

    fairseq drops blocks that are longer than the model's positions, and says so in its log only.
    With several processes, one of them prints the perplexity of its own part of the tokens.
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
            raise ValueError("eval-lm evaluated no tokens: is the data of --gen-subset empty?")
        return results

    @compat.wrap(FairseqTask, "filter_indices_by_size")
    def filter_indices_by_size(
        select: Any, task: Any, indices: Any, dataset: Any, *args: Any, **kwargs: Any
    ) -> Any:
        selected = select(task, indices, dataset, *args, **kwargs)
        if skipped := set(indices) - set(selected):
            limit = args[0] if args else kwargs.get("max_positions")
            longest = max(int(dataset.num_tokens(index)) for index in skipped)
            raise ValueError(
                f"eval-lm would skip {len(indices) - len(selected)} of {len(indices)} blocks, "
                f"because they have up to {longest} tokens and this model has {limit} positions: "
                "give shorter blocks, or, if its positions are fairseq's sinusoidal ones, "
                f"--model-overrides \"{{'max_target_positions': {longest}}}\""
            )
        return selected

    @compat.wrap(utils, "call_main")
    def call_main(launch: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        joined = cfg.distributed_training.distributed_world_size
        processes = max(compat.processes_launched(), joined)
        if processes > 1 or cfg.dataset.num_shards > 1:
            raise ValueError(
                f"eval-lm got {processes} processes and {cfg.dataset.num_shards} shards, and each "
                "would evaluate a part of the tokens: give --distributed-world-size 1, no "
                "--num-shards, and no torchrun"
            )
        return launch(cfg, *args, **kwargs)
