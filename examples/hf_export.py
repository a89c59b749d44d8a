"""torch.export: write a program to one file, for any batch size and length.

python examples/hf_export.py [FILE]
"""

import sys
import tempfile

import torch
import wavepe.hf  # the process that loads the file needs wavepe.ops, for the operators
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class Logits(nn.Module):
    """A model from tokens to logits, without a cache, whose length would be fixed."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def fresh_model(spec="wavelet:scales=4"):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=4, **sizes))
    return wavepe.hf.patch(model.eval(), spec)


def main(file, spec="wavelet:scales=4"):
    model = Logits(fresh_model(spec))
    example = torch.arange(24).view(2, 12)
    # Sizes that are not named here are those of the example. If the model fixes one of these sizes,
    # a Dim raises an error; `Dim.AUTO` would accept it silently.
    shape = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes={"tokens": shape})
    torch.export.save(program, file)
    loaded = torch.export.load(file).module()
    for batch, length in ((1, 2), (3, 12), (2, 300)):
        tokens = torch.randint(256, (batch, length))
        with torch.no_grad():
            difference = (loaded(tokens) - model(tokens)).abs().max().item()
        print(f"{batch} x {length}: logits differ by {difference:.0e}")
    return loaded, model


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
        main(*(sys.argv[1:] or [file.name]))
