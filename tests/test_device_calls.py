"""The whole way of a call stays on its device: a second call copies nothing and reads nothing.

The first one may bring constants. docs/guides/gpu.md lists what must read values, and what is
not checked on a device.
"""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import wavepe.hf
import wavepe.nn
from cases import every
from encoding_cases import ENCODINGS, FOLLOW_LENGTH, HEAD, INTERLEAVED, SCALED
from hf_families import FAMILIES, build
from traffic import DEVICE, Traffic, tensors
from transformers import LlamaConfig, LlamaForCausalLM
from wavepe.ops import _device_constant, _relative_table
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_composed import composed
from wavepe.ops._device_constant import DeviceConstant
from wavepe.positions import tables

LENGTH = 9
ABSOLUTE = [spec for spec in ENCODINGS if wavepe.encoding(spec).adds]
IN_ATTENTION = [spec for spec in ENCODINGS if spec not in ABSOLUTE]
IN_SCORES = [spec for spec in IN_ATTENTION if wavepe.encoding(spec).terms]
OF_A_LLAMA = [spec for spec in ENCODINGS if spec != INTERLEAVED]


def each_spec(specs):
    """Run a test for these specs; in the plain tier for the first one of each method."""
    encodings = {spec: wavepe.encoding(spec) for spec in reversed(specs)}
    firsts = {(one.adds, one.rotates, one.terms): spec for spec, one in encodings.items()}.values()
    slow = [spec for spec in specs if spec not in firsts]
    return each_but(specs, slow)


def each_but(specs, slow):
    marks = {True: pytest.mark.slow, False: ()}
    rows = [pytest.param(spec, marks=marks[spec in slow]) for spec in specs]
    return pytest.mark.parametrize("spec", rows)


@pytest.fixture(autouse=True)
def seen_by_traffic(monkeypatch):
    """Constants are made in other threads, whose copies a mode of this thread does not see."""
    for module in (tables, _relative_table, _device_constant):
        monkeypatch.setattr(module, "in_new_thread", lambda function: function())


def second_call(function, *given, **options):
    """Return what the second call copies and reads."""
    function(*given, **options)
    with Traffic() as traffic:
        function(*given, **options)
    return traffic.found


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def stock_llama():
    config = LlamaConfig(
        vocab_size=64, hidden_size=4 * HEAD, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama(spec):
    return wavepe.hf.patch(stock_llama(), spec).to(DEVICE)


IDS = empty(2, LENGTH, dtype=torch.int64)
NUMBERS = empty(2, LENGTH, dtype=torch.int64)  # a mask, positions, segments


def test_traffic_is_noticed():
    """Without this, the tests below could not fail."""

    def call(x):
        x.copy_(torch.zeros(3))
        torch.tensor([1, 2], device=DEVICE)

    assert second_call(call, empty(3)) == [
        "copy_ copies [(3,), (3,), (3,)]", "torch.tensor copies (2,)"
    ]  # fmt: skip
    for reading in (torch.Tensor.item, torch.Tensor.any, torch.Tensor.tolist, torch.Tensor.numpy):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
            bool(reading(empty(1)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_constant_leave_the_device_behind(copied):
    """Else a model that was saved on a GPU would load nowhere else."""
    constant = DeviceConstant(np.arange(3.0))
    for dtype in (torch.float32, torch.float64) * 2:
        there = constant.on(empty(1), dtype)
        assert there is constant.on(empty(2), dtype)
        assert (there.device, there.dtype) == (DEVICE, dtype)
    again = copied(constant)
    assert again == constant
    assert torch.equal(again.on(torch.zeros(1)), torch.arange(3.0, dtype=torch.float64))
    assert all(x.device.type == "cpu" for x in tensors(list(vars(again).values())))


# Hugging Face


def step(model, ids=IDS, **args):
    """A training step, but for the optimizer."""
    model(input_ids=ids, labels=ids, use_cache=False, **args).loss.backward()


@each_spec(OF_A_LLAMA)
def test_a_training_step(spec):
    """With padding and packed sequences, if the scores have the encoding: attention takes them at
    no cost."""
    model = llama(spec).train()
    assert second_call(step, model) == []
    if spec in IN_SCORES:
        ends = empty(3, dtype=torch.int32)
        for args in ({"attention_mask": NUMBERS}, {"position_ids": NUMBERS}):
            assert second_call(step, model, **args) == [], args
        assert second_call(step, model, attention_mask=NUMBERS, position_ids=NUMBERS) == []
        assert second_call(step, model, IDS[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", OF_A_LLAMA)
def test_on_a_gpu_nothing_waits(spec):
    model = wavepe.hf.patch(stock_llama(), spec).to("cuda").train()
    ids = torch.zeros(2, LENGTH, dtype=torch.int64, device="cuda")
    step(model, ids)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step(model, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Experts are picked by numbers of tokens that transformers reads.
DENSE = [name for name in FAMILIES if "moe" not in name and name not in ("mixtral", "gpt_oss")]
each_family = pytest.mark.parametrize("family", every(4, DENSE))


@each_family
@pytest.mark.parametrize("spec", ["wavelet", pytest.param("rope", marks=pytest.mark.slow)])
def test_a_training_step_of_each_family(family, spec):
    assert second_call(step, wavepe.hf.patch(build(family), spec).to(DEVICE).train()) == []


GENERATE = [spec for spec in OF_A_LLAMA if spec not in (*FOLLOW_LENGTH, SCALED)]


@each_spec(GENERATE)
@torch.no_grad()
def test_steps_of_a_generation(spec):
    model = llama(spec).eval()

    def generate(masked):
        cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
        for stop in range(5, 8):
            args = {"attention_mask": NUMBERS[:, :stop]} if masked else {}
            if masked and spec not in ABSOLUTE:
                args["position_ids"] = NUMBERS[:, :1]
            model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True, **args)

    assert second_call(generate, False) == []
    assert second_call(generate, True) == []


@torch.no_grad()
def test_a_fixed_length_is_not_read():
    model = wavepe.hf.fix_length(llama(SCALED).eval(), 32)
    assert second_call(model, input_ids=IDS, use_cache=False) == []


# Modules


def attend(module, x, **args):
    module(x, **args).sum().backward()


@pytest.mark.parametrize("spec", IN_ATTENTION)
def test_self_attention(spec):
    module = wavepe.nn.SelfAttention(4 * HEAD, heads=4, encoding=spec, trained_length=16).to(DEVICE)
    module.train(spec != SCALED)  # whose base follows the length of positions in evaluation
    x, seen = empty(2, LENGTH, 4 * HEAD), empty(2, LENGTH, dtype=torch.bool)
    assert second_call(attend, module, x) == []
    assert second_call(attend, module, x, key_mask=seen, segments=NUMBERS) == []
    if spec != SCALED:
        assert second_call(attend, module, x, key_mask=seen, positions=NUMBERS) == []


@pytest.mark.parametrize("spec", [spec for spec in IN_ATTENTION if spec != SCALED])
@torch.no_grad()
def test_attention_with_a_cache(spec):
    module = wavepe.nn.Attention(spec, HEAD, heads=4, trained_length=16, dim=12).to(DEVICE)
    q = empty(2, 4, LENGTH, HEAD)

    def generate():
        cache = wavepe.nn.KVCache()
        module(q, q, q, cache=cache, x=empty(2, LENGTH, 12))
        for beams in (2, 3):
            cache.reorder(empty(beams, dtype=torch.int64))
            module(*[empty(beams, 4, 1, HEAD)] * 3, cache=cache, x=empty(beams, 1, 12))

    assert second_call(generate) == []


@pytest.mark.parametrize("spec", ABSOLUTE)
def test_absolute_encoding(spec):
    module = wavepe.nn.AbsoluteEncoding(spec, 4 * HEAD)
    assert second_call(module, empty(2, LENGTH, 4 * HEAD)) == []


@pytest.mark.parametrize("given", [(), (NUMBERS,), (NUMBERS[:1].int(),)])
def test_rotary(given):
    module, x = wavepe.nn.Rotary(HEAD), empty(2, 4, LENGTH, HEAD).requires_grad_()

    def rotate():
        q, k = module(x, x, *given)
        (q + k).sum().backward()

    assert second_call(rotate) == []


def test_attention_of_operators():
    """The composition, which stands for a kernel that is missing."""
    q, table = empty(2, 4, LENGTH, HEAD).requires_grad_(), empty(5, HEAD).requires_grad_()
    bias, segments = empty(4, 3), NUMBERS

    def call():
        call = Arguments(
            q, q, q, table, slopes=empty(4), window=4, softcap=3.0, offset=NUMBERS[:, 0],
            key_mask=NUMBERS.bool(), segments=segments, dropout_p=0.5,
            seed=empty(dtype=torch.int64), bias=bias,
        )  # fmt: skip
        out, lse, _ = composed(call)
        (out.sum() + lse.sum()).backward()

    assert second_call(call) == []


# Compiled


def graph_of(function, *given):
    """Return the nodes of the one graph of a function."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*given)
    (graph,) = graphs
    return graph.graph.nodes


def on_the_host(nodes):
    """Return the nodes on the CPU. An input on the CPU would be copied in each call."""
    values = {node: tensors(node.meta.get("example_value")) for node in nodes}
    assert any(x.device == DEVICE for found in values.values() for x in found)
    return [
        node.name for node, found in values.items() if any(x.device.type == "cpu" for x in found)
    ]


@each_but(OF_A_LLAMA, {*OF_A_LLAMA} - {"wavelet"})
def test_a_compiled_model_copies_no_constants(spec):
    model = llama(spec).train()
    nodes = graph_of(lambda ids: model(input_ids=ids, use_cache=False).logits, IDS)
    assert on_the_host(nodes) == []


@each_spec(ENCODINGS)
def test_a_compiled_module_copies_no_constants(spec):
    if spec in ABSOLUTE:
        module = wavepe.nn.AbsoluteEncoding(spec, 4 * HEAD)
    else:
        module = wavepe.nn.SelfAttention(4 * HEAD, heads=4, encoding=spec, trained_length=16)
    assert on_the_host(graph_of(module.to(DEVICE).train(), empty(2, LENGTH, 4 * HEAD))) == []


def test_cuda_tensors_reach_a_kernel_of_ours():
    for name in ("rope_qk", "rope", "rope_table", "wavelet_table"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"wavepe::{name}", "CUDA"), name
