"""Parameters of every rope type."""

import wavepe

ORIGINAL = "original_max_position_embeddings"
SHORT, LONG = [1.0, 1.5, 2.0, 3.25], [4.0, 5.5, 7.0, 11.0]
# The least that each type needs, at head size 8.
MINIMAL = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, ORIGINAL: 64},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, ORIGINAL: 64, "factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64},
    "proportional": {},
}


def frequencies(kind, dim=8, theta=None, *, length=None, max_length=None, **keys):
    return wavepe.rope_frequencies(
        dim, theta, scaling={"rope_type": kind, **keys}, length=length, max_length=max_length
    )


def minimal(kind, **changes):
    """The minimal parameters of a type, some changed, or left out where the change is `...`."""
    keys = {"rope_type": kind, **MINIMAL[kind], **changes}
    return {key: value for key, value in keys.items() if value is not ...}
