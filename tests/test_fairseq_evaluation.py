"""wavepe-fairseq-eval-lm: all tokens or none, at any length, in windows and in batches; and
wavepe-fairseq-generate: beams, prefixes, and the scores of what it prints."""

import math
import re
from types import SimpleNamespace
from unittest import TestCase

import pytest
from fairseq_cases import (
    COMMON,
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
    trained,
    usually,
    validation_words,
)
from wavepe.fairseq.evaluation import refuse_skipped_tokens

pytestmark = MARKS

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


def path_of(spec):
    """Return the checkpoint of a --pos-enc; None is fairseq's own positions."""
    return trained(*(() if spec is None else ("--pos-enc", spec))).path


def loaded(path):
    ([made], _, _) = checkpoint_utils.load_model_ensemble_and_task([path])
    return made.eval()


def test_blocks_longer_than_the_positions(guarded):
    with pytest.raises(ValueError, match=r"up to 64 tokens and this model has 32 positions"):
        evaluate(path_of(None), tokens=64)
    longer = evaluate(path_of(None), tokens=64, overrides={"max_target_positions": 64})
    assert 1 < longer["perplexity"] < 500


@pytest.mark.parametrize(
    ("processes", "launched", "shards"), [(2, "1", 1), (1, "2", 1), (1, "1", 2)]
)
def test_several_processes_or_shards(guarded, monkeypatch, processes, launched, shards):
    """Each would evaluate a part of the tokens, and one would print that as the whole."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, launched)
    cfg = SimpleNamespace(
        distributed_training=SimpleNamespace(distributed_world_size=processes),
        dataset=SimpleNamespace(num_shards=shards),
    )
    with pytest.raises(ValueError, match="each would evaluate a part of the tokens"):
        fairseq_cli.eval_lm.distributed_utils.call_main(cfg, fairseq_cli.eval_lm.main)


def test_some_lines_longer_than_the_positions(guarded):
    few = {"max_target_positions": 10}
    skipped = r"eval-lm would skip [1-9]\d* of 100 blocks, .* has 10 positions"
    with pytest.raises(ValueError, match=skipped):
        evaluate(path_of(None), *LINES, overrides=few)
    assert evaluate(path_of(None), *LINES)["perplexity"] < 500


def test_the_command_has_the_guard(unguarded, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # alone it says nothing to fairseq
    line = [corpus(), *COMMON, "--path", path_of(None), "--gen-subset", "valid"]
    with pytest.raises(ValueError, match="up to 64 tokens and this model has 32 positions"):
        command("eval_lm", *line, "--tokens-per-sample", 64)
    command("eval_lm", *line)


# fairseq's own dataset of an empty file cannot even be deleted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_tokens_at_all(guarded, tmp_path):
    """A shard beyond the last batch, and a split without a line."""
    shards = ("--num-shards", 500, "--shard-id", 499)
    with pytest.raises(ValueError, match="evaluated no tokens: is the data of --gen-subset empty"):
        evaluate(path_of("alibi"), *shards)
    (tmp_path / "empty").write_text("")
    known = ("--srcdict", f"{corpus()}/dict.txt", "--destdir", tmp_path / "bin", "--workers", 1)
    command("preprocess", "--only-source", "--testpref", tmp_path / "empty", *known)
    with pytest.raises(ValueError, match="empty"):
        evaluate(path_of("alibi"), "--gen-subset", "test", data=tmp_path / "bin")


FOUR = ("wavelet", "rope", "alibi", "normalised")


@pytest.mark.parametrize(
    "spec",
    usually(["wavelet", "rope", "alibi", "t5", "kerple", "sandwich", "sinusoidal", "shaw"], FOUR),
)
def test_eight_times_the_trained_length(spec, guarded):
    """With no override, and all tokens of it."""
    with TestCase().assertLogs("fairseq_cli.eval_lm") as logs:
        losses = [evaluate(path_of(spec), tokens=n)["loss"] for n in (LENGTH, 8 * LENGTH)]
    assert losses[0] != losses[1]
    assert max(losses) < math.log2(len(dictionary()))
    assert str(logs.output).count(f"Evaluated {len(validation_words()):,} tokens") == 2


def by_hand(path, block, context):
    """Loss (base 2) of blocks of words, each predicted from itself and the context before it."""
    made, wanted = loaded(path), validation_words()
    inputs = torch.cat([torch.tensor([dictionary().eos()]), wanted[:-1]])
    total = 0.0
    for start in range(0, len(wanted), block):
        targets = wanted[start : start + block]
        ids = inputs[max(0, start - context) : start + block]
        with torch.no_grad():
            scores = made.get_normalized_probs(made(ids[None]), log_probs=True)[0]
        total -= scores[-len(targets) :].gather(1, targets[:, None]).sum().double()
    return float(total) / len(wanted) / math.log(2)


@pytest.mark.parametrize("spec", FOUR)
def test_windows_with_padding(spec, guarded):
    """The first block has no context and the last one is shorter: both are padded on the right."""
    block, context = 8, 24
    assert len(validation_words()) % block
    wanted = by_hand(path_of(spec), block, context)
    assert abs(by_hand(path_of(spec), block, 0) - wanted) > 4e-6 * wanted  # the context matters
    for batch in (1, 5):
        result = evaluate(path_of(spec), "--context-window", context, tokens=32, batch=batch)
        assert abs(float(result["loss"]) - wanted) <= 2e-6 * wanted


def generated(path, capsys, *words):
    """Return (prompt, words, score in bits of each word) by the number of the line."""
    line = [corpus(), *COMMON, "--path", path, "--gen-subset", "valid", "--beam", 2, "--nbest", 2]
    line += ["--sample-break-mode", "eos", "--max-len-b", 12, "--batch-size", 8, *words]
    line += ["--num-shards", 3, "--shard-id", 2]  # a third of the batches is enough
    capsys.readouterr()
    command("generate", *line)
    out = capsys.readouterr().out
    rows = {}
    for kind in ("S", "H", "P"):
        for number, text in re.findall(rf"^{kind}-(\d+)\t(.*)$", out, re.MULTILINE):
            rows.setdefault(int(number), {}).setdefault(kind, []).append(text)
    return [
        (row["S"][0].split(), hypothesis.split("\t")[1].split(), [float(x) for x in bits.split()])
        for row in rows.values()
        for hypothesis, bits in zip(row["H"], row["P"], strict=True)
    ]


@pytest.mark.parametrize(
    "spec",
    usually(
        ["wavelet:scales=4", "rope:theta=64", "alibi", "t5", "kerple", "sandwich", "sinusoidal"],
        ("wavelet:scales=4", "rope:theta=64"),
    ),
)
def test_scores_are_those_of_the_full_pass(spec, capsys):
    """With two beams for each line, one often takes the other's cache. A batch has 8 lines."""
    path = trained("--pos-enc", spec, "--max-update", 20).path
    made, known, prefix = loaded(path), dictionary(), 3
    hypotheses = generated(path, capsys, "--prefix-size", prefix)
    assert len(hypotheses) > 50
    for prompt, words, bits in hypotheses[::3]:
        assert words[:prefix] == prompt[:prefix]
        ids = torch.tensor([known.eos(), *map(known.index, words), known.eos()])
        with torch.no_grad():
            full = made.get_normalized_probs(made(ids[None, :-1]), log_probs=True)[0]
        wanted = full.gather(1, ids[1:, None])[:, 0] / math.log(2)
        assert (wanted - torch.tensor(bits)).abs().max() < 1e-4  # four decimals are printed
    assert len({tuple(words) for _, words, _ in hypotheses}) > 25


def test_a_position_that_follows_the_length_is_refused(capsys):
    with pytest.raises(ValueError, match="normalised depends on the sequence length, but gener"):
        generated(path_of("normalised"), capsys)
