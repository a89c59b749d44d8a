"""Fine-tune a model and its learned encoding with PEFT's LoRA; save, load and merge the adapter.

python examples/hf_peft_lora.py
"""

import tempfile
from pathlib import Path

import torch
import wavepe.hf
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def make_base(folder):
    """Save a base model; convert your own checkpoint by wavepe.hf.convert(source, folder, SPEC)."""
    torch.manual_seed(0)
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding="wavelet:scales=4,learned=true",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    wavepe.hf.WavePELlamaForCausalLM(config).save_pretrained(folder)


def train(model, tokens, steps=10):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


def main(folder):
    # The base must be a wavepe_llama on disk. The file of an adapter names its base, but no
    # encoding. An adapter for a patched Llama would load with the stock Llama, without an error,
    # and give wrong results.
    make_base(f"{folder}/base")
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    lora = LoraConfig(
        r=4,
        modules_to_save=["position_encoding"],  # else a learned encoding is not trained
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    tokens = torch.tensor(list(Path(__file__).read_bytes()[:256])).view(4, 64)
    train(model, tokens).save_pretrained(f"{folder}/adapter")

    loaded = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/adapter").eval()
    merged = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/adapter").merge_and_unload()
    merged.save_pretrained(f"{folder}/merged")  # a wavepe_llama again, without PEFT
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    with torch.no_grad():
        logits = model(tokens).logits
        for name, other in (("loaded", loaded), ("merged", merged)):
            difference = (other(tokens).logits - logits).abs().max().item()
            print(f"{name}: {other.config.position_encoding}, logits differ by {difference:.0e}")
    return model, loaded, merged


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
