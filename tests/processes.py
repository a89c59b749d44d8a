"""Run Python in a new process."""

import os
import subprocess
import sys


def python(*words, cwd=None, **environment):
    """Run this interpreter; return the ended process. `environment` is added to ours."""
    command = [sys.executable, *map(str, words)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def output(*words, **options):
    """Return the output of a run, which must succeed."""
    done = python(*words, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
