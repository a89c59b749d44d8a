"""wavepe.nn.Rotary: numbers, layouts, dtypes, kept tables and errors."""

import copy
import pickle
import threading

import numpy as np
import oracle
import pytest
from cases import load_torch

torch, ops = load_torch()

from rotary_cases import EXACT, SCALINGS, assert_rotated, heads
from torch.utils.checkpoint import checkpoint
from wavepe.nn import Rotary
from wavepe.positions import rotation, tables

# --------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_form_of_positions(interleaved, dtype):
    rotary = Rotary(8, 500.0, interleaved=interleaved)
    inv_freq = oracle.rope_frequencies(8, 500.0)
    q, k = heads(dtype=dtype)
    packed = torch.tensor([0, 1, 2, 0, 1, 2])
    rows = torch.stack([torch.arange(6), 1000 * torch.arange(6)])
    for given in (None, torch.arange(6), torch.arange(6) + 2**24, packed, rows, rows[1:]):
        positions = torch.arange(6) if given is None else given
        for x, got in zip((q, k), rotary(q, k, given), strict=True):
            assert_rotated(got, x, positions.numpy(), inv_freq, 1.0, interleaved)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_type(name):
    rotary = Rotary(8, scaling=SCALINGS[name], max_length=16)
    for length in (6, 20):
        q, k = heads(length)
        for got, x in zip(rotary(q, k), (q, k), strict=True):
            assert_rotated(got, x, np.arange(length), *EXACT[name](length))
        again = rotary(q, k, torch.arange(length))
        assert all(map(torch.equal, again, rotary(q, k)))


@pytest.mark.parametrize(("fraction", "kept"), [(1, 4), (0.75, 3), (0.5, 2), (0.2, 0), (0, 0)])
def test_fraction_rotates_the_fast_pairs(fraction, kept):
    inv_freq = oracle.rope_frequencies(8)
    inv_freq[kept:] = 0
    q, k = heads()
    got = Rotary(8, fraction=fraction)(q, k)
    assert_rotated(got[0], q, np.arange(6), inv_freq)
    whole = Rotary(8)(q, k)
    for half in (0, 4):
        assert torch.equal(got[0][..., half : half + kept], whole[0][..., half : half + kept])
        assert torch.equal(got[0][..., half + kept : half + 4], q[..., half + kept : half + 4])


def test_precision_hf_is_that_of_rope_table():
    q, k = heads(4)
    far = torch.arange(4) + 10**6
    cos, sin = ops.rope_table(far, Rotary(8)._frequencies.inv_freq, precision="hf")
    assert torch.equal(Rotary(8, precision="hf")(q, k, far)[0], ops.rope(q, cos, sin))
    assert not torch.equal(Rotary(8)(q, k, far)[0], ops.rope(q, cos, sin))
    cos, sin = ops.rope_table(torch.arange(4), Rotary(8)._frequencies.inv_freq, precision="hf")
    assert torch.equal(Rotary(8, precision="hf")(q, k)[0], ops.rope(q, cos, sin))


def test_a_module_cast_to_bfloat16_keeps_its_angles():
    rotary = Rotary(8)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), rotary)
    q, k = heads()
    wanted = rotary(q, k, torch.arange(6) + 4095)
    for cast in (torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.float):
        assert all(map(torch.equal, cast(model)[1](q, k, torch.arange(6) + 4095), wanted))
    assert not rotary.state_dict()
    assert not list(rotary.buffers())
    assert not list(rotary.parameters())


def test_one_token_at_a_time_is_the_whole():
    rotary = Rotary(8)
    q, k = heads(6)
    whole = rotary(q, k)
    for i in range(6):
        at = slice(i, i + 1)
        step = rotary(q[:, :, at], k[:, :, at], torch.tensor([i]))
        assert torch.equal(step[0], whole[0][:, :, at])
        assert torch.equal(step[1], whole[1][:, :, at])


# --------------------------------------------------------------- autograd, inference, compile


def test_gradients():
    rotary = Rotary(8, scaling=SCALINGS["yarn"])
    q, k = (x.requires_grad_() for x in heads(3, dtype=torch.float64))
    assert torch.autograd.gradcheck(rotary, (q, k))
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, torch.tensor([7, 0, 2])), (q, k))


def test_tables_made_under_inference_serve_training():
    tables._built.cache_clear()
    with torch.inference_mode():
        rotary = Rotary(8, 321.0)
        rotary(*heads())
    q, k = (x.requires_grad_() for x in heads())
    for output in (rotary(q, k), checkpoint(rotary, q, k, use_reentrant=False)):
        sum(x.sum() for x in output).backward()
    assert torch.isfinite(q.grad).all()


def test_tables_are_shared_and_grow():
    tables._built.cache_clear()
    one, other = Rotary(8, 77.0), Rotary(8, scaling={"rope_theta": 77.0})
    for length in (3, 200, 1000, 5):
        q, k = heads(length, batch=1)
        assert all(map(torch.equal, one(q, k), other(q, k, torch.arange(length))))
        assert all(map(torch.equal, one(q, k), other(q, k)))
    assert tables._built.cache_info().currsize == 3  # of 128, 256 and 1024 positions


def test_lengths_beyond_any_table(monkeypatch):
    q, k = heads(40, batch=1)
    wanted = Rotary(8)(q, k)
    tables._built.cache_clear()
    monkeypatch.setattr(rotation, "LARGEST_TABLE", 39)
    assert all(map(torch.equal, Rotary(8)(q, k), wanted))
    assert tables._built.cache_info().currsize == 0


def test_a_tracer_leaves_no_fake_table_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tables._built.cache_clear()
    q, k = heads()
    given = (Rotary(8)._frequencies, "exact", q.device, torch.float32)
    with FakeTensorMode():
        cos, _ = rotation._first_rows(6, *given)
    assert type(cos) is torch.Tensor
    assert type(Rotary(8)(q, k)[0]) is torch.Tensor


@pytest.mark.parametrize("given", [False, True])
def test_one_graph_for_every_length(given):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    rotary = Rotary(8)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=True, backend=backend)

    def both(length, start=0):
        q, k = heads(length)
        positions = torch.arange(length) + start if given else None
        return compiled(q, k, positions), rotary(q, k, positions)

    for length in (5, 9, 33):
        assert all(map(torch.equal, *both(length, start=3)))
    assert len([g for g in backend.graphs if len(list(g.graph.nodes)) > 3]) == 1
    rotary.theta = 99.0
    if given:
        with pytest.raises(RuntimeError, match="theta=10000, but this call rotates with theta=99:"):
            compiled(*heads(4), torch.arange(4) + 2)
    assert all(map(torch.equal, *both(7)))
    assert torch.equal(both(6)[0][0], Rotary(8, 99.0)(*heads(6))[0])
    torch._dynamo.reset()


def test_a_type_that_follows_the_length_says_so_under_fullgraph():
    torch._dynamo.reset()
    rotary = Rotary(8, scaling=SCALINGS["dynamic"], max_length=16)
    q, k = heads(20)
    loose = torch.compile(rotary, backend="eager")
    assert all(map(torch.equal, loose(q, k), rotary(q, k)))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="follows the length"):
        torch.compile(rotary, backend="eager", fullgraph=True)(q, k)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    rotary, (q, k) = Rotary(8), heads()
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(
        rotary,
        (q, k, torch.arange(6)),
        dynamic_shapes=({2: length}, {2: length}, {0: length}),
        strict=strict,
    )
    arguments = (*heads(11), torch.arange(11) + 5)
    assert all(map(torch.equal, program.module()(*arguments), rotary(*arguments)))


def test_copies_and_pickles():
    rotary = Rotary(8, 300.0, interleaved=True)
    q, k = heads()
    wanted = rotary(q, k)
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert all(map(torch.equal, other(q, k), wanted))
        other.theta = 9.0
        assert not torch.equal(other(q, k)[0], wanted[0])
        assert rotary.theta == 300.0
        assert all(map(torch.equal, rotary(q, k, torch.arange(6)), wanted))


def test_two_threads():
    tables._built.cache_clear()
    rotary = Rotary(8, 44.0)
    inputs = [heads(length, batch=1, seed=length) for length in range(1, 200, 7)]
    wanted = [Rotary(8, 44.0)(q, k, torch.arange(q.shape[2])) for q, k in inputs]
    wrong = []

    def work(order):
        for i in order:
            got = rotary(*inputs[i])
            if not all(map(torch.equal, got, wanted[i])):
                wrong.append(i)

    orders = [range(len(inputs)), range(len(inputs) - 1, -1, -1)] * 2
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((7,), {}, ValueError, "head_dim must be even, got 7"),
        ((0,), {}, ValueError, "head_dim"),
        ((8.0,), {}, TypeError, "head_dim"),
        ((8, 0.0), {}, ValueError, "theta"),
        ((8, "1e4"), {}, TypeError, "theta"),
        ((8, 5.0), {"scaling": {"rope_theta": 6.0}}, ValueError, r"5.*6"),
        ((8, 5.0), {"scaling": {"rope_theta": 6.0}, "fraction": 0.5}, ValueError, r"5.*6"),
        ((8,), {"max_length": 4.0}, TypeError, "max_length"),
        ((8,), {"scaling": {"rope_type": "linear"}}, ValueError, "factor"),
        ((8,), {"scaling": {"rope_type": "cubic"}}, ValueError, "cubic"),
        ((8,), {"scaling": "linear"}, TypeError, "scaling"),
        ((8,), {"scaling": {"rope_type": "dynamic", "factor": 2.0}}, ValueError, "max"),
        ((8,), {"fraction": 1.5}, ValueError, "fraction"),
        ((8,), {"fraction": 0.5, "scaling": {"rope_type": "default"}}, ValueError, "give one of"),
        ((8,), {"interleaved": "no"}, TypeError, "interleaved"),
        ((8,), {"precision": "bf16"}, ValueError, "precision"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Rotary(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 6, 10)}, r"q must be \(B, H, L, 8\), got \(2, 4, 6, 10\)"),
        ({"k": torch.zeros(6, 8)}, r"k must be \(B, H, L, 8\)"),
        ({"k": torch.zeros(2, 2, 5, 8)}, "the same batch and length"),
        ({"k": torch.zeros(1, 2, 6, 8)}, "the same batch and length"),
        ({"k": torch.zeros(2, 2, 6, 8).double()}, "one dtype"),
        ({"q": torch.zeros(2, 4, 6, 8).int()}, "q must be float32, float64, bfloat16 or float16"),
        ({"q": None}, "q must be a torch.Tensor"),
        ({"positions": 3}, "positions must be a torch.Tensor"),
        ({"positions": torch.arange(5)}, r"here \(6,\) or \(1\|2, 6\); got \(5,\)"),
        ({"positions": torch.zeros(3, 6).long()}, r"got \(3, 6\)"),
        ({"positions": torch.zeros(1, 1, 6).long()}, r"got \(1, 1, 6\)"),
        ({"positions": torch.tensor(0)}, r"got \(\)"),
        ({"positions": torch.arange(6.0)}, "positions must hold integers, got torch.float32"),
    ],
)
def test_wrong_calls(change, message):
    q, k = heads()
    call = {"q": q, "k": k, "positions": None} | change
    with pytest.raises(RuntimeError, match=message):
        Rotary(8)(call["q"], call["k"], call["positions"])


def test_it_prints_what_it_is():
    assert str(Rotary(8)) == "Rotary(8, theta=10000)"
    text = str(Rotary(8, 1234567.0, interleaved=True, fraction=0.5, precision="hf"))
    assert text == "Rotary(8, theta=1234567, interleaved=True, fraction=0.5, precision='hf')"
    text = str(Rotary(8, scaling=SCALINGS["dynamic"], max_length=16))
    assert "'dynamic'" in text
    assert "max_length=16" in text
