"""Make a fault at each write of a command.

The command must end with one line, and leave no file half written. When it is called again, it must
give the same files.

    python tests/faults.py                      every write of every case, every fault
    python tests/faults.py --cases compare --faults ENOSPC --every 5
"""

import argparse
import collections
import ctypes
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork

SOURCE = Path(__file__).with_name("faults.c")
FAULTS = {
    "ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM,
    "SIGHUP": -signal.SIGHUP, "SIGKILL": -signal.SIGKILL,
}  # fmt: skip
# compare, and with all that it can write; convert, by what becomes of weights. Each with the
# distance of the writes that test_faults.py tries
CASES = {"compare": 17, "tuned": 61, "copied": 11, "rewritten": 11}
TINY = (
    "--steps 4 --save-every 2 --train-length 16 --lengths 16 32 --batch 2 --layers 1 --heads 2 "
    "--head-dim 6 --eval-bytes 64 --threads 1"
)


@dataclass
class Ended:
    """The end of a run: exit status (minus a signal), stderr, count of writes, failed write."""

    status: int
    err: str
    writes: int
    last: str


def library(folder):
    """Compile faults.c; return the path of the library."""
    built = Path(folder, "faults.so")
    words = shlex.split(os.environ.get("CC", "cc"))
    done = subprocess.run([*words, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(built)])
    assert done.returncode == 0
    faults = ctypes.CDLL(str(built))
    faults.faults_last.restype = ctypes.c_char_p
    return faults


def run(faults, arguments, folder, at=0, fault=0):
    """Run `wavepe ARGUMENTS` in a fork; the write number `at` in `folder` has the fault."""
    from wavepe.cli import main

    with tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if not child:
            code = 99
            try:
                os.dup2(err.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                assert faults.faults_begin(os.fsencode(folder), at, fault) == 0
                code = main(arguments)
                sys.stderr.flush()
                told.write(f"{faults.faults_events()} {faults.faults_last().decode()}")
                told.flush()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        err.seek(0)
        told.seek(0)
        writes, _, last = told.read().partition(" ")
        return Ended(os.waitstatus_to_exitcode(status), err.read(), int(writes or 0), last)


def prepared(case, place):
    """Return the arguments of the command, and the folder that it writes to."""
    place, out = Path(place, "in"), Path(place, "out")
    place.mkdir()
    if case in ("compare", "tuned"):
        text = place / "text"
        text.write_text("".join(f"line {i * i % 997} of a text\n" for i in range(99)))
        words = ["compare", *TINY.split(), "--data", str(text), "--out", str(out / "run")]
        specs = ["none", "rope", "rope:inference_theta=scaled"]
        if case == "compare":
            return [*words, "--encodings", *specs], out
        words += ["--finetune", "32", "--finetune-steps", "2", "--keep", "1"]
        return [*words, "--protocols", "whole", "blocks", "--encodings", "none", "rope/none"], out
    import safetensors.torch
    import torch
    from convert_cases import stock

    source, target = place / "source", out / "new" / "target"
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # will be dropped
    stock(source, "sharded")
    if case == "rewritten":
        file = next(source.glob("model-00001-of-*.safetensors"))
        tensors = safetensors.torch.load(file.read_bytes()) | stored
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return ["convert", str(source), str(target), "shaw:clip=3"], out


def files(folder):
    """Return the bytes of every file by name, without times in JSON."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name + "/"] = None
        elif path.name in ("results.json", "training.json"):
            found[name] = without_times(json.loads(path.read_text()))
        elif path.name == "report.md":
            found[name] = re.sub(r"in \d+ s of training", "", path.read_text())
        else:
            found[name] = path.read_bytes()
    return found


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(x) for k, x in value.items() if k not in ("seconds", "date")}
    return [without_times(x) for x in value] if isinstance(value, list) else value


def check(ended, name, out):
    """Check the message and the files of a run with a fault."""
    fault = FAULTS[name]
    assert "Traceback" not in ended.err, "a traceback"
    assert "exception" not in ended.err.lower(), "an exception that nobody handled"
    if fault == -signal.SIGKILL:
        assert ended.status == fault, f"exit status {ended.status}"
        return
    left = [str(path.relative_to(out)) for path in out.rglob("*") if ".part" in path.name]
    assert not left, f"left {left}"
    if fault in (-signal.SIGTERM, -signal.SIGHUP):
        assert ended.status == fault, f"exit status {ended.status}"
    elif fault == -signal.SIGINT:
        assert ended.status == 130, f"exit status {ended.status}"
    elif ended.status:
        assert ended.status == 1, f"exit status {ended.status}"
        line = ended.err.splitlines()[-1]
        assert line.startswith("wavepe"), "no line of ours at the end"
        assert os.strerror(fault) in line, "does not say what happened"
        assert str(out) in line, "names no file"


def attempt(faults, arguments, out, whole, at, name):
    """Run with one fault, then again without; return the run with the fault."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    ended = run(faults, arguments, out, at, FAULTS[name])
    try:
        check(ended, name, out)
        if not ended.status and "could not write the model card" in ended.err:  # only a warning
            whole = {
                k: x for k, x in whole.items() if k in files(out) or Path(k).name != "README.md"
            }
        if files(out) != whole:
            again = run(faults, arguments, out)
            assert again.status == 0, f"called again: exit status {again.status}: {again.err}"
            found = files(out)
            differ = [k for k in sorted(whole.keys() | found.keys()) if k not in found
                      or k not in whole or whole[k] != found[k]]  # fmt: skip
            assert not differ, f"called again: {differ} differ"
    except AssertionError as error:
        raise AssertionError(
            f"{name} at write {at} ({ended.last}): {error}\n"
            f"    again: python tests/faults.py --cases CASE --faults {name} --at {at}\n{ended.err}"
        ) from None
    return ended


def sweep(case, names, every=1, at=None, shift=0):
    """Make faults at the writes of a case; return (writes, runs, messages of failures)."""
    place = tempfile.mkdtemp()
    try:
        faults = library(place)
        arguments, out = prepared(case, place)
        out.mkdir()
        first = run(faults, arguments, out)
        assert first.status == 0, first.err
        whole, failed, runs = files(out), [], 0
        for number, name in enumerate(names):
            numbers = [at] if at else range(1 + (shift + number) % every, first.writes + 1, every)
            for number in numbers:
                runs += 1
                try:
                    attempt(faults, arguments, out, whole, number, name)
                except AssertionError as error:
                    failed.append(str(error).replace("--cases CASE", f"--cases {case}"))
        return first.writes, runs, failed
    finally:
        shutil.rmtree(place)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--every", type=int, default=1, help="of the writes, each nth")
    parser.add_argument("--at", type=int, help="this write alone")
    given = parser.parse_args()
    import matplotlib.pyplot  # noqa: F401 (before the forks: once)
    import wavepe.hf  # noqa: F401
    from wavepe.experiments import comparison, progress, report  # noqa: F401

    count = collections.Counter()
    for case in given.cases.split(","):
        writes, runs, failed = sweep(case, given.faults.split(","), given.every, given.at)
        count.update(runs=runs, failed=len(failed))
        print(f"{case}: {writes} writes, {runs} faults, {len(failed)} failed", flush=True)
        for message in failed[:20]:
            print("FAILED", message, flush=True)
    return int(count["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
