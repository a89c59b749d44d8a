"""``python -m wavepe.fairseq``: the folder for fairseq's ``--user-dir``."""

from . import USER_DIR

if __name__ == "__main__":
    print(USER_DIR)
