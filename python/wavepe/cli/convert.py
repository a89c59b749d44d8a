"""``wavepe convert``: a checkpoint folder with another position encoding."""

from __future__ import annotations

import argparse

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
        "or wavelet:scales=8; with layers, rope@:4+none@4:")  # fmt: skip
    add("--link", action="store_true", help="hard-link the weights instead of copying them, so "
        "that both folders share the files")  # fmt: skip
    add_imports(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    import_all(args.imports)
    require("wavepe convert", torch="torch", transformers="hf")
    from ..hf import convert  # takes seconds
    from ..hf.layers import spec_text

    try:
        result = convert(args.source, args.target, args.encoding, link=args.link)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    print(f"{result.folder}: {result.model} with {spec_text(result.encoding)}")
    how = "linked" if args.link else "copied"
    print(f"{how} from {args.source}: {result.tensors} tensors, {result.bytes / 1e6:.3g} MB")
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
    return 0
