"""wavepe: swappable position encodings for transformers.

This module holds the NumPy functions and needs NumPy alone. `wavepe.ops` holds the same functions
for torch, `wavepe.nn` holds torch modules, and `wavepe.hf` swaps the encoding of Hugging Face
models. Comments in the code cite sources by the keys of docs/reference/methods.md: [W] is the
wavelet position encoding.
"""

import importlib.util
from types import ModuleType

from .arrays.alibi import alibi_slopes
from .arrays.attention import attention
from .arrays.relative_bias import Bias, Table, relative_bias
from .arrays.rope import apply_rope, rope, rope_table
from .arrays.rope_frequencies import rope_frequencies
from .arrays.sinusoidal import sinusoidal
from .arrays.threads import get_num_threads, set_num_threads
from .arrays.wavelet import gaussian, haar, morlet, ricker, wavelet_grid, wavelet_table
from .arrays.wavelet_registered import register_wavelet
from .common.runtime import __version__, build_info, use_variant, variant, variants
from .encodings import encoding, register_encoding
from .referee import rope_report

# Imported on first use, because the rest of wavepe needs neither torch nor transformers.
_TORCH = ("torch", "wavepe._torch")
_LAZY = {
    "analysis": (), "cli": (), "experiments": (), "hf": (*_TORCH, "transformers"), "nn": _TORCH,
    "ops": _TORCH,
}  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # help(wavepe) gets every name of these
    rooms = [name for name, needed in _LAZY.items() if all(map(importlib.util.find_spec, needed))]
    return sorted({*globals(), *rooms})


__all__ = [
    "Bias",
    "Table",
    "__version__",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "build_info",
    "encoding",
    "gaussian",
    "get_num_threads",
    "haar",
    "morlet",
    "register_encoding",
    "register_wavelet",
    "relative_bias",
    "ricker",
    "rope",
    "rope_frequencies",
    "rope_report",
    "rope_table",
    "set_num_threads",
    "sinusoidal",
    "use_variant",
    "variant",
    "variants",
    "wavelet_grid",
    "wavelet_table",
]
