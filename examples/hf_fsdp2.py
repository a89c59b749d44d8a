"""FSDP2: each of two processes keeps half of the weights, a learned encoding among them.

    torchrun --nproc-per-node 2 examples/hf_fsdp2.py

trains some steps, and the same without FSDP on the whole batch, and compares. Here on CPUs (gloo).
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
    # Patch before sharding. The encoding's parameters belong to all layers, and stay float32 in a
    # bfloat16 model where FSDP wants one dtype per group: they get a group of their own, without
    # a mixed precision policy (which would round them).
    fully_shard(model.model.position_encoding, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, batches):
    # Made after sharding: before it, the optimizer would hold the parameters that are gone.
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
    # Whole again, as load_state_dict and save_pretrained of a model that is not sharded want it.
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
