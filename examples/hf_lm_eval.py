"""lm-evaluation-harness, offline, with your own task: a stock Llama with several encodings.

pip install lm_eval
python examples/hf_lm_eval.py
"""

import json
import tempfile

import lm_eval
import torch
import wavepe.hf
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROWS = [
    {"question": "for i in range(", "choices": ["10):", "def"], "answer": 0},
    {"question": "import", "choices": ["):", " torch"], "answer": 1},
    {"question": "while True", "choices": [":", " if it is so"], "answer": 0},
]


def byte_tokenizer():
    """Return a tokenizer with a token for each byte and one for the end; use your model's own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def local_task(folder):
    with open(f"{folder}/rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    return {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def evaluate(model, tokenizer, folder):
    # `pretrained` is a model in memory, or the folder of a wavepe_llama. The harness pads rows on
    # the right and gives no mask, so encodings that depend on the length (normalised, theta=length)
    # need batch_size=1.
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu", max_length=128)
    own = TaskManager(include_defaults=False)  # listing the harness's own tasks takes seconds
    return lm_eval.simple_evaluate(
        lm, tasks=[local_task(folder)], task_manager=own, bootstrap_iters=0
    )


def main(folder):
    torch.manual_seed(0)
    tokenizer, found = byte_tokenizer(), {}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    model = LlamaForCausalLM(config).eval()
    found["stock"] = evaluate(model, tokenizer, folder)
    for spec in ("wavelet:scales=4", "alibi"):
        with wavepe.hf.patched(model, spec):
            found[spec] = evaluate(model, tokenizer, folder)
    for name, result in found.items():
        print(f"{name}: accuracy {result['results']['local_choice']['acc,none']:.2f}")
    return model, tokenizer, found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
