"""Checkpoint folders of tiny Llamas, for the tests of wavepe.hf.convert."""

import json

import pytest
import safetensors.torch
import torch
import wavepe.hf
from hf_model import tiny, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from wavepe.hf import convert

SMALL = 2000  # bytes in a shard, so most tensors have their own shard
IDS = tokens(2, 12)
OTHERS = {
    "tokenizer.json": "{}",
    "tokenizer.model": "pieces",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    ".gitattributes": "*.safetensors",
}


def stock(folder, form="single"):
    """Save a stock Llama: in one file, sharded with other files, or sharded, tied and bfloat16."""
    tied = form == "tied"
    model = tiny(tie_word_embeddings=tied).to(torch.bfloat16 if tied else None)
    model.save_pretrained(folder, max_shard_size="1GB" if form == "single" else SMALL)
    for name, text in OTHERS.items() if form == "sharded" else ():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def load(folder, auto=AutoModelForCausalLM, **options):
    """Load a model; from_pretrained must report no missing or unexpected weights."""
    model, report = auto.from_pretrained(folder, output_loading_info=True, dtype="auto", **options)
    assert not any(report.values())
    return model


def patched(folder, spec):
    return wavepe.hf.patch(LlamaForCausalLM.from_pretrained(folder, dtype="auto"), spec)


def state(folder):
    """Return all tensors of a folder of safetensors."""
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    return {name: x for path in files for name, x in safetensors.torch.load_file(path).items()}


def read(path):
    return json.loads(path.read_text())


def change(path, **changes):
    """Change keys of a JSON file; None removes one."""
    value = {**read(path), **changes}
    path.write_text(json.dumps({key: x for key, x in value.items() if x is not None}))


def names(folder):
    """Return the names of all files, hidden ones too."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def refused(source, target, match, spec="alibi", error=ValueError, **options):
    """Assert that convert raises an error, and that no new file appears."""
    around = target.parent
    before = names(around) if around.exists() else None
    with pytest.raises(error, match=match):
        convert(source, target, spec, **options)
    assert (names(around) if around.exists() else None) == before
