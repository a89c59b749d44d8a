"""ops.attention of several requests in one row, and with pages: the bits of each request alone."""

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
    draw,
    judge,
    ops,
    run,
    same,
    soon,
    torch,
)
from attention_cases import compare as within
from cases import generator
from tensors import of_transforms, threads

pytestmark = of_transforms
SHAPE = Shape(1, 4, 2, 0, 0, 24, 17)  # without the lengths
REFUSED = ("offset", "key_mask", "segments", "mask", "dropout_p")
ONES = [(1, n) for n in (65, 0, 1, 2, 63, 64, 300, 1537, 193)]  # queries and keys of each request
MIXED = [(0, 0), (17, 17), (1, 70), (5, 3), (0, 9), (100, 230), (16, 400), (2, 0), (1, 1), (3, 3)]
INTS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint64)


def starts(lengths, dtype=torch.int64):
    return torch.tensor([0, *np.cumsum(lengths)]).to(dtype)


def in_row(rng, option, lengths, dtype=F32, shape=SHAPE):
    """Draw the arguments of all requests; `option` is a name, or arguments by name."""
    m, n = (sum(x) for x in zip(*lengths, strict=True))
    options = OPTIONS[option] if isinstance(option, str) else option
    arguments = draw(rng, shape._replace(m=m, n=n), options, dtype)
    queries, keys = zip(*lengths, strict=True)
    return arguments | {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)}


def each_alone(arguments):
    """Yield (where its queries lie in the row, the arguments of its own call) of each request."""
    args = {n: x for n, x in arguments.items() if not n.startswith("cu_")}
    queries, keys = (arguments[f"cu_seqlens_{x}"].tolist() for x in "qk")
    for r in range(len(queries) - 1):
        of_q, of_k = slice(*queries[r : r + 2]), slice(*keys[r : r + 2])
        tokens = {"q": of_q, "k": of_k, "v": of_k, "q_rel": of_q}
        yield of_q, args | {n: args[n][:, :, x] for n, x in tokens.items() if n in args}


def paged(rng, arguments, page, dtype=torch.int32, layout=torch.Tensor.contiguous):
    """Move keys to pages in any order; what no request owns is NaN, or a number out of range."""
    keys = arguments["cu_seqlens_k"]
    counts = [-(-n // page) for n in keys.diff().tolist()]
    numbers = rng.permutation(sum(counts) + 2)
    table = torch.full((len(counts), max(counts, default=0) + 2), 77, dtype=dtype)
    pages = {}
    for name in "kv":
        x = arguments[name]
        blocks = x.new_full((len(numbers), x.shape[1], page, x.shape[3]), torch.nan)
        place = iter(numbers.tolist())
        for r, count in enumerate(counts):
            for i in range(count):
                table[r, i] = number = next(place)
                begin = int(keys[r]) + i * page
                rows = x[0, :, begin : min(begin + page, int(keys[r + 1]))]
                blocks[number, :, : rows.shape[1]] = rows
        pages[name] = layout(blocks)
    return arguments | pages | {"block_table": table}


def check(arguments, paged_arguments=None, oracle=True):
    """Each request has the bits that it has alone, and these are the oracle's within bounds."""
    results = run(attention, paged_arguments or arguments)
    for place, alone in each_alone(arguments):
        found = {name: x[:, :, place] for name, x in results.items()}
        same(found, run(attention, alone), f"queries {place.start}..{place.stop}")
        if oracle:
            within(found, judge(alone), alone["q"].dtype, f"queries {place.start}..{place.stop}")


KEPT = [
    name
    for name, option in OPTIONS.items()
    if not set(REFUSED) & draw(generator(name), Shape(1, 2, 1, 5, 5, 4, 4), option).keys()
]
SOON = ("plain", "table, q_rel, per head", "edge from 2, per head", "bias, both sides, edge")
SOON += ("sinks", "table in a window", "bias, slopes, softcap, scale")


@pytest.mark.parametrize("option", soon(KEPT, *SOON))
@pytest.mark.parametrize("lengths", [ONES, MIXED], ids=["ones", "mixed"])
def test_each_request_has_its_own_bits(variant, lengths, option):
    rng = generator("ragged", option)
    arguments = in_row(rng, option, lengths)
    check(arguments)
    check(arguments, paged(rng, arguments, 16), oracle=False)


def everything(rng, s):
    return {n: x for n, x in OPTIONS["everything"](rng, s).items() if n not in REFUSED}


@pytest.mark.parametrize("dtype", [F32, F64, *LOW], ids=str)
def test_dtypes(variant, dtype):
    rng = generator("ragged", dtype)
    for lengths in (ONES, MIXED):
        arguments = in_row(rng, everything, lengths, dtype)
        check(arguments)
        check(arguments, paged(rng, arguments, 64), oracle=False)


@pytest.mark.parametrize("causal", [True, False])
def test_zones_of_a_constant_table(variant, causal):
    """Requests of up to 224 keys read rows, longer ones the zones that they reach."""
    rng = generator("ragged zones")
    table = ops.relative_table(wavepe.encoding("wavelet").table(2000, 24, causal=causal))
    assert len(table.tensors(F32, "cpu")[2]) > 2
    for lengths in (ONES, MIXED, [(1, 224), (2, 225)], [(1, 1800), (30, 30)], [(1, 1800)]):
        arguments = in_row(rng, {"causal": causal}, lengths) | {"p": table}
        check(arguments, oracle=False)
        check(arguments, paged(rng, arguments, 48), oracle=False)


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("page", [1, 7, 16, 192, 2000])
def test_pages_of_any_size(page, window):
    rng = generator("pages", page, window)
    for dtype in (F32, torch.bfloat16):
        arguments = in_row(rng, {"window": window}, ONES + MIXED, dtype)
        check(arguments, paged(rng, arguments, page), oracle=False)


LAYOUTS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens first": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "keys beside values": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second block": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Pages need a last stride of 1, and rows do not."""
    rng = generator("layouts")
    arguments = in_row(rng, "table, q_rel, per head", ONES + MIXED)
    check(arguments, paged(rng, arguments, 16, layout=LAYOUTS[layout]), oracle=False)
    tokens = {n: x.mT.contiguous().mT for n, x in arguments.items() if n in ("q", "k", "v")}
    check(arguments, arguments | tokens, oracle=False)


def test_shared_pages():
    """Two requests with one prefix, and one that is the prefix; the blocks are expanded, too."""
    rng = generator("shared")
    pages = torch.randn(5, 2, 8, 24)
    table = torch.tensor([[3, 1, 0], [3, 1, 2], [3, 1, 9]])
    lengths = [(1, 20), (4, 23), (2, 16)]
    for blocks in (pages, pages[:1].expand(5, 2, 8, 24)):
        arguments = in_row(rng, "table", lengths, shape=SHAPE._replace(dv=24))
        rows = [
            blocks[table[r, : -(-n // 8)]].transpose(0, 1).flatten(1, 2)[:, :n]
            for r, (_, n) in enumerate(lengths)
        ]
        arguments |= dict.fromkeys("kv", torch.cat(rows, 1)[None])
        in_pages = arguments | dict.fromkeys("kv", blocks) | {"block_table": table}
        check(arguments, in_pages, oracle=False)


def test_threads_change_no_bit():
    rng = generator("threads")
    arguments = in_row(rng, everything, (ONES + MIXED) * 3)
    in_pages = paged(rng, arguments, 16)
    with threads(1):
        want = run(attention, arguments)
    for count in (1, 2, 5):
        with threads(count):
            for args in (arguments, in_pages):
                same(run(attention, args), want, f"{count} threads")


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(dtype):
    """Integers may have any dtype and stride; expanded ones mean that all requests are empty."""
    rng = generator("integers")
    arguments = in_row(rng, "table", [(1, 30), (2, 0), (40, 70)])
    in_pages = paged(rng, arguments, 16, dtype)
    numbers = {n: x.to(dtype).repeat_interleave(2)[::2] for n, x in arguments.items() if "cu" in n}
    table = in_pages["block_table"].mT.contiguous().mT
    check(arguments, arguments | numbers, oracle=False)
    check(arguments, in_pages | numbers | {"block_table": table}, oracle=False)
    count = 2**40 if dtype in INTS[:2] else 5  # others are copied
    empty = dict.fromkeys(numbers, torch.zeros(1, dtype=dtype).expand(count))
    none = {n: arguments[n][:, :, :0] for n in "qkv"}
    assert attention(**none, **empty).shape == (1, 4, 0, 17)
    assert attention(**none, **{n: x[:1] for n, x in empty.items()}).shape == (1, 4, 0, 17)


# ---- other ways ----------------------------------------------------------------------------------


def test_gradients_are_those_of_each_request():
    """Calls with gradients run request by request."""
    rng = generator("gradients")
    for pages in (False, True):
        arguments = in_row(rng, everything, MIXED, F64)
        given = paged(rng, arguments, 16) if pages else arguments
        leaves = {n: given[n].requires_grad_() for n in FLOATING if n not in ("k", "v")}
        out, lse = attention(**given, return_lse=True)
        assert torch.equal(out, attention(**given))
        grads = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), leaves.values())
        want = [torch.zeros_like(x) for x in leaves.values()]
        for _, alone in each_alone(arguments | leaves):
            out, lse = attention(**alone, return_lse=True)
            of_one = torch.autograd.grad(
                out.sum() + lse[lse.isfinite()].sum(), leaves.values(), materialize_grads=True
            )
            want = [a + b for a, b in zip(want, of_one, strict=True)]
        for name, a, b in zip(leaves, grads, want, strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_a_constant_table_with_gradients():
    """It keeps its zones, and so its bits."""
    rng = generator("constant")
    table = ops.relative_table(wavepe.encoding("wavelet").table(900, 24))
    arguments = in_row(rng, {}, [(1, 900), (40, 300)]) | {"p": table}
    out = attention(**arguments)
    arguments["q"].requires_grad_()
    assert torch.equal(out, attention(**arguments))
    with pytest.raises(RuntimeError, match="attention_ragged has no gradient"):
        torch.compile(attention, backend="aot_eager")(**arguments)


@pytest.mark.parametrize("pages", [False, True])
def test_one_graph_for_all_requests(pages):
    rng = generator("compiled")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False), torch.no_grad():
        for lengths in (ONES, MIXED, MIXED + ONES):
            arguments = in_row(rng, everything, lengths)
            arguments = paged(rng, arguments, 16) if pages else arguments
            assert torch.equal(compiled(**arguments), attention(**arguments))


def test_opcheck_and_forward_mode():
    rng = generator("opcheck")
    arguments = in_row(rng, "table, q_rel, per head", [(1, 5), (3, 3)])
    requests = (arguments.pop("cu_seqlens_q"), arguments.pop("cu_seqlens_k"), None)
    raw = torch.ops.wavepe.attention_ragged.default
    torch.library.opcheck(raw, (*requests, *(arguments.pop(x) for x in "qkv")), arguments)


# ---- what must be refused ------------------------------------------------------------------------


def call(pages, **changed):
    """A call of requests of 1 + 2 queries and 3 + 2 keys, two keys a page."""
    k, v = ((4, 2, 2, 8), (4, 2, 2, 6)) if pages else ((1, 2, 5, 8), (1, 2, 5, 6))
    args = {"q": torch.ones(1, 4, 3, 8), "k": torch.ones(k), "v": torch.ones(v)}
    args |= {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 3, 5])}
    if pages:
        args["block_table"] = torch.tensor([[3, 1], [0, -1]])
    return args | changed


T, BIG = torch.tensor, 2**62
NO_BLOCKS = {"k": torch.ones(0, 2, 2, 8), "v": torch.ones(0, 2, 2, 6)}
NO_KEYS = {"k": torch.ones(4, 2, 0, 8), "v": torch.ones(4, 2, 0, 6)}
TWO_ROWS = {"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 2, 5, 8), "v": torch.ones(2, 2, 5, 6)}
UNREAD = {"cu_seqlens_q": T([0, 0, 3]), "block_table": T([[9, 1], [0, 0]])}
WRAPPED = T([0, 2**64 - 1, 3], dtype=torch.uint64)
VALUES = [  # words of the message, whether with pages, what is changed
    ("cu_seqlens_q must begin with 0, got 1", False, {"cu_seqlens_q": T([1, 1, 3])}),
    ("cu_seqlens_k must begin with 0, got -1", False, {"cu_seqlens_k": T([-1, 3, 5])}),
    ("cu_seqlens_q must not decrease, got 3 after 4", False, {"cu_seqlens_q": T([0, 4, 3])}),
    ("must not decrease, got -4611.* after 3", False, {"cu_seqlens_k": T([0, 3, -BIG])}),
    ("must not decrease, got 5 after 4611", True, {"cu_seqlens_k": T([0, BIG, 5])}),
    ("must not decrease, got -1 after 0", False, {"cu_seqlens_q": WRAPPED}),
    ("end with the 3 queries of q, got 2", False, {"cu_seqlens_q": T([0, 1, 2])}),
    ("end with the 3 queries of q, got 4611", True, {"cu_seqlens_q": T([0, 1, BIG])}),
    ("end with the 5 keys of k, got 6", False, {"cu_seqlens_k": T([0, 3, 6])}),
    ("end with the 5 keys of k, got 0", False, {"cu_seqlens_k": T([0]).expand(3)}),
    ("end with the 3 queries of q, got 0", True, {"cu_seqlens_q": T([0]).expand(3)}),
    ("4 pages, got 4 for page 1 of request 0", True, {"block_table": T([[3, 4], [0, 0]])}),
    ("4 pages, got -1 for page 0 of request 1", True, {"block_table": T([[3, 1], [-1, 0]])}),
    ("4 pages, got 2147483647", True, {"block_table": T([[3, 2**31 - 1], [0, 0]]).int()}),
    ("4 pages, got 4611", True, {"block_table": T([[BIG, 1], [0, 0]])}),
    ("0 pages, got 3 for", True, NO_BLOCKS),
    ("request 1 has 5 keys, but .*2 pages of 2 keys", True, {"cu_seqlens_k": T([0, 3, 8])}),
    ("request 1 has 4611.* keys, but ", True, {"cu_seqlens_k": T([0, 3, BIG])}),
    ("request 0 has 3 keys, but .* 0 pages", True, {"block_table": torch.zeros(2, 0).long()}),
    ("request 0 has 3 keys, but .* pages of 0 keys", True, NO_KEYS),
    ("got 9 for page 0 of request 0", True, UNREAD),
]  # fmt: skip
SHAPES = [
    ("cu_seqlens_k must be .*3.* and .*4", False, {"cu_seqlens_k": T([0, 3, 5, 5])}),
    ("must be .*R \\+ 1.*0", False, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), T([]).long())),
    ("must be .*R \\+ 1.*1, 3", False, {"cu_seqlens_q": T([[0, 1, 3]])}),
    ("must be .*R \\+ 1", False, {"cu_seqlens_k": T(0)}),
    ("block_table must be .*R, P.*3, 2", True, {"block_table": torch.zeros(3, 2).long()}),
    ("block_table must be .*R, P.*4", True, {"block_table": T([3, 1, 0, 0])}),
    ("cu_seqlens_q must .*float32", False, {"cu_seqlens_q": T([0.0, 1, 3])}),
    ("block_table must .*bool", True, {"block_table": torch.ones(2, 2).bool()}),
    ("pages of k must have a last stride of 1, got 2", True, {"k": torch.ones(4, 2, 8, 2).mT}),
    ("pages of v must have a last stride of 1, got 2", True, {"v": torch.ones(4, 2, 6, 2).mT}),
    ("(blocks, Hk, page, d)|k must be", True, {"v": torch.ones(3, 2, 2, 6)}),
    ("(blocks, Hk, page, d)|k must be", True, {"v": torch.ones(2, 2, 6)}),
    ("must be .*multiple|heads", True, {"q": torch.ones(1, 3, 3, 8)}),
    ("in one row: q must be .*2, 4, 3, 8", True, {"q": torch.ones(2, 4, 3, 8)}),
    ("in one row: q must be .*2, 4, 3, 8", False, TWO_ROWS),
    ("leave out offset", False, {"offset": T(3)}),
    ("leave out .*key_mask", False, {"key_mask": torch.ones(1, 5).bool()}),
    ("leave out .*mask and", False, {"mask": torch.ones(1, 1, 3, 5).bool()}),
    ("leave out .*dropout_p", True, {"dropout_p": 0.5}),
    ("cu_seqlens_q must be a .*Tensor, got NoneType", False, {"cu_seqlens_q": None}),
    ("cu_seqlens_k must be a .*Tensor, got NoneType", True, {"cu_seqlens_k": None}),
    ("cu_seqlens_q must be a torch.Tensor, got list", False, {"cu_seqlens_q": [0, 1, 3]}),
    ("block_table must be a torch.Tensor, got int", False, {"block_table": 3}),
    ("sinks must be", False, {"sinks": torch.ones(3)}),
    ("window", False, {"window": -1}),
]  # fmt: skip


@pytest.mark.parametrize("way", ["kernel", "gradients", "meta"])
@pytest.mark.parametrize(("words", "pages", "changed"), VALUES + SHAPES)
def test_refused(words, pages, changed, way):
    args = call(pages, **changed)
    if way == "gradients":
        args["q"].requires_grad_()
    if way == "meta":
        if words in [x[0] for x in VALUES]:
            return  # these tensors have no values
        args = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    with pytest.raises(RuntimeError, match=words):
        attention(**args)
