"""Your own mother wavelet: write it, register it, and use it everywhere by its name.

This wavelet is a difference of two Gaussians, with peak 1, mean 0 and longer flanks than Ricker's.
Run the file to see its table and a model that uses it. To train a model with it, and another one
with Ricker's wavelet:

    wavepe compare --import examples/custom_wavelet.py \
        --encodings wavelet:kind=dog,scales=6 wavelet:scales=6
"""

import numpy as np
import wavepe


def dog(u):  # u = (t - shift) / scale, an array of any shape
    return 2 * np.exp(-(u**2)) - np.exp(-(u**2) / 4)


wavepe.register_wavelet("dog", dog)


def main():
    p, first, _ = wavepe.encoding("wavelet:kind=dog,scales=6").table(length=128, head_dim=24)
    print(f"table {p.shape} from delta = {first} on; at delta = 4 and shift 0, by scale:")
    print([round(float(x), 3) for x in p[4, ::4]])

    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from wavepe.hf import patch
    except ImportError as error:
        print(f"the model needs torch and transformers: {error}")
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    patch(model, "wavelet:kind=dog,scales=6")
    tokens = torch.arange(64)[None]
    print(f"untrained model, loss {model(tokens, labels=tokens).loss.item():.2f} nats")


if __name__ == "__main__":
    main()
