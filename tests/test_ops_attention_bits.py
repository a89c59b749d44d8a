"""The bits of ops.attention: the same for any number of threads, in every run, in every variant of
wide vectors; what the encodings promise: causality, and lengths that contain one another; and few
queries against a cache of keys, which the decode kernel computes with the bits of the whole."""

import pytest
from attention_cases import (
    F32,
    F64,
    OPTIONS,
    TESTED,
    Shape,
    attention,
    check,
    composed,
    draw,
    each_function,
    incoming,
    ops,
    run,
    same,
    torch,
)
from cases import generator, using, wavelets
from tensors import assert_keeps_no_memory, threads
from variants import WIDE

CASES = [
    (Shape(1, 1, 1, 700, 700, 16, 16), "plain"),
    (Shape(1, 1, 1, 600, 1100, 24, 8), "table"),
    (Shape(1, 1, 1, 1500, 1500, 8, 8), "edge"),
    (Shape(1, 3, 1, 300, 300, 16, 16), "everything"),
    (Shape(2, 8, 2, 70, 90, 16, 16), "table, q_rel, per head"),
    (Shape(3, 4, 4, 33, 33, 32, 32), "packed training"),
    (Shape(1, 2, 1, 1, 3000, 32, 32), "table"),
    (Shape(4, 8, 2, 1, 65, 16, 16), "batched decoding"),
    (Shape(1, 1, 1, 5, 5, 8, 8), "everything"),
    (Shape(1, 2, 2, 400, 400, 16, 16), "table, both sides, per head"),
    (Shape(1, 1, 1, 1500, 1500, 8, 8), "bias, edge"),
    (Shape(3, 4, 2, 150, 230, 8, 8), "bias of all heads"),
    (Shape(1, 2, 1, 900, 700, 8, 8), "bias, both sides, edge"),
]


def case(number, dtype):
    shape, option = CASES[number]
    rng = generator("bits", number)
    arguments = draw(rng, shape, OPTIONS[option], dtype)
    return arguments, incoming(rng, arguments)


DTYPES = [F32, torch.bfloat16, torch.float16, F64]


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        pytest.param(i, dtype, marks=() if j in (0, 1 + i % 3) else pytest.mark.slow)
        for i in range(len(CASES))
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_threads_runs_and_wide_variants_change_no_bit(every_variant, number, dtype):
    arguments, grads = case(number, dtype)
    of_wide = None
    for name in TESTED:
        with using(name):
            with threads(1):
                want = run(attention, arguments, *grads)
            for count in (2, 7):
                with threads(count):
                    same(run(attention, arguments, *grads), want, f"{name}, {count} threads")
        if name in WIDE:
            same(want, of_wide or want, f"{name} and an earlier one")
            of_wide = want


@pytest.mark.parametrize("option", ["plain", "table", "table, q_rel, per head", "edge", "bias"])
def test_a_head_does_not_depend_on_its_neighbours(variant, option):
    """A call with many batch rows and heads gives the same bits as calls with one."""
    arguments = draw(generator("alone"), Shape(2, 4, 2, 50, 61, 16, 16), OPTIONS[option])
    whole = attention(**arguments)
    for b, h in ((0, 0), (1, 3)):
        one = {n: arguments[n][b : b + 1, h // 2, None] for n in "kv"}
        one |= {
            n: x[b : b + 1, h, None] for n in ("q", "q_rel") if (x := arguments.get(n)) is not None
        }
        rest = {n: x for n, x in arguments.items() if n not in one}
        if rest.get("p") is not None and rest["p"].dim() == 3:
            rest["p"] = rest["p"][h, None]
        if "bias" in rest:
            rest["bias"] = rest["bias"][h]
        assert torch.equal(attention(**one, **rest)[0, 0], whole[b, h])


@pytest.mark.parametrize("queries", [1, 60])
def test_calls_keep_no_memory(queries):
    """As the test of this name in test_ops_every.py, for attention and its gradients."""
    rng = generator("memory")
    arguments = draw(rng, Shape(1, 2, 1, queries, 60, 16, 16), OPTIONS["table, q_rel, per head"])
    grads = incoming(rng, arguments)
    assert_keeps_no_memory(lambda: run(attention, arguments, *grads))


CAUSAL = ["plain", "table", "edge", "slopes", "softcap", "table, q_rel, per head"]
CAUSAL += ["bias", "bias, edge"]


@each_function
@pytest.mark.parametrize("option", CAUSAL)
def test_later_tokens_change_no_earlier_output(variant, function, option):
    """Neither what they are, to the bit, nor how many there are."""
    for n, cut in ((9, 4), (70, 33), (400, 257)):
        rng = generator("causal", option)
        arguments = draw(rng, Shape(1, 2, 1, n, n, 16, 8), OPTIONS[option])
        before = function(**arguments)[:, :, :cut]
        of_tokens = {name: x for name, x in arguments.items() if name in ("q", "k", "v", "q_rel")}
        for value in (7.0, 1e30, torch.nan):
            changed = {name: x.clone() for name, x in of_tokens.items()}
            for x in changed.values():
                x[:, :, cut:] = value
            after = function(**arguments | changed)
            assert torch.equal(after[:, :, :cut], before), f"{n} {value}"
        short = {name: x[:, :, :cut] for name, x in of_tokens.items()}
        torch.testing.assert_close(function(**arguments | short), before, rtol=1e-5, atol=1e-5)


KEYS = 1536  # a part of the keys, WPE_DECODE_KEYS
FEW = 16  # the most queries, WPE_DECODE_QUERIES
DOTS = 8  # up to so many rows of a key head, scores are summed in another order (FEW_ROWS)
CHOSEN = ["plain", "table", "edge", "slopes", "softcap", "table, q_rel, per head", "bias, edge"]
CHOSEN += ["narrow table, both sides, edge", "sinks"]


@each_function
@pytest.mark.parametrize("option", CHOSEN)
@pytest.mark.parametrize("count", [1, 2, 7, FEW, 40])
def test_a_cached_decode_is_the_full_pass(variant, function, option, count):
    """To the bit, if the keys are one part and the queries are few, but not very few."""
    to_the_bit = function is not composed and DOTS < 3 * count <= 3 * FEW  # 3 heads for a key head
    for n in (17, 200, 450):
        arguments = draw(generator("decode", option), Shape(2, 6, 2, n, n, 24, 9), OPTIONS[option])
        whole = function(**arguments)[:, :, -count:]
        last = {n: x[:, :, -count:] for n in ("q", "q_rel") if (x := arguments.get(n)) is not None}
        results = function(**arguments | last)
        torch.testing.assert_close(results, whole, rtol=1e-5, atol=1e-5)
        assert not to_the_bit or torch.equal(results, whole), n


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("count", [3, 7])
def test_zones_of_a_table_have_the_bits_of_the_whole(variant, count, window):
    table = ops.relative_table(wavelets(32, 300))
    assert table.tensors(torch.float32, "cpu")[2]  # zones
    for n in (225, 300, 450):
        arguments = draw(generator("zones"), Shape(2, 6, 2, n, n, 32, 9), {"causal": True})
        options = {"p": table, "window": window}
        whole = attention(**arguments, **options)
        results = attention(**arguments | {"q": arguments["q"][:, :, -count:]}, **options)
        assert torch.equal(results, whole[:, :, -count:]), n


@pytest.mark.parametrize("option", [*CHOSEN, "window", "key_mask", "everything"])
def test_parts_of_the_keys_are_merged(variant, option):
    for count, n in ((1, KEYS + 1), (5, 2 * KEYS), (3, 4 * KEYS - 7)):
        shape = Shape(1, 2, 1, count, n, 8, 5)
        check(attention, generator("parts"), shape, OPTIONS[option], backward=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_layout_of_memory_changes_no_bit(variant, dtype):
    """Dense keys and values are read where they are, others are converted first."""
    shape = Shape(2, 4, 2, 3, 300, 64, 64)
    dense = draw(generator("layout"), shape, OPTIONS["table"], dtype)
    wide = {name: torch.stack([dense[name]] * 2, -1) for name in ("q", "k", "v", "p")}
    strided = dense | {name: x[..., 1] for name, x in wide.items()}
    assert torch.equal(attention(**strided), attention(**dense))


@pytest.mark.parametrize("hide", ["causal", "window", "key_mask", "mask"])
def test_hidden_keys_may_hold_anything(variant, hide):
    """Also those that one query sees and another does not."""
    m, n = 4, 230
    arguments = draw(generator("hidden"), Shape(1, 4, 2, m, n, 16, 40), OPTIONS["table"])
    arguments |= {"causal": True}
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    if hide == "window":
        arguments["window"] = 100
        hidden |= torch.ones(m, n, dtype=torch.bool).tril(n - m - 100)
    elif hide == "key_mask":
        arguments["key_mask"] = torch.arange(n)[None] % 7 != 3
        hidden |= ~arguments["key_mask"]
    elif hide == "mask":
        hidden |= torch.eye(m, n, dtype=torch.bool)
        arguments["mask"] = ~hidden[None, None]
    before = attention(**arguments)
    for i in range(m):
        spoilt = {name: arguments[name].clone() for name in ("k", "v")}
        for x in spoilt.values():
            x[:, :, hidden[i]] = torch.nan
        after = attention(**arguments | spoilt)
        assert torch.equal(after[:, :, i], before[:, :, i])


@pytest.mark.parametrize("tables", ["shared", "zones", "of each head"])
def test_threads_share_the_packed_table(variant, tables):
    """Key heads share a table, but not if their batch elements have other offsets."""
    n, results = 2 * KEYS + 9, {}
    arguments = draw(generator("share"), Shape(3, 6, 3, 2, n, 32, 9), OPTIONS["table"])
    p = torch.from_numpy(wavelets(32, n)).float()
    arguments |= {"causal": True, "offset": torch.tensor([n - 2, n - 2, n - 40])}
    arguments["p"] = {
        "shared": p,
        "zones": ops.relative_table(p),
        "of each head": torch.stack([p * (h + 1) for h in range(6)]),
    }[tables]
    for count in (1, 2, 3, 7):
        with threads(count):
            results[count] = attention(**arguments)
    assert all(torch.equal(x, results[1]) for x in results.values())
    for b in range(3):  # each batch element alone has the same bits
        one = arguments | {n: arguments[n][b : b + 1] for n in ("q", "k", "v", "offset")}
        assert torch.equal(attention(**one), results[1][b : b + 1])
    for h in range(6) if tables == "of each head" else ():
        kv = slice(h // 2, h // 2 + 1)
        one = arguments | {"q": arguments["q"][:, h : h + 1], "p": arguments["p"][h]}
        one |= {name: arguments[name][:, kv] for name in ("k", "v")}
        assert torch.equal(attention(**one), results[1][:, h : h + 1])
