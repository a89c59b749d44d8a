"""The folder for ``--user-dir``: fairseq imports it before it reads its arguments."""

from wavepe.fairseq import register

register()
