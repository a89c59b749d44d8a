"""`wavepe compare --device`: what is refused, computed and recorded.

No GPU is needed: what cuda means to the training (autocast, losses that are read every few steps)
is done on the CPU.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import wavepe.hf
from compare_cases import arguments, compare, figures, interrupt, refused, results, text, trained
from traffic import DEVICE, Traffic
from wavepe.cli import main
from wavepe.common.errors import CommandError
from wavepe.experiments import comparison, evaluation, executors
from wavepe.experiments.data import load_text
from wavepe.experiments.settings import Settings
from wavepe.hf.learned import learned_ids
from wavepe.training import device as devices
from wavepe.training import loop
from wavepe.training.device import CPU, Device

LIKE_CUDA = Device(torch.device("cpu"), "a GPU", torch.bfloat16, read_every=4)
ONE = {"specs": ["none"]}


@pytest.fixture
def like_cuda(monkeypatch):
    """Let `--device cuda` be the CPU, used like a GPU."""
    named = {"cpu": CPU, "cuda": LIKE_CUDA}
    monkeypatch.setattr(devices, "device_named", named.get)


@pytest.mark.parametrize(
    "spec", ["shaw", "t5", "transformer_xl", "kerple", "wavelet:scales=2,biases=true"]
)
def test_nothing_that_an_encoding_learns_decays(spec):
    model = comparison.new_model(spec, 0, SETTINGS)
    plan = comparison.plan_of(SETTINGS, spec, 0)
    groups = plan.optimizer(model).param_groups
    decay = {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}
    learned = learned_ids(model)
    for name, weight in model.named_parameters():
        matrix = weight.dim() >= 2 and id(weight) not in learned
        assert decay[id(weight)] == (plan.decay if matrix else 0), name
    assert learned


@pytest.mark.parametrize("built", [None, "13.0"])
def test_a_device_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch, built):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    out = tmp_path / "out"
    message = refused(capsys, out, "--device", "cuda")
    assert "--device cuda: needs a GPU" in message
    assert "torch.cuda.is_available() is False" in message
    assert f"torch.version.cuda is {built}" in message
    assert "'tpu'" in refused(capsys, out, "--device", "tpu")
    assert not out.exists()


def test_the_first_gpu_that_torch_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"a GPU at {place}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for name in ("cuda", "auto"):
        found = devices.device_named(name)
        assert (found.place, found.count, found.compiles) == (torch.device("cuda:1"), 3, True)
        assert found.facts == {"device": "cuda", "gpu": "a GPU at cuda:1", "autocast": "bfloat16"}
    assert devices.device_named("cpu") is CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.device_named("auto") is CPU


def assert_about_the_same(out, other, differ=False):
    for ours, plain in zip(figures(out), figures(other), strict=True):
        for length in ours[2]:
            assert not differ or ours[2][length] != plain[2][length]
            assert math.isclose(ours[2][length], plain[2][length], rel_tol=0.02)


@pytest.mark.usefixtures("like_cuda")
def test_products_are_bfloat16_and_the_loss_is_not(tmp_path, monkeypatch):
    seen = set()
    model_class = wavepe.hf.WavePELlamaForCausalLM
    forward, loss = model_class.forward, torch.nn.functional.cross_entropy

    def noting_forward(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        seen.add(("training" if self.training else "evaluation", out.logits.dtype))
        return out

    def noting_loss(logits, *rest, **options):
        seen.add(("loss", logits.dtype))
        return loss(logits, *rest, **options)

    monkeypatch.setattr(model_class, "forward", noting_forward)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", noting_loss)
    specs = ["rope", "wavelet:scales=3"]
    assert compare(tmp_path / "a", "--device", "cuda", specs=specs) == 0
    assert seen == {
        ("training", torch.bfloat16), ("evaluation", torch.bfloat16), ("loss", torch.float32)
    }  # fmt: skip
    environment = results(tmp_path / "a")["environment"]
    assert (environment["gpu"], environment["autocast"]) == ("a GPU", "bfloat16")
    assert environment["devices"] == [LIKE_CUDA.label] == ["cpu (a GPU, autocast to bfloat16)"]
    for facts in environment["models"].values():
        assert facts["devices"] == [LIKE_CUDA.label]
    assert compare(tmp_path / "b", specs=specs) == 0
    assert_about_the_same(tmp_path / "a", tmp_path / "b", differ=True)


@contextlib.contextmanager
def always_importable(name):
    """Check in a thread that the module stays in sys.modules: others would import a second one."""
    seen, interval, done = set(), sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(1e-6)

    def look():
        while not done.is_set():
            seen.add(name in sys.modules)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert seen == {True}


def test_each_gpu_has_a_process_of_its_own(tmp_path, monkeypatch):
    """Here their number and their names alone are true."""
    several = dataclasses.replace(LIKE_CUDA, count=3)
    monkeypatch.setattr(devices, "device_named", {"cpu": CPU, "cuda": several}.get)
    placed, started = multiprocessing.get_context("fork").SimpleQueue(), []

    class Pool(ProcessPoolExecutor):
        def __init__(self, count, context, begin, arguments):
            started.append(count)
            super().__init__(count, multiprocessing.get_context("fork"), begin, arguments)

    monkeypatch.setattr(executors, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(torch.cuda, "set_device", placed.put)
    with always_importable("collections"):
        assert compare(tmp_path, "--device", "cuda", specs=["none", "rope", "alibi", "kerple"]) == 0
    assert (started, sorted(placed.get() for _ in range(3))) == ([3], [0, 1, 2])
    assert len(figures(tmp_path)) == 4


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_a_compiled_step_gives_the_same_figures(tmp_path, monkeypatch, backend):
    """Dynamo takes ten seconds; test_hf_compile.py tests the graphs of models."""
    compiled, compiling = [], torch.nn.Module.compile

    def compile_(model, **options):
        compiled.append(model)
        if backend is not None:
            compiling(model, backend=backend)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    monkeypatch.setattr(devices, "device_named", lambda name: Device(CPU.place, compiles=True))
    assert compare(tmp_path, **ONE) == 0
    assert len(compiled) == 1
    assert figures(tmp_path) == figures(trained())[:1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_about_the_figures_of_the_cpu(tmp_path):
    for device in ("cuda", "cpu"):
        assert compare(tmp_path / device, "--device", device) == 0
    assert_about_the_same(tmp_path / "cuda", tmp_path / "cpu")


# ------------------------------------------------------------------ losses that are read seldom


SETTINGS = Settings(("none",), (16,), 16, 11, 1, 2, 1, 2, 6, 0.02, 1)


class Shown(dict):
    """Keep what a training shows: the running mean of the loss, by step."""

    def __call__(self, event, *values):
        if event == "step":
            self.update([values])


def train(path, settings=SETTINGS, read_every=1, save_every=5):
    """Train; return the losses that were shown, and the state at the end."""
    tokens, shown = load_text(str(text()), 32, 16).train, Shown()
    device = Device(CPU.place, read_every=read_every)
    plan, model = comparison.plan_of(settings, "none", 0), comparison.new_model("none", 0, settings)
    batch_at = comparison.batches(plan, settings, tokens)
    state = loop.train(plan, model, batch_at, path, "", save_every, shown, device)
    return shown, state


def test_losses_are_read_every_few_steps(tmp_path):
    """And before a state is saved, after steps 5 and 10."""
    often, one = train(tmp_path / "one")
    seldom, four = train(tmp_path / "four", read_every=4)
    assert list(often) == list(range(1, 12))
    assert list(seldom) == [4, 5, 8, 10, 11]
    assert all(often[step] == loss for step, loss in seldom.items())
    assert one.loss == four.loss


@pytest.mark.parametrize("save_every", [2, 100])
def test_a_loss_that_is_no_number_is_found_and_not_saved(tmp_path, save_every):
    settings = dataclasses.replace(SETTINGS, learning_rate=1e30)
    with pytest.raises(CommandError, match=r"none: the loss is .* at step 1: try a smaller `lr`"):
        train(tmp_path / "state", settings, 4, save_every)
    assert not (tmp_path / "state").exists()


def test_a_gradient_that_is_no_number_is_found(tmp_path, monkeypatch):
    """The loss before its step is finite, and the weights after it are not."""
    step = loop._train_step
    monkeypatch.setattr(
        loop, "_train_step", lambda *given: step(*given) * torch.tensor([1.0, math.inf])
    )
    with pytest.raises(CommandError, match="norm of its gradient inf at step 0"):
        train(tmp_path / "state", save_every=1)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("spec", ["none", "rope", "alibi", "wavelet:scales=3", "t5"])
def test_a_step_copies_its_batch_and_reads_nothing(spec, monkeypatch):
    model = comparison.new_model(spec, 0, SETTINGS).to(DEVICE)
    state = loop.State(model, torch.optim.SGD(model.parameters(), 0.1))  # AdamW knows no "meta"
    batch = loop.Batch(torch.zeros(2, 17, dtype=torch.int64), None)
    given = state, batch, 0.02, Device(DEVICE)
    loop._train_step(*given)
    with Traffic() as traffic:
        loop._train_step(*given)
    assert traffic.found == ["_to_copy copies [(2, 17), (2, 17)]"]


# ------------------------------------------------------------------ another device in one folder


@pytest.mark.usefixtures("like_cuda")
@pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu")])
def test_going_on_with_another_device_is_told_and_recorded(tmp_path, capsys, monkeypatch, order):
    labels = [{"cpu": CPU, "cuda": LIKE_CUDA}[name].label for name in order]
    interrupt(monkeypatch, loop.State, "save")
    assert compare(tmp_path, "--device", order[0], **ONE) == 130
    assert f"--device {order[0]}" in capsys.readouterr().err  # of the advice how to resume
    assert compare(tmp_path, "--device", order[1], **ONE) == 0
    message = capsys.readouterr().err
    assert f"none: began on {labels[0]}, continues on {labels[1]}: figures may differ" in message
    environment = results(tmp_path)["environment"]
    assert environment["models"]["checkpoints/none-seed0"]["devices"] == labels
    assert environment["devices"] == [labels[1]]


@pytest.mark.usefixtures("like_cuda")
def test_rows_of_another_device_are_told(tmp_path, capsys, monkeypatch):
    both = {"specs": ["none", "alibi"]}
    interrupt(monkeypatch, evaluation, "evaluate", lambda folder, spec, *_: spec == "alibi")
    assert compare(tmp_path, **both) == 130
    capsys.readouterr()
    assert compare(tmp_path, "--device", "cuda", **both) == 0
    assert f"on cpu: figures may differ from those of {LIKE_CUDA.label}" in capsys.readouterr().err
    assert results(tmp_path)["environment"]["devices"] == sorted(["cpu", LIKE_CUDA.label])


def test_the_default_folder_is_named_after_settings_and_device(tmp_path, monkeypatch):
    """Else `--device cuda` would find what the CPU has trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "device_named", lambda name: Device(torch.device(name)))
    monkeypatch.setattr(comparison, "Comparison", None)  # the folder is there by then
    for name, steps in (("cpu", 6), ("cuda", 6), ("cpu", 7)):
        with pytest.raises(TypeError):
            main([*arguments("", steps=steps)[:-2], "--device", name])
    found = {path.name for path in (tmp_path / "runs").iterdir()}
    first, second = (name for name in found if not name.endswith("-cuda"))
    assert len(found & {f"{first}-cuda", f"{second}-cuda"}) == 1
