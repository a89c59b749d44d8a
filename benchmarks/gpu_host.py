"""The host's part of attention on a GPU: microseconds, launches and allocations of a call.

`python -m benchmarks.gpu_host` needs Triton and a C compiler, but no GPU. Triton's own launcher
runs against a libcuda that does nothing, on tensors of the CPU: so every step in Python and in the
launcher is real, and no kernel runs. "operator" is a call without a plan, through PyTorch's
dispatcher; "plan" repeats the launches that the first call wrote down.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import wavepe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from wavepe import ops
from wavepe.ops import _attention, _attention_gpu
from wavepe.ops._attention_checks import Arguments, check_arguments

from .command import Missing, measuring_command
from .command import table as markdown

WAYS = ("operator", "plan")
PHASES = ("forward", "forward + backward")
STEP = "a token"  # the phase of a case of DECODING: n is another one in each call
DECODING = ("decoding", "decoding, wavelets", "decoding, wavelets, key mask")
CASES = ("plain", "wavelets", "learned table", "everything learned", *DECODING)
ROUNDS = 25
LENGTH = 64  # short, because the operators of PyTorch among the steps do run, on the CPU
LENGTHS = range(64, 400)  # when decoding; more than plans are kept
_inside: contextlib.AbstractContextManager = contextlib.nullcontext()  # of an operator
_LIBRARY = torch.library.Library("wavepe", "IMPL")
# Triton reads these answers from libcuda. Every other function that it calls returns 0: success.
_ANSWERS = """
#include <stdint.h>
typedef int32_t Result;
int64_t launches = 0;
Result cuLaunchKernelEx(void) { launches++; return 0; }
Result cuDeviceGet(int32_t *device) { *device = 0; return 0; }
Result cuDeviceGetCount(int32_t *count) { *count = 1; return 0; }
Result cuDeviceGetAttribute(int32_t *value, int32_t attribute) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 227 << 10;  /* sm_90; else shared memory */
    return 0;
}
Result cuFuncGetAttribute(int32_t *value, int32_t attribute) {
    *value = attribute == 0 ? 1024 : 0;  /* threads of a block; registers and bytes */
    return 0;
}
Result cuPointerGetAttribute(uint64_t *address, int32_t attribute, uint64_t of) {
    *address = of;
    return 0;
}
Result cuGetErrorString(int32_t error, const char **text) { *text = "none"; return 0; }
Result cuCtxGetLimit(uint64_t *limit) { *limit = 1; return 0; }
#define HANDLE(name) Result name(void **handle) { *handle = (void *)1; return 0; }
HANDLE(cuCtxGetCurrent) HANDLE(cuDevicePrimaryCtxRetain) HANDLE(cuModuleLoadData)
HANDLE(cuModuleGetFunction)
"""


@functools.cache
def _stub() -> ctypes.CDLL:
    """Compile and load a libcuda that does nothing, and let Triton use it for an sm_90."""
    try:
        from triton.backends import nvidia
    except ImportError as error:
        raise Missing("Triton is not there: make extras brings it") from error
    (place,) = nvidia.__path__
    sources = [path.read_text() for path in Path(place).glob("driver.*")]
    called = {name for text in sources for name in re.findall(r"\bcu[A-Z]\w+", text)}
    others = sorted(called - set(re.findall(r"\bcu[A-Z]\w+", _ANSWERS)))
    source = _ANSWERS + "\n".join(f"Result {name}(void) {{ return 0; }}" for name in others)
    folder = tempfile.mkdtemp()
    library = Path(folder, "libcuda.so.1")
    Path(folder, "stub.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1", "stub.c"]
    try:
        subprocess.run([*command, "-o", library], cwd=folder, check=True)
    except FileNotFoundError as error:
        raise Missing("a C compiler is not there") from error
    Path(folder, "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class Driver(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device=None: 0
            self.get_device_capability = lambda device=0: (9, 0)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Driver())
    return loaded


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Let calls of attention on the CPU be calls on a GPU."""

    def build(table: Any, dtype: Any, device: Any, gpu: bool | None = None) -> Any:
        return build_tensors(table, dtype, device, True)

    build_tensors = ops.RelativeTable.build_tensors
    kept = _attention_gpu._missing_kernel, _attention.serves, _attention._FORWARD
    ops.RelativeTable.build_tensors = build  # type: ignore[method-assign]
    _attention_gpu._missing_kernel = functools.cache(lambda *_: "")
    for role in ("forward", "backward"):
        with contextlib.suppress(RuntimeError):  # registered already
            run = functools.partial(_unplanned, role)
            _LIBRARY.impl(f"attention_{role}", run, "CPU", allow_override=True)
    try:
        yield
    finally:
        ops.RelativeTable.build_tensors = build_tensors  # type: ignore[method-assign]
        _attention_gpu._missing_kernel, _attention.serves, _attention._FORWARD = kept


def _unplanned(role: str, *arguments: Any) -> Any:
    """Check and run a call as the first one of a signature is, without writing it down."""
    from wavepe.ops._attention_gpu import call

    start = 4 if role == "backward" else 0
    check_arguments(Arguments(*arguments[start : start + len(Arguments._fields)]))
    with _inside:
        results = getattr(call, role)(*arguments)
    return tuple(arguments[0].new_empty((0,)) if x is None else x for x in results)


def take(way: str) -> None:
    """Let the next calls go this way."""
    operator = torch.ops.wavepe.attention_forward.default
    _attention.serves = lambda x: way == "plan"
    # On the CPU, calls that record no gradient go straight to the operator.
    through = lambda *arguments: _attention._run("forward", operator, arguments)  # noqa: E731
    _attention._FORWARD = through if way == "plan" else operator


def inputs(case: str, length: int, head_size: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the tensors that need gradients, q, k and v first, and the options of a case."""
    draw = functools.partial(torch.randn, dtype=torch.bfloat16)
    heads = 4
    leaves = [draw(1, h, length, head_size) for h in (heads, 2, 2)]
    options: dict[str, Any] = {}
    if case == "wavelets":
        options["p"] = ops.relative_table(*wavepe.encoding("wavelet").table(8192, head_size))
    elif case != "plain":
        options["p"] = draw(length, head_size)
    if case == "everything learned":
        options |= {"q_rel": draw(1, heads, length, head_size), "bias": torch.randn(heads, length)}
    options |= {"slopes": torch.ones(heads)} if case == "everything learned" else {}
    wanted = ("p", "q_rel", "bias")
    for name in wanted:
        if isinstance(options.get(name), Tensor):
            leaves.append(options[name])
    return [x.requires_grad_() for x in leaves], options


def calls(case: str, length: int = LENGTH, head_size: int = 128) -> dict[str, Callable[[], Any]]:
    """Return the calls of a case by phase."""
    if case in DECODING:
        return {STEP: _decoding(case, head_size)}
    leaves, options = inputs(case, length, head_size)
    grad = torch.randn_like(leaves[0])

    def forward() -> Any:
        with torch.no_grad():
            return ops.attention(*leaves[:3], **options)

    def both() -> Any:
        return torch.autograd.grad(ops.attention(*leaves[:3], **options), leaves, grad)

    return dict(zip(PHASES, (forward, both), strict=True))


def _decoding(case: str, head_size: int) -> Callable[[], Any]:
    """Return a function that attends from one query to the keys of the next length."""
    leaves, options = inputs("wavelets" if "wavelets" in case else "plain", 1, head_size)
    q, room = leaves[0].detach(), torch.randn(2 * head_size * LENGTHS.stop, dtype=torch.bfloat16)
    masks = torch.ones(LENGTHS.stop, dtype=torch.bool)
    keys = [room[: 2 * n * head_size].view(1, 2, n, head_size) for n in LENGTHS]  # as of torch.cat
    each = itertools.cycle([(k, masks[: k.shape[2]].view(1, -1)) for k in keys])

    def step() -> Any:
        k, mask = next(each)
        with torch.no_grad():
            return ops.attention(q, k, k, key_mask=mask if "mask" in case else None, **options)

    return step


def floor(case: str, length: int = LENGTH, head_size: int = 128) -> Callable[[], Any]:
    """Return forward and backward of an autograd.Function of these tensors that does nothing."""
    leaves, _ = inputs(case, length, head_size)
    out, lse = torch.randn_like(leaves[0]), torch.randn(leaves[0].shape[:3])

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors, out, lse)
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return ctx.saved_tensors[:-2]

    return lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, out)


class _Operators(TorchDispatchMode):
    """Counts operators: allocations, and what computes."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.computed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        empty = "empty" in func._schema.name
        self.allocated += empty
        self.computed += not (empty or func.is_view or func.namespace == "wavepe")
        return func(*args, **(kwargs or {}))


def counts(call: Callable[[], Any]) -> dict[str, int]:
    """Return how many functions of Python a call enters, its launches, allocations, operators."""
    launches = ctypes.c_int64.in_dll(_stub(), "launches")
    call()
    entered, before = 0, launches.value

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    launched = launches.value - before
    operators = _Operators()
    global _inside
    _inside = operators  # the dispatcher takes it away from what an operator runs
    with operators:
        call()
    _inside = contextlib.nullcontext()
    return {
        "Python calls": entered,
        "launches": launched,
        "allocations": operators.allocated,
        "operators": operators.computed,
    }


def best(ways: dict[str, Callable[[], Any]], repeats: int, rounds: int = ROUNDS) -> dict:
    """Return the least microseconds of each call, over rounds in which they take turns."""
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, call in ways.items():
            call()
            start = time.thread_time()
            for _ in range(repeats):
                call()
            seconds[name] = min(seconds[name], (time.thread_time() - start) / repeats)
    return {name: round(1e6 * value, 1) for name, value in seconds.items()}


def compiled_while_decoding() -> list[tuple[int, ...]]:
    """Return how many kernels are compiled after steps of 15, 16, 17 and 32 keys.

    They are `attention_forward`, which serves a mask, and `attention_splits`.
    """
    from wavepe.ops._attention_gpu import decode, kernels

    numbers = []
    with on_a_gpu(), torch.no_grad():
        take("plan")
        q = torch.randn(2, 4, 1, 16).bfloat16()
        for n in (15, 16, 17, 32):
            k = torch.randn(2, 4, n, 16).bfloat16()
            ones, bias = torch.ones(2, 1, 1, n, dtype=torch.bool), torch.randn(4, n)
            ops.attention(q, k, k, key_mask=ones[:, 0, 0], mask=ones, bias=bias)
            ops.attention(q, k, k, key_mask=ones[:, 0, 0])
            caches = (x.device_caches for x in (kernels.attention_forward, decode.attention_splits))
            numbers.append(tuple(sum(len(each[0]) for each in x.values()) for x in caches))
    return numbers


def measure(repeats: int = 50, cases: Sequence[str] = CASES, head_size: int = 128) -> dict:
    """Return a row of figures for each case and phase, ready for JSON."""
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # thread_time sees one thread
    _stub()
    rows = []
    with on_a_gpu():
        for case in cases:
            for phase, call in calls(case, head_size=head_size).items():
                ways = {}
                for way in WAYS:

                    def one(way: str = way, call: Callable[[], Any] = call) -> Any:
                        take(way)
                        return call()

                    ways[way] = one
                row: dict[str, Any] = {"case": case, "phase": phase}
                for way in WAYS:
                    row[way] = counts(ways[way])
                row["floor"] = 0.0
                if phase == PHASES[1]:
                    row["floor"] = best({"floor": floor(case, LENGTH, head_size)}, repeats)["floor"]
                row["microseconds"] = best(ways, repeats)
                rows.append(row)
    import triton

    return {"triton": triton.__version__, "rows": rows}


def table(results: dict) -> str:
    """Return the figures as Markdown; each cell has both ways."""
    kinds = ("Python calls", "launches", "allocations", "operators")
    head = ("case", "phase", "microseconds", "of autograd alone", *kinds)
    rows = []
    for row in results["rows"]:
        cells = [" -> ".join(f"{row['microseconds'][way]:.0f}" for way in WAYS)]
        cells.append(f"{row['floor']:.0f}")
        cells += [" -> ".join(str(row[way][kind]) for way in WAYS) for kind in kinds]
        rows.append((row["case"], row["phase"], *cells))
    text = markdown(head, rows, "llrrrrrr")
    return f"{text}\n\nOperator -> plan. Triton {results['triton']}, no GPU: no kernel ran.\n"


def main(argv: Sequence[str] | None = None) -> int:
    return measuring_command(__doc__, measure, table, argv, repeats=50, quick={"repeats": 5})


if __name__ == "__main__":
    sys.exit(main())
