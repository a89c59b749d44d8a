"""Writers of the tables and pictures of README and docs, from kept results.

`make readme` runs all of them; `python -m docs.writers --write NAME` runs one. A writer is a module
with PAGE and `blocks`. `blocks(root)` returns what stands on that page between each pair of
markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`. If the writer has `draw`, that draws
pictures.
"""

WRITERS = (
    "readme",
    "choose",
    "gpu",
    "compare",
    "more",
    "swap",
    "adapt",
    "estimate",
    "reproduce",
    "cite",
    "images",
    "fairseq",
    "speed",
    "families",
    "rope_exactness",
    "rope_speed",
    "attention_speed",
    "attention_gpu",
    "cuda",
    "rooms",
)
