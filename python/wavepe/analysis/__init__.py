"""Analyses of trained models: functions that return plain data; ``plots`` draws it."""

from ._perplexity import perplexity

__all__ = ["perplexity"]
