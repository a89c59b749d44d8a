"""Time a Llama's training step on a GPU, with wavelets and stock, and `wavepe compare`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from .gpu_measure import ROUNDS, Place, extra_memory, time_calls

OURS, STOCK = "wavelet, wavepe", "RoPE, SDPA"
LAYERS, HIDDEN, VOCABULARY, LENGTH, BATCH = 4, 1024, 8192, 2048, 4
STEPS = 50
TOY = {"hidden": 64, "length": 32, "batch": 1, "layers": 1}


def row(
    place: Place,
    d: int,
    hidden: int = HIDDEN,
    length: int = LENGTH,
    batch: int = BATCH,
    layers: int = LAYERS,
) -> dict[str, Any]:
    """Return seconds and memory of a step: forward and loss under autocast, backward, AdamW."""
    import wavepe.hf
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(hidden // d, 1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=d,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    tokens = torch.randint(VOCABULARY, (batch, length), device=place.device)
    calls, losses = {}, {}
    for name in (OURS, STOCK):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(place.device).train()
        if name == OURS:
            wavepe.hf.patch(model, "wavelet")
        calls[name] = _step(model, tokens, place.device)
        losses[name] = calls[name]().item()
    seconds = time_calls(calls, place.device, 1 if place.emulated else ROUNDS)
    return {
        "d": d,
        "length": length,
        "batch": batch,
        "layers": layers,
        "hidden": hidden,
        "loss": losses,
        "seconds": seconds,
        "memory": {name: extra_memory(call, place.device) for name, call in calls.items()},
        "ratio": seconds[STOCK] / seconds[OURS],
    }


def _step(model: Any, tokens: torch.Tensor, device: str) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compare(timeout: float) -> dict[str, Any]:
    """Return the seconds of the whole command on a GPU, with few steps."""
    command = [sys.executable, "-m", "wavepe", "compare"]
    help_text = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=timeout
    )
    if "--device" not in help_text.stdout:
        return {"not_run": "wavepe compare has no --device"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--device", "cuda", "--steps", str(STEPS), "--out", folder]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=timeout, errors="replace"
        )
        seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return {"steps": STEPS, "seconds": seconds, "said": done.stdout[-2000:]}
