"""FSDP2 with a learned encoding: each of two processes keeps half of the weights.

    torchrun --nproc-per-node 2 examples/hf_fsdp2.py

This trains some steps with FSDP2 on CPUs (gloo). It does the same steps without FSDP2, and compares
losses and weights.
"""

import torch
import torch.distributed as dist
import wavepe.hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3


def fresh_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    return wavepe.hf.patch(model, "wavelet:scales=4,learned=true")


def shard(model, mesh, **options):
    # Patch before sharding. The encoding's parameters stay float32 in a bfloat16 model. FSDP needs
    # one dtype in a group, so they get their own group. It has no mixed precision policy, which
    # would round them.
    for name, module in list(model.named_modules()):
        if name.endswith("position_encoding"):  # learned parameters, of all layers or of one
            fully_shard(module, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, batches):
    # Create the optimizer after sharding, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    rank, processes = dist.get_rank(), dist.get_world_size()
    batches = torch.randint(256, (STEPS, 4, 32), generator=torch.Generator().manual_seed(1))
    model = shard(fresh_model(), init_device_mesh("cpu", (processes,)))
    losses = train(model, batches.chunk(processes, dim=1)[rank])
    dist.all_reduce(losses)
    losses /= processes
    # The full tensors, as load_state_dict of a model without FSDP2 needs them.
    state = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    alone = fresh_model()
    wanted = train(alone, batches)
    worst = max((state[name] - weight).abs().max() for name, weight in alone.state_dict().items())
    if rank == 0:
        here = model.model.position_encoding.scale.to_local()
        print(f"scales in this process: {len(here)} of {len(alone.model.position_encoding.scale)}")
        print("losses with FSDP2:", *(f"{loss:.5f}" for loss in losses.tolist()))
        print("losses without:   ", *(f"{loss:.5f}" for loss in wanted.tolist()))
        print(f"weights afterwards differ by {worst.item():.0e}")
    return model, state, alone


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
