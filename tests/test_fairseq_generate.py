"""wavepe-fairseq-generate on the language_modeling task: beams, prefixes, and the scores of what it
prints."""

import math
import re

import pytest
from fairseq_cases import (
    COMMON,
    GPT,
    MARKS,
    checkpoint_utils,
    command,
    corpus,
    dictionary,
    torch,
    train,
)

pytestmark = MARKS


def generated(path, capsys, *given):
    """Return (prompt, words, score in bits of each word) by the number of the line."""
    line = [corpus(), *COMMON, "--path", path, "--gen-subset", "valid", "--beam", 2, "--nbest", 2]
    line += ["--sample-break-mode", "eos", "--max-len-b", 12, "--batch-size", 8, *given]
    line += ["--num-shards", 3, "--shard-id", 2]  # a third of the batches is enough
    capsys.readouterr()
    command("generate", *line)
    out = capsys.readouterr().out
    found = {}
    for kind in ("S", "H", "P"):
        for number, text in re.findall(rf"^{kind}-(\d+)\t(.*)$", out, re.MULTILINE):
            found.setdefault(int(number), {}).setdefault(kind, []).append(text)
    return [
        (row["S"][0].split(), hypothesis.split("\t")[1].split(), [float(x) for x in bits.split()])
        for row in found.values()
        for hypothesis, bits in zip(row["H"], row["P"], strict=True)
    ]


@pytest.mark.parametrize(
    "spec",
    ["wavelet:scales=4", "rope:theta=64", "alibi", "t5", "kerple", "sandwich", "sinusoidal"],
)
def test_scores_are_those_of_the_full_pass(spec, tmp_path, capsys):
    """With two beams for each line, one often takes the other's cache. A batch has 8 lines."""
    run = train(tmp_path, "--pos-enc", spec, "--max-update", 20, recipe=GPT)
    ([made], _, _) = checkpoint_utils.load_model_ensemble_and_task([run.path])
    made.eval()
    known, prefix = dictionary(), 3
    hypotheses = generated(run.path, capsys, "--prefix-size", prefix)
    assert len(hypotheses) > 50
    for prompt, words, bits in hypotheses[::3]:
        assert words[:prefix] == prompt[:prefix]
        ids = torch.tensor([known.eos(), *map(known.index, words), known.eos()])
        with torch.no_grad():
            full = made.get_normalized_probs(made(ids[None, :-1]), log_probs=True)[0]
        wanted = full.gather(1, ids[1:, None])[:, 0] / math.log(2)
        assert (wanted - torch.tensor(bits)).abs().max() < 1e-4  # four decimals are printed
    assert len({tuple(words) for _, words, _ in hypotheses}) > 25


def test_a_position_that_follows_the_length_is_refused(tmp_path, capsys):
    run = train(tmp_path, "--pos-enc", "normalised", recipe=GPT)
    with pytest.raises(ValueError, match="normalised depends on the sequence length, but gener"):
        generated(run.path, capsys)
