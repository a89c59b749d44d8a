"""The estimate of docs/guides/adapt.md: what an adaptation of a Llama with 8 B parameters takes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import table

from .adapt import largest
from .pages import wrapped

PAGE = Path("docs", "guides", "adapt.md")
# Llama 3.1 8B, and the H200: operations in a second in bfloat16, and the share that is reached
PARAMETERS, LAYERS, HIDDEN, VOCABULARY = 8.03e9, 32, 4096, 128_256
PEAK, SHARE = 989e12, 0.35
LENGTH, GIB = 8192, 2**30
SMALL = 134.5e6  # parameters of SmolLM2-135M


def blocks(root: Path) -> dict[str, str]:
    # Forward, backward, and forward again: gradient checkpointing. A causal query sees half.
    operations = 8 * (PARAMETERS + LAYERS * HIDDEN * LENGTH)
    # Weights, gradients and two moments in bfloat16. The teacher of transfer is one copy more.
    states, teacher = 8 * PARAMETERS / GIB, 2 * PARAMETERS / GIB
    # The input of each layer in bfloat16, and the logits and their gradient in float32
    activations = LENGTH * (2 * LAYERS * HIDDEN + 8 * VOCABULARY) / GIB
    rows = []
    for gpus in (1, 8):
        hours = [tokens * operations / (gpus * SHARE * PEAK) / 3600 for tokens in (1e8, 1e9, 1e10)]
        memory = (states + teacher) / gpus + activations
        rows.append((str(gpus), f"{memory:.0f} GiB", *(f"{x:.1f}" for x in hours)))
    heads = ("GPUs", "memory of each", "100 M tokens, hours", "1 B tokens", "10 B tokens")
    run = largest(root)
    seconds = next(row["seconds"] for row in run["rows"] if row["arm"] == "control")
    reached = 6 * SMALL * run["settings"]["tokens"] / seconds / PEAK
    words = (
        f"This is an estimate, not a measurement. A step of {LENGTH} tokens takes 8 (N + layers x "
        "hidden x length) operations per token: forward, backward, and forward again because of "
        f"`--gradient-checkpointing`. An H200 peaks at {PEAK / 1e12:.0f} TFLOP/s in bfloat16, of "
        f"which we assume {SHARE:.0%}. SmolLM2-135M reached {reached:.0%} on that GPU. Memory: 8 "
        "bytes per parameter (weights in bfloat16, gradients, two moments), 2 for the teacher of "
        "`transfer`, and the layers' inputs and logits of one sequence; eight GPUs share the "
        "states (FSDP2)."
    )
    return {"estimate": f"{table(heads, rows)}\n\n{wrapped(words)}"}
