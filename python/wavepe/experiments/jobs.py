"""Several trainings at a time, each in a worker: a process of its own.

The processes send pickles through a pipe: this one a model, the worker what it tells
of its progress, its results, and the exception that ends it. Workers are started with subprocess,
because multiprocessing would run the script that calls `compare` once more in each of them.

Each worker has its own process group, so Ctrl-C reaches this process alone. Then this process
closes the workers' stdin, which also ends when this process is killed. A worker that sees the end
saves its state after the step, and stops. It holds the lock of the folder as long as it lives.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ..common.errors import CommandError, out_of_memory
from ..common.files import interrupt_on_signals
from .imports import import_all

if TYPE_CHECKING:
    from .comparison import Comparison, Work
    from .progress import Report
    from .rows import Model

# The worker gets the import path of this process; with -m it would search the current folder first.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    f"from {__name__} import work; sys.exit(work(int(sys.argv[1])))"
)


def run_jobs(comparison: Comparison, jobs: int, imports: Sequence[str], report: Report) -> None:
    """Train and evaluate every model of the comparison, `jobs` of them at a time."""
    if jobs == 1:
        for number, model in enumerate(comparison.models):
            rows = comparison.missing(model)
            comparison.work.run(model, rows, report.teller(number), comparison.save)
        return
    waiting = list(enumerate(comparison.models))
    workers: list[Worker] = []
    try:
        for _ in range(min(jobs, len(waiting))):
            workers.append(Worker(comparison, imports))
            workers[-1].take(*waiting.pop(0), report)
        busy = {worker.pipe: worker for worker in workers}
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                if not worker.listen():
                    continue
                if waiting:
                    worker.take(*waiting.pop(0), report)
                else:
                    del busy[worker.pipe]
                    worker.send(None)
                    worker.process.wait()
    except BaseException:
        _stop(workers)
        raise
    finally:
        for worker in workers:
            worker.life.close()
            worker.pipe.close()


def _stop(workers: list[Worker]) -> None:
    """Let every worker save its state and end; a second Ctrl-C kills them."""
    try:
        for worker in workers:
            worker.life.close()
        for worker in workers:
            with suppress(EOFError, OSError):
                while True:  # read on, so that no worker blocks
                    worker.pipe.recv_bytes()
            worker.process.wait()
    except BaseException:
        for worker in workers:
            worker.process.kill()
        raise


class Worker:
    """A process that trains and evaluates, as its parent sees it."""

    def __init__(self, comparison: Comparison, imports: Sequence[str]) -> None:
        self.pipe, theirs = Pipe()
        kept = [theirs.fileno(), comparison.folder.lock]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(theirs.fileno()), *sys.path],
            stdin=subprocess.PIPE, pass_fds=kept, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.life = self.process.stdin
        theirs.close()
        self.comparison, self.title = comparison, ""
        self.send(list(imports))  # before what may need them
        self.send(comparison.work)

    def take(self, number: int, model: Model, report: Report) -> None:
        """Send the worker its next model."""
        self.title, self.tell = model.spec, report.teller(number)
        self.tell("doing", self.title)
        self.send((model, self.comparison.missing(model)))

    def send(self, value: Any) -> None:
        """Send a value. If the worker has ended, `listen` will report how."""
        with suppress(BrokenPipeError, ConnectionError):
            self.pipe.send(value)

    def listen(self) -> bool:
        """Receive one thing that the worker says; return whether its model is done."""
        try:
            kind, *values = self.pipe.recv()
        except (EOFError, ConnectionError):
            code = self.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise CommandError(
                f"{self.title}: the process of this training ended with {how}; finished work is "
                "kept: to continue, give the same command again"
            ) from None
        if kind == "error":
            raise values[0]
        if kind == "result":
            self.comparison.save(*values)
        elif kind != "done":
            self.tell(kind, *values)
        return kind == "done"


def work(handle: int) -> int:
    """Train and evaluate the models that the parent sends; the exit code of a worker."""
    pipe = Connection(handle)

    def say(*values: Any) -> None:
        with suppress(BrokenPipeError, ConnectionError):  # a parent that is gone ends our stdin
            pipe.send(values)

    try:
        with interrupt_on_signals():
            import_all(pipe.recv())
            threading.Thread(target=_end_with_stdin, daemon=True).start()
            _work(pipe, pipe.recv(), say)
    except KeyboardInterrupt:
        return 130
    except EOFError:  # the parent is gone already
        return 0
    except (CommandError, OSError) as error:
        say("error", error)
    except (MemoryError, RuntimeError) as error:
        memory = out_of_memory(error)
        if memory is None:
            raise
        say("error", CommandError(f"{memory}; lower `jobs`, `batch`, `train_length` or `lengths`"))
    return 0


def _work(pipe: Connection, given: Work, say: Callable[..., None]) -> None:
    from ..training.device import torch_threads

    with torch_threads(given.threads):
        while (job := pipe.recv()) is not None:
            model, rows = job
            given.run(model, rows, say, lambda result: say("result", result))
            say("done")


def _end_with_stdin() -> None:
    """Wait until the parent closes our stdin or dies; then a training saves its state and ends."""
    # Not sys.stdin: Python closes it at exit, and fails if this thread is reading it then.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
