"""``wavepe convert``: a checkpoint folder with another position encoding."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..experiments.errors import UsageError, require
from ..experiments.imports import import_all

if TYPE_CHECKING:
    from ..hf.conversion import Conversion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe convert``."""
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="checkpoint folder of a Llama, Mistral, ... with config.json, weights and tokenizer",
    )
    add("target", metavar="TARGET", help="folder to create; it may exist if it is empty")
    add("encoding", metavar="ENCODING",
        help="the new encoding, written name or name:key=value,key=value, such as rope:theta=1e6 "
        "or wavelet:scales=8; or encodings for ranges of layers, '{\"0-3\": \"rope\", \"4\": "
        "\"none\"}', where the other layers keep rope")  # fmt: skip
    add("--link", action="store_true", help="hard-link the weights instead of copying them, so "
        "that both folders share the files")  # fmt: skip
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert the folder, and print what was done and how to load the result."""
    import_all(args.imports)
    require("wavepe convert", torch="torch", transformers="hf")
    from ..hf import convert  # takes seconds

    try:
        done = convert(args.source, args.target, _encoding(args.encoding), link=args.link)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    _print(done, args)
    return 0


def _encoding(given: str) -> Any:
    """Return a spec, or the dict of layer ranges that is given as JSON."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        return json.loads(given, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"ENCODING begins with {{ but is not valid JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; ValueError if a key is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"ENCODING names layers twice: {', '.join(key for key, _ in pairs)}")
    return found


def _print(done: Conversion, args: argparse.Namespace) -> None:
    from .._files import leading_names
    from ..hf.layers import spec_text

    how = "linked" if args.link else "copied"
    print(f"{done.folder}: {done.model} with {spec_text(done.encoding)}")
    print(f"{how} from {args.source}: {done.tensors} tensors, {_size(done.bytes)}")
    for what, names in (
        ("new parameters", done.added),
        ("dropped tensors", done.dropped),
        ("files left out", done.left_out),
    ):
        if names:
            print(f"{what}: {leading_names(names)}")
    print("a model whose encoding has changed must be trained on")
    auto = "AutoModel" + "".join(done.model.partition("For")[1:])
    print("to load it in Python, after importing the module of --import:" if args.imports
        else "to load it in Python:")  # fmt: skip
    print(
        "    import transformers, wavepe.hf; "
        f"model = transformers.{auto}.from_pretrained({str(done.folder)!r})"
    )


def _size(count: int) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
