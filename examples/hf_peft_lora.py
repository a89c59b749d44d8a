"""Fine-tune with PEFT's LoRA, the learned encoding along with it: adapter saved, loaded, merged.

    python examples/hf_peft_lora.py
"""

import tempfile

import torch
import wavepe.hf
from peft import LoraConfig, PeftModel, get_peft_model


def base_model():
    """With a checkpoint: wavepe.hf.convert it once, then AutoModelForCausalLM.from_pretrained."""
    torch.manual_seed(0)
    # The model type that knows its encoding: an adapter's file does not, so the base must bring it.
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding="wavelet:scales=4,learned=true",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return wavepe.hf.WavePELlamaForCausalLM(config)


def main(folder):
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],  # PEFT has no defaults for this model type
        # Trained in full and written with the adapter; without it the encoding stays frozen.
        modules_to_save=["position_encoding"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base_model(), lora)
    model.print_trainable_parameters()
    tokens = torch.tensor([list(open(__file__, "rb").read(256))]).view(4, 64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)

    loaded = PeftModel.from_pretrained(base_model(), folder).eval()
    merged = PeftModel.from_pretrained(base_model(), folder).merge_and_unload().eval()
    with torch.no_grad():
        logits = [m(tokens).logits for m in (base_model().eval(), model, loaded, merged)]
    for name, other in zip(("base", "loaded", "merged"), logits[:1] + logits[2:], strict=True):
        print(f"{name}: logits differ by {(other - logits[1]).abs().max().item():.0e}")
    return model, loaded, merged, tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
