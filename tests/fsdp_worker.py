"""What one of two processes does for test_examples_hf.py; rank 0 writes down what came out."""

import contextlib
import io

import torch
import torch.distributed as dist
import wavepe.hf
from examples_hf import load
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PROCESSES = 2


def batch():
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(5))


def gradients(model, tokens):
    """After one backward pass; of a sharded model, the whole ones."""
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {
        name: weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        for name, weight in model.named_parameters()
    }


def from_meta(example, mesh):
    """The example's model, made without memory, sharded, then filled from a whole state."""
    whole = example.fresh_model()
    settings = {
        name: getattr(whole.config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    }
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding=whole.config.position_encoding, num_hidden_layers=2, **settings
    )
    with torch.device("meta"):
        model = wavepe.hf.WavePELlamaForCausalLM(config)
    model = example.shard(model, mesh).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole.state_dict(), options=options)
    return model


def work(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    example, mesh = load("hf_fsdp2"), init_device_mesh("cpu", (PROCESSES,))
    tokens, found, printed = batch().chunk(PROCESSES)[rank], {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        _, found["state"], alone = example.main()
    found |= {"printed": printed.getvalue(), "alone": alone.state_dict()}
    found["float32"] = gradients(example.shard(example.fresh_model(), mesh), tokens)
    found["from meta"] = gradients(from_meta(example, mesh), tokens)
    half = example.shard(example.fresh_model().to(torch.bfloat16), mesh)
    found["bfloat16"] = gradients(half, tokens)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found["mixed"] = gradients(example.shard(example.fresh_model(), mesh, mp_policy=policy), tokens)
    model = fully_shard(example.fresh_model().to(torch.bfloat16), mesh=mesh)
    try:
        gradients(model, tokens)
    except AssertionError as error:
        found["without its own group"] = str(error)
    sharded = fully_shard(wavepe.hf.unpatch(example.fresh_model()), mesh=mesh)
    try:
        wavepe.hf.patch(sharded, "wavelet:scales=4,learned=true")
    except ValueError as error:
        found["patched after sharding"] = str(error)
    wavepe.hf.patch(sharded, "wavelet:scales=4")  # nothing of it is learned
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()
