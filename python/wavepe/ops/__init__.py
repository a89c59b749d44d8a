"""wavepe for torch: the functions of `wavepe` as operators with autograd, fake tensors and compile.

Each is registered as ``torch.ops.wavepe.NAME``; the functions here add what a schema cannot say
(keyword-only arguments, an int for offsets). Wrong shapes, dtypes and devices raise RuntimeError,
as torch's own operators do.
"""

from .._runtime import BUILD_AGAIN

try:
    import torch  # noqa: F401 - its libraries must be loaded before ours
except ImportError as error:
    raise ImportError(
        "wavepe.ops needs torch, and then wavepe built again beside it: pip install torch, then "
        + BUILD_AGAIN
    ) from error
try:
    from .. import _torch  # noqa: F401 - registers torch.ops.wavepe
except ImportError as error:
    raise ImportError(
        "this wavepe was built without torch (or for an older one), so it holds no operators; with "
        "torch installed, build it again: " + BUILD_AGAIN
    ) from error

from ._attention import attention
from ._merge_attention import merge_attention
from ._relative_bias import relative_bias
from ._relative_table import RelativeTable, relative_table
from ._rope import rope, rope_, rope_qk
from ._rope_table import rope_table
from ._wavelet import wavelet_table

__all__ = [
    "RelativeTable",
    "attention",
    "merge_attention",
    "relative_bias",
    "relative_table",
    "rope",
    "rope_",
    "rope_qk",
    "rope_table",
    "wavelet_table",
]
