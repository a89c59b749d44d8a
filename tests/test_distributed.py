"""Training on several processes: context parallelism, DDP, FSDP2, tensor parallelism.

The example of FSDP2 is tested in test_examples_hf.py, and fairseq's processes in
test_fairseq_training.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import distributed_worker
import encoding_cases
from cases import needs
from examples_hf import EXAMPLES, in_processes, load
from hf_model import patched_tiny
from wavepe import nn, ops

# Sums of parts against one sum, over the largest element. A gradient of a table is the
# sum of 21 parts, each rounded to bfloat16.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 21 * 2**-9}
BOUNDS["autocast"] = BOUNDS[torch.bfloat16]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def processes(request):
    return request.param


@pytest.fixture(scope="module")
def errors(processes, tmp_path_factory):
    return in_processes("errors", processes, tmp_path_factory.mktemp("distributed"))


def test_ring_attention_is_attention_to_the_whole_sequence(errors, processes):
    for case, dtype in distributed_worker.ATTENTION[processes]:
        assert errors[case, dtype] <= BOUNDS[dtype], (case, dtype)


def test_gradient_checkpointing_and_learned_encodings(errors, processes):
    """All layers share the parameters of an encoding, and each adds to their gradients."""
    for split, *case in distributed_worker.MODELS[processes]:
        if not split.__name__.endswith("_parallel") or split.__name__ == "data_parallel":
            assert errors[(split.__name__, *case)] <= 1e-5, (split, case)


@pytest.mark.parametrize("split", ["tensor_parallel", "sequence_parallel"])
def test_tensor_parallelism_is_right_or_refused(split, errors, processes):
    found = {case[1]: error for case, error in errors.items() if case[0] == split}
    refused = {spec for spec, error in found.items() if isinstance(error, str)}
    heads_differ = {"alibi", "sandwich:dim=16", *encoding_cases.LEARNED}
    heads_differ |= {encoding_cases.ASKED, *encoding_cases.COMBINED}
    assert found
    assert refused == heads_differ & set(found)
    for spec, error in found.items():
        if spec in refused:
            assert f"{spec} needs all {2 * processes} heads in one process, got 2" in error
        else:
            assert error <= 1e-5, spec


def test_the_plan_of_transformers_is_right_or_refused(tmp_path):
    """Heads are split between two processes."""
    needs("accelerate")
    right = ("wavelet:scales=4", "rope:theta=30", "none", "sinusoidal", "xpos")
    right += ("rope+window:size=8", "rope+temperature")
    refused = ("alibi", "sandwich", "kerple", "shaw:clip=3", "transformer_xl")
    for index, spec in enumerate((*right, *refused)):
        patched_tiny(spec).save_pretrained(tmp_path / f"model-{index}")
    found = in_processes("tensor_parallel_plan", 2, tmp_path)
    assert sorted(found) == sorted((*right, *refused))
    assert [found[spec] for spec in right] == [True] * len(right)
    for spec in refused:
        assert "needs all 4 heads in one process, got 2: with tensor parallelism" in found[spec]


def test_tables_that_change_meanwhile_and_distributed_tensors_are_refused():
    ring, distributed = load("ring_attention"), torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x, p = torch.ones(1, 2, 6, 4, requires_grad=True), torch.ones(6, 4)
        out = ring.ring_attention(x, x, x, p=p)
        p.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        mesh = distributed.init_device_mesh("cpu", (1,))
        shared = distributed.tensor.distribute_tensor(x, mesh)
        for call in (ops.attention, nn.Attention("fox", 4, 2, dim=4), nn.Attention("rope", 4, 2)):
            with pytest.raises(RuntimeError, match=r"q must .* got a DTensor: .*to_local\(\)"):
                call(shared, shared, shared)
    finally:
        distributed.destroy_process_group()


def test_ring_attention_refuses():
    ring, x = load("ring_attention"), torch.ones(1, 2, 6, 4)
    for options, words in (
        ({"causal": False}, "causal"),
        ({"offset": 1, "mask": None}, "mask, offset"),
    ):
        with pytest.raises(TypeError, match=f"does not take {words}"):
            ring.ring_attention(x, x, x, **options)
    for given, words in (
        ((x[0], x[0], x[0]), r"got q \(2, 0, 4\), k \(2, 6, 4\)"),
        ((x, x.double(), x), "one dtype"),
        ((x, x, x[:, :, :3]), "v"),
    ):
        with pytest.raises(RuntimeError, match=f"wavepe: .*{words}"):  # ops.attention's own words
            ring.ring_attention(*given)
    with pytest.raises(ValueError, match="need one even length, got 5 and 5"):
        ring.ring_attention(*[x[:, :, :5]] * 3)
    with pytest.raises(ValueError, match="need one even length, got 4 and 6"):
        ring.ring_attention(x[:, :, :4], x, x)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_as_its_first_lines_say():
    example = str(Path("examples", "context_parallel.py"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    kept = []
    for processes, command in ((1, (sys.executable,)), (2, torchrun)):
        out = run(*command, example, "--length", "512")
        assert out.startswith(f"{processes} processes, {512 // processes} of 512 tokens in each\n")
        kept.append(float(re.search(r"([\d.]+) MB of them kept", out)[1]))
        pairs = re.findall(r"^(?:losses|one process): *(.+)$", out, re.M)
        split, alone = ([float(loss) for loss in line.split()] for line in pairs)
        assert len(split) == 3
        assert split == pytest.approx(alone)
    assert kept[1] < 0.55 * kept[0]
