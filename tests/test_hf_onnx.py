"""Models in ONNX, OpenVINO and ExecuTorch: their programs hold standard operators alone."""

import contextlib
import warnings

import pytest

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
import torch

pytest.importorskip("transformers.exporters")

import wavepe
from cases import soon
from hf_families import stirred
from hf_model import Logits, close, logits, patched_tiny, tokens
from transformers.exporters import configs
from wavepe import ops

# Warnings of torch.onnx, of transformers' exporters, and of torchvision, which is not there.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
LONGEST = 200
COMBINED = "rope:fraction=0.5+wavelet:scales=4,projection=true"
SPECS = ["rope", "wavelet:scales=4", "alibi", "kerple", "shaw", "t5", "transformer_xl", "sandwich"]
SPECS += ["sinusoidal", "none", "wavelet:scales=4,learned=true", "rope@0+alibi@1"]


def model_of(spec):
    return stirred(patched_tiny(spec, max_position_embeddings=LONGEST))


def session_of(model, file, **bounds):
    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", **bounds)}
    with torch.no_grad():
        program = torch.onnx.export(
            model, (tokens(2, 12),), dynamic_shapes=(shapes,), dynamo=True, verbose=False
        )
    assert {node.domain for node in program.model.graph} == {""}
    program.save(file)
    return runtime.InferenceSession(file)


@torch.no_grad()
def wanted(model, ids):
    return model(ids)


def run(session, ids):
    (name,) = (given.name for given in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: ids.numpy()})[0])


@pytest.mark.parametrize("spec", soon([*SPECS, COMBINED], COMBINED))
def test_a_whole_model(spec, tmp_path):
    model = Logits(model_of(spec)).eval()
    session = session_of(model, tmp_path / "model.onnx", max=LONGEST)
    for batch, length in ((1, 5), (2, 12), (3, LONGEST)):
        ids = tokens(batch, length)
        assert close(run(session, ids), wanted(model, ids), 2e-5)


@pytest.mark.parametrize("spec", soon(["wavelet:scales=4", "sinusoidal"], "sinusoidal"))
def test_without_a_bound(spec, tmp_path, monkeypatch):
    """A table has the rows that the warning says, and more tokens raise an error."""
    monkeypatch.setattr("wavepe.positions.tables.OPEN_LENGTH", 64)
    model = Logits(model_of(spec)).eval()
    with pytest.warns(UserWarning, match=rf"of '{spec}' has rows for 64 tokens.*Dim\('length'"):
        session = session_of(model, tmp_path / "model.onnx")
    ids = tokens(1, 64)
    assert close(run(session, ids), wanted(model, ids), 2e-5)
    with pytest.raises(Exception, match="out of data bounds"):
        run(session, tokens(1, 65))


EXACT = {"config": {"INFERENCE_PRECISION_HINT": "f32"}}  # else bfloat16, where the CPU has it
EXPORTERS = {  # what must be installed, and options of the program that runs
    "onnx": ("onnxruntime", configs.OnnxConfig, {}),
    "openvino": ("openvino", configs.OpenVINOConfig, EXACT),
    "executorch": ("executorch", configs.ExecutorchConfig, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", EXPORTERS)
@pytest.mark.parametrize("spec", [*SPECS, COMBINED])
@pytest.mark.parametrize("cached", [0, 7])
def test_exporters_of_transformers(program, spec, cached):
    needed, config, options = EXPORTERS[program]
    pytest.importorskip(needed)
    if program == "executorch" and spec == COMBINED:
        pytest.xfail("ExecuTorch 1.5 plans more memory for it than its runtime allocates")
    from transformers.exporters import AutoHfExporter

    model, ids = model_of(spec), tokens(2, 12)

    def given(ids, cached):
        inputs = {"input_ids": ids[:, cached:], "attention_mask": torch.ones_like(ids)}
        if cached:
            inputs["past_key_values"] = model(ids[:, :cached], use_cache=True).past_key_values
        return inputs

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exporter = AutoHfExporter.from_config(config(dynamic=True))
        exported = exporter.export(model, given(ids, cached), config=config(dynamic=True))
        exported.to(None, **options)
        for batch, length in ((1, 10), (3, 60), (2, 8)):
            ids = tokens(batch, length)
            want = model(ids).logits[:, cached:]
            got = torch.as_tensor(exported(**given(ids, cached)).logits)
            assert close(got, want, 2e-5)


@pytest.mark.parametrize("spec", soon(["normalised", "sinusoidal:reversed=true"], "normalised"))
def test_a_fixed_length_with_padding(spec):
    """Positions come from the mask then."""
    model, ids = wavepe.hf.fix_length(model_of(spec), 40), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    args = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    for standard in (False, True):
        with ops.standard_operators() if standard else contextlib.nullcontext(), torch.no_grad():
            program = torch.export.export(model, (), args).module()
        assert close(program(**args).logits.detach(), logits(model, **args), 1e-5)
    wavepe.hf.fix_length(model, None)
    with pytest.raises(Exception, match=r"depend on the length.*fix_length"):
        torch.export.export(model, (), args)


def test_exact_angles_of_long_texts(tmp_path):
    """ONNX holds Python's numbers as float32, which a turn must not be."""
    inv_freq = torch.from_numpy(wavepe.rope_frequencies(64)[0])

    class Table(torch.nn.Module):
        def forward(self, positions):
            return ops.rope_table(positions, inv_freq)

    with torch.no_grad():
        shape = {0: torch.export.Dim("length")}
        program = torch.onnx.export(
            Table().eval(), (torch.arange(5),), dynamic_shapes=(shape,), dynamo=True, verbose=False
        )
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    positions = 2 ** torch.arange(21)
    (name,) = (given.name for given in session.get_inputs())
    found = session.run(None, {name: positions.numpy()})
    for got, want in zip(found, Table()(positions), strict=True):
        assert abs(torch.from_numpy(got) - want).max() < 1e-6


@pytest.mark.slow
def test_a_fixed_length(tmp_path):
    for spec in ("normalised", "rope:type=dynamic,factor=2"):
        model = wavepe.hf.fix_length(model_of(spec), LONGEST + 20)
        session = session_of(Logits(model).eval(), tmp_path / "model.onnx", max=LONGEST)
        ids = tokens(1, LONGEST)
        assert close(run(session, ids), wanted(Logits(model), ids), 2e-5)
