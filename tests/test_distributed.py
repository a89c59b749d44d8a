"""Training on several processes: context parallelism, DDP, FSDP2, tensor parallelism.

The example of FSDP2 is tested in test_examples_hf.py, fairseq's processes in
test_fairseq_distributed.py, and transformers' tensor parallelism in test_hf_workflows.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import distributed_worker
import encoding_cases
from examples_hf import EXAMPLES, load

pytestmark = pytest.mark.slow
# Sums of parts against one sum, over the largest element. A gradient of a table is the
# sum of 21 parts, each rounded to bfloat16.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 21 * 2**-9}
BOUNDS["autocast"] = BOUNDS[torch.bfloat16]


PROCESSES = 3  # the example has two


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    folder = tmp_path_factory.mktemp("distributed")
    arguments = (PROCESSES, str(folder))
    torch.multiprocessing.spawn(distributed_worker.work, arguments, nprocs=PROCESSES)
    return torch.load(folder / "found", weights_only=False)


def test_ring_attention_is_attention_to_the_whole_sequence(errors):
    for case in distributed_worker.CASES:
        for dtype, bound in BOUNDS.items():
            assert errors[case, dtype] <= bound, (case, dtype)


def test_gradient_checkpointing_and_learned_encodings(errors):
    """All layers share the parameters of an encoding, and each adds to their gradients."""
    for split, count in (("data_parallel", 4), ("fsdp2", 8), ("fsdp2_without_a_group", 1)):
        found = {case: error for case, error in errors.items() if case[0] == split}
        assert len(found) == count
        assert all(error <= 1e-5 for error in found.values()), found


@pytest.mark.parametrize("split", ["tensor_parallel", "sequence_parallel"])
def test_tensor_parallelism_is_right_or_refused(errors, split):
    found = {case[1][0]: error for case, error in errors.items() if case[0] == split}
    refused = {spec for spec, error in found.items() if isinstance(error, str)}
    heads_differ = {"alibi", "sandwich:dim=16", *encoding_cases.LEARNED}
    assert refused == heads_differ & set(found)
    for spec, error in found.items():
        if spec in refused:
            assert f"{spec} needs all 6 heads in one process, got 2" in error
        else:
            assert error <= 1e-5, spec


def test_ring_attention_of_a_table_that_changes_meanwhile():
    ring, distributed = load("ring_attention"), torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x, p = torch.ones(1, 2, 6, 4, requires_grad=True), torch.ones(6, 4)
        out = ring.ring_attention(x, x, x, p=p)
        p.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
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
