"""Several trainings at a time, each in a worker: a process of its own.

This process sends a worker the number of a model. The worker answers with lines of JSON: the calls
of its listener, the results of rows, and how it ended. Then it gets the next model.

Each worker has its own process group, so Ctrl-C reaches this process alone. Then this process
closes the workers' stdin, which also ends when this process is killed. A worker that sees the end
saves its state after the step, and stops. It holds the lock of the folder as long as it lives.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .._files import writing
from .errors import CommandError

if TYPE_CHECKING:
    from .comparison import Comparison, Model
    from .data import Text
    from .progress import ModelReport, Report

# The worker gets the import path of this process; with -m it would search the current folder first.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    f"from {__package__}.worker import main; sys.exit(main())"
)
_EVENTS = ("stage", "starts_at", "step", "evaluating", "note")


def run_jobs(comparison: Comparison, jobs: int, imports: list[str], report: Report) -> None:
    """Train and evaluate every model of the comparison, `jobs` of them at a time."""
    waiting = list(enumerate(comparison.models))
    with _text_file(comparison.text) as text, selectors.DefaultSelector() as selector:
        workers = []
        try:
            for _ in range(min(jobs, len(waiting))):
                worker = _Worker(comparison, imports, text)
                workers.append(worker)
                selector.register(worker.output, selectors.EVENT_READ, worker)
                worker.take(*waiting.pop(0), report)
            while selector.get_map():
                for key, _ in selector.select():
                    worker = key.data
                    if not worker.listen():
                        continue
                    if waiting:
                        worker.take(*waiting.pop(0), report)
                    else:
                        selector.unregister(worker.output)
                        worker.finish()
        except BaseException:
            _stop(workers)
            raise
        finally:
            for worker in workers:
                worker.close()


def _stop(workers: list[_Worker]) -> None:
    """Let every worker save its state and end; a second Ctrl-C kills them."""
    try:
        for worker in workers:
            worker.end_input()
        for worker in workers:
            while os.read(worker.output.fileno(), 1 << 16):  # read on, so that no worker blocks
                pass
            worker.process.wait()
    except BaseException:
        for worker in workers:
            worker.process.kill()
        raise


class _Worker:
    """A process that trains and evaluates, and the report of its current model."""

    def __init__(self, comparison: Comparison, imports: list[str], text: IO[bytes]) -> None:
        self.comparison = comparison
        work = comparison.work
        lock = comparison.folder.lock
        files = [handle.fileno() for handle in (text, lock) if handle is not None]
        first = {
            "settings": asdict(work.settings),
            "path": os.fspath(work.folder.path.absolute()),
            "run": work.folder.run,
            "threads": work.threads,
            "save_every": work.save_every,
            "device": work.device.place.type,
            "imports": imports,
            "text": [text.fileno(), len(comparison.text.train)],
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self._send(first)
        self._report: ModelReport | None = None
        self._name, self._unread = "", b""

    def take(self, number: int, model: Model, report: Report) -> None:
        """Send the worker its next model."""
        rows = [row.name for row in self.comparison.missing(model)]
        self._name = model.rows[0].name
        self._report = report.model(number, self._name)
        self._send({"model": number, "rows": rows})

    def listen(self) -> bool:
        """Read the worker's lines, and act on them; return whether its model is done.

        The worker must have written something, or ended.
        """
        said = os.read(self.output.fileno(), 1 << 16)
        if not said:
            code = self.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise CommandError(
                f"{self._name}: the process of this training ended with {how}; finished work is "
                "kept: to continue, give the same command again"
            )
        *lines, self._unread = (self._unread + said).split(b"\n")
        done = False
        for line in lines:
            ((kind, value),) = json.loads(line).items()
            if kind == "error":
                raise CommandError(value)
            if kind == "oserror":
                raise OSError(*value)
            if kind == "result":
                self.comparison.keep(value)
            elif kind in _EVENTS:
                getattr(self._report, kind)(*value)
            done = kind == "done"  # the last line of a model
        return done

    def finish(self) -> None:
        """Tell the worker that there are no more models, and wait until it ends."""
        self.end_input()
        self.process.wait()

    def end_input(self) -> None:
        """Close the worker's stdin. If it has a model, it saves the state and ends."""
        with suppress(BrokenPipeError):  # the worker did not read everything
            self.input.close()

    def close(self) -> None:
        """Close the pipes of an ended process."""
        self.end_input()
        self.output.close()

    def _send(self, value: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # `listen` will report how the worker ended
            self.input.write(json.dumps(value).encode() + b"\n")
            self.input.flush()


@contextmanager
def _text_file(text: Text) -> Iterator[IO[bytes]]:
    """Give a file without a name that holds the bytes of the text; every worker maps it."""
    with tempfile.TemporaryFile() as file:
        with writing(Path(tempfile.gettempdir(), "the text, for --jobs")):
            file.write(text.train.data)
            file.write(text.held_out.data)
            file.flush()
        yield file
