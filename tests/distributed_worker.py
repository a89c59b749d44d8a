"""Work of the processes that tests start: python distributed_worker.py WORK PROCESSES FOLDER.

This process forks PROCESSES others, which call the function WORK. Rank 0 writes what was found to
FOLDER/found.
"""

import contextlib
import functools
import io
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import wavepe.hf
from cases import wavelets
from encoding_cases import ASKED, COMBINED, LEARNED
from examples_hf import EXAMPLES, load
from hf_model import EACH_ENTRY, gradients, logits, patched_tiny, recompute, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from wavepe import ops, register_encoding
from wavepe.encodings import Encoding

sys.path.insert(0, str(EXAMPLES))  # context_parallel imports its neighbour


def relative_error(results, wanted):
    """Return the largest error over the largest element of `wanted`."""
    return float((results - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def worst(errors):
    """Return the largest error, NaN if one is NaN; of words, which all processes have, one."""
    if all(isinstance(error, str) for error in errors):
        return errors[0]
    return float(torch.tensor(errors).max())


# ------------------------------------------------------------------ attention in a ring

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
    args = {"q": random(2, HEADS, LENGTH, SIZE), "k": random(2, KEY_HEADS, LENGTH, SIZE)}
    args |= {"v": random(2, KEY_HEADS, LENGTH, SIZE - 2)} | CASES[case]
    wide = torch.promote_types(dtype, torch.float32)
    for name in DIFFERENTIABLE:
        if torch.is_tensor(x := args.get(name)):
            args[name] = x.to(wide if name == "bias" else dtype).requires_grad_()
    return args


def derived(out, weight, args):
    """Return out and the gradients of what is differentiable."""
    names = [name for name in DIFFERENTIABLE if torch.is_tensor(args.get(name))]
    grads = torch.autograd.grad((out.double() * weight).sum(), [args[name] for name in names])
    return {"out": out.detach()} | dict(zip(names, grads, strict=True))


def attention_error(case, dtype):
    """Return the largest error of a result, over the result's largest element."""
    ring, autocast = load("ring_attention"), dtype == "autocast"
    args = drawn(case, torch.float32 if autocast else dtype)
    weight = random(2, HEADS, LENGTH, SIZE - 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = derived(ops.attention(**args), weight, args)
        split = {
            name: heads_last(ring.local_part(args[name], 2))
            for name in ("q", "k", "v", "q_rel")
            if name in args
        }
        local = args | {name: x.detach().requires_grad_() for name, x in split.items()}
        out = ring.ring_attention(**local)
    results = derived(out, ring.local_part(weight, 2), local)
    errors = []
    for name, whole in wanted.items():
        got = results[name].double()
        if name in ("p", "bias"):
            dist.all_reduce(got)
        else:
            whole = ring.local_part(whole, 2)
        assert results[name].dtype == whole.dtype, name
        errors.append(relative_error(got, whole))
    return worst(errors)


def heads_last(x):
    """Return the same values with the heads closest in memory: torch.cat keeps that order."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


# ------------------------------------------------------------------ models, and ways to split them

WAVELET = "wavelet:scales=4,learned=true"


class Rows(Encoding):
    """A learned encoding whose table is its parameter, without a copy."""

    name = "rows"
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
    for name, module in list(model.named_modules()):
        if name.endswith("position_encoding"):
            fully_shard(module, mesh=mesh())
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


def gradient_error(split, spec, reentrant=None):
    """Compare a model that `split` splits over processes with one process; or return an error.

    It is the largest error of a gradient, over the gradient's largest element. `reentrant` is the
    kind of gradient checkpointing, if any.
    """
    count, options = dist.get_world_size(), {}
    sizes = {"heads": 2 * count, "kv_heads": count, "intermediate_size": 14 * count}
    if split is sequence_parallel:
        options = {"position_ids": torch.arange(12)[None]}
    ids = tokens(2 * count, 12)
    wanted = gradients(patched_tiny(spec, **sizes).train(), ids, **options)
    model = patched_tiny(spec, **sizes).train()
    if reentrant is not None:
        recompute(model, reentrant)
    model, ids = split(model, ids, reentrant)
    try:
        results = gradients(model, ids, **options)
    except ValueError as error:
        return str(error)
    results = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in results]
    return worst([relative_error(*pair) for pair in zip(results, wanted, strict=True)])


# The cases of two processes, which are the quick ones, and of three.
ATTENTION = {
    2: [(case, torch.float32) for case in CASES],
    3: [
        (case, dtype)
        for case in CASES
        for dtype in (torch.float64, torch.float32, torch.bfloat16, "autocast")
    ],
}
MODELS = {
    2: [
        (data_parallel, WAVELET, True), (fsdp2, "transformer_xl", True),
        (tensor_parallel, "wavelet:scales=4"), (tensor_parallel, "alibi"),
        (tensor_parallel, "rope:theta=100+wavelet:scales=4"),
        (fsdp2_without_a_group, COMBINED[1], True), (sequence_parallel, "rope:theta=100")],
    3: [
        *((data_parallel, WAVELET, reentrant) for reentrant in (False, True)),
        *((data_parallel, "transformer_xl", reentrant) for reentrant in (False, True)),
        *((fsdp2, spec, True) for spec in (*LEARNED, "rows")), (fsdp2, "transformer_xl", False),
        *((fsdp2_without_a_group, spec, True) for spec in (WAVELET, ASKED)),
        *((fsdp2, spec, True) for spec in (ASKED, COMBINED[4])),
        *((tensor_parallel, spec) for spec in (*EACH_ENTRY, *LEARNED, ASKED, COMBINED[0])),
        *((sequence_parallel, spec) for spec in ("wavelet:scales=4", "rope:theta=100", "alibi"))],
}  # fmt: skip


def errors(folder):
    """How far attention and models in parts are off, at worst in any process."""
    register_encoding(Rows)
    count = dist.get_world_size()
    results = {case: attention_error(*case) for case in ATTENTION[count]}
    for call in MODELS[count]:
        results[(call[0].__name__, *call[1:])] = gradient_error(*call)
    gathered = [None] * count
    dist.all_gather_object(gathered, results)
    return {case: worst([errors[case] for errors in gathered]) for case in results}


# ------------------------------------------------------------------ transformers' own plan
def tensor_parallel_plan(folder):
    """Whether each model in the folder computes the same in two processes, or an error's words."""
    ids, results = tokens(2, 12), {}
    for model in sorted(Path(folder).glob("model-*")):
        whole = AutoModelForCausalLM.from_pretrained(model).eval()
        split = AutoModelForCausalLM.from_pretrained(model, tp_plan="auto").eval()
        assert split.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 16
        try:
            equal = torch.allclose(logits(split, ids), logits(whole, ids), atol=1e-4)
        except ValueError as error:
            equal = str(error)
        results[whole.config.position_encoding] = equal
    return results


# ------------------------------------------------------------------ the example of FSDP2
def batch():
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(5))


def whole_gradients(model, ids):
    """After one backward pass; of a sharded model, the whole ones."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {
        name: weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        for name, weight in model.named_parameters()
    }


def from_meta(example):
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
    model = example.shard(model, mesh()).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole.state_dict(), options=options)
    return model


def fsdp2_example(folder):
    example, ids, results, printed = load("hf_fsdp2"), mine(batch()), {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        _, results["state"], alone = example.main()
    results |= {"printed": printed.getvalue(), "alone": alone.state_dict()}
    results["float32"] = whole_gradients(example.shard(example.fresh_model(), mesh()), ids)
    results["from meta"] = whole_gradients(from_meta(example), ids)
    half = example.shard(example.fresh_model().to(torch.bfloat16), mesh())
    results["bfloat16"] = whole_gradients(half, ids)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = example.shard(example.fresh_model(), mesh(), mp_policy=policy)
    results["mixed"] = whole_gradients(mixed, ids)
    model = fully_shard(example.fresh_model().to(torch.bfloat16), mesh=mesh())
    try:
        whole_gradients(model, ids)
    except AssertionError as error:
        results["without its own group"] = str(error)
    sharded = fully_shard(wavepe.hf.unpatch(example.fresh_model()), mesh=mesh())
    try:
        wavepe.hf.patch(sharded, WAVELET)
    except ValueError as error:
        results["patched after sharding"] = str(error)
    wavepe.hf.patch(sharded, "wavelet:scales=4")  # nothing of it is learned
    return results


# ------------------------------------------------------------------ processes
def start(rank, work, processes, folder):
    torch.set_num_threads(1)
    # transformers asks these
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    results = work(folder)
    if rank == 0:
        torch.save(results, f"{folder}/found")
    dist.destroy_process_group()
    # Threads of torch may still want the GIL. If Python ended, that would abort the process.
    os._exit(0)


if __name__ == "__main__":
    _, name, processes, folder = sys.argv
    arguments = (globals()[name], int(processes), folder)
    torch.multiprocessing.start_processes(
        start, arguments, nprocs=int(processes), start_method="fork"
    )
