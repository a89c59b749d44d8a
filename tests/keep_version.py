"""Write what this version saves to tests/kept/VERSION, for later versions to load.

    python tests/keep_version.py

Run it once for each release that is not a patch, and never change an old folder: test_kept.py loads
each of them. A folder holds encodings.json (specs, their dicts, all their options, the shapes of
their parameters by name, and some numbers), hybrids.json, and two checkpoints with tokens and
logits: `stock` is of stock transformers alone, `learned` is a patched model.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import wavepe
import wavepe.hf
from hf_families import stirred
from hf_model import logits, patched_tiny, tiny, tokens
from wavepe.encodings import known_encodings
from wavepe.hf.layers import LayerEncodings

KEPT = Path(__file__).with_name("kept")
IDS = tokens(1, 24)
HEADS, HEAD = 4, 24
LEARNED = "wavelet:scales=4,learned=true,mirrored=false"
# wavepe's spec, and what stock transformers calls it
STOCK = {
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "rope:theta=30": {"rope_type": "default", "rope_theta": 30.0},
    "rope:type=linear,factor=4": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "rope:type=yarn,factor=4": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
}
ORIGINAL = "original_max_position_embeddings=16"
FACTORS = "+".join(map(str, range(1, HEAD // 2 + 1)))
HYBRIDS = [{"0-1": "wavelet:scales=4", "3": "alibi"}, {"0": LEARNED, "1-2": "rope:theta=30"}]
SPECS = [
    *known_encodings(), *STOCK, LEARNED, "kerple:kind=power", "wavelet:kind=gaussian",
    "wavelet:kind=morlet", "wavelet:kind=haar,scales=1+2+8", "rope:type=dynamic,factor=2",
    f"rope:type=llama3,factor=8,{ORIGINAL},low_freq_factor=1,high_freq_factor=4",
    f"rope:type=longrope,{ORIGINAL},short_factor={FACTORS},long_factor={FACTORS}",
    "rope:type=proportional,partial_rotary_factor=0.5", "wavelet:min_scale=0.5", "shaw:clip=3",
    "rope:fraction=0.5", "rope:inference_theta=scaled", "sinusoidal:theta=30",
]  # fmt: skip


def described(spec):
    """Return the dict of a spec, and all its options: the dict leaves out those with defaults."""
    encoding = wavepe.encoding(spec)
    options = {field.name: getattr(encoding, field.name) for field in dataclasses.fields(encoding)}
    found = {"dict": encoding.to_dict(), "options": json.loads(json.dumps(options))}
    parameters = encoding.parameters(HEAD, HEADS) if encoding.learns else {}
    found["parameters"] = {name: list(x.shape) for name, x in parameters.items()}
    found["numbers"] = [float(f"{x:.7g}") for x in numbers(encoding, parameters)]
    return found


def numbers(encoding, parameters):
    """Return some numbers of what an encoding gives 6 tokens, and 4 heads of 24 dimensions.

    The parameters of a learned one are numbers that differ.
    """
    lengths = {"length": 6, "trained_length": 4}
    learned = {
        name: torch.linspace(0.2, 0.9, x.size).view(x.shape).double()
        for name, x in parameters.items()
    }
    ways = {
        "absolute": lambda: encoding.absolute(np.arange(6), HEAD, **lengths),
        "rope_table": lambda: np.stack(encoding.rope_table(np.arange(6), HEAD, **lengths), -1),
        "table": lambda: encoding.table(6, HEAD)[0],
        "slopes": lambda: encoding.slopes(HEADS),
        "bias": lambda: encoding.bias(6, HEADS)[0],
    }
    if "table" in encoding.learns:
        ways["table"] = lambda: encoding.learned_table(6, learned)[0]
    if "bias" in encoding.learns:
        ways["bias"] = lambda: encoding.learned_bias(6, learned)[0]
    methods = ["absolute"] * encoding.adds + ["rope_table"] * encoding.rotates + [*encoding.terms]
    found = np.concatenate([np.zeros(0), *(np.ravel(ways[method]()) for method in methods)])
    return found[np.linspace(0, found.size - 1, 7).astype(int)].tolist() if found.size else []


def described_hybrid(ranges):
    """Return what is stored of a hybrid, and what it means: first layer, last layer, spec."""
    choice = LayerEncodings(ranges)
    meaning = [[*place, str(encoding)] for place, encoding in choice.ranges.items()]
    return {"stored": choice.stored(), "ranges": meaning}


def save(model, folder, expected):
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    safetensors.torch.save_file({"tokens": IDS} | expected, folder / "expected.safetensors")


def main():
    folder = KEPT / wavepe.__version__
    folder.mkdir(parents=True)
    lines = [f"{json.dumps(spec)}: {json.dumps(described(spec))}" for spec in dict.fromkeys(SPECS)]
    (folder / "encodings.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    hybrids = [json.dumps(described_hybrid(ranges)) for ranges in HYBRIDS]
    (folder / "hybrids.json").write_text("[\n" + ",\n".join(hybrids) + "\n]\n")
    by_stock = {spec: logits(tiny(rope_parameters=dict(rope)), IDS) for spec, rope in STOCK.items()}
    save(tiny(), folder / "stock", by_stock)
    model = stirred(patched_tiny(LEARNED))
    save(model, folder / "learned", {LEARNED: logits(model, IDS)})


if __name__ == "__main__":
    main()
