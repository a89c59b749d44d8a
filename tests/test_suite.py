"""The tools of this suite: pairs of parameters, forked processes, mutants."""

import itertools
import sys
from pathlib import Path

import pytest
from conftest import beyond_pairs
from processes import forked, python

sys.path.append(str(Path(__file__).parent / "mutants"))
import patches


def calls(*axes):
    """Return every combination of the values of parameters a, b, ..."""
    return [dict(zip("abcd", values, strict=False)) for values in itertools.product(*axes)]


def pairs(each):
    return {pair for params in each for pair in itertools.combinations(params.items(), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 4), (3, 2, 5, 4)], ids=str)
def test_what_is_kept_shows_every_pair(sizes):
    everything = calls(*map(range, sizes))
    spare = beyond_pairs(everything)
    kept = [call for place, call in enumerate(everything) if place not in spare]
    assert pairs(kept) == pairs(everything)
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(kept) < len(everything)


@pytest.mark.parametrize("sizes", [(), (5,), (3, 4)], ids=str)
def test_two_parameters_keep_all(sizes):
    assert beyond_pairs(calls(*map(range, sizes))) == set()


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import sys; print(sys.argv, sys.path[0])", "a", "b"),
        ("-c", "import sys; print('x', file=sys.stderr); sys.exit('stopped')"),
        ("-c", "import os; os.kill(os.getpid(), 15)"),
        ("-m", "wavepe", "--version"),
        ("-m", "wavepe", "no-command"),
        (Path(patches.__file__),),
    ],
    ids=["-c", "exit", "signal", "-m", "usage", "script"],
)
def test_a_fork_does_what_a_process_does(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted, found = python(*words), forked(*words)
    assert (found.returncode, found.stdout, found.stderr) == (
        wanted.returncode,
        wanted.stdout,
        wanted.stderr,
    )


def test_a_fork_has_its_own_environment_and_path(tmp_path):
    tmp_path.joinpath("of_the_path.py").write_text(
        "import os; print(os.environ['WORD'], os.getcwd())"
    )
    done = forked(
        "-c", "import of_the_path", cwd=tmp_path.parent, PYTHONPATH=str(tmp_path), WORD="x"
    )
    assert (done.stdout, done.stderr) == (f"x {tmp_path.parent}\n", "")


def test_a_fork_that_raises_fails():
    done = forked("-c", "raise ValueError('why')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: why\n")


@pytest.fixture(scope="module")
def mutants():
    return patches.read_all()


def test_every_mutant_fits_its_file(mutants):
    """A change of a line that a mutant names must change the mutant, too."""
    assert len(mutants) >= 200
    errors = []
    for mutant in mutants:
        try:
            assert mutant.apply() != (patches.ROOT / mutant.path).read_text(), mutant
        except (OSError, ValueError) as error:
            errors.append(str(error))
    assert not errors, "\n".join(errors)


def test_every_mutant_names_tests_that_exist(mutants):
    missing = []
    for mutant in mutants:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            path = patches.ROOT / file
            text = path.read_text() if path.is_file() else ""
            if not text or (name and f"def {name.partition('[')[0]}(" not in text):
                missing.append(f"{mutant}: no test {test}")
    assert not missing, "\n".join(missing)


def test_a_mutant_that_does_not_fit_is_refused():
    mutant = patches.Mutant("area", "README.md", "what", ("tests",), "no such text", "new")
    with pytest.raises(ValueError, match="its old text stands 0 times in the file"):
        mutant.apply()
