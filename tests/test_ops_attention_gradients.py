"""Gradients of ops.attention: gradcheck over the options, through lse, of learned tables, and what
autograd asks for beside."""

import contextlib
import itertools

import numpy as np
import pytest
from attention_cases import (
    F32,
    F64,
    FLOATING,
    OPTIONS,
    SEED,
    Shape,
    attention,
    composed,
    draw,
    each_function,
    incoming,
    judge,
    run,
    same,
    torch,
)
from cases import generator

TINY = [Shape(2, 2, 1, 3, 4, 2, 3), Shape(1, 2, 2, 1, 5, 3, 1), Shape(1, 2, 1, 3, 2, 2, 1)]


def leaves_of(arguments):
    return [name for name in FLOATING if arguments.get(name) is not None]


def calls(function, arguments):
    """out and lse as a function of the floating tensors alone; the same dropout every time."""
    names = leaves_of(arguments)

    def call(*leaves):
        torch.manual_seed(SEED)
        given = arguments | dict(zip(names, leaves, strict=True))
        out, lse = function(**given, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    return call, [arguments[name].detach().requires_grad_() for name in names]


def check_gradients(function, option):
    """Along a random direction; the grid of test_ops_attention_dtypes holds every entry."""
    rng = generator("gradcheck", option)
    for shape in TINY:
        call, leaves = calls(function, draw(rng, shape, OPTIONS[option], F64))
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck(variant, option):
    check_gradients(attention, option)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck_of_the_composition(option):
    check_gradients(composed, option)


@pytest.mark.parametrize("option", ["plain", "edge from 2, per head", "everything"])
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
    """Either alone; together they add."""
    rng = generator("lse", option)
    arguments = draw(rng, Shape(2, 4, 2, 23, 30, 16, 12), OPTIONS[option])
    grads = incoming(rng, arguments)
    parts = [(grads[0], None), (None, grads[1]), grads]
    results = [run(function, arguments, *part) for part in parts]
    for part, found in zip(parts, results, strict=True):
        exact = judge(arguments, *part).values
        for name in leaves_of(arguments):
            limit = 2e-5 * np.abs(exact[name]).max()
            assert np.abs(found[name].numpy() - exact[name]).max() <= limit, name
    for name in leaves_of(arguments):
        torch.testing.assert_close(
            results[0][name] + results[1][name], results[2][name], rtol=1e-4, atol=1e-4
        )
    assert not run(function, arguments, None, grads[1])["v"].any()


def test_only_the_gradients_that_are_wanted(variant):
    rng = generator("wanted")
    arguments = draw(rng, Shape(2, 4, 2, 19, 26, 16, 12), OPTIONS["everything"])
    grads = incoming(rng, arguments)
    whole = run(attention, arguments, *grads)
    for count in (1, 2, 3, 4):
        for wanted in itertools.combinations(FLOATING, count):
            found = run(attention, arguments, *grads, wanted=wanted)
            assert set(found) == {"out", "lse", *wanted}
            same(found, {name: whole[name] for name in found}, f"{wanted}")
    leaf = arguments["k"].clone().requires_grad_()
    out = attention(**arguments | {"k": leaf})
    out.sum().backward()
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


def test_a_shared_table_has_the_sum_of_the_heads_gradients(variant):
    rng = generator("shared")
    arguments = draw(rng, Shape(2, 4, 2, 40, 40, 16, 16), OPTIONS["table"])
    grads = incoming(rng, arguments)
    shared = run(attention, arguments, *grads)
    apart = run(attention, arguments | {"p": arguments["p"].expand(4, -1, -1)}, *grads)
    torch.testing.assert_close(shared["p"], apart["p"].sum(0), rtol=1e-4, atol=1e-4)
    for name in "qkv":
        torch.testing.assert_close(shared[name], apart[name], rtol=1e-5, atol=1e-5)


@each_function
def test_a_shared_bias_has_the_sum_of_the_heads_gradients(variant, function):
    rng = generator("shared bias")
    for shape in (Shape(2, 4, 2, 40, 40, 16, 16), Shape(1, 2, 1, 900, 900, 8, 8)):
        arguments = draw(rng, shape, OPTIONS["bias of all heads"])
        grads = incoming(rng, arguments)
        shared = run(function, arguments, *grads)
        each = arguments["bias"].expand(shape.heads, -1)
        apart = run(function, arguments | {"bias": each}, *grads)
        torch.testing.assert_close(shared["bias"], apart["bias"].sum(0), rtol=1e-4, atol=1e-4)
        for name in "qkv":
            torch.testing.assert_close(shared[name], apart[name], rtol=1e-5, atol=1e-5)


@each_function
def test_slopes_are_a_bias(variant, function):
    rng = generator("slopes as bias")
    for m, n, causal in ((40, 40, True), (250, 300, False), (1, 50, True)):
        given = OPTIONS["slopes"](rng, Shape(2, 4, 2, m, n, 16, 16)) | {"causal": causal}
        arguments = draw(rng, Shape(2, 4, 2, m, n, 16, 16), given)
        grads = incoming(rng, arguments)
        want = run(function, arguments, *grads)
        first = 0 if causal else 1 - n
        far = torch.arange(first, m + n).abs().float()
        bias = {"bias": -arguments.pop("slopes")[:, None] * far, "bias_first": first}
        got = run(function, arguments | bias, *grads)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_a_table_of_two_layers_adds_its_gradients(variant):
    rng = generator("layers")
    arguments = draw(rng, Shape(1, 2, 1, 12, 12, 8, 8), OPTIONS["edge"], F64)
    grads = []
    for function in (attention, composed):
        p = arguments["p"].clone().requires_grad_()
        hidden = function(**arguments | {"p": p})
        function(**arguments | {"p": p, "q": hidden}).pow(2).sum().backward()
        grads.append(p.grad)
    torch.testing.assert_close(*grads)


def test_q_and_q_rel_of_one_tensor(variant):
    """r = q + bias, as Transformer-XL has it: its gradient flows to q by both ways."""
    rng = generator("two ways")
    arguments = draw(rng, Shape(1, 2, 1, 9, 9, 8, 8), OPTIONS["table"], F64)
    found = []
    for rel in (False, True):
        q = arguments["q"].clone().requires_grad_()
        out = attention(**arguments | {"q": q, "q_rel": q * 1 if rel else None})
        out.pow(2).sum().backward()
        found.append(q.grad)
    torch.testing.assert_close(*found)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_dtype_of_their_tensors(variant, dtype):
    rng = generator("dtypes")
    arguments = draw(rng, TINY[0], OPTIONS["everything"], dtype)
    found = run(attention, arguments, *incoming(rng, arguments))
    for name in leaves_of(arguments):
        assert found[name].dtype == (F32 if name == "bias" else dtype)
    assert found["lse"].dtype == F32
