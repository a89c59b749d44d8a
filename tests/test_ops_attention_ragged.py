"""ops.attention of requests in one row, and keys in pages: each request as it is alone, to the bit.

Expected results come from a call for each request, and from the oracle.
"""

import numpy as np
import pytest
import wavepe
from attention_cases import (
    F32,
    F64,
    FLOATING,
    LOW,
    OPTIONS,
    Shape,
    attention,
    compare,
    draw,
    judge,
    ops,
    run,
    same,
    torch,
)
from cases import generator, soon
from tensors import of_transforms, threads

pytestmark = of_transforms
SHAPE = Shape(1, 4, 2, 0, 0, 24, 17)  # lengths are those of the requests
ONES = [(1, n) for n in (65, 0, 1, 2, 63, 64, 300, 1537, 193, 1600)]  # (queries, keys) of each
MIXED = [(0, 0), (17, 17), (1, 70), (5, 3), (0, 9), (100, 230), (16, 400), (2, 0), (1, 1), (3, 3)]
REFUSED = ("offset", "key_mask", "segments", "mask", "dropout_p")
T, ones, EYE, BIG = torch.tensor, torch.ones, torch.eye, 2**62


def everything(rng, s):
    return {n: x for n, x in OPTIONS["everything"](rng, s).items() if n not in REFUSED}


def in_row(rng, options, lengths, dtype=F32, **sizes):
    """Draw the arguments of a call with all requests."""
    queries, keys = (T([0, *np.cumsum(x)]) for x in zip(*lengths, strict=True))
    shape = SHAPE._replace(m=int(queries[-1]), n=int(keys[-1]), **sizes)
    arguments = draw(rng, shape, OPTIONS.get(str(options), options), dtype)
    return arguments | {"cu_seqlens_q": queries, "cu_seqlens_k": keys}


def paged(rng, arguments, page, layout=torch.Tensor.contiguous):
    """Move keys to pages in any order. Rows and numbers that no request owns are NaN and 77."""
    lengths = arguments["cu_seqlens_k"].diff()
    counts = (-(-lengths // page)).tolist()
    order = torch.from_numpy(rng.permutation(sum(counts) + 2))
    table = torch.full((len(counts), max(counts) + 2), 77, dtype=torch.int32)
    for row, numbers in zip(table, order.split([*counts, 2]), strict=False):
        row[: len(numbers)] = numbers
    blocks = {"block_table": table}
    for name in "kv":
        rows = arguments[name][0].split(lengths.tolist(), 1)
        rows = [torch.cat([x, x.new_full((2, -x.shape[1] % page, x.shape[2]), torch.nan)], 1)
                for x in rows]  # fmt: skip
        pages = torch.cat(rows, 1).unflatten(1, (-1, page)).transpose(0, 1)
        blocks[name] = pages.new_full((len(order), *pages.shape[1:]), torch.nan)
        blocks[name][order[:-2]] = pages
        blocks[name] = layout(blocks[name])
    return arguments | blocks


def each_alone(arguments):
    """Yield (where its queries lie in the row, its arguments) of each request."""
    args = {n: x for n, x in arguments.items() if not n.startswith("cu_")}
    queries, keys = (arguments[f"cu_seqlens_{x}"].tolist() for x in "qk")
    for r in range(len(queries) - 1):
        of_q, of_k = slice(*queries[r : r + 2]), slice(*keys[r : r + 2])
        places = {"q": of_q, "k": of_k, "v": of_k, "q_rel": of_q}
        yield of_q, args | {n: args[n][:, :, x] for n, x in places.items() if n in args}


def check(arguments, *others, oracle=False):
    """Compare the requests of a call with calls of each alone; `others` must return the same."""
    results = run(attention, arguments)
    for place, alone in each_alone(arguments):
        of_one = {name: x[:, :, place] for name, x in results.items()}
        same(of_one, run(attention, alone), f"queries {place}")
        if oracle:
            compare(of_one, judge(alone), alone["q"].dtype, f"queries {place}")
    for other in others:
        same(run(attention, other), results)


KEPT = [
    name
    for name, option in OPTIONS.items()
    if not set(REFUSED) & set(draw(generator(name), Shape(1, 2, 1, 5, 5, 4, 4), option))
]
SOON = ("plain", "table, q_rel, per head", "bias, both sides, edge", "table in a window")


@pytest.mark.parametrize("option", soon(KEPT, *SOON))
def test_each_request_has_its_own_bits(variant, option):
    rng = generator("ragged", option)
    for lengths in (ONES, MIXED):
        arguments = in_row(rng, option, lengths)
        check(arguments, paged(rng, arguments, 16), oracle=True)


@pytest.mark.parametrize("dtype", [F32, F64, *LOW], ids=str)
def test_dtypes_and_threads(variant, dtype):
    rng = generator("ragged", dtype)
    arguments = in_row(rng, everything, ONES + MIXED, dtype)
    check(arguments, in_pages := paged(rng, arguments, 64), oracle=True)
    for count in (2, 5):
        with threads(count):
            check(arguments, in_pages)


@pytest.mark.parametrize("causal", [True, False])
def test_zones_of_a_constant_table(variant, causal):
    """Requests of up to 224 keys read rows, longer ones the zones that they reach."""
    rng = generator("ragged zones")
    table = ops.relative_table(wavepe.encoding("wavelet").table(2000, 24, causal=causal))
    assert len(table.tensors(F32, "cpu")[2]) > 2
    for lengths in (ONES + MIXED, [(1, 224), (2, 225)], [(1, 1800), (30, 30)], [(1, 1800)]):
        arguments = in_row(rng, {"causal": causal}, lengths) | {"p": table}
        check(arguments, paged(rng, arguments, 48))


LAYOUTS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens first": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "keys beside values": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("page", [1, 7, 192, 2000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_any_size_and_layout(page, layout):
    rng = generator("pages", page)
    for window, dtype in ((None, torch.bfloat16), (1, F32), (40, F32), (200, F32)):
        arguments = in_row(rng, {"window": window}, ONES + MIXED, dtype)
        tokens = {n: arguments[n].mT.contiguous().mT for n in "qkv"}
        check(arguments, paged(rng, arguments, page, LAYOUTS[layout]), arguments | tokens)


def test_shared_pages():
    """Requests share a prefix, and all pages may be one that is expanded."""
    rng = generator("shared")
    lengths, table = [(1, 20), (4, 23), (2, 16)], T([[3, 1, 0], [3, 1, 2], [3, 1, 9]])
    pages = torch.randn(5, 2, 8, 24)
    for blocks in (pages, pages[:1].expand(5, 2, 8, 24)):
        rows = [blocks[table[r, : -(-n // 8)]].transpose(0, 1).flatten(1, 2)[:, :n]
                for r, (_, n) in enumerate(lengths)]  # fmt: skip
        arguments = in_row(rng, "table", lengths, dv=24)
        arguments |= dict.fromkeys("kv", torch.cat(rows, 1)[None])
        check(arguments, arguments | {"k": blocks, "v": blocks, "block_table": table})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint64], ids=str)
def test_integers(dtype):
    rng = generator("integers")
    arguments = in_row(rng, "table", [(1, 30), (2, 0), (40, 70)])
    in_pages = paged(rng, arguments, 16)
    numbers = {n: x.to(dtype).repeat_interleave(2)[::2] for n, x in arguments.items() if "cu" in n}
    table = {"block_table": in_pages["block_table"].mT.contiguous().mT.to(dtype)}
    check(arguments, arguments | numbers, in_pages | numbers | table)
    none = {n: arguments[n][:, :, :0] for n in "qkv"}
    for count in (1, 2**40 if dtype in (torch.int64, torch.int32) else 5):  # others are copied
        empty = none | dict.fromkeys(numbers, torch.zeros(1, dtype=dtype).expand(count))
        for args in (empty, empty | {"q": none["q"].clone().requires_grad_()}):
            assert attention(**args).shape == (1, 4, 0, 17)


# ---- other ways ----------------------------------------------------------------------------------


def test_gradients_are_those_of_each_request():
    """They have a table with its zones, or are refused in a compiled program."""
    rng = generator("gradients")
    table = ops.relative_table(wavepe.encoding("wavelet").table(900, 24, causal=False))
    for options, dtype in (({"causal": False}, F32), (everything, F64)):
        arguments = in_row(rng, options, [*MIXED, (1, 900)], dtype)
        arguments["p"] = arguments.get("p", table)
        in_pages = paged(rng, arguments, 16)
        leaves = {n: arguments[n] for n in FLOATING if torch.is_tensor(arguments.get(n))}
        want = attention(**arguments), attention(**in_pages)
        for x in (*leaves.values(), in_pages["k"]):
            x.requires_grad_()
        out = attention(**arguments)
        assert torch.equal(attention(**in_pages), want[1])
        assert torch.equal(out, want[0])
        torch.cat([attention(**alone) for _, alone in each_alone(arguments)], 2).sum().backward()
        grads = torch.autograd.grad(out.sum(), leaves.values())
        torch.testing.assert_close(grads, tuple(x.grad for x in leaves.values()))
    with pytest.raises(RuntimeError, match="attention_ragged has no gradient"):
        torch.compile(attention, backend="aot_eager")(**arguments)


def test_gradients_need_the_values_of_cu_seqlens():
    args = ROW | {"q": ROW["q"].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="needs the values of cu_seqlens"):
        attention(**{name: x.to("meta") for name, x in args.items()})
    with pytest.raises(RuntimeError, match="needs the values of cu_seqlens"):
        torch.vmap(lambda x: attention(**(ROW | {"cu_seqlens_q": x})))(T([[0, 1, 3], [0, 2, 3]]))


@pytest.mark.parametrize("pages", [False, True])
def test_one_graph_for_all_requests(pages):
    rng = generator("compiled")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (ONES, MIXED, MIXED + ONES):
        arguments = in_row(rng, everything, lengths)
        arguments = paged(rng, arguments, 16) if pages else arguments
        with torch._dynamo.config.patch(error_on_recompile=lengths is not ONES):
            assert torch.equal(compiled(**arguments), attention(**arguments))


def test_opcheck():
    arguments = in_row(generator("opcheck"), "table, q_rel, per head", [(1, 5), (3, 3)])
    first = [arguments.pop(x) for x in ("cu_seqlens_q", "cu_seqlens_k", "q", "k", "v")]
    first.insert(2, None)
    torch.library.opcheck(torch.ops.wavepe.attention_ragged.default, tuple(first), arguments)


# ---- what must be refused ------------------------------------------------------------------------

ROW = {"q": ones(1, 4, 3, 8), "k": ones(1, 2, 5, 8), "v": ones(1, 2, 5, 6)}
ROW |= {"cu_seqlens_q": T([0, 1, 3]), "cu_seqlens_k": T([0, 3, 5])}
PAGES = ROW | {"k": ones(4, 2, 2, 8), "v": ones(4, 2, 2, 6), "block_table": T([[3, 1], [0, -1]])}
UNREAD = PAGES | {"block_table": T([[3, 1], [8, 0]])}
VALUES = [  # words of the message, the call, what is changed
    ("cu_seqlens_q must begin with 0, got 1", ROW, {"cu_seqlens_q": T([1, 1, 3])}),
    ("cu_seqlens_q must not decrease, got 3 after 4", ROW, {"cu_seqlens_q": T([0, 4, 3])}),
    ("must not decrease, got -4611.* after 3", ROW, {"cu_seqlens_k": T([0, 3, -BIG])}),
    ("must not decrease, got 5 after 4611", PAGES, {"cu_seqlens_k": T([0, BIG, 5])}),
    ("got -1 after 0", ROW, {"cu_seqlens_q": T([0, 2**64 - 1, 3], dtype=torch.uint64)}),
    ("end with the 3 queries of q, got 2", ROW, {"cu_seqlens_q": T([0, 1, 2])}),
    ("end with the 3 queries of q, got 4611", PAGES, {"cu_seqlens_q": T([0, 1, BIG])}),
    ("end with the 5 keys of k, got 0", ROW, {"cu_seqlens_k": T([0]).expand(3)}),
    ("4 pages, got 4 for page 1 of request 0", PAGES, {"block_table": T([[3, 4], [0, 0]])}),
    ("4 pages, got -1 for page 0 of request 1", PAGES, {"block_table": T([[3, 1], [-1, 0]])}),
    ("4 pages, got 2147483647", PAGES, {"block_table": T([[3, 2**31 - 1], [0, 0]]).int()}),
    ("4 pages, got 4611", PAGES, {"block_table": T([[BIG, 1], [0, 0]])}),
    ("0 pages, got 3 for", PAGES, {"k": ones(0, 2, 2, 8), "v": ones(0, 2, 2, 6)}),
    ("request 1 has 5 keys, but .*2 pages of 2 keys", PAGES, {"cu_seqlens_k": T([0, 3, 8])}),
    ("request 1 has 4611.* keys, but ", PAGES, {"cu_seqlens_k": T([0, 3, BIG])}),
    ("pages of 0 keys", PAGES, {"k": ones(4, 2, 0, 8), "v": ones(4, 2, 0, 6)}),
    ("got 8 for page 0 of request 1", UNREAD, {"cu_seqlens_q": T([0, 3, 3])}),
]  # fmt: skip
SHAPES = [
    ("cu_seqlens_k must be .*3.* and .*4", ROW, {"cu_seqlens_k": T([0, 3, 5, 5])}),
    (r"must be .*R \+ 1.*0", ROW, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), T([]).long())),
    (r"must be .*R \+ 1.*1, 3", ROW, {"cu_seqlens_q": T([[0, 1, 3]])}),
    ("cu_seqlens_k must be on .*, got meta", ROW, {"cu_seqlens_k": T([0, 3, 5], device="meta")}),
    ("cu_seqlens_q must .*float32", ROW, {"cu_seqlens_q": T([0.0, 1, 3])}),
    ("give both .*, got cu_seqlens_k alone", ROW, {"cu_seqlens_q": None}),
    ("got cu_seqlens_q and block_table alone", PAGES, {"cu_seqlens_k": None}),
    ("cu_seqlens_k must be a .*got list", PAGES, {"cu_seqlens_k": [0, 3, 5]}),
    ("block_table must be .*R, P.*3, 3", PAGES, {"block_table": EYE(3).long()}),
    ("block_table must .*bool", PAGES, {"block_table": EYE(2).bool()}),
    ("block_table must be a .*got int", ROW, {"block_table": 3}),
    ("pages of k must have a last stride of 1, got 2", PAGES, {"k": ones(4, 2, 8, 2).mT}),
    ("pages of v must have a last stride of 1, got 2", PAGES, {"v": ones(4, 2, 6, 2).mT}),
    (r"\(blocks, Hk, page, d\)", PAGES, {"v": ones(3, 2, 2, 6)}),
    (r"\(blocks, Hk, page, d\)", PAGES, {"v": ones(2, 2, 6)}),
    ("must be .*multiple|heads", PAGES, {"q": ones(1, 3, 3, 8)}),
    ("in one row: q must be .*2, 4", ROW, {n: ROW[n].expand(2, -1, -1, -1) for n in "qkv"}),
    ("leave out offset", ROW, {"offset": 2}),
    ("leave out .*key_mask", ROW, {"key_mask": ones(1, 5).bool()}),
    ("leave out .* mask and", ROW, {"mask": ones(1, 1, 3, 5).bool()}),
    ("leave out .*dropout_p", PAGES, {"dropout_p": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("way", ["kernel", "gradients", "meta"])
@pytest.mark.parametrize(("words", "args", "changed"), VALUES + SHAPES)
def test_refused(words, args, changed, way):
    args = args | changed
    if way == "gradients":
        args["q"] = args["q"].clone().requires_grad_()
    if way == "meta":
        if words in [x[0] for x in VALUES] or "meta" in words:
            return  # these tensors have no values
        args = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in args.items()}
    default = torch.device("meta" if way == "gradients" else "cpu")  # it changes nothing
    with default, pytest.raises(RuntimeError, match=words):
        attention(**args)


def test_memory_of_all_requests():
    """Each needs 2^48 bytes at least, and of 2^16 requests the sum is 2^64."""
    starts, row = torch.arange(2**16 + 1), ones(2**19)
    args = {"q": row.expand(1, 4, 17 << 16, -1), "k": row.expand(1, 4, 2**25, -1)}
    args |= {"v": args["k"][..., :1], "block_table": T([[0]]).expand(2**16, 1)}
    with pytest.raises(RuntimeError, match="out of memory: attention needs"):
        attention(**args, cu_seqlens_q=17 * starts, cu_seqlens_k=starts << 25)
