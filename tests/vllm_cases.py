"""vLLM with models of wavepe, for the tests; run as a script, it prints a table of all encodings.

`python tests/vllm_cases.py [WORD ...]` compares the tokens of vLLM with those of `generate` for
each family of the plug-in and each encoding (those whose name or spec has one of the words).
`.venv-vllm/bin/python` has vLLM; without it, importing this skips the module.
"""

import gc
import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from cases import load_torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
torch, _ = load_torch()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of its packages, while they are imported
    import vllm
    import wavepe.hf
    import wavepe_vllm as plugin
    from hf_families import build, stirred
    from serving_cases import prompts, specs

    # A class that vLLM knows by its name alone is imported in a new process first: 10 s.
    for stock in plugin.STOCK[1:]:
        vllm.ModelRegistry.register_model(f"WavePE{stock}", getattr(plugin, f"WavePE{stock}"))

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "mixtral")
LENGTH = 64
PROMPTS = prompts((5, 37, 1, 48))
NEW = 12


def saved(folder, spec, family="llama"):
    """Save a small model of a family whose positions matter, and return it."""
    model = stirred(wavepe.hf.patch(build(family), spec))
    model.save_pretrained(folder)
    return wavepe.hf.fix_length(model, LENGTH)


def generated(model):
    """Return the new tokens of each prompt alone, as `generate` computes them."""
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    rows = [model.generate(x, max_new_tokens=NEW, do_sample=False)[0, x.shape[1] :] for x in ids]
    return [row.tolist() for row in rows]


def engine(folder, **options):
    """Return vLLM with pages of 32 tokens and batches of 48, which cut prompts in pieces."""
    options = {"enforce_eager": True, "max_model_len": LENGTH, **options}
    return vllm.LLM(
        str(folder), skip_tokenizer_init=True, max_num_batched_tokens=48, block_size=32,
        kv_cache_memory_bytes=1 << 24, dtype="float32", disable_log_stats=True, **options,
    )  # fmt: skip


def served(llm):
    """Return the new tokens of each prompt from vLLM, and how many tokens were in its pages."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    cached = sum(output.num_cached_tokens for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs], cached


def cell(family, spec):
    """Say whether vLLM gives the tokens of `generate`, twice."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            wanted = generated(saved(folder, spec, family))
            llm = engine(folder)
            return "equal" if [served(llm)[0] for _ in range(2)] == [wanted] * 2 else "DIFFERENT"
        except ValueError as error:
            return f"refused: {error}".partition("\n")[0]


def main(words):
    names = [(f, s) for s in specs() for f in FAMILIES]
    chosen = [x for x in names if not words or any(word in x for word in words)]
    counts = {}
    for family, spec in chosen:
        gc.freeze()  # vLLM collects garbage several times for each model
        result = cell(family, spec)
        counts[result] = counts.get(result, 0) + 1
        print(f"| {family} | `{spec}` | {result} |", flush=True)
    print(counts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parent))
    main(sys.argv[1:])
