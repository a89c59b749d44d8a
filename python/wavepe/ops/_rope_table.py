"""rope_table for torch [R]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._common import (
    FLOATS,
    INTEGERS,
    axis_first,
    check,
    check_choice,
    check_device,
    check_dtype,
    check_tensors,
    not_differentiable,
    number,
    recorded,
    reduce_angles,
    register_standard,
)
from ._compiler import is_compiling, traced
from ._torch_private import below_autograd, transformed

_ROPE_TABLE = torch.ops.wavepe.rope_table.default
_NO_GRADIENT = "rope_table has no gradient to inv_freq; detach it"


def rope_table(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    precision: str = "exact",
    sections: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of position * inv_freq, as `wavepe.rope_table`.

    Parameters
    ----------
    positions : Tensor (...), or (..., axes) with `sections`, any integer dtype
    inv_freq : Tensor (h,), any float dtype
    attention_factor, precision, sections
        As in `wavepe.rope_table`.
    dtype : torch.dtype
        The dtype of the results: float32, float64, bfloat16 or float16. The last two are rounded
        from float64 as torch does it.

    Returns
    -------
    cos, sin : Tensors (..., h) of `dtype`
        Not differentiable.

    Raises
    ------
    RuntimeError
        If a shape, dtype, device or value is wrong, or if `inv_freq` requires grad in backward.
    """
    check_tensors(positions=positions, inv_freq=inv_freq)
    if sections is not None:
        if not isinstance(sections, (list, tuple)):  # a compiler cannot write symbolic numbers
            check(False, f"sections must be a list, got {sections!r}")
        sections = list(sections)
    if type(precision) is not str:
        check_choice("precision", precision, ("exact", "hf"))
    if type(attention_factor) is not float:
        attention_factor = number("attention_factor", attention_factor)
    if not isinstance(dtype, torch.dtype):  # the schema would take an int for a dtype
        check(False, f"dtype must be a torch.dtype, got {dtype!r}")
    options = (attention_factor, precision, sections, dtype)
    compiling = is_compiling()
    if transformed():
        return _RopeTable.apply(positions, inv_freq, *options)
    if compiling:
        return traced(_ROPE_TABLE, _standard)(positions, inv_freq, *options)
    if recorded(positions, inv_freq):
        return _ROPE_TABLE(positions, inv_freq, *options)
    with below_autograd():
        return _ROPE_TABLE(positions, inv_freq, *options)


@torch.library.register_fake("wavepe::rope_table")
def _fake(
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float = 1.0,
    precision: str = "exact",
    sections: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    check_device(positions=positions, inv_freq=inv_freq)
    check_dtype("positions", positions, INTEGERS)
    check_dtype("inv_freq", inv_freq)
    check(inv_freq.dim() == 1, f"inv_freq must be 1-D (pairs,), got {tuple(inv_freq.shape)}")
    dtype = torch.float32 if dtype is None else dtype
    check(dtype in FLOATS, f"dtype must be a float dtype, got {dtype}")
    check_choice("precision", precision, ("exact", "hf"))
    leading = positions.shape
    if sections is not None:
        pairs, leading = inv_freq.shape[0], positions.shape[:-1]
        check(
            all(size >= 0 for size in sections) and sum(sections) == pairs,
            f"sections {list(sections)} must sum to inv_freq's {pairs} pairs",
        )
        check(
            positions.dim() > 0 and positions.shape[-1] == len(sections),
            f"positions of shape {tuple(positions.shape)} need a last axis of {len(sections)}",
        )
    cos = positions.new_empty((*leading, inv_freq.shape[0]), dtype=dtype)
    return cos, torch.empty_like(cos)


def _standard(positions: Tensor, inv_freq: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return `rope_table` in operators of torch."""
    options += (1.0, "exact", None, torch.float32)[len(options) :]  # torch drops defaults
    _fake(positions, inv_freq, *options)  # checks
    attention_factor, precision, sections, dtype = options
    if sections is None:
        positions, sections = positions[..., None], [inv_freq.shape[0]]
    coordinates = enumerate(sections)
    rows = [positions[..., i : i + 1].expand(*positions.shape[:-1], n) for i, n in coordinates]
    positions = torch.cat(rows, -1)
    angles = positions.double() * inv_freq.double()
    if precision == "hf":
        angles = (positions.float() * inv_freq.float()).double()
    if dtype != torch.float64:
        angles = reduce_angles(angles).float()
    cos, sin = (f(angles) * attention_factor for f in (torch.cos, torch.sin))
    return cos.to(dtype), sin.to(dtype)


register_standard("rope_table", _standard, double=True)


class _RopeTable(torch.autograd.Function):
    """rope_table for torch.func and forward mode; inv_freq must be a constant there."""

    generate_vmap_rule = True
    forward = staticmethod(_ROPE_TABLE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        check(not ctx.needs_input_grad[1], _NO_GRADIENT)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError(f"wavepe: {_NO_GRADIENT}")


not_differentiable("rope_table", _NO_GRADIENT)


@torch.library.register_vmap("wavepe::rope_table")
def _(info: Any, in_dims: Any, positions: Tensor, inv_freq: Tensor, *options: Any) -> Any:
    axis, frequency_axis = in_dims[:2]
    if frequency_axis is None:  # positions have any shape
        return _ROPE_TABLE(positions.movedim(axis, 0), inv_freq, *options), (0, 0)
    positions = axis_first(positions, axis, info.batch_size)
    rows = zip(positions, inv_freq.movedim(frequency_axis, 0), strict=True)
    tables = [_ROPE_TABLE(*row, *options) for row in rows]
    cos, sin = (torch.stack(parts) for parts in zip(*tables, strict=True))
    return (cos, sin), (0, 0)
