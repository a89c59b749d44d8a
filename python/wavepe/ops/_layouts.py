"""Refuse tensors that are not dense. The dispatcher does it, so it costs other calls nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

# The kinds of tensors that the dispatcher tells apart, and what makes dense ones of them.
_DENSE = {
    "Sparse": "to_dense()",
    "SparseCsr": "to_dense()",
    "NestedTensor": "torch.nested.to_padded_tensor(x, 0)",
    "Quantized": "dequantize()",
}
_OPERATORS = (
    "attention_forward",
    "attention_backward",
    "relative_bias",
    "rope",
    "rope_",
    "rope_qk",
    "rope_table",
    "wavelet_table",
)


def _refused(operator: str, kind: str, advice: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        name = operator.partition("_forward")[0]
        raise RuntimeError(f"wavepe: {name} takes dense tensors, got a {kind} one: {advice}")

    return refuse


for _operator in _OPERATORS:
    for _kind, _advice in _DENSE.items():
        _refuse = _refused(_operator, _kind.removesuffix("Tensor").lower(), _advice)
        for _device in ("CPU", "CUDA"):
            torch.library.impl(f"wavepe::{_operator}", f"{_kind}{_device}", _refuse)
    torch.library.impl(
        f"wavepe::{_operator}", "MkldnnCPU", _refused(_operator, "mkldnn", "to_dense()")
    )
