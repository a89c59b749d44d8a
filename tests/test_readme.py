"""Every Python example of README and docs runs, and prints the output that it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from cases import forget_registrations

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


_TRAIN = ("first-swap", "longer-context")  # most of a minute


def examples():
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
        if page.parent.name == "tutorials":  # a block goes on from the one before it
            blocks = ["\n".join(blocks)] if blocks else []
        for number, block in enumerate(blocks, 1):
            trains = [pytest.mark.slow] if page.stem in _TRAIN else []
            name = f"{page.parent.name}-{page.stem}-{number}"
            yield pytest.param(block, id=name, marks=trains)


def save_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


# PEFT uses a name that the newest transformers deprecates.
@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize("code", list(examples()))
def test_example(code, monkeypatch, tmp_path):
    needed = [m for m in ("torch", "transformers", "pywt", "accelerate", "peft") if m in code]
    needed += ["matplotlib"] * ("analysis.plots" in code)
    for module in needed + ["torch", "transformers"] * ("wavepe.hf" in code):
        pytest.importorskip(module)
    forget_registrations(monkeypatch)
    monkeypatch.chdir(tmp_path)
    if '"my-llama"' in code:  # the reader's own model
        save_llama("my-llama")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example>", "exec"), {"__name__": "__example__"})
    shown = re.findall(r"print\(.*\)  # (.*)", code)  # a comment after print shows its output
    assert printed.getvalue().splitlines()[: len(shown)] == shown


def test_pages_link_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
