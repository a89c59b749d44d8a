"""The command `wavepe` itself: help, version, info, bench, and its errors."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wavepe
from cases import HAS_TORCH
from commands import refused, run
from processes import forked, output
from wavepe.cli import _EXAMPLES, _parser, main
from wavepe.common.errors import CommandError, out_of_memory
from wavepe.experiments.environment import cpu_name, version_of

ROOT = Path(__file__).parent.parent
EXTRAS = {"torch": "torch", "transformers": "hf", "rich": "cli", "matplotlib": "plot"}


# ------------------------------------------------------------------ help, version, info


@pytest.mark.parametrize("width", [40, 100])
def test_help_names_commands_and_options(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
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
    assert max(map(len, out.partition("options:")[2].splitlines())) <= width


@pytest.mark.parametrize("argv", [[], ["swap"], ["--nonsense"], ["info", "--nonsense"]])
def test_wrong_arguments_are_one_line(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("wavepe")
    assert err.endswith("(wavepe info --help)\n" if argv[:1] == ["info"] else "(wavepe --help)\n")


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["Compare"], "'compare'"),
        (["perplexty"], "'perplexity'"),
        (["compare", "--preset", "Wavelets"], "'wavelet'"),
        (["compare", "--task", "NEEDLE"], "'needle'"),
        (["compare", "--sed", "3"], "'--seeds'"),
        (["compare", "--encodings", "ALiBi"], "'alibi'"),
        (["compare", "--encodings", "rope+wavelett"], "'wavelet'"),
    ],
)
def test_misspelt_names_get_a_suggestion(capsys, argv, meant):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert f"did you mean {meant}?" in err


@pytest.mark.parametrize("command", _EXAMPLES)
def test_the_example_of_a_help_is_a_call(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "300")
    assert f"example: {_EXAMPLES[command]}\n" in run(capsys, command, "--help")[1]
    prog, *argv = shlex.split(_EXAMPLES[command])
    assert (prog, argv[0]) == ("wavepe", command)
    args = _parser(command, {}).parse_args(argv)
    if command == "bench":
        assert set(args.op) <= set(pytest.importorskip("benchmarks.bench").operators())


def test_info(capsys):
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    facts = dict(line.split(None, 1) for line in out.splitlines() if line.split(None, 1)[1:])
    assert facts["wavepe"] == wavepe.__version__
    assert ", ".join(wavepe.variants()) in out
    for name in ("torch", "transformers", "matplotlib", "rich", "fairseq"):
        version = version_of(name)
        assert (version if version else "missing: pip install") in facts[name]


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
    assert output("-m", "wavepe", "--version", start=forked) == f"wavepe {wavepe.__version__}\n"
    wrong = forked("-m", "wavepe", "swap")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1


@pytest.mark.skipif(not HAS_TORCH, reason="the hint is torch's")
def test_a_hint_of_several_lines_keeps_them():
    program = (
        "import sys; sys.modules['wavepe._torch'] = None\n"  # as in a build without torch
        "from wavepe.cli import main; main(['info'])\n"
        "try: import wavepe.ops\n"
        "except ImportError as error: print('---', error, sep='\\n')"
    )
    shown, _, hint = output("-c", program, start=forked).partition("---\n")
    first, *more = hint.splitlines()
    assert f"wavepe.ops         missing: {first}\n" in shown
    assert all(f"{'':19}{line}\n" in shown for line in more)


def test_submodules_are_there_when_they_are_used():
    if HAS_TORCH:
        assert wavepe.nn.Rotary(8).theta == 10000
    with pytest.raises(AttributeError, match="has no attribute"):
        wavepe.nosuch  # noqa: B018


# ------------------------------------------------------------------ streams

# With torch hidden, `info` takes no seconds.
SHELL = "import sys; sys.modules['torch'] = None; from wavepe.cli import main; sys.exit(main())"


def shell(redirections, *words):
    """Run the command with its streams redirected by a shell; return the ended process."""
    command = f'"{sys.executable}" -c "{SHELL}" {" ".join(words)} {redirections}'
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, shell=True, capture_output=True, text=True, env=env)


def test_a_reader_that_stops_early_is_no_failure_to_report():
    assert shell("| true", "info").stderr == ""


@pytest.mark.parametrize(
    ("closed", "shown"),
    [
        (">&-", False),
        ("2>&-", True),
        pytest.param(">&- 2>&-", False, marks=pytest.mark.slow),
        pytest.param("<&- >&-", False, marks=pytest.mark.slow),
    ],
)
def test_closed_streams(closed, shown):
    done = shell(closed, "info" if closed == ">&-" else "--version")
    assert (done.returncode, done.stderr, done.stdout != "") == (0, "", shown)
    done = shell(closed, "nosuch")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_disk_under_stdout_is_one_line():
    for words, name in ((["info"], "wavepe info"), (["--help"], "wavepe")):
        done = shell("> /dev/full", *words)
        assert done.returncode == 1
        assert done.stderr == f"{name}: error: cannot write to stdout: No space left on device\n"
    assert shell("> /dev/full 2>&1", "--help").returncode == 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_characters_that_stdout_does_not_take(encoding):
    """A file name may have bytes that are not text. They are escaped."""
    program = (
        f"import sys; sys.stdout.reconfigure(encoding='{encoding}', errors='strict')\n"
        "import wavepe.cli, wavepe.cli.info as info\n"
        "info.cpu_name = lambda: 'caf\\udce9 \\u00b1'; sys.exit(wavepe.cli.main(['info']))"
    )
    done = output("-c", program, start=forked)
    assert "caf\\udce9 " + ("\\xb1" if encoding == "ascii" else "±") in done
    output("-c", program.replace("info\n", "info; sys.stdout = None\n"), start=forked)  # closed


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CommandError("needs a part:\n    pip install part\n\nand another\n"), 1,
         "error: needs a part:\n    pip install part\nand another\n"),  # all of its lines
        (KeyboardInterrupt(), 130, "interrupted\n"),  # only what resumes says how
        (MemoryError(), 1, "error: out of memory; take smaller sizes, or free memory\n"),
        (RuntimeError("a mistake of ours"), None, None),  # is not hidden
    ],
)  # fmt: skip
def test_how_an_error_is_told(capsys, monkeypatch, error, code, message):
    def fail(args):
        raise error

    monkeypatch.setattr("wavepe.cli.info.run", fail)
    if code is None:
        with pytest.raises(RuntimeError, match="of ours"):
            main(["info"])
    else:
        assert run(capsys, "info") == (code, "", f"wavepe info: {message}")


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_out_of_memory_is_recognised(module):
    empty = pytest.importorskip(module).empty
    for sizes, words in (([2**57], "out of memory (asked for "), ([2**62, 4], "out of memory")):
        with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
            empty(sizes)
        assert out_of_memory(caught.value).startswith(words)
    assert out_of_memory(MemoryError()) == "out of memory"
    gpu = RuntimeError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total of")
    assert out_of_memory(gpu) == "out of memory on the GPU (asked for 20.50 GiB)"
    assert out_of_memory(RuntimeError("shapes differ")) is None


# ------------------------------------------------------------------ bench

QUICK = ("wavelet_table", "--quick", "--repeats", "2", "--variants", "portable")
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="operators of torch are timed")


@needs_torch
def test_bench(capsys, tmp_path):
    file = tmp_path / "results.json"
    before = wavepe.variant()
    code, out, _ = run(capsys, "bench", *QUICK, "--json", str(file))
    assert code == 0
    assert wavepe.variant() == before
    assert "ops.wavelet_table" in out
    rows = json.loads(file.read_text())["rows"]
    assert {row["variant"] for row in rows if row["who"] == "wavepe"} == {"portable"}
    assert all(row["ok"] for row in rows if row["who"] == "wavepe")


@needs_torch
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ropy"], "unknown operator 'ropy'"),
        (["rope", "--quick", "--full"], "--full: not allowed with argument --quick"),
        (["rope", "--json", "/none/results.json"], "/none/results.json: No such file"),
        (["rope", "--repeats", "x"], "--repeats"),
    ],
)
def test_bad_options_of_bench(capsys, words, message):
    assert message in refused(capsys, "bench", *words)


@needs_torch
@pytest.mark.slow
def test_from_an_installed_package(tmp_path):
    """The files that an installation gets, and this build's modules among them."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    output("setup.py", "--quiet", "build_py", f"--build-lib={tmp_path}", cwd=ROOT)

    for name in ("_numpy", "_torch"):
        shutil.copy(Path(sys.modules[f"wavepe.{name}"].__file__), tmp_path / "wavepe")
    held = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"wavepe/py.typed", "wavepe/_numpy.pyi", "wavepe/benchmarks/bench_rope.py"} <= held
    assert not [name for name in held if Path(name).suffix not in (".py", ".pyi", ".typed", ".so")]
    shown = output("-m", "wavepe", "bench", *QUICK, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "ops.wavelet_table" in shown
    assert "(no commit)" in shown  # so it is not the repository's
