"""Serve models with a position encoding: `transformers serve`, and its continuous batching."""

from . import batching, names

names.register()
batching.register()
