"""The bits of ops.attention: the same for any number of threads, in every run, for AVX2 and
AVX-512; and what the encodings promise: causality, and lengths that contain one another."""

import pytest
import wavepe
from attention_cases import (
    F64,
    OPTIONS,
    Shape,
    attention,
    draw,
    each_function,
    incoming,
    run,
    same,
    torch,
)
from cases import generator, using
from tensors import threads

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


def case(number, dtype=torch.float32):
    shape, option = CASES[number]
    rng = generator("bits", number)
    arguments = draw(rng, shape, OPTIONS[option], dtype)
    return arguments, incoming(rng, arguments)


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads(variant, number, dtype):
    arguments, grads = case(number, dtype)
    with threads(1):
        want = run(attention, arguments, *grads)
    for count in (2, 3, 7):
        with threads(count):
            same(run(attention, arguments, *grads), want, f"{count} threads")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_run(variant, number):
    arguments, grads = case(number)
    with threads(2):
        same(run(attention, arguments, *grads), run(attention, arguments, *grads))


@pytest.mark.skipif(
    not {"avx2", "avx512"} <= set(wavepe.variants()), reason="this CPU does not run both"
)
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, F64])
def test_avx2_is_avx512(number, dtype):
    arguments, grads = case(number, dtype)
    results = []
    for name in ("avx2", "avx512"):
        with using(name):
            results.append(run(attention, arguments, *grads))
    same(*results)


def test_float64_on_any_number_of_threads(variant):
    for number in (1, 3, 4):
        arguments, grads = case(number, F64)
        with threads(1):
            want = run(attention, arguments, *grads)
        with threads(3):
            same(run(attention, arguments, *grads), want)


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


CAUSAL = ["plain", "table", "edge", "slopes", "softcap", "table, q_rel, per head"]
CAUSAL += ["bias", "bias, edge"]


@each_function
@pytest.mark.parametrize("option", CAUSAL)
def test_later_tokens_change_no_earlier_output(variant, function, option):
    for n, cut in ((9, 4), (70, 33), (400, 257)):
        rng = generator("causal", option)
        arguments = draw(rng, Shape(1, 2, 1, n, n, 16, 8), OPTIONS[option])
        before = function(**arguments)
        for value in (7.0, 1e30, torch.nan):
            changed = dict(arguments)
            for name in ("q", "k", "v", "q_rel"):
                if changed.get(name) is not None:
                    changed[name] = changed[name].clone()
                    changed[name][:, :, cut:] = value
            after = function(**changed)
            assert torch.equal(after[:, :, :cut], before[:, :, :cut]), f"{n} {value}"


@each_function
@pytest.mark.parametrize("option", CAUSAL)
def test_a_length_is_a_part_of_twice_the_length(variant, function, option):
    """Relative positions: the first rows of a long sequence are those of its first half."""
    for n in (5, 40, 200):
        rng = generator("twice", option)
        long = draw(rng, Shape(1, 2, 1, 2 * n, 2 * n, 16, 8), OPTIONS[option])
        short = {
            name: x[:, :, :n] if name in ("q", "k", "v", "q_rel") else x for name, x in long.items()
        }
        torch.testing.assert_close(
            function(**short), function(**long)[:, :, :n], rtol=1e-5, atol=1e-5
        )


@each_function
@pytest.mark.parametrize("option", CAUSAL)
def test_a_cached_decode_is_the_full_pass(variant, function, option):
    """The last queries alone, one at a time and a few, give the rows of the whole."""
    for n in (9, 70, 300):
        arguments = draw(generator("decode"), Shape(2, 4, 2, n, n, 16, 8), OPTIONS[option])
        whole = function(**arguments)
        for count in (1, 2, min(n, 40)):
            last = {
                n: x[:, :, -count:] for n in ("q", "q_rel") if (x := arguments.get(n)) is not None
            }
            got = function(**arguments | last)
            torch.testing.assert_close(got, whole[:, :, -count:], rtol=1e-5, atol=1e-5)


@each_function
def test_without_positions_a_permutation_permutes(variant, function):
    rng = generator("permute")
    arguments = draw(rng, Shape(1, 2, 1, 37, 37, 16, 8), {"causal": False})
    order = torch.from_numpy(rng.permutation(37))
    moved = {name: arguments[name][:, :, order] for name in "qkv"}
    want = function(**arguments)[:, :, order]
    torch.testing.assert_close(function(**moved, causal=False), want, rtol=1e-5, atol=1e-5)


@each_function
def test_offset_moves_the_queries(variant, function):
    """A short sequence with offset o gives the rows from o on of the whole sequence."""
    arguments = draw(generator("moved"), Shape(2, 2, 1, 50, 50, 16, 8), OPTIONS["edge"])
    whole = function(**arguments)
    starts = torch.tensor([7, 30])
    part = torch.stack([arguments["q"][b, :, s : s + 11] for b, s in enumerate(starts.tolist())])
    got = function(**arguments | {"q": part, "offset": starts})
    for b, s in enumerate(starts.tolist()):
        torch.testing.assert_close(got[b], whole[b, :, s : s + 11], rtol=1e-5, atol=1e-5)
