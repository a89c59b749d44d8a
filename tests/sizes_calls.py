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


def A(*shape, dtype="float32", value=1):
    return np.broadcast_to(np.asarray(value, dtype), shape)


def E(*shape, dtype="float32", value=1):
    if max(shape, default=0) >= 2**63:
        raise ValueError("no tensor has such sizes")
    return torch.full((), value, dtype=getattr(torch, dtype)).expand(shape)


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


def a_float():
    return pick.choice(("float32", "float64", "float16", "bfloat16")[: 3 if SIDE == "numpy" else 4])


def real():
    return pick.choice(("float32", "float64"))


def X(*shape, dtype="float32", **value):
    """The source text of an array or a tensor."""
    value = "".join(f", {name}={x}" for name, x in value.items())
    return f"{'A' if SIDE == 'numpy' else 'E'}(*{shape}, dtype={dtype!r}{value})"


def function(name):
    return f"{'wavepe' if SIDE == 'numpy' else 'ops'}.{name}"


# ---- both sides: a name, arguments as source text, and the result's shape -----------------------
def relative_bias():
    b, h, m, n, w, d = sizes(6)
    dtype = pick.choice(("float32", "float64", "int8")[: 3 if SIDE == "numpy" else 2])
    leading = lead(b, h)
    p = (h, w, d) if leading and flag() else (w, d)
    given = f"{X(*leading, m, d, dtype=dtype)}, {X(*p, dtype=dtype)}, {n}"
    given += f", first={an_integer()}, beyond={beyond()!r}"
    return function("relative_bias"), given, (*leading, m, n)


def rope():
    b, h, m, d, pairs = sizes(5)
    name = pick.choice(("rope", "rope_", "rope_qk")[: 1 if SIDE == "numpy" else 3])
    dtype, of = a_float(), a_float()
    shape = (*lead(b, h), m, d)
    x = X(*shape, dtype=dtype)
    if name == "rope_":
        x += pick.choice(("", ".contiguous()"))
    if name == "rope_qk":
        other = (*shape[:-3], 2, m, d) if len(shape) > 2 else shape
        x += f", {X(*other, dtype=dtype)}"
    pairs = pick.choice((pairs, min(pairs, d // 2), d // 2))
    axes = (*lead(b), m) if SIDE == "torch" else pick.choice(((m,), (), lead(h, m)))
    table = X(*axes, pairs, dtype=of)
    given = f"{x}, {table}, {table}, interleaved={flag()}, inverse={flag()}"
    return function(name), given, None if name == "rope_qk" else shape


def rope_table():
    b, m, h, s = sizes(4)
    sections = pick.choice((None, [h], [h - min(h, s), min(h, s)]))
    leading = lead(b, m)
    axes = () if sections is None else (len(sections),)
    positions = X(*leading, *axes, dtype=pick.choice(("int8", "int64", "uint16")))
    given = f"{positions}, {X(h, dtype=a_float())}, precision={pick.choice(('exact', 'hf'))!r}"
    to = f"{'np' if SIDE == 'numpy' else 'torch'}.{a_float()}"
    return function("rope_table"), f"{given}, sections={sections}, dtype={to}", ((*leading, h),) * 2


def wavelet_table():
    w, d = sizes(2)
    kind = pick.choice(("ricker", "haar", "test_sizes", "db2"))
    of = pick.choice((f"{w}", X(w, dtype="int64"), X(w, dtype="uint8")))
    scale = X(d, dtype=a_float() if SIDE == "torch" or flag() else "int64")
    to = f", dtype=np.{a_float()}" if SIDE == "numpy" else ""
    return function("wavelet_table"), f"{of}, {scale}, {scale}, kind={kind!r}{to}", (w, d)


def attention_arguments():
    """Sizes, and the arguments of both operators: keyword arguments from p on."""
    b, hk, g, m, n, d, dv, w, r = sizes(9, 4)
    if m != 1 and max(d, dv) and n in SUMMED:
        n = pick.choice(LARGE)  # keys are packed
    dtype = a_float()
    if flag():
        m = n
    h = hk * g

    def of(*shape):
        return X(*shape, dtype=dtype)

    first = pick.choice((1, b))
    options = {"slopes": X(h), "window": f"{abs(an_integer())}"}
    if SIDE == "torch":
        options |= {
            "q_rel": of(b, h, m, d),
            "offset": pick.choice((X(b, dtype="int64"), X(dtype="int8"), X(1, dtype="int64"))),
            "key_mask": X(first, n, dtype="bool", value=flag()),
            "segments": X(first, n, dtype="int64"),
            "mask": X(first, pick.choice((1, h)), m, n, dtype="bool"),
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
        wide = "float64" if dtype == "float64" else "float32"
        parts["bias"] = X(*pick.choice(((w,), (h, w))), dtype=wide)
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
    given = joined(given, parts | {"return_lse": "True"})
    return function("attention"), given, ((b, h, m, dv), (b, h, m))


# ---- one of them ---------------------------------------------------------------------------------
def elementwise():
    a, b, c = sizes(3)
    name, dtype = pick.choice(("ricker", "morlet", "haar")), pick.choice(("float32", "int8"))
    shapes = [pick.choice(((), (a,), (b, a), (c, 1, 1))) for _ in range(3)]
    return f"wavepe.{name}", ", ".join(X(*s, dtype=dtype) for s in shapes), None


def numbers():
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


def skew():
    b, m, n, w = sizes(4)
    given = f"{X(*lead(b), m, w, dtype=real())}, {n}, {an_integer()}, {beyond()!r}"
    return "raw.relative_bias_skew", given, None


def unskew():
    b, m, n, w = sizes(4, 2)
    given = f"{X(*lead(b), m, n, dtype=real())}, {w}, {an_integer()}, {beyond()!r}"
    return "raw.relative_bias_unskew", given, None


def wavelet_table_backward():
    w, d = sizes(2, 0)
    dtype, kind = a_float(), pick.choice(("ricker", "haar", "test_sizes"))
    name = "sampled_wavelet_table_backward" if kind == "test_sizes" else "wavelet_table_backward"
    of, offsets = f"E({d}, dtype={dtype!r})", f"E({w}, dtype={pick.choice(('int64', 'uint8'))!r})"
    grad = f"E({w}, {d}, dtype={dtype!r})"
    return f"raw.{name}", f"{grad}, {offsets}, {of}, {of}, {kind!r}, None", ((d,), (d,))


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


BOTH = (relative_bias, attention, rope, rope_table, wavelet_table)
DRAWS = {
    "numpy": (*BOTH, elementwise, numbers),
    "torch": (*BOTH, skew, unskew, wavelet_table_backward, attention_forward, attention_backward,
              attention_forward, attention_backward),
}  # fmt: skip

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
        "ops.rope_table(E(3, dtype='int64'), E(2**24), precision='hf', dtype=torch.float16)",
        "ops.rope_table(E(2**48, dtype='int64'), E(3))",
        "ops.wavelet_table(E(2**48, dtype='int64'), E(3), E(3))",
        "ops.rope(E(1, 4), E(1, 2**62), E(1, 2**62))",
        "ops.rope_table(E(2**34, dtype='int8'), E(0))",
        "raw.relative_bias_unskew(E(1, 2**60), 1, 0, 'edge')",
        "ops.attention(E(1, 2**30, 0, 8), E(1, 2**30, 3, 8), E(1, 2**30, 3, 8))",
        "ops.attention(E(1, 0, 2, 1), E(1, 0, 2**36, 1), E(1, 0, 2**36, 1),"
        " key_mask=E(1, 2**36, dtype='bool'))",
        "ops.attention(E(2, 1, 2, 1), E(2, 1, 2**36, 1), E(2, 1, 2**36, 1),"
        " key_mask=E(2, 2**36, dtype='bool'))",
        "ops.attention(E(1, 1, 1, 1), E(1, 1, 1, 1), E(1, 1, 1, 1), block_table=E(1, 2**40,"
        " dtype='int32'), cu_seqlens_q=torch.arange(2), cu_seqlens_k=torch.tensor([0, 2**36]))",
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
    draws = DRAWS[side]
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
