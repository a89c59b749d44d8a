"""Pictures of what the analyses return (needs matplotlib, of the extra "plot")."""

from ._accuracy import accuracy_grid
from ._perplexity import perplexity_by_length

__all__ = ["accuracy_grid", "perplexity_by_length"]
