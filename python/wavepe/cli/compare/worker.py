"""A process of ``wavepe compare --jobs``: see `jobs`, which starts it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..._files import interrupt_on_signals
from ..errors import CommandError, out_of_memory
from ..imports import import_all
from .data import Text
from .folder import RunFolder
from .settings import Settings


class Pipe:
    """The listener of a model that is trained here: it tells the parent."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output

    def tell(self, kind: str, value: Any) -> None:
        self._output.write(json.dumps({kind: value}).encode() + b"\n")
        self._output.flush()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.tell(name, values)


def main() -> int:
    """Take models from stdin until it ends."""
    pipe = Pipe(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what libraries print must not mix with the lines for the parent
    try:
        with interrupt_on_signals():
            _work(pipe)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the parent is gone
        return 1
    except CommandError as error:
        pipe.tell("error", str(error))
    except OSError as error:
        pipe.tell("oserror", [error.errno, error.strerror or str(error), error.filename])
    except (MemoryError, RuntimeError) as error:
        memory = out_of_memory(error)
        if memory is None:
            raise
        pipe.tell("error", f"{memory}; lower --jobs, --batch, --train-length or --lengths")
    return 0


def _work(pipe: Pipe) -> None:
    line = sys.stdin.buffer.readline()
    if not line:  # the parent is gone already
        return
    first = json.loads(line)
    import_all(first["imports"])
    from ..device import device_named, torch_threads
    from .comparison import Runner, Work, models_of

    handle, train_bytes = first["text"]
    content = np.memmap(os.fdopen(handle, "rb"), np.uint8, mode="r")
    text = Text(content[:train_bytes], content[train_bytes:], "", "")
    settings = Settings.from_dict(first["settings"])
    folder = RunFolder(Path(first["path"]), first["run"])
    with torch_threads(first["threads"]) as threads:
        device = device_named(first["device"])
        runner = Runner(Work(settings, folder, threads, first["save_every"], device), text)
        models = models_of(settings)
        for line in sys.stdin.buffer:
            job = json.loads(line)
            model = models[job["model"]]
            rows = [row for row in model.rows if row.name in job["rows"]]
            runner.run(model, rows, pipe, lambda result: pipe.tell("result", result))
            pipe.tell("done", True)


if __name__ == "__main__":
    sys.exit(main())
