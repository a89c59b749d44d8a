"""Attention of a sequence that is split over processes. context_parallel.py trains with it.

Keys and values go round the ring of processes, and every process's queries meet them. A call of
`wavepe.ops.attention` attends to one chunk of keys, and `merge_attention` merges the results. So a
process keeps, and sends, memory for its own tokens alone.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from wavepe import ops

CAST = ("q", "k", "v", "p", "q_rel")  # what autocast casts, as ops.attention does
OPTIONS = {"slopes", "first", "beyond", "window", "softcap", "scale", "bias_first", "bias_beyond"}


def chunks_of(rank):
    """Return the two chunks of a process, of twice as many as processes: r and 2 N - 1 - r.

    The first tokens see few keys and the last ones many, so each process has the same work.
    """
    return rank, 2 * dist.get_world_size() - 1 - rank


def local_part(x, dim=-1):
    """Return this process's part of a tensor that has all tokens along `dim`."""
    count = 2 * dist.get_world_size()
    if x.shape[dim] % count:
        raise ValueError(f"the length must be a multiple of {count}, got {x.shape[dim]}")
    chunks = x.chunk(count, dim)
    return torch.cat([chunks[i] for i in chunks_of(dist.get_rank())], dim)


def pass_on(x):
    """Begin to send x to the next process. Return a function that waits for the previous one's."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    if processes == 1:
        return lambda: x
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % processes)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % processes)
    works = dist.batch_isend_irecv([send, receive])

    def arrived():
        for work in works:
            work.wait()
        return received

    return arrived


def travel(kv):
    """Yield each process's rank, keys and values, from our own on. The next ones come meanwhile."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    for step in range(processes):
        arrived = pass_on(kv) if step + 1 < processes else None
        yield (rank - step) % processes, kv
        kv = arrived and arrived()


def pairs(owner, length):
    """Yield our queries, the keys of `owner` that they see, and the offset between the two.

    Queries and keys are slices of a process's tokens. Keys in the future are left out.
    """
    size = length // 2
    for i, ours in enumerate(chunks_of(dist.get_rank())):
        for j, theirs in enumerate(chunks_of(owner)):
            if theirs <= ours:
                here, there = (slice(x * size, (x + 1) * size) for x in (i, j))
                yield here, there, (ours - theirs) * size


def cut(tensors, kv, sizes, here, there):
    """Return the arguments of one call of attention, as views."""
    k, v = kv[:, :, there].split(sizes, -1)
    of_queries = {name: tensors[name][:, :, here] for name in ("q", "q_rel") if name in tensors}
    return {**tensors, **of_queries, "k": k, "v": v}


class RingAttention(torch.autograd.Function):
    """See `ring_attention`. It keeps for backward what belongs to this process's tokens alone."""

    @staticmethod
    def forward(ctx, options, names, k, v, *tensors):
        own = torch.cat([k, v], -1).contiguous()  # to send it
        given = dict(zip(names, tensors, strict=True))
        q, ctx.sizes = given["q"], (k.shape[-1], v.shape[-1])
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for owner, kv in travel(own):
            for here, there, offset in pairs(owner, q.shape[2]):
                part = cut(given, kv, ctx.sizes, here, there)
                found = ops.attention(**part, **options, offset=offset, return_lse=True)
                outs, lses = (out[:, :, here], found[0].to(wide)), (lse[:, :, here], found[1])
                out[:, :, here], lse[:, :, here] = ops.merge_attention(outs, lses)
        ctx.options, ctx.names, out = options, names, out.to(q.dtype)
        ctx.save_for_backward(own, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        own, out, lse, *tensors = ctx.saved_tensors
        given = dict(zip(ctx.names, tensors, strict=True))
        grad = grad.to(lse.dtype)
        mean = (grad * out).sum(-1)
        lse = lse.masked_fill(lse == -torch.inf, 0)  # a query that sees no key: its weights are 0
        needed = dict(zip(ctx.names, ctx.needs_input_grad[4:], strict=True))
        totals = {n: torch.zeros_like(x, dtype=lse.dtype) for n, x in given.items() if needed[n]}
        of_kv = torch.zeros_like(own, dtype=lse.dtype)  # it travels with its keys and values
        for owner, kv in travel(own):
            for here, there, offset in pairs(owner, given["q"].shape[2]):
                part = cut(given, kv, ctx.sizes, here, there)
                part = {n: x.detach().requires_grad_(needed.get(n, True)) for n, x in part.items()}
                wanted = {name: x for name, x in part.items() if x.requires_grad}
                with torch.enable_grad():
                    found = ops.attention(**part, **ctx.options, offset=offset, return_lse=True)
                # out = sum of weight * found[0] over all parts, with weight = exp(found[1] - lse)
                weight = torch.exp(found[1].detach() - lse[:, :, here])
                of_out = weight[..., None] * grad[:, :, here]
                of_lse = (of_out * found[0].detach()).sum(-1) - weight * mean[:, :, here]
                of_found = of_out.to(out.dtype), of_lse
                grads = torch.autograd.grad(found, wanted.values(), of_found)
                sums = cut(totals, of_kv, ctx.sizes, here, there)
                for name, more in zip(wanted, grads, strict=True):
                    sums[name] += more
            of_kv = pass_on(of_kv)()  # after the last step it is back
        k, v = of_kv.to(own.dtype).split(ctx.sizes, -1)
        grads = (totals[n].to(given[n].dtype) if needed[n] else None for n in ctx.names)
        return None, None, k, v, *grads


def ring_attention(q, k, v, **options):
    """Return causal attention of this process's queries to the keys of all processes.

    Parameters
    ----------
    q, k, v : Tensor (B, H, n, d), (B, Hk, n, d) and (B, Hk, n, dv)
        The tokens that `local_part` gives this process. All processes have the same n. bfloat16
        and float16 are summed in float32.
    options
        p, q_rel and bias, which are differentiable, and those named in OPTIONS, as
        `wavepe.ops.attention` takes them. Each process has the whole p and the whole bias. Their
        gradients are this process's share, as those of all weights: add them up. Autocast casts
        what it casts for `wavepe.ops.attention`.

    Returns
    -------
    out : Tensor (B, H, n, dv), q's dtype
    """
    given = {"q": q, "k": k, "v": v}
    given |= {name: x for name, x in options.items() if x is not None}
    if unknown := options.keys() - {"p", "q_rel", "bias", *OPTIONS}:
        raise TypeError(f"ring_attention does not take {', '.join(sorted(unknown))}")
    # Attention refuses wrong arguments here, before a process waits for another.
    no_query = {name: given[name].narrow(-2, 0, 0) for name in ("q", "q_rel") if name in given}
    ops.attention(**given | no_query)
    if q.shape[2] != k.shape[2] or q.shape[2] % 2:
        raise ValueError(f"q and k need one even length, got {q.shape[2]} and {k.shape[2]}")
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    rest = {name: x for name, x in given.items() if name not in tensors}
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        low = torch.get_autocast_dtype(kind)
        tensors = {name: x.to(low) if name in CAST else x for name, x in tensors.items()}
    k, v = tensors.pop("k"), tensors.pop("v")
    with torch.autocast(kind, enabled=False):
        return RingAttention.apply(rest, tuple(tensors), k, v, *tensors.values())
