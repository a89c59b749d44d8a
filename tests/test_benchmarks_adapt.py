"""The benchmarks that adapt models, on tiny ones, and the page of their figures."""

import json

import pytest
import tokenizers
from compare_cases import compare
from hf_model import TRAINER_WARNS, tiny
from transformers import PreTrainedTokenizerFast

from benchmarks import adapt_recipes, prose, real_model
from docs.writers import adapt as adapt_page

pytestmark = TRAINER_WARNS


@pytest.mark.slow
def test_recipes(tmp_path, monkeypatch, capsys):
    """The rows of arms and seeds are kept, and not measured again."""
    given = ["--seeds", "2", "--train-length", "40", "--lengths", "40", "--head-dim", "8"]
    compare(tmp_path / "small", *given, specs=["rope"], data=text(tmp_path))
    monkeypatch.setattr(adapt_recipes, "LENGTHS", (1, 2))
    monkeypatch.setattr(adapt_recipes, "BATCH_TOKENS", 80)
    first = [adapt_recipes.Arm(None, steps=3)]
    first.append(adapt_recipes.Arm("rope:fraction=0.25+wavelet:biases=true", 2, steps=3))
    monkeypatch.setattr(adapt_recipes, "arms", lambda rope: first)
    words = [str(tmp_path / "small"), "--data", str(tmp_path / "text.txt")]
    words += ["--json", str(tmp_path / "adapt-40.json")]
    assert adapt_recipes.main(words) == 0
    kept = json.loads((tmp_path / "adapt-40.json").read_text())
    assert [(row["transfer"], row["seed"]) for row in kept["rows"]] == [
        (0, 0), (0, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    control, adapted = kept["rows"][0], kept["rows"][2]
    assert control["spec"] is None
    assert set(control["perplexity"]) == {"40", "80"}
    assert adapted["perplexity"] != adapted["swapped"]
    capsys.readouterr()
    kept["rows"].pop()  # a run that was interrupted between two seeds
    (tmp_path / "adapt-40.json").write_text(json.dumps(kept))
    assert adapt_recipes.main(words) == 0
    kept = json.loads((tmp_path / "adapt-40.json").read_text())
    with monkeypatch.context() as none:
        none.setattr(adapt_recipes, "measure", None)
        assert adapt_recipes.main(words) == 0
    table = adapt_page.small(kept)
    assert "| stock, fine-tuned | 3 | - |" in table
    assert f"| `{adapted['spec']}` | 3 | 2 |" in table


def text(folder):
    path = folder / "text.txt"
    path.write_text("".join(f"The {n}th word of {n * n} is not the last.\n" for n in range(3000)))
    return path


@pytest.mark.slow
def test_a_real_model(tmp_path, capsys):
    """All arms of a tiny stock model; then nothing is left to do."""
    stock, out = tmp_path / "stock", tmp_path / "real-model-tiny.json"
    tiny(vocab_size=256, head_dim=8, max_position_embeddings=64).save_pretrained(stock)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "The": 1, "is": 2}, "?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?").save_pretrained(stock)
    words = [str(tmp_path / "out"), "--stock", str(stock), "--text", str(text(tmp_path))]
    words += ["--json", str(out), "--tokens", "200", "--length", "40", "--lengths", "40", "80"]
    assert real_model.main([*words, "--long", "80", "--needle", "40"]) == 0
    kept = json.loads(out.read_text())
    assert [row["arm"] for row in kept["rows"]] == [arm.name for arm in real_model.ARMS]
    assert (tmp_path / "out" / "plain" / "config.json").exists()
    assert capsys.readouterr().out
    assert real_model.main(words) == 0
    assert not capsys.readouterr().out
    with pytest.raises(SystemExit):
        real_model.main([*words, "--lr", "1"])
    assert "has figures of" in capsys.readouterr().err
    assert len(kept["rows"].pop(1)["needle"]["40"]) == len(real_model.DEPTHS)
    table = adapt_page.real(kept)
    assert "| stock, YaRN |  |" in table
    assert "| `none` | plain | 0.0001 |" in table
    assert "Not measured yet: stock, YaRN, fine-tuned." in table.replace("\n", " ")


def test_documents(tmp_path):
    page = "<html><head><title>x</title></head><p>It is&nbsp;so.<pre>code</pre><br>And more.</html>"
    assert prose.text_of(page) == "It is\xa0so.\nAnd more."
    (tmp_path / "a.html").write_text(page + "<p>" + "word " * 500)
    (tmp_path / "b.de.html").write_text(page + "<p>" + "Wort " * 500)
    (tmp_path / "c.txt").write_text("short")
    (one,) = prose.documents(tmp_path)
    assert one.startswith("It is")
