"""Pictures of what the analyses return (needs matplotlib, of the extra "plot")."""

from ._perplexity import perplexity_by_length

__all__ = ["perplexity_by_length"]
