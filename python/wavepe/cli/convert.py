"""``wavepe convert``: a checkpoint folder with another position encoding."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..common.errors import UsageError, require
from ..common.files import leading_names
from ..encodings import RoPE, encoding
from ..experiments.imports import import_all
from .options import add_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="checkpoint folder of a Llama, Mistral, ... with "
        "config.json, weights and tokenizer")  # fmt: skip
    add("target", metavar="TARGET", help="folder to create; it may exist if it is empty")
    add("encoding", metavar="ENCODING",
        help="the new encoding, written name or name:key=value,key=value, such as rope:theta=1e6 "
        "or wavelet:scales=8; or encodings for ranges of layers, '{\"0-3\": \"rope\", \"4\": "
        "\"none\"}', where the other layers keep rope")  # fmt: skip
    add("--link", action="store_true", help="hard-link the weights instead of copying them, so "
        "that both folders share the files")  # fmt: skip
    add_imports(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    import_all(args.imports)
    require("wavepe convert", torch="torch", transformers="hf")
    from ..hf import convert  # takes seconds
    from ..hf.layers import spec_text

    try:
        result = convert(args.source, args.target, _encoding(args.encoding), link=args.link)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    print(f"{result.folder}: {result.model} with {spec_text(result.encoding)}")
    how = "linked" if args.link else "copied"
    print(f"{how} from {args.source}: {result.tensors} tensors, {_size(result.bytes)}")
    changes = {
        "new parameters": result.added, "dropped tensors": result.dropped,
        "files left out": result.left_out,
    }  # fmt: skip
    for what, names in changes.items():
        if names:
            print(f"{what}: {leading_names(names)}")
    new = encoding(result.encoding) if isinstance(result.encoding, str) else None
    if not (isinstance(new, RoPE) and (new.type or new.self_extend)):  # as YaRN
        print("fine-tune the model: its encoding has changed")
    after = ", after importing the module of --import" if args.imports else ""
    auto = "AutoModel" + "".join(result.model.partition("For")[1:])
    print(
        f"to load it in Python{after}:\n    import transformers, wavepe.hf; "
        f"model = transformers.{auto}.from_pretrained({str(result.folder)!r})"
    )
    return 0


def _encoding(text: str) -> Any:
    """Return a spec, or the dict of layer ranges that is written as JSON."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"ENCODING begins with {{ but is not valid JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; ValueError if a key is given twice."""
    ranges = dict(pairs)
    if len(ranges) < len(pairs):
        raise ValueError(f"ENCODING names layers twice: {', '.join(key for key, _ in pairs)}")
    return ranges


def _size(count: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1."""
    unit = next((n for n in range(4) if count < 1000 ** (n + 1)), 4)
    return f"{count / 1000**unit:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[unit]}"
