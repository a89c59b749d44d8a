"""A worker process of ``wavepe compare --jobs``; the module `jobs` starts it."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .._files import interrupt_on_signals
from .data import Text
from .errors import CommandError, out_of_memory
from .folder import RunFolder
from .imports import import_all
from .settings import Settings


class Pipe:
    """The listener of a model that this process trains: it passes every call on to the parent."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    def send(self, kind: str, value: Any) -> None:
        """Send one line to the parent. A parent that is gone is the affair of `Jobs`."""
        with suppress(BrokenPipeError):
            self._output.write(json.dumps({kind: value}).encode() + b"\n")
            self._output.flush()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.send(name, values)


class Jobs:
    """The lines that the parent sends, read by a thread.

    The parent closes the pipe when no job is left. If the pipe ends during a job, the parent stops
    or is dead. Then this process ends itself by SIGTERM: a training saves its state after the step,
    and the folder is free for the next command.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Any:
        """Wait for the next line and return its value; None when the pipe has ended."""
        return self._lines.get()

    def done(self) -> None:
        """Say that the job is done, so that the pipe may end."""
        self._busy.clear()

    def _read(self) -> None:
        # Not sys.stdin: Python closes it at exit, and fails if this thread is reading it then.
        for line in open(0, "rb", closefd=False):  # noqa: SIM115
            self._busy.set()
            self._lines.put(json.loads(line))
        if self._busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        self._lines.put(None)


def main() -> int:
    """Train and evaluate the models that stdin names, until stdin ends."""
    pipe = Pipe(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # else prints of libraries would mix with the lines for the parent
    try:
        with interrupt_on_signals():
            _work(pipe)
    except KeyboardInterrupt:
        return 130
    except CommandError as error:
        pipe.send("error", str(error))
    except OSError as error:
        pipe.send("oserror", [error.errno, error.strerror or str(error), error.filename])
    except (MemoryError, RuntimeError) as error:
        memory = out_of_memory(error)
        if memory is None:
            raise
        pipe.send("error", f"{memory}; lower --jobs, --batch, --train-length or --lengths")
    return 0


def _work(pipe: Pipe) -> None:
    jobs = Jobs()
    first = jobs.next()
    if first is None:  # the parent is gone already
        return
    import_all(first["imports"])
    from .comparison import Runner, Work, models_of
    from .device import device_named, torch_threads

    handle, train_bytes = first["text"]
    content = np.memmap(os.fdopen(handle, "rb"), np.uint8, mode="r")
    text = Text(content[:train_bytes], content[train_bytes:], "", "")
    settings = Settings.from_dict(first["settings"])
    folder = RunFolder(Path(first["path"]), first["run"])
    with torch_threads(first["threads"]) as threads:
        device = device_named(first["device"])
        runner = Runner(Work(settings, folder, threads, first["save_every"], device), text)
        models = models_of(settings)
        while (job := jobs.next()) is not None:
            model = models[job["model"]]
            rows = [row for row in model.rows if row.name in job["rows"]]
            runner.run(model, rows, pipe, lambda result: pipe.send("result", result))
            jobs.done()
            pipe.send("done", True)


if __name__ == "__main__":
    sys.exit(main())
