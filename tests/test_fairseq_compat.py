"""The shims that fairseq 0.12 needs with today's packages: fairseq breaks without each."""

import argparse
import dataclasses
import inspect
import io
import pickle
import sys

import fairseq_cases as cases
import numpy as np
import pytest
from fairseq_cases import torch
from processes import forked
from wavepe.fairseq import compat

pytestmark = cases.MARKS

no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="of machines without a GPU")


def original(module, name):
    """Return the function that the shim has wrapped."""
    wrapped = getattr(module, name)
    unwrapped = inspect.unwrap(wrapped)
    assert unwrapped is not wrapped, f"the shim of {name} is not in place"
    return unwrapped


@pytest.mark.skipif(not cases.NEEDS_SHIM, reason="no such defaults, or a Python that takes them")
def test_fairseq_is_not_imported_without_the_shim():
    ended = forked("-c", "import fairseq")
    assert ended.returncode == 1
    assert "ValueError: mutable default" in ended.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 takes such defaults")
def test_defaults_are_taken_within_the_block_and_of_fairseq_alone():
    def of(module):
        inner = dataclasses.dataclass(type("Inner", (), {"__module__": module}))
        return dataclasses.make_dataclass("Outer", [("inner", inner, inner())])

    before = dataclasses.dataclass
    with pytest.raises(ValueError, match="mutable default"):
        of("fairseq.dataclass.configs")
    with compat.allow_mutable_defaults():
        assert dataclasses.dataclass is not before
        first, second = of("fairseq.dataclass.configs")(), of("hydra.conf")()
        assert first != second
        assert hash(first.inner) == hash(first.inner)
        with pytest.raises(ValueError, match="mutable default"):
            of("fairseqs.own")
        with pytest.raises(ValueError, match="mutable default"):
            of("somebody.fairseq")
    assert dataclasses.dataclass is before
    with pytest.raises(RuntimeError, match="of the block"), compat.allow_mutable_defaults():
        raise RuntimeError("of the block")
    assert dataclasses.dataclass is before


@pytest.mark.skipif(int(np.__version__.split(".")[0]) < 2, reason="NumPy 1 has np.compat")
def test_lines_as_samples(tmp_path, monkeypatch):
    """--sample-break-mode eos."""
    monkeypatch.delattr(np, "compat")
    words = ("--pos-enc", "alibi", "--sample-break-mode", "eos", "--max-update", 2)
    with pytest.raises(AttributeError, match="has no attribute 'compat'"):
        cases.train(tmp_path, *words, recipe=cases.GPT)
    monkeypatch.undo()
    run = cases.train(tmp_path, *words, recipe=cases.GPT)
    assert len(run.losses) == 2
    assert cases.evaluate(run.path, "--sample-break-mode", "eos")["perplexity"] < 1000


class Received:
    """The object that a later rank gets from `_broadcast_object_slow`, without a group."""

    def __init__(self, monkeypatch, value):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.bytes = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        monkeypatch.setattr(cases.fairseq.distributed.utils, "get_rank", lambda group: 1)
        monkeypatch.setattr(cases.fairseq.distributed.utils, "broadcast", self.broadcast)

    def broadcast(self, tensor, src, group):
        length = tensor.dtype == torch.int64
        tensor.copy_(torch.tensor([len(self.bytes)]) if length else self.bytes)


def test_objects_of_another_rank(monkeypatch):
    """A checkpoint's configuration, which ranks get where a training is resumed."""
    state = {"cfg": cases.configuration(cases.arguments("unused")), "num_updates": 3}
    Received(monkeypatch, state)
    utils, load = cases.fairseq.distributed.utils, torch.load
    sent = (None, 0, None, torch.device("cpu"))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        original(utils, "_broadcast_object_slow")(*sent)
    assert utils._broadcast_object_slow(*sent) == state
    assert torch.load is load


def test_namespaces_in_checkpoints(tmp_path):
    """Checkpoints of translation models hold a namespace."""
    torch.save({"args": argparse.Namespace(arch="transformer")}, tmp_path / "x.pt")
    known = torch.serialization.get_safe_globals()
    assert argparse.Namespace in known
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
            cases.fairseq.checkpoint_utils.load_checkpoint_to_cpu(tmp_path / "x.pt")
    finally:
        torch.serialization.add_safe_globals(known)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["args"].arch == "transformer"


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    method = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@no_gpu
def test_torchs_ddp_on_the_cpu(group, monkeypatch):
    wrapping = cases.fairseq.models.distributed_fairseq_model
    cfg = cases.configuration(
        cases.arguments("unused", "--ddp-backend", "pytorch_ddp")
    ).distributed_training
    module = torch.nn.Linear(2, 2)

    def wrapped():
        return wrapping.DistributedFairseqModel(cfg, module, group, torch.device("cpu"))

    assert wrapped()(torch.ones(2)).shape == (2,)
    monkeypatch.setattr(
        wrapping, "DistributedDataParallel", original(wrapping, "DistributedDataParallel")
    )
    with pytest.raises(ValueError, match="device_ids"):
        wrapped()


UTILS = cases.fairseq.distributed.utils


@pytest.fixture
def launched(monkeypatch):
    """Run a training here by fairseq's call_main; return how it runs, and its configuration."""

    def launch(*words, stock=False, **env):
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        cfg, seen = cases.configuration(cases.arguments("unused", *words)), []
        monkeypatch.setattr(UTILS, "distributed_main", lambda *a, **k: seen.append("several"))
        call_main = original(UTILS, "call_main") if stock else UTILS.call_main
        call_main(cfg, lambda *a, **k: seen.append("alone"))
        return seen, cfg.distributed_training

    return launch


TWO = ("--distributed-world-size", 2)
WITH_ADDRESS = ("--distributed-init-method", "tcp://localhost:1", "--distributed-num-procs", 2)


@no_gpu
def test_processes_that_nobody_starts(launched):
    with pytest.raises(AssertionError, match="world size is 2 but have 0 available devices"):
        launched(*TWO, stock=True)
    assert launched(*TWO, *WITH_ADDRESS, stock=True)[0] == []  # nothing is trained, nor said
    for words in (TWO, TWO + WITH_ADDRESS):
        with pytest.raises(ValueError, match="size 2: fairseq starts one process per GPU"):
            launched(*words)


TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}


@no_gpu
def test_processes_of_torchrun(launched):
    seen, cfg = launched(**TORCHRUN)
    assert seen == ["several"]
    assert (cfg.distributed_rank, cfg.distributed_world_size) == (1, 2)
    assert cfg.distributed_no_spawn
    one = TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}
    assert launched(**one)[0] == launched(stock=True, **one)[0]


@no_gpu
@pytest.mark.skipif(not cases.FIXED, reason="fairseq 0.12.2 knows the processes of torchrun")
def test_processes_of_torchrun_as_fairseq_fixed_takes_them(launched):
    assert launched(stock=True, **TORCHRUN)[0] == ["alone"]
    with pytest.raises(ZeroDivisionError):
        launched("--distributed-world-size", 2, stock=True, **TORCHRUN)
