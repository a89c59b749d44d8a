"""Train fairseq language models with any position encoding: ``--pos-enc SPEC``.

The commands ``wavepe-fairseq-train``, ``-eval-lm``, ``-preprocess`` and ``-generate`` are fairseq's
commands with this plug-in loaded. If fairseq's own commands start in your installation, load the
plug-in with ``--user-dir $(python -m wavepe.fairseq)``. In Python, call `register`.

Importing this package imports neither torch nor fairseq.
"""

from __future__ import annotations

from pathlib import Path

# fairseq imports this folder as a top-level module, so it has a name of its own.
USER_DIR = str(Path(__file__).parent / "user_dir" / "wavepe_fairseq")


def register() -> None:
    """Add ``--pos-enc`` to every `transformer_lm*` architecture of fairseq.

    Call it before fairseq builds its command line or a model. A second call does nothing.
    ImportError says how to install what is missing.
    """
    from .model import register as register_now

    register_now()


__all__ = ["USER_DIR", "register"]
