"""What each process does for test_distributed.py. Rank 0 writes down how far results are off."""

import dataclasses
import functools
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from cases import wavelets
from encoding_cases import LEARNED
from examples_hf import EXAMPLES, load
from hf_model import EACH_ENTRY, gradients, patched_tiny, recompute, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from wavepe import ops, register_encoding
from wavepe.encodings import Encoding

sys.path.insert(0, str(EXAMPLES))  # context_parallel imports its neighbour
HEADS, KEY_HEADS, LENGTH, SIZE = 4, 2, 24, 8
ROWS = torch.from_numpy(wavelets(SIZE, LENGTH, scales=4))


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


CASES = {
    "plain": {},
    "alibi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "wavelets": {"p": ROWS},
    "constant": {"p": ops.relative_table(ROWS)},
    "few rows": {"p": ROWS[:7], "first": 2},
    "edge": {"p": ROWS[:7], "first": 2, "beyond": "edge"},
    "tables of heads": {"p": random(HEADS, 9, SIZE), "beyond": "edge"},
    "q_rel": {"p": ROWS, "q_rel": random(2, HEADS, LENGTH, SIZE)},
    "bias": {"bias": random(HEADS, 9), "bias_beyond": "edge"},
    "window": {"p": ROWS, "window": 3},  # most pairs of chunks see nothing
    "softcap": {"p": ROWS, "softcap": 2.0, "scale": 0.7},
    "all": {"p": random(HEADS, 11, SIZE), "bias": random(20), "first": 1, "window": 17},
}
DIFFERENTIABLE = ("q", "k", "v", "p", "bias", "q_rel")


def drawn(case, dtype):
    given = {"q": random(2, HEADS, LENGTH, SIZE), "k": random(2, KEY_HEADS, LENGTH, SIZE)}
    given |= {"v": random(2, KEY_HEADS, LENGTH, SIZE - 2)} | CASES[case]
    wide = torch.promote_types(dtype, torch.float32)
    for name in DIFFERENTIABLE:
        if torch.is_tensor(x := given.get(name)):
            given[name] = x.to(wide if name == "bias" else dtype).requires_grad_()
    return given


def derived(out, weight, given):
    """Return out and the gradients of what is differentiable."""
    names = [name for name in DIFFERENTIABLE if torch.is_tensor(given.get(name))]
    grads = torch.autograd.grad((out.double() * weight).sum(), [given[name] for name in names])
    return {"out": out.detach()} | dict(zip(names, grads, strict=True))


def attention_error(case, dtype, autocast=False):
    """Return the largest error of a result, over the result's largest element."""
    ring = load("ring_attention")
    given, weight = drawn(case, dtype), random(2, HEADS, LENGTH, SIZE - 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = derived(ops.attention(**given), weight, given)
        split = {
            name: heads_last(ring.local_part(given[name], 2))
            for name in ("q", "k", "v", "q_rel")
            if name in given
        }
        local = given | {name: x.detach().requires_grad_() for name, x in split.items()}
        out = ring.ring_attention(**local)
    found = derived(out, ring.local_part(weight, 2), local)
    errors = []
    for name, whole in wanted.items():
        got = found[name].double()
        if name in ("p", "bias"):
            dist.all_reduce(got)
        else:
            whole = ring.local_part(whole, 2)
        assert found[name].dtype == whole.dtype, name
        errors.append(relative_error(got, whole))
    return worst(errors)


def heads_last(x):
    """Return the same values with the heads closest in memory: torch.cat keeps that order."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def relative_error(found, wanted):
    """Return the largest error over the largest element of `wanted`."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def worst(errors):
    """Return the largest error, NaN if one is NaN; of words, which all processes have, one."""
    if all(isinstance(error, str) for error in errors):
        return errors[0]
    return float(torch.tensor(errors).max())


# ------------------------------------------------------------------ models

WAVELET = "wavelet:scales=4,learned=true"
SIZES = {"heads": 6, "kv_heads": 3, "intermediate_size": 42}  # three processes split them


@dataclasses.dataclass(frozen=True)
class Rows(Encoding):
    """A learned encoding whose table is its parameter, without a copy."""

    name = "rows"
    entry = "relative"
    learned = True

    def parameters(self, head_dim, heads):
        return {"rows": np.eye(5, head_dim)}

    def table(self, length, head_dim, *, causal=True):
        return np.eye(5, head_dim), 0, "edge"

    def learned_table(self, length, parameters, *, causal=True):
        return parameters["rows"], 0, "edge"


def mine(ids):
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


@functools.cache
def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def data_parallel(model, ids, reentrant):
    # all layers share the parameters of an encoding, which DDP takes from reentrant ones only so
    return DistributedDataParallel(model, static_graph=reentrant), mine(ids)


def fsdp2(model, ids, reentrant):
    fully_shard(model.model.position_encoding, mesh=mesh())
    return fsdp2_without_a_group(model, ids, reentrant)


def fsdp2_without_a_group(model, ids, reentrant):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh()), mine(ids)


def tensor_parallel(model, ids, reentrant):
    """Each process has some heads, and all tokens."""
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh(), plan)
    return model, ids


def sequence_parallel(model, ids, reentrant):
    """The same, and each process has some tokens outside of attention and MLP."""
    part, whole = Shard(1), Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=part)
    hidden = {"input_kwarg_layouts": {"hidden_states": part}}
    hidden |= {"desired_input_kwarg_layouts": {"hidden_states": whole}}
    layer = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**hidden),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
    }
    layer |= {f"self_attn.{name}_proj": columns for name in "qkv"} | {"self_attn.o_proj": rows}
    layer |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    for each in model.model.layers:
        parallelize_module(each, mesh(), layer)
    return parallelize_module(model, mesh(), ends), ids


def gradient_error(split, spec, reentrant=None, **options):
    """Of a model that `split` splits over processes, against one process; or a ValueError's words.

    It is the largest error of a gradient, over the gradient's largest element. `reentrant` is the
    kind of gradient checkpointing, if any.
    """
    ids = tokens(2 * dist.get_world_size(), 12)
    wanted = gradients(patched_tiny(spec, **SIZES).train(), ids, **options)
    model = patched_tiny(spec, **SIZES).train()
    if reentrant is not None:
        recompute(model, reentrant)
    model, ids = split(model, ids, reentrant)
    try:
        found = gradients(model, ids, **options)
    except ValueError as error:
        return str(error)
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]
    return worst([relative_error(*pair) for pair in zip(found, wanted, strict=True)])


def errors():
    register_encoding(Rows)
    found = {}
    for case in CASES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            found[case, dtype] = attention_error(case, dtype)
        found[case, "autocast"] = attention_error(case, torch.float32, autocast=True)
    calls = [(data_parallel, WAVELET, reentrant) for reentrant in (False, True)]
    calls += [(data_parallel, "transformer_xl", reentrant) for reentrant in (False, True)]
    calls += [(fsdp2, spec, True) for spec in (*LEARNED, "rows")]
    calls += [(fsdp2, "transformer_xl", False), (fsdp2_without_a_group, WAVELET, True)]
    calls += [(tensor_parallel, spec) for spec in (*EACH_ENTRY, *LEARNED)]
    for call in calls:
        found[call[0].__name__, call[1:]] = gradient_error(*call)
    positions = torch.arange(12)[None]
    for spec in ("wavelet:scales=4", "rope:theta=100", "alibi"):
        error = gradient_error(sequence_parallel, spec, position_ids=positions)
        found["sequence_parallel", (spec,)] = error
    return found


def work(rank, processes, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    gathered = [None] * processes
    dist.all_gather_object(gathered, errors())
    if rank == 0:
        found = {case: worst([errors[case] for errors in gathered]) for case in gathered[0]}
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()
    # Threads of torch may still want the GIL. If Python ended, that would abort the process.
    os._exit(0)
