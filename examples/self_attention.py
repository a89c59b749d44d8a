"""Your own language model with any position encoding: train it, and generate text with a cache.

    python examples/self_attention.py [SPEC ...]

This trains one small byte-level model for each encoding on the sources of this package, for some
seconds each. It prints the loss at the trained length and at four times that length.
"""

import sys
from pathlib import Path

import torch
import wavepe
from torch import nn
from wavepe.nn import KVCache, SelfAttention

LENGTH, BATCH, STEPS = 64, 16, 80


class Block(nn.Module):
    def __init__(self, dim, heads, encoding):
        super().__init__()
        self.attention = SelfAttention(dim, heads, encoding=encoding)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x, cache=None):
        x = x + self.attention(self.norms[0](x), cache=cache)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, encoding, dim=64, heads=4, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, encoding) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, tokens, cache=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache)  # one cache for all layers
        return self.head(x)

    def loss(self, tokens):
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.inference_mode()
    def generate(self, prompt, count):
        cache, tokens = KVCache(), prompt
        for _ in range(count):
            logits = self(tokens[:, cache.length :], cache)  # tokens that are not in the cache
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


def main(specs):
    files = sorted(Path(wavepe.__file__).parent.rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)

    def batch(length):
        starts = torch.randint(len(text) - length, (BATCH, 1))
        return text[starts + torch.arange(length + 1)].long()

    for spec in specs:
        torch.manual_seed(0)
        model = Model(spec)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.loss(batch(LENGTH)).backward()
            optimizer.step()
        with torch.no_grad():
            near, far = (model.loss(batch(length)).item() for length in (LENGTH, 4 * LENGTH))
        print(f"{spec}: loss {near:.2f} at length {LENGTH}, {far:.2f} at {4 * LENGTH}")
        prompt = torch.tensor([list(b"    return ")])
        print("  " + repr(bytes(model.generate(prompt, 40)[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main(sys.argv[1:] or ["wavelet:scales=4", "rope"])
