"""What one of two processes does for test_hf_workflows.py: tensor parallelism. Rank 0 prints."""

import sys

import torch
import torch.distributed as dist
import wavepe.hf  # noqa: F401 - the types of models
from hf_model import logits, tokens
from transformers import AutoModelForCausalLM


def main(folder, specs):
    dist.init_process_group("gloo")
    ids = tokens(2, 12)
    for index, spec in enumerate(specs):
        whole = AutoModelForCausalLM.from_pretrained(f"{folder}/{index}").eval()
        split = AutoModelForCausalLM.from_pretrained(f"{folder}/{index}", tp_plan="auto").eval()
        assert split.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 16
        try:
            found = torch.allclose(logits(split, ids), logits(whole, ids), atol=1e-4)
        except ValueError as error:
            found = str(error)
        if dist.get_rank() == 0:
            print(spec, found, sep=": ")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
