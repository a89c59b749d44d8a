"""What each process does for test_distributed.py. Rank 0 writes down how far results are off."""

import sys

import torch
import torch.distributed as dist
from cases import wavelets
from examples_hf import EXAMPLES, load
from hf_model import gradients, patched_tiny, recompute, tokens
from torch.nn.parallel import DistributedDataParallel
from wavepe import ops

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


def attention_error(case, dtype):
    """Return the largest error of a result, over the result's largest element."""
    ring = load("ring_attention")
    given, weight = drawn(case, dtype), random(2, HEADS, LENGTH, SIZE - 2)
    wanted = derived(ops.attention(**given), weight, given)
    split = {
        name: ring.local_part(given[name], 2) for name in ("q", "k", "v", "q_rel") if name in given
    }
    local = given | {name: x.detach().requires_grad_() for name, x in split.items()}
    found = derived(ring.ring_attention(**local), ring.local_part(weight, 2), local)
    worst = 0.0
    for name, whole in wanted.items():
        got = found[name].double()
        if name in ("p", "bias"):
            dist.all_reduce(got)
        else:
            whole = ring.local_part(whole, 2)
        assert found[name].dtype == whole.dtype, name
        worst = max(worst, float((got - whole).abs().max() / whole.abs().max()))
    return worst


def data_parallel_error(spec, reentrant):
    """Of the gradients of a model in DDP with gradient checkpointing, against the whole batch."""
    ids = tokens(2 * dist.get_world_size(), 12)
    model = patched_tiny(spec).train()
    wanted = dict(zip((n for n, _ in model.named_parameters()), gradients(model, ids), strict=True))
    model = patched_tiny(spec).train()
    recompute(model, reentrant)
    # all layers share the parameters of an encoding, which DDP takes from reentrant ones only so
    model = DistributedDataParallel(model, static_graph=reentrant)
    found = gradients(model, ids.chunk(dist.get_world_size())[dist.get_rank()])
    pairs = zip(found, wanted.values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def errors():
    found = {}
    for case in CASES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            found[case, dtype] = attention_error(case, dtype)
    for spec in ("wavelet:scales=4,learned=true", "transformer_xl"):
        for reentrant in (False, True):
            found["DDP", spec, reentrant] = data_parallel_error(spec, reentrant)
    return found


def work(rank, processes, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    gathered = [None] * processes
    dist.all_gather_object(gathered, errors())
    if rank == 0:
        torch.save(
            {case: max(g[case] for g in gathered) for case in gathered[0]}, f"{folder}/found"
        )
    dist.destroy_process_group()
