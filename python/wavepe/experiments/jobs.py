"""The trainings of a comparison, several at a time, each in a worker: a process of its own.

Workers are started with subprocess, because multiprocessing would run the script that calls
`compare` once more in each of them. Ctrl-C reaches this process alone, which closes their stdin. A
worker whose stdin ends saves its state after the step, and stops. Until then it locks the folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ..common.errors import CommandError, out_of_memory
from ..common.files import interrupt_on_signals
from .imports import import_all

if TYPE_CHECKING:
    from .comparison import Comparison
    from .progress import Report

# The worker gets the import path of this process; with -m it would search the current folder first.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    f"from {__name__} import work; sys.exit(work(int(sys.argv[1])))"
)


def run_jobs(comparison: Comparison, jobs: int, imports: Sequence[str], report: Report) -> None:
    """Train and evaluate every model of the comparison, `jobs` of them at a time."""
    if jobs == 1:
        for number, model in enumerate(comparison.models):
            tell = partial(comparison.tell, report, number)
            comparison.work.run(model, comparison.missing(model), tell)
        return
    waiting = list(range(len(comparison.models)))
    workers: list[Worker] = []
    try:
        for _ in range(min(jobs, len(waiting))):
            workers.append(Worker(comparison, imports, report))
            workers[-1].take(waiting.pop(0))
        busy: dict[Any, Worker] = {worker.pipe: worker for worker in workers}
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]
                if worker.listen() and waiting:
                    worker.take(waiting.pop(0))
                elif worker.is_done:
                    worker.send(None)
                    busy.pop(pipe).process.wait()
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

    def __init__(self, comparison: Comparison, imports: Sequence[str], report: Report) -> None:
        self.comparison, self.report = comparison, report
        self.pipe, theirs = Pipe()
        kept = [theirs.fileno(), comparison.folder.lock]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(theirs.fileno()), *sys.path],
            stdin=subprocess.PIPE, pass_fds=kept, start_new_session=True,
        )  # fmt: skip
        self.life: Any = self.process.stdin
        theirs.close()
        self.send(list(imports))  # before what may need them
        self.send(comparison.work)

    def take(self, number: int) -> None:
        """Send the worker its next model."""
        self.model, self.is_done = self.comparison.models[number], False
        self.tell = partial(self.comparison.tell, self.report, number)
        self.tell("doing", self.model.spec)
        self.send((self.model, self.comparison.missing(self.model)))

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
            advice = "finished work is kept: to continue, give the same command again"
            ended = f"{self.model.spec}: the process of this training ended with {how}"
            raise CommandError(f"{ended}; {advice}") from None
        if kind == "error":
            raise values[0]
        self.is_done = kind == "done"
        if not self.is_done:
            self.tell(kind, *values)
        return self.is_done


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
            todo = pipe.recv()
            from ..training.device import torch_threads

            with torch_threads(todo.threads):
                while (job := pipe.recv()) is not None:
                    todo.run(*job, say)
                    say("done")
    except KeyboardInterrupt:
        return 130
    except EOFError:  # the parent is gone already
        pass
    except (CommandError, OSError, MemoryError, RuntimeError) as error:
        memory = out_of_memory(error)
        if memory is None and isinstance(error, RuntimeError):
            raise
        advice = "lower `jobs`, `batch`, `train_length` or `lengths`"
        say("error", CommandError(f"{memory}; {advice}") if memory else error)
    return 0


def _end_with_stdin() -> None:
    """Wait until the parent closes our stdin or dies; then a training saves its state and ends."""
    # Not sys.stdin: Python closes it at exit, and fails if this thread is reading it then.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
