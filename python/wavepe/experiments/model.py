"""The argument MODEL of the commands that measure a model: a folder in Hugging Face format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import CommandError, UsageError, out_of_memory, thread_count
from ..common.files import leading_names, leads_out
from ..training.folder import RESULTS, read_json, settings_of_comparison
from .imports import import_all

if TYPE_CHECKING:
    from ..training.device import Device

BYTES = 256
# The packages that commands on models need, and the extras that install them.
PARTS = {"torch": "torch", "transformers": "hf", "rich": "cli"}
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model",
)  # fmt: skip
_LONGEST_REASON = 300
_FIRST_LENGTH = 512  # of the default lengths, at most


@dataclasses.dataclass
class Model:
    """A loaded model, its tokenizer (None: it reads bytes), and the settings of its comparison."""

    path: Path
    model: Any
    tokenizer: Any
    device: Device
    comparison: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def unit(self) -> str:
        """Return the name of one token: "byte" or "token"."""
        return "byte" if self.tokenizer is None else "token"

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def trained_length(self) -> int | None:
        """Return the trained length before any RoPE scaling; None if the configuration has none."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        before = rope.get("original_max_position_embeddings")
        length = before or getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else None

    def default_lengths(self) -> list[int]:
        """Return the lengths of the model's comparison, or multiples of its trained length."""
        if self.comparison is not None:
            return list(self.comparison["lengths"])
        first = min(self.trained_length or _FIRST_LENGTH, _FIRST_LENGTH)
        return [first * factor for factor in (1, 2, 4, 8)]

    def facts(self, text: str) -> dict[str, Any]:
        """Return the record of the model for a results file."""
        import torch

        import wavepe.hf

        return {
            "model": str(self.path), "position_encoding": wavepe.hf.encoding_of(self.model),
            "unit": self.unit, "data": text,
            "environment": {**self.device.facts, "threads": torch.get_num_threads()},
        }  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run passes of the model; their exceptions become errors of the command."""
        try:
            with self.device.autocasting():
                yield
        except IndexError as error:  # raised by an embedding of positions
            length = getattr(self.config, "max_position_embeddings", None)
            raise CommandError(
                f"{self.path}: the model cannot run so many tokens; its positions end at {length}"
            ) from error
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, UsageError) or out_of_memory(error) is not None:
                raise
            raise CommandError(f"{self.path}: {_one_line(error)}") from error


def check_folder(folder: str | Path) -> None:
    """Raise UsageError unless `folder` is that of a model."""
    path = Path(folder)
    if str(folder) and (path / "config.json").is_file():
        return
    kind = "is a file" if path.is_file() else "holds no config.json"
    if not str(folder) or not path.exists():
        kind = "no such folder"
    needs = "needs a folder with a config.json"
    checkpoints = sorted(path.glob("checkpoints/*/config.json"))
    if settings_of_comparison(path) and checkpoints:
        first = checkpoints[0].parent
        needs = f"it is the folder of a comparison; give one of its models, such as {first}"
    raise UsageError(f"MODEL {str(folder)!r}: {kind}; {needs}")


def check_links(folder: Path) -> None:
    """Raise UsageError if a program that saves the model again would copy what is elsewhere."""
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    names = [str(path.relative_to(folder)) for path in paths if path.is_file()]
    if outside := sorted(name for name in names if leads_out(folder, name)):
        raise UsageError(
            f"MODEL {folder}: symbolic links lead out of the folder ({leading_names(outside)}): "
            "remove them, or replace them by copies"
        )


@contextmanager
def opened(
    folder: str | Path, imports: Sequence[str], device: str, threads: int | None
) -> Iterator[Model]:
    """Load the model in a folder, for the time of a with block."""
    import_all(imports)
    path = Path(folder)
    from ..training.device import device_named, torch_threads

    place = device_named(device)
    with torch_threads(None if threads is None else thread_count(threads)):
        model = load_model(path)
        tokenizer = _load_tokenizer(path, model)
        yield Model(path, model.to(place.place), tokenizer, place, _comparison(path))


def load_model(path: Path, encoding: str | None = None) -> Any:
    """Load the model in a folder; one of a type wavepe_<family> also with another encoding.

    CommandError if a file is damaged, or lacks tensors that are not those of the new encoding.
    """
    from transformers import AutoModelForCausalLM

    import wavepe.hf  # noqa: F401 (registers the types wavepe_<family>)

    options = {} if encoding is None else {"position_encoding": encoding}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype="auto", output_loading_info=True, **options
        )
        missing = report["missing_keys"]
        if encoding is not None:
            missing = [key for key in missing if ".position_encoding." not in key]
        if missing:
            raise ValueError(f"its files lack {leading_names(sorted(missing))}")
    except Exception as error:  # raised by transformers, safetensors or torch
        if out_of_memory(error) is not None:
            raise
        remedy = "; remove this folder, and wavepe compare trains the model again"
        remedy *= (path / "training.json").is_file() and "registered" not in str(error)
        raise CommandError(f"cannot load {path}: {_one_line(error)}{remedy}") from error
    return model.eval()


def _load_tokenizer(path: Path, model: Any) -> Any:
    if not any((path / name).is_file() for name in _TOKENIZERS):
        size = model.config.get_text_config(decoder=True).vocab_size
        if size == BYTES:
            return None
        raise UsageError(
            f"MODEL {path}: holds no tokenizer (tokenizer.json, ...): save it there, or give the "
            f"Trainer processing_class=tokenizer; only a model with a vocabulary of {BYTES} reads "
            f"bytes, and this one has {size}"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, use_fast=True)
    except Exception as error:
        raise CommandError(f"cannot load the tokenizer of {path}: {_one_line(error)}") from error


def _comparison(path: Path) -> dict[str, Any] | None:
    """Return the settings of the comparison that holds a checkpoint, and its "text"."""
    folder = path.resolve().parent
    settings = settings_of_comparison(folder.parent) if folder.name == "checkpoints" else None
    if settings is None or not {"lengths", "train_length", "eval_bytes"} <= settings.keys():
        return None
    with contextlib.suppress(UsageError, KeyError, TypeError):
        settings["text"] = read_json(folder.parent / RESULTS)["environment"]["data"]
    return settings


def _one_line(error: BaseException) -> str:
    """Return the message of another library's error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
