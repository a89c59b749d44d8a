"""The model sizes and presets of ``wavepe compare``.

A preset gives values to options. Options on the command line replace those of the preset. [W] is
Oka et al., ICLR 2025, arXiv 2502.02004. [F] is Oka et al., "Frequency Bands in RoPE", ICLR 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def default_rows(train_length: int) -> list[str]:
    """Return the rows of a comparison without --encodings."""
    return [
        "none",
        "sinusoidal",
        "rope",
        f"rope:theta={train_length}",
        f"rope:theta={train_length},inference_theta=scaled",
        "rope:theta=10000,inference_theta=scaled",
        "alibi",
        "wavelet:scales=6",
    ]


# Values of options that are neither on the command line nor in a preset. Here and in presets, the
# rows may be a function of the trained length.
DEFAULTS: dict[str, Any] = {
    "encodings": default_rows,
    "model": "tiny",
    "train_length": 128,
    "steps": 1200,
    "seeds": 1,
    "eval_bytes": 65536,
    "lengths": None,
    "protocols": ("whole",),
    "task": "",
    "split": "test",
    "finetune": 0,
    "finetune_steps": None,
    "keep": 0,
    "bands": False,
}
DEFAULT_FACTORS = (1, 2, 4, 8)
FACTORS_TO_16 = (1, 2, 4, 8, 16)

# Short runs chose learning rate and batch of "tiny"; those of the others are common for their
# size. The parameter counts exclude the embedding. Head sizes are multiples of 6, because a trained
# length of 128 allows six scales.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "heads": 4, "head_dim": 24, "batch": 8, "lr": 3e-3},  # 0.2 M
    "small": {"layers": 4, "heads": 4, "head_dim": 48, "batch": 8, "lr": 2e-3},  # 1.8 M
    "medium": {"layers": 6, "heads": 8, "head_dim": 48, "batch": 16, "lr": 1e-3},  # 11 M
    "25m": {"layers": 6, "heads": 6, "head_dim": 96, "batch": 32, "lr": 6e-4},
    "100m": {"layers": 14, "heads": 8, "head_dim": 96, "batch": 32, "lr": 4e-4},
}


@dataclass(frozen=True)
class Preset:
    """Values of options; a grid consists of several comparisons.

    `factors` are the evaluated lengths, as multiples of the trained length. `parts` maps a folder
    to the options of one comparison of a grid, and `by` is the option in which they differ.
    """

    text: str
    options: dict[str, Any]
    factors: tuple[int, ...] = DEFAULT_FACTORS
    parts: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    by: str = ""


_LEARNED = "wavelet:scales=6,biases=true,projection=true"
_WAVELETS = (
    "wavelet:scales=6",
    "wavelet:scales=6,mirrored=true",
    "wavelet:kind=gaussian,scales=6",
    "wavelet:kind=gaussian,scales=6,mirrored=true",
    "wavelet:kind=morlet,scales=6",
    "wavelet:kind=morlet,scales=6,mirrored=true",
    "wavelet:kind=haar,scales=6",
    "wavelet:kind=haar,scales=6,fixed_scale=true",
)
# RoPE with each scaling at its best: the factor is that of the length. The first is that of [F].
_RIVALS = (
    "rope/rope:inference_theta=scaled",
    "rope/rope:type=linear,factor=scaled",
    "rope/rope:type=dynamic,factor=1",
    "rope/rope:type=yarn,factor=scaled",
)


def _main(length: int) -> list[str]:
    return [
        "none",
        "sinusoidal",
        "rope",
        *_RIVALS,
        f"rope:theta={length}",
        f"rope:theta={length},inference_theta=scaled",
        "alibi",
        "transformer_xl",
        "transformer_xl:biases=false",
        "shaw",
        "t5",
        "kerple",
        "sandwich",
        "wavelet:scales=6",
        _LEARNED,
        f"{_LEARNED}+kerple",
        "wavelet:scales=6,mirrored=true",
        "wavelet:kind=haar,scales=6",
    ]


# The scale sets of METHODS 1, for heads of 128.
_SCALE_SETS = (
    "scales=8",
    "scales=8,min_scale=2",
    "scales=8,min_scale=4",
    "scales=4",
    "scales=2",
    "scales=16",
    "scales=32",
    "scales=64",
    "scales=128",
    "scales=1,min_scale=128",
)
_FAMILIES = ("db2", "db4", "db8", "db16", "db32", "sym2", "sym4", "sym8", "coif1", "coif4",
             "coif16", "dmey", "bior2.2", "rbio2.2")  # fmt: skip
_PROTOCOLS = ("whole", "blocks", "sliding")
_BASES = (500, 10000, 500000)


def _grid(length: int) -> dict[str, Any]:
    return {
        "train_length": length,
        "encodings": [f"rope:theta={theta}" for theta in (length, *_BASES)],
        "batch": 1024 // length,
    }


def _raised(length: int) -> list[str]:
    """Return rows with base `length` or 10000, raised by the length's or by fixed factors."""
    rows = [f"rope:theta={length}", "rope", f"rope:theta={length},inference_theta=scaled",
            "rope:inference_theta=scaled"]  # fmt: skip
    for theta in (length, 10000):
        rows += [f"rope:theta={theta},inference_theta={theta * factor}"
                 for factor in (2, 4, 8, 16, 64)]  # fmt: skip
    return rows


PRESETS: dict[str, Preset] = {
    "wavelet": Preset(
        "the main table of the wavelet paper (Oka et al. 2025), with rivals at their best",
        {"encodings": _main, "seeds": 3, "protocols": _PROTOCOLS, "eval_bytes": 32768},
        FACTORS_TO_16,
    ),
    "kinds": Preset(
        "kinds of wavelets, literal and mirrored",
        {"encodings": _WAVELETS, "seeds": 3},
        FACTORS_TO_16,
    ),
    "scales": Preset(
        "the scale sets of the wavelet paper for heads of 128, trained on 512 bytes",
        {
            "encodings": [
                f"wavelet:{scales}{sign}"
                for scales in _SCALE_SETS
                for sign in ("", ",mirrored=true")
            ],
            "seeds": 3,
            "train_length": 512,
            "batch": 2,
            "heads": 1,
            "head_dim": 128,
        },
    ),
    "families": Preset(
        "discrete wavelets of PyWavelets at levels 1 to 6, beside Ricker",
        {
            "encodings": [
                "wavelet:scales=6",
                *(f"wavelet:kind={name},scales=1+2+3+4+5+6" for name in _FAMILIES),
            ],
            "seeds": 3,
        },
        FACTORS_TO_16,
    ),
    "bands": Preset(
        "frequency bands (Oka et al. 2026) for a grid of trained lengths and bases",
        {"seeds": 3, "bands": True, "keep": 4},
        parts={f"length-{length}": _grid(length) for length in (64, 128, 256, 512)},
        by="train_length",
    ),
    "theta": Preset(
        "base = trained length (Oka et al. 2026), raised at inference, with controls",
        {"encodings": _raised, "seeds": 3},
        FACTORS_TO_16,
    ),
    "finetune": Preset(
        "further training on 512 bytes with YaRN, other scalings and other encodings",
        {
            "encodings": [
                "rope",
                "rope/rope:theta=40000",
                "rope/rope:type=linear,factor=4",
                "rope/rope:type=yarn,factor=4",
                "rope/wavelet:scales=6",
                "alibi",
                "wavelet:scales=6",
            ],
            "seeds": 3,
            "finetune": 512,
        },
        FACTORS_TO_16,
    ),
    "combinations": Preset(
        "combinations and hybrids of RoPE and wavelets, and what wavelets can learn",
        {
            "encodings": [
                "rope",
                "alibi",
                "transformer_xl",
                "transformer_xl+kerple",
                "wavelet:scales=6",
                "wavelet:scales=6,biases=true",
                "wavelet:scales=6,projection=true",
                _LEARNED,
                *(
                    f"{waves}+{slope}"
                    for waves in ("wavelet:scales=6", _LEARNED)
                    for slope in ("alibi", "kerple")
                ),
                "rope+alibi",
                "rope+wavelet:scales=6",
                "rope:fraction=0.25",
                "rope:fraction=0.25+wavelet:scales=6",
                f"rope:fraction=0.25+{_LEARNED}",
                "rope@::2+wavelet:scales=6@1::2",
                "rope@::2",
                "wavelet:scales=6@::2",
            ],
            "seeds": 3,
        },
        FACTORS_TO_16,
    ),
    "recent": Preset(
        "what models of 2025 and 2026 do: learned relative logits, a forget gate, polar positions",
        {
            "encodings": [
                "rope",
                "rope/rope:type=yarn,factor=scaled",
                "rope/rope:self_extend=8,neighbors=64",
                "rope/rope:self_extend=32,neighbors=64",
                "rope/rope:self_extend=inf,neighbors=64",
                "transformer_xl",
                "kerple",
                "wavelet:scales=6",
                "wavelet:scales=6,projection=true",
                "wavelet:rank=8",
                "wavelet:scales=4,rank=8",
                "wavelet:rank=8,from_input=true",
                "wavelet:rank=24,from_input=true",
                "relative:extent=128,rank=8",
                "relative:extent=128,rank=24",
                "relative:extent=64,rank=8",
                "fox",
                "pope",
                "xpos",
            ],
            "seeds": 3,
        },
        FACTORS_TO_16,
    ),
    "larger": Preset(
        "the rows that matter, for models of 4 M parameters, trained on 512 bytes",
        {
            "encodings": [
                "rope",
                "rope/rope:type=yarn,factor=scaled",
                "kerple",
                "transformer_xl",
                "transformer_xl+kerple",
                "wavelet",
                "wavelet:biases=true,projection=true",
                "wavelet:biases=true,projection=true+kerple",
            ],
            "seeds": 2,
            "train_length": 512,
            "layers": 4,
            "heads": 6,
            "head_dim": 48,
            "batch": 4,
            "lr": 2e-3,
            "steps": 800,
        },
        FACTORS_TO_16,
    ),
    "tasks": Preset(
        "three retrieval tasks, which need far tokens",
        {
            "encodings": [
                "none",
                "rope",
                "rope/rope:type=yarn,factor=scaled",
                "alibi",
                "transformer_xl:biases=false",
                "wavelet:scales=6",
                "wavelet:scales=6,mirrored=true",
                f"{_LEARNED}+kerple",
            ],
            "seeds": 3,
            "steps": 2000,
            "batch": 16,
        },
        FACTORS_TO_16,
        parts={task: {"task": task} for task in ("needle", "keys", "tracking")},
        by="task",
    ),
}
