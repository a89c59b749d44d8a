"""Plant each mutant in a copy of the tree, run its tests, and say which mutants survive.

    python tests/mutants/run.py                  those in files changed since HEAD~1
    python tests/mutants/run.py --since main     those in files changed since another commit
    python tests/mutants/run.py --area ops hf    those of these areas
    python tests/mutants/run.py --match "cache key"  those with these words in their first line
    python tests/mutants/run.py --all            all of them
    python tests/mutants/run.py --all --clean    the same tests without faults: they must pass

A worker has a copy in build/mutants/. It loads torch and transformers once, and a fork of it runs
the tests of each mutant up to the first failure: those of `make test`, and if all pass, those of
`make test-all`, too. What pytest said lies in build/mutants/logs.
"""

import argparse
import collections
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from patches import ROOT, read_all

sys.path.append(str(ROOT / "tests"))
from processes import WARM, import_all

BUILD = ROOT / "build" / "mutants"
LOGS = BUILD / "logs"
SECONDS = 900  # a mutant whose tests take longer counts as killed
# Set before torch is loaded, as tests/conftest.py does.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # it would be that of a fault
    "WAVEPE_TEST_VARIANT": "1",
    "WAVEPE_NVCC": "",
}
KILLED, KILLED_LATE, SURVIVED, BROKEN = "killed", "killed by --all", "survived", "broken"
# pytest's exit status: tests failed; a module could not be imported; None: it took too long
FOUND = (1, 2, None)
PASSED = (0, 5)  # 5: every test is of the long tail
FAIRSEQ = ROOT / ".venv-fairseq/bin/python"


# ---- a worker's copy of the tree -----------------------------------------------------------------


def copy_tree(tree):
    """Bring the copy up to date, built modules too; with their times, so that none is compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    paths = {Path(line) for line in listed if line and (ROOT / line).is_file()}
    paths |= {path.relative_to(ROOT) for path in ROOT.glob("python/wavepe/*.so")}
    for path in tree.rglob("*"):
        kept = path.relative_to(tree)
        if path.is_file() and kept not in paths and kept.parts[0] != "build":
            path.unlink()
    for path in paths:
        source, target = ROOT / path, tree / path
        if not target.exists() or stamp(target) != stamp(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def stamp(path):
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def objects_of(path, tree):
    """Return the objects that a fault in this C file concerns. Kernels: those of AVX2 alone."""
    part = Path(path).parts[1]
    name = Path(path).stem
    patterns = {
        "kernels": ["wpe_avx2/**/*.o", "**/numpy/module.o"],
        "numpy": ["**/numpy/module.o"],
        "torch": [f"**/torch/{name}.o" if path.endswith(".cpp") else "**/torch/*.o"],
        "cuda": ["**/cuda/*.o"],
        "decoding.h": ["**/numpy/module.o", "**/torch/attention*.o"],
    }.get(part, ["**/*.o"])
    return [found for p in patterns for found in tree.glob(f"build/temp*/{p}")]


def build(tree):
    wrapper = f"sh {tree / 'tests/mutants/cc.sh'}"
    tools = {"CC": f"{wrapper} gcc", "CXX": f"{wrapper} g++"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | tools,
        capture_output=True,
        text=True,
    )
    return done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def planted(mutant, tree):
    """Plant a fault for the time of a block. Yield False if it does not compile."""
    path = tree / mutant.path
    before, text = path.stat(), mutant.apply(tree)
    original = path.read_text()
    path.write_text(text)
    compiled = mutant.path.startswith("csrc/")
    try:
        if compiled:
            path.touch()
            for each in objects_of(mutant.path, tree):
                each.unlink()
            right, message = build(tree)
            if not right:
                print(f"{mutant}: does not compile:\n{message[-3000:]}", file=sys.stderr)
            yield right
        else:
            yield True
    finally:
        path.write_text(original)
        if compiled:
            for each in objects_of(mutant.path, tree):
                each.unlink()
        else:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- the tests of a mutant -----------------------------------------------------------------------


def run_tests(tests, tree, log, stop=True):
    """Run these tests of the copy in a fork, and return pytest's exit status, or None: too long."""
    arguments = ["-q", "-p", "no:cacheprovider", *["-x"] * stop, *tests]
    # of plugins that torch or transformers have imported
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    if any("fairseq" in test for test in tests):
        command = [str(FAIRSEQ), "-m", "pytest", *arguments]
        environment = os.environ | {"PYTHONPATH": str(tree / "python")}
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        pid = process.pid
    else:
        pid = os.fork()
        if pid == 0:
            in_fork(arguments, tree, log)
    return wait(pid)


def in_fork(arguments, tree, log):
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "python")
    sys.path[:0] = [str(tree / "python"), str(tree / "tests"), str(tree)]
    sys.path = [path for path in sys.path if not path.startswith(str(ROOT / "tests"))]
    del sys.modules["processes"]  # the copy has its own
    sys.argv = ["pytest", *arguments]
    status = 3
    try:
        import pytest

        status = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def wait(pid):
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                # a process that a signal ended: the fault crashed it
                return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
            time.sleep(0.05)
    except KeyboardInterrupt:
        os.killpg(pid, signal.SIGKILL)
        raise
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def outcome_of(tests, tree, log):
    for found, tier in ((KILLED, "--quick"), (KILLED_LATE, "--all")):
        status = run_tests([tier, *tests], tree, log)
        if status not in PASSED:
            return found if status in FOUND else BROKEN
    return SURVIVED if status == 0 else BROKEN


def work(number, jobs, results):
    """Run mutants until the queue is empty."""
    tree = BUILD / f"tree-{number}"
    import_all([*WARM, "pytest", "hypothesis"])
    ready = False
    while (job := jobs.get()) is not None:
        index, mutant, clean = job
        began = time.monotonic()
        log = LOGS / f"{index:03}-{mutant.area}.txt"
        if mutant.path.startswith("csrc/") and not ready:
            right, message = build(tree)  # once; the copy has no objects yet
            assert right, message
            ready = True
        try:
            if clean:
                status = run_tests(["--all", *mutant.tests], tree, log, stop=False)
                outcome = {0: "passed", 1: "failed"}.get(status, BROKEN)
            else:
                with planted(mutant, tree) as right:
                    outcome = outcome_of(mutant.tests, tree, log) if right else BROKEN
        except Exception as error:
            print(f"{mutant}: {type(error).__name__}: {error}", file=sys.stderr)
            outcome = BROKEN
        results.put((index, outcome, time.monotonic() - began))


# ---- which mutants, and the report ---------------------------------------------------------------


def changed(since):
    """Return the paths that differ from a commit, new files too."""
    commands = (["diff", "--name-only", since], ["ls-files", "-o", "--exclude-standard"])
    done = [subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True) for c in commands]
    if done[0].returncode:
        sys.exit(f"mutants: {done[0].stderr.strip()}")
    return {line for each in done for line in each.stdout.split("\n")}


def chosen(arguments):
    mutants = list(enumerate(read_all()))
    if arguments.area:
        known = {mutant.area for _, mutant in mutants}
        if unknown := set(arguments.area) - known:
            sys.exit(f"mutants: no area {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return [each for each in mutants if each[1].area in arguments.area]
    if arguments.match:
        return [each for each in mutants if arguments.match in str(each[1])]
    if arguments.all:
        return mutants
    paths = changed(arguments.since)
    return [each for each in mutants if paths & each[1].files]


def run_all(mutants, workers, clean):
    """Yield (mutant, outcome, seconds) as they come. C comes last: it changes the built modules."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    os.environ.update(ENVIRONMENT)
    jobs, results = multiprocessing.Queue(), multiprocessing.Queue()
    for number in range(workers):
        copy_tree(BUILD / f"tree-{number}")
    for index, mutant in sorted(mutants, key=lambda each: each[1].path.startswith("csrc/")):
        jobs.put((index, mutant, clean))
    for _ in range(workers):
        jobs.put(None)
    processes = [
        multiprocessing.Process(target=work, args=(n, jobs, results)) for n in range(workers)
    ]
    for process in processes:
        process.start()
    by_index = dict(mutants)
    for _ in mutants:
        index, outcome, seconds = results.get()
        yield index, by_index[index], outcome, seconds
    for process in processes:
        process.join()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--area", nargs="*", default=[])
    parser.add_argument("--match")
    parser.add_argument("--since", default="HEAD~1")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    mutants = chosen(arguments)
    if arguments.clean:
        mutants = list({mutant.tests: (index, mutant) for index, mutant in mutants}.values())
    if not FAIRSEQ.exists() and any(mutant.area == "fairseq" for _, mutant in mutants):
        print("without those of fairseq: make .venv-fairseq/built brings it")
        mutants = [each for each in mutants if each[1].area != "fairseq"]
    if not mutants:
        print("no such mutant; --all runs all of them")
        return 0
    counts, survivors = collections.defaultdict(collections.Counter), []
    for index, mutant, outcome, seconds in run_all(mutants, arguments.workers, arguments.clean):
        counts[mutant.area][outcome] += 1
        print(f"{index:03} {outcome:15} {seconds:4.0f} s  {mutant}", flush=True)
        if outcome in (SURVIVED, BROKEN, "failed"):
            survivors.append(f"{index:03} {outcome} {mutant}")
    print()
    for area, count in sorted(counts.items()):
        print(f"{area:10} " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items())))
    print("\n".join(["", *sorted(survivors)]) if survivors else "\nno mutant survived")
    return bool(survivors)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
