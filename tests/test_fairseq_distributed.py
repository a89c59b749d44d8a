"""Two processes of torchrun on the CPU: one run, the same as one process with twice the batches."""

import json

import pytest
from fairseq_cases import (
    GPT,
    MARKS,
    NO_DROPOUT,
    WIKI103,
    arguments,
    command,
    evaluate,
    torch,
    train,
)
from processes import output

pytestmark = MARKS

# Trainings one after another, as a process costs more than they do.
SCRIPT = """
import json, sys
from wavepe.fairseq import commands

if __name__ == "__main__":
    for line in json.loads(sys.argv.pop()):
        sys.argv[1:] = line
        commands.train()
"""
SPEC = ("--pos-enc", "wavelet:learned=true", *NO_DROPOUT)


def two_processes(folder, *lines):
    script = folder / "trainings.py"
    script.write_text(SCRIPT)
    line = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return output(*line, script, json.dumps(lines), **environment)


def largest_difference(state, other):
    assert state.keys() == other.keys()
    of_weights = [name for name in state if not name.endswith("_float_tensor")]
    return max((state[name] - other[name]).abs().max() for name in of_weights)


def test_two_processes_are_one_run(tmp_path):
    """Stopped, resumed, and by torch's own DDP: as one process that takes both ranks' batches.

    Two gradients can be summed in one order only, so that weights were equal to the last bit; the
    bound leaves room for the rounding of a product or two.
    """
    both = (*SPEC, "--distributed-backend", "gloo")
    adaptive, plain = tmp_path / "adaptive", tmp_path / "plain"
    out = two_processes(
        tmp_path,
        arguments(adaptive, *both, "--max-update", 6, recipe=WIKI103),
        arguments(adaptive, *both, "--max-update", 10, recipe=WIKI103),
        arguments(plain, *both, "--max-update", 10, "--ddp-backend", "pytorch_ddp", recipe=GPT),
    )
    assert out.count("training on 2 devices") == 3  # said by the first rank alone
    for folder, recipe in ((adaptive, WIKI103), (plain, GPT)):
        path = folder / "checkpoint_last.pt"
        found = torch.load(path, weights_only=True)
        assert found["optimizer_history"][-1]["num_updates"] == 10
        one = train(tmp_path / "one" / recipe[1], *SPEC, "--update-freq", 2, recipe=recipe)
        assert largest_difference(found["model"], one.state["model"]) <= 1e-6
        assert abs(evaluate(path)["loss"] - evaluate(one.path)["loss"]) <= 1e-6
    alone = train(tmp_path / "alone", *SPEC, recipe=GPT)  # as a rank that knows of no other
    assert largest_difference(found["model"], alone.state["model"]) > 1e-3


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="fairseq starts processes on the GPUs")
def test_processes_that_nobody_starts(tmp_path):
    """Without an error, fairseq would end at once with exit code 0, and train nothing."""
    line = arguments(tmp_path, "--pos-enc", "alibi", "--distributed-world-size", 2)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        command("train", *line, "--distributed-backend", "gloo")
    assert not list(tmp_path.iterdir())
