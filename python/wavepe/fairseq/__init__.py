"""fairseq language models with any position encoding: ``--pos-enc SPEC`` on `transformer_lm*`.

The commands ``wavepe-fairseq-train``, ``-eval-lm``, ``-preprocess`` and ``-generate`` are fairseq's
with this plug-in loaded. Where fairseq's own commands start, they load it by
``--user-dir $(python -m wavepe.fairseq)``. In Python, `register` does it.

Importing this package imports neither torch nor fairseq.
"""

from __future__ import annotations

from pathlib import Path

# Not called fairseq, and alone in its folder: fairseq imports it as a module of the top level.
USER_DIR = str(Path(__file__).parent / "user_dir" / "wavepe_fairseq")


def register() -> None:
    """Let every `transformer_lm*` architecture take ``--pos-enc``; a second call does nothing.

    Raises
    ------
    ImportError
        No fairseq, or no torch; the message says how to get it.
    """
    from .model import register as register_now

    register_now()


__all__ = ["USER_DIR", "register"]
