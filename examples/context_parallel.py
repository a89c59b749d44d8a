r"""Context parallelism: a sequence is split over processes, and attention goes round a ring.

    python examples/context_parallel.py --length 8192
    torchrun --nproc-per-node 2 examples/context_parallel.py --length 8192

ring_attention.py has the attention. This trains a small byte-level model with it on CPUs (gloo).
Each process does the same steps on the whole sequence, too, and compares. `--no-compare` leaves
that out, for lengths that fit only if they are split.

On two machines, run this on each, with the name of one of them as HOST:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/context_parallel.py --length 65536 --no-compare
"""

import argparse
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import wavepe
from ring_attention import local_part, ring_attention
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from wavepe import ops

SPEC, DIM, HEADS, LAYERS, STEPS = "wavelet:learned=true", 128, 4, 2, 3


class Position(nn.Module):
    """A learned encoding, as arguments of attention over `length` tokens.

    A constant one needs no module: {"p": ops.relative_table(*encoding.table(length, head_dim))},
    or {"slopes": torch.from_numpy(encoding.slopes(heads))}.
    """

    def __init__(self, spec, length):
        super().__init__()
        self.encoding, self.length = wavepe.encoding(spec), length
        for name, value in self.encoding.parameters(DIM // HEADS, HEADS).items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value).float()))

    def forward(self):
        table = self.encoding.learned_table(self.length, dict(self.named_parameters()))
        return dict(zip(("p", "first", "beyond"), table, strict=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.project = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def forward(self, x, attention, position):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))  # (B, n, 3, H, d)
        out = attention(*qkv.permute(2, 0, 3, 1, 4), **position)
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, length, attention):
        super().__init__()
        self.attention, self.position = attention, Position(SPEC, length)
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 256))

    def forward(self, tokens):
        x, position = self.embedding(tokens), self.position()
        for block in self.blocks:
            x = block(x, self.attention, position)
        return self.head(x)


def fresh_model(length, attention):
    torch.manual_seed(0)
    return Model(length, attention)


def train(model, inputs, targets):
    """Return the first step's logits and gradients, all losses, and bytes kept for backward."""
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    kept, losses, first = {}, [], None

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        kept.clear()
        with saved_tensors_hooks(note, lambda x: x):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        first = first or (logits.detach(), [x.grad.clone() for x in model.parameters()])
        losses.append(loss.detach())
        optimizer.step()
    return *first, torch.stack(losses), sum(n for at, n in kept.items() if at not in weights)


def peak():
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux counts it in kB


def main(length, compare):
    files = sorted(Path(wavepe.__file__).parent.rglob("*.py"))
    text = torch.tensor(list(b"".join(map(Path.read_bytes, files))[: length + 1]))[None]
    if not 0 < length < text.shape[1]:
        raise ValueError(f"--length must be 1 to {text.shape[1] - 1}, got {length}")
    whole = text[:, :-1], text[:, 1:]
    inputs, targets = map(local_part, whole)
    # DDP averages gradients, and each process's loss is a mean of as many tokens.
    model = DistributedDataParallel(fresh_model(length, ring_attention))
    before = peak()
    logits, grads, losses, kept = train(model, inputs, targets)
    grown = peak() - before
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    lines = [
        f"{dist.get_world_size()} processes, {inputs.shape[1]} of {length} tokens in each",
        f"memory of a process: training takes {grown:.0f} MB, {kept / 1e6:.1f} MB of them kept "
        "for backward",
        "losses:     " + " ".join(f"{loss:.6f}" for loss in losses.tolist()),
    ]
    if compare:
        right, right_grads, alone, _ = train(fresh_model(length, ops.attention), *whole)
        pairs_of = [(logits, local_part(right, 1)), *zip(grads, right_grads, strict=True)]
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs_of]
        worst = torch.tensor([errors[0], max(errors[1:])])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        lines += [
            "one process:" + "".join(f" {loss:.6f}" for loss in alone.tolist()),
            f"of the largest element, logits differ by {worst[0]:.0e} and gradients by "
            f"{worst[1]:.0e} at most",
        ]
    if dist.get_rank() == 0:
        print(*lines, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--no-compare", dest="compare", action="store_false")
    given = parser.parse_args()
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main(given.length, given.compare)
    dist.destroy_process_group()
