"""Checkpoints of models with --pos-enc: resumed, refused, overridden, averaged."""

import json
import signal
import time
from pathlib import Path

import pytest
from fairseq_cases import (
    BARE,
    COMMON,
    GPT,
    LENGTH,
    MARKS,
    RECORD,
    arguments,
    corpus,
    evaluate,
    process,
    record_of,
    torch,
    train,
    without_plugin,
)
from processes import python

pytestmark = MARKS

SCALED = "rope:theta=64,inference_theta=scaled"


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


def killed_after(folder, updates, *given):
    """Train in another process and kill it when the checkpoint of so many updates is written."""
    line = arguments(folder, *given, "--save-interval-updates", updates, "--max-update", 10**6)
    first, last = folder / f"checkpoint_1_{updates}.pt", folder / "checkpoint_last.pt"
    with process("train", *line) as running:
        while not (last.exists() and last.stat().st_size == first.stat().st_size):
            assert running.poll() is None, running.stdout.read()
            time.sleep(0.005)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    return torch.load(last, weights_only=True)["optimizer_history"][-1]["num_updates"]


@pytest.mark.slow
def test_a_killed_training_is_resumed_to_the_last_bit(tmp_path):
    """With the dropout of the recipe: fairseq seeds each update, and fused attention draws its seed
    from torch's generator."""
    given = ("--pos-enc", "wavelet:learned=true")
    done = killed_after(tmp_path / "killed", 15, *given)
    assert done == 15
    whole = train(tmp_path / "whole", *given, "--max-update", 25)
    resumed = train(tmp_path / "killed", *given, "--max-update", 25)
    assert resumed.losses == whole.losses[done:]
    for part in ("model", "last_optimizer_state"):
        assert_same(resumed.state[part], whole.state[part])


# --------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_a_process_without_the_plugin_refuses_a_checkpoint_with_pos_enc(tmp_path):
    """Or it would evaluate other positions. It reads one without --pos-enc."""
    stock = train(tmp_path / "stock", recipe=BARE)
    own = train(tmp_path / "own", "--pos-enc", "none", recipe=BARE)
    script = (
        "import logging, sys\n"
        "logging.basicConfig(level='INFO', stream=sys.stdout)\n"
        "import wavepe.fairseq.compat\n"
        "from fairseq_cli.eval_lm import cli_main\n"
        "for path in sys.argv.pop(1).split(','):\n"
        "    sys.argv[-1] = path\n"
        "    cli_main()\n"
    )
    line = [corpus(), *COMMON, "--max-tokens", "1024", "--gen-subset", "valid", "--path", ""]
    ended = python("-c", script, f"{stock.path},{own.path}", *line)
    assert f"Perplexity: {evaluate(stock.path)['perplexity']:.2f}" in ended.stdout
    assert ended.stdout.count("Perplexity") == 1
    assert ended.returncode == 1
    assert f'Unexpected key(s) in state_dict: "{RECORD}"' in ended.stderr


def test_a_stock_checkpoint_is_refused_by_a_model_with_pos_enc(tmp_path, monkeypatch):
    stock = train(tmp_path / "stock", recipe=GPT)
    for of_plugin in (True, False):
        if not of_plugin:  # its configuration does not know the option
            with monkeypatch.context() as patch:
                without_plugin(patch)
                stock = train(tmp_path / "of_stock", recipe=GPT)
        with pytest.raises(Exception, match="Cannot load model parameters") as caught:
            train(
                tmp_path / f"own{of_plugin}", "--pos-enc", "alibi", "--finetune-from-model",
                stock.path, recipe=GPT,
            )  # fmt: skip
        reason = str(caught.value.__context__)
        assert "'alibi'" in reason
        assert "do not give pos_enc" in reason


def test_another_encoding_is_refused_and_both_are_named(tmp_path):
    run = train(tmp_path, "--pos-enc", "wavelet:scales=4", recipe=GPT)
    for other in ("alibi", "wavelet:scales=2", "wavelet:scales=4,learned=true", "sinusoidal"):
        with pytest.raises(RuntimeError) as caught:
            evaluate(run.path, overrides={"pos_enc": other})
        assert f"'{other}'" in str(caught.value)
        assert "'wavelet:scales=4'" in str(caught.value)
    with pytest.raises(RuntimeError, match=RECORD):
        evaluate(run.path, overrides={"pos_enc": None})
    with pytest.raises(Exception, match="Cannot load model parameters") as caught:
        train(tmp_path, "--pos-enc", "alibi", "--max-update", 12, recipe=GPT)
    assert "trained with 'wavelet:scales=4'" in str(caught.value.__context__)


# --------------------------------------------------------------- options of inference


def test_options_of_inference_are_allowed(tmp_path):
    run = train(tmp_path, "--pos-enc", "rope:theta=64", "--max-update", 40, recipe=GPT)
    losses = {}
    for option in ("", ",inference_theta=64", ",inference_theta=32", ",inference_theta=scaled"):
        overrides = {"pos_enc": f"rope:theta=64{option}"}
        losses[option] = [
            float(evaluate(run.path, overrides=overrides, tokens=n)["loss"])
            for n in (LENGTH, 4 * LENGTH)
        ]
    plain = losses[""]
    assert losses[",inference_theta=64"] == plain
    assert losses[",inference_theta=32"][0] != plain[0]
    # it is another base beyond the trained length alone
    assert losses[",inference_theta=scaled"][0] == plain[0]
    assert losses[",inference_theta=scaled"][1] != plain[1]
    other_name = {"pos_enc": "rope", "rope_theta": 64}
    assert float(evaluate(run.path, overrides=other_name)["loss"]) == plain[0]


def test_the_trained_length_is_not_that_of_an_evaluation(tmp_path):
    """With fairseq's own positions, an evaluation usually overrides the sizes of the task."""
    run = train(tmp_path, "--pos-enc", SCALED, "--max-update", 40, recipe=GPT)
    assert record_of(run.state["model"])["trained_length"] == LENGTH
    wanted = evaluate(run.path, tokens=128)["loss"]
    overrides = {"tokens_per_sample": 128, "max_target_positions": 128}
    assert evaluate(run.path, overrides=overrides, tokens=128)["loss"] == wanted
    written = json.dumps({**record_of(run.state["model"]), "trained_length": 128})
    run.state["model"][RECORD] = torch.tensor([float(ord(letter)) for letter in written])
    torch.save(run.state, tmp_path / "of128.pt")
    assert evaluate(tmp_path / "of128.pt", tokens=128)["loss"] != wanted


def test_longer_samples_later(tmp_path):
    """The trained length is that of the longest samples."""
    for updates, tokens, longest in ((4, LENGTH, LENGTH), (6, 64, 64), (8, 16, 64)):
        sizes = ("--tokens-per-sample", tokens, "--max-update", updates)
        run = train(tmp_path, "--pos-enc", SCALED, *sizes, recipe=GPT)
        assert record_of(run.state["model"])["trained_length"] == longest
        assert len(run.losses) > 0  # it went on


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
    given = ("--save-interval-updates", 5, "--max-update", 15)
    train(tmp_path, "--pos-enc", "wavelet:kind=haar,scales=4", *given, recipe=GPT)
    paths = sorted(Path(tmp_path).glob("checkpoint_1_*.pt"))
    assert len(paths) == 3
    torch.save(averaged(paths), tmp_path / "mean.pt")
    assert evaluate(tmp_path / "mean.pt")["loss"] != evaluate(paths[-1])["loss"]
    with pytest.raises(RuntimeError, match="trained with 'wavelet:kind=haar,scales=4'"):
        evaluate(tmp_path / "mean.pt", overrides={"pos_enc": "alibi"})


def test_moving_average_of_weights(tmp_path):
    run = train(tmp_path, "--pos-enc", "rope", "--store-ema", recipe=GPT)
    assert record_of(run.state["extra_state"]["ema"]) == record_of(run.state["model"])
