"""Programs of others that load, train and serve models, without a line of wavepe in them.

Each is tried with a model that was patched in memory, and with the folder that it wrote.
"""

import copy
import json

import hub
import pytest
import torch
import transformers
import wavepe.hf
from cases import needs
from hf_model import logits, tiny, tokens
from processes import forked, output

SPEC = "wavelet:scales=4"
LETTERS = [*"abcdefghijklmnopqrstuvwxyz "]

pytestmark = [
    pytest.mark.filterwarnings(
        r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning",
        "ignore::DeprecationWarning",
        # PEFT asks the Hub for the base of an adapter, and says that it cannot.
        "ignore:Could not find a config file:UserWarning",
        "ignore:The PEFT config's:UserWarning",
    )
]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A stock model and a patched one, as folders with a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    plain.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model = tiny(eos_token_id=1, max_position_embeddings=64)
    model.save_pretrained(tmp_path / "stock")
    wavepe.hf.patch(model, SPEC).save_pretrained(tmp_path / "patched")
    for name in ("stock", "patched"):
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def live(folders):
    return wavepe.hf.patch(transformers.LlamaForCausalLM.from_pretrained(folders / "stock"), SPEC)


def test_pipelines(folders):
    """A pipeline writes the same text in a program that knows transformers alone."""
    script = """
import sys, transformers
pipe = transformers.pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
print(pipe("the cat", max_new_tokens=9, do_sample=False, return_full_text=False)[0])
"""
    found = output("-c", script, folders / "patched", start=forked)
    pipe = transformers.pipeline(
        "text-generation", model=live(folders).eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folders / "patched"),
    )  # fmt: skip
    wanted = pipe("the cat", max_new_tokens=9, do_sample=False, return_full_text=False)[0]
    assert found.strip().splitlines()[-1] == str(wanted)


@pytest.mark.slow
def test_the_hub(folders):
    """push_to_hub, and what it wrote in a program that knows transformers alone.

    The hub is a stand-in on this machine, with the interface that huggingface_hub calls.
    """
    script = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("me/patched", trust_remote_code=True)
with torch.no_grad():
    torch.save(model.eval()(torch.load(sys.argv[1])).logits, sys.argv[2])
"""
    push = """
import sys, transformers, wavepe.hf
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
wavepe.hf.patch(model, sys.argv[2]).push_to_hub("me/patched", token="hf_nobody")
"""
    ids, out = folders / "ids.pt", folders / "out.pt"
    torch.save(tokens(2, 9) % 29, ids)
    with hub.running() as (address, repositories):
        online = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folders / "home")}
        output("-c", push, folders / "stock", SPEC, **online)
        files = repositories["me/patched"]
        assert {"modeling_wavepe.py", "config.json", "model.safetensors"} <= set(files)
        assert json.loads(files["config.json"])["position_encoding"] == SPEC
        output("-c", script, ids, out, **online)
    assert torch.equal(torch.load(out), logits(live(folders).eval(), torch.load(ids)))


def test_the_command_lm_eval(folders):
    needs("lm_eval")
    rows = [{"text": "the c", "choices": ["at", "ow"], "answer": 0}] * 3
    (folders / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folders / "tasks").mkdir()
    task = {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folders / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folders / "tasks/local.yaml").write_text(json.dumps(task))  # which YAML includes
    model = f"pretrained={folders / 'patched'},trust_remote_code=True,max_length=60"
    words = ["--model", "hf", "--model_args", model, "--device", "cpu", "--tasks", "local_choice"]
    words += ["--include_path", folders / "tasks", "--output_path", folders / "found"]
    output("-m", "lm_eval", "run", *words, "--log_samples")
    (samples,) = (folders / "found").rglob("samples_*.jsonl")
    answers = json.loads(samples.read_text().splitlines()[0])["filtered_resps"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "patched")
    for (got, _), choice in zip(answers, rows[0]["choices"], strict=True):
        ids = tokenizer(f"{rows[0]['text']} {choice}", return_tensors="pt").input_ids
        scores = logits(live(folders).eval(), ids).log_softmax(-1)[0, 4:-1]
        wanted = scores.gather(-1, ids[0, 5:, None]).sum()
        assert abs(float(got) - float(wanted)) < 1e-3


def test_accelerate_loads_a_checkpoint(folders):
    needs("accelerate")
    script = """
import sys, torch, accelerate
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
with accelerate.init_empty_weights():
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
model = accelerate.load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"": "cpu"})
with torch.no_grad():
    torch.save(model.eval()(torch.load(sys.argv[2])).logits, sys.argv[3])
"""
    ids, out = folders / "ids.pt", folders / "out.pt"
    torch.save(tokens(2, 9) % 29, ids)
    output("-c", script, folders / "patched", ids, out, start=forked)
    assert torch.equal(torch.load(out), logits(live(folders).eval(), torch.load(ids)))


@pytest.mark.parametrize("spec", [SPEC, "kerple", "sinusoidal"])
def test_a_batch_of_several_adapters(spec):
    """Each row of a batch has its own adapter of PEFT, or none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(wavepe.hf.patch(tiny(), spec), config, adapter_name="one")
    model.add_adapter("two", config)
    model.eval()
    ids = tokens(3, 9)
    mixed = logits(model, input_ids=ids, adapter_names=["two", "__base__", "one"])
    model.set_adapter("two")
    assert torch.allclose(mixed[:1], logits(model, input_ids=ids[:1]), atol=1e-4)
    model.set_adapter("one")
    assert torch.allclose(mixed[2:], logits(model, input_ids=ids[2:]), atol=1e-4)
    with model.disable_adapter():
        assert torch.allclose(mixed[1:2], logits(model, input_ids=ids[1:2]), atol=1e-4)


def test_peft_finds_no_stock_base(folders):
    """The base of an adapter that was trained on a model patched in memory is not the stock one."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    trained = peft.get_peft_model(live(folders), lora).eval()
    trained.save_pretrained(folders / "adapter")
    with pytest.raises(Exception, match="load an adapter onto a model that is patched so again"):
        peft.AutoPeftModelForCausalLM.from_pretrained(folders / "adapter")
    ids = torch.arange(1, 21)[None]
    again = peft.PeftModel.from_pretrained(live(folders), folders / "adapter").eval()
    wanted = logits(trained, ids)
    assert torch.equal(logits(again, ids), wanted)
    trained.merge_and_unload().save_pretrained(folders / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folders / "merged")
    assert torch.allclose(logits(merged, ids), wanted, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "patched")
    peft.get_peft_model(base, lora).save_pretrained(folders / "second")
    found = peft.AutoPeftModelForCausalLM.from_pretrained(folders / "second")
    assert wavepe.hf.encoding_of(found) == SPEC


def trainer_of(kind, model, folders, **options):
    """Return a trainer of TRL that makes one step with a reference model."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    columns = {
        "DPO": {"prompt": ["abc "] * 2, "chosen": ["def"] * 2, "rejected": ["xyz"] * 2},
        "KTO": {"prompt": ["ab "] * 2, "completion": ["def", "xyz"], "label": [True, False]},
        "GRPO": {"prompt": ["abc "] * 2},
    }[kind]
    more = {}
    if kind == "GRPO":
        more = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
        options["reward_funcs"] = lambda completions, **_: [float(len(x)) for x in completions]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folders / "run"), max_steps=1, per_device_train_batch_size=2,
        report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", **more,
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=transformers.AutoTokenizer.from_pretrained(folders / "stock"), **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_reference_models_of_trl(kind, folders):
    """Without one given, a trainer loads it by the model's name: the stock model, if patched."""
    needs("trl")
    with pytest.raises(Exception, match="patched by wavepe in memory: give the tokenizer"):
        trainer_of(kind, live(folders), folders)
    trainer = trainer_of(kind, str(folders / "patched"), folders)
    assert wavepe.hf.encoding_of(trainer.ref_model) == SPEC
    trainer.train()
    if kind != "GRPO":
        model = live(folders)
        trainer = trainer_of(kind, model, folders, ref_model=copy.deepcopy(model))
        assert wavepe.hf.encoding_of(trainer.ref_model) == SPEC
        trainer.train()


@pytest.mark.slow
def test_the_command_of_trl(folders):
    """`trl sft` with a folder knows transformers alone."""
    needs("trl")
    (folders / "data").mkdir()
    rows = [json.dumps({"text": "the cat sat on the mat"})] * 4
    (folders / "data" / "train.jsonl").write_text("\n".join(rows))
    script = """
import sys
from trl.cli import main
sys.argv = ["trl", *sys.argv[1:]]
main()
"""
    done = forked(
        "-c", script, "sft", "--model_name_or_path", folders / "patched", "--dataset_name",
        folders / "data", "--output_dir", folders / "sft", "--max_steps", "1", "--use_cpu",
        "--bf16", "False", "--report_to", "none", "--trust_remote_code",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "sft")
    assert wavepe.hf.encoding_of(model) == SPEC
