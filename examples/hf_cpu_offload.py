"""CPU offload (Accelerate): weights stay on the CPU, and go to the accelerator layer by layer.

python examples/hf_cpu_offload.py
"""

import torch
import wavepe.hf
from accelerate import cpu_offload
from transformers import LlamaConfig, LlamaForCausalLM

SPEC = "wavelet:scales=4,learned=true"


def fresh_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    return LlamaForCausalLM(config).eval()


def main():
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    tokens = torch.tensor([list(b"def main(): return ")], device=device)
    model = wavepe.hf.patch(fresh_model(), SPEC)
    with torch.no_grad():
        wanted = model.to(device)(tokens).logits
        model.to("cpu")
        # Patch first, then dispatch. In a dispatched model, parameters are on the meta device, and
        # patch raises an error.
        cpu_offload(model, execution_device=device)
        got = model(tokens).logits
        text = model.generate(tokens, max_new_tokens=8, do_sample=False)
    where = {p.device.type for p in model.parameters()}
    print(f"devices of the model's own parameters: {where}")
    print(f"logits differ by {(got - wanted).abs().max().item():.0e}")
    print(f"generated {text.shape[1] - tokens.shape[1]} tokens")
    try:
        wavepe.hf.patch(cpu_offload(fresh_model(), execution_device=device), SPEC)
    except ValueError as error:
        print(f"dispatch first, then patch: {error}")
    return model, tokens, got, wanted, text


if __name__ == "__main__":
    main()
