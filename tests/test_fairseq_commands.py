"""The commands for fairseq: --pos-enc and its shorthands, --user-dir, what is missing, and
examples/fairseq_demo.py at toy size."""

import importlib.metadata
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import fairseq_cases as cases
import numpy as np
import pytest
import wavepe
from fairseq_cases import torch
from processes import forked, python
from wavepe.fairseq.model import WavePELanguageModel

pytestmark = cases.MARKS

OF_TRANSFORMER_LM = [
    arch for arch, name in cases.models.ARCH_MODEL_NAME_REGISTRY.items() if name == "transformer_lm"
]


# --------------------------------------------------------------- --pos-enc
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("wavelett", ["unknown encoding 'wavelett', did you mean 'wavelet'?"]),
        ("learned", wavepe.encodings.known_encodings()),
        ("", ["needs a name first"]),
        ("wavelet:knd=haar",
         ["knd", "kind", "scales", "min_scale", "fixed_scale", "mirrored", "learned"]),
        ("wavelet:kind=har", ["unknown wavelet kind 'har'"]),
        ("rope:theta=", ["needs key=value"]),
        ("rope:theta=64,theta=64", ["gives theta twice"]),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_told_before_anything_is_done(spec, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        cases.command("train", *cases.arguments("unused", "--pos-enc", spec))
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: argument --pos-enc: " in line
    assert [words for words in expected if words not in line] == []


@pytest.mark.parametrize(
    "spec",
    [
        "wavelet:kind=haar,scales=1+2.5+8+16",
        "rope:theta=1e+20,fraction=0.25,interleaved=true",
        "rope:type=longrope,short_factor=1+1+1+1,long_factor=1+2+4+8.5,factor=2",
        "sinusoidal:theta=length",
        "wavelet:scales=3+",
    ],
)
def test_a_spec_survives_the_configuration(spec):
    """Hydra reads : , = + as its own grammar if they are not quoted."""
    composed_spec = cases.configuration(cases.arguments("unused", "--pos-enc", spec)).model.pos_enc
    assert wavepe.encoding(composed_spec) == wavepe.encoding(spec)


# --------------------------------------------------------------- architectures
def parsed(*words, recipe=cases.WIKI103):
    return cases.options.parse_args_and_arch(
        cases.options.get_training_parser(), cases.arguments("unused", *words, recipe=recipe)
    )


def test_every_architecture_is_served():
    of_name = {
        arch for arch in cases.models.ARCH_MODEL_REGISTRY if arch.startswith("transformer_lm")
    }
    other_models = {"transformer_lm_megatron", "transformer_lm_megatron_11b"}
    assert of_name == {*OF_TRANSFORMER_LM, *other_models}
    assert len(of_name) >= 20
    served = {cases.models.ARCH_MODEL_REGISTRY[arch] for arch in OF_TRANSFORMER_LM}
    assert served == {WavePELanguageModel}


@pytest.mark.parametrize("arch", OF_TRANSFORMER_LM)
def test_every_architecture_takes_it(arch):
    words = ("--pos-enc", "rope", "--rope-theta", 64, "--arch", arch)
    args, plain = parsed(*words), parsed("--arch", arch)
    assert (args.pos_enc, args.rope_theta) == ("rope", 64)
    chosen = {"pos_enc", "rope_theta"}
    assert {k: v for k, v in vars(args).items() if k not in chosen} == vars(plain)


def test_other_models_do_not_take_it():
    with pytest.raises(SystemExit):
        parsed("--pos-enc", "rope", "--arch", "lightconv_lm")


def test_learned_positions_of_an_architecture_are_replaced():
    """GPT-3's are learned where no other positions are asked for."""
    recipe = (*cases.GPT[2:], "--arch", "transformer_lm_gpt3_small")
    cfg = cases.configuration(cases.arguments("unused", "--pos-enc", "alibi", recipe=recipe))
    task = cases.tasks.setup_task(cfg.task)
    decoder = task.build_model(cfg.model).decoder
    assert cfg.model.decoder_learned_pos
    assert decoder.embed_positions is None
    assert decoder.max_positions() >= 10**6
    cfg = cases.configuration(cases.arguments("unused", recipe=recipe))
    assert task.build_model(cfg.model).decoder.embed_positions is not None


def test_a_configuration_of_hydra():
    sizes = ("decoder_layers=1", "decoder_embed_dim=32", "decoder_attention_heads=4")
    line = ["task=language_modeling", f"task.data={cases.corpus()}", "model=transformer_lm"]
    line += [f"model.{key}" for key in ("pos_enc='wavelet:scales=1+3'", *sizes)]
    cfg = cases.composed(*line)
    made = cases.tasks.setup_task(cfg.task).build_model(cfg.model)
    assert str(made.decoder.position_encoding.encoding) == "wavelet:scales=1+3"


# --------------------------------------------------------------- shorthands
@pytest.mark.parametrize(
    ("spec", "shorthands", "wanted"),
    [
        ("rope", {"rope_theta": 64.0}, "rope:theta=64"),
        ("rope:fraction=0.5", {"rope_theta": 64.0}, "rope:theta=64,fraction=0.5"),
        ("rope:theta=64", {"rope_theta": 64.0}, "rope:theta=64"),
        ("wavelet", {"wavelet_kind": "haar"}, "wavelet:kind=haar"),
        ("wavelet", {"wavelet_scales": "4"}, "wavelet:scales=4"),
        ("wavelet", {"wavelet_scales": "1+3"}, "wavelet:scales=1+3"),
        ("wavelet", {"wavelet_scales": "2", "wavelet_kind": "haar"}, "wavelet:kind=haar,scales=2"),
    ],
)
def test_shorthands(spec, shorthands, wanted):
    made, ids = cases.model(spec, **shorthands), cases.tokens()
    assert made.decoder.position_encoding.encoding == wavepe.encoding(wanted)
    assert torch.equal(cases.features(made, ids), cases.features(cases.model(wanted), ids))


ODD = {"decoder_embed_dim": 36, "decoder_input_dim": 36, "decoder_output_dim": 36}
XFORMERS = {"decoder_xformers_att_config": "{'name': 'scaled_dot_product'}"}
SCALES_3 = "head size 8 is not divisible by 3 scales"


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (None, {"rope_theta": 64.0}, r"--rope-theta 64\.0 needs --pos-enc rope, got no"),
        ("alibi", {"rope_theta": 64.0}, "needs --pos-enc rope, got --pos-enc alibi"),
        ("rope", {"wavelet_kind": "haar"}, "needs --pos-enc wavelet, got --pos-enc rope"),
        ("rope:theta=32", {"rope_theta": 64.0}, "both give theta: give one"),
        ("wavelet:kind=haar", {"wavelet_kind": "morlet"}, "both give kind: give one"),
        ("wavelet", {"wavelet_scales": "1,2"}, "1,2"),
        ("wavelet", {"wavelet_kind": "har"}, "unknown wavelet kind 'har'"),
        # what does not fit the model
        ("wavelet:scales=3", {}, f"{SCALES_3}: choose wavelet:scales=2 or wavelet:scales=4"),
        ("wavelet:scales=3,learned=true", {}, SCALES_3),
        ("rope", ODD, r"even.*9|9.*even"),
        ("transformer_xl", ODD, r"even.*9|9.*even"),
        ("rope", XFORMERS, "does not go with --decoder-xformers-att-config"),
    ],
)
def test_what_does_not_fit(spec, changes, message):
    with pytest.raises(ValueError, match=message):
        cases.model(spec, **changes)


def test_shorthands_on_the_command_line(tmp_path):
    cfg = cases.configuration(
        cases.arguments(
            "unused", "--pos-enc", "wavelet", "--wavelet-scales", "1+3", "--rope-theta", "8"
        )
    ).model
    assert (cfg.wavelet_scales, cfg.rope_theta) == ("1+3", 8)
    with pytest.raises(ValueError, match=r"--rope-theta 8\.0 needs --pos-enc rope"):
        cases.train(tmp_path, "--rope-theta", 8)
    assert not list(tmp_path.glob("*.pt"))


# --------------------------------------------------------------- commands and what they need
def test_installed_scripts():
    installed = importlib.metadata.entry_points(group="console_scripts")
    ours = {script.name: script for script in installed if script.name.startswith("wavepe-fair")}
    if not ours:
        pytest.skip("wavepe is not installed here")
    functions = ("train", "eval_lm", "preprocess", "generate")
    assert {name: script.value for name, script in ours.items()} == {
        f"wavepe-fairseq-{name.replace('_', '-')}": f"wavepe.fairseq.commands:{name}"
        for name in functions
    }
    assert all(callable(script.load()) for script in ours.values())


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
    ("package", "function", "message"),
    [
        ("fairseq", "train", "pip install --no-deps fairseq==0.12.2"),
        pytest.param("omegaconf", "eval_lm", "omegaconf", marks=pytest.mark.slow),
        ("torch", "generate", "torch"),
    ],
)
def test_without_a_package(package, function, message):
    hidden = HIDDEN.format(package=package, function=function)
    ended = python("-W", "ignore", "-c", hidden)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("wavepe-fairseq: ")
    assert message in line


def test_importing_the_package_loads_nothing():
    script = (
        "import sys, wavepe.fairseq\n"
        "print([name for name in ('torch', 'fairseq', 'hydra') if name in sys.modules])"
    )
    assert python("-W", "ignore", "-c", script).stdout == "[]\n"


# --------------------------------------------------------------- --user-dir
def test_the_folder_for_user_dir(capsys, monkeypatch):
    """fairseq's own parser loads it, and then knows --pos-enc."""
    runpy.run_module("wavepe.fairseq", run_name="__main__")
    folder = capsys.readouterr().out.strip()
    assert folder == wavepe.fairseq.USER_DIR
    cases.without_plugin(monkeypatch)
    monkeypatch.delitem(sys.modules, "wavepe_fairseq", raising=False)
    vars(cases.fairseq.utils.import_user_module).get("memo", set()).discard(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    line = cases.arguments("unused", "--pos-enc", "alibi")
    with pytest.raises(SystemExit):
        cases.configuration(line)
    assert cases.models.ARCH_MODEL_REGISTRY["transformer_lm"] is cases.STOCK
    cfg = cases.configuration([*line, "--user-dir", folder])
    assert cfg.model.pos_enc == "alibi"
    assert cases.models.ARCH_MODEL_REGISTRY["transformer_lm"] is WavePELanguageModel


def test_registering_again_changes_nothing():
    before = dict(cases.models.ARCH_MODEL_REGISTRY), dict(cases.models.MODEL_REGISTRY)
    wavepe.fairseq.register()
    assert before == (cases.models.ARCH_MODEL_REGISTRY, cases.models.MODEL_REGISTRY)


OWN = """
import dataclasses
import numpy as np
import wavepe
from fairseq.models import register_model_architecture

@wavepe.register_encoding
@dataclasses.dataclass(frozen=True)
class Even(wavepe.encodings.Encoding):
    name = "even"
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
    folder = tmp_path / "own_models"
    folder.mkdir()
    (folder / "__init__.py").write_text(OWN)
    words = ("--user-dir", folder, "--pos-enc", "even:slope=0.25", "--max-update", 3)
    recipe = (*cases.GPT[2:], "--arch", "transformer_lm_of_a_user")
    line = cases.arguments(tmp_path / "run", *words, recipe=recipe)
    ended = forked("-c", "from wavepe.fairseq.commands import train; train()", *line)
    assert ended.returncode == 0, ended.stderr
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    record = cases.record_of(state["model"])["encoding"]
    assert (record["name"], record["slope"]) == ("even", 0.25)


@pytest.mark.skipif(cases.NEEDS_SHIM, reason="fairseq 0.12.2 does not start by itself")
def test_fairseqs_own_command_with_our_user_dir(tmp_path):
    line = cases.arguments(tmp_path, "--user-dir", wavepe.fairseq.USER_DIR, "--pos-enc", "wavelet")
    script = "from fairseq_cli.train import cli_main; cli_main()"
    ended = forked("-c", script, *line, "--max-update", 3)
    assert ended.returncode == 0, ended.stderr
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert cases.record_of(state["model"])["encoding"]["name"] == "wavelet"


# --------------------------------------------------------------- the demo

DEMO = Path(__file__).parent.parent / "examples" / "fairseq_demo.py"
SCALED = "rope:inference_theta=scaled"
ROWS = [(spec, protocol) for spec in ("rope", SCALED) for protocol in ("blocks", "sliding")]
TINY = [
    "--encodings", "rope", "--length", "16", "--times", "1", "2", "--updates", "4",
    "--words", "200", "--jobs", "2",
]  # fmt: skip


def demo(out, *more):
    words = (DEMO, "--out", out, "--data", out.parent / "text.txt", *TINY, *more)
    return python(*words, COLUMNS="120", PYTHONWARNINGS="ignore")


def figures(out):
    runs = json.loads((out / "results.json").read_text())["runs"]
    return {(run["encoding"], run["protocol"]): run["perplexity"] for run in runs}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return (folder, output) of one run, of 3000 lines of words of Zipf's frequencies."""
    for needed in ("rich", "matplotlib"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed here")
    ranks = np.random.default_rng(0).zipf(1.3, size=(3000, 8)).clip(max=400)
    out = tmp_path_factory.mktemp("demo") / "finished"
    lines = (" ".join(f"w{rank}" for rank in line) for line in ranks)
    (out.parent / "text.txt").write_text("\n".join(lines))
    done = demo(out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_results_picture_logs_and_table_of_the_demo(finished):
    out, printed = finished
    results = json.loads((out / "results.json").read_text())
    assert results["train_length"] == 16
    assert results["scored_tokens"] > 0
    assert results["environment"]["torch"]
    assert all(run["seconds"] > 0 for run in results["runs"])
    perplexities = figures(out)
    assert list(perplexities) == ROWS
    for (spec, _), values in perplexities.items():
        assert list(values) == ["16", "32"]
        assert spec in printed
        for value in values.values():
            assert 1 < value < 1000
            assert f"{value:.2f}" in printed
    for protocol in ("blocks", "sliding"):
        plain, scaled = (perplexities[spec, protocol] for spec in ("rope", SCALED))
        assert plain["16"] == scaled["16"]  # the base grows beyond the trained length alone
        assert plain["32"] != scaled["32"]
    for heading in ("16 (1x)", "32 (2x)", "Perplexity per word", "blocks", "sliding"):
        assert heading in printed
    assert (out / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (out / "logs").iterdir()}
    assert {"preprocess.log", "train-rope.log"} < names
    assert len(names) == 2 + len(ROWS) * 2
