"""The commands as programs: without fairseq, with a user's own --user-dir, and the folder that
fairseq's own commands take."""

import importlib.metadata
import runpy
import sys

import pytest
import wavepe
from fairseq_cases import (
    GPT,
    MARKS,
    NEEDS_SHIM,
    STOCK,
    arguments,
    configuration,
    fairseq,
    models,
    process,
    record_of,
    torch,
    without_plugin,
)
from processes import python
from wavepe.fairseq.model import WavePELanguageModel

pytestmark = MARKS

COMMANDS = {
    "wavepe-fairseq-train": "train",
    "wavepe-fairseq-eval-lm": "eval_lm",
    "wavepe-fairseq-preprocess": "preprocess",
    "wavepe-fairseq-generate": "generate",
}


def run(script, *given):
    return python("-W", "ignore", "-c", script, *given)


def test_installed_scripts():
    installed = importlib.metadata.entry_points(group="console_scripts")
    ours = {script.name: script for script in installed if script.name.startswith("wavepe-fair")}
    if not ours:
        pytest.skip("wavepe is not installed here")
    assert {name: script.value for name, script in ours.items()} == {
        name: f"wavepe.fairseq.commands:{function}" for name, function in COMMANDS.items()
    }
    assert all(callable(script.load()) for script in ours.values())


# --------------------------------------------------------------- without what they need

HIDDEN = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
from wavepe.fairseq.commands import {function}
{function}()
"""


@pytest.mark.parametrize(
    ("package", "function", "told"),
    [
        ("fairseq", "train", "pip install --no-deps fairseq==0.12.2"),
        pytest.param("omegaconf", "eval_lm", "omegaconf", marks=pytest.mark.slow),
        ("torch", "generate", "torch"),
    ],
)
def test_without_a_package(package, function, told):
    ended = run(HIDDEN.format(package=package, function=function))
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("wavepe-fairseq: ")
    assert told in line


def test_importing_the_package_loads_nothing():
    script = (
        "import sys, wavepe.fairseq\n"
        "print([name for name in ('torch', 'fairseq', 'hydra') if name in sys.modules])"
    )
    assert run(script).stdout == "[]\n"


# --------------------------------------------------------------- --user-dir


def test_the_folder_for_user_dir(capsys, monkeypatch):
    """fairseq's own parser loads it, and then knows --pos-enc."""
    runpy.run_module("wavepe.fairseq", run_name="__main__")
    folder = capsys.readouterr().out.strip()
    assert folder == wavepe.fairseq.USER_DIR
    without_plugin(monkeypatch)
    monkeypatch.delitem(sys.modules, "wavepe_fairseq", raising=False)
    vars(fairseq.utils.import_user_module).get("memo", set()).discard(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    line = arguments("unused", "--pos-enc", "alibi")
    with pytest.raises(SystemExit):
        configuration(line)
    assert models.ARCH_MODEL_REGISTRY["transformer_lm"] is STOCK
    cfg = configuration([*line, "--user-dir", folder])
    assert cfg.model.pos_enc == "alibi"
    assert models.ARCH_MODEL_REGISTRY["transformer_lm"] is WavePELanguageModel


def test_registering_again_changes_nothing():
    before = dict(models.ARCH_MODEL_REGISTRY), dict(models.MODEL_REGISTRY)
    wavepe.fairseq.register()
    assert before == (models.ARCH_MODEL_REGISTRY, models.MODEL_REGISTRY)


OWN = """
import dataclasses
import numpy as np
import wavepe
from fairseq.models import register_model_architecture

@wavepe.register_encoding
@dataclasses.dataclass(frozen=True)
class Even(wavepe.encodings.Encoding):
    name = "even"
    entry = "slope"
    slope: float = 0.1

    def slopes(self, heads):
        return np.full(heads, self.slope)

@register_model_architecture("transformer_lm", "transformer_lm_of_a_user")
def small(args):
    args.decoder_layers = 1
    args.decoder_embed_dim = args.decoder_input_dim = args.decoder_output_dim = 32
    args.decoder_attention_heads = 4
"""


@pytest.mark.slow
def test_a_user_dir_of_ones_own(tmp_path):
    """With an encoding and an architecture, next to our command and in a process of its own."""
    own = tmp_path / "own_models"
    own.mkdir()
    (own / "__init__.py").write_text(OWN)
    given = ("--user-dir", own, "--pos-enc", "even:slope=0.25", "--max-update", 3)
    recipe = (*GPT[2:], "--arch", "transformer_lm_of_a_user")
    line = arguments(tmp_path / "run", *given, recipe=recipe)
    with process("train", *line) as running:
        out, _ = running.communicate()
    assert running.returncode == 0, out
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    found = record_of(state["model"])["encoding"]
    assert (found["name"], found["slope"]) == ("even", 0.25)


@pytest.mark.skipif(NEEDS_SHIM, reason="fairseq 0.12.2 does not start by itself")
def test_fairseqs_own_command_with_our_user_dir(tmp_path):
    line = arguments(tmp_path, "--user-dir", wavepe.fairseq.USER_DIR, "--pos-enc", "wavelet")
    ended = run("from fairseq_cli.train import cli_main; cli_main()", *line, "--max-update", 3)
    assert ended.returncode == 0, ended.stderr
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert record_of(state["model"])["encoding"]["name"] == "wavelet"
