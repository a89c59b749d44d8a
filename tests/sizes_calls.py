"""Make random calls with sizes that no memory can hold.

tests/test_sizes.py runs this in a process of its own:
`python tests/sizes_calls.py {numpy|torch} SEED COUNT`.

Arrays are broadcast and tensors expanded (stride 0), with sizes up to 2^62 beside 0, 1 and few.
Each call is printed before it starts. One that takes too long is ended by SIGPROF, for C code does
not look at Python's signals.
"""

import random
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import wavepe

SECONDS = 5  # a call; all but a few take less than a millisecond
MEMORY = 2**30  # what calls may allocate, so that machines with much memory do not fill it
SMALL = (0, 1, 1, 2, 3, 5)
LARGE = (2**31, 2**31 + 3, 2**33, 2**40, 2**57, 2**60, 2**61, 2**62 - 1, 2**62)
# Sums over this many elements are refused; over 2^31 they are right, and take seconds.
SUMMED = (2**57, 2**60, 2**61, 2**62 - 1, 2**62)

pick = random.Random()


def A(*shape, dtype=np.float32, value=1):
    return np.broadcast_to(np.asarray(value, dtype), shape)


def sizes(count, *summed):
    """`count` sizes, one of them or two large; those numbered in `summed` from SUMMED."""
    drawn = [pick.choice(SMALL) for _ in range(count)]
    for _ in range(pick.choice((1, 1, 2))):
        at = pick.randrange(count)
        drawn[at] = pick.choice(SUMMED if at in summed else LARGE)
    return drawn


def an_integer():
    return pick.choice((0, 0, -1, 3, 2**31, -(2**60), 2**62, -(2**62)))


def beyond():
    return pick.choice(("zero", "edge"))


def flag():
    return pick.choice((True, False))


def lead(*axes):
    """Some of the leading axes, from the last one on."""
    return tuple(axes[len(axes) - pick.randrange(len(axes) + 1) :])


# ---- NumPy: a name, arguments as source text, and the result's shape ----------------------------


def np_relative_bias():
    b, h, m, n, w, d = sizes(6)
    dtype = pick.choice(("np.float32", "np.float64", "np.int8"))
    q, p = (*lead(b, h), m, d), (*lead(h), w, d)
    given = f"A(*{q}, dtype={dtype}), A(*{p}), {n}, first={an_integer()}, beyond={beyond()!r}"
    return "wavepe.relative_bias", given, None


def np_attention():
    b, hk, g, m, n, d, dv, w = sizes(8, 4)
    if m != 1 and max(d, dv) and n in SUMMED:
        n = pick.choice(LARGE)  # keys are packed
    dtype = pick.choice(("np.float32", "np.float64", "np.float16"))
    parts = [f"A(*{(b, hk * g, m, d)}, dtype={dtype})", f"A(*{(b, hk, n, d)}, dtype={dtype})"]
    parts.append(f"A(*{(b, hk, n, dv)}, dtype={dtype})")
    if flag():
        parts.append(f"p=A(*{(*lead(hk * g), w, d)}), first={an_integer()}, beyond={beyond()!r}")
    if flag():
        parts.append(f"slopes=A({hk * g})")
    if flag():
        parts.append(f"bias=A(*{(*lead(hk * g), w)}), bias_first={an_integer()}")
        parts.append(f"bias_beyond={beyond()!r}")
    if flag():
        parts.append(f"window={abs(an_integer())}")
    parts.append(f"causal={flag()}, return_lse=True")
    return "wavepe.attention", ", ".join(parts), ((b, hk * g, m, dv), (b, hk * g, m))


def np_rope():
    b, m, d, h = sizes(4)
    dtype = pick.choice(("np.float16", "np.float32", "np.float64"))
    shape = (*lead(b), m, d)
    table = ((m, h), (m, min(h, d // 2)), (min(h, d // 2),))
    of = f"A(*{pick.choice(table)}, dtype={pick.choice(('np.float16', 'np.float32'))})"
    return "wavepe.rope", f"A(*{shape}, dtype={dtype}), {of}, {of}, interleaved={flag()}", shape


def np_rope_table():
    b, m, h, s = sizes(4)
    dtype = pick.choice(("np.int8", "np.int64"))
    precision, to = pick.choice(("exact", "hf")), pick.choice(("np.float16", "np.float32"))
    sections = pick.choice((None, [h], [h - min(h, s), min(h, s)]))
    leading = lead(b, m)
    axes = () if sections is None else (len(sections),)
    given = f"A(*{(*leading, *axes)}, dtype={dtype}), A({h}, dtype={to}), precision={precision!r}"
    return "wavepe.rope_table", f"{given}, sections={sections}", ((*leading, h),) * 2


def np_wavelet_table():
    w, d = sizes(2)
    kind = pick.choice(("ricker", "haar", "test_sizes", "db2"))
    of = pick.choice((f"{w}", f"A({w}, dtype=np.int64)", f"A({w}, dtype=np.uint8)"))
    scale = f"A({d}, dtype={pick.choice(('np.float32', 'np.float64', 'np.int64'))})"
    to = pick.choice(("np.float16", "np.float32", "np.float64"))
    return "wavepe.wavelet_table", f"{of}, {scale}, {scale}, kind={kind!r}, dtype={to}", (w, d)


def np_elementwise():
    a, b, c = sizes(3)
    name, dtype = pick.choice(("ricker", "morlet", "haar")), pick.choice(("np.float32", "np.int8"))
    shapes = [pick.choice(((), (a,), (b, a), (c, 1, 1))) for _ in range(3)]
    return f"wavepe.{name}", ", ".join(f"A(*{s}, dtype={dtype})" for s in shapes), None


def np_numbers():
    a, b = sizes(2)
    return pick.choice(
        (
            ("wavepe.alibi_slopes", f"{a}", (a,)),
            ("wavepe.wavelet_grid", f"{a}, {max(b, 1)}", ((a,), (a,))),
            ("wavepe.wavelet_grid", f"{a}, A({b}), min_scale=1", ((a,), (a,))),
            ("wavepe.rope_frequencies", f"{a}, 100.0", None),
            ("wavepe.rope_frequencies", f"8, 100.0, length={a}, max_length={b}", None),
            ("wavepe.sinusoidal", f"A({a}, 1), {b}", (a, 1, b)),
        )
    )


NUMPY = (np_relative_bias, np_attention, np_rope, np_rope_table, np_wavelet_table)
NUMPY += (np_elementwise, np_numbers)

# ---- torch ---------------------------------------------------------------------------------------


def E(*shape, dtype="float32", value=1):
    if max(shape, default=0) >= 2**63:
        raise ValueError("no tensor has such sizes")
    return torch.full((), value, dtype=getattr(torch, dtype)).expand(shape)


def real():
    return pick.choice(("float32", "float64"))


def a_float():
    return pick.choice(("float32", "float64", "bfloat16", "float16"))


def relative_bias():
    b, h, m, n, w, d = sizes(6)
    dtype, leading = real(), lead(b, h)
    p = (h, w, d) if leading and flag() else (w, d)
    given = f"E(*{(*leading, m, d)}, dtype={dtype!r}), E(*{p}, dtype={dtype!r}), {n}"
    given += f", first={an_integer()}, beyond={beyond()!r}"
    return "ops.relative_bias", given, (*leading, m, n)


def skew():
    b, m, n, w = sizes(4)
    given = f"E(*{(*lead(b), m, w)}, dtype={real()!r}), {n}, {an_integer()}, {beyond()!r}"
    return "raw.relative_bias_skew", given, None


def unskew():
    b, m, n, w = sizes(4, 2)
    given = f"E(*{(*lead(b), m, n)}, dtype={real()!r}), {w}, {an_integer()}, {beyond()!r}"
    return "raw.relative_bias_unskew", given, None


def rope():
    b, h, m, d, pairs = sizes(5)
    name = pick.choice(("rope", "rope_", "rope_qk"))
    dtype, of = a_float(), a_float()
    shape = (*lead(b, h), m, d)
    x = f"E(*{shape}, dtype={dtype!r})"
    if name == "rope_":
        x += pick.choice(("", ".contiguous()"))
    if name == "rope_qk":
        other = (*shape[:-3], 2, m, d) if len(shape) > 2 else shape
        x += f", E(*{other}, dtype={dtype!r})"
    pairs = pick.choice((pairs, min(pairs, d // 2), d // 2))
    table = f"E(*{(*lead(b), m, pairs)}, dtype={of!r})"
    given = f"{x}, {table}, {table}, interleaved={flag()}, inverse={flag()}"
    return f"ops.{name}", given, None if name == "rope_qk" else shape


def rope_table():
    b, m, h, s = sizes(4)
    dtype = pick.choice(("int8", "int64", "uint16"))
    sections = pick.choice((None, [h], [h - min(h, s), min(h, s)]))
    leading = lead(b, m)
    axes = () if sections is None else (len(sections),)
    given = f"E(*{(*leading, *axes)}, dtype={dtype!r}), E({h}, dtype={a_float()!r})"
    given += f", precision={pick.choice(('exact', 'hf'))!r}, sections={sections}"
    return "ops.rope_table", f"{given}, dtype=torch.{a_float()}", ((*leading, h),) * 2


def wavelet_table():
    w, d = sizes(2)
    dtype, kind = a_float(), pick.choice(("ricker", "haar", "test_sizes", "db2"))
    of = pick.choice((f"{w}", f"E({w}, dtype='int64')", f"E({w}, dtype='uint8')"))
    given = f"{of}, E({d}, dtype={dtype!r}), E({d}, dtype={dtype!r}), kind={kind!r}"
    return "ops.wavelet_table", given, (w, d)


def wavelet_table_backward():
    w, d = sizes(2, 0)
    dtype, kind = a_float(), pick.choice(("ricker", "haar", "test_sizes"))
    name = "sampled_wavelet_table_backward" if kind == "test_sizes" else "wavelet_table_backward"
    of, offsets = f"E({d}, dtype={dtype!r})", f"E({w}, dtype={pick.choice(('int64', 'uint8'))!r})"
    grad = f"E({w}, {d}, dtype={dtype!r})"
    return f"raw.{name}", f"{grad}, {offsets}, {of}, {of}, {kind!r}, None", ((d,), (d,))


def attention_arguments():
    """Sizes, and the arguments of both operators: keyword arguments from p on."""
    b, hk, g, m, n, d, dv, w, r = sizes(9, 4)
    if m != 1 and max(d, dv) and n in SUMMED:
        n = pick.choice(LARGE)  # keys are packed
    dtype = a_float()
    if flag():
        m = n
    h = hk * g

    def of(*shape, dtype=dtype):
        return f"E(*{shape}, dtype={dtype!r})"

    first = pick.choice((1, b))
    options = {
        "q_rel": of(b, h, m, d),
        "slopes": of(h, dtype="float32"),
        "window": f"{abs(an_integer())}",
        "offset": pick.choice((of(b, dtype="int64"), of(dtype="int8"), of(1, dtype="int64"))),
        "key_mask": f"E({first}, {n}, dtype='bool', value={flag()})",
        "segments": of(first, n, dtype="int64"),
        "mask": of(first, pick.choice((1, h)), m, n, dtype="bool"),
        "softcap": "3.0",
        "dropout_p": "0.5, seed=E(dtype='int64')",
    }
    parts = {name: text for name, text in options.items() if pick.random() < 0.25}
    parts["causal"] = f"{flag()}"
    if flag():
        parts["p"] = of(*pick.choice(((w, d), (h, w, d))))
        parts |= {"first": f"{an_integer()}", "beyond": f"{beyond()!r}"}
    else:
        parts.pop("q_rel", None)
    if flag():
        of_bias = pick.choice(((w,), (h, w)))
        parts["bias"] = of(*of_bias, dtype="float64" if dtype == "float64" else "float32")
        parts |= {"bias_first": f"{an_integer()}", "bias_beyond": f"{beyond()!r}"}
    if m != n:
        parts.pop("segments", None)
    given = f"{of(b, h, m, d)}, {of(b, hk, n, d)}, {of(b, hk, n, dv)}"
    zones = pick.choice(((of(w, r), of(d, r)), (of(w, d), of(d, 0)), (of(w, r),) * 4))
    return (b, h, hk, m, n, d, dv), dtype, given, parts, f"[{', '.join(zones)}]"


def joined(given, parts):
    return ", ".join((given, *(f"{name}={text}" for name, text in parts.items())))


def attention():
    (b, h, _, m, _, _, dv), _, given, parts, _ = attention_arguments()
    if "dropout_p" in parts:
        parts["dropout_p"] = "0.5"
    if "offset" in parts and flag():
        parts["offset"] = f"{an_integer()}"
    return (
        "ops.attention",
        joined(given, parts | {"return_lse": "True"}),
        ((b, h, m, dv), (b, h, m)),
    )


def attention_forward():
    (b, h, _, m, _, _, dv), _, given, parts, zones = attention_arguments()
    if "p" in parts and flag():
        parts["zones"] = zones
    return "raw.attention_forward", joined(given, parts), ((b, h, m, dv), (b, h, m))


def attention_backward():
    (b, h, _, m, _, _, dv), dtype, given, parts, zones = attention_arguments()
    wide = "float64" if dtype == "float64" else "float32"
    out, lse = f"E(*{(b, h, m, dv)}, dtype={dtype!r})", f"E(*{(b, h, m)}, dtype={wide!r})"
    before = f"{out}, {pick.choice((lse, 'None'))}, {out}, {lse}, "
    if "p" in parts and flag():
        parts[pick.choice(("zones", "p_grad"))] = "True"
    if parts.get("zones"):
        parts["zones"] = zones
    if "bias" in parts and flag():
        parts["bias_grad"] = "True"
    return "raw.attention_backward", before + joined(given, parts), None


def merge_attention():
    parts, m, dv = sizes(3, 0)
    dtype = a_float()
    return "ops.merge_attention", f"E({parts}, {m}, {dv}, dtype={dtype!r}), E({parts}, {m})", None


def relative_table():
    h, w, d = sizes(3)
    given = pick.choice(("E", "A"))
    shape = pick.choice(((w, d), (h, w, d)))
    dtype = repr(a_float()) if given == "E" else "np.float64"
    return "ops.relative_table", f"{given}(*{shape}, dtype={dtype}), 0, {beyond()!r}", None


TORCH = (relative_bias, skew, unskew, rope, rope_table, wavelet_table, wavelet_table_backward)
TORCH += (attention, attention_forward, attention_backward, attention_forward, attention_backward)
TORCH += (merge_attention, relative_table)

# Calls that once crashed or did not end.
KNOWN = {
    "numpy": [
        "wavepe.relative_bias(A(1, 2**57), A(1, 2**57), 1)",
        "wavepe.relative_bias(A(0, 2**60), A(1, 2**60), 1)",
        "wavepe.relative_bias(A(1, 0), A(2**60, 0), 1)",
        "wavepe.relative_bias(A(2**31, 0, 4), A(3, 4), 5)",
        "wavepe.rope_table(A(2**48, dtype=np.int64), A(3))",
        "wavepe.wavelet_table(A(2**48, dtype=np.int64), A(3), A(3))",
        "wavepe.rope_table(A(2**58, dtype=np.int64), A(0))",
        "wavepe.wavelet_table(A(2**58, dtype=np.int64), A(0), A(0))",
    ],
    "torch": [
        "ops.relative_bias(E(1, 2**61, dtype='float64'), E(1, 2**61, dtype='float64'), 1)",
        "ops.relative_bias(E(1, 0), E(2**60, 0), 1)",
        "ops.relative_bias(E(2, 0), E(2**40, 0), 5)",
        "ops.relative_table(E(4, 2**24))",
        "ops.rope_table(E(3, dtype='int64'), E(2**24), precision='hf', dtype=torch.float16)",
        "ops.rope_table(E(2**48, dtype='int64'), E(3))",
        "ops.wavelet_table(E(2**48, dtype='int64'), E(3), E(3))",
        "ops.rope(E(1, 4), E(1, 2**62), E(1, 2**62))",
        "ops.rope_table(E(2**34, dtype='int8'), E(0))",
        "raw.relative_bias_unskew(E(1, 2**60), 1, 0, 'edge')",
        "ops.merge_attention(E(2**40, 0, 4), E(2**40, 0))",
        "ops.attention(E(1, 2**30, 0, 8), E(1, 2**30, 3, 8), E(1, 2**30, 3, 8))",
        "ops.attention(E(1, 0, 2, 1), E(1, 0, 2**36, 1), E(1, 0, 2**36, 1),"
        " key_mask=E(1, 2**36, dtype='bool'))",
        "ops.attention(E(2, 1, 2, 1), E(2, 1, 2**36, 1), E(2, 1, 2**36, 1),"
        " key_mask=E(2, 2**36, dtype='bool'))",
    ],
}


# ---- running them --------------------------------------------------------------------------------


def arguments(*given, **named):
    return given, named


def check_error(error):
    allowed = (ValueError, MemoryError) if SIDE == "numpy" else (RuntimeError,)
    message = str(error)
    if isinstance(error, ImportError) and "[pywt]" in message:
        return  # of the wavelet db2, where PyWavelets is missing
    assert isinstance(error, allowed), f"raised {type(error).__name__}: {message}"
    for vague in ("API call failed", "bad_alloc", "max_size", "internal"):
        assert vague not in message, f"says {message}"
    assert message.strip(), f"{type(error).__name__} says nothing"


def check_result(result, shape):
    """Assert that a result has the right shape, and that its memory can be read."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
    for x, wanted in zip(results, shapes, strict=False):
        if wanted is not None:
            assert tuple(x.shape) == tuple(wanted), f"shape {tuple(x.shape)}, not {wanted}"


def watch(seconds):
    """Seconds of computing, as other processes may be busy too; and of waiting, should it hang."""
    signal.setitimer(signal.ITIMER_PROF, 2 * seconds)
    signal.setitimer(signal.ITIMER_REAL, 12 * seconds)


def run(name, given, shape):
    """Make a call; return False if a shape is too large even for an empty tensor."""
    try:
        positional, named = eval(f"arguments({given})")
        function = eval(name)
    except (RuntimeError, ValueError, MemoryError):
        return False
    print(f"{name}({given})", flush=True)
    watch(SECONDS)
    try:
        check_result(function(*positional, **named), shape)
    except (AssertionError, TypeError, NameError):
        raise
    except Exception as error:
        check_error(error)
    watch(0)
    return True


def limit_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main(side, seed, count):
    pick.seed(seed)
    wavepe.register_wavelet("test_sizes", np.sin, derivative=np.cos)
    for call in KNOWN[side]:
        name, given = call[:-1].split("(", 1)
        assert run(name, given, None), call
    done = {}
    draws = NUMPY if side == "numpy" else TORCH
    for number in range(count):
        draw = draws[number % len(draws)]
        if run(*draw()):
            done[draw.__name__] = done.get(draw.__name__, 0) + 1
    print("calls:", *(f"{name}={number}" for name, number in done.items()))


if __name__ == "__main__":
    SIDE = sys.argv[1]
    if SIDE == "torch":
        import torch
        from wavepe import ops

        raw = torch.ops.wavepe
        torch.set_num_threads(2)
        ops.attention(*(torch.ones(4, 2, 5, 8) for _ in range(3)))  # starts the threads
    limit_memory()
    main(SIDE, int(sys.argv[2]), int(sys.argv[3]))
