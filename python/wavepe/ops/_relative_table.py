"""relative_table: a constant table of relative positions, with the small bases of its zones.

Far from the diagonal a wavelet table is smooth: at head size 128 its rows from delta = 64 on are
combinations of 15 vectors [W]. The products of a query with r such vectors give all of q . p by a
product r wide. The bases are taken from the table's values, never from a rule about wavelets.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .. import _checks
from .._relative_bias import BEYOND
from ._attention_gpu.zones import block_zones
from ._common import FLOATS, check, check_choice, check_dtype, in_new_thread, integer, names_memory

NEAR = 64  # |delta| below this is a zone of its own: two zones take a third of the work of one
TOLERANCE = 1e-7  # of the usual size of a row: below the rounding of float32
LOW_TOLERANCE = 1e-4  # the same on a GPU for bfloat16 and float16, below the rounding of the latter
LARGEST_RANK = 0.75  # of the head size; above it a zone keeps its rows
LARGEST_HEAD = 1024  # beyond it the search takes minutes, and no model has such heads
_FARTHEST = 2**62  # as in NumPy: further away no table reaches a key, and sums cannot overflow

_Zones = list[tuple[np.ndarray, np.ndarray]]


@torch.compiler.disable(reason="make wavepe.ops.relative_table outside of the compiled function")
def relative_table(p: Tensor | ArrayLike, first: int = 0, beyond: str = "zero") -> RelativeTable:
    """A constant table for `attention`, kept with what makes it fast [W].

    Make it once and pass it as ``p=``; nothing is computed from it again. A tensor passed there
    instead is differentiable and used as it is.

    Parameters
    ----------
    p : Tensor or array (w, d), or (H, w, d)
        Floating point, on any device. Row r belongs to delta = first + r. It is copied; a tensor
        that requires grad is refused, for no gradient would reach it.
    first : int
        delta of the table's first row.
    beyond : "zero" or "edge"
        A row outside the table counts as zero, or as the nearest row.

    Returns
    -------
    RelativeTable, immutable

    Raises
    ------
    RuntimeError
        Wrong shape, dtype or range, or a p that requires grad.

    Examples
    --------
    >>> import wavepe
    >>> from wavepe import ops
    >>> table = ops.relative_table(*wavepe.encoding("wavelet").table(1000, 64))
    >>> table.first, table.head_size
    (0, 64)
    >>> ops.relative_table([[0.5, 0.0], [0.0, 1.0], [0.5, 0.5]], first=-1, beyond="edge")
    RelativeTable(delta -1..1, head size 2, beyond='edge', no zones, 72 bytes)
    """
    return RelativeTable(p, first, beyond)


class RelativeTable:
    """What `relative_table` returns: a copy of a table, its range, and its low-rank zones.

    Rows at both ends that say nothing are dropped: zeros, or with beyond="edge" repeats of the
    row beside them.

    Attributes
    ----------
    p : Tensor (rows, d) or (H, rows, d), float64
        A new copy of the rows kept.
    first, rows : int
        Their range: delta = first .. first + rows - 1.
    beyond : str
    head_size : int
    heads : int or None
        H; None for a table that all heads share.
    """

    first: int
    rows: int
    beyond: str
    head_size: int
    heads: int | None
    _p: np.ndarray
    _kept: slice  # of _p for float32 and less: without rows below their rounding
    _usual: float | None  # size of a row; None where zones are not looked for
    _zones: _Zones
    _names: dict[tuple[torch.dtype, torch.device], str]

    @names_memory("relative_table")
    @np.errstate(all="ignore")  # of a scaled table's smallest values
    def __init__(self, p: Tensor | ArrayLike, first: int = 0, beyond: str = "zero") -> None:
        values = _values(p)
        check(
            values.ndim in (2, 3),
            f"p must be (w, d) or (H, w, d), got shape {values.shape}",
        )
        first = integer("first", first)
        check(abs(first) < _FARTHEST, f"first must lie within +-2^62, got {first}")
        check_choice("beyond", beyond, BEYOND)
        if beyond == "edge":
            check(values.shape[-2] > 0, "beyond='edge' needs a table of at least one row")
        with _says_too_large(values.shape):
            whole = _trimmed(values, beyond)
            values = values[..., whole, :].copy()
        values.flags.writeable = False
        first = first + whole.start if values.shape[-2] else 0
        largest = float(np.abs(values).max(initial=0.0))
        finite = math.isfinite(largest)
        usual = _usual_size(values) if finite else 0.0
        tolerance = TOLERANCE * usual
        kept = _trimmed(values, beyond, tolerance)
        shared = finite and values.ndim == 2 and beyond == "zero"
        shared = shared and values.shape[-1] <= LARGEST_HEAD
        self.__dict__.update(
            first=first,
            rows=values.shape[-2],
            beyond=beyond,
            head_size=values.shape[-1],
            heads=values.shape[0] if values.ndim == 3 else None,
            _p=values,
            _kept=kept,
            _usual=usual if shared else None,
            _zones=_zones(values[kept], first + kept.start, tolerance) if shared else [],
            _names={},
        )
        self._attribute(torch.float32, torch.device("cpu"))  # what most calls want

    @property
    def p(self) -> Tensor:
        return torch.from_numpy(self._p.copy())

    def tensors(
        self, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, int, list[Tensor]]:
        """``(p, first, zones)`` for one dtype and device: made once, and shared by all calls.

        They must not be written to. Up to 1e-7 of the largest value is neglected for float32,
        bfloat16 and float16, nothing for float64; on CUDA up to 1e-4 of it for the latter two.

        Returns
        -------
        p : Tensor (w, d) or (H, w, d), contiguous
        first : int
            delta of its first row.
        zones : list of Tensor
            ``[C0, U0, C1, U1, ...]`` in the order of rising delta: a zone's rows of p are
            ``C @ U.T`` with C (rows, r) and U (d, r), or C itself (rows, d) where U is (d, 0). The
            rows of all zones are those of p. Empty where no zone saves work: for float64, tables
            of one's own heads or beyond="edge", head sizes above 1024, and irregular or small ones.
            On CUDA they are ``_attention_gpu.zones.block_zones``: a tensor (left, 0) for a number,
            far (64, zones, rank, d) and basis (rank, 64).
        """
        p, first, zones = getattr(self, self._attribute(dtype, device))
        return p, first, list(zones)

    # A compiler calls this while it traces, and then reads the attribute: as a constant, the
    # result would be kept for every table that the compiled function is given.
    @torch.compiler.assume_constant_result
    def _attribute(self, dtype: torch.dtype, device: torch.device | str) -> str:
        """The name of the attribute that holds the tensors."""
        if type(dtype) is not torch.dtype or not isinstance(device, (str, torch.device)):
            check(False, f"dtype and device of torch needed, got {dtype!r} and {device!r}")
        device = torch.device(device)
        if device == torch.accelerator.current_accelerator():  # without an index: the current one
            device = torch.device(device.type, torch.accelerator.current_device_index())
        name = self._names.get((dtype, device))
        if name is None:
            # For every later call, whatever this one is part of: inference, a trace, vmap.
            tensors = in_new_thread(functools.partial(self._build, dtype, device))
            name = f"_{dtype}_{device}".replace(".", "_").replace(":", "_")
            self.__dict__.setdefault(name, tensors)  # another thread's are as good
            self._names[dtype, device] = name
        return name

    def _build(
        self, dtype: torch.dtype, device: torch.device, gpu: bool | None = None
    ) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """With the zones of the GPU's kernels on CUDA, or where `gpu` says so."""
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
            return p, first, ()  # sums over a row, which may pass what its entries do not
        for c, u in self._zones:
            rows = p[start : start + len(c)]
            zones += [cast(c) if u.size else rows, cast(u)]
            start += len(c)
        return p, first, tuple(zones)

    def _block_zones(
        self, first: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Those of the GPU's kernels."""
        if self._usual is None or not self._usual:
            return ()
        low = dtype != torch.float32
        tolerance = (LOW_TOLERANCE if low else TOLERANCE) * self._usual
        found = block_zones(self._p[self._kept], first, tolerance)
        if found is None:
            return ()
        left, far, basis = found
        if np.abs(far).max() > torch.finfo(dtype).max:
            return ()
        # The kernels keep products in float16 for bfloat16, too.
        return (
            torch.empty((left, 0), device=device),
            torch.from_numpy(far).to(device, dtype),
            torch.from_numpy(basis.copy()).to(device, torch.float16 if low else dtype),
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a RelativeTable is immutable; {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a RelativeTable is immutable; {name} cannot be deleted")

    def __copy__(self) -> RelativeTable:
        return self

    def __deepcopy__(self, memo: dict) -> RelativeTable:
        return self

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
        return f"RelativeTable({', '.join(parts)}, {self._bytes()} bytes)"

    def _bytes(self) -> int:
        held = self._p.nbytes + sum(c.nbytes + u.nbytes for c, u in self._zones)
        for name in set(self._names.values()):
            p, _, zones = getattr(self, name)
            # a zone that keeps its rows is a part of p
            own = [x for x in zones if x.untyped_storage().nbytes() == x.nbytes]
            held += p.nbytes + sum(x.nbytes for x in own)
        return held


def _values(p: Tensor | ArrayLike) -> np.ndarray:
    """p as a float64 array, which may share its memory."""
    if isinstance(p, Tensor):
        check(
            not p.requires_grad,
            "relative_table takes a constant, and p requires grad: pass the tensor itself to "
            "attention, which differentiates it, or p.detach()",
        )
        check_dtype("p", p)
        check(not p.is_meta, "relative_table needs the values of p, which is on the meta device")
        check(p.layout is torch.strided, f"relative_table needs a dense p, got {p.layout}")
        check(
            torch.func.debug_unwrap(p) is p,
            "relative_table needs the values of p: make it outside of torch.func's transforms",
        )
        with _says_too_large(tuple(p.shape)):
            return p.detach().to("cpu", torch.float64).numpy()
    check(not isinstance(p, RelativeTable), "p is a RelativeTable already")
    if isinstance(p, tuple) and any(isinstance(x, str) for x in p):  # (p, first, beyond)
        check(
            False,
            "p is the tuple that an encoding's table() gives; unpack it: relative_table(*table)",
        )
    try:
        given = _checks.float_array("p", p)
    except (TypeError, ValueError, MemoryError) as error:
        raise RuntimeError(f"wavepe: relative_table: {error}") from None
    with _says_too_large(given.shape):
        return given.astype(np.float64, copy=False)


@contextlib.contextmanager
def _says_too_large(shape: tuple[int, ...]) -> Iterator[None]:
    """RuntimeError where NumPy raises one of two errors: for an expanded p of up to 2^60 rows."""
    try:
        yield
    except (MemoryError, ValueError) as error:
        message = f"wavepe: relative_table: p of shape {shape} is too large: {error}"
        raise RuntimeError(message) from None


def _trimmed(p: np.ndarray, beyond: str, negligible: float = 0.0) -> slice:
    """The rows without those at both ends that `beyond` gives as well; NaN is never dropped."""
    heads_and_columns = tuple(axis for axis in range(p.ndim) if axis != p.ndim - 2)
    w = p.shape[-2]
    if not p.size:
        return slice(0, min(w, 1) if beyond == "edge" else 0)
    if beyond == "edge":
        repeats = (p[..., 1:, :] == p[..., :-1, :]).all(heads_and_columns)
        changes = np.flatnonzero(~repeats)  # between row i and i + 1
        return slice(int(changes[0]), int(changes[-1]) + 2) if len(changes) else slice(0, min(w, 1))
    says = ~(np.abs(p).max(heads_and_columns, initial=0.0) <= negligible)
    at = np.flatnonzero(says)
    return slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)


def _usual_size(p: np.ndarray) -> float:
    """The largest entry of a row, but for the eight largest rows (a tenth of few): huge ones."""
    rows = np.abs(p).max(axis=tuple({0, p.ndim - 1} - {p.ndim - 2}), initial=0.0)
    rows = np.sort(rows[rows > 0])[::-1]
    return float(rows[min(8, rows.size // 10)]) if rows.size else 0.0


def _zones(p: np.ndarray, first: int, tolerance: float) -> _Zones:
    """p = C U^T by zones of delta, up to `tolerance` in every entry; [] if all are full."""
    if not p.size:
        return []
    exponent = math.frexp(float(np.abs(p).max()))[1]
    p = np.ldexp(p, -exponent)  # to 1 at most: no square overflows, none vanishes
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
    """The fewest singular vectors (d, r) whose span is within `tolerance` of every entry of rows.

    None where they would not save work.
    """
    w, d = rows.shape
    # r (w + d) multiply-adds instead of w d, and a bound for what the flops leave out
    largest_rank = min(math.ceil(w * d / (w + d)), math.ceil(LARGEST_RANK * d)) - 1
    if largest_rank < 1:
        return None
    if w > 32 * d:  # of long tables, some rows tell that the rank is high
        fewest, _, _ = _rank_bounds(rows[:: w // (8 * d)], tolerance)
        if fewest > largest_rank:
            return None
    fewest, enough, v = _rank_bounds(rows, tolerance)

    def fits(r: int) -> bool:
        basis = v[:, :r]
        blocks = (rows[i : i + 1024] for i in range(0, w, 1024))  # that stay in the cache
        return all(np.abs(b - (b @ basis) @ basis.T).max() <= tolerance for b in blocks)

    if enough > largest_rank:
        enough = largest_rank
        if fewest > enough or not fits(enough):
            return None
    fewest, enough = max(fewest, 1), max(enough, 1)  # an empty basis would mean a full zone
    while fewest < enough:
        middle = (fewest + enough) // 2
        if fits(middle):
            enough = middle
        else:
            fewest = middle + 1
    return v[:, :enough]


def _rank_bounds(rows: np.ndarray, tolerance: float) -> tuple[int, int, np.ndarray]:
    """(fewest, enough, V): no rank below `fewest` is within tolerance of every entry, and the
    first `enough` right singular vectors, columns of V, are.

    The largest entry of what they leave lies between its Frobenius norm / sqrt(entries) and its
    spectral norm. By QR, for a Gram matrix would square away values below 1e-8 of the largest.
    """
    r = np.linalg.qr(rows, mode="r")
    _, sigma, vt = np.linalg.svd(r, full_matrices=False)
    left = np.sqrt(np.cumsum(sigma[::-1] ** 2)[::-1] / rows.size)  # left by the first i vectors
    # Both fall; a hair of slack for the rounding of sigma.
    fewest = int((left > 1.001 * tolerance).sum())
    enough = int((sigma > 0.999 * tolerance).sum())
    return fewest, enough, vt.T
