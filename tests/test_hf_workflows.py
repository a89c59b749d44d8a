"""Patched Llamas in the hands of Accelerate, Trainer and PEFT: where something could be lost."""

import copy
import io
import itertools
from pathlib import Path

import pytest
import torch
import wavepe.hf
from cases import needs
from examples_hf import stored
from hf_families import UNROTATED, build, by_turns
from hf_model import close, logits, own_tiny, patched_tiny, pickled, tiny, tokens
from processes import forked, output
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    Trainer,
    TrainingArguments,
)

# PEFT uses a name that the newest transformers deprecates.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"
)
LEARNED = "wavelet:scales=4,learned=true"
SLOW = pytest.mark.slow


def trained(model):
    """Move the learned parameters away from their initial values, as training would."""
    with torch.no_grad():
        model.model.position_encoding.scale.mul_(1.3)
        model.model.position_encoding.shift.add_(0.5)
    return model


# ------------------------------------------------------------------ Accelerate
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_device_map(where, tmp_path):
    """A parameter on the disk is there for the time of its module's forward only."""
    needs("accelerate")
    model, ids = trained(patched_tiny(LEARNED)), tokens(2, 12)
    model.save_pretrained(tmp_path / "model")
    places = {"": "cpu"}
    if where == "disk":
        names = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb", "position_encoding")
        places = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
        places |= {"model.layers.0": "disk", "model.position_encoding": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert loaded.model.position_encoding.scale.is_meta == (where == "disk")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


# ------------------------------------------------------------------ Trainer
def arguments(folder, **options):
    options |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(folder), **options)


def test_trainer_in_bfloat16(tmp_path):
    """Weights in bfloat16, autocast, and places in float32: in the model, the file, and again."""
    needs("accelerate")
    model, rows, ids = patched_tiny(LEARNED).to(torch.bfloat16), tokens(8, 12), tokens(2, 30)
    first = model.model.position_encoding.scale.detach().clone()
    given = arguments(tmp_path, max_steps=3, save_steps=3, learning_rate=1e-3, bf16=True)
    Trainer(model, given, train_dataset=[{"input_ids": r, "labels": r} for r in rows]).train()
    step = (model.model.position_encoding.scale - first).abs()
    # Adam's first steps are of the learning rate each; bfloat16 would have rounded those away
    assert 1e-3 < step.max() < 3.1e-3
    stored_scale = stored(tmp_path / "checkpoint-3" / "model.safetensors", "scale")
    assert [value.dtype for value in stored_scale.values()] == [torch.float32]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3", dtype="auto")
    assert {weight.dtype for weight in loaded.model.layers.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.position_encoding.scale, model.model.position_encoding.scale)
    assert torch.equal(logits(loaded, ids), logits(model.eval(), ids))


def in_steps(make, folder, steps):
    """The model of `make` after training to each of the steps, resumed from the one before."""
    rows = tokens(8, 12)
    for last in steps:
        model = make()
        options = {"max_steps": last, "save_steps": 2, "learning_rate": 1e-3}
        given = arguments(folder, lr_scheduler_type="constant", **options)
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model, given, train_dataset=data).train(resume_from_checkpoint=last != steps[0])
    return model.eval()


def same(one, other):
    weights = other.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


@by_turns(0, more=UNROTATED)
def test_trainer_resumes(family, tmp_path, record_property):
    """A patched model that is stopped after two steps of four and resumed is one never stopped."""
    needs("accelerate")

    def stock():
        return build(family, use_cache=False)

    def patched():
        return wavepe.hf.patch(stock(), LEARNED)

    straight = in_steps(patched, tmp_path / "straight", [4])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "checkpoint-4").eval()
    assert same(loaded, straight)
    learned = [name for name in straight.state_dict() if "position_encoding." in name]
    first = patched().state_dict()
    assert learned
    assert not any(torch.equal(first[name], straight.state_dict()[name]) for name in learned)
    resumed = in_steps(patched, tmp_path / "resumed", [2, 4])
    if not same(resumed, straight):
        stocks = [in_steps(stock, tmp_path / str(at), at) for at in ([4], [2, 4])]
        assert not same(*stocks)
        record_property("cell", "upstream")


@pytest.mark.parametrize("spec", ["wavelet:scales=4", pytest.param(LEARNED, marks=SLOW)])
def test_evaluation_of_packed_texts(spec, tmp_path):
    needs("accelerate")
    model = patched_tiny(spec)
    rows = [tokens(1, length, seed=length)[0] for length in (5, 9, 7)]
    texts = [{"input_ids": row.tolist()} for row in rows]
    given = arguments(tmp_path, per_device_eval_batch_size=3)
    trainer = Trainer(model, given, data_collator=DataCollatorWithFlattening(), eval_dataset=texts)
    total = 0.0
    for row in rows:
        scores = logits(model, row[None])[0, :-1].log_softmax(-1)
        total -= scores.gather(1, row[1:, None]).sum().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / (5 + 9 + 7 - 3), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt_neox", pytest.param("mistral", marks=SLOW)])
def test_label_smoothing_shifts_the_labels(family, tmp_path):
    """Trainer asks by the name of the class whether a model is a causal one."""
    needs("accelerate")
    patched, ids = wavepe.hf.patch(build(family), LEARNED), tokens(2, 12)
    patched.save_pretrained(tmp_path)
    losses = []
    for model in (patched, AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.1))
        losses.append(trainer.compute_loss(model, {"input_ids": ids, "labels": ids}).item())
    scores = logits(patched, ids)[:, :-1].log_softmax(-1)
    true = -scores.gather(2, ids[:, 1:, None]).mean().item()
    assert losses == pytest.approx([0.9 * true - 0.1 * scores.mean().item()] * 2, rel=1e-5)


# ------------------------------------------------------------------ PEFT


def test_prefix_tuning_counts_the_prefix():
    """A prefix of the keys and values of real tokens is those tokens before the text."""
    peft = needs("peft")
    model, ids = own_tiny("wavelet:scales=4", hidden_size=32), tokens(2, 12)
    prefix = tokens(1, 5, seed=3)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache, use_cache=True)
    pairs = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    flat = torch.stack(list(itertools.chain.from_iterable(pairs)))  # (2 layers, heads, 5, d)
    wanted = logits(model, torch.cat([prefix.expand(2, -1), ids], dim=1))[:, 5:]
    plain = logits(model, ids)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        weight = tuned.prompt_encoder.default.embedding.weight
        weight.copy_(flat.permute(2, 0, 1, 3).reshape(weight.shape))
    assert close(logits(tuned, ids), wanted, 1e-5)
    assert not close(plain, wanted, 0.1)
    try:
        peft.get_peft_model(tiny(hidden_size=32), config).generate(input_ids=ids, max_new_tokens=2)
    except FutureWarning as ignored:  # a stock model's prefix: PEFT 0.21 with transformers 5.24
        with pytest.raises(FutureWarning, match=str(ignored).split(" for ", 1)[0]):
            tuned.generate(input_ids=ids, max_new_tokens=4)
        return
    text = tuned.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    grown = ids
    for _ in range(4):  # without a cache of the text
        grown = torch.cat([grown, logits(tuned, grown)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(text, grown)


def lora(peft):
    return peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["position_encoding"], task_type="CAUSAL_LM"
    )


DEFAULTS = """
import sys
import wavepe.hf
from hf_model import patched_tiny
model = patched_tiny("alibi")
assert "peft" not in sys.modules
from peft import LoraConfig, get_peft_model
print(sorted(get_peft_model(model, LoraConfig()).peft_config["default"].target_modules))
"""


def test_default_target_modules_where_peft_comes_last():
    needs("peft")
    found = output("-c", DEFAULTS, start=forked, PYTHONPATH=str(Path(__file__).parent))
    assert found.split() == ["['q_proj',", "'v_proj']"]


def default_targets(peft, model):
    """The modules that PEFT takes when none are named, or its error: it has some families only."""
    try:
        return peft.get_peft_model(model, peft.LoraConfig()).peft_config["default"].target_modules
    except ValueError as error:
        return str(error)


@by_turns()
def test_default_target_modules(family, tmp_path):
    peft = needs("peft")
    wanted = default_targets(peft, build(family))
    patched = wavepe.hf.patch(build(family), LEARNED)
    patched.save_pretrained(tmp_path)
    for model in (patched, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert default_targets(peft, model) == wanted


@pytest.mark.parametrize("loaded", [False, True])
def test_an_adapter_with_defaults_comes_back(loaded, tmp_path):
    """The encoding's parameters are in the adapter, and not in its base."""
    peft = needs("peft")
    ids, patched = tokens(2, 12), wavepe.hf.patch(build("mistral"), LEARNED)
    patched.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base") if loaded else patched
    first = logits(model.eval(), ids)
    tuned = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=["position_encoding"]))
    optimizer = torch.optim.SGD((p for p in tuned.parameters() if p.requires_grad), lr=1.0)
    tuned(ids, labels=ids).loss.backward()
    optimizer.step()
    wanted = logits(tuned.eval(), ids)
    assert not close(wanted, first, 1e-2)
    tuned.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(again, ids), wanted)
    place = again.base_model.model.model.position_encoding
    assert not torch.equal(place.modules_to_save["default"].scale, place.original_module.scale)


def test_adapters_with_places_of_their_own():
    peft = needs("peft")
    ids, moved = tokens(2, 12), trained(own_tiny(LEARNED))
    model = peft.get_peft_model(own_tiny(LEARNED), lora(peft), adapter_name="first")
    model.add_adapter("second", lora(peft))
    model.eval()
    first = logits(model, ids)
    assert torch.equal(first, logits(own_tiny(LEARNED), ids))  # LoRA begins at zero
    model.set_adapter("second")
    trained_copy = model.base_model.model.model.position_encoding.modules_to_save["second"]
    trained_copy.load_state_dict(moved.model.position_encoding.state_dict())
    assert torch.equal(logits(model, ids), logits(moved, ids))
    model.set_adapter("first")
    assert torch.equal(logits(model, ids), first)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), first)
    assert not close(logits(moved, ids), first, 0.1)


def test_adapter_of_a_bfloat16_model():
    """The copy that is trained is float32, too, and gets its gradient."""
    peft = needs("peft")
    model = peft.get_peft_model(own_tiny(LEARNED).to(torch.bfloat16), lora(peft))
    ids = tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    copies = model.base_model.model.model.position_encoding.modules_to_save["default"]
    for place in copies.parameters():
        assert place.dtype == torch.float32
        assert place.grad.any()
    assert not any(
        weight.requires_grad for name, weight in model.named_parameters() if "layernorm" in name
    )


def test_a_patched_model_in_peft_and_out_again(tmp_path):
    """Merged, it is the patched Llama again: it saves itself with its encoding, and unpatches."""
    peft = needs("peft")
    model, ids = trained(patched_tiny(LEARNED)), tokens(2, 12)
    wrapped = peft.get_peft_model(model, lora(peft))
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(0.1)
    wanted = logits(wrapped.eval(), ids)
    merged = wrapped.merge_and_unload()
    assert merged is model
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert close(logits(loaded, ids), wanted, 1e-5)
    assert not close(logits(trained(patched_tiny(LEARNED)), ids), wanted, 1e-2)
    assert not hasattr(wavepe.hf.unpatch(merged).model, "position_encoding")


# ------------------------------------------------------------------ several devices
@pytest.mark.parametrize(
    ("first", "spec"),
    [
        ("patch", "alibi"),
        ("patch", "sinusoidal"),
        ("dispatch", "shaw:clip=3"),
        ("dispatch", "rope:theta=30"),
    ],
)
def test_dispatched_by_accelerate(first, spec):
    accelerate = needs("accelerate")

    def dispatch(model):
        return accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)

    ids = tokens(2, 12)
    model, wanted, stock = tiny(), logits(patched_tiny(spec), ids), logits(tiny(), ids)
    if first == "patch":
        model = dispatch(wavepe.hf.patch(model, spec))
    else:
        model = wavepe.hf.patch(dispatch(model), spec)
    assert torch.equal(logits(model, ids), wanted)
    assert torch.equal(logits(wavepe.hf.unpatch(model), ids), stock)


def test_replicas_have_their_own_weights():
    """DataParallel makes them: its layers compute with the copies of the weights."""
    model, ids = patched_tiny(LEARNED), tokens(2, 12)
    layer = model.model.layers[0].self_attn
    replica = layer._replicate_for_data_parallel()
    seen = []
    replica._modules = {name: torch.nn.Identity() for name in layer._modules}
    for name, module in layer._modules.items():
        replica._modules[name] = copy.deepcopy(module)
        replica._modules[name].register_forward_hook(lambda *_, name=name: seen.append(name))
    model.model.layers[0].self_attn = replica
    wanted = logits(patched_tiny(LEARNED), ids)
    assert torch.equal(logits(model, ids), wanted)
    assert {"q_proj", "o_proj"} <= set(seen)


def test_a_layer_that_is_copied_and_appended_shares_the_encoding():
    """Depth up-scaling: all layers share the learned parameters, and all train them."""
    model, ids = patched_tiny(LEARNED), tokens(2, 12)
    layer = copy.deepcopy(model.model.layers[1])
    layer.self_attn.layer_idx = 2
    model.model.layers.append(layer)
    names = [name for name, _ in model.named_parameters() if "position_encoding." in name]
    assert len(names) == 2  # scale and shift
    before = logits(model, ids)
    with torch.no_grad():
        model.model.position_encoding.shift.add_(0.5)
    for index in range(3):
        single = copy.deepcopy(model.model.layers[index].self_attn.wavepe.shared)
        assert single.owner is model.model
    assert not close(logits(model, ids), before, 1e-4)
    copied = copy.deepcopy(model)
    owners = [each.self_attn.wavepe.shared.owner for each in copied.model.layers]
    assert all(owner is copied.model for owner in owners)


def test_a_layer_that_is_saved_alone_leaves_its_model_behind():
    model, ids = patched_tiny(LEARNED, vocab_size=20_000), tokens(2, 12)
    extra = copy.deepcopy(model.model.layers[1])
    extra.self_attn.layer_idx = 2
    model.model.layers.append(extra)
    layer, file = pickled(model.model.layers[0]), io.BytesIO()
    torch.save(model.model.layers[0], file)
    weights = sum(x.nbytes for x in model.model.layers[0].parameters())
    assert weights < file.tell() < weights + 50_000 < model.lm_head.weight.nbytes
    other = copy.deepcopy(model)
    other.model.layers[0] = layer
    with pytest.raises(ValueError, match="saved without its model"):
        logits(other, ids)
    whole = pickled(model)
    assert torch.equal(logits(whole, ids), logits(model, ids))
    owners = [each.self_attn.wavepe.shared.owner for each in whole.model.layers]
    assert all(owner is whole.model for owner in owners)


@pytest.mark.parametrize("spec", ["alibi", LEARNED])
@pytest.mark.parametrize("change", ["removed", "shared"])
def test_a_model_whose_layers_were_changed_is_copied_and_pickled(spec, change):
    model, ids = patched_tiny(spec), tokens(2, 12)
    if change == "removed":
        del model.model.layers[1]
        model.config.num_hidden_layers = 1
    else:
        model.model.layers[1] = model.model.layers[0]
    wanted = logits(model, ids, use_cache=False)
    for other in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(logits(other, ids, use_cache=False), wanted)


def test_parameter_groups():
    model = patched_tiny("transformer_xl")
    decayed, others = wavepe.hf.parameter_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    found = {id(x) for group in (decayed, others) for x in group["params"]}
    assert len(found) == len(decayed["params"]) + len(others["params"])
    assert found == {id(x) for x in model.parameters()}
    plain = {id(x) for x in others["params"]}
    for name, x in model.named_parameters():
        assert (id(x) in plain) == ("norm" in name or "position_encoding" in name), name
    torch.optim.AdamW(wavepe.hf.parameter_groups(torch.compile(model, backend="eager"), 0.1))
