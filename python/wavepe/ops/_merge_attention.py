"""merge_attention: attention over all keys, from results over ranges of keys."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from ._common import check, check_device, check_dtype, check_tensors, report_out_of_memory, wide


@report_out_of_memory("merge_attention")
def merge_attention(
    outs: Iterable[Tensor] | Tensor, lses: Iterable[Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention over all keys, merged from results over separate ranges of keys.

    Each part is a result of ``attention(..., return_lse=True)`` for the same queries and other
    keys. The result equals one softmax over all keys: ``lse = logsumexp(lses)`` and
    ``out = sum exp(lses[i] - lse) outs[i]``.

    Parameters
    ----------
    outs : sequence of Tensor (..., m, dv), or one Tensor (parts, ..., m, dv)
        The outputs of the parts: float32, float64, bfloat16 or float16.
    lses : sequence of Tensor (..., m), or one Tensor (parts, ..., m)
        The lse of the parts. A query with the lse -inf saw no key in that part. Its weight is 0,
        and its values in `outs` are ignored.

    Returns
    -------
    out : Tensor (..., m, dv), dtype of `outs`
        0 for a query that saw no key in any part.
    lse : Tensor (..., m), float32 (float64 for float64)
        -inf for a query that saw no key in any part.

    Raises
    ------
    RuntimeError
        If there are no parts, or if the parts do not fit together.

    Notes
    -----
    Both results are differentiable in outs and lses any number of times. A query that saw no key
    has the gradient 0. NaN and +inf in `lses` give NaN. Give `sinks` to one part only: each part
    counts its own.

    Examples
    --------
    >>> import torch
    >>> from wavepe import ops
    >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    >>> halves = [
    ...     ops.attention(q, k[:, :, i : i + 5], v[:, :, i : i + 5], causal=False, return_lse=True)
    ...     for i in (0, 5)
    ... ]
    >>> out, lse = ops.merge_attention(*zip(*halves))
    >>> torch.allclose(out, ops.attention(q, k, v, causal=False), atol=1e-6)
    True
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    _check(outs, lses)
    dtype = outs[0].dtype
    work = wide(outs[0])
    lse = torch.stack([part.to(work) for part in lses])
    unseen = lse == -math.inf
    # The shift cancels, so derivatives may ignore it. It must be finite for a query without keys.
    shift = lse.detach().amax(0)
    shift = torch.where(shift == -math.inf, 0, shift)
    weights = torch.exp(lse - shift)
    total = weights.sum(0)
    nothing = unseen.all(0)
    total = torch.where(nothing, 1, total)
    weights = weights / total
    terms = (
        w[..., None] * torch.where(u[..., None], 0, out.to(work))
        for w, u, out in zip(weights.unbind(), unseen.unbind(), outs, strict=True)
    )
    out = functools.reduce(operator.add, terms).to(dtype)
    return out, torch.where(nothing, -math.inf, shift + torch.log(total))


def _parts(name: str, parts: Iterable[Tensor] | Tensor) -> tuple[Tensor, ...]:
    if isinstance(parts, Tensor):
        if parts.dim() == 0:
            check(False, f"{name} must be a sequence of tensors, or one with the parts on axis 0")
        return parts.unbind()
    try:
        return tuple(parts)
    except TypeError:
        kind = type(parts).__name__
        raise RuntimeError(f"wavepe: {name} must be a sequence of tensors, got {kind}") from None


def _check(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    """Check the parts. Messages are made on failure only: a compiler would fix their sizes."""
    if not outs or len(outs) != len(lses):
        counts = f"{len(outs)} outs and {len(lses)} lses"
        check(False, f"outs and lses must hold the same parts, at least one; got {counts}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensors(**{f"outs[{i}]": out, f"lses[{i}]": lse})
        check_dtype(f"outs[{i}]", out)
        check_dtype(f"lses[{i}]", lse)
        if out.dtype != outs[0].dtype:
            check(False, f"outs must have one dtype, got {outs[0].dtype} and {out.dtype}")
        if out.device != outs[0].device or lse.device != outs[0].device:
            check_device(**{"outs[0]": outs[0], f"outs[{i}]": out, f"lses[{i}]": lse})
        if out.dim() < 1 or out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            pairs = len(outs) == 2 and out.shape == lse.shape  # (out, lse), (out, lse)
            advice = "; pass zip(*parts): merge_attention(outs, lses)" if pairs else ""
            check(
                False,
                f"every part needs out (..., m, dv) and lse (..., m) as part 0; part 0 has out "
                f"{tuple(outs[0].shape)}, part {i} has out {tuple(out.shape)} and lse "
                f"{tuple(lse.shape)}" + advice,
            )
