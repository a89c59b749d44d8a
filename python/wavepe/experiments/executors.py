"""The trainings of a comparison, one after the other, or several at a time by an executor.

Each training with its evaluations is one task. It writes what it has to tell to a file in the
folder of the comparison, so every executor whose processes see that folder shows its progress. A
task whose file is gone ends: no executor need be able to stop one that runs. Executors of a cluster
have names.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from ..common.errors import CommandError, UsageError, require
from ..common.files import interrupt_on_signals
from .imports import import_all

if TYPE_CHECKING:
    from .comparison import Comparison
    from .progress import Report

_POLL = 0.1  # seconds between two looks at the files
_EVENTS, _WORK = ".events-", "work"
# Returned by a task: None, or an error and its traceback, which executors would lose or change.
Failure = tuple[Exception, str] | None
Opener = Callable[[Path, int], AbstractContextManager[Executor]]


def run_all(
    comparison: Comparison, jobs: int, executor: Executor | Opener | None, imports: Sequence[str],
    report: Report,
) -> None:  # fmt: skip
    """Train and evaluate every model of the comparison, in this process or by an executor."""
    work, models = comparison.work, list(enumerate(comparison.models))
    folder, gpus = work.folder.path.absolute(), work.device.count
    if executor is None and jobs == 1:
        for number, model in models:
            work.run(model, comparison.missing(model), partial(comparison.tell, report, number))
        return
    for old in folder.glob(f"{_EVENTS}*"):  # of a killed command, whose tasks may go on
        shutil.rmtree(old, ignore_errors=True)
    lost, futures = None, list[Any]()
    with ExitStack() as stack:
        events = Path(tempfile.mkdtemp(prefix=_EVENTS, dir=folder))
        stack.callback(shutil.rmtree, events, ignore_errors=True)
        (events / _WORK).write_bytes(pickle.dumps(replace(work, folder=work.folder.elsewhere())))
        files = [os.path.abspath(name) if name.endswith(".py") else name for name in imports]
        if executor is None:
            executor = stack.enter_context(_pool(min(jobs, len(models)), work.folder.lock, gpus))
        elif callable(executor):
            executor = stack.enter_context(executor(folder, gpus))
        stack.callback(lambda: [future.cancel() for future in futures])
        streams = []
        for number, model in models:
            (events / str(number)).touch()
            streams.append(stack.enter_context((events / str(number)).open("rb")))
            task = number, comparison.missing(model), files, events
            futures.append(executor.submit(_run_task, *task))
        while futures:
            ended = [future for future in futures if future.done()]
            for number, stream in enumerate(streams):
                for event in _events(stream):
                    comparison.tell(report, number, *event)
            for future in ended:
                futures.remove(future)
                try:
                    failure: Failure = future.result()
                except Exception as error:  # of the executor; the other tasks go on
                    lost = error
                    continue
                if failure is not None:
                    raise failure[0] from CommandError(failure[1])
            time.sleep(_POLL)
    if lost is not None:
        reason = " ".join(str(lost).split("\n")[0].split())
        raise CommandError(
            "the process of a training was killed, or its memory was not enough; finished work is "
            f"kept: to continue, give the same command again ({type(lost).__name__}: {reason})"
        ) from lost


def _events(stream: BinaryIO) -> Iterator[list[Any]]:
    """Yield the events that a task has written since the last call."""
    for line in stream:
        if not line.endswith(b"\n"):  # the task is writing the rest
            stream.seek(-len(line), os.SEEK_CUR)
            return
        with suppress(ValueError):  # a killed process has left half a line
            yield json.loads(line)


def _run_task(number: int, rows: Sequence[str], imports: Sequence[str], events: Path) -> Failure:
    """Train and evaluate the model of a number in a process of an executor."""
    from ..training.device import device_named, torch_threads
    from ..training.loop import Stopped

    file = events / str(number)
    try:
        import_all(imports)  # before a spec is read
        work = pickle.loads((events / _WORK).read_bytes())
        work = replace(work, device=device_named(work.device.place.type))
        model = work.settings.models[number]
        with interrupt_on_signals(), torch_threads(work.threads), file.open("a", 1) as stream:

            def tell(*event: Any) -> bool:
                print(json.dumps(event), file=stream)
                if file.exists():
                    return False
                if event[0] == "step":  # the training saves its state
                    return True
                raise Stopped

            print(file=stream)  # a killed process may have left half a line
            tell("doing", model.spec)
            work.run(model, rows, tell)
    except Exception as error:  # one that comes from a file that is gone, nobody will see
        return error, traceback.format_exc()
    return None


@contextmanager
def _pool(count: int, lock: int, gpus: int) -> Iterator[Executor]:
    """Start processes, which Ctrl-C does not reach; after an error, let each save its state."""
    others = set(active_children())
    holder = Connection(os.dup(lock), writable=False)  # in this form, a new process can get it
    context = get_context("spawn")
    places = context.SimpleQueue()
    for number in range(count):
        places.put(number % gpus if gpus else None)
    with ProcessPoolExecutor(count, context, _begin, (holder, places)) as pool:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit it
        # Each of them would import the script that calls `compare`, and so run it once more.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            for _ in range(count):
                pool.submit(os.getpid)
        finally:
            sys.modules["__main__"] = main  # and nothing else, because threads of the pool import
            holder.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield pool
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def _begin(lock: Connection, places: Any) -> None:
    """Let a process of the pool hold the folder's lock, have its GPU, and end with its parent."""
    os.dup(lock.fileno())
    if (place := places.get()) is not None:
        import torch

        torch.cuda.set_device(place)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = parent_process()
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # a training saves its state first


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


# name -> the module that it needs, which its extra brings
_KINDS: dict[str, tuple[str, Callable[..., AbstractContextManager[Executor]]]] = {
    "dask": ("distributed", _dask), "slurm": ("submitit", _slurm), "ray": ("ray", _ray),
    "mpi": ("mpi4py", lambda *_: importlib.import_module("mpi4py.futures").MPIPoolExecutor()),
}  # fmt: skip
