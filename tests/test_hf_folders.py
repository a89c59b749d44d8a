"""Folders that wavepe writes, in programs that do not know wavepe."""

import json
import os
import sys

import pytest
import torch
import wavepe.hf
from cases import needs
from hf_families import FAMILIES, build
from hf_model import logits, patched_tiny, tiny, tokens
from processes import forked, output
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from wavepe.hf.folder import CARD, MODULE, OURS

IDS = tokens(1, 8)
SPEC = "wavelet:scales=4,biases=true"

# A program that knows transformers alone.
LOAD = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folders, ids, found = sys.argv[1].split(), torch.load(sys.argv[2]), {}
assert not any(name.startswith("wavepe") for name in sys.modules)
for folder in folders:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        found[folder] = config.position_encoding, model(ids).logits
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(base).__name__.startswith("WavePE") and base.config.to_dict() == config.to_dict()
    model.save_pretrained(folder + "-again")
torch.save(found, sys.argv[3])
"""


@pytest.fixture(autouse=True)
def no_cache_of_modules(tmp_path, monkeypatch):
    """transformers copies the module of a folder into this cache."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


def loaded(tmp_path, folders):
    """Return what a program that knows transformers alone computes with each folder."""
    torch.save(IDS, tmp_path / "ids.pt")
    paths = " ".join(map(str, folders))
    output("-c", LOAD, paths, tmp_path / "ids.pt", tmp_path / "out.pt", start=forked)
    return torch.load(tmp_path / "out.pt")


def files(folder):
    return sorted(os.listdir(folder))


def test_programs_that_do_not_know_wavepe(tmp_path):
    needs("accelerate")
    tiny().save_pretrained(tmp_path / "stock")
    model = patched_tiny(SPEC)
    model.save_pretrained(tmp_path / "patched")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    own.save_pretrained(tmp_path / "own")
    wavepe.hf.convert(tmp_path / "stock", tmp_path / "converted", "rope+alibi")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}]
    trainer = Trainer(patched_tiny("alibi"), arguments, train_dataset=rows)
    trainer.train()
    models = {"patched": model, "own": own, "converted": converted}
    models["run/checkpoint-1"] = trainer.model.eval()
    found = loaded(tmp_path, [tmp_path / name for name in models])
    for name, one in models.items():
        spec, got = found[str(tmp_path / name)]
        assert spec == wavepe.hf.encoding_of(one)
        assert torch.equal(got, logits(one, IDS)), name
        again = tmp_path / f"{name}-again"
        assert files(again) == [
            CARD, "config.json", "generation_config.json", "model.safetensors", f"{MODULE}.py"
        ]  # fmt: skip
        kept, first = ((f / "config.json").read_text() for f in (again, tmp_path / name))
        assert json.loads(kept)["auto_map"] == json.loads(first)["auto_map"]


@pytest.mark.slow
def test_every_family(tmp_path):
    """Classes of each family are named in its folder."""
    for name in FAMILIES:
        wavepe.hf.patch(build(name), "alibi").save_pretrained(tmp_path / name)
    found = loaded(tmp_path, [tmp_path / name for name in FAMILIES])
    assert len(found) == len(FAMILIES)


def test_without_wavepe(tmp_path):
    """One sentence with a command."""
    patched_tiny("alibi").save_pretrained(tmp_path / "patched")
    blocked = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "wavepe":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path / "patched")!r}, trust_remote_code=True)
"""
    done = forked("-c", blocked)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert "packages that were not found in your environment: wavepe" in last
    assert "pip install wavepe" in last


def test_nothing_runs_without_trust(tmp_path):
    patched_tiny("alibi").save_pretrained(tmp_path / "patched")
    load = "import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1])"
    done = forked("-c", load, tmp_path / "patched")
    assert "trust_remote_code=True" in done.stderr
    # wavepe.hf is imported here: its own classes serve, and no file of the folder runs
    (tmp_path / "patched" / f"{MODULE}.py").write_text("raise SystemExit")
    for trust in (None, False):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", trust_remote_code=trust)
        assert type(model) is wavepe.hf.WavePELlamaForCausalLM


def test_the_class_is_that_of_wavepe(tmp_path):
    """Loading by the folder's module changes no class: saving copies no file of wavepe."""
    patched_tiny("alibi").save_pretrained(tmp_path / "patched")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", trust_remote_code=True)
    assert type(model) is wavepe.hf.WavePELlamaForCausalLM
    assert (type(model)._auto_class, type(model.config)._auto_class) == (None, None)
    copy = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    assert type(copy) is type(model)


def test_a_tokenizer_of_its_own_stays(tmp_path):
    stock = tiny()
    stock.config.auto_map = {"AutoTokenizer": ["mine.Tokenizer", None]}
    stock.save_pretrained(tmp_path / "stock")
    wavepe.hf.convert(tmp_path / "stock", tmp_path / "converted", "alibi")
    wavepe.hf.convert(tmp_path / "converted", tmp_path / "twice", "none")
    AutoModelForCausalLM.from_pretrained(tmp_path / "twice").save_pretrained(tmp_path / "saved")
    for name in ("converted", "twice", "saved"):
        given = json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        assert given.pop("AutoTokenizer") == ["mine.Tokenizer", None]
        assert given["AutoModelForCausalLM"] == f"{MODULE}.WavePELlamaForCausalLM"


def test_cards(tmp_path):
    stock = tiny()
    stock.config._name_or_path = "somebody/llama"
    wavepe.hf.patch(stock, {"0": "alibi"}).save_pretrained(tmp_path / "a")
    text = (tmp_path / "a" / CARD).read_text()
    for words in (
        "base_model: somebody/llama", "`0: alibi`", "16 tokens", "WavePELlamaForCausalLM",
        "licence", 'AutoModelForCausalLM.from_pretrained("this folder")',
    ):  # fmt: skip
        assert words in text
    wavepe.hf.convert(tmp_path / "a", tmp_path / "b", "wavelet:scales=4")
    text = (tmp_path / "b" / CARD).read_text()
    assert "`wavelet:scales=4`" in text
    assert "alibi" not in text  # a card of ours is written anew
    assert str(tmp_path) not in text
    own = text.replace(OURS, "") + "mine"
    (tmp_path / "b" / CARD).write_text(own)
    AutoModelForCausalLM.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "b")
    wavepe.hf.convert(tmp_path / "b", tmp_path / "c", "none")
    for name in "bc":
        assert (tmp_path / name / CARD).read_text() == own


def test_the_name_of_a_patched_model_loads_nothing(tmp_path):
    """TRL loads a reference model by this name, and PEFT the base of an adapter: the stock one."""
    tiny().save_pretrained(tmp_path / "stock")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "stock")
    before = model.config._name_or_path
    wavepe.hf.patch(model, "alibi")
    name = model.config._name_or_path
    assert name == model.name_or_path == model.model.name_or_path
    assert name.startswith(before)
    with pytest.raises(Exception, match=r"patched by wavepe in memory: give the tokenizer"):
        AutoModelForCausalLM.from_pretrained(name)
    model.save_pretrained(tmp_path / "patched")
    assert "in memory" not in (tmp_path / "patched" / "config.json").read_text()
    assert "made from | `stock`" in (tmp_path / "patched" / CARD).read_text()
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert own.config._name_or_path == str(tmp_path / "patched")
    wavepe.hf.unpatch(model)
    assert before == model.config._name_or_path == model.name_or_path == model.model.name_or_path


def test_cards_that_cannot_be_written_stop_no_save(tmp_path):
    (tmp_path / CARD).mkdir()
    with pytest.warns(UserWarning, match="could not write the model card"):
        patched_tiny("alibi").save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_classes_that_others_derive(tmp_path):
    """Their own code goes with them, and their own type is not a type of wavepe."""

    class Config(wavepe.hf.WavePELlamaConfig):
        model_type = "somebodys_llama"

    config = Config(position_encoding="alibi")
    assert config.to_dict()["position_encoding"] == "alibi"
    config.save_pretrained(tmp_path / "config")
    assert files(tmp_path / "config") == ["config.json"]
    (tmp_path / "somebodys.py").write_text(
        "from wavepe.hf import WavePELlamaForCausalLM\n\n\n"
        "class Mine(WavePELlamaForCausalLM):\n    answer = 42\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from somebodys import Mine
    finally:
        sys.path.remove(str(tmp_path))
    Mine.register_for_auto_class("AutoModelForCausalLM")
    patched_tiny("alibi").save_pretrained(tmp_path / "patched")
    Mine.from_pretrained(tmp_path / "patched").save_pretrained(tmp_path / "mine")
    given = json.loads((tmp_path / "mine" / "config.json").read_text())["auto_map"]
    assert given["AutoModelForCausalLM"] == "somebodys.Mine"
    assert "somebodys.py" in files(tmp_path / "mine")
