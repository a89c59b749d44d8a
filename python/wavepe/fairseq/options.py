"""The command line options that choose a position encoding."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..encodings import Encoding, encoding

# Shorthand -> the encoding and the option that it sets.
SHORTHANDS = {
    "rope_theta": ("rope", "theta"),
    "wavelet_kind": ("wavelet", "kind"),
    "wavelet_scales": ("wavelet", "scales"),
}


def chosen_encoding(args: Any) -> Encoding | None:
    """Return the encoding that the options choose; ValueError if they do not fit."""
    spec = getattr(args, "pos_enc", None)
    chosen = None if spec is None else encoding(spec)
    for key, (name, option) in SHORTHANDS.items():
        text = getattr(args, key, None)
        if text is None:
            continue
        flag = "--" + key.replace("_", "-")
        parts = () if chosen is None else chosen.parts
        named = [part for part in parts if part.name == name]
        if chosen is None or not named:
            chosen_text = "no --pos-enc" if spec is None else f"--pos-enc {spec}"
            raise ValueError(f"{flag} {text} needs --pos-enc {name}, got {chosen_text}")
        value = getattr(encoding(f"{name}:{option}={text}"), option)
        if any(part.options().get(option, value) != value for part in named):
            raise ValueError(f"{flag} {text} and --pos-enc {spec} both give {option}: give one")
        new = {part: dataclasses.replace(part, **{option: value}) for part in named}
        chosen = chosen.with_parts(lambda part, new=new: new.get(part, part))  # type: ignore[misc]
    return chosen


def write_out(args: Any) -> None:
    """Write the shorthands into ``pos_enc``, so that the checkpoint keeps one option."""
    chosen = chosen_encoding(args)
    if chosen is None:
        return
    args.pos_enc = str(chosen)
    for key in SHORTHANDS:
        setattr(args, key, None)
