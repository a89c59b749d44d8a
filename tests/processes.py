"""Python in a process of its own."""

import os
import subprocess
import sys


def python(*words, cwd=None, **environment):
    """The ended run of this interpreter, its outputs as text; `environment` is added to ours."""
    command = [sys.executable, *map(str, words)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def output(*words, **options):
    """What a run prints, which must succeed."""
    done = python(*words, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
