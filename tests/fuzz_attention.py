"""Random calls of ops.attention, forward and backward, against the oracle."""

import math

import attention_cases as cases
import numpy as np
from attention_cases import judge, ops, tensors, torch
from attention_options import largest, slopes
from fuzz_draw import BLOCKS, chance, length, near, pick, spoil_rows, strided, width

FAR = 2**40  # further than any key
PAIRS = 200_000  # pairs of a query and a key, in all heads; the oracle takes 50 ms for them


# ---- shapes and options --------------------------------------------------------------------------
def draw_shape(rng):
    """Draw a shape: a third are small; some of the others decode, some are long."""
    small, how, m, n = chance(rng, 0.35), rng.random(), length(rng), length(rng)
    if small:
        m, n = (int(x) for x in rng.integers(0, 25, 2))
    if how < 0.6:
        n = m
    elif how < 0.68:
        m, n = 1, n if small else length(rng, 2000)
    elif how < 0.74:
        m = int(rng.integers(1, 17))
    elif how < 0.76:
        m, n = near(rng, BLOCKS, 600, 5), near(rng, BLOCKS, 800, 5)
    d, dv = (min(width(rng), 24 if small else 256) for _ in range(2))
    return cases.Shape(*draw_heads(rng, m * n), m, n, d, dv)


def draw_heads(rng, pairs):
    """Draw (batch, heads, key heads), which have `pairs` pairs each.

    The batch is drawn first: each of its rows may have its own offset, padding and segments.
    """
    batch, kv_heads, group = (int(x) for x in rng.integers(1, (4, 3, 4)))
    most = max(1, PAIRS // max(pairs, 1))
    batch = min(batch, most)
    kv_heads = min(kv_heads, max(1, most // batch))
    group = min(group, max(1, most // batch // kv_heads))
    return batch, kv_heads * group, kv_heads


def draw_options(rng, s):
    """Draw any number of options of each kind, as NumPy arrays and numbers."""
    drawn = {"causal": chance(rng, 0.7)}
    if chance(rng, 0.5):
        drawn |= draw_table(rng, s)
    if chance(rng, 0.35):
        drawn |= draw_bias(rng, s)
    for options in (RANGES, OTHERS):
        names = [name for name in options if name != "segments" or s.m == s.n]
        for at in rng.permutation(len(names))[: rng.integers(len(names) + 1)]:
            drawn[names[at]] = options[names[at]](rng, s)
    if s.m == s.n and chance(rng, 0.25):
        drawn |= draw_gaps(rng, s)
    if isinstance(drawn.get("offset"), int) and drawn["offset"] == FAR:
        drawn.pop("slopes", None)  # of float32 scores that large no digit is left
    return drawn


def draw_table(rng, s):
    """Draw p, first, beyond and q_rel, with rows for all deltas, for some, or for none."""
    beyond = pick(rng, "zero", "edge")
    w = pick(rng, s.m + s.n, s.n, length(rng), int(rng.integers(0, 13)), 2 * (s.m + s.n) + 5)
    w = max(w, int(beyond == "edge"))
    first = pick(rng, 0, 0, 1 - s.m, -(w // 2), int(rng.integers(-s.m - 9, s.n + 9)), 10**6)
    q_rel = chance(rng, 0.35)
    c = pick(rng, s.d, 8, 16, min(width(rng), 64)) if q_rel else s.d
    p = rng.normal(size=(*([s.heads] if chance(rng, 0.3) else []), w, c))
    if chance(rng, 0.3):  # tails as wavelets have them: far rows count as zero
        p *= np.exp2(-pick(rng, 0.02, 0.3, 1.0) * np.abs(np.arange(w) + first))[:, None]
    drawn = {"p": p, "first": first, "beyond": beyond}
    if q_rel:
        drawn["q_rel"] = rng.normal(size=(s.batch, s.heads, s.m, c))
    return drawn


def draw_bias(rng, s):
    """Draw bias, bias_first and bias_beyond, as in draw_table."""
    drawn = draw_table(rng, s)
    bias = rng.normal(size=(*drawn["p"].shape[:-2], drawn["p"].shape[-2]))
    return {"bias": bias, "bias_first": drawn["first"], "bias_beyond": drawn["beyond"]}


def draw_offset(rng, s):
    """Draw an offset for all rows of the batch, or one for each row.

    It is near the default, often a little larger, anywhere, or seldom far from all keys.
    """
    how, last = rng.random(), s.n - s.m
    if how < 0.05:
        return FAR
    if how < 0.25:
        rows = last + rng.integers(-9, 10, s.batch)
    elif how < 0.5:
        rows = rng.integers(-s.m - 3, s.n + 4, s.batch)
    else:
        rows = last + rng.integers(0, s.m // 2 + 1, s.batch)
    if chance(rng, 0.3):
        return int(rows[0])
    return rows[: pick(rng, 1, s.batch, s.batch)].astype(pick(rng, np.int32, np.int64))


def draw_window(rng, s):
    small = int(rng.integers(0, 40))
    return pick(rng, small, small, small, near(rng, BLOCKS, 420, 2), int(rng.integers(0, s.n + 2)))


def draw_key_mask(rng, s):
    """Draw a mask for all rows of the batch, or one for each row.

    It hides padding at one end or both, holes, all keys or none.
    """
    batch = pick(rng, 1, s.batch, s.batch)
    seen, at = np.ones((batch, s.n), bool), np.arange(s.n)
    for row in seen:
        how, (low, high) = rng.integers(6), np.sort(rng.integers(0, s.n + 1, 2))
        if how in (0, 2):
            row &= at >= low
        if how in (1, 2):
            row &= at < high
        if how == 3:
            row &= rng.random(s.n) < rng.random()
        if how == 4:  # a hole between two ends
            row &= (at < low) | (at >= high)
        if how == 5:
            row &= chance(rng, 0.5)
    return seen


def draw_segments(rng, s):
    """Draw a few long segments, many short ones, or scattered ids.

    Long segments may begin where groups of queries begin. Ids may rise, or come back.
    """
    batch, n = pick(rng, 1, s.batch, s.batch), s.n
    ids = np.zeros((batch, n), np.int64)
    for row in ids:
        how, block = rng.integers(6), pick(rng, 1, 1, *BLOCKS)
        if how == 0:
            row[:] = np.cumsum(rng.random(n) < 0.2)
        elif how == 1:
            row[:] = rng.integers(-1, 3, n)
        else:
            for cut in rng.integers(0, n + 1, rng.integers(1, 5)):
                row[cut // block * block :] += 1
        if how == 2:
            row[:] = rng.permutation(8)[row % 8] % pick(rng, 2, 8)
    return ids.astype(pick(rng, np.int32, np.int64))


def draw_gaps(rng, s):
    """Draw a short window after the query, and segments that begin with a block.

    Then whole groups of queries see no key in a tile that their neighbours see.
    """
    ids = np.zeros((s.batch, s.n), np.int64)
    for row in ids:
        block = pick(rng, *BLOCKS[:4])
        for cut in rng.integers(0, s.n + 1, rng.integers(1, 5)):
            row[cut // block * block :] += 1
    offset = s.n - s.m + rng.integers(0, s.m // 2 + 1, s.batch)
    return {"window": int(rng.integers(0, 40)), "offset": offset, "segments": ids}


def draw_mask(rng, s):
    shape = (pick(rng, 1, s.batch), pick(rng, 1, s.heads), s.m, s.n)
    mask = rng.random(shape) < pick(rng, rng.random(), 0.02, 0.98)
    if chance(rng, 0.3):
        low, high = np.sort(rng.integers(0, s.m + 1, 2))
        mask[:, :, low:high] = chance(rng, 0.3)
    return mask


# Which keys a query sees: together they make the kernels' ranges, some of them empty.
RANGES = {
    "window": draw_window,
    "offset": draw_offset,
    "key_mask": draw_key_mask,
    "segments": draw_segments,
}
OTHERS = {
    "slopes": lambda rng, s: slopes(s) * pick(rng, 1.0, -0.5),
    "softcap": lambda rng, s: float(pick(rng, rng.uniform(0.3, 6), 30.0)),
    "scale": lambda rng, s: float(pick(rng, rng.normal(), rng.normal(), 0.0)),
    "mask": draw_mask,
    "sinks": lambda rng, s: rng.normal(size=s.heads) * pick(rng, 1.0, 4.0),
    "dropout_p": lambda rng, s: pick(rng, 0.1, 0.5, 0.9, 1.0),
}


# ---- constant tables -----------------------------------------------------------------------------
def constant_table(rng, p, first, beyond):
    """A `RelativeTable` of random rows, which it keeps, or of smooth ones, where it finds zones."""
    if chance(rng, 0.6) and p.shape[-1]:
        delta = (np.arange(p.shape[-2]) + first)[:, None]
        width, at = rng.uniform(1, 90, p.shape[-1]), rng.uniform(-20, 60, p.shape[-1])
        p = np.broadcast_to(np.exp(-(((delta - at) / width) ** 2)), p.shape)
    return ops.relative_table(p, first, beyond)


def rows_of(table, k, causal):
    """(p, first) that the kernel works with: the zones' products, if there are zones; with few keys
    the rows themselves, as in Call::reads_zones."""
    p, first, zones = table.tensors(k.dtype, "cpu")
    if k.shape[2] <= (224 if causal else 112):
        zones = []
    pairs = zip(zones[::2], zones[1::2], strict=True)
    rows = [c.double() @ u.double().T if u.numel() else c.double() for c, u in pairs]
    return (torch.cat(rows) if rows else p), first


# ---- the function --------------------------------------------------------------------------------
class Attention:
    """Calls of ops.attention: out, lse, and gradients of some of the inputs."""

    refused = (RuntimeError,)
    function = staticmethod(cases.attention)
    rounds_out = True  # between forward and backward

    def draw(self, rng):
        dtype = pick(
            rng, cases.F32, cases.F32, cases.F32, cases.F32, cases.F32, cases.F64, *cases.LOW
        )
        s = draw_shape(rng)
        args = {
            "q": rng.normal(size=(s.batch, s.heads, s.m, s.d)),
            "k": rng.normal(size=(s.batch, s.kv_heads, s.n, s.d)),
            "v": rng.normal(size=(s.batch, s.kv_heads, s.n, s.dv)),
            **draw_options(rng, s),
        }
        spoilt = None
        if chance(rng, 0.1):
            spoilt = pick(rng, *(n for n in cases.FLOATING if n in args and n != "sinks"))
            spoilt += pick(rng, " nan", " nan", " inf", " -inf")
            spoil_rows(rng, args[spoilt.split()[0]], float(spoilt.split()[1]))
        constant = "p" in args and not spoilt and chance(rng, 0.25)
        if constant:
            args["p"] = constant_table(rng, *(args.pop(x) for x in ("p", "first", "beyond")))
        args = tensors(args, dtype)
        args = {n: strided(rng, x) if torch.is_tensor(x) else x for n, x in args.items()}
        grads = tuple(strided(rng, x) for x in cases.incoming(rng, args))
        grads = pick(rng, grads, grads, (grads[0], None), (None, grads[1]), ())
        wanted = (
            cases.FLOATING
            if chance(rng, 0.8)
            else tuple(n for n in cases.FLOATING if chance(rng, 0.5))
        )
        wanted = tuple(n for n in wanted if n in args and not (n == "p" and constant)) or ("q",)
        return args | {"grads": grads, "wanted": wanted, "spoilt": spoilt}

    def call(self, arguments):
        args, grads, wanted, _ = self._parts(arguments)
        return cases.run(self.function, args, *grads, wanted=wanted)

    def judge(self, arguments):
        """Judge a call. Inf counts as NaN, and an entry that is NaN then is not compared."""
        args, grads, _, spoilt = self._parts(arguments)
        if spoilt and "inf" in spoilt:
            for name in cases.FLOATING:
                if name in args:
                    args[name] = args[name].masked_fill(args[name].isinf(), math.nan)
        constant = not isinstance(args.get("p"), (torch.Tensor, type(None)))
        if constant:
            args["beyond"] = args["p"].beyond
            args["p"], args["first"] = rows_of(args["p"], args["k"], args.get("causal", True))
        with np.errstate(invalid="ignore"):
            exact = judge(args, *grads)
        if constant:  # the terms of a zone's product are larger than the rows that they make
            sizes = {name: np.full_like(x, largest(x)) for name, x in exact.sizes.items()}
            exact = exact._replace(sizes=sizes)
        return exact

    def check(self, results, exact, arguments):
        if arguments["spoilt"] and "inf" in arguments["spoilt"]:
            nan = {name: torch.from_numpy(np.isnan(exact.values[name])) for name in results}
            results = {name: x.masked_fill(nan[name], math.nan) for name, x in results.items()}
        cases.compare(results, exact, arguments["q"].dtype, "ops.attention", self.rounds_out)

    def same(self, one, other, arguments):
        """AVX2 and AVX-512 must agree. (A sum that underflows is 0 or -0.)"""
        for name in one:
            a, b = one[name], other[name]
            differ = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
            assert not differ, f"{name}: {differ} of {a.numel()} differ from another wide variant's"

    def spoilt(self, rng, arguments):
        """Put one tensor on the meta device, or change its kind of numbers or its shape."""
        tensors = [n for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.dim()]
        name, how = pick(rng, *tensors), rng.integers(3)
        x = arguments[name]
        if how == 0:
            x = x.to("meta")
        elif how == 1:
            x = x.long() if x.is_floating_point() else x.float()
        elif name == "bias":  # which may have any length
            x = x[None, None]
        else:
            axis = 2 if name == "v" else -1
            size = [3 if a == axis % x.dim() else n for a, n in enumerate(x.shape)]
            x = torch.cat([x, x.new_zeros(size)], axis)
        return arguments | {name: x}

    def refuse(self, arguments):
        args, *_ = self._parts(arguments)
        self.function(**args)

    @staticmethod
    def _parts(arguments):
        args = dict(arguments)
        return args, *(args.pop(name) for name in ("grads", "wanted", "spoilt"))


TARGETS = {"ops.attention": Attention()}
