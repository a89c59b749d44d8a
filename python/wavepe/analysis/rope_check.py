"""`wavepe.hf.check_rope`: the referee of RoPE on a live model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from ..hf import families, rope_config
from ..hf.install import installed
from ..hf.rotary import RopeRotation
from ..referee import RopeReport, Verdict, rope_report
from ..referee.check import joined
from ..referee.engine import probes


def check_rope(model: nn.Module, positions: Iterable[int] | None = None) -> Verdict:
    """Run a model once, and check the cosines and sines that each of its layers gets.

    Angles that were computed in float32 count as right, because transformers computes them so.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model of a supported family, with its own RoPE or a ``rope`` that `rope_report` reads.
        ValueError if it has another encoding.
    positions : iterable of int, optional
        The positions of the tokens. The default is 0, powers of two, and the last trained one.

    Returns
    -------
    Verdict
        True if all layers that rotate agree. Its text has a line for each kind of layers.

    Examples
    --------
    >>> import wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))
    >>> wavepe.hf.check_rope(model.bfloat16()).mistakes
    ('bfloat16 frequencies',)
    """
    base = families.decoder(model)
    config, layers, sizes = base.config, families.attentions(base), families.sizes(base)
    at = probes(config.max_position_embeddings) if positions is None else np.array([*positions])
    parts = record.length_parts if (record := installed(base)) else ()
    fixed = [x.rotation.length for x in parts if isinstance(x, RopeRotation)]
    length = next(filter(None, fixed), int(at.max()) + 1)
    settings = config.to_dict()
    reports: dict[Any, RopeReport] = {}
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        if (slot := families.slot(config, layer, index)) is not None:
            changed = {**settings, "head_dim": size.head_dim, "layer_rope_theta": ()}
            if slot.layer_type is None:
                changed["rope_parameters"] = rope_config.parameters(config, slot)
            reports[layer] = rope_report(changed, length=length, layer_type=slot.layer_type)
    if not reports:
        raise ValueError(f"check_rope needs RoPE, and no layer of this {config.model_type} has it")
    verdicts: dict[int, Verdict] = {}

    def check(layer: Any, args: Any, kwargs: Any) -> None:
        tables = map(families.of(config).layout.narrow, kwargs["position_embeddings"])
        cos, sin = (x[0].double().cpu().numpy() for x in tables)
        verdict = reports[layer].check(positions=at, cos=cos, sin=sin, float32_angles=True)
        verdicts[layers.index(layer)] = verdict

    tokens = torch.from_numpy(at).to(base.device)[None]
    with ExitStack() as hooks, torch.no_grad():
        for layer in reports:
            hooks.enter_context(layer.register_forward_pre_hook(check, with_kwargs=True))
        base(torch.zeros_like(tokens), position_ids=tokens, use_cache=False)
    return joined(verdicts)
