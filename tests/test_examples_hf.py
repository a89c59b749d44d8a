"""The Hugging Face workflows of examples/hf_*.py do what they print, by numbers of our own.

Each file's main runs in this process with what it is given here; logits are compared with the model
in float64 of hf_model.py, under the encoding that the files on disk hold.
"""

import json

import examples_hf as examples
import numpy as np
import pytest
import torch
import wavepe.hf
from cases import needs
from hf_model import gradients, logits, reference, worst
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

# PEFT and TRL use names that the newest transformers deprecates.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"
)
TABLE = "position_encoding"


def test_every_file_has_its_test():
    tested = ["compile", "cpu_offload", "export", "fsdp2", "lm_eval", "peft_lora"]
    tested += ["swap_and_train", "trainer", "trl_packing"]
    assert [f"hf_{name}" for name in tested] == examples.FILES


# ------------------------------------------------------------------ Trainer
@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory):
    needs("accelerate")
    folder, example = tmp_path_factory.mktemp("trainer"), examples.load("hf_trainer")
    return example, folder, example.main(str(folder))


def test_trainer_resumes_as_if_never_stopped(trainer_run):
    example, folder, (straight, resumed, _) = trainer_run
    half = examples.stored(folder / "straight" / "checkpoint-6" / "model.safetensors")
    first = example.fresh_model().state_dict()
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name])
        assert not torch.equal(weight, half[name]), name  # else there was nothing to resume
        assert not torch.equal(half[name], first[name]), name


def test_trainer_checkpoint_is_the_trained_model(trainer_run):
    _, folder, (straight, _, loaded) = trainer_run
    checkpoint = folder / "straight" / "checkpoint-12"
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "wavepe_llama"
    assert config["architectures"] == ["WavePELlamaForCausalLM"]
    table = examples.stored(checkpoint / "model.safetensors", TABLE)
    scale, shift = (table[f"model.{TABLE}.{name}"] for name in ("scale", "shift"))
    assert torch.equal(scale, straight.model.position_encoding.scale)
    row = examples.bytes_row(40)  # longer than what it was trained on
    assert torch.equal(logits(loaded, row[None]), logits(straight, row[None]))
    assert examples.error(loaded, row, examples.wavelet(scale, shift)) < 2e-6
    assert examples.error(loaded, row, examples.wavelet()) > 1e-4  # the trained places matter


# ------------------------------------------------------------------ TRL


@pytest.mark.slow
def test_trl_packs_texts_that_do_not_see_each_other(tmp_path, monkeypatch):
    needs("trl")
    example, masks = examples.load("hf_trl_packing"), []
    make = example.fresh_model

    def watched(tokenizer):
        model = make(tokenizer)

        def watch(module, args, kwargs):
            masks.append((module.training, kwargs["attention_mask"]))

        model.model.layers[0].self_attn.register_forward_pre_hook(watch, with_kwargs=True)
        return model

    monkeypatch.setattr(example, "fresh_model", watched)
    trainer, batch = example.main(str(tmp_path))
    ids, positions = batch["input_ids"], batch["position_ids"]
    starts = (positions[0] == 0).nonzero().flatten()
    assert len(starts) > 4
    trained = [mask for training, mask in masks if training]
    assert len(trained) >= 4  # steps; none of them with a mask of queries x keys
    assert all(mask.shape == (1, 1, 1, mask.shape[-1]) for mask in trained)
    assert all(len(mask.unique()) > 4 for mask in trained)

    # The loss of a training step, and of each text alone in float64.
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch)).item()
    total = count = 0
    for text in ids[0].tensor_split(starts[1:]):
        right = log_probabilities(trainer.model, text, examples.wavelet())
        total -= right.sum()
        count += len(right)
    assert abs(loss - total / count) < 1e-5

    # Run together, they would be another model.
    joined = logits(trainer.model, ids, use_cache=False)
    packed = logits(trainer.model, ids, position_ids=positions, use_cache=False)
    assert worst(joined, packed) > 1e-2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded, ids, position_ids=positions, use_cache=False), packed)


def log_probabilities(model, text, parts):
    """Return that of each next token of a text, by the model in float64."""
    scores, _ = reference(model, text, parts)
    rows = torch.from_numpy(scores[:-1]).log_softmax(-1)
    return rows.gather(1, text[1:, None])[:, 0].numpy()


# ------------------------------------------------------------------ PEFT


def test_peft_adapter_holds_the_encoding(tmp_path):
    needs("peft")
    model, loaded, merged = examples.load("hf_peft_lora").main(str(tmp_path))
    adapter = examples.stored(tmp_path / "adapter" / "adapter_model.safetensors")
    places = {name.rpartition(".")[2]: value for name, value in adapter.items() if TABLE in name}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert sorted(places) == ["scale", "shift"]
    for name, value in places.items():
        assert not torch.equal(value, getattr(base.model.position_encoding, name))  # trained
    # W + alpha/r B A by hand, in the base model, whose logits float64 checks
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    with torch.no_grad():
        for name, a in adapter.items():
            if "lora_A" in name:
                b = adapter[name.replace("lora_A", "lora_B")]
                place = name.removeprefix("base_model.model.").replace(".lora_A.weight", "")
                base.get_submodule(place).weight.add_(config["lora_alpha"] / config["r"] * b @ a)
        assert b.any()
    row = examples.bytes_row(40)
    parts = examples.wavelet(**places)
    got = {name: logits(m, row[None])[0] for name, m in (("model", model), ("loaded", loaded))}
    assert torch.equal(got["model"], got["loaded"])
    assert examples.error(base, row, parts, got["loaded"]) < 1e-5
    assert examples.error(base, row, parts, logits(merged, row[None])[0]) < 1e-5
    assert examples.error(base, row, examples.wavelet(), got["loaded"]) > 1e-3
    assert type(merged) is wavepe.hf.WavePELlamaForCausalLM


# ------------------------------------------------------------------ Accelerate
def test_cpu_offload_changes_nothing(capsys):
    needs("accelerate")
    example = examples.load("hf_cpu_offload")
    model, tokens, got, _, text = example.main()
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    plain = wavepe.hf.patch(example.fresh_model(), example.SPEC)
    assert examples.error(plain, tokens[0], examples.wavelet(), got[0]) < 1e-5
    for _ in range(8):  # greedily, without a cache
        tokens = torch.cat([tokens, logits(plain, tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(text, tokens)
    assert (
        "dispatch first, then patch: parameter model.embed_tokens.weight is on the meta device"
        in (capsys.readouterr().out)
    )


# ------------------------------------------------------------------ FSDP2


@pytest.fixture(scope="module")
def fsdp_run(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    return examples.in_processes("fsdp2_example", 2, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.slow
def test_fsdp2_trains_as_one_process(fsdp_run):
    printed = fsdp_run["printed"]
    assert "scales in this process: 4 of 8" in printed
    lines = [line.partition(":")[2].split() for line in printed.splitlines() if "losses" in line]
    sharded, alone = (list(map(float, line)) for line in lines)
    assert sharded == pytest.approx(alone, abs=2e-5)
    assert sharded[2] != sharded[0]
    model = examples.load("hf_fsdp2").fresh_model()
    first = model.state_dict()[f"model.{TABLE}.scale"].clone()
    model.load_state_dict(fsdp_run["state"])
    scale, shift = (fsdp_run["state"][f"model.{TABLE}.{name}"] for name in ("scale", "shift"))
    assert not torch.equal(scale, first)
    for name, weight in fsdp_run["alone"].items():  # Adam divides by small numbers
        assert worst(fsdp_run["state"][name], weight) < 1e-4, name
    assert examples.error(model, examples.bytes_row(40), examples.wavelet(scale, shift)) < 1e-5


@pytest.mark.slow
def test_fsdp2_gradients_are_those_of_the_whole_batch(fsdp_run):
    """Adam would hide one that is twice too large."""
    import distributed_worker  # it needs torch with distributed

    wanted = examples.load("hf_fsdp2").fresh_model()
    names = [name for name, _ in wanted.named_parameters()]
    wanted = dict(zip(names, gradients(wanted, distributed_worker.batch()), strict=True))
    for run, bound in (("float32", 1e-5), ("from meta", 1e-5), ("mixed", 0.05), ("bfloat16", 0.05)):
        for name, gradient in wanted.items():
            got = fsdp_run[run][name].float()
            assert worst(got, gradient) <= bound * gradient.abs().max(), (run, name)
        assert wanted[f"model.{TABLE}.scale"].any()
        assert fsdp_run[run][f"model.{TABLE}.scale"].dtype == torch.float32
    assert "uniform original parameter dtype" in fsdp_run["without its own group"]
    assert "patch the model first, then shard it" in fsdp_run["patched after sharding"]


# ------------------------------------------------------------------ compilers
@pytest.mark.slow
def test_compile_makes_one_graph(capsys):
    """Dynamo's graphs, run by PyTorch: inductor takes a minute to come to the same."""
    torch._dynamo.reset()
    examples.load("hf_compile").main("eager")
    torch._dynamo.reset()
    printed = capsys.readouterr().out
    assert examples.numbers(printed, "graphs in evaluation:") == [1]
    assert examples.numbers(printed, "graphs with training:") == [2]
    differences = examples.numbers(printed, "differ by")
    assert len(differences) == 5
    assert max(differences) < 1e-5
    losses, eager = examples.numbers(printed, "loss"), examples.numbers(printed, "not compiled")
    assert losses == pytest.approx(eager, abs=2e-5)
    assert len(losses) == 2


@pytest.mark.parametrize(
    "spec",
    ["wavelet:scales=4", pytest.param("wavelet:scales=4,learned=true", marks=pytest.mark.slow)],
)
def test_export_serves_every_length(spec, tmp_path):
    loaded, model = examples.load("hf_export").main(str(tmp_path / "model.pt2"), spec)
    for length in (2, 33, 200):
        row = examples.bytes_row(length)
        got = loaded(row[None].expand(3, -1)).detach()
        assert examples.error(model.model, row, examples.wavelet(), got[2]) < 1e-5
    with pytest.raises(AssertionError, match="4096"):
        loaded(examples.bytes_row(4097)[None])


# ------------------------------------------------------------------ lm-evaluation-harness
@pytest.mark.slow
def test_lm_eval_scores_the_choices(tmp_path):
    pytest.importorskip("lm_eval")
    example = examples.load("hf_lm_eval")
    model, tokenizer, found = example.main(str(tmp_path))
    assert list(found) == ["stock", "wavelet:scales=4", "alibi"]
    right = {"stock": "rope", "wavelet:scales=4": examples.wavelet(), "alibi": "alibi"}
    for spec, result in found.items():
        samples = sorted(result["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(example.ROWS)
        hits = []
        for row, sample in zip(example.ROWS, samples, strict=True):
            scores = []
            for choice in row["choices"]:
                text = torch.tensor(tokenizer(row["question"] + choice)["input_ids"])
                count = len(tokenizer(choice)["input_ids"])
                scores.append(log_probabilities(model, text, right[spec])[-count:].sum())
            got = [score for score, _ in sample["filtered_resps"]]
            assert got == pytest.approx(scores, abs=1e-4)
            hits.append(scores[row["answer"]] == max(scores))
        assert result["results"]["local_choice"]["acc,none"] == pytest.approx(sum(hits) / 3)
    first = [found[spec]["samples"]["local_choice"][0]["filtered_resps"][0][0] for spec in found]
    assert len({round(score, 5) for score in first}) == 3


# ------------------------------------------------------------------ swap and train on

SPEC = "wavelet:scales=4"
NAMES = ["rope", f"rope -> {SPEC}"]
TINY = "--length 16 --steps 4 --more 2 --batch 2 --layers 1 --hidden 32 --eval-bytes 128"


@pytest.fixture(scope="module")
def swap():
    pytest.importorskip("rich")
    module = examples.load("hf_swap_and_train")
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    yield module
    torch.set_num_threads(threads)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def eight_letters(tmp_path_factory):
    """4000 bytes of eight letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).integers(97, 105, size=4000).astype(np.uint8)
    path.write_bytes(letters.tobytes())
    return path


def run(swap, out, text, *more):
    words = ["--out", out, "--data", text, "--encoding", SPEC, *TINY.split(), *more]
    return swap.main([str(word) for word in words])


def kept(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(swap, eight_letters, tmp_path_factory):
    """The folder of one run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert run(swap, out, eight_letters) == 0
    return out


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_swap_results(finished):
    results = kept(finished)
    assert results["train_length"] == 16
    assert results["encoding"] == SPEC
    assert results["evaluated_bytes"] == 128
    assert results["settings"]["steps"] == 4
    assert results["environment"]["torch"] == torch.__version__
    runs = results["runs"]
    names = [*NAMES, *(f"{name}, fine-tuned" for name in NAMES)]
    assert [each["encoding"] for each in runs] == names
    assert [each["steps"] for each in runs] == [4, 4, 6, 6]
    for each in runs:
        assert list(each["perplexity"]) == ["16", "64"]
        assert all(1 < value < 1000 for value in each["perplexity"].values())
    seconds = [each["seconds"] for each in runs]
    assert seconds[1] == 0 < min(seconds[0], *seconds[2:])
    assert len({each["perplexity"]["64"] for each in runs}) == 4


def test_the_swap_changes_no_weight_and_training_does(finished):
    stock, swapped = weights(finished / "llama"), weights(finished / "llama-swapped")
    assert set(stock) == set(swapped)
    for name, weight in stock.items():
        assert torch.equal(weight, swapped[name])
    for folder in ("llama", "llama-swapped"):
        trained = weights(finished / f"{folder}-trained")
        assert all(not torch.equal(trained[name], weight) for name, weight in stock.items())
    assert AutoConfig.from_pretrained(finished / "llama-trained").model_type == "llama"
    config = AutoConfig.from_pretrained(finished / "llama-swapped-trained")
    assert config.position_encoding == SPEC
