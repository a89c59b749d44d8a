"""adapt: another encoding for a trained model, and the training after it."""

import copy
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
import wavepe
import wavepe.hf
from hf_families import build
from hf_model import TRAINER_WARNS, close, logits, own_tiny, patched_tiny, tiny, tiny_config, tokens
from processes import output
from transformers import AutoModelForCausalLM
from wavepe.common.files import locked
from wavepe.hf import families
from wavepe.training import recipes

pytestmark = TRAINER_WARNS
SPEC = "wavelet:scales=4"
KEPT = "rope:theta=10000,fraction=0.5+alibi"
DATA = tokens(1, 3000)[0]
SIZES = {"tokens": 32 * 2 * 24, "length": 32, "batch_size": 2, "learning_rate": 1e-3}


def stock():
    return tiny(max_position_embeddings=64)


def adapt(model, spec=SPEC, **options):
    args = {**SIZES, **options}
    return wavepe.hf.adapt(model, spec, args.pop("data", DATA), **args)


# ---- recipes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "spec", "length", "wanted", "transfers"),
    [
        ("plain", "wavelet", 512, "wavelet", False),
        ("transfer", "wavelet", 512, "wavelet", True),
        ("auto", "alibi", 512, "rope:fraction=0.5+alibi", True),
        ("auto", "wavelet", 512, "rope:fraction=0.5+wavelet:biases=true,projection=true", True),
        ("auto", "wavelet:kind=haar+alibi", 64,
         "rope:fraction=0.25+wavelet:kind=haar,scales=4,biases=true,projection=true+alibi", True),
        ("auto", "rope+wavelet:rank=6", 64, "rope+wavelet:rank=6,scales=3", True),
        ("plain", "wavelet", 64, "wavelet", False),
        ("auto", "kerple", 38, "rope:fraction=0.25+kerple", True),
        ("auto", "kerple", 37, "kerple", True),
        ("auto", "none", 512, "none", True),
        ("auto", "rope+alibi", 512, "rope+alibi", True),
        ("auto", "sinusoidal", 512, "sinusoidal", True),
        ("auto", "alibi@1", 512, "alibi@1", True),
    ],
)  # fmt: skip
def test_recipes(name, spec, length, wanted, transfers):
    """A pair with 6 turns in `length` tokens stays: two of four turn in 6.3 and 62.8 tokens."""
    recipe = recipes.choose(name, spec, families.decoder(stock()), length)
    assert (recipe.encoding, recipe.transfers) == (wavepe.encoding(wanted), transfers)
    assert [recipe.transfer(n) for n in (10, 1000)] == ([3, 30] if transfers else [0, 0])
    assert recipe.why.startswith(name)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("rope", "rope:fraction=0.5+alibi"),
        ("rope:theta=10000", "rope:theta=10000,fraction=0.5+alibi"),  # of wavepe compare
        ("rope:theta=100", "rope:theta=100,fraction=0.75+alibi"),
        ("rope+wavelet", "rope:fraction=0.5+alibi"),
        ("rope:fraction=0.25+wavelet", "rope:fraction=0.25+alibi"),
        ("rope:fraction=0.75,theta=100", "rope:fraction=0.75,theta=100+alibi"),
        ("rope:fraction=0.75", "rope:fraction=0.75+alibi"),  # also one that does not turn so often
        ("rope:inference_theta=50000", "alibi"),
        ("rope:type=yarn,factor=4", "alibi"),
        ("rope:type=yarn,factor=4+wavelet", "alibi"),
        ("rope@0+none@1", "alibi"),
        ("wavelet", "alibi"),
    ],
)
def test_auto_keeps_pairs_of_a_plain_rotation(source, wanted):
    """Also of one that names its own base; of one that rotates a fraction, all its pairs."""
    recipe = recipes.choose("auto", "alibi", families.decoder(stock()), 512, source)
    assert recipe.encoding == wavepe.encoding(wanted)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, KEPT),
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4e4}, "alibi"),
        ("linear", {}, "alibi"),
        ("yarn", {}, "alibi"),  # it grows with the queries
    ],
)
def test_pairs_that_a_scaling_changes_are_not_kept(kind, options, wanted):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **options}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 8192
    model = tiny(config=tiny_config(max_position_embeddings=32768, rope_parameters=rope))
    recipe = recipes.choose("auto", "alibi", families.decoder(model), 512)
    assert recipe.encoding == wavepe.encoding(wanted)
    assert (f"scales its fast pairs, too (rope_type {kind})" in recipe.why) == (wanted == "alibi")
    wavepe.hf.patch(model, recipe.encoding)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_neox", "rotates a part of each head"),
        ("gemma3_text", "several bases"),
        ("inkling_text", "relative is replaced"),
    ],
)
def test_auto_says_why_it_keeps_nothing(family, why):
    if family not in families.FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    recipe = recipes.choose("auto", "alibi", families.decoder(build(family)), 512)
    assert (recipe.encoding, why in recipe.why) == (wavepe.encoding("alibi"), True)


@pytest.mark.parametrize(("pairs", "turning"), [(12, 1), (12, 4), (12, 12), (44, 15), (49, 1)])
def test_as_many_pairs_stay_as_turn(pairs, turning):
    """Also where their share of all pairs is not a short fraction: 1 / 49 * 49 is below 1."""
    model = tiny(head_dim=2 * pairs)
    length = math.ceil(recipes.TURNS * 2 * math.pi * 10000 ** ((turning - 1) / pairs)) + 1
    rope = recipes.choose("auto", "alibi", families.decoder(model), length).encoding.rotary
    assert np.count_nonzero(rope.frequencies(2 * pairs)[0]) == turning


def losses(model, given):
    return recipes.Teacher(copy.deepcopy(given)).loss(model, model, {"input_ids": tokens(2, 20)})


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma2"])
def test_transfer_of_the_same_attention_is_nothing(family):
    model = build(family)
    same = wavepe.hf.patch(copy.deepcopy(model), "rope")
    assert losses(same, model) < 1e-9
    other = wavepe.hf.patch(copy.deepcopy(model), "alibi")
    loss = losses(other, model)
    loss.backward()
    assert loss > 1e-4
    assert all(x.grad is None for name, x in other.named_parameters() if "mlp" in name)


def test_transfer_leaves_the_model_as_it_was():
    model, ids = stock(), tokens(2, 20)
    swapped = wavepe.hf.patch(copy.deepcopy(model), SPEC)
    before = logits(swapped, ids)
    losses(swapped, model)
    assert torch.equal(logits(swapped, ids), before)


# ---- the whole way -------------------------------------------------------------------------------
@pytest.mark.parametrize("lora", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_an_interrupted_adaptation_goes_on(lora, tmp_path):
    """At random places, with the bits of an uninterrupted one; a third time it is only read."""
    if lora:
        pytest.importorskip("peft")
    model, dice = stock(), random.Random(2)
    model.config._name_or_path = "stock"  # by which PEFT would look for it
    options = {"control": True, "lora": lora, "tokens": 768}  # 12 steps

    def progress(what, done, total):
        if what in ("adapted", "control"):
            first.setdefault(what, done)
            if dice.random() < 0.12:
                raise KeyboardInterrupt

    whole = adapt(copy.deepcopy(model), folder=tmp_path / "whole", **options)
    interrupted, begun = 0, []
    for _ in range(40):
        first = {}
        begun.append(first)
        try:
            options["progress"] = progress
            pieces = adapt(copy.deepcopy(model), folder=tmp_path / "pieces", **options)
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 1
    assert max(first.get("adapted", 0) for first in begun) > 1
    again = adapt(copy.deepcopy(model), folder=tmp_path / "pieces", **options)
    assert whole.perplexity == pieces.perplexity == again.perplexity
    state = whole.model.state_dict()
    for found in (pieces.model, again.model):
        assert all(torch.equal(x, state[name]) for name, x in found.state_dict().items())
    kept = {path.name for path in (tmp_path / "pieces").iterdir()}
    assert {"model.safetensors", "modeling_wavepe.py", "README.md", "results.json"} <= kept
    assert "checkpoints" not in kept


@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=pytest.mark.slow), "transfer"])
def test_it_learns(recipe):
    """From a text with a rule, which a model without positions cannot see."""
    data = torch.arange(1, 6).repeat(800)
    model = stock()
    taught = adapt(model, "rope:theta=30", data=data, recipe="plain", learning_rate=1e-2)
    model = wavepe.hf.unpatch(taught.model)
    found = adapt(model, "wavelet", data=data, recipe=recipe, learning_rate=3e-3).perplexity
    assert found["adapted"][32] < found["swapped"][32]
    assert set(found) == {"stock", "swapped", "adapted"}
    assert set(found["stock"]) == {32, 64}


def test_held_out_tokens_are_not_trained_on():
    from wavepe.training.trainer import held_out_and_rows, order

    for count, length, held in ((1000, 32, 250), (97, 32, 64), (100_000, 512, 16384)):
        held_out, rows = held_out_and_rows(torch.arange(count), length, held)
        assert rows.max() < held_out.min() == count - held
        assert len(held_out) == held
        indices = order(len(rows), 3 * len(rows) + 1, 0)
        assert indices.bincount().tolist().count(3) == len(rows) - 1


def test_kinds_of_data():
    class Tokenizer:
        eos_token_id = 7

        def __call__(self, text, **options):
            return {"input_ids": [ord(letter) % 40 for letter in text]}

    texts = ["some words", "more of them"] * 60
    found = [
        adapt(stock(), data=data, tokens=64, recipe="plain", lengths=[8], tokenizer=Tokenizer())
        for data in (texts, [{"text": text} for text in texts], iter(texts))
    ]
    ids = torch.cat([torch.tensor([*(ord(c) % 40 for c in text), 7]) for text in texts])
    rows = [{"input_ids": row.tolist()} for row in ids.split(50)]
    found += [adapt(stock(), data=d, tokens=64, recipe="plain", lengths=[8]) for d in (ids, rows)]
    assert len({json.dumps(one.perplexity) for one in found}) == 1


def test_other_arguments_of_training():
    """Accumulated steps of one row are steps of two; recomputing changes nothing."""
    args = {"recipe": "transfer", "tokens": 640}
    wanted = adapt(stock(), **args).model.state_dict()
    accumulated = {"batch_size": 1, "gradient_accumulation_steps": 2}
    for options in ({"gradient_checkpointing": True}, accumulated):
        found = adapt(stock(), **args, **options).model.state_dict()
        assert all(close(x, wanted[name], 1e-3) for name, x in found.items())


# accelerate shards on GPUs only, so SHARD tells it to. Its own checkpoints fail then.
ADAPT = """
import os, sys, torch, wavepe.hf
model = torch.load("model.pt", weights_only=False)
rows = 2 // int(os.environ.get("WORLD_SIZE", "1"))
options = {"length": 32, "learning_rate": 1e-3, "recipe": "transfer", "use_cpu": True}
data = torch.load("data.pt")
done = wavepe.hf.adapt(
    model, "wavelet:scales=4", data, tokens=1536, batch_size=rows, folder=sys.argv[1],
    save_strategy="no", **options
)
print([hasattr(x, "full_tensor") for x in done.model.parameters()].count(True), "sharded")
"""
SHARD = """
import os
from accelerate import state
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
os.environ |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
begin = state.AcceleratorState.__init__
def shard(self, *args, fsdp_plugin=None, **options):
    begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin
state.AcceleratorState.__init__ = shard
"""


@pytest.mark.parametrize(
    "of_launcher",
    [
        "WORLD_SIZE=4 RANK=1",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("WORLD_SIZE=4", "SLURM_PROCID=1")),
    ],
)
def test_a_process_that_accelerate_does_not_join_is_alone(of_launcher, tmp_path, monkeypatch):
    """Whatever the launcher of a job of several processes has left in the environment."""
    for word in of_launcher.split():
        monkeypatch.setenv(*word.split("="))
    done = adapt(stock(), folder=tmp_path, tokens=640, recipe="plain")
    state = json.loads((tmp_path / "results.json").read_text())
    assert (done.tokens, state["settings"]["tokens"], len(state["perplexity"])) == (640, 640, 3)
    assert (tmp_path / "model.safetensors").exists()
    alone = adapt(stock(), tokens=640, recipe="plain")
    monkeypatch.undo()
    wanted = adapt(stock(), tokens=640, recipe="plain").perplexity
    assert alone.perplexity == done.perplexity == wanted


def test_gpus_of_one_process_count():
    """Each reads a batch of its own, unless they hold parts of one model."""
    from wavepe.training.trainer import rows_of, training_arguments

    model, arguments = stock(), training_arguments({}, per_device_train_batch_size=3)
    assert rows_of(model, arguments) == 3 * max(1, arguments.n_gpu)
    arguments._n_gpu = 2
    assert rows_of(model, arguments) == 6
    model.hf_device_map = {"model": 0, "lm_head": 1}
    assert rows_of(model, arguments) == 3


# Three ways in which accelerate and adapt could count otherwise; the last one fits.
JOINED = """
import torch, wavepe.hf
cpu, split = {"use_cpu": True}, {"accelerator_config": {"split_batches": True}}
for more in ({}, cpu | split, cpu | {"folder": "new"}):
    model = torch.load("model.pt", weights_only=False)
    try:
        done = wavepe.hf.adapt(model, "alibi", torch.load("data.pt"), tokens=640, length=32,
                               batch_size=2, recipe="plain", **more)
        print(done.tokens)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_processes_that_accelerate_does_not_join(tmp_path):
    """Where torch sees several, and on the CPU accelerate one, each would do the whole work."""
    torch.save(stock(), tmp_path / "model.pt")
    torch.save(DATA, tmp_path / "data.pt")
    (tmp_path / "script.py").write_text(JOINED)
    said = output("-m", "torch.distributed.run", "--nproc-per-node", 2, "script.py", cwd=tmp_path)
    if not torch.cuda.is_available():
        assert said.count("started 2 processes, and accelerate does not join them on cpu: ") == 2
    assert said.count("reads 2 sequences in a step, and adapt counts 4: give no split_batches") == 2
    assert said.count("640\n") == 2
    assert (tmp_path / "new/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", SHARD], ids=["DDP", "FSDP2"])
def test_two_processes(before, tmp_path):
    """As `accelerate launch` starts them: a row each of two."""
    torch.save(stock(), tmp_path / "model.pt")
    torch.save(DATA, tmp_path / "data.pt")
    (tmp_path / "one.py").write_text(ADAPT)
    (tmp_path / "two.py").write_text(before + ADAPT)
    output("one.py", "one", cwd=tmp_path)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", 2]
    message = output(*launch, "two.py", "two", cwd=tmp_path)
    assert ("0 sharded" in message) == (before == "")
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "two")
    )
    assert all(close(two[name], x, 1e-3) for name, x in one.items())


# ---- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec": "waveled"}, "unknown encoding 'waveled'"),
        ({"recipe": "quick"}, "unknown recipe 'quick'; known: auto, plain, transfer"),
        ({"tokens": 63}, "one step, 64, got 63"),
        ({"data": DATA[:200], "lengths": [180]}, "has 200 tokens; needs 180 to measure and 32"),
        ({"data": DATA + 12}, "data has ids 13..61, and the model has 50 tokens"),
        ({"data": ["words"]}, "needs the model's tokenizer="),
        ({"data": [{"words": 1}]}, "rows of data need 'input_ids' or 'text', got .'words'"),
        ({"data": torch.rand(9)}, "data must be 1-D and of integers"),
        ({"data": [1, 2]}, "rows of data must be texts or dicts, got int"),
        ({"data": __file__}, "data is the path '.*py', and adapt takes texts: give its text, or"),
        ({"length": 1}, "length must be at least 2"),
        ({"lora": 0}, "lora must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"model": "folder"}, r"needs a model, got str: .*from_pretrained\('folder'\)"),
        ({"lr": 4}, "unexpected keyword argument 'lr'"),
        ({"max_steps": 4}, "takes tokens, batch_size and folder; got the argument 'max_steps'"),
        ({"weight_decay": 0.1}, "its own optimizer and schedule.*got the argument 'weight_decay'"),
    ],
)
def test_errors(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        adapt(**{"model": stock(), **options})


@pytest.mark.parametrize("make", [own_tiny, pytest.param(patched_tiny, marks=pytest.mark.slow)])
def test_models_with_another_encoding(make, tmp_path, capsys):
    """Only RoPE has pairs to keep; the encoding that a model has already goes on as it is."""
    model = make("rope", max_position_embeddings=64)
    sizes = {"tokens": 240, "length": 40}
    first = adapt(model, "alibi", folder=tmp_path, **sizes)
    assert first.encoding == "rope:fraction=0.25+alibi"
    assert "it/s" not in capsys.readouterr().err  # bars of transformers
    of_stock = adapt(stock(), "alibi", **sizes).perplexity["stock"]
    assert first.perplexity["stock"] == pytest.approx(of_stock, rel=1e-5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    more = adapt(again, "alibi", **sizes)
    assert more.encoding == first.encoding
    assert more.perplexity["stock"] == more.perplexity["swapped"] == first.perplexity["adapted"]
    assert more.model is again
    found = adapt(make("kerple", max_position_embeddings=64), "wavelet:scales=2", **sizes)
    assert found.encoding == wavepe.hf.encoding_of(found.model) == "wavelet:scales=2"
    assert found.why == "auto: the encoding as it is given, because kerple is replaced"


def test_a_folder_of_another_adaptation(tmp_path):
    adapt(stock(), folder=tmp_path, recipe="plain", tokens=64)
    args = {"folder": tmp_path, "recipe": "plain", "tokens": 64}
    for options, changes in (
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"length": 40, "tokens": 80}, "tokens 64 there, 80 here; length 32 there, 40 here; .*"),
        ({"data": DATA.flip(0)}, "data sha256:.{16} there, sha256:.{16} here"),
        ({"max_grad_norm": 2.0}, r"training not given there, \('max_grad_norm', 2.0\) here"),
        ({"lora": 2}, "lora not given there, 2 here"),
    ):
        wanted = rf"settings \({changes}\): give another folder, or give its model"
        with pytest.raises(ValueError, match=wanted):
            adapt(stock(), **{**args, **options})
    (tmp_path / "checkpoints/adapted").mkdir(parents=True)  # it is not finished
    with pytest.raises(ValueError, match=r"give another folder$"):
        adapt(stock(), seed=1, **args)


def test_the_trained_length_is_measured(tmp_path):
    """Not beyond the held-out tokens, and not in the folders of earlier versions."""
    args = {"recipe": "plain", "tokens": 64}
    for trained, lengths, yarn in (
        (48, [32, 48, 64], {"yarn": "rope:type=yarn,factor=1.33333"}), (751, [32, 64], {})
    ):  # fmt: skip
        done = adapt(tiny(max_position_embeddings=trained), **args)
        assert list(done.perplexity["stock"]) == done.settings["lengths"] == lengths
        assert yarn.items() <= done.untrained.items()
    done = adapt(tiny(max_position_embeddings=48), lengths=[32, 64], folder=tmp_path, **args)
    again = adapt(tiny(max_position_embeddings=48), folder=tmp_path, **args)
    assert again.perplexity == done.perplexity


def test_a_model_is_known_by_its_weights(tmp_path):
    """Its name may change."""
    args = {"folder": tmp_path, "recipe": "plain", "tokens": np.int64(64), "seed": np.int8(0)}
    first = adapt(stock(), **args)
    same, other = stock(), stock()
    same.config._name_or_path = "elsewhere"
    other.lm_head.weight.data[0] *= 2
    assert adapt(same, **args).perplexity == first.perplexity
    wavepe.hf.set_theta(faster := stock(), 500)
    for changed in (other, faster):
        with pytest.raises(ValueError, match=r"\(weights sha256:.{16} there, sha256:.{16} here\)"):
            adapt(changed, **args)


def test_one_process_a_folder(tmp_path):
    busy = "another process is writing there, and accelerate has not joined it with this one"
    with locked(tmp_path), pytest.raises(OSError, match=busy):
        adapt(stock(), folder=tmp_path, tokens=64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[]", '{"runs": []}', "{"])
@pytest.mark.parametrize("name", ["results.json", "config.json"])
def test_files_of_another_program(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"adapt did not write .*{name}: give another folder"):
        adapt(stock(), folder=tmp_path, tokens=64)
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [(name, content)]


def test_killed_while_checkpoints_are_removed(tmp_path, monkeypatch):
    """They are gone at once, so none is left half."""
    args = {"folder": tmp_path, "recipe": "plain", "tokens": 256}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed here
        first = adapt(stock(), **args)
    assert (tmp_path / ".checkpoints").exists()
    assert adapt(stock(), **args).perplexity == first.perplexity
    assert not (tmp_path / ".checkpoints").exists()


def test_a_control_can_follow(tmp_path):
    """The rest is not trained again."""
    args = {"recipe": "plain", "tokens": 256}
    first, told = adapt(stock(), folder=tmp_path, **args), []
    options = {"control": True, "progress": lambda what, *_: told.append(what)}
    found = adapt(stock(), folder=tmp_path, **args, **options)
    assert set(told) == {"control", "control, 32 tokens", "control, 64 tokens"}
    both = adapt(stock(), control=True, **args)
    assert found.perplexity == both.perplexity == {**first.perplexity, **found.perplexity}
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("make", [tiny, lambda: own_tiny("rope"), lambda: patched_tiny("rope")])
def test_an_encoding_that_does_not_fit_is_refused_first(tmp_path, make):
    with pytest.raises(ValueError, match="the model do not fit: head size 8 is not divisible"):
        adapt(make(), "wavelet:scales=5", folder=tmp_path / "new", control=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lora", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_bf16_and_the_missing_cache_are_of_the_training_alone(lora, tmp_path):
    """The model is measured as it is saved, and beside the others."""
    if lora:
        pytest.importorskip("peft")
    args = {"control": True, "lora": lora, "tokens": 1280}
    exact = adapt(stock(), **args)
    done = adapt(stock(), folder=tmp_path, bf16=True, use_cpu=True, **args)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (saved, done.model):
        found = wavepe.analysis.perplexity(model, DATA[-done.settings["held_out"] :], 32)
        assert found == done.perplexity["adapted"][32]
        assert model.config.use_cache
    assert exact.perplexity != done.perplexity
    control = exact.perplexity["control"][32]
    assert done.perplexity["control"][32] == pytest.approx(control, rel=0.01)
    assert "forward" not in vars(done.model)
    assert (done.tokens, done.passes) == (1280, pytest.approx(40 / 70, rel=0.01))


def test_a_broken_checkpoint_is_passed_over(tmp_path):
    """kill -9 may leave one; Trainer writes its state last."""
    from wavepe.training.trainer import _last_checkpoint

    for step, state in ((3, {"global_step": 3}), (9, None), (6, {"global_step": 6})):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(json.dumps(state))
    assert _last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    shutil.rmtree(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-9/trainer_state.json").write_text('{"global_st')
    assert _last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
