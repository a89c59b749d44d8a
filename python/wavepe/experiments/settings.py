"""The settings of ``wavepe compare``, checked before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import wavepe
from wavepe.analysis import PROTOCOLS
from wavepe.encodings import Encoding
from wavepe.encodings.methods import initial_parameters
from wavepe.encodings.wavelet import scale_hint

from ..common.errors import UsageError
from ..common.labels import suggestion
from .numbers import integer, integers, once, words
from .presets import DEFAULTS, MODELS, PRESETS, rows_for
from .tasks import TASKS

# Which parameters take weight decay. Older folders, which decayed matrices that an encoding learns,
# have no such entry, so their rows are not mixed with new ones.
DECAYED = "the model's matrices"

# Names, options and values of encodings never contain it.
_EVALUATED_AS = "/"


@dataclass(frozen=True)
class Row:
    """One row of the table, written SPEC, or TRAINED/SPEC to evaluate another row's training.

    `trained` is the encoding of the training, without options that matter at inference only.
    `evaluated` is the encoding of the evaluation, and of any training on longer text.
    """

    name: str
    trained: Encoding
    evaluated: Encoding

    @property
    def continued(self) -> str:
        """Return the name of the training on longer text."""
        return f"{self.trained}{_EVALUATED_AS}{self.evaluated.trained_as()}"

    @classmethod
    def parse(cls, text: str) -> Row:
        """Read a row from text; UsageError if an encoding is wrong."""
        first, slash, second = text.partition(_EVALUATED_AS)
        try:
            trained = wavepe.encoding(first)
            evaluated = wavepe.encoding(second) if slash else trained
        except (ValueError, TypeError) as error:
            raise UsageError(f"`encodings` {text}: {error}") from None
        name = f"{trained}{_EVALUATED_AS}{evaluated}" if slash else str(evaluated)
        return cls(name, trained.trained_as(), evaluated)


@dataclass(frozen=True)
class Model:
    """One training, and the rows that are evaluated with it."""

    spec: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def trainings(self) -> list[str]:
        """Return the names of this training and of the trainings that continue it."""
        return list(dict.fromkeys([self.spec, *(row.continued for row in self.rows)]))


@dataclass(frozen=True)
class Protocol:
    """A protocol for perplexity, written whole, blocks:WINDOW or sliding:WINDOW/STRIDE."""

    protocol: str
    window: int | None = None
    stride: int | None = None

    @classmethod
    def parse(cls, text: str, train_length: int, argument: str = "protocols") -> Protocol:
        """Read a protocol; by default the window is the trained length, and the stride half of it.

        UsageError names the argument.
        """
        name, _, sizes = text.partition(":")
        first, slash, second = sizes.partition("/")
        place = f"`{argument}` {text}"
        _need(name in PROTOCOLS, f"{place}: needs {', '.join(PROTOCOLS)}")
        _need(name != "whole" or not sizes, f"{place}: whole takes no window")
        _need(name != "blocks" or not slash, f"{place}: takes a window alone, as blocks:128")
        if name == "whole":
            return cls(name)
        window = integer(argument, first, 2) if first else train_length
        if name == "blocks":
            return cls(name, window)
        stride = integer(argument, second, 1) if slash else max(1, window // 2)
        _need(stride <= window, f"{place}: needs a stride of at most the window, {window}")
        return cls(name, window, stride)

    def __str__(self) -> str:
        sizes = "/".join(str(size) for size in (self.window, self.stride) if size is not None)
        return f"{self.protocol}:{sizes}" if sizes else self.protocol

    @property
    def text(self) -> str:
        """Return the protocol in words, for a title."""
        return {
            "whole": "whole sequence",
            "blocks": f"blocks of {self.window}",
            "sliding": f"sliding window of {self.window}, stride {self.stride}",
        }[self.protocol]

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments for `wavepe.analysis.perplexity`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Settings:
    """All values that decide the figures, except the text and the number of threads."""

    encodings: tuple[str, ...]  # the names of the rows
    lengths: tuple[int, ...]
    train_length: int
    steps: int
    seeds: int
    batch: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float
    eval_bytes: int
    imports: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ("whole",)
    task: str = ""
    split: str = "test"
    finetune: int = 0  # the length of further training
    finetune_steps: int = 0
    keep: int = 0  # checkpoints during a training
    bands: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(map(Row.parse, self.encodings))

    @property
    def models(self) -> list[Model]:
        """Return the trainings; rows whose encodings train alike share one."""
        alike: dict[str, list[Row]] = {}
        for row in self.rows:
            alike.setdefault(str(row.trained), []).append(row)
        seeds = range(self.seeds)
        return [Model(spec, seed, tuple(rows)) for seed in seeds for spec, rows in alike.items()]

    def manifest(self, text_sha256: str) -> dict[str, Any]:
        """Return the content of settings.json, by which a folder recognises its comparison."""
        settings = asdict(self)
        if not self.imports:  # folders of earlier comparisons do not have this key
            del settings["imports"]
        return json.loads(json.dumps({**settings, "text_sha256": text_sha256, "decayed": DECAYED}))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings from their `asdict` that was stored as JSON."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**plain)


def hints(settings: Settings) -> list[str]:
    """Return warnings that the user should read before the training."""
    sizes = settings.head_dim, settings.train_length
    rows = ((row.name, scale_hint(row.evaluated, *sizes)) for row in settings.rows)
    return [f"{name}: {hint}" for name, hint in rows if hint]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def entry(argument: str, known: Mapping[str, Any], name: Any) -> Any:
    """Return the entry `str(name)` of `known`; UsageError with all names if it is missing."""
    if (name := str(name)) not in known:
        raise UsageError(f"`{argument}` {name}: needs {', '.join(known)}{suggestion(name, known)}")
    return known[name]


OPTIONS = {"preset", *DEFAULTS, *MODELS["tiny"]} - {"factors"}  # those of `compare`
# The least value of each option that is a count.
_LEAST = {
    "train_length": 2, "steps": 1, "seeds": 1, "batch": 1, "layers": 1, "heads": 1, "head_dim": 2,
    "eval_bytes": 1, "keep": 0,
}  # fmt: skip


def chosen_settings(options: Mapping[str, Any], imports: tuple[str, ...] = ()) -> Settings:
    """Return the settings of a comparison. An option that was not given is None.

    Others are of the preset, of the model size, or of DEFAULTS. UsageError names the first wrong
    option.
    """
    options = {name: value for name, value in options.items() if value is not None}
    preset = options.pop("preset", None)
    values = {} if preset is None else entry("preset", PRESETS, preset).options
    size = entry("model", MODELS, {**DEFAULTS, **values, **options}["model"])
    chosen = {**DEFAULTS, **size, **values, **options}
    count: dict[str, Any] = {x: integer(x, chosen[x], least) for x, least in _LEAST.items()}
    head_dim, rate, length = count["head_dim"], chosen["lr"], count["train_length"]
    _need(head_dim % 2 == 0, f"`head_dim` {head_dim}: needs an even number")
    _need(0 < rate < math.inf, f"`lr` {rate:g}: needs a positive number")
    _need(not (chosen["task"] and chosen["finetune"]), "`task` and `finetune`: give one of them")
    if chosen["task"]:
        entry("task", TASKS, chosen["task"])
    if chosen["finetune"]:
        count["finetune"] = integer("finetune", chosen["finetune"], 2)
        more = chosen["finetune_steps"]
        more = max(1, count["steps"] // 10) if more is None else more
        count["finetune_steps"] = integer("finetune_steps", more, 1)
    elif chosen["finetune_steps"] is not None:
        raise UsageError("`finetune_steps`: needs `finetune` LENGTH")
    rows = chosen["encodings"] if "encodings" in options else rows_for(chosen["encodings"], length)
    rows = [rows] if isinstance(rows, (str, Encoding)) else list(rows)
    _need(len(rows) > 0, "`encodings`: needs at least one")
    protocols = [Protocol.parse(name, length) for name in words("protocols", chosen["protocols"])]
    lengths = chosen["lengths"] or [length * factor for factor in chosen["factors"]]
    settings = Settings(
        encodings=tuple(once("encodings", [Row.parse(str(row)).name for row in rows])),
        lengths=tuple(integers("lengths", lengths, 2)), learning_rate=rate, imports=imports,
        protocols=tuple(once("protocols", list(map(str, protocols)))), task=chosen["task"],
        split=chosen["split"], bands=bool(chosen["bands"]), **count,
    )  # fmt: skip
    if settings.task:
        _check_task(settings)
    if settings.bands:
        _check_bands(settings)
    for row in settings.rows:
        _check_fit(row, settings)
    return settings


def _check_task(settings: Settings) -> None:
    task, protocols = TASKS[settings.task], settings.protocols
    why = f"a question needs all text before it; got {' '.join(protocols)}"
    _need(protocols == ("whole",), f"`task` {task.name} needs `protocols` whole, because {why}")
    _need(not settings.bands, "`task` and `bands`: give one of them")
    least, length = task.least, min(settings.train_length, *settings.lengths)
    needs = f"needs lengths of at least {least}, got {length}"
    _need(length >= least, f"`task` {task.name}: {needs}")


def _check_bands(settings: Settings) -> None:
    rotary = [row.evaluated.rotary for row in settings.rows if row.evaluated.rotates]
    _need(len(rotary) > 0, "`bands`: needs a row that is evaluated with a rotary encoding")
    for encoding in rotary:
        theta = getattr(encoding, "theta", None)
        _need(theta is None or theta > 1, f"`bands`: needs bases above 1, got {encoding}")
    length = settings.train_length
    needs = f"needs one of `lengths` to be at least the trained length, {length}"
    _need(max(settings.lengths) >= length, f"`bands`: {needs}")


def _check_fit(row: Row, settings: Settings) -> None:
    """Check sizes that a Llama without a text does not show, unlike `check_rows`."""
    length = settings.train_length
    longest = max(length, settings.finetune, *settings.lengths)
    try:
        for encoding, last in ((row.trained, length), (row.evaluated, longest)):
            for part in encoding.parts:
                if part.adds:  # vectors may end at some position
                    sizes = {"length": last, "trained_length": length}
                    part.absolute(np.array([last - 1]), settings.hidden, **sizes)
    except (ValueError, TypeError) as error:
        raise UsageError(f"`encodings` {row.name}: {error}") from None

    def learned(encoding: Encoding) -> dict[str, tuple[int, ...]]:
        if not encoding.learns:
            return {}
        initial = initial_parameters(encoding, settings.head_dim, settings.heads, settings.hidden)
        return {name: np.shape(value) for name, value in initial.items()}

    before, after = learned(row.trained), learned(row.evaluated)
    needs = "training and evaluation must have the same learned parameters (or give `finetune`)"
    _need(bool(settings.finetune) or before == after, f"`encodings` {row.name}: {needs}")
