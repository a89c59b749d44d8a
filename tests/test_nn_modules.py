"""The attention of wavepe.nn as torch modules: compile, casts, copies, meta device, errors."""

import copy
import pickle

import numpy as np
import pytest
import torch
import wavepe
import wavepe.nn
from cases import by_turns, compiled_once, every, forget_registrations, recording_backend, soon
from encoding_cases import LEARNED
from nn_cases import SPECS, assert_exact, made, tokens
from op_cases import PROGRAMS, of_values, program_of
from torch.utils.checkpoint import checkpoint
from wavepe import ops
from wavepe.encodings import Encoding
from wavepe.nn import AbsoluteEncoding, Attention, KVCache, Rotary, SelfAttention

F32 = torch.float32
WEIGHTS = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]


# --------------------------------------------------------------- compile
@pytest.fixture
def backend():
    """One of a fresh compiler, which counts the graphs."""
    yield recording_backend()
    torch._dynamo.reset()


def some(first, *others):
    """Values of a parameter: the first, and the others in the long tail."""
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


@pytest.mark.parametrize("spec", some("wavelet:scales=4", "transformer_xl", "rope"))
def test_one_graph_for_every_length(spec, backend):
    module = made(spec, F32)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 9, 33, 128):
        x = tokens(length, dtype=F32)
        results = []
        for function in (compiled, module):
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            results.append((out, *torch.autograd.grad(out.sum(), [leaf, *module.parameters()])))
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1)
    assert compiled_once(backend)
    x = tokens(200, dtype=F32)  # beyond the capacity of the first table
    with torch.no_grad():
        assert (compiled(x) - module(x)).abs().max() < 1e-5


@pytest.mark.parametrize("spec", some("rope", "wavelet:scales=4"))
def test_every_argument_in_one_graph(spec, backend):
    module = made(spec, F32)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (6, 11):
            options = {
                "key_mask": torch.arange(length).expand(2, -1) > 1,
                "positions": torch.arange(length) + 3,
                "segments": (torch.arange(length) > 3).long(),
            }
            x = tokens(length, dtype=F32)
            assert (compiled(x, **options) - module(x, **options)).abs().max() < 1e-6
            options["positions"] = torch.zeros(length, dtype=torch.int64)
            with pytest.raises(RuntimeError, match="positions of a row"):
                compiled(x, **options)
    assert compiled_once(backend)


def test_dropout_in_a_graph(backend):
    module, x = made("wavelet:scales=4", F32, dropout=0.5).train(), tokens(dtype=F32)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    assert compiled_once(backend)


@pytest.mark.parametrize(
    "specs", [("wavelet:scales=4", "wavelet:scales=2"), ("sandwich:dim=4", "sandwich")]
)
def test_graphs_of_two_encodings_are_told_apart(specs):
    torch._dynamo.reset()
    q = torch.randn(1, 2, 7, 8)
    modules = [Attention(spec, 8, 2, causal=causal) for spec in specs for causal in (True, False)]
    for module in (*modules, *modules):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, q, q), module(q, q, q))
    copied = pickle.loads(pickle.dumps(modules[0]))
    assert torch.equal(torch.compile(copied, backend="eager")(q, q, q), modules[0](q, q, q))


def test_a_class_registered_anew_compiles(monkeypatch):
    forget_registrations(monkeypatch)
    q, modules = torch.randn(1, 2, 7, 8), []
    for size in (0.1, 0.2):

        @wavepe.register_encoding
        class Anew(Encoding):
            name = "anew"

            def table(self, length, head_dim, *, causal=True, size=size):
                return np.arange(length)[:, None] * np.full(head_dim, size), 0, "zero"

        modules.append(Attention("anew", 8, 2).eval())
    assert not torch.allclose(*(module(q, q, q) for module in modules))
    for module in modules:
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, q, q), module(q, q, q))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("spec", some("fox", "wavelet:scales=4", "rope", "rope+alibi", "xpos"))
@pytest.mark.parametrize("most", [None, 512])
def test_export(spec, strict, most):
    """The length has no bound of ours, but that of xpos, whose factors would overflow."""
    module, length = made(spec, F32), torch.export.Dim("length", min=2, max=most)
    x = tokens(9, dtype=F32)
    if spec == "xpos" and most is None:
        with pytest.raises(torch._dynamo.exc.UserError, match="<= 32695"):
            torch.export.export(module, (x,), dynamic_shapes={"x": {1: length}}, strict=strict)
        return
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {1: length}}, strict=strict)
    (bounds,) = program.range_constraints.values()
    assert bounds.upper > 2**62 if most is None else bounds.upper == most
    for count in (2, 3, 50, 512):
        other = tokens(count, dtype=F32)
        assert torch.equal(program.module()(other), module(other))


BATCH, HEADS, KV, LENGTH = ((0, 0), (1, 0), (2, 0)), ((0, 1),), ((1, 1),), ((0, 2), (1, 2), (2, 1))
MASKS = {
    "none": lambda size, q: {},
    "window": lambda size, q: {"window": size, "positions": torch.arange(q.shape[2])},
    "key_mask": lambda size, q: {"key_mask": torch.arange(q.shape[2])[None] > 0},
    "segments": lambda size, q: {"segments": torch.arange(q.shape[2]) // 3},
}
OF_VALUES = [
    (spec, axes, mask)
    for spec in ("fox", *(spec for spec in SPECS if spec != "fox"))
    for axes in (LENGTH, BATCH, ((0, 2),), HEADS, KV)
    for mask in MASKS
    if spec in ("fox", "rope") or (axes in (LENGTH, BATCH) and mask == "none")
    if mask != "segments" or axes != ((0, 2),)  # they need m = n
]
SOON = [c for c in OF_VALUES if c[0] == "fox" and (c[1] == LENGTH) == (c[2] != "none")]


@pytest.mark.parametrize("mode", some(*PROGRAMS))
@pytest.mark.parametrize(("spec", "axes", "mask"), soon(OF_VALUES, *SOON))
def test_sizes_that_only_values_tell(spec, axes, mask, mode):
    """Each size of every encoding, and what hides keys."""

    class Masked(Attention):
        def forward(self, size, q, k, x):
            return super().forward(q, k, k, x=x, **MASKS[mask](size, k))

    call = Masked(spec, 8, 4, 2, dim=16, trained_length=16).eval()
    inputs = torch.randn(4, 4, 9, 8), torch.randn(4, 2, 9, 8), torch.randn(4, 9, 16)
    counts = {HEADS: (4,), KV: (2,)}.get(axes, (3, 1, 2))
    module = of_values(call, axes)
    program = program_of(module, (torch.tensor(counts[0]), *inputs), mode)
    with torch.no_grad():
        for count in map(torch.tensor, counts):
            got, want = program(count, *inputs), module(count, *inputs)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        if axes in (HEADS, KV):
            with pytest.raises(RuntimeError):
                program(torch.tensor(1), *inputs)


@pytest.mark.parametrize(
    ("spec", "causal"),
    by_turns(["wavelet:scales=4", "t5", "sandwich", "rope+alibi", "shaw"], [True, False]),
)
def test_export_to_operators_of_torch_alone(spec, causal):
    """The table of every distance is a constant, and ends where the bound says."""
    if spec == "sandwich" and not causal:
        pytest.skip("sandwich is causal")
    module = wavepe.nn.SelfAttention(16, 2, encoding=spec, causal=causal).eval()
    length = torch.export.Dim("length", min=2, max=60)
    with ops.standard_operators():
        shapes = {"x": {1: length}}
        program = torch.export.export(module, (torch.randn(2, 9, 16),), dynamic_shapes=shapes)
    assert not [node for node in program.graph.nodes if "wavepe" in str(node.target)]
    for count in (2, 9, 60):
        x = torch.randn(2, count, 16)
        torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", every(2, SPECS))
def test_tables_of_a_tracer_and_of_inference_stay_there(spec):
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, x = made(spec), tokens(150)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x)).shape == x.shape
    with torch.inference_mode():
        assert type(module(x)) is torch.Tensor
    module(x).sum().backward()
    assert all(value.grad.isfinite().all() for value in module.parameters())


# --------------------------------------------------------------- casts and autocast
@pytest.mark.parametrize("spec", LEARNED)
def test_what_is_learned_stays_in_float32(spec):
    module = made(spec, F32)
    before = {k: v.clone() for k, v in module.position_encoding.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float16):
        assert module.to(dtype).q_proj.weight.dtype == dtype
        for name, value in module.position_encoding.state_dict().items():
            assert torch.equal(value, before[name])
            assert value.dtype == F32
        x = tokens(dtype=dtype)
        assert_exact(module(x), module, x)
    assert {x.dtype for x in module.double().parameters()} == {torch.float64}
    for dtype, kept in ((torch.bfloat16, F32), (torch.float64, torch.float64)):
        new = SelfAttention(32, 4, encoding=spec, dtype=dtype)
        assert {x.dtype for x in new.position_encoding.parameters()} == {kept}
        assert new.q_proj.weight.dtype == dtype


@pytest.mark.parametrize("spec", SPECS)
def test_autocast(spec):
    module, x = made(spec, F32), tokens(dtype=F32)
    wanted, cache = module(x), KVCache()
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x)
        steps = torch.cat([module(part, cache=cache) for part in x.split(4, 1)], 1)
        got.float().sum().backward()
    for y in (got, steps):
        assert y.dtype == torch.bfloat16
        assert (y - wanted).abs().max() < 2.0**-4 * wanted.abs().max()


# --------------------------------------------------------------- copies, files, meta device
@pytest.mark.parametrize("spec", SPECS)
def test_copies_pickles_and_state(spec):
    module, x = made(spec), tokens()
    wanted = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), wanted)
        assert other.encoding == module.encoding
    state = module.state_dict()
    learned = [name for name in state if name not in WEIGHTS]
    assert bool(learned) == bool(module.encoding.learns)
    assert all(name.startswith("position_encoding.") for name in learned)
    assert not list(module.buffers())
    other = made(spec, seed=9)
    assert not torch.equal(other(x), wanted)
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)


def test_pickles_hold_no_tables_and_public_names():
    module = made("wavelet:scales=4", F32)
    small = len(pickle.dumps(module))
    torch._dynamo.reset()
    torch.compile(module, backend="eager", fullgraph=True)(tokens(2000, batch=1, dtype=F32))
    torch._dynamo.reset()
    assert len(pickle.dumps(module)) < small + 1000
    for public in (wavepe.nn.Rotary, SelfAttention, KVCache):
        assert public.__module__ == "wavepe.nn"
    assert b"wavepe.nn\n" in pickle.dumps(wavepe.nn.Rotary(8), protocol=0)


@pytest.mark.parametrize("spec", ["wavelet:scales=4", *LEARNED])
def test_meta_device(spec):
    with torch.device("meta"):
        module = SelfAttention(32, 4, encoding=spec)
    assert all(x.is_meta for x in module.parameters())
    assert module(torch.empty(2, 5, 32, device="meta")).is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    other = SelfAttention(32, 4, encoding=spec)
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    x = tokens(dtype=F32)
    assert torch.equal(module(x), other(x))


# --------------------------------------------------------------- training
def test_checkpointing():
    for spec in ("wavelet:scales=4", "transformer_xl", "rope"):
        module = made(spec, dropout=0.3).train()
        gradients = []
        for run in (module, lambda x, m=module: checkpoint(m, x, use_reentrant=False)):
            torch.manual_seed(4)
            x = tokens().requires_grad_()
            gradients.append(torch.autograd.grad(run(x).pow(2).sum(), [x, *module.parameters()]))
        assert all(map(torch.equal, *gradients))


def test_layers_that_share_what_is_learned():
    first, second = made("shaw:clip=3"), made("shaw:clip=3", seed=1)
    count = sum(x.numel() for x in first.parameters())
    second.position_encoding = first.position_encoding
    model = torch.nn.Sequential(first, second)
    assert sum(x.numel() for x in model.parameters()) == 2 * count - 7 * 8
    x = tokens()
    assert_exact(model(x), second, first(x))
    model(x).sum().backward()
    assert first.position_encoding.table.grad.abs().sum() > 0


def test_it_prints_what_it_is():
    text = str(SelfAttention(32, 4, 2, "wavelet:scales=4", False, 0.1, head_dim=16, window=5))
    assert text.splitlines()[1].strip() == (
        "32, 'wavelet:scales=4', head_dim=16, heads=4, kv_heads=2, causal=False, dropout=0.1, "
        "window=5"
    )
    assert "(position_encoding): PositionEncoding(wavelet:scales=4)" in text


# --------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((32, 5), {}, ValueError, "heads must divide dim=32, got 5"),
        ((32, 4, 3), {}, ValueError, "kv_heads must divide heads=4, got 3"),
        ((32.0, 4), {}, TypeError, "dim"),
        ((32, 4), {"encoding": "wavelet:scales=3"}, ValueError, "3"),
        ((24, 8), {"encoding": "rope"}, ValueError, "3[^_]*$"),
        ((32, 4), {"encoding": "rope:type=yarn,factor=4"}, ValueError, "needs .*trained_length"),
        ((32, 4), {"encoding": "wavelets"}, ValueError, "did you mean 'wavelet'"),
        ((32, 4), {"encoding": None}, TypeError, "encoding"),
        ((32, 4), {"dropout": 1.5}, ValueError, "dropout must be a number from 0 to 1, got 1.5"),
        ((32, 4), {"causal": "no"}, TypeError, "causal"),
        ((32, 4), {"window": -1}, ValueError, "window must be at least 0, got -1"),
        ((60, 5), {}, ValueError, "head size 12 .* 8 scales: .* wavelet:scales=6"),
        ((32, 4), {"trained_length": 0}, ValueError, "trained_length"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        SelfAttention(*arguments, **options)


@pytest.mark.parametrize("spec", ["sinusoidal", "binary", "integer", "normalised"])
def test_encodings_of_other_modules_are_refused(spec):
    with pytest.raises(ValueError, match=f"'{spec}' is absolute.* token embeddings"):
        SelfAttention(32, 4, encoding=spec)
    with pytest.raises(ValueError, match="AbsoluteEncoding"):
        Attention(spec, 8, 4)
    wrong = r"must be absolute and .*got 'rope': .*wavepe\.nn\.Attention"
    with pytest.raises(ValueError, match=wrong):
        AbsoluteEncoding("rope", 8)


X, Q, K = torch.zeros(2, 6, 32), torch.zeros(2, 4, 7, 8), torch.zeros(2, 2, 7, 8)
MODULES = {
    SelfAttention: lambda: made("alibi", F32),
    Attention: lambda: Attention("alibi", 8, 4, 2),
    AbsoluteEncoding: lambda: AbsoluteEncoding("sinusoidal", 8),
}


@pytest.mark.parametrize(
    ("module", "inputs", "options", "words"),
    [
        *(
            (SelfAttention, inputs, options, words)
            for inputs, options, words in [
                ([np.zeros((2, 6, 32))], {}, "x must be a torch.Tensor, got ndarray"),
                ([X[0]], {}, r"x must be \(B, L, 32\), got \(6, 32\)"),
                ([X], {"key_mask": [True] * 6}, "key_mask must be a torch.Tensor, got list"),
                ([X], {"key_mask": torch.ones(2, 6)}, "key_mask must be bool, with True for"),
                ([X], {"key_mask": torch.ones(2, 5).bool()}, r"here \(2, 6\); got \(2, 5\)"),
                ([X], {"key_mask": torch.ones(6).bool()}, r"got \(6,\)"),
                ([X], {"positions": 3}, "positions must be a torch.Tensor, got int"),
                ([X], {"positions": torch.arange(6.0)}, "must hold integers, got torch.float32"),
                ([X], {"positions": torch.arange(5)}, r"here \(6,\) or \(1\|2, 6\); got \(5,\)"),
                ([X], {"segments": torch.zeros(2, 5).long()}, r"segments must be .* got \(2, 5\)"),
                ([X], {"segments": torch.zeros(2, 6)}, "segments must hold integers"),
                ([X], {"cache": {}}, "cache must be a KVCache, got dict"),
            ]
        ),
        *(
            (Attention, inputs, options, words)
            for inputs, options, words in [
                ((Q[:, :2], K, K), {}, r"q must be \(B, 4, tokens, 8\), got \(2, 2, 7, 8\)"),
                ((Q, Q, K), {}, r"k must be \(B, 2, tokens, 8\), got \(2, 4, 7, 8\)"),
                ((Q, K, Q), {}, r"v must be \(B, 2, tokens, dv\)"),
                ((Q, K, torch.zeros(())), {}, "v must be"),
                ((Q, None, K), {}, "k must be a torch.Tensor, got NoneType"),
                ((Q, K[:, :, :3], K[:, :, :3]), {}, "m <= n, .* m = 7 queries and n = 3 keys"),
                ((Q[:, :, :3], K, K), {"cache": KVCache()}, "needs m = n with a cache"),
            ]
        ),
        *(
            (AbsoluteEncoding, inputs, {}, words)
            for inputs, words in [
                ([X[..., :4]], r"x must be \(B, L, 8\), got \(2, 6, 4\)"),
                ([None], "x must be a torch.Tensor"),
                ([X[..., :8], torch.zeros(6)], "positions must hold integers"),
                ([X[..., :8], torch.arange(4)], r"positions must be \(L,\)"),
            ]
        ),
    ],
)
def test_wrong_calls(module, inputs, options, words):
    with pytest.raises(RuntimeError, match=words):
        MODULES[module]()(*inputs, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("spec", [*SPECS, "rope+alibi", "alibi", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_traces_are_right_or_refused(spec, causal):
    """torch.jit.trace keeps what Python computes for one length."""
    if spec == "fox" and not causal:
        pytest.skip("fox is causal")
    module = SelfAttention(32, 4, encoding=spec, causal=causal).eval()
    x, longer = torch.randn(1, 10, 32), torch.randn(1, 300, 32)
    with torch.no_grad():
        if spec not in ("alibi", "none"):
            with pytest.raises(RuntimeError, match=r"use torch\.export, which serves every length"):
                torch.jit.trace(module, x, check_trace=False)
            return
        traced = torch.jit.trace(module, x, check_trace=False)
        assert torch.equal(traced(longer), module(longer))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_of_vectors_and_rotations_are_refused():
    for module, inputs in (
        (AbsoluteEncoding("sinusoidal", 8), (torch.zeros(1, 5, 8),)),
        (Rotary(8), (torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))),
    ):
        with pytest.raises(RuntimeError, match=r"use torch\.export"):
            torch.jit.trace(module, inputs, check_trace=False)
