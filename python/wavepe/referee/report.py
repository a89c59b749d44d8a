"""`rope_report`: what a configuration says about its rotation, and the check of an engine."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.rope_frequencies import DEFAULT_THETA, ORIGINAL, PARAMETERS, standard_parameters
from ..common import checks
from ..common.files import read_object
from ..common.spec import TYPE_PREFIX, read_spec, split_spec
from .check import NAMES, Verdict, check, checked_arrays
from .engine import Engine

# Model types of transformers that rotate the pairs (2i, 2i+1); all others rotate (i, i + h).
INTERLEAVED = {
    "axk1", "axk2", "bailing_hybrid", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots3_note_text", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_vl_moe_text", "glm", "glm4", "glm4_moe_lite", "glm4v_text", "glm_moe_dsa",
    "glm_ocr_text", "gptj", "helium", "hy_v4_vl_text", "kimi_k2", "llama4_text", "longcat_flash",
    "mistral4", "mistral_large4_text", "moonshine", "moonshine_streaming", "openai_privacy_filter",
    "sarvam_mla", "youtu",
}  # fmt: skip
# Model types whose base is 10000 where the configuration gives none.
_WITHOUT_BASE = {"codegen", "falcon", "gpt_neox", "gptj", "llama", "mistral", "phi"}
# The part of a head that rotates where the configuration gives none.
_PARTS = {"gpt_neox": 0.25, "qwen3_next": 0.25, "stablelm": 0.25} | dict.fromkeys(
    ("bamba", "glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"), 0.5
)
# The base of sliding layers, which do not scale, where the configuration gives none.
_LOCAL = dict.fromkeys(("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), 1e4) | {"olmo3": 5e5}
# Rotations of another kind, and keys of rotations, that no report describes.
_OTHERS = {"nanochat": "the inverse rotation", "ernie4_5_vl_moe_text": "pairs in another order"}
_UNREAD = (
    "alpha",
    "attn_factor",
    "compress_rope_theta",
    "mla_use_nope",
    "short_mscale",
    "use_dynamic_ntk",
)
_OF_SPEC = {"theta": "rope_theta", "type": "rope_type"}  # the keys of wavepe's specs
_OLD_TYPES = {"su": "longrope", "mrope": "default"}
# The keys of configurations and of GGUF by one of their names; the first that is given counts.
_KEYS = {
    "rope_parameters": ("rope_parameters", "rope_scaling"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    "rotary_dim": ("rotary_dim", "rope.dimension_count"),
    "head_dim": ("qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels",
                 "attention.key_length"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embedding_length"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "attention.head_count"),
    "trained_length": ("max_position_embeddings", "n_positions", "context_length"),
    "rope_theta": ("rope_theta", "global_rope_theta", "rotary_emb_base", "rope.freq_base"),
    "local_rope_theta": ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta",
                         "rope.freq_base_swa"),
}  # fmt: skip
# GGUF's types of values, by their numbers: struct's letters. 8 is a string, 9 an array.
_SCALARS = dict(enumerate("BbHhI" + "if?")) | {10: "Q", 11: "q", 12: "d"}
_SCALING = {
    "type": "rope_type", "factor": "factor", "original_context_length": ORIGINAL,
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}  # fmt: skip
# Tensors of GGUF with a divisor for each pair; llama3's rule is kept as the first.
_DIVISORS = {
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",), "rope_factors_long.weight": ("long_factor",),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class RopeReport:
    """The rotation of a configuration. As text it says how fast each pair turns.

    Attributes
    ----------
    inv_freq : array (pairs,), float64
        Radians per position of each pair.
    attention_factor : float
        The factor on cosines and sines.
    turns : array (pairs,), float64, or None
        The turns of each pair in the trained length, which for yarn, longrope and llama3 is
        original_max_position_embeddings; None if it is not known.
    engine : Engine
        The head size, the parameters, the lengths, and the order of pairs (`interleaved`).
    notes : tuple of str
        Remarks: unknown keys, a missing base.
    layer_type, others : str and dict
        The type of these layers, "" for all layers; and the engines of the other types.
    """

    inv_freq: np.ndarray
    attention_factor: float
    turns: np.ndarray | None
    engine: Engine
    notes: tuple[str, ...]
    layer_type: str
    others: Mapping[str, Engine]

    def check(
        self,
        *,
        inv_freq: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        cos: ArrayLike | None = None,
        sin: ArrayLike | None = None,
        q: ArrayLike | None = None,
        rotated: ArrayLike | None = None,
        float32_angles: bool = False,
    ) -> Verdict:
        """Say whether the arrays of an engine are those of this rotation; if not, name the mistake.

        Parameters
        ----------
        inv_freq : array (..., pairs), optional
            Radians per position.
        positions : integer array (L,), or with the leading axes of cos or q; optional
            The default is 0, 1, 2, ...
        cos, sin : arrays (..., L, pairs) or (..., L, 2 pairs), optional
            The tables of the engine, with its attention factor.
        q, rotated : arrays (..., L, head size), optional
            Queries or keys before and after the rotation.
        float32_angles : bool
            Accept angles that were computed in float32, as those of transformers.

        Raises
        ------
        TypeError, ValueError
            If an array is missing, empty, not finite, or of a wrong type or shape, or if the arrays
            cannot show a rotation (each position is 0).
        """
        float32 = checks.flag("float32_angles", float32_angles)
        values = (inv_freq, cos, sin, q, rotated, positions)
        arrays = checked_arrays(self.engine, dict(zip(NAMES, values, strict=True)), float32)
        return check(self.engine, self.others, arrays)

    def to_json(self) -> str:
        """Return the report as JSON."""
        of_engine = ("dim", "parameters", "max_length", "length", "interleaved")
        of_report = ("layer_type", "attention_factor", "inv_freq", "turns", "notes")
        written = {key: getattr(self.engine, key) for key in of_engine}
        written |= {key: getattr(self, key) for key in of_report}
        return json.dumps(written, indent=2, default=np.ndarray.tolist)

    def __str__(self) -> str:
        engine, parameters, pairs = self.engine, self.engine.parameters, self.inv_freq.size
        plain = parameters["rope_theta"] ** -(np.arange(pairs) / pairs)
        with np.errstate(divide="ignore"):
            divisors, tokens = plain / self.inv_freq, 2 * np.pi / self.inv_freq
        same = [np.isclose(divisors, x, 1e-9) for x in (1, parameters.get("factor", 1))]
        ends = np.flatnonzero(np.diff(same[0] + 2 * same[1]))  # where the rule changes
        rows = np.unique([*np.linspace(0, pairs - 1, 9).astype(int), *ends, *(ends + 1)])
        columns = {"pair": rows, "divided by": divisors[rows], "tokens per turn": tokens[rows]}
        for length in filter(None, (engine.trained_length, engine.length)):
            columns[f"turns in {length:.0f}"] = length / tokens[rows]
        layout = {None: "", True: " (2i, 2i+1)", False: f" (i, i+{pairs})"}[engine.interleaved]
        return "\n".join([
            *[f"layers {self.layer_type} (others: {', '.join(self.others)})"] * bool(self.others),
            ", ".join(f"{key} {x}" for key, x in parameters.items() if np.ndim(x) == 0),
            f"head size {engine.dim}, {pairs} pairs{layout}",
            f"attention factor {self.attention_factor:.6g}",
            *self.notes,
            "  ".join(f"{x:>15}" for x in columns),
            *("  ".join(f"{x:>15.5g}" for x in row) for row in zip(*columns.values(), strict=True)),
        ])  # fmt: skip


def rope_report(
    config: Mapping[str, Any] | str | os.PathLike,
    *,
    length: int | None = None,
    layer_type: str | None = None,
) -> RopeReport:
    """Report the rotation that a configuration asks for, to read it or to check an engine by it.

    Parameters
    ----------
    config : dict or path
        A configuration of transformers (a dict, a config.json or its folder), or a GGUF file. That
        of a model that wavepe wrote needs a ``rope`` with no options but theta and those of a type.
    length : int, optional
        The length of the sequence, for the types dynamic and longrope and for the count of turns.
    layer_type : str, optional
        The type of the layers, where the types rotate differently. The default is
        "full_attention", or the first type.

    Raises
    ------
    OSError, TypeError, ValueError
        If the file cannot be read, a value is wrong, a key is missing, or the model has no RoPE.

    Examples
    --------
    >>> import wavepe
    >>> report = wavepe.rope_report({"head_dim": 8, "rope_theta": 1e6})
    >>> cos, sin = wavepe.rope_table(range(1, 100), report.inv_freq)  # an engine counts from 1
    >>> report.check(cos=cos, sin=sin).mistakes
    ('positions off by one (too large)',)
    """
    length = None if length is None else checks.integer("length", length, 1)
    read = _read(config)
    read = dict(read["text_config"]) if isinstance(read.get("text_config"), Mapping) else read
    if "position_encoding" in read:  # a model that wavepe wrote
        read["model_type"] = str(read.get("model_type")).removeprefix(TYPE_PREFIX)
    encoding = read.get("position_embedding_type") or ("alibi" if read.get("alibi") else "rope")
    encoding = read.get("position_encoding") or ("rope" if encoding == "rotary" else encoding)
    if read.get("patch_size") and "vocab_size" not in read:
        encoding = "positions of images"
    encoding = _OTHERS.get(str(read.get("model_type")), encoding)
    if (spec := _of_spec(encoding)) is None:
        raise ValueError(
            f"a report needs RoPE by theta and type alone, the same in all layers, got {encoding!r}"
        )
    for name, keys in _KEYS.items():
        if values := [read[key] for key in keys if read.get(key) is not None]:
            read[name] = values[0]
    types = {kind: _engine(read, kind, rope, length) for kind, rope in _rules(read, spec).items()}
    default = "full_attention" if "full_attention" in types else next(iter(types))
    kind = checks.choice("layer_type", default if layer_type is None else layer_type, types)
    engine, notes = types.pop(kind)
    inv_freq, factor = engine.frequencies
    if not inv_freq.any():
        raise ValueError(f"a rotation needs a pair that turns, got {engine.parameters}")
    trained = engine.trained_length
    turns = None if trained is None else inv_freq * trained / (2 * np.pi)
    others = {key: x[0] for key, x in types.items()}
    return RopeReport(inv_freq.copy(), factor, turns, engine, tuple(notes), kind, others)


def _read(config: Any) -> dict[str, Any]:
    """Return a configuration; that of a GGUF file has GGUF's keys without the architecture."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config, "config.json") if Path(config).is_dir() else Path(config)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return read_object(path.parent, path.name)
        try:
            return _read_gguf(file)
        except (ArithmeticError, LookupError, MemoryError, OSError, RecursionError, struct.error,
                TypeError, ValueError) as error:  # fmt: skip
            raise ValueError(f"{path} is not a whole GGUF file of a model: {error}") from error


def _read_gguf(file: BinaryIO) -> dict[str, Any]:
    """Read a GGUF file after its first word: metadata, tensors' names and places, divisors."""

    def take(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    def value(kind: int) -> Any:
        if kind == 8:
            return take(f"{take('Q')[0]}s")[0].decode("utf-8", "replace")
        if kind == 9:
            kind, count = take("IQ")
            return [value(kind) for _ in range(count)]
        return take(_SCALARS[kind])[0]

    version, tensors, pairs = take("IQQ")
    if version not in (2, 3):
        raise ValueError(f"it needs the version 2 or 3, little-endian; got {version}")
    keys = {value(8): value(*take("I")) for _ in range(pairs)}
    places = [(value(8), take(f"{take('I')[0]}Q"), *take("IQ")) for _ in range(tensors)]
    model_type = keys.get("general.architecture", "")
    config = {key.removeprefix(f"{model_type}."): x for key, x in keys.items()}
    rope = {new: config.get(f"rope.scaling.{key}") for key, new in _SCALING.items()}
    rope["mscale"] = rope["mscale_all_dim"]
    rope = {key: x for key, x in rope.items() if x not in (None, "none")}
    attention = {"attention_factor": rope.pop("attention_factor", 1.0)}  # yarn has another factor
    step = keys.get("general.alignment", 32)
    start = -(-file.tell() // step) * step
    for name, sizes, kind, offset in places:
        if name in _DIVISORS:
            if kind != 0:
                raise ValueError(f"{name} must hold float32, got the GGUF type {kind}")
            file.seek(start + offset)
            rope |= dict.fromkeys(_DIVISORS[name], take(f"{sizes[0]}f"))
            rope |= {"rope_type": "longrope", **attention}
    if config.get("rope.scale_linear") and config.get("rope.scaling.type") != "none":
        rope = {"rope_type": "linear", "factor": config["rope.scale_linear"]} | rope
    factors = {config.get(f"rope.scaling.yarn_{x}_factor", 1) for x in ("attn", "ext")}
    factors |= set() if rope.get("rope_type") == "longrope" else {*attention.values()}
    rope |= {} if factors == {1} else {"attn_factor": factors}  # on cosines and sines
    if rope.get("rope_type") == "yarn" and model_type == "gpt-oss":
        rope["truncate"] = False
    config |= {"rope_scaling": rope} if rope else {}
    return {**config, "model_type": model_type, "gguf": True}


def _of_spec(spec: Any) -> dict[str, Any] | None:
    """Return the rope parameters of a spec; None if it names more, or a part of the head."""
    parts = split_spec(spec) if isinstance(spec, str) else []
    if len(parts) != 1 or parts[0][1] or parts[0][0].partition(":")[0] != "rope":
        return None
    options = {_OF_SPEC.get(k, k): x for k, x in read_spec(spec)[1].items() if k != "interleaved"}
    known = options.keys() <= {*_OF_SPEC.values(), *PARAMETERS} - {"partial_rotary_factor"}
    return options if known and not {"scaled", "proportional"} & {*options.values()} else None


def _rules(config: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rope parameters of each layer type; of all layers under the name ""."""
    rope, local = config.get("rope_parameters") or {}, config.get("local_rope_theta")
    local = local or _LOCAL.get(str(config.get("model_type")))
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters must be a dict, got {rope!r}")
    by_type = {kind: x for kind, x in rope.items() if isinstance(x, Mapping)}
    unread = [key for key in _UNREAD if config.get(key) or rope.get(key)]
    unread = [key for key in unread if key != "attn_factor" or rope.get(key) != 1]
    if unread and not by_type:
        raise ValueError(f"a report cannot read a rotation with {', '.join(unread)}")
    if not by_type and local:  # before transformers 5
        scaled = rope if str(config.get("model_type")).startswith("modernbert") else {}
        sliding = {**scaled, "rope_theta": local}
        by_type = {"full_attention": rope, "sliding_attention": sliding}
    if bases := config.get("layer_rope_theta"):  # Granite: 0 for layers without positions
        by_type = {f"theta={x:g}": {**rope, "rope_theta": x} for x in sorted({*bases} - {0})}
    original = None if by_type else config.get(ORIGINAL)  # Phi-3's, which replaces rope's
    outer = {} if original is None else {ORIGINAL: original}
    part = config.get("partial_rotary_factor") or _PARTS.get(str(config.get("model_type")))
    rest = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": part}
    rules = {kind: {**rest, **x, **outer} for kind, x in (by_type or {"": rope}).items()}
    if not spec:
        return rules
    for kind, x in rules.items():  # as in hf/rotary.py, a spec's options replace a scaling
        part = None if x.get("rope_type") == "proportional" else x["partial_rotary_factor"]
        rules[kind] = {"rope_theta": x["rope_theta"], "partial_rotary_factor": part, **spec}
    return rules


def _engine(
    config: Mapping[str, Any], layer_type: str, rope: dict[str, Any], length: int | None
) -> tuple[Engine, list[str]]:
    """Return the right engine of a layer type, and remarks for its report."""
    got = f"got the keys {', '.join(map(str, config)) or '(none)'}"
    for layer, changes in (config.get("per_layer_config") or {}).items():  # Gemma 4
        if layer_type in (config.get("layer_types") or ())[int(layer) : int(layer) + 1]:
            config = {**config, **changes}
    if layer_type == "sliding_attention" and "attention.key_length_swa" in config:
        config = {**config, "head_dim": config["attention.key_length_swa"], "rotary_dim": None}
    head = config.get("global_head_dim") if layer_type == "full_attention" else None  # Gemma 4
    head = head or config.get("head_dim")
    if head is None:
        width, heads = config.get("hidden_size"), config.get("num_heads")
        if width is None or heads is None:
            raise ValueError(f"RoPE needs head_dim, or hidden_size and num_attention_heads; {got}")
        head = checks.integer("hidden_size", width) // checks.integer("heads", heads, 1)
    head, max_length = checks.integer("head_dim", head, 1), config.get("trained_length")
    if config.get("rotary_dim") is not None:
        size = checks.integer("rotary_dim", config["rotary_dim"])
        part = size / head if int(size / head * head) == size else math.nextafter(size / head, 1)
        rope["partial_rotary_factor"] = part  # the size follows from it exactly
    if config.get("qk_rope_head_dim"):
        rope["partial_rotary_factor"] = None  # it is a part of the larger head_dim
    kind = rope.get("rope_type") or rope.get("type") or "linear" * bool(rope.get("factor"))
    rope |= {"type": None, "rope_type": _OLD_TYPES.get(kind, kind or None)}
    parameters, notes = standard_parameters(rope, max_length)
    if "rope_theta" not in parameters:
        if config.get("model_type") not in _WITHOUT_BASE and "rope.dimension_count" not in config:
            raise ValueError(f"a report needs rope_theta, as in to_dict() of a loaded model; {got}")
        parameters["rope_theta"] = DEFAULT_THETA
        notes.append("the configuration gives no base, so 10000 is used")
    pairs = config.get("rope_interleave")
    pairs = config.get("model_type") in INTERLEAVED if pairs is None else bool(pairs)
    order = None if "gguf" in config else pairs  # GGUF does not name the order
    engine = Engine(head, parameters, max_length, length, order)
    engine.frequencies  # noqa: B018 - it raises an error for a wrong parameter
    return engine, notes
