"""Compare the bits of 1,000 random calls with those of another build of wavepe.

Run it in both checkouts: in the older one with ``--json FILE``, in the newer one with
``--against FILE``. Each call is made once per variant of the kernels. A change that is meant to be
only faster must leave every call's bits as they were.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path

import torch
import wavepe
from torch import Tensor
from wavepe import ops

from .command import add_json, keep, new_parser

DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEAD_SIZES = (8, 24, 32, 33, 64, 64, 80, 128)
Drawn = tuple[str, list[Tensor]]


def attention(rng: random.Random, random_tensor, queries: int, keys: int) -> Drawn:
    """Return the outputs and gradients of one call of attention with random options."""
    dtype, d = rng.choice(DTYPES), rng.choice(HEAD_SIZES)
    key_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
    dv = rng.choice((d, d, d, 40))
    heads, wide = key_heads * group, torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (
        random_tensor(2, n, h, size).to(dtype).transpose(1, 2)  # as projections leave it
        for n, h, size in ((queries, heads, d), (keys, key_heads, d), (keys, key_heads, dv))
    )
    inputs, options = [q, k, v], {"causal": rng.random() < 0.8}
    kind = rng.choice(("none", "tensor", "tensor", "heads", "wavelet", "wavelet", "slopes", "bias"))
    rows = rng.choice((keys, keys, 17, 2 * keys + 5))
    first = rng.choice((0, 0, 0, -7))
    if kind in ("tensor", "heads"):
        shape = (heads, rows, d) if kind == "heads" else (rows, d)
        options |= {"p": random_tensor(*shape).to(dtype), "first": first}
        options["beyond"] = rng.choice(("zero", "edge"))
        inputs.append(options["p"])
        if rng.random() < 0.3:
            options["q_rel"] = random_tensor(*q.shape).to(dtype)
            inputs.append(options["q_rel"])
    elif kind == "wavelet":
        p, *rest = wavepe.encoding("wavelet").table(keys, 128)
        options["p"] = ops.relative_table(p[:, :d], *rest)
    elif kind == "slopes":
        options["slopes"] = random_tensor(heads).abs()
    elif kind == "bias":
        options |= {"bias": random_tensor(heads, rows).to(wide), "bias_beyond": "edge"}
        inputs.append(options["bias"])
    if rng.random() < 0.2:
        options["window"] = rng.randrange(1, keys + 1)
    if rng.random() < 0.2:
        options["softcap"] = 5.0
    if rng.random() < 0.2:
        options["dropout_p"] = 0.3
    if rng.random() < 0.2:
        options["key_mask"] = random_tensor(2, keys) > -1
    if rng.random() < 0.2 and queries == keys:
        options["segments"] = (random_tensor(1, keys) > 1).cumsum(1)
    torch.manual_seed(rng.randrange(1 << 30))  # dropout's
    for x in inputs:
        x.requires_grad_()
    out, lse = ops.attention(q, k, v, **options, return_lse=True)
    with torch.no_grad():
        grad_out = random_tensor(*out.shape).to(dtype)
    return kind, [out, lse, *torch.autograd.grad(out, inputs, grad_out)]


def square(rng: random.Random, random_tensor) -> Drawn:
    n = rng.choice((1, 5, 31, 96, 97, 130, 192, 193, 300, 500))
    return attention(rng, random_tensor, n, n)


def cached(rng: random.Random, random_tensor) -> Drawn:
    return attention(rng, random_tensor, rng.randrange(2, 17), rng.randrange(20, 700))


def one_query(rng: random.Random, random_tensor) -> Drawn:
    return attention(rng, random_tensor, 1, rng.randrange(1, 1500))


def relative_bias(rng: random.Random, random_tensor) -> Drawn:
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
    d, m, n = rng.choice(HEAD_SIZES), rng.randrange(1, 200), rng.randrange(1, 300)
    q, p = random_tensor(2, m, d).to(dtype), random_tensor(rng.randrange(1, 400), d).to(dtype)
    beyond = rng.choice(("zero", "edge"))
    return beyond, [ops.relative_bias(q, p, n, first=rng.choice((0, -9)), beyond=beyond)]


def rope(rng: random.Random, random_tensor) -> Drawn:
    d, n = rng.choice((8, 32, 64, 128)), rng.randrange(1, 200)
    x = random_tensor(2, n, 3, d).to(rng.choice(DTYPES)).transpose(1, 2)
    if rng.random() < 0.5:
        x = x.contiguous()
    half = rng.choice((d, d // 2)) // 2
    position = torch.arange(n) * rng.choice((1, 1000))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(2 * half)[0])
    cos, sin = ops.rope_table(position, inv_freq, dtype=wide)
    layout = rng.random() < 0.5
    return str(layout), [
        cos,
        sin,
        ops.rope(x, cos, sin, interleaved=layout),
        ops.rope(x, cos, sin, interleaved=layout, inverse=True),
    ]


CALLS = (square, square, square, cached, one_query, relative_bias, rope)


def digests(count: int) -> dict[str, str]:
    """Return, for each random call of the current variant, its name and a hash of its results."""
    by_call = {}
    for seed in range(count):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        call = CALLS[seed % len(CALLS)]
        kind, results = call(rng, lambda *shape, g=generator: torch.randn(*shape, generator=g))
        together = hashlib.sha256()
        for x in results:
            together.update(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        by_call[f"{call.__name__} {kind} {seed}"] = together.hexdigest()[:16]
    return by_call


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many calls; default 1000")
    parser.add_argument("--against", type=Path, metavar="FILE", help="the file of the other build")
    add_json(parser)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    by_variant = {}
    for variant in wavepe.variants():
        wavepe.use_variant(variant)
        by_variant[variant] = digests(args.count)
    keep(by_variant, args.json)
    if not args.against:
        return
    before, failed = json.loads(args.against.read_text("utf-8")), False
    for variant, calls in by_variant.items():
        other = before.get(variant, {})
        changed = [name for name, digest in calls.items() if other.get(name) != digest]
        failed |= bool(changed)
        kinds = Counter(name.rsplit(" ", 1)[0] for name in changed)
        print(f"{variant}: {len(calls)} calls, {len(changed)} changed {dict(kinds) or ''}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
