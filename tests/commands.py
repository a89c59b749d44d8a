"""Run a command of `wavepe` in this process."""

from wavepe.cli import main


def run(capsys, *words):
    """Return the exit code of a command, and what it prints on stdout and stderr."""
    capsys.readouterr()  # what the test has printed before, such as bars of models that it loads
    code = main([*map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys, command, *words, code=2):
    """Return the one line of a command that fails and prints nothing else."""
    ended, out, err = run(capsys, command, *words)
    assert (ended, out) == (code, ""), err
    assert err.count("\n") == 1, err
    assert err.startswith(f"wavepe {command}: error: ")
    return err
