"""Training with --pos-enc and without, next to options of fairseq's; checkpoints: resumed, refused,
overridden, averaged; two processes of torchrun."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from fairseq_cases import (
    BARE,
    COMMON,
    GPT,
    LENGTH,
    MARKS,
    NO_DROPOUT,
    RECORD,
    WIKI103,
    arguments,
    corpus,
    evaluate,
    record_of,
    torch,
    train,
    trained,
    without_plugin,
)
from processes import forked, output
from wavepe.fairseq.attention import CausalSelfAttention

pytestmark = MARKS


def assert_same(state, other):
    """Nested tensors and numbers."""
    if isinstance(state, dict):
        assert state.keys() == other.keys()
        for key in state:
            if not str(key).endswith("_float_tensor"):  # fairseq's, of memory that nobody sets
                assert_same(state[key], other[key])
    elif isinstance(state, torch.Tensor):
        assert torch.equal(state, other)
    else:
        assert state == other


@pytest.mark.parametrize("recipe", [WIKI103, BARE], ids=["wiki103", "bare"])
def test_without_pos_enc_it_is_stock_fairseq(recipe, tmp_path, monkeypatch):
    ours = trained(recipe=recipe)
    perplexity = evaluate(ours.path)["perplexity"]
    without_plugin(monkeypatch)
    stock = train(tmp_path / "stock", recipe=recipe)
    assert ours.losses == stock.losses
    assert_same(ours.state["model"], stock.state["model"])
    assert evaluate(ours.path)["perplexity"] == perplexity == evaluate(stock.path)["perplexity"]
    with pytest.raises(SystemExit):
        train(tmp_path / "unknown", "--pos-enc", "alibi", recipe=recipe)


# --------------------------------------------------------------- next to options of fairseq's
def test_layer_drop(tmp_path):
    """Trained with layers left out, evaluated with all of them or with those that are kept."""
    run = train(tmp_path, "--pos-enc", "wavelet", "--decoder-layerdrop", 0.5, recipe=GPT)
    whole = evaluate(run.path)["perplexity"]
    part = evaluate(run.path, overrides={"decoder_layers_to_keep": "1"})["perplexity"]
    assert whole < 420
    assert part != whole


def test_half_precision(tmp_path):
    """Training and evaluation; what an encoding learns, and its tables, stay in float32."""
    forward, seen = CausalSelfAttention.forward, set()

    def recorded(self, query, *args, **kwargs):
        learned = {x.dtype for x in self.positions[0].parameters()}
        seen.add((query.dtype, self.q_proj.weight.dtype, *learned))
        return forward(self, query, *args, **kwargs)

    half, single = torch.float16, torch.float32
    with mock.patch.object(CausalSelfAttention, "forward", recorded):
        run = train(
            tmp_path, "--pos-enc", "wavelet:learned=true", "--memory-efficient-fp16", recipe=GPT
        )
        assert seen == {(half, half, single)}
        assert run.losses[-1] < run.losses[0] - 0.5
        wide = evaluate(run.path)["loss"]
        assert seen == {(half, half, single), (single, single, single)}
        seen.clear()
        narrow = evaluate(run.path, "--fp16")["loss"]
        assert seen == {(half, half, single)}
    assert wide != narrow
    assert abs(wide - narrow) < 0.01


# --------------------------------------------------------------- checkpoints that go on


KILLED = """
import os, signal
from wavepe.fairseq import commands
from fairseq import checkpoint_utils

save = checkpoint_utils.save_checkpoint


def saving(args, trainer, *rest):
    save(args, trainer, *rest)
    if trainer.get_num_updates() == 15:
        os.kill(os.getpid(), signal.SIGKILL)


checkpoint_utils.save_checkpoint = saving
commands.train()
"""


@pytest.mark.slow
def test_a_killed_training_is_resumed_to_the_last_bit(tmp_path):
    """With the dropout of the recipe: fairseq seeds each update, and fused attention draws its seed
    from torch's generator."""
    words = ("--pos-enc", "wavelet:learned=true")
    line = arguments(tmp_path, *words, "--save-interval-updates", 15, "--max-update", 10**6)
    done = forked("-c", KILLED, *line)
    assert done.returncode == -9, done.stderr
    whole = trained(*words, "--max-update", 25, recipe=WIKI103)
    resumed = train(tmp_path, *words, "--max-update", 25)
    assert resumed.losses == whole.losses[15:]
    for part in ("model", "last_optimizer_state"):
        assert_same(resumed.state[part], whole.state[part])


def test_longer_samples_later(tmp_path):
    """The trained length is that of the longest samples."""
    spec = "rope:theta=64,inference_theta=scaled"
    for updates, tokens, longest in ((4, LENGTH, LENGTH), (6, 64, 64), (8, 16, 64)):
        sizes = ("--tokens-per-sample", tokens, "--max-update", updates)
        run = train(tmp_path, "--pos-enc", spec, *sizes, recipe=GPT)
        assert record_of(run.state["model"])["trained_length"] == longest
        assert len(run.losses) > 0  # it went on


# --------------------------------------------------------------- checkpoints that are refused


WITHOUT_PLUGIN = """
import logging, sys
logging.basicConfig(level='INFO', stream=sys.stdout)
import wavepe.fairseq.compat
from fairseq_cli.eval_lm import cli_main
for path in sys.argv.pop(1).split(','):
    sys.argv[-1] = path
    cli_main()
"""


@pytest.mark.slow
def test_a_process_without_the_plugin_refuses_a_checkpoint_with_pos_enc():
    """Or it would evaluate other positions. It reads one without --pos-enc."""
    stock, ours = trained(recipe=BARE), trained("--pos-enc", "none", recipe=BARE)
    line = [corpus(), *COMMON, "--max-tokens", "1024", "--gen-subset", "valid", "--path", ""]
    ended = forked("-c", WITHOUT_PLUGIN, f"{stock.path},{ours.path}", *line)
    assert f"Perplexity: {evaluate(stock.path)['perplexity']:.2f}" in ended.stdout
    assert ended.stdout.count("Perplexity") == 1
    assert ended.returncode == 1
    assert f'Unexpected key(s) in state_dict: "{RECORD}"' in ended.stderr


@pytest.mark.parametrize("of_plugin", [True, False])
def test_a_stock_checkpoint_is_refused_by_a_model_with_pos_enc(of_plugin, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        if not of_plugin:  # its configuration does not know the option
            without_plugin(patch)
        stock = train(tmp_path / "stock", recipe=GPT)
    words = ("--pos-enc", "alibi", "--finetune-from-model", stock.path)
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        train(tmp_path / "own", *words, recipe=GPT)
    reason = str(caught.value.__context__)
    assert "'alibi'" in reason
    assert "do not give pos_enc" in reason


def test_another_encoding_is_refused_and_both_are_named(tmp_path):
    run = trained("--pos-enc", "wavelet:scales=4", "--max-update", 20)
    for other in ("alibi", "wavelet:scales=2", "wavelet:scales=4,learned=true", "sinusoidal"):
        with pytest.raises(RuntimeError) as caught:
            evaluate(run.path, overrides={"pos_enc": other})
        assert f"'{other}'" in str(caught.value)
        assert "'wavelet:scales=4'" in str(caught.value)
    with pytest.raises(RuntimeError, match=RECORD):
        evaluate(run.path, overrides={"pos_enc": None})
    shutil.copy(run.path, tmp_path)
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        train(tmp_path, "--pos-enc", "alibi", "--max-update", 22, recipe=GPT)
    assert "trained with 'wavelet:scales=4'" in str(caught.value.__context__)


# --------------------------------------------------------------- options of inference
def test_options_of_inference_and_the_trained_length(tmp_path):
    """An evaluation usually overrides the sizes of the task, for fairseq's own positions."""
    run = trained("--pos-enc", "rope:theta=64", "--max-update", 20)
    scaled = "rope:theta=64,inference_theta=scaled"

    def losses(path=run.path, **overrides):
        results = (evaluate(path, overrides=overrides, tokens=n) for n in (LENGTH, 4 * LENGTH))
        return [float(row["loss"]) for row in results]

    plain = losses()
    assert losses(pos_enc="rope:theta=64,inference_theta=64") == plain
    assert losses(pos_enc="rope", rope_theta=64) == plain
    assert losses(pos_enc="rope:theta=64,inference_theta=32")[0] != plain[0]
    near, far = losses(pos_enc=scaled)  # another base beyond the trained length alone
    assert (near == plain[0], far == plain[1]) == (True, False)
    record = record_of(run.state["model"])
    assert record["trained_length"] == LENGTH
    longer = {"tokens_per_sample": 128, "max_target_positions": 128}
    assert losses(pos_enc=scaled, **longer) == [near, far]
    written = json.dumps({**record, "trained_length": 128})
    words = {RECORD: torch.tensor([float(ord(letter)) for letter in written])}
    state = {**run.state, "model": {**run.state["model"], **words}}
    torch.save(state, tmp_path / "of128.pt")
    assert losses(tmp_path / "of128.pt", pos_enc=scaled)[1] != far


# --------------------------------------------------------------- means of checkpoints
def averaged(paths):
    """As fairseq's script does it, integers included."""
    states = [torch.load(path, weights_only=True) for path in paths]
    mean = {}
    for name in states[0]["model"]:
        total = sum(state["model"][name].clone() for state in states)
        whole = not torch.is_floating_point(total)
        mean[name] = total // len(states) if whole else total / len(states)
    return {**states[0], "model": mean}


def test_a_mean_of_checkpoints_keeps_its_encoding(tmp_path):
    words = ("--save-interval-updates", 5, "--max-update", 15)
    train(tmp_path, "--pos-enc", "wavelet:kind=haar,scales=4", *words, recipe=GPT)
    paths = sorted(Path(tmp_path).glob("checkpoint_1_*.pt"))
    assert len(paths) == 3
    torch.save(averaged(paths), tmp_path / "mean.pt")
    assert evaluate(tmp_path / "mean.pt")["loss"] != evaluate(paths[-1])["loss"]
    with pytest.raises(RuntimeError, match="trained with 'wavelet:kind=haar,scales=4'"):
        evaluate(tmp_path / "mean.pt", overrides={"pos_enc": "alibi"})


def test_moving_average_of_weights():
    run = trained("--pos-enc", "rope", "--store-ema")
    assert record_of(run.state["extra_state"]["ema"]) == record_of(run.state["model"])


# --------------------------------------------------------------- two processes of torchrun


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


@pytest.mark.slow
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
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 10
        one = train(tmp_path / "one" / recipe[1], *SPEC, "--update-freq", 2, recipe=recipe)
        assert largest_difference(state["model"], one.state["model"]) <= 1e-6
        assert abs(evaluate(path)["loss"] - evaluate(one.path)["loss"]) <= 1e-6
    alone = train(tmp_path / "alone", *SPEC, recipe=GPT)  # as a rank that knows of no other
    assert largest_difference(state["model"], alone.state["model"]) > 1e-3
