"""The command `wavepe` itself: help, version, info, and what it says where a part is missing."""

import json
import subprocess
import sys

import pytest
import wavepe
from processes import output, python
from wavepe.cli import main
from wavepe.cli.environment import cpu_name, version_of

EXTRAS = {"torch": "torch", "transformers": "hf", "rich": "cli", "matplotlib": "plot"}


def run(capsys, *argv):
    code = main(argv)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"wavepe {wavepe.__version__}\n", "")


def test_help_names_commands_and_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # argparse breaks words that a narrow terminal cannot hold
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert "compare" in out
    assert "bench" in out
    assert "info" in out
    code, out, err = run(capsys, "compare", "--help")
    assert (code, err) == (0, "")
    options = ("--encodings", "--lengths", "--data", "--steps", "--seeds", "--out", "--threads")
    assert [option for option in options if option not in out] == []
    assert "wavelet:scales=6" in out


@pytest.mark.parametrize("argv", [[], ["swap"], ["--nonsense"], ["info", "--nonsense"]])
def test_wrong_arguments_are_one_line(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("wavepe")
    assert "--help" in err


def test_info(capsys):
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    facts = dict(line.split(None, 1) for line in out.splitlines() if line.split(None, 1)[1:])
    assert facts["wavepe"] == wavepe.__version__
    assert ", ".join(wavepe.variants()) in out
    for name in ("torch", "transformers", "matplotlib", "rich", "fairseq"):
        found = version_of(name)
        assert (found if found else "missing: pip install") in facts[name]


def test_info_as_json(capsys):
    code, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["variants here"] == list(wavepe.variants())
    assert facts["variant in use"] == wavepe.variant()
    assert facts["machine"] == cpu_name() != ""
    assert facts["built: torch"] == wavepe.build_info()["torch"]
    assert ("wavepe.ops" in facts) != ("wavepe.ops" in facts["missing"] or "torch" not in facts)


def test_info_without_any_optional_part(capsys, monkeypatch):
    monkeypatch.setattr("wavepe.cli.info.version_of", lambda name: None)
    code, out, _ = run(capsys, "info")
    assert code == 0
    for extra in ("torch", "hf", "fairseq", "plot", "cli", "pywt", "bfloat16"):
        assert f'missing: pip install ".[{extra}]" (in the folder of the wavepe checkout)' in out


@pytest.mark.parametrize("missing", EXTRAS)
def test_compare_names_the_command_for_a_missing_part(capsys, monkeypatch, tmp_path, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    text = tmp_path / "text.txt"
    text.write_bytes(b"some text " * 1000)
    code, out, err = run(
        capsys, "compare", "--data", str(text), "--lengths", "16", "--out", str(tmp_path / "out")
    )
    assert (code, out) == (1, "")
    lacking = [name for name in EXTRAS if name == missing or version_of(name) is None]
    extras = ",".join(sorted(EXTRAS[name] for name in lacking))
    install = f'{" and ".join(lacking)}: pip install ".[{extras}]" (in the folder of the wavepe'
    assert err == f"wavepe compare: error: wavepe compare needs {install} checkout)\n"
    assert not (tmp_path / "out").exists()


def test_as_a_module():
    assert output("-m", "wavepe", "--version") == f"wavepe {wavepe.__version__}\n"
    wrong = python("-m", "wavepe", "swap")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_failure_to_report():
    command = f"{sys.executable} -m wavepe info"
    done = subprocess.run(
        f"{command} | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_submodules_are_there_when_they_are_used():
    code = (
        'import sys, wavepe; assert "torch" not in sys.modules; '
        'assert "nn" in dir(wavepe); wavepe.analysis.rope_matrix(1, 4, 10.0); '
        'assert "torch" not in sys.modules'
    )
    output("-c", code)
    if wavepe.build_info()["torch"]:
        assert wavepe.nn.Rotary(8).theta == 10000
    with pytest.raises(AttributeError, match="has no attribute"):
        wavepe.nosuch  # noqa: B018


def test_the_numpy_front_end_loads_no_framework():
    program = "import sys, wavepe.cli; print([m for m in ('torch', 'rich') if m in sys.modules])"
    assert output("-c", program) == "[]\n"
