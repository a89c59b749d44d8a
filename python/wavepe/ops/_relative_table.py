"""relative_table: a constant table of a relative encoding, with a low-rank form of its zones.

Far from the diagonal a wavelet table is smooth. At head size 128 its rows from delta = 64 on are
combinations of 15 vectors [W]. So the products of a query with r vectors are enough to compute its
products with all rows. The vectors follow from the table's values, not from a rule about wavelets.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..arrays.relative_bias import BEYOND, Table
from ..common import checks
from ._attention_gpu.zones import block_zones
from ._common import (
    FLOATS,
    check,
    check_choice,
    check_dtype,
    check_tensors,
    in_new_thread,
    integer,
    report_out_of_memory,
    run_check,
    with_range,
)
from ._compiler import constant_result, disable, is_compiling

NEAR = 64  # rows with |delta| below this are one zone; this split takes a third of the work
# Tolerances are relative to the typical size of a row.
TOLERANCE = 1e-7  # below the rounding of float32
LOW_TOLERANCE = 1e-4  # for bfloat16 and float16 on a GPU: below the rounding of float16
LARGEST_RANK = 0.75  # relative to the head size; a zone of a higher rank keeps its rows

_Zones = list[tuple[np.ndarray, np.ndarray]]


@disable("make wavepe.ops.relative_table outside of the compiled function")
def relative_table(
    p: Tensor | ArrayLike | Table, first: int = 0, beyond: str = "zero"
) -> RelativeTable:
    """Return a constant table for `attention`, prepared so that calls are fast.

    Make it once, and pass it as ``p=`` to many calls. A table that is trained must be passed as a
    tensor instead, because a RelativeTable has no gradient.

    Parameters
    ----------
    p : Tensor or array (w, d), or (H, w, d), any float dtype, or Table
        The table, on any device. Row r belongs to delta = first + r. It is copied. A
        `wavepe.Table` has its own first and beyond.
    first : int
        The delta of the table's first row.
    beyond : "zero" or "edge"
        What stands for a row outside the table: zeros, or the nearest row.

    Returns
    -------
    table : RelativeTable
        An immutable object.

    Raises
    ------
    RuntimeError
        If a shape, dtype or value is wrong, or if `p` requires grad.

    Examples
    --------
    >>> import wavepe
    >>> from wavepe import ops
    >>> table = ops.relative_table(wavepe.encoding("wavelet").table(1000, 64))
    >>> table.first, table.head_size
    (0, 64)
    >>> ops.relative_table([[0.5, 0.0], [0.0, 1.0], [0.5, 0.5]], first=-1, beyond="edge")
    RelativeTable(delta -1..1, head size 2, beyond='edge', no zones)
    """
    return RelativeTable(p, first, beyond)


class RelativeTable:
    """Hold a constant table with its range and a low-rank form; `relative_table` makes it.

    Rows at both ends are dropped if `beyond` gives the same values: rows of zeros, or with
    beyond="edge" repeated rows.

    Parameters
    ----------
    p, first, beyond
        As in `relative_table`.

    Attributes
    ----------
    p : Tensor (rows, d) or (H, rows, d), float64
        A copy of the rows.
    first : int
        The delta of the first row.
    rows : int
        The number of rows: they belong to delta = first .. first + rows - 1.
    beyond : str
        What stands for rows outside the table: "zero" or "edge" (the nearest row).
    head_size : int
        The head size d.
    heads : int or None
        The number of heads H; None if all heads use the same rows.
    """

    first: int
    rows: int
    beyond: str
    head_size: int
    heads: int | None
    _p: np.ndarray
    _kept: slice  # rows of _p for float32 and narrower dtypes: without rows below their rounding
    _typical_size: float | None  # of a row; None if the table gets no zones
    _zones: _Zones
    _names: dict[tuple[torch.dtype, torch.device], str]
    _by_dtype: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int, tuple[Tensor, ...]]]

    @report_out_of_memory("relative_table")
    @np.errstate(all="ignore")  # scaling may underflow the smallest values
    def __init__(self, p: Tensor | ArrayLike | Table, first: int = 0, beyond: str = "zero") -> None:
        if isinstance(p, Table) or (isinstance(p, tuple) and str in map(type, p)):
            p, first, beyond = with_range("p", p, first, beyond)
        values = _values(p)
        check(values.ndim in (2, 3), f"p must be (w, d) or (H, w, d), got shape {values.shape}")
        first = integer("first", first)
        check_choice("beyond", beyond, BEYOND)
        run_check(checks.edge, "beyond", beyond, values.shape[-2])
        whole = _trimmed(values, beyond)
        values = values[..., whole, :].copy()
        values.flags.writeable = False
        first = first + whole.start if values.shape[-2] else 0
        largest = float(np.abs(values).max(initial=0.0))
        finite = math.isfinite(largest)
        typical_size = _typical_size(values) if finite else 0.0
        tolerance = TOLERANCE * typical_size
        kept = _trimmed(values, beyond, tolerance)
        shared = finite and values.ndim == 2 and beyond == "zero"
        self.__dict__.update(
            first=first,
            rows=values.shape[-2],
            beyond=beyond,
            head_size=values.shape[-1],
            heads=values.shape[0] if values.ndim == 3 else None,
            _p=values,
            _kept=kept,
            _typical_size=typical_size if shared else None,
            _zones=_zones(values[kept], first + kept.start, tolerance) if shared else [],
            _names={},
            _by_dtype={},
        )
        self._attribute(torch.float32, torch.device("cpu"))  # build what most calls need

    @property
    def p(self) -> Tensor:
        return torch.from_numpy(self._p.copy())

    def tensors(
        self, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, int, list[Tensor]]:
        """Return the rows as a tensor of one dtype on one device, first, and a low-rank form.

        The tensors are made once, and all calls get the same ones. They must not be written to.
        Their values are exact for float64. For other dtypes, errors up to 1e-7 of the typical size
        of a row are allowed; on CUDA, up to 1e-4 of it for bfloat16 and float16.

        The low-rank form is ``[C0, U0, C1, U1, ...]``, in the order of rising delta. The rows of a
        zone are ``C @ U.T`` with C (rows, r) and U (d, r), or C itself (rows, d) if U is (d, 0).
        Together the zones hold all rows. The list is empty if no zone saves work: for float64, for
        tables with heads or beyond="edge", and for irregular or small tables. On CUDA it holds what
        ``_attention_gpu.zones.block_zones`` returns: a tensor (left, 0) for the number left, far
        (64, zones, rank, d) and basis (rank, 64).

        Raises RuntimeError if the dtype or the device is wrong.
        """
        is_compiling()
        p, first, zones = getattr(self, self._attribute(dtype, device))
        return p, first, list(zones)

    # A compiler calls this while it traces, keeps the name as a constant, and reads the attribute
    # at each call. So a compiled function can be called with other tables.
    @constant_result
    def _attribute(self, dtype: torch.dtype, device: torch.device | str) -> str:
        """Return the name of the attribute that holds the tensors; build them if needed."""
        if type(dtype) is torch.dtype and type(device) is torch.device:
            name = self._names.get((dtype, device))
            if name is not None:
                return name
        if type(dtype) is not torch.dtype or not isinstance(device, (str, torch.device)):
            check(False, f"dtype and device must be those of torch, got {dtype!r} and {device!r}")
        device = torch.device(device)
        # A device without an index is the current one.
        if device == torch.accelerator.current_accelerator():
            device = torch.device(device.type, torch.accelerator.current_device_index())
        name = self._names.get((dtype, device))
        if name is None:
            # In a new thread, because later calls use the tensors outside of this call's inference
            # mode, trace or vmap.
            tensors = in_new_thread(functools.partial(self.build_tensors, dtype, device))
            name = f"_{dtype}_{device}".replace(".", "_").replace(":", "_")
            self.__dict__.setdefault(name, tensors)  # another thread may have set equal ones
            self._by_dtype[dtype, device] = getattr(self, name)
            self._names[dtype, device] = name
        return name

    def build_tensors(
        self, dtype: torch.dtype, device: torch.device, gpu: bool | None = None
    ) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """Return (p, first, zones). `gpu` selects the GPU kernels' zones; None: on CUDA."""
        check(dtype in FLOATS, f"dtype must be one of {', '.join(map(str, FLOATS))}; got {dtype}")

        def cast(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x.copy()).to(device, dtype)

        if dtype == torch.float64:
            return cast(self._p), self.first, ()
        p = cast(self._p[..., self._kept, :])
        first, zones, start = self.first + self._kept.start, [], 0
        if device.type == "cuda" if gpu is None else gpu:
            return p, first, self._block_zones(first, dtype, device)
        largest = torch.finfo(dtype).max
        if any(np.abs(c).max() > largest for c, _ in self._zones):
            return p, first, ()  # entries of C are sums and may overflow where p does not
        for c, u in self._zones:
            rows = p[start : start + len(c)]
            zones += [cast(c) if u.size else rows, cast(u)]
            start += len(c)
        return p, first, tuple(zones)

    def _block_zones(
        self, first: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Return the zones for the GPU's kernels; an empty tuple if they save no work."""
        if self._typical_size is None or not self._typical_size:
            return ()
        low = dtype != torch.float32
        tolerance = (LOW_TOLERANCE if low else TOLERANCE) * self._typical_size
        block_form = block_zones(self._p[self._kept], first, tolerance)
        if block_form is None:
            return ()
        left, far, basis = block_form
        if np.abs(far).max() > torch.finfo(dtype).max:
            return ()
        # For bfloat16, too, the kernels keep products in float16.
        return (
            torch.empty((left, 0), device=device),
            torch.from_numpy(far).to(device, dtype),
            torch.from_numpy(basis.copy()).to(device, torch.float16 if low else dtype),
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a RelativeTable is immutable; {name} cannot be set")

    def __deepcopy__(self, memo: Any = None) -> RelativeTable:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple:
        return RelativeTable, (self._p, self.first, self.beyond)

    def __repr__(self) -> str:
        last = self.first + self.rows - 1
        parts = [f"delta {self.first}..{last}" if self.rows else "no rows"]
        if self.heads is not None:
            parts.append(f"{self.heads} heads")
        parts += [f"head size {self.head_size}", f"beyond={self.beyond!r}"]
        ranks = [str(u.shape[1] or self.head_size) for _, u in self._zones]
        parts.append(f"zones of rank {'+'.join(ranks)}" if ranks else "no zones")
        return f"RelativeTable({', '.join(parts)})"


def _values(p: Tensor | ArrayLike) -> np.ndarray:
    """Return p as a float64 array, which may share p's memory."""
    if isinstance(p, Tensor):
        check_tensors(p=p)
        check(
            not p.requires_grad,
            "relative_table needs a constant p, got one that requires grad: pass the tensor itself "
            "to attention, which differentiates it, or p.detach()",
        )
        check_dtype("p", p)
        check(not p.is_meta, "relative_table needs the values of p, which is on the meta device")
        check(p.layout is torch.strided, f"relative_table needs a dense p, got {p.layout}")
        check(
            torch.func.debug_unwrap(p) is p,
            "relative_table needs the values of p: make it outside of torch.func's transforms",
        )
        return p.detach().to("cpu", torch.float64).numpy()
    check(not isinstance(p, RelativeTable), "p is a RelativeTable already")
    try:
        return checks.float_array("p", p).astype(np.float64, copy=False)
    except (TypeError, ValueError, MemoryError) as error:
        raise RuntimeError(f"wavepe: relative_table: {error}") from None


def _trimmed(p: np.ndarray, beyond: str, negligible: float = 0.0) -> slice:
    """Return the rows to keep: without rows at both ends for which `beyond` gives the same.

    Rows of zeros are dropped if no entry is above `negligible`. NaN is never dropped.
    """
    heads_and_columns = tuple(axis for axis in range(p.ndim) if axis != p.ndim - 2)
    w = p.shape[-2]
    if not p.size:
        return slice(0, min(w, 1) if beyond == "edge" else 0)
    if beyond == "edge":
        repeats = (p[..., 1:, :] == p[..., :-1, :]).all(heads_and_columns)
        changes = np.flatnonzero(~repeats)  # i, where rows i and i + 1 differ
        return slice(int(changes[0]), int(changes[-1]) + 2) if len(changes) else slice(0, min(w, 1))
    kept = np.flatnonzero(~(np.abs(p).max(heads_and_columns, initial=0.0) <= negligible))
    return slice(int(kept[0]), int(kept[-1]) + 1) if len(kept) else slice(0, 0)


def _typical_size(p: np.ndarray) -> float:
    """Return the typical size of a row, where the size is the largest absolute entry.

    It is the ninth largest size, so that a few huge rows do not count. A short table leaves out a
    tenth of its rows instead of eight.
    """
    rows = np.abs(p).max(axis=tuple({0, p.ndim - 1} - {p.ndim - 2}), initial=0.0)
    rows = np.sort(rows[rows > 0])[::-1]
    return float(rows[min(8, rows.size // 10)]) if rows.size else 0.0


def _zones(p: np.ndarray, first: int, tolerance: float) -> _Zones:
    """Return C and U of zones, p = C U^T up to `tolerance` in every entry; [] without low rank."""
    if not p.size:
        return []
    exponent = math.frexp(float(np.abs(p).max()))[1]
    p = np.ldexp(p, -exponent)  # entries up to 1, so that squares do not overflow or vanish
    tolerance = math.ldexp(tolerance, -exponent)
    edges = sorted({0, len(p), *(min(max(e - first, 0), len(p)) for e in (1 - NEAR, NEAR))})
    zones: _Zones = []
    for start, stop in itertools.pairwise(edges):
        rows = p[start:stop]
        basis = _basis(rows, tolerance)
        c = rows if basis is None else rows @ basis
        u = np.empty((p.shape[1], 0)) if basis is None else np.ascontiguousarray(basis)
        zones.append((np.ldexp(c, exponent), u))
    return zones if any(u.size for _, u in zones) else []


def _basis(rows: np.ndarray, tolerance: float) -> np.ndarray | None:
    """Return the fewest singular vectors (d, r) up to `tolerance`; None if they save no work."""
    w, d = rows.shape
    # r (w + d) multiply-adds must be fewer than w d. LARGEST_RANK allows for other costs.
    largest_rank = min(math.ceil(w * d / (w + d)), math.ceil(LARGEST_RANK * d)) - 1
    if largest_rank < 1:
        return None
    # QR and not a Gram matrix, whose squares would lose values below 1e-8 of the largest.
    r = np.linalg.qr(rows, mode="r")
    _, sigma, vt = np.linalg.svd(r, full_matrices=False)
    v = vt.T
    # For i vectors, the largest error lies between the Frobenius norm of the remainder divided by
    # sqrt(entries), and its spectral norm. The factors allow for the rounding of sigma.
    remainder = np.sqrt(np.cumsum(sigma[::-1] ** 2)[::-1] / rows.size)
    fewest = int((remainder > 1.001 * tolerance).sum())
    enough = int((sigma > 0.999 * tolerance).sum())

    def fits(r: int) -> bool:
        basis = v[:, :r]
        blocks = (rows[i : i + 1024] for i in range(0, w, 1024))  # small enough for the cache
        return all(np.abs(b - (b @ basis) @ basis.T).max() <= tolerance for b in blocks)

    if enough > largest_rank:
        enough = largest_rank
        if fewest > enough or not fits(enough):
            return None
    fewest, enough = max(fewest, 1), max(enough, 1)  # an empty basis stands for a full zone
    while fewest < enough:
        middle = (fewest + enough) // 2
        if fits(middle):
            enough = middle
        else:
            fewest = middle + 1
    return v[:, :enough]
