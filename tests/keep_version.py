"""Write what this version saves to tests/kept/VERSION, for later versions to load.

    python tests/keep_version.py

Run it once for each release that is not a patch, and never change an old folder: test_kept.py loads
each of them. A folder holds encodings.json (specs, their dicts and all their options), and two
checkpoints with tokens and logits: `stock` is of stock transformers alone, `learned` is a patched
model.
"""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import wavepe
import wavepe.hf
from hf_families import stirred
from hf_model import logits, patched_tiny, tiny, tokens
from wavepe.encodings import known_encodings

KEPT = Path(__file__).with_name("kept")
IDS = tokens(1, 24)
LEARNED = "wavelet:scales=4,learned=true,mirrored=false"
# wavepe's spec, and what stock transformers calls it
STOCK = {
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "rope:theta=30": {"rope_type": "default", "rope_theta": 30.0},
    "rope:type=linear,factor=4": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "rope:type=yarn,factor=4": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
}
SPECS = [
    *known_encodings(),
    *STOCK,
    LEARNED,
    "wavelet:kind=haar,scales=1+2+8",
    "wavelet:min_scale=0.5",
    "shaw:clip=3",
    "rope:fraction=0.5",
    "rope:inference_theta=scaled",
    "sinusoidal:theta=30",
]


def described(spec):
    """Return the dict of a spec, and all its options: the dict leaves out those with defaults."""
    encoding = wavepe.encoding(spec)
    options = {field.name: getattr(encoding, field.name) for field in dataclasses.fields(encoding)}
    return {"dict": encoding.to_dict(), "options": json.loads(json.dumps(options))}


def save(model, folder, expected):
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    safetensors.torch.save_file({"tokens": IDS} | expected, folder / "expected.safetensors")


def main():
    folder = KEPT / wavepe.__version__
    folder.mkdir(parents=True)
    lines = [f"{json.dumps(spec)}: {json.dumps(described(spec))}" for spec in dict.fromkeys(SPECS)]
    (folder / "encodings.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    by_stock = {spec: logits(tiny(rope_parameters=dict(rope)), IDS) for spec, rope in STOCK.items()}
    save(tiny(), folder / "stock", by_stock)
    model = stirred(patched_tiny(LEARNED))
    save(model, folder / "learned", {LEARNED: logits(model, IDS)})


if __name__ == "__main__":
    main()
