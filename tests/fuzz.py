"""Random calls of every function, on every variant, against one reference.

    python tests/fuzz.py --minutes 10               a new seed each time, which is printed
    python tests/fuzz.py --minutes 10 --seed 7      the same calls again, as far as time allows
    python tests/fuzz.py --seed 7 --call rope:153   one call

A call depends on seed, function and number alone. The tests make calls of the seed "suite".
"""

import argparse
import collections
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; each core has a process

import fuzz_numpy
import pytest
import wavepe
from cases import EMULATED, HAS_TORCH, generator, using
from fuzz_draw import described
from variants import WIDE, all_of_them

HERE = Path(__file__).parent
OPS = ("attention", "merge_attention", "relative_bias", "rope", "rope_", "rope_qk", "rope_table")
OPS += ("wavelet_table",)
NAMES = list(fuzz_numpy.TARGETS)
if HAS_TORCH:
    NAMES += [f"ops.{name}" for name in OPS]

# Calls in a round; attention has the most, because it has the most options.
OFTEN = {"ops.attention": 8, "attention": 2}
ENOUGH = 20  # stop after so many failures
SANITIZED = "-fsanitize" in wavepe.build_info()["flags"]


class Failure(AssertionError):
    """A failed call: what went wrong, and how to repeat it."""


def variants():
    return [wavepe.variant()] if EMULATED else all_of_them()  # CUDA's kernels have no variants


def target_of(name):
    """Return a target. Only operators of torch load torch, which takes seconds."""
    if name in fuzz_numpy.TARGETS:
        return fuzz_numpy.TARGETS[name]
    module = importlib.import_module("fuzz_attention" if name == "ops.attention" else "fuzz_ops")
    return module.TARGETS[name]


def make_call(name, number, seed):
    """Compare one call on every variant to the oracle, and make a call that must be refused."""
    target, rng = target_of(name), generator("fuzz", seed, name, number)
    arguments = target.draw(rng)
    variant = "-"
    try:
        exact = target.judge(arguments)
        wide = None
        for variant in variants():
            with using(variant):
                found = target.call(arguments)
            target.check(found, exact, arguments)
            if variant in WIDE and hasattr(target, "same"):
                if wide is not None:
                    target.same(wide, found, arguments)
                wide = found
        refused(target, target.spoilt(rng, arguments))
    except Exception as error:
        given = "\n".join(f"    {k} = {described(x)}" for k, x in arguments.items())
        options = " --sanitize" if SANITIZED else ""
        raise Failure(
            f"{name}, call {number} of seed {seed}, on {variant}: {type(error).__name__}: {error}\n"
            f"{given}\n"
            f"  again: python tests/fuzz.py --seed {seed} --call {name}:{number}{options}"
        ) from error


def refused(target, arguments):
    try:
        target.refuse(arguments)
    except target.refused:
        return
    given = {k: described(x) for k, x in arguments.items()}
    raise AssertionError(f"accepted a bad argument: {given}")


def make_calls(name, numbers, seed="suite"):
    """Make calls for a test; the first failure raises an error."""
    for number in numbers:
        make_call(name, number, seed)


def parts(few, whole):
    """Return the numbers of calls for a test: a few, and those that only --all makes."""
    rest = pytest.param(range(few, whole), marks=pytest.mark.slow, id="more")
    return [pytest.param(range(few), id="few"), rest]


def work(seed, names, first, step, seconds, place):
    """Make the rounds first, first + step, ... until the time is up; return the counts.

    `place` holds the current call, in case it ends the process.
    """
    until, failures, count = time.monotonic() + seconds, 0, collections.Counter()
    turn = first
    with open(place, "w") as file:
        while time.monotonic() < until and failures < ENOUGH:
            for name in names:
                often = OFTEN.get(name, 1)
                for number in range(turn * often, turn * often + often):
                    say(file, {"call": f"{name}:{number}", "turn": turn, "count": count})
                    failures += attempt(name, number, seed)
                    count[name] += 1
            turn += step
        say(file, {"failures": failures, "turn": turn, "count": count})


def say(file, value):
    file.seek(0)
    file.write(json.dumps(value))
    file.truncate()
    file.flush()


def attempt(name, number, seed):
    """Return 1 if the call fails, and print the failure."""
    try:
        make_call(name, number, seed)
    except Failure as failure:
        print(f"\nFAILED {failure}", flush=True)
        return 1
    return 0


def run_workers(seed, names, seconds, workers):
    """Return (counts, failures) of several processes, which share the rounds."""
    count, failures = collections.Counter(), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        places = [Path(folder, str(i)) for i in range(workers)]
        given = [(seed, names, i, workers, seconds, place) for i, place in enumerate(places)]
        for counted, failed in pool.map(run_worker, *zip(*given, strict=True)):
            count.update(counted)
            failures += failed
    return count, failures


def run_worker(seed, names, first, step, seconds, place):
    """Return (counts, failures) of a process; one that dies is reported and replaced."""
    until, failures, count = time.monotonic() + seconds, 0, collections.Counter()
    while (left := until - time.monotonic()) > 0 and failures < ENOUGH:
        place.write_text("")
        code = start(seed, names, first, step, left, place).wait()
        last = json.loads(place.read_text() or "{}")
        count.update(last.get("count", {}))
        failures += last.get("failures", 1)
        if "failures" in last:
            break
        call = last.get("call")
        print(f"\nFAILED {call or 'the start'}: the process ended with {code}", flush=True)
        if not call:
            break
        options = " --sanitize" if SANITIZED else ""
        print(f"  again: python tests/fuzz.py --seed {seed} --call {call}{options}", flush=True)
        first = last["turn"] + step
    return count, failures


def start(seed, names, first, step, seconds, place):
    work = json.dumps([seed, names, first, step, seconds, str(place)])
    return subprocess.Popen([sys.executable, "-X", "faulthandler", __file__, "--work", work])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**9)))
    parser.add_argument("--call", metavar="FUNCTION:NUMBER", help="make this one call")
    parser.add_argument("--functions", default=",".join(NAMES), help="only these; of %(default)s")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sanitize", action="store_true", help="on the build of the sanitizers")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    given = arguments()
    if given.work:
        return work(*json.loads(given.work))
    if given.sanitize and not SANITIZED:
        import sanitizer_build

        return subprocess.run(
            [sys.executable, *sys.argv], env=sanitizer_build.environment()
        ).returncode
    if given.call:
        name, _, number = given.call.partition(":")
        return attempt(name, int(number), given.seed)
    names = given.functions.split(",")
    print(f"seed {given.seed}, variants {', '.join(variants())}: {', '.join(names)}", flush=True)
    count, failures = run_workers(given.seed, names, 60 * given.minutes, given.workers)
    for name in names:
        print(f"{count[name]:9} calls of {name}")
    print(f"seed {given.seed}: {failures} failures in {sum(count.values())} calls")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
