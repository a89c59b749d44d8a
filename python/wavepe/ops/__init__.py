"""The functions of `wavepe` for torch, with autograd, fake tensors and torch.compile.

Each function calls an operator ``torch.ops.wavepe.NAME``. The function adds what an operator's
schema cannot have: keyword-only arguments, and an int for offsets. Wrong shapes, dtypes and devices
raise RuntimeError, as in torch's own operators.
"""

from importlib.util import find_spec

from ..common.runtime import BUILD_AGAIN

try:
    import torch  # torch's libraries must be loaded before ours
except ImportError as error:
    if find_spec("wavepe._torch"):
        raise ImportError("wavepe.ops needs torch: pip install torch") from error
    raise ImportError(
        "wavepe.ops needs torch, and wavepe must be built after torch is installed: "
        "pip install torch, then " + BUILD_AGAIN
    ) from error
try:
    from .. import _torch  # noqa: F401 - registers torch.ops.wavepe
except ImportError as error:
    if find_spec("wavepe._torch"):
        raise ImportError(
            f"wavepe.ops needs torch 2.10 or later, got {torch.__version__}: {error}"
        ) from error
    raise ImportError(
        "this wavepe was built without torch, so it has no torch operators: install torch, then "
        "build wavepe again: " + BUILD_AGAIN
    ) from error

from . import _flops
from ._attention import attention
from ._compiler import standard_operators
from ._merge_attention import merge_attention
from ._relative_bias import relative_bias
from ._relative_table import RelativeTable, relative_table
from ._rope import rope, rope_, rope_qk
from ._rope_table import rope_table
from ._wavelet import wavelet_table

_flops.register_with_counter()

__all__ = [
    "RelativeTable", "attention", "merge_attention", "relative_bias", "relative_table", "rope",
    "rope_", "rope_qk", "rope_table", "standard_operators", "wavelet_table",
]  # fmt: skip
