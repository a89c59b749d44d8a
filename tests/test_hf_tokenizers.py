"""AutoTokenizer makes the same choice for a wavepe_<family> as for the stock model."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from hf_families import FAMILIES, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PIECES = [*SPECIAL.values(), "a", "b", "c", "ab", "Ġ", "Ġa", "▁", "▁a"]
# What a file may name; transformers 5 corrects some of it by model_type.
NAMED = (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast", "Qwen2Tokenizer")


def write_tokenizer(folder, space, named):
    """A tokenizer of a few pieces; `space` is its sign for one, as of GPT-2 or of SentencePiece."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    model = models.BPE(vocabulary, merges=[("a", "b"), (space, "a")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    kind = "ByteLevel" if space == "Ġ" else "Metaspace"
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, kind)()
    tokenizer.decoder = getattr(decoders, kind)()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("tokenizer_class")
    if named is not None:
        config["tokenizer_class"] = named
    path.write_text(json.dumps(config))


def chosen(folder):
    """The class that AutoTokenizer takes and how that cuts a text, or the error's class."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ImportError as error:  # transformers 4 has slow ones, which need more packages
        return type(error)
    return type(tokenizer), tokenizer("ab a b c")["input_ids"]


@pytest.mark.parametrize("family", {kind.model_type: name for name, kind in FAMILIES.items()})
@pytest.mark.parametrize("space", ["Ġ", "▁"])
def test_the_tokenizer_of_the_family(family, space, tmp_path):
    for named in NAMED:
        model = build(family)
        write_tokenizer(tmp_path, space, named)
        model.config.save_pretrained(tmp_path)
        wanted = chosen(tmp_path)
        wavepe.hf.patch(model, "alibi").config.save_pretrained(tmp_path)
        assert chosen(tmp_path) == wanted, named


def test_pipelines(tmp_path, caplog):
    model = wavepe.hf.patch(build("mistral"), "wavelet:scales=4")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "▁", "PreTrainedTokenizerFast")
    wanted = model.generate(
        AutoTokenizer.from_pretrained(tmp_path)("ab", return_tensors="pt")["input_ids"],
        max_new_tokens=4,
        do_sample=False,
    )
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    for given in (str(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        generator = pipeline("text-generation", model=given, tokenizer=str(tmp_path))
        assert generator("ab", **options)[0]["generated_token_ids"] == wanted[0].tolist()
    assert "not supported" not in caplog.text  # by the pipeline
