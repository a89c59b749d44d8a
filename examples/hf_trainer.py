"""Train with transformers' Trainer, and resume from a checkpoint: checkpoints keep the encoding.

    python examples/hf_trainer.py

This trains a small byte-level model with a learned wavelet encoding on the sources of this package.
It resumes the training from the checkpoint in the middle, and loads the last checkpoint.
"""

import tempfile
from pathlib import Path

import torch
import wavepe.hf
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

LENGTH, STEPS = 32, 12


def fresh_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    return wavepe.hf.patch(model, "wavelet:scales=4,learned=true")


def rows():
    files = sorted(Path(wavepe.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    cut = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    return [{"input_ids": row, "labels": row} for row in cut]


def optimizer(model):
    # Scales and shifts are numbers of tokens, so they need larger steps than weights. They need no
    # weight decay; the Trainer's own optimizer would decay them.
    names = dict(model.named_parameters())
    places = [weight for name, weight in names.items() if "position_encoding" in name]
    weights = [weight for name, weight in names.items() if "position_encoding" not in name]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": places, "lr": 3e-2}],
        lr=3e-3,
        weight_decay=0.0,
    )


def train(folder, resume=None):
    model = fresh_model()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows(), optimizers=(optimizer(model), None))
    trainer.train(resume_from_checkpoint=resume)
    return model.eval()


def main(folder):
    straight = train(f"{folder}/straight")
    resumed = train(f"{folder}/resumed", f"{folder}/straight/checkpoint-{STEPS // 2}")
    # The checkpoint is a wavepe_llama, which contains its encoding.
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/straight/checkpoint-{STEPS}")
    print(f"checkpoint: {loaded.config.model_type}, {loaded.config.position_encoding}")
    scale = [model.model.position_encoding.scale for model in (fresh_model(), straight, loaded)]
    print("a scale before, after, and loaded:", *(f"{s[1].item():.4f}" for s in scale))
    tokens = rows()[0]["input_ids"][None]
    with torch.no_grad():
        logits = straight(tokens).logits
        for name, model in (("resumed", resumed), ("loaded", loaded)):
            difference = (model(tokens).logits - logits).abs().max().item()
            print(f"{name}: logits differ by {difference:.0e}")
    return straight, resumed, loaded


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
