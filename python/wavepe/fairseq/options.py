"""The options of the command line that name a position encoding."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..encodings import Encoding, encoding

# Shorthand -> encoding and its option.
SHORTHANDS = {
    "rope_theta": ("rope", "theta"),
    "wavelet_kind": ("wavelet", "kind"),
    "wavelet_scales": ("wavelet", "scales"),
}


def chosen_encoding(args: Any) -> Encoding | None:
    """Return the encoding that the options name; None for fairseq's own.

    Raises
    ------
    ValueError
        Unknown encoding or option, one given twice, or a shorthand of another encoding.
    """
    spec = getattr(args, "pos_enc", None)
    chosen = None if spec is None else encoding(spec)
    for key, (name, option) in SHORTHANDS.items():
        given = getattr(args, key, None)
        if given is None:
            continue
        flag = "--" + key.replace("_", "-")
        if chosen is None or chosen.name != name:
            asked = "no --pos-enc" if spec is None else f"--pos-enc {spec}"
            raise ValueError(f"{flag} {given} goes with --pos-enc {name}, got {asked}")
        value = getattr(encoding(f"{name}:{option}={given}"), option)
        if chosen.options().get(option, value) != value:
            raise ValueError(f"{flag} {given} and --pos-enc {spec} both give {option}: give one")
        chosen = dataclasses.replace(chosen, **{option: value})
    return chosen


def write_out(args: Any) -> None:
    """Let ``pos_enc`` alone say what the shorthands say, in what the checkpoint keeps."""
    chosen = chosen_encoding(args)
    if chosen is None:
        return
    args.pos_enc = str(chosen)
    for key in SHORTHANDS:
        setattr(args, key, None)
