"""Patched Llamas under torch.compile and torch.export: one graph, right at every length."""

import os
from pathlib import Path

import pytest
import torch
import wavepe.hf
from cases import soon
from encoding_cases import LEARNED
from hf_families import stirred
from hf_model import (
    EACH_ENTRY,
    LENGTH,
    Logits,
    close,
    gradients,
    logits,
    patched_tiny,
    tiny,
    tokens,
)
from processes import forked, output
from transformers import StaticCache

WAVELET = "wavelet:scales=4"
ONE = {"num_hidden_layers": 1}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def each(specs, *quick):
    """Run a test with each encoding; without --all, with the quick ones."""
    return pytest.mark.parametrize("spec", soon(specs, *quick))


@pytest.fixture
def graphs():
    """The graphs that `compiled` has made."""
    return []


@pytest.fixture
def compiled(graphs):
    """A function that compiles a model into one graph, and keeps it."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return lambda model, **options: torch.compile(model, fullgraph=True, backend=backend, **options)


def padded(length, rows=2):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :4] = 0
    return mask


@each((*EACH_ENTRY, *LEARNED), "transformer_xl")
def test_one_graph_for_every_length(spec, compiled, graphs):
    model = stirred(patched_tiny(spec, **ONE))
    run = compiled(model, dynamic=True)
    for length in (9, 12, 3 * LENGTH, 200):
        ids = tokens(2, length)
        options = {"attention_mask": padded(length), "use_cache": False}
        assert torch.equal(logits(run, ids, **options), logits(model, ids, **options))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_library_of_aotinductor(tmp_path):
    """A process that imports torch and wavepe.nn alone runs it, and the exported program."""
    model, ids = patched_tiny(WAVELET, **ONE), tokens(2, 9)
    shapes = {"ids": {1: torch.export.Dim("length", min=2)}}
    with torch.no_grad():
        program = torch.export.export(Logits(model).eval(), (ids,), dynamic_shapes=shapes)
        library = str(tmp_path / "library.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=library)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(tokens(2, 300), tmp_path / "ids.pt")
    script = """
import sys, torch, wavepe.nn
library = torch._inductor.aoti_load_package(sys.argv[1])
program = torch.export.load("program.pt2").module()
with torch.no_grad():
    torch.save([f(torch.load("ids.pt")) for f in (library, program)], "out.pt")
assert not {"transformers", "wavepe.hf"} & set(sys.modules)
"""
    output("-c", script, library, cwd=tmp_path)
    for got in torch.load(tmp_path / "out.pt"):
        assert close(got, logits(model, tokens(2, 300)), 1e-5)


@each((WAVELET, "shaw"), WAVELET)
def test_steps_with_a_static_cache(spec, compiled, graphs):
    model, ids = patched_tiny(spec, **ONE), tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    run = compiled(model, dynamic=True)
    pieces = [logits(model, ids[:, :5], past_key_values=cache)]
    for start in range(5, 12):
        positions = torch.tensor([[start]])
        options = {"past_key_values": cache, "position_ids": positions}
        pieces.append(logits(run, ids[:, start : start + 1], **options))
    assert close(torch.cat(pieces, dim=1), logits(model, ids, use_cache=False), 1e-5)
    assert len(graphs) == 1


@each((WAVELET, "sinusoidal", *LEARNED))
def test_training(spec):
    """Gradients, of what is learned too, and with the same dropout."""
    model = stirred(patched_tiny(spec, **ONE, attention_dropout=0.5)).train()
    ids = tokens(2, 9)
    torch.manual_seed(0)
    wanted = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    for got, gradient in zip(gradients(compiled, ids), wanted, strict=True):
        assert close(got, gradient, 1e-5)


POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
CAUSAL = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
HOW = {
    "padding": {"attention_mask": padded(12)},
    "packed": {"position_ids": POSITIONS},
    "own": {"attention_mask": CAUSAL},
    "lengths": {"cu_seq_lens_q": ENDS},
}
QUICK = [(WAVELET, "packed")]
MASKED = [
    *QUICK, ("alibi", "lengths"), (WAVELET, "own"), (WAVELET, "padding"),
    ("transformer_xl", "padding"), ("alibi", "packed"),
]  # fmt: skip
MASKED += [(spec, "lengths") for spec in (WAVELET, "shaw:clip=3", "none", "rope", "sinusoidal")]


@pytest.mark.parametrize(("spec", "how"), soon(MASKED, *QUICK))
def test_what_is_seen(spec, how, compiled, graphs):
    model, ids = patched_tiny(spec, **ONE), tokens(1 if how == "lengths" else 2, 12)
    options = {**HOW[how], "use_cache": False}
    assert torch.equal(logits(compiled(model), ids, **options), logits(model, ids, **options))
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("wavepe.attention" in target for target in targets)
    if how == "lengths":
        alone = [logits(model, piece) for piece in (ids[:, :5], ids[:, 5:])]
        assert close(logits(model, ids, **options), torch.cat(alone, 1), 1e-5)


@each(("alibi", "sinusoidal"), "alibi")
def test_a_model_that_was_compiled_first_follows(spec):
    model, ids = tiny(**ONE), tokens(2, 9)
    stock = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, ids), stock)
    with wavepe.hf.patched(model, spec):
        assert torch.equal(logits(compiled, ids), logits(model, ids))
        assert not close(logits(model, ids), stock, 1e-2)
    assert torch.equal(logits(compiled, ids), stock)


@pytest.mark.slow
def test_hybrids():
    model, ids = tiny(num_hidden_layers=4), tokens(2, 14)
    wavepe.hf.patch(model, {"0": WAVELET, "1": "alibi", "2": "none", "3": "rope"})
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, ids), logits(model, ids))


@pytest.mark.slow
def test_the_attention_of_a_stock_model():
    model, ids = tiny(), tokens(2, 20)
    wanted = logits(model, ids)
    model.set_attn_implementation("wavepe")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert close(logits(compiled, ids, use_cache=False), wanted, 1e-5)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        parts = [compiled(part, past_key_values=cache).logits for part in ids.split((12, 8), 1)]
    assert close(torch.cat(parts, 1), wanted, 1e-5)


@each(("rope:type=dynamic,factor=2", "rope:inference_theta=scaled"))
def test_frequencies_that_follow_the_length_are_made_outside_the_graph(spec):
    model = patched_tiny(spec, **ONE)
    compiled = torch.compile(model, dynamic=True, backend="eager")
    for length in (9, 3 * LENGTH, 2 * LENGTH):
        ids = tokens(2, length)
        wanted = logits(model, ids, use_cache=False)
        assert torch.equal(logits(compiled, ids, use_cache=False), wanted)


@pytest.mark.slow
def test_a_length_that_is_fixed_later():
    model, ids = patched_tiny("rope:theta=30,inference_theta=scaled", **ONE), tokens(1, 24)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert close(compiled(ids).logits, logits(model, ids), 1e-6)
        for length in (40, 50, None):
            wavepe.hf.fix_length(model, length)
            assert close(compiled(ids).logits, logits(model, ids), 1e-6)


@pytest.mark.filterwarnings("ignore")  # of torch.jit and of transformers
@pytest.mark.parametrize("spec", ["rope", "alibi", "wavelet:scales=4"])
def test_jit_traces_are_refused(spec):
    """They would keep what Python computes for one length."""
    with pytest.raises(RuntimeError, match=rf"the position encoding '{spec}'.*use torch.export"):
        torch.jit.trace(patched_tiny(spec), tokens(1, 5), check_trace=False, strict=False)


def test_positions_that_are_not_counted_fail_in_a_graph():
    """A compiled model does not read them, and would count tokens."""
    model, ids = patched_tiny("alibi", **ONE), tokens(1, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    args = {"attention_mask": torch.ones(1, 8, dtype=torch.long), "use_cache": False}
    got = compiled(ids, position_ids=packed, **args).logits.detach()
    assert close(got, logits(model, ids, position_ids=packed, **args), 1e-5)
    gap = torch.tensor([[0, 1, 2, 7, 8, 9, 10, 11]])
    with pytest.raises(RuntimeError, match="in a compiled model positions must rise by 1"):
        compiled(ids, position_ids=gap, **args)
    model = patched_tiny("rope:theta=30", **ONE)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = compiled(ids, position_ids=gap, **args).logits.detach()
    assert close(got, logits(model, ids, position_ids=gap, **args), 1e-5)


FIRST = """
import torch, wavepe.hf
from hf_model import close, logits, patched_tiny, tokens
model = patched_tiny("rope+alibi", num_hidden_layers=1)
compiled = torch.compile(model, dynamic=True, backend="aot_eager")
assert close(logits(compiled, tokens(2, 9)), logits(model, tokens(2, 9)), 1e-5)
"""


@pytest.mark.slow
def test_a_model_is_the_first_that_a_process_compiles():
    """Nothing of wavepe was traced before, so its marks are set in this trace."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(wavepe.__file__).parents[1])])
    output("-c", FIRST, start=forked, PYTHONPATH=path)
