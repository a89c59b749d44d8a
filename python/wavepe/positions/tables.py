"""Arrays of encodings as tensors. NumPy computes them once for a length, and all modules use them.

A compiler must not trace into NumPy. So its graph holds an operator that returns the rows (here, in
absolute.py and in ops/_attention_in_graph.py), and one graph serves every length.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arrays.wavelet_registered import registrations
from ..encodings import Bias, Encoding
from ..encodings import encoding as read_encoding
from ..ops._attention_in_graph import set_table_source
from ..ops._common import in_new_thread
from ..ops._compiler import traced
from ..ops._relative_table import RelativeTable, relative_table
from ..ops._scores import rows_at
from ..ops._torch_private import largest

T = TypeVar("T")

FIRST_CAPACITY = 128
# On a GPU tables of more rows than FIRST_CAPACITY have at least so many. A table that is cut where
# its rows are not small has no zones of low rank (ops/_attention_gpu/zones.py).
GPU_CAPACITY = 1024
# Rows of a constant in a program of standard operators, if nothing bounds the length.
OPEN_LENGTH = 1 << 14
# The advice where an encoding follows the length, and a program cannot.
FIX_LENGTH = (
    "fix the length before exporting, for a model of transformers by "
    "wavepe.hf.fix_length(model, length)"
)
# Tables of more positions are not kept. At head size 128 this is 64 MiB.
LARGEST_TABLE = 1 << 17

_named: dict[str, Encoding] = {}


def capacity_for(length: int) -> int:
    """Return the power of two at or above `length`, and at least `FIRST_CAPACITY`.

    So a length always has the same table, whatever was computed before.
    """
    capacity = FIRST_CAPACITY
    while capacity < length:
        capacity *= 2
    return capacity


def capacity_range(length: int) -> tuple[int, int]:
    """Return the range of lengths, without its first, that have the same capacity, its last."""
    capacity = capacity_for(length)
    return (0 if capacity == FIRST_CAPACITY else capacity // 2), capacity


def refuse_trace(encoding: Any) -> None:
    """Raise RuntimeError under torch.jit.trace: it would keep the numbers of one length for all."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"wavepe: torch.jit.trace would keep the position encoding '{encoding}' of this one "
            "length: use torch.export, which serves every length"
        )


def build_once(build: Callable[..., T], *arguments: Any) -> T:
    """Return ``build(*arguments)``, kept until a registration may change what names mean."""
    return _built(build, arguments, registrations())


def cached_by_length(build: Callable[..., T]) -> Callable[..., T]:
    """Keep the results of a function of a length, called with a capacity; no graph may call it."""

    @functools.wraps(build)
    def cached(length: int, *arguments: Any) -> T:
        try:
            return build_once(build, capacity_for(length), *arguments)
        # An encoding may have fewer positions than the capacity: "binary" has 2^dim.
        except ValueError:
            return build_once(build, length, *arguments)

    return cached


@functools.lru_cache(maxsize=64)
def _built(build: Callable[..., T], arguments: tuple[Any, ...], definitions: int) -> T:
    # In a new thread, because later callers use the result outside of this call's inference mode or
    # tracer.
    return in_new_thread(lambda: build(*arguments))


@cached_by_length
def constant_table(keys: int, encoding: Encoding, head_dim: int, causal: bool) -> RelativeTable:
    """Return a table with a row for every distance among `keys` tokens."""
    return relative_table(*encoding.table(keys, head_dim, causal=causal))


def table_on(
    device: torch.device, keys: int, encoding: Encoding, head_dim: int, causal: bool
) -> RelativeTable:
    """Return the `constant_table` for calls on a GPU, with more rows where they save time."""
    if device.type == "cuda" and FIRST_CAPACITY < keys < GPU_CAPACITY:
        with contextlib.suppress(ValueError):  # an encoding may have fewer positions
            return constant_table(GPU_CAPACITY, encoding, head_dim, causal)
    return constant_table(keys, encoding, head_dim, causal)


@cached_by_length
def constant_bias(
    keys: int,
    encoding: Encoding,
    causal: bool,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Bias:
    """Return a bias with a number for every distance among `keys` tokens, as `Encoding.bias`."""
    bias, first, beyond = encoding.bias(keys, heads, causal=causal)
    return Bias(torch.from_numpy(bias).to(device, dtype), first, beyond)


# ---- for a compiler's graph: operators take names of encodings, because they take no objects ----


def name_of(encoding: Encoding) -> str:
    """Return a name that `encoding_named` knows: the spec, with a number if another one has it."""
    spec = name = str(encoding)
    number = 1
    while _named.setdefault(name, encoding) != encoding:
        number += 1
        name = f"{spec} #{number}"
    return name


def encoding_named(name: str) -> Encoding:
    """Return the encoding of that name. A name from another process is read as a spec."""
    return _named[name] if name in _named else read_encoding(name.partition(" ")[0])


set_table_source(lambda on, name, keys, *size: table_on(on, keys, encoding_named(name), *size))


def graph_rows(name: str, term: str, causal: bool, keys: int, *size: Any) -> Tensor:
    """Return the rows of `rows_of_distances` in a compiler's graph."""
    op = torch.ops.wavepe.constant_rows.default
    return traced(op, _standard_rows)(name, term, causal, keys, *size)


@torch.library.custom_op(
    "wavepe::constant_rows",
    mutates_args=(),
    schema="(str name, str term, bool causal, SymInt keys, SymInt size, ScalarType dtype, "
    "Device device) -> Tensor",
)
def _constant_rows(name: str, *arguments: Any) -> Tensor:
    return rows_of_distances(encoding_named(name), *arguments)


def rows_of_distances(
    encoding: Encoding,
    term: str,
    causal: bool,
    keys: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a row for each distance; `size` is the head size, or for "bias" the heads."""
    if term == "bias":
        bias, first, beyond = constant_bias(keys, encoding, causal, size, dtype, device)
        rows = bias.T
    else:
        table = constant_table(keys, encoding, size, causal)
        (rows, first, _), beyond = table.tensors(dtype, device), table.beyond
    return rows_at(rows, first, beyond, torch.arange(0 if causal else 1 - keys, keys))


@_constant_rows.register_fake
def _(name: str, term: str, causal: bool, keys: int, size: int, *place: Any) -> Tensor:
    dtype, device = place
    if term == "table":
        size = encoding_named(name).table_columns(size)
    return torch.empty((keys if causal else 2 * keys - 1, size), dtype=dtype, device=device)


# ---- constants of a program of standard operators -----------------------------------------------


def rows_for(length: int | None, constant: str) -> int:
    """Return how many rows a constant needs; `length` is None if only values tell it."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            f"wavepe: {constant} becomes a constant of the program, which Dynamo cannot make: call "
            "torch.export.export with strict=False"
        )
    most = None if length is None else largest(length)
    if most is not None:
        return most
    warnings.warn(
        f"wavepe: nothing bounds the length of this program, so {constant} has rows for "
        f"{OPEN_LENGTH} tokens, and longer input will fail; to have more or fewer, give the "
        "dimension a bound, such as torch.export.Dim('length', max=4096)",
        stacklevel=2,
    )
    return OPEN_LENGTH


def _standard_rows(name: str, term: str, causal: bool, keys: int, *size: Any) -> Tensor:
    most = rows_for(keys, f"the table of {name!r}")
    rows = build_once(rows_of_distances, encoding_named(name), term, causal, most, *size)
    place = torch.arange(0 if causal else 1 - keys, keys, device=rows.device)
    # An index beyond the end is an error.
    return rows.index_select(0, place if causal else place + (most - 1))
