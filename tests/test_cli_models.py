"""The commands that measure a given model: perplexity, bands, needle, heatmap and sweep."""

import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import hf_families
import numpy as np
import pytest
import tokenizers
import torch
import transformers
import wavepe.hf
from commands import refused, run
from compare_cases import results, text, trained
from hf_model import tiny_config
from matplotlib.figure import Figure
from wavepe import analysis
from wavepe.analysis import attention_map, attention_window, measured_band, needle, perplexity
from wavepe.experiments import text as texts
from wavepe.experiments.data import load_text
from wavepe.experiments.model import Model

COMMANDS = ("perplexity", "bands", "needle", "heatmap", "sweep")
SPECS = ("rope", "rope:inference_theta=scaled", "wavelet:scales=3")
WORDS = "It was dark, and nobody spoke.\n"
BYTES = Model(Path("x"), None, None, None, None)  # a model of bytes that is not run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a comparison, and a stock Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "words.txt").write_text(WORDS * 200)
    shutil.copytree(trained("--quiet", specs=SPECS), folder / "run")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(tiny_config(vocab_size=300)).save_pretrained(folder / "stock")
    tokenizer(300).save_pretrained(folder / "stock")
    return folder


def stock_model(place):
    """Return the stock Llama, and the tokens of the text for it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "stock")
    return model, torch.tensor(tokenizer(300)(WORDS * 200)["input_ids"])


def bytes_of(place, count):
    return torch.tensor(list((place / "words.txt").read_bytes()[:count]))


def tokenizer(size):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    model.train_from_iterator([WORDS], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>")


def checkpoint(place, name):
    """Return the trained model whose folder begins with `name`."""
    (folder,) = (place / "run" / "checkpoints").glob(f"{name}*")
    return folder


def figures(capsys, place, *argv):
    """Return the results that a command writes to --json."""
    target = place / "out.json"
    code, out, err = run(capsys, *argv, "--json", target)
    assert (code, err) == (0, "")
    return json.loads(target.read_text()), out


# ------------------------------------------------------------------ figures


def test_perplexity_of_a_comparison_is_what_it_printed(capsys, place):
    """The same bytes, also of one of the lengths alone; --data is known by its content."""
    runs = {run["encoding"]: run["perplexity"] for run in results(place / "run")["runs"]}
    for name, spec in (("wavelet", "wavelet:scales=3"), ("rope", "rope")):
        call = ("perplexity", checkpoint(place, name), "--data", text())
        record, out = figures(capsys, place, *call)
        assert record["perplexity"] == runs[spec]
        assert "held-out part" in record["data"]
        assert "protocol whole" in out
        assert call[1].name in out
        assert all(f"{value:.2f}" in out for value in runs[spec].values())
        record, _ = figures(capsys, place, *call, "--length", 32)
        assert record["perplexity"] == {"32": runs[spec]["32"]}


@pytest.mark.parametrize(
    ("protocol", "sizes"),
    [("whole", {}), ("blocks:8", {"window": 8}), ("sliding:8/3", {"window": 8, "stride": 3})],
)
def test_perplexity_of_a_stock_model(capsys, place, protocol, sizes):
    record, out = figures(
        capsys, place, "perplexity", place / "stock", "--data", place / "words.txt",
        "--lengths", "10,20", 24, "--tokens", 120, "--protocol", protocol,
    )  # fmt: skip
    model, ids = stock_model(place)
    name = protocol.partition(":")[0]
    for length in (10, 20, 24):  # whose least common multiple is 120
        expected = perplexity(model, ids[:120], length, protocol=name, **sizes)
        assert record["perplexity"][str(length)] == pytest.approx(expected, rel=1e-6)
    assert {key: record[key] for key in ("protocol", *sizes)} == {"protocol": name, **sizes}
    assert f"protocol {name} (" in out
    assert "Perplexity per token of stock" in out


def test_the_longest_length_is_more_than_the_tokens(capsys, place):
    call = ("perplexity", place / "stock", "--data", place / "words.txt", "--lengths", 10, 50)
    _, out = figures(capsys, place, *call, "--tokens", 20)
    assert "on 50 tokens of" in out
    assert "at least the longest length" in " ".join(run(capsys, "perplexity", "--help")[1].split())


def test_bands(capsys, place):
    record, out = figures(
        capsys, place, "bands", place / "stock", "--data", place / "words.txt", "--length", 30,
        "--train-length", 64, "--of", "query",
    )  # fmt: skip
    model, ids = stock_model(place)
    expected = measured_band(model, ids[:30], of="query")
    assert record["band"] == expected["band"].tolist()
    (row,) = record["predictions"]
    assert row["mean"] == record["mean"] == expected["mean"]
    assert row["relative"] == expected["mean"] / 4
    assert row["predicted"] == wavepe.analysis.predicted_band(8, 10000.0, 64)
    for number in (row["mean"], row["relative"], row["predicted"], 1.1 * row["predicted"]):
        assert f"{number:.2f}" in out


def test_bands_by_layer_type(capsys, place, tmp_path):
    """Each base has its own prediction."""
    model = hf_families.build("gemma3_text", vocab_size=256)
    model.save_pretrained(tmp_path / "gemma")
    capsys.readouterr()  # its progress
    words = ("bands", tmp_path / "gemma", "--length", 30, "--data", place / "words.txt")
    record, _ = figures(capsys, tmp_path, *words)
    rows = {row["layers"]: row for row in record["predictions"]}
    kinds = {"sliding_attention": hf_families.LOCAL_THETA, "full_attention": hf_families.THETA}
    assert {kind: row["theta"] for kind, row in rows.items()} == kinds
    for kind, band in zip(model.config.layer_types, record["band"], strict=True):
        assert rows[kind]["mean"] == np.mean(band)


def test_needle(capsys, place, monkeypatch):
    passed = {}
    monkeypatch.setattr(analysis, "needle", lambda *a, **o: passed.update(o) or needle(*a, **o))
    model = checkpoint(place, "rope")
    options = ("--lengths", 32, 64, "--depths", 0, 1, "--trials", 3, "--seed", 5)
    record, out = figures(capsys, place, "needle", model, *options)
    loaded = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(model)
    expected = needle(loaded, None, [32, 64], [0.0, 1.0], trials=3, seed=5)
    assert record["success"] == expected.tolist()
    assert (passed["trials"], passed["seed"]) == (3, 5)  # a model that finds nothing shows neither
    assert (record["lengths"], record["depths"]) == ([32, 64], [0, 1])
    assert "greedy decoding, exact match, 3 trials" in out
    record, out = figures(capsys, place, "needle", model, *options, "--theta", 1e6)
    assert record["theta"] == 1e6
    assert "theta=1e+06" in out
    record, out = figures(
        capsys, place, "needle", place / "stock", "--lengths", 200, "--trials", 1, "--data",
        place / "words.txt",
    )  # fmt: skip
    assert np.array(record["success"]).shape == (1, 5)
    assert "words.txt" in out
    assert "A model that never learned to find facts" in out


def test_heatmap(capsys, place):
    names = [checkpoint(place, "wavelet"), place / "stock"]
    record, out = figures(
        capsys, place, "heatmap", *names, "--length", 12, "--layer", 0, "--head", 1,
        "--threshold", 0.05, "--data", place / "words.txt", "--png", place / "map.png",
    )  # fmt: skip
    texts = [bytes_of(place, 12), stock_model(place)[1][:12]]
    for name, tokens, got in zip(names, texts, record["models"], strict=True):
        weights = attention_map(transformers.AutoModelForCausalLM.from_pretrained(name), tokens)
        np.testing.assert_allclose(got["map"], weights[0, 1], atol=1e-6)
        windows = attention_window(weights, 0.05)
        assert got["windows"] == windows.tolist()
        assert got["window"] == windows[0, 1]
        assert f"Attention windows of {name.name}" in out
    assert (place / "map.png").read_bytes().startswith(b"\x89PNG")
    words = names[1], "--length", 12, "--threshold", 0.1, "--data", place / "words.txt"
    mean = f"mean of 2 layers, mean of 4 heads: {attention_window(weights.mean((0, 1)), 0.1)}\n"
    assert f"map that is drawn, {mean}" in figures(capsys, place, "heatmap", *words)[1]


def test_sweeps(capsys, place):
    """A fraction of 1 and the model's own base change nothing; each value is that of its model."""
    for model, unit in ((checkpoint(place, "rope"), "byte"), (place / "stock", "token")):
        common = (model, "--data", place / "words.txt", "--lengths", 16, "--tokens", 64)
        plain, _ = figures(capsys, place, "perplexity", *common)
        whole = pytest.approx(plain["perplexity"]["16"], rel=1e-5)
        record, out = figures(capsys, place, "sweep", *common, "--fraction", 1, 0.5, 0)
        assert record["fraction"] == [1, 0.5, 0]
        assert record["perplexity"]["16"][0] == whole
        assert len(set(record["perplexity"]["16"])) == 3
        assert f"Perplexity per {unit} of {model.name} by fraction" in out
        theta, _ = figures(capsys, place, "sweep", *common, "--theta", 3, 1e4)
        assert theta["perplexity"]["16"][1] == whole
        assert theta["perplexity"]["16"][0] != whole
        if unit == "byte":  # a fraction of 0 rotates nothing
            none = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(model, position_encoding="none")
            value = pytest.approx(perplexity(none, bytes_of(place, 64), 16), rel=1e-5)
            assert record["perplexity"]["16"][2] == value


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_and_pictures(capsys, place, command, tmp_path, monkeypatch):
    """--quiet says nothing but the table. Without --data the text is the standard library's."""
    library, picture = tmp_path / "library", tmp_path / "a.png"
    library.mkdir()
    for number in range(20):  # as small a library as will do
        (library / f"part{number}.py").write_text(WORDS * 200)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    call = (command, checkpoint(place, "rope"), "--png", picture)
    code, out, err = run(capsys, *call)
    assert (code, err) == (0, "")
    assert "rope" in out
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "library"]
    assert "standard library" in out or command == "needle"
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: open(path, "wb").close())
    _, out, _ = run(capsys, *call, "--quiet", "--data", place / "words.txt")
    assert str(picture) not in out


def test_a_long_text_is_not_read_to_its_end(monkeypatch, place, tmp_path):
    """Only as much as the tokens need, and words are whole."""
    path = tmp_path / "long.txt"
    path.write_text("nobody spoke\n" * 100_000)
    read, pieces = [], texts._pieces
    monkeypatch.setattr(texts, "_PIECE", 1 << 12)
    monkeypatch.setattr(
        texts, "_pieces", lambda file: (read.append(piece) or piece for piece in pieces(file))
    )
    model = Model(Path("x"), None, tokenizer(300), None, None)
    tokens = texts.tokens_for(model, str(path), [50], 1000)
    assert len(read) <= 3
    expected = tokenizer(300)(path.read_text()[:20000])["input_ids"][:1000]
    assert tokens.ids.tolist() == expected


@pytest.mark.parametrize("count", [50, 80_000])
@pytest.mark.parametrize("first", [100, 200])
def test_the_first_and_the_last_tokens_of_a_text(tmp_path, count, first):
    """A text that has no more is taken whole."""
    text = "".join(f"{n:03d}," for n in range(count))
    (tmp_path / "text.txt").write_text(text)
    ids = texts.first_and_last_tokens(BYTES, tmp_path / "text.txt", first, 60)
    expected = text if len(text) <= first + 60 else text[:first] + text[-60:]
    assert bytes(ids.tolist()).decode() == expected


def test_no_more_than_the_end_of_a_text_is_kept(monkeypatch):
    """Also if large pieces follow many small ones."""
    pieces, read, first = [b"a"] * 100 + [b"b" * 1000] * 100, [], texts._first
    monkeypatch.setattr(texts, "_pieces", lambda data: iter(pieces))
    monkeypatch.setattr(texts, "_first", lambda *args: read.append(args) or first(*args))
    ids = texts.first_and_last_tokens(BYTES, "x", 1, 100)
    assert bytes(ids.tolist()) == b"a" + b"b" * 100
    assert list(read[-1][1]) == pieces[-2:]  # at least 16 bytes for each token


def test_no_length_leads_to_the_text_of_the_training(capsys, place):
    """The held-out text is known for any length; where it is too short, that is the error."""
    run = results(place / "run")
    held_out = run["environment"]["data"]["held_out_bytes"]
    call = ("perplexity", checkpoint(place, "rope"), "--data", text(), "--lengths", 32)
    record, _ = figures(capsys, place, *call, held_out)
    assert f"{held_out} bytes of the held-out part" in record["data"]
    assert f"needs at least {held_out + 1}" in refused(capsys, *call, held_out + 1)


def test_files_that_training_leaves_out_hide_its_text_from_no_command(tmp_path):
    """Large binary files count where a text is recognised; so does what split a whole grid."""
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"{number} {WORDS}" * 40)
    (tmp_path / "picture.png").write_bytes(bytes(100_000))
    split = load_text(tmp_path, 512, 16)
    kept = {"longest": split.longest, "read_bytes": split.read_bytes, "train_bytes": 9000}
    settings = {"lengths": [16], "train_length": 16, "eval_bytes": 64}
    comparison = {**settings, "text_sha256": split.sha256, "text": kept}
    tokens = texts.tokens_for(Model(Path("x"), None, None, None, comparison), str(tmp_path), [16])
    assert "held-out part" in tokens.description


def test_a_model_of_no_comparison_may_know_the_default_text(monkeypatch, tmp_path):
    for number in range(20):
        (tmp_path / f"part{number}.py").write_text(WORDS * 9)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    tokens = texts.tokens_for(BYTES, None, [16])
    assert tokens.description.endswith("bytes, the part that wavepe compare holds out")


def test_a_long_line_is_cut_between_characters(monkeypatch, tmp_path):
    """Bytes stay as they are, also those that are no UTF-8."""
    line = "a" + "漢" * 1000
    (tmp_path / "line.txt").write_bytes(line.encode() + b"\xff\r\n")
    monkeypatch.setattr(texts, "_PIECE", 16)
    pieces = list(texts._pieces(tmp_path / "line.txt"))
    assert b"".join(pieces) == line.encode() + b"\xff\r\n"
    assert "".join(piece.decode("utf-8", "replace") for piece in pieces) == line + "\ufffd\r\n"


def test_a_checkpoint_of_a_comparison_reads_other_texts_as_they_are(capsys, place, tmp_path):
    """A pipe is read once, and of a far larger text no more than needed."""
    content = (place / "words.txt").read_bytes()
    pipe, model = tmp_path / "pipe", checkpoint(place, "rope")
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    call = ("perplexity", model, "--lengths", 16, "--tokens", 64, "--data")
    piped, _ = figures(capsys, place, *call, pipe)
    writer.join()
    large = tmp_path / "large.txt"
    large.write_bytes(content)
    with large.open("ab") as file:
        file.truncate(1 << 40)  # of zeros, far beyond the memory
    plain, _ = figures(capsys, place, *call, place / "words.txt")
    assert piped["perplexity"] == plain["perplexity"]
    assert "holds NUL" in refused(capsys, *call, large)


# ------------------------------------------------------------------ bad input


def test_a_checkpoint_of_an_own_encoding_is_not_to_be_removed(capsys, place, tmp_path):
    """It loads when its class is registered."""
    shutil.copytree(place / "run", tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("wavelet*/config.json")
    path.write_text(path.read_text().replace("wavelet:scales=3", "steep"))
    message = refused(capsys, "perplexity", path.parent, code=1)
    assert "must be registered" in message
    assert "remove" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_models(capsys, place, tmp_path, command):
    assert "nowhere': no such folder" in refused(capsys, command, tmp_path / "nowhere")
    assert "is a file" in refused(capsys, command, place / "words.txt")
    assert "holds no config.json" in refused(capsys, command, tmp_path)
    message = refused(capsys, command, place / "run")
    assert "folder of a comparison" in message
    assert "checkpoints" in message
    broken = shutil.copytree(place / "stock", tmp_path / "broken")
    for file, content in (("model.safetensors", "no weights"), ("config.json", "{")):
        (broken / file).write_text(content)
        assert "cannot load" in refused(capsys, command, broken, code=1)
        (broken / "model.safetensors").unlink(missing_ok=True)
        assert "cannot load" in refused(capsys, command, broken, code=1)
    deeper = shutil.copytree(place / "stock", tmp_path / "deeper")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "its files lack model.layers.2." in refused(capsys, command, deeper, code=1)
    ignored = shutil.ignore_patterns("tokenizer*")
    mute = shutil.copytree(place / "stock", tmp_path / "mute", ignore=ignored)
    message = refused(capsys, command, mute)
    assert "holds no tokenizer" in message
    assert "give the Trainer processing_class=tokenizer" in message
    assert "300" in message


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_files(capsys, monkeypatch, place, tmp_path, command):
    stock = place / "stock"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    assert "no such file" in refused(capsys, command, stock, "--data", tmp_path / "none.txt")
    message = refused(capsys, command, stock, "--data", empty)
    assert "holds no text" in message or "text too short" in message
    assert "NUL" in refused(capsys, command, stock, "--data", tmp_path / "nul.txt")
    json_to = (command, stock, "--json")
    assert "Is a directory" in refused(capsys, *json_to, tmp_path)
    assert "No such file" in refused(capsys, *json_to, tmp_path / "a" / "b.json")
    assert "--json : No such file" in refused(capsys, *json_to, "")
    assert "ends in .png" in refused(capsys, command, stock, "--png", tmp_path / "picture")
    assert "ends in .png" in refused(capsys, command, stock, "--png", tmp_path / "a.txt")
    both = tmp_path / "a.png"
    assert "same file" in refused(capsys, command, stock, "--png", both, "--json", both)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refused(capsys, command, stock, "--png", both, code=1)
    assert "needs matplotlib: pip install" in message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.txt", "nul.txt"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["perplexity", "--lengths", "1"], "--lengths 1: needs 2 to"),
        (["perplexity", "--lengths", "many"], "--lengths many: needs integers"),
        (["perplexity", "--tokens", "0"], "--tokens 0"),
        (["perplexity", "--protocol", "half"], "--protocol half: needs whole, blocks, sliding"),
        (["perplexity", "--protocol", "sliding:/80"], "a stride of at most the window, 16"),
        (["perplexity", "--threads", "0"], "--threads 0"),
        (["perplexity", "--import", "nothing.py"], "nothing.py: no such file"),
        (["bands", "--length", "1,024"], "--length 1,024: needs one number"),
        (["bands", "--of", "value"], "invalid choice: 'value'"),
        (["needle", "--depths", "2"], "--depths 2: needs numbers from 0 to 1"),
        (["needle", "--lengths", "4"], "lengths must be at least .* got 4"),
        (["heatmap", "--layer", "9"], "--layer 9: .* has 2, numbered from 0"),
        (["heatmap", "--head", "-1"], "--head -1: needs 0"),
        (["heatmap", "--threshold", "x"], "--threshold x: needs numbers above 0"),
        (["sweep", "--theta", "0"], "--theta 0: needs numbers above 0"),
        (["sweep", "--theta", "3", "--fraction", "1"], "not allowed with argument"),
    ],
)  # fmt: skip
def test_bad_options(capsys, place, argv, words):
    data = ("--data", place / "words.txt")
    code = 1 if words.startswith("lengths must") else 2
    assert re.search(words, refused(capsys, argv[0], place / "stock", *data, *argv[1:], code=code))


def test_what_a_model_cannot_do_is_one_line(capsys, place):
    wavelet, data = checkpoint(place, "wavelet"), ("--data", place / "words.txt")
    assert "is not rotary" in refused(capsys, "bands", wavelet, *data, code=1)
    assert "--fraction needs a model with RoPE" in refused(capsys, "sweep", wavelet, *data)
    for command in ("sweep", "needle"):
        said = refused(capsys, command, wavelet, *data, "--theta", 100, code=1)
        assert "set_theta needs one rope for all layers" in said
    message = refused(capsys, "perplexity", place / "stock", *data, "--lengths", 100_000)
    assert "text too short" in message
    assert "needs at least 100000" in message


def test_positions_that_end(capsys, place, tmp_path):
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    call = ("perplexity", tmp_path / "gpt2", "--data", place / "words.txt", "--lengths")
    assert run(capsys, *call, 32)[0] == 0
    assert "its positions end at 32" in refused(capsys, *call, 33, code=1)
