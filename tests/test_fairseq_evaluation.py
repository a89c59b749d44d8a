"""wavepe-fairseq-eval-lm: all tokens or none, at any length, in windows and in batches."""

import logging
import math
from types import SimpleNamespace

import pytest
from fairseq_cases import (
    GPT,
    LENGTH,
    MARKS,
    checkpoint_utils,
    command,
    corpus,
    dictionary,
    evaluate,
    fairseq_cli,
    tasks,
    torch,
    train,
    validation_words,
)
from wavepe.fairseq.evaluation import refuse_skipped_tokens

pytestmark = MARKS

TOO_FEW_POSITIONS = {"max_target_positions": 10}
LINES = ("--sample-break-mode", "eos")


@pytest.fixture
def unguarded():
    """Restore fairseq's own eval-lm after the test."""
    owners = (fairseq_cli.eval_lm, fairseq_cli.eval_lm.distributed_utils, tasks.FairseqTask)
    before = [dict(vars(owner)) for owner in owners]
    yield
    for owner, members in zip(owners, before, strict=True):
        for name in vars(owner).keys() - members.keys():
            delattr(owner, name)
        for name, value in members.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


@pytest.fixture
def guarded(unguarded):
    """Use our eval-lm in a test."""
    refuse_skipped_tokens()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The path of a checkpoint by its --pos-enc; None is fairseq's own positions."""
    paths = {}

    def path(spec):
        if spec not in paths:
            given = () if spec is None else ("--pos-enc", spec)
            paths[spec] = train(tmp_path_factory.mktemp("run"), *given, recipe=GPT).path
        return paths[spec]

    return path


# --------------------------------------------------------------- nothing is left out


def test_blocks_longer_than_the_positions(guarded, trained):
    with pytest.raises(ValueError, match=r"up to 64 tokens and this model has 32 positions"):
        evaluate(trained(None), tokens=64)
    longer = evaluate(trained(None), tokens=64, overrides={"max_target_positions": 64})
    assert 1 < longer["perplexity"] < 500


@pytest.mark.parametrize(
    ("processes", "launched", "shards"), [(2, None, 1), (1, "2", 1), (1, None, 2)]
)
def test_several_processes_or_shards(guarded, monkeypatch, processes, launched, shards):
    """Each would evaluate a part of the tokens, and one would print that as the whole."""
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    cfg = SimpleNamespace(
        distributed_training=SimpleNamespace(distributed_world_size=processes),
        dataset=SimpleNamespace(num_shards=shards),
    )
    with pytest.raises(ValueError, match="each would evaluate a part of the tokens"):
        fairseq_cli.eval_lm.distributed_utils.call_main(cfg, fairseq_cli.eval_lm.main)


def test_some_lines_longer_than_the_positions(guarded, trained):
    with pytest.raises(
        ValueError, match=r"eval-lm would skip [1-9]\d* of 100 blocks, .* has 10 positions"
    ):
        evaluate(trained(None), *LINES, overrides=TOO_FEW_POSITIONS)
    assert evaluate(trained(None), *LINES)["perplexity"] < 500


def test_what_fairseq_does_with_them(trained, caplog):
    """Without the guard: the perplexity of the last block alone, which is shorter."""
    caplog.set_level(logging.INFO, logger="fairseq_cli.eval_lm")
    evaluate(trained(None), tokens=64)
    rest = len(validation_words()) % 64
    assert 0 < rest <= LENGTH
    assert f"Evaluated {rest} tokens" in caplog.text


def test_the_command_has_the_guard(unguarded, trained):
    line = (corpus(), "--path", trained(None), "--gen-subset", "valid", "--tokens-per-sample", 64)
    line += ("--cpu", "--num-workers", 0, "--no-progress-bar", "--sample-break-mode", "none")
    with pytest.raises(ValueError, match="up to 64 tokens and this model has 32 positions"):
        command("eval_lm", *line)
    command("eval_lm", *line[:-3], *line[-2:], "--tokens-per-sample", 32)


# fairseq's own dataset of an empty file cannot even be deleted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_tokens_at_all(guarded, trained, tmp_path):
    """A shard beyond the last batch, and a split without a line."""
    shards = ("--num-shards", 500, "--shard-id", 499)
    with pytest.raises(ValueError, match="evaluated no tokens: is the data of --gen-subset empty"):
        evaluate(trained("alibi"), *shards)
    (tmp_path / "empty").write_text("")
    known = ("--srcdict", f"{corpus()}/dict.txt", "--destdir", tmp_path / "bin", "--workers", 1)
    command("preprocess", "--only-source", "--testpref", tmp_path / "empty", *known)
    with pytest.raises(ValueError, match="empty"):
        evaluate(trained("alibi"), "--gen-subset", "test", data=tmp_path / "bin")


# --------------------------------------------------------------- lengths and windows


@pytest.mark.parametrize(
    "spec", ["wavelet", "rope", "alibi", "t5", "kerple", "sandwich", "sinusoidal", "shaw"]
)
def test_eight_times_the_trained_length(spec, guarded, trained, caplog):
    """With no override, and all tokens of it."""
    caplog.set_level(logging.INFO, logger="fairseq_cli.eval_lm")
    found = [evaluate(trained(spec), tokens=n)["loss"] for n in (LENGTH, 8 * LENGTH)]
    assert found[0] != found[1]
    assert max(found) < math.log2(len(dictionary()))
    assert caplog.text.count(f"Evaluated {len(validation_words()):,} tokens") == 2


def by_hand(path, block, context):
    """Loss (base 2) of blocks of words, each predicted from itself and the context before it."""
    ([made], _, _) = checkpoint_utils.load_model_ensemble_and_task([path])
    made.eval()
    wanted = validation_words()
    given = torch.cat([torch.tensor([dictionary().eos()]), wanted[:-1]])
    total = 0.0
    for start in range(0, len(wanted), block):
        targets = wanted[start : start + block]
        ids = given[max(0, start - context) : start + block]
        with torch.no_grad():
            found = made.get_normalized_probs(made(ids[None]), log_probs=True)[0]
        total -= found[-len(targets) :].gather(1, targets[:, None]).sum().double()
    return float(total) / len(wanted) / math.log(2)


@pytest.mark.parametrize("spec", ["wavelet", "rope", "alibi", "normalised"])
def test_windows_with_padding(spec, guarded, trained):
    """The first block has no context and the last one is shorter: both are padded on the right."""
    block, context = 8, 24
    assert len(validation_words()) % block
    wanted = by_hand(trained(spec), block, context)
    for batch in (1, 5):
        found = evaluate(trained(spec), "--context-window", context, tokens=32, batch=batch)
        assert abs(float(found["loss"]) - wanted) <= 2e-6 * wanted


def test_context_helps_to_predict(guarded, tmp_path):
    """If context did not help, the tests of windows could not fail."""
    run = train(tmp_path, "--pos-enc", "alibi", "--max-update", 40, recipe=GPT)
    one, many = (
        float(evaluate(run.path, "--context-window", 32 - n, tokens=32)["loss"]) for n in (31, 8)
    )
    assert many < one
