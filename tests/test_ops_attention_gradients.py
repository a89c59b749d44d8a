"""Gradients of ops.attention: gradcheck over the options, through lse, and what autograd asks for
beside."""

import contextlib
import itertools

import pytest
from attention_cases import (
    F32,
    F64,
    FLOATING,
    OPTIONS,
    SEED,
    Shape,
    attention,
    compare,
    composed,
    draw,
    each_function,
    incoming,
    judge,
    run,
    same,
    torch,
)
from cases import by_turns, generator, soon

TINY = [Shape(2, 2, 1, 3, 4, 2, 3), Shape(1, 2, 2, 1, 5, 3, 1), Shape(1, 2, 1, 3, 2, 2, 1)]


def leaves_of(arguments):
    return [name for name in FLOATING if arguments.get(name) is not None]


def calls(function, arguments):
    """out and lse as a function of the floating tensors alone; the same dropout every time."""
    names = leaves_of(arguments)

    def call(*leaves):
        torch.manual_seed(SEED)
        args = arguments | dict(zip(names, leaves, strict=True))
        out, lse = function(**args, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return call, [arguments[name].detach().requires_grad_() for name in names]


@pytest.mark.parametrize(("option", "shape"), by_turns(OPTIONS, TINY))
def test_gradcheck(option, shape):
    """Along a random direction. The grid of test_ops_attention.py holds every entry, of the
    composition and of each variant too, against the oracle's derivatives."""
    if option == "table of no columns":
        pytest.skip("gradcheck takes no tensor without elements")
    rng = generator("gradcheck", option)
    call, leaves = calls(attention, draw(rng, shape, OPTIONS[option], F64))
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("option", soon(["bias", "edge from 2, per head", "everything"], "bias"))
def test_gradgradcheck_of_the_composition(option):
    call, leaves = calls(composed, draw(generator("second"), TINY[0], OPTIONS[option], F64))
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("option", ["plain", "table", "everything"])
def test_double_backward_says_what_to_do(variant, option):
    call, leaves = calls(attention, draw(generator("twice"), TINY[0], OPTIONS[option], F64))
    first = torch.autograd.grad(call(*leaves)[0].pow(2).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative in autograd; use torch\.func"):
        torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)


@each_function
@pytest.mark.parametrize("option", ["plain", "table, q_rel", "everything"])
def test_through_out_and_through_lse(variant, function, option):
    """Either alone; together they are in the grid of test_ops_attention.py."""
    rng = generator("lse", option)
    arguments = draw(rng, Shape(2, 4, 2, 23, 30, 16, 12), OPTIONS[option])
    grads = incoming(rng, arguments)
    for part in ((grads[0], None), (None, grads[1])):
        results = run(function, arguments, *part)
        compare(results, judge(arguments, *part), F32, option)
        assert part[0] is not None or not results["v"].any()


def test_only_the_gradients_that_are_wanted(variant):
    rng = generator("wanted")
    arguments = draw(rng, Shape(2, 4, 2, 19, 26, 16, 12), OPTIONS["everything"])
    grads = incoming(rng, arguments)
    whole = run(attention, arguments, *grads)
    for wanted in itertools.chain(*(itertools.combinations(FLOATING, n) for n in (1, 2, 3, 4))):
        results = run(attention, arguments, *grads, wanted=wanted)
        assert set(results) == {"out", "lse", *wanted}
        same(results, {name: whole[name] for name in results}, f"{wanted}")
    leaf = arguments["k"].clone().requires_grad_()
    attention(**arguments | {"k": leaf}).sum().backward()
    assert arguments["q"].grad is None
    assert leaf.grad is not None


def test_nothing_is_recorded_without_need(variant):
    arguments = draw(generator("no grad"), TINY[0], OPTIONS["table"])
    out = attention(**arguments)
    assert not out.requires_grad
    learned = {n: arguments[n].clone().requires_grad_() for n in leaves_of(arguments)}
    with torch.no_grad():
        assert not attention(**learned).requires_grad
    with torch.inference_mode():
        assert torch.equal(attention(**learned), out)
    assert attention(**learned).requires_grad


def test_the_graph_can_be_used_again(variant):
    call, leaves = calls(attention, draw(generator("again"), TINY[0], OPTIONS["everything"]))
    out = call(*leaves)[0].sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "p", "bias"])
def test_a_change_between_forward_and_backward_is_noticed(variant, name):
    arguments = draw(generator("in place"), TINY[0], OPTIONS["bias, table"])
    leaves = {n: arguments[n].clone().requires_grad_() for n in leaves_of(arguments)}
    used = {n: x * 1 for n, x in leaves.items()}
    out = attention(**arguments | used)
    with torch.no_grad():
        used[name].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_an_output_may_be_changed_afterwards_or_it_is_noticed(variant):
    """`out` is saved for the backward: adding to it in place must not give wrong gradients."""
    arguments = draw(generator("output"), TINY[0], OPTIONS["plain"])
    grads = []
    for in_place in (False, True):
        q = arguments["q"].clone().requires_grad_()
        out = attention(**arguments | {"q": q})
        out = out.mul_(3) if in_place else out * 3
        if in_place and out._version:
            with contextlib.suppress(RuntimeError):  # noticed
                out.pow(2).sum().backward()
                grads.append(q.grad)
            continue
        out.pow(2).sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(grads[-1], grads[0])
