"""``wavepe rope``: the rotation that a configuration asks for, and the check of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ..common.errors import MissingPackage, UsageError
from ..common.files import new_file
from ..referee import rope_report
from ..referee.check import read_file
from ..referee.engine import probes
from .options import Number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a config.json, a folder with one, or a GGUF file")
    add("--length", action=Number, help="length of the sequence (dynamic and longrope need it)")
    add("--layer-type", metavar="NAME",
        help="layers to report, where types of layers rotate differently")  # fmt: skip
    add("--dump", metavar="FILE", help="write inv_freq, positions, cos and sin to this .npz file")
    add("--check", metavar="FILE",
        help="an engine's arrays: inv_freq; cos and sin; or q and rotated, with positions. A .npz, "
        ".npy (inv_freq), .json or .safetensors. The exit code is 0 if they agree, 1 if they do "
        "not, and 2 if a file cannot be read")  # fmt: skip
    add("--float32-angles", action="store_true", help="accept angles computed in float32")


def run(args: argparse.Namespace) -> int:
    try:
        report = rope_report(args.config, length=args.length, layer_type=args.layer_type)
        arrays = {} if args.check is None else read_file(Path(args.check))
        verdict = args.check and report.check(**arrays, float32_angles=args.float32_angles)
        if args.dump is not None:
            positions = probes(args.length or report.engine.max_length or 4096)
            cos, sin = report.engine.tables(positions)
            with new_file(Path(args.dump)) as path, path.open("wb") as file:
                np.savez(file, inv_freq=report.inv_freq, positions=positions, cos=cos, sin=sin)
            print(f"arrays: {args.dump}")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    except (MissingPackage, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(report if verdict is None else verdict)
    return int(verdict is not None and not verdict)
