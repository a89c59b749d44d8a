"""Attention of few queries against a cache of keys, which the decode kernel computes."""

import pytest
from attention_cases import OPTIONS, Shape, attention, compare, draw, judge, ops, run, torch
from cases import generator, wavelets
from tensors import threads

KEYS = 1536  # a part of the keys, WPE_DECODE_KEYS
FEW = 16  # the most queries, WPE_DECODE_QUERIES
CHOSEN = ["plain", "table", "edge", "slopes", "softcap", "table, q_rel, per head", "bias, edge"]


@pytest.mark.parametrize("option", CHOSEN)
@pytest.mark.parametrize("count", [1, 2, 7, FEW])
def test_few_queries_have_the_bits_of_the_whole(variant, option, count):
    """As long as the keys are one part."""
    for n in (17, 200, 450):
        arguments = draw(generator("decode", option), Shape(2, 6, 2, n, n, 24, 9), OPTIONS[option])
        whole = attention(**arguments)
        last = {n: x[:, :, -count:] for n in ("q", "q_rel") if (x := arguments.get(n)) is not None}
        assert torch.equal(attention(**arguments | last), whole[:, :, -count:]), n


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("count", [1, 7])
def test_zones_of_a_table_have_the_bits_of_the_whole(variant, count, window):
    table = ops.relative_table(wavelets(32, 300))
    assert table.tensors(torch.float32, "cpu")[2]  # zones
    for n in (225, 300, 450):
        arguments = draw(generator("zones"), Shape(2, 6, 2, n, n, 32, 9), {"causal": True})
        options = {"p": table, "window": window}
        whole = attention(**arguments, **options)
        found = attention(**arguments | {"q": arguments["q"][:, :, -count:]}, **options)
        assert torch.equal(found, whole[:, :, -count:]), n


@pytest.mark.parametrize("option", [*CHOSEN, "window", "key_mask", "everything"])
def test_parts_of_the_keys_are_merged(variant, option):
    for count, n in ((1, KEYS + 1), (5, 2 * KEYS), (3, 4 * KEYS - 7)):
        arguments = draw(generator("parts"), Shape(1, 2, 1, count, n, 8, 5), OPTIONS[option])
        exact = judge(arguments)
        compare(run(attention, arguments), exact, arguments["q"].dtype, option)


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


def test_rows_of_the_table_out_of_reach_are_not_read(variant):
    arguments = draw(generator("reach"), Shape(1, 4, 2, 2, 300, 8, 8), {"causal": True})
    p = torch.randn(400, 8)
    before = attention(**arguments, p=p, window=50)
    p[50:] = torch.nan
    assert torch.equal(attention(**arguments, p=p, window=50), before)


@pytest.mark.parametrize("tables", ["shared", "zones", "of each head"])
def test_threads_share_the_packed_table(variant, tables):
    """Key heads share a table, but not if their batch elements have other offsets."""
    n, found = 2 * KEYS + 9, {}
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
            found[count] = attention(**arguments)
    assert all(torch.equal(x, found[1]) for x in found.values())
    for b in range(3):  # each batch element alone has the same bits
        one = arguments | {n: arguments[n][b : b + 1] for n in ("q", "k", "v", "offset")}
        assert torch.equal(attention(**one), found[1][b : b + 1])
    for h in range(6) if tables == "of each head" else ():
        kv = slice(h // 2, h // 2 + 1)
        one = arguments | {"q": arguments["q"][:, h : h + 1], "p": arguments["p"][h]}
        one |= {name: arguments[name][:, kv] for name in ("k", "v")}
        assert torch.equal(attention(**one), found[1][:, h : h + 1])
