"""Comparisons of tiny models, for the tests of `wavepe compare`."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import commands
import numpy as np
from processes import forked
from wavepe.cli import main

SPECS = ("none", "rope", "rope:inference_theta=scaled", "wavelet:scales=3")
# A user's file with an encoding of its own
LIN = """
import numpy as np
import wavepe

@wavepe.register_encoding
class Lin(wavepe.encodings.Encoding):
    name = "lin"
    slope: float = 0.1

    def slopes(self, heads):
        return np.full(heads, self.slope)
"""
TINY = [
    "--train-length", "16", "--lengths", "16", "32", "--batch", "2", "--layers", "1", "--heads",
    "2", "--head-dim", "6", "--eval-bytes", "128", "--lr", "0.02",
]  # fmt: skip


def text_in(folder):
    """Write twelve text files of 300 bytes each into a folder; return the folder."""
    letters = np.random.default_rng(0).integers(97, 105, size=(12, 300)).astype(np.uint8)
    for number, content in enumerate(letters):
        (folder / f"part{number}.txt").write_bytes(content.tobytes())
    return folder


def arguments(out, *more, data=None, steps=6, specs=SPECS):
    tiny = [*TINY, "--data", str(data or text()), "--steps", str(steps), "--save-every", "2"]
    return ["compare", "--encodings", *specs, *tiny, "--out", str(out), *map(str, more)]


def temporary():
    """Return a folder that is removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="wavepe-compare-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def text():
    return text_in(temporary())


def compare(out, *more, **options):
    """Run a comparison with a picture that is not drawn; return the exit code."""
    from matplotlib.figure import Figure

    def save(figure, path, **_):
        Path(path).write_bytes(b"")

    with mock.patch.object(Figure, "savefig", save):
        return main(arguments(out, *more, **options))


@functools.cache
def trained(*more, **options):
    """Return the folder of an uninterrupted comparison. A test that changes it copies it."""
    out = temporary() / "finished"
    assert main(arguments(out, *more, **options)) == 0
    return out


def results(out):
    return json.loads((out / "results.json").read_text())


def figures(out):
    return [(run["encoding"], run["seed"], run["perplexity"]) for run in results(out)["runs"]]


def refused(capsys, out, *more, code=2, **options):
    """Return the one line of a comparison that fails."""
    return commands.refused(capsys, *arguments(out, *more, **options), code=code)


def interrupt(monkeypatch, owner, name, when=lambda *_: True):
    """Press Ctrl-C after the next call of this function."""
    function = getattr(owner, name)

    def stopping(*given):
        out = function(*given)
        if when(*given):
            monkeypatch.setattr(owner, name, function)
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(owner, name, stopping)


# The command with workers that are forks of it, in place of new processes, which import torch for
# seconds. It prints their numbers. When a file is there, it sends a signal to itself ("command") or
# to its first worker ("worker"); or to itself when it has stopped its workers ("alone").
FORKING = r"""
import multiprocessing, os, signal, sys
from pathlib import Path
from matplotlib.figure import Figure
from wavepe.cli import main
from wavepe.common.files import TERMINATION_SIGNALS
from wavepe.experiments import executors

pattern, number, whom, *words = sys.argv[1:]
out = Path(words[words.index("--out") + 1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
workers = []
Figure.savefig = lambda figure, path, **_: Path(path).write_bytes(b"")  # as `compare` does


def begin(lock, places):
    # A new process has no handlers, and no file of the folder but the lock.
    for each in TERMINATION_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    names = {int(name): f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    for handle in [x for x, name in names.items() if os.path.realpath(name) == str(out.resolve())]:
        if handle != lock.fileno():
            os.close(handle)
    started(lock, places)
    lock.close()


def reading(stream):
    if not workers:
        workers.extend(sorted(worker.pid for worker in multiprocessing.active_children()))
        print(*workers, sep="\n", flush=True)
    yield from events(stream)
    if pattern and list(out.glob(pattern)):
        globals()["pattern"] = ""
        for pid in workers * (whom == "alone"):
            os.kill(pid, signal.SIGSTOP)
        os.kill(workers[0] if whom == "worker" else os.getpid(), int(number))


started, executors._begin = executors._begin, begin
events, executors._events = executors._events, reading
executors.get_context = lambda _: multiprocessing.get_context("fork")
sys.exit(main(words))
"""


def forks(words, pattern="", number=0, whom="command"):
    """Return the ended command, and the numbers of its workers."""
    done = forked("-c", FORKING, pattern, int(number), whom, *words)
    return done, [int(word) for word in done.stdout.split("\n")[:2]]
