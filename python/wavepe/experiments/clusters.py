"""Executors by name: what runs the trainings of a comparison on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..common.errors import CommandError, UsageError, require

Opener = Callable[[Path, int], AbstractContextManager[Executor]]


def cluster(name: str) -> Opener:
    """Return what opens dask://HOST:PORT, slurm[:KEY=VALUE,...], ray[://HOST:PORT] or mpi.

    Its arguments are the folder for the logs of SLURM, and the number of GPUs of a task. UsageError
    for another name, and MissingPackage without the package of the executor.
    """
    kind, _, rest = name.partition(":")
    if kind not in _KINDS or (kind == "dask" and not rest.startswith("//")):
        needs = "needs dask://HOST:PORT, slurm:KEY=VALUE,..., ray or mpi"
        raise UsageError(f"`executor` {name}: {needs}")
    module, opened = _KINDS[kind]
    require(f"`executor` {kind}", **{module: kind})
    return partial(opened, rest)


@contextmanager
def _dask(rest: str, folder: Path, gpus: int) -> Iterator[Executor]:
    from distributed import Client

    with Client(f"tcp:{rest}") as client:
        if threads := {n for n in client.nthreads().values() if n > 1}:
            raise UsageError(
                f"`executor` dask:{rest}: its workers have {max(threads)} threads, and a training "
                "needs a process of its own: start them by dask worker --nthreads 1"
            )
        yield client.get_executor()


@contextmanager
def _slurm(rest: str, folder: Path, gpus: int) -> Iterator[Executor]:
    import submitit

    options: dict[str, Any] = {"name": "wavepe"} | ({"gpus_per_node": gpus} if gpus else {})
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        options[key] = int(value) if value.isdecimal() else value
    try:
        jobs: Any = submitit.AutoExecutor(folder=folder / "slurm", cluster="slurm")
        jobs.update_parameters(**options)
    except Exception as error:  # submitit raises several kinds
        raise CommandError(f"`executor` slurm:{rest}: {error}") from error
    yield jobs


@contextmanager
def _ray(rest: str, folder: Path, gpus: int) -> Iterator[Executor]:
    import ray

    class Tasks(Executor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Any:
            return ray.remote(num_gpus=gpus)(function).remote(*args).future()

    with ray.init(address=f"ray:{rest}" if rest else None, log_to_driver=False):
        yield Tasks()


@contextmanager
def _mpi(rest: str, folder: Path, gpus: int) -> Iterator[Executor]:
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as pool:
        yield pool


# name -> the module that it needs, which its extra brings
_KINDS = {
    "dask": ("distributed", _dask), "slurm": ("submitit", _slurm), "ray": ("ray", _ray),
    "mpi": ("mpi4py", _mpi),
}  # fmt: skip
