"""``python -m wavepe.fairseq`` prints the folder for fairseq's ``--user-dir``."""

from . import USER_DIR

if __name__ == "__main__":
    print(USER_DIR)
