"""What ``--user-dir`` names: fairseq imports this folder before it reads its arguments."""

from wavepe.fairseq import register

register()
