"""The model sizes and presets of ``wavepe compare``.

A preset gives values to options. Options that are given replace those of the preset. [W] is Oka et
al., ICLR 2025, arXiv 2502.02004. [F] is Oka et al., "Frequency Bands in RoPE", ICLR 2026.
"""

from __future__ import annotations

import re
from typing import Any

# The rows of a comparison without --encodings. In rows, LENGTH stands for the trained length.
_DEFAULT_ROWS = """
    none sinusoidal rope rope:theta=LENGTH rope:theta=LENGTH,inference_theta=scaled
    rope:theta=10000,inference_theta=scaled alibi wavelet:scales=6
"""
FACTORS, FACTORS_TO_16 = (1, 2, 4, 8), (1, 2, 4, 8, 16)  # lengths, as multiples of the trained one
# Values of options that are neither given nor in a preset.
DEFAULTS: dict[str, Any] = {
    "encodings": _DEFAULT_ROWS, "model": "tiny", "train_length": 128, "steps": 1200, "seeds": 1,
    "eval_bytes": 65536, "lengths": None, "protocols": ("whole",), "task": "", "split": "test",
    "finetune": 0, "finetune_steps": None, "keep": 0, "bands": False, "factors": FACTORS,
}  # fmt: skip


# The parameter counts exclude the embedding. Head sizes are multiples of 6, because a trained
# length of 128 allows six scales.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "heads": 4, "head_dim": 24, "batch": 8, "lr": 3e-3},  # 0.2 M
    "small": {"layers": 4, "heads": 4, "head_dim": 48, "batch": 8, "lr": 2e-3},  # 1.8 M
    "medium": {"layers": 6, "heads": 8, "head_dim": 48, "batch": 16, "lr": 1e-3},  # 11 M
    "25m": {"layers": 6, "heads": 6, "head_dim": 96, "batch": 32, "lr": 6e-4},
    "100m": {"layers": 14, "heads": 8, "head_dim": 96, "batch": 32, "lr": 4e-4},
}


def rows_for(rows: str, train_length: int) -> list[str]:
    """Return the rows in a text, with numbers in place of LENGTH and LENGTH*factor."""
    number = r"LENGTH(?:\*(\d+))?"
    return re.sub(number, lambda factor: str(train_length * int(factor[1] or 1)), rows).split()


class Preset:
    """Values of options: three seeds, up to 16 times the trained length, unless options differ."""

    def __init__(self, text: str, rows: str, **options: Any) -> None:
        usual: dict[str, Any] = {"encodings": rows, "seeds": 3, "factors": FACTORS_TO_16}
        self.text, self.options = text, usual | options


_LEARNED = "wavelet:scales=6,biases=true,projection=true"
# RoPE with each scaling at its best: the factor is that of the length. The first is that of [F].
_RIVALS = """
    rope/rope:inference_theta=scaled rope/rope:type=linear,factor=scaled
    rope/rope:type=dynamic,factor=1 rope/rope:type=yarn,factor=scaled
"""
_MAIN = f"""
    none sinusoidal rope {_RIVALS} rope:theta=LENGTH rope:theta=LENGTH,inference_theta=scaled
    alibi transformer_xl transformer_xl:biases=false shaw t5 kerple sandwich
    wavelet:scales=6 {_LEARNED} {_LEARNED}+kerple wavelet:scales=6,mirrored=true
    wavelet:kind=haar,scales=6
"""
_KINDS = """
    wavelet:scales=6 wavelet:scales=6,mirrored=true
    wavelet:kind=gaussian,scales=6 wavelet:kind=gaussian,scales=6,mirrored=true
    wavelet:kind=morlet,scales=6 wavelet:kind=morlet,scales=6,mirrored=true
    wavelet:kind=haar,scales=6 wavelet:kind=haar,scales=6,fixed_scale=true
"""
# The scale sets of METHODS 1, for heads of 128.
_SCALE_SETS = " ".join(
    f"wavelet:{scales} wavelet:{scales},mirrored=true"
    for scales in (
        "scales=8", "scales=8,min_scale=2", "scales=8,min_scale=4", "scales=4", "scales=2",
        "scales=16", "scales=32", "scales=64", "scales=128", "scales=1,min_scale=128",
    )
)  # fmt: skip
_FAMILIES = "wavelet:scales=6 " + " ".join(
    f"wavelet:kind={name},scales=1+2+3+4+5+6"
    for name in (
        "db2", "db4", "db8", "db16", "db32", "sym2", "sym4", "sym8", "coif1", "coif4", "coif16",
        "dmey", "bior2.2", "rbio2.2",
    )
)  # fmt: skip
# The base is the trained length or 10000, raised by the length's or by fixed factors.
_RAISED = " ".join([
    "rope:theta=LENGTH rope rope:theta=LENGTH,inference_theta=scaled rope:inference_theta=scaled",
    *(f"rope:theta=LENGTH,inference_theta=LENGTH*{factor}" for factor in (2, 4, 8, 16, 64)),
    *(f"rope:theta=10000,inference_theta={10000 * factor}" for factor in (2, 4, 8, 16, 64)),
])  # fmt: skip
_COMBINED = f"""
    rope alibi transformer_xl transformer_xl+kerple
    wavelet:scales=6 wavelet:scales=6,biases=true wavelet:scales=6,projection=true {_LEARNED}
    wavelet:scales=6+alibi wavelet:scales=6+kerple {_LEARNED}+alibi {_LEARNED}+kerple
    rope+alibi rope+wavelet:scales=6 rope:fraction=0.25 rope:fraction=0.25+wavelet:scales=6
    rope:fraction=0.25+{_LEARNED} rope@::2+wavelet:scales=6@1::2 rope@::2 wavelet:scales=6@::2
"""
_RECENT = """
    rope rope/rope:type=yarn,factor=scaled rope/rope:self_extend=8,neighbors=64
    rope/rope:self_extend=32,neighbors=64 rope/rope:self_extend=inf,neighbors=64
    transformer_xl kerple wavelet:scales=6 wavelet:scales=6,projection=true wavelet:rank=8
    wavelet:scales=4,rank=8 wavelet:rank=8,from_input=true wavelet:rank=24,from_input=true
    relative:extent=128,rank=8 relative:extent=128,rank=24 relative:extent=64,rank=8 fox pope xpos
"""
_LARGER = """
    rope rope/rope:type=yarn,factor=scaled kerple transformer_xl transformer_xl+kerple wavelet
    wavelet:biases=true,projection=true wavelet:biases=true,projection=true+kerple
"""
_GPU = """
    rope rope/rope:type=yarn,factor=scaled rope/rope:self_extend=32,neighbors=512
    transformer_xl+kerple kerple wavelet wavelet:biases=true,projection=true+kerple fox relative
"""
_FINETUNED = """
    rope rope/rope:theta=40000 rope/rope:type=linear,factor=4 rope/rope:type=yarn,factor=4
    rope/wavelet:scales=6 alibi wavelet:scales=6
"""
_TASK_ROWS = f"""
    none rope rope/rope:type=yarn,factor=scaled rope/rope:self_extend=32,neighbors=64 alibi kerple
    transformer_xl transformer_xl:biases=false wavelet:scales=6 wavelet:scales=6,mirrored=true
    {_LEARNED}+kerple wavelet:rank=24,from_input=true
"""
_BASES = "rope:theta=LENGTH rope:theta=500 rope:theta=10000 rope:theta=500000"

PRESETS = {
    "wavelet": Preset(
        "the main table of the wavelet paper (Oka et al. 2025), with learned, scaled rivals", _MAIN,
        protocols=("whole", "blocks", "sliding"), eval_bytes=32768,
    ),
    "kinds": Preset("kinds of wavelets, literal and mirrored", _KINDS),
    "scales": Preset(
        "the scale sets of the wavelet paper for heads of 128, trained on 512 bytes", _SCALE_SETS,
        train_length=512, factors=FACTORS, batch=2, heads=1, head_dim=128,
    ),
    "families": Preset(
        "discrete wavelets of PyWavelets at levels 1 to 6, beside Ricker", _FAMILIES
    ),
    "bands": Preset(
        "frequency bands (Oka et al. 2026) of several bases; try other --train-length and --batch",
        _BASES, factors=FACTORS, bands=True, keep=4,
    ),
    "theta": Preset(
        "base = trained length (Oka et al. 2026), raised at inference, with controls", _RAISED
    ),
    "finetune": Preset(
        "further training on 512 bytes with YaRN, other scalings and other encodings", _FINETUNED,
        finetune=512,
    ),
    "combinations": Preset(
        "combinations and hybrids of RoPE and wavelets, and what wavelets can learn", _COMBINED
    ),
    "recent": Preset(
        "what models of 2025 and 2026 do: learned relative logits, a forget gate, polar positions",
        _RECENT,
    ),
    "larger": Preset(
        "the rows that matter, for models of 4 M parameters, trained on 512 bytes", _LARGER,
        seeds=2, train_length=512, layers=4, heads=6, head_dim=48, batch=4, lr=2e-3, steps=800,
    ),
    "gpu": Preset(
        "the rows that matter, for models of 25 M parameters, trained on 1024 bytes, on a GPU",
        _GPU, model="25m", seeds=1, train_length=1024, steps=3000, eval_bytes=1 << 18,
    ),
    "tasks": Preset(
        "a retrieval task, which needs far tokens: --task needle, keys or tracking", _TASK_ROWS,
        task="needle", steps=2000, batch=16,
    ),
}  # fmt: skip
