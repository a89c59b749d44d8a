"""torch.compile: one graph without breaks serves all lengths, in evaluation and in training.

python examples/hf_compile.py [BACKEND]
"""

import sys

import torch
import wavepe.hf
from transformers import LlamaConfig, LlamaForCausalLM


def fresh_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=4, **sizes))
    return wavepe.hf.patch(model.eval(), "wavelet:scales=4")


def step(model, tokens):
    """Return loss and gradients of one step, without a cache, which would break the graph."""
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def main(backend="inductor"):
    model = fresh_model()
    # fullgraph=True: a graph break is an error, and not only a slower model. dynamic=True: the
    # graph of the first call serves all lengths; by default the first length gets its own graph.
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for length in (16, 40, 100):
        tokens = torch.arange(length)[None]
        with torch.no_grad():
            got = compiled(tokens, use_cache=False).logits
            wanted = model(tokens, use_cache=False).logits
        print(f"length {length}: logits differ by {(got - wanted).abs().max().item():.0e}")
    print(f"graphs in evaluation: {counters['unique_graphs']}")
    for length in (16, 40):
        tokens = torch.arange(length)[None]
        got, wanted = step(compiled.train(), tokens), step(model.train(), tokens)
        difference = (got[1] - wanted[1]).abs().max().item()
        print(
            f"length {length}: loss {got[0]:.5f}, not compiled {wanted[0]:.5f}; "
            f"gradients differ by {difference:.0e}"
        )
    print(f"graphs with training: {counters['unique_graphs']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
