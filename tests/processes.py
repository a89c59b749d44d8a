"""Run Python in a new process.

`python` and `output` start an interpreter, which imports torch and transformers again: seconds.
`forked` runs the same words in a fork of a process that has imported both, but not wavepe. It
serves where the start of the interpreter is not what is tested. All workers of a run share it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

MODELS = """cohere2 exaone4 gemma gemma2 gemma3 gemma4 glm4 gpt_neox gpt_oss granite granite_swa
    inkling inkling2 llama ministral3 mistral mixtral olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 stablelm"""  # of wavepe.hf: a missing one takes longer in each fork
WARM = ("torch", *(f"transformers.models.{x}.modeling_{x}" for x in MODELS.split()))
WARM += ("matplotlib.pyplot", "rich")


def python(*words, cwd=None, **environment):
    """Run this interpreter; return the ended process. `environment` is added to ours."""
    command = [sys.executable, *map(str, words)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def forked(*words, cwd=None, **environment):
    """Run these words of the command line (-c, -m or a script) in a fork; return the ended process.

    `environment` is set before the words run, so it cannot change how torch is loaded.
    """
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        path = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
        job = {"words": words, "cwd": os.fspath(cwd or os.getcwd()), "files": files, "path": path}
        job["environment"] = {**os.environ, **environment}
        server = _server()
        print(json.dumps(job), file=server, flush=True)
        status = json.loads(server.readline())
        return subprocess.CompletedProcess(words, status, *(Path(f).read_text() for f in files))


def output(*words, start=python, **options):
    """Return the output of a run, which must succeed."""
    done = start(*words, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def gone(numbers):
    """Return whether all these processes end within a minute."""
    for _ in range(6000):
        if not any(os.path.exists(f"/proc/{number}") for number in numbers):
            return True
        time.sleep(0.01)
    return False


@functools.cache
def _server():
    """Connect to the process that forks. The first worker of a run that needs it starts it."""
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address = f"\0wavepe-tests-{run}"
    client = socket.socket(socket.AF_UNIX)
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)  # fails if another worker has started the process
            listener.listen()
            command = [sys.executable, __file__, str(listener.fileno()), *WARM]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
            atexit.register(server.kill)
        if not client.connect_ex(address):
            return client.makefile("rw")


def import_all(modules):
    """Import those of the modules that are installed."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _serve(handle, *modules):
    """Import the modules, then fork for each client, and there for each line that it sends."""
    import_all(modules)
    gc.collect()
    gc.freeze()  # collections of the forks need not look at what was imported
    with socket.socket(fileno=int(handle)) as listener:
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                os._exit(0)  # the process that started this one is gone
            client = listener.accept()[0]
            if not os.fork():
                break
            client.close()
    with client, client.makefile("rw") as lines:
        for line in lines:
            job = json.loads(line)
            child = os.fork()
            if not child:
                break
            status = os.waitpid(child, 0)[1]
            print(os.waitstatus_to_exitcode(status), file=lines, flush=True)
        else:
            os._exit(0)
    for stream, file in enumerate((os.devnull, *job["files"])):
        handle = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, stream)
        os.close(handle)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[1:1] = job["path"]
    os._exit(_run(*job["words"]))  # the end of an interpreter with torch takes a second


def _run(first, *rest):
    """Run words of the command line in this process; return the exit status."""
    sys.path[0] = "" if first in ("-c", "-m") else os.path.dirname(first)
    sys.argv = [first, *rest[first in ("-c", "-m") :]]
    status = 0
    try:
        if first == "-c":
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        status = error.code
        if not isinstance(status, int):
            print(status or "", end="\n" if status else "", file=sys.stderr)
            status = int(status is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    _serve(*sys.argv[1:])
