"""The relative bias [T] of T5, mT5 and UMT5 themselves, by `wavepe.ops.attention`.

A stock layer makes a tensor of heads x queries x keys from its table of buckets. A patched one
makes one row, with a number for each distance, which transformers hands from layer to layer as it
does that tensor. Modules, parameters and files stay those of the stock model.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ops._common import wide
from . import families
from .families import ATTENTION
from .install import Installed, installed, replace_configs
from .layers import LayerEncodings
from .passes import Args, Kwargs

OWN = "t5"  # the only spec
# Arguments that a layer passes on to the attention: the position of its first query, and the row of
# a UMT5, whose layers have tables of their own and take no `position_bias`.
OFFSET, ROW = "wavepe_offset", "wavepe_row"
TABLE = "relative_attention_bias"  # the module of a layer that has the table
NO_TABLE = SimpleNamespace(weight=torch.empty(0))  # for `init_weights` of a UMT5


def is_t5(model: Any) -> bool:
    """Return whether this is a model of one of the families."""
    return isinstance(model, PreTrainedModel) and model.config.model_type in families.T5_TYPES


def install(model: PreTrainedModel, choice: LayerEncodings) -> None:
    """Let a stock T5 make one row of its bias; ValueError for any other encoding."""
    name, layers = type(model).__name__, _attentions(model)
    if str(choice) != OWN:
        raise ValueError(
            f"this {name} keeps its own position encoding: patch(model, {OWN!r}) computes it "
            f"without a tensor of queries x keys; got {str(choice)!r}"
        )
    if any("_stock_attention" in vars(layer) for layer in layers):
        raise ValueError(f"this {name} is patched already: call wavepe.hf.unpatch first")
    if not layers or not all(map(families.calls_interface, layers)):
        raise TypeError(
            f"this {name} is not built like that of transformers 5.24: its layers must call "
            "transformers' attention interface"
        )
    for layer in layers:  # up to `near` each distance has a bucket, also beyond the end of the row
        far = layer.relative_attention_max_distance
        near = layer.relative_attention_num_buckets // (2 if layer.is_decoder else 4)
        if far <= near and hasattr(layer, TABLE):
            raise ValueError(f"patch needs relative_attention_max_distance > {near}, got {far}")
    # Another model may share the configurations.
    replace_configs(model, {id(x.config): copy.deepcopy(x.config) for x in layers})
    model._wavepe = record = Installed(OWN, name, model.config, model.config)
    for layer in layers:
        layer._stock_attention = layer.config._attn_implementation
        record.hooks.append(layer.register_forward_pre_hook(before_attention, with_kwargs=True))
        if "position_bias" not in families.argument_names(layer):
            layer.compute_bias, layer.has_relative_attention_bias = _in_row, True
            if TABLE not in layer._modules:
                setattr(layer, TABLE, NO_TABLE)
    for layer in layers:
        layer.config._attn_implementation = ATTENTION


def uninstall(model: PreTrainedModel) -> None:
    """Undo `install`; ValueError unless this model was patched."""
    record = installed(model)
    if record is None:
        raise ValueError(f"this {type(model).__name__} is not patched")
    for hook in record.hooks:
        hook.remove()
    for layer in _attentions(model):
        layer.config._attn_implementation = layer.__dict__.pop("_stock_attention")
        layer.__dict__.pop("compute_bias", None)
        layer.__dict__.pop(TABLE, None)
        layer.has_relative_attention_bias = TABLE in layer._modules
    del model._wavepe


def before_attention(module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Give a layer its row, unless an earlier layer has, and the position of its first query."""
    if (chosen := module.config._attn_implementation) != ATTENTION:
        raise ValueError(
            f"a patched {type(module).__name__} needs attn_implementation={ATTENTION!r}, got "
            f"{chosen!r}: call wavepe.hf.unpatch(model) first"
        )
    cache = next((x for x in map(kwargs.get, families.CACHE_NAMES) if x is not None), None)
    offset = 0 if cache is None else cache.get_seq_length(module.layer_idx)
    # A static cache goes on counting in its tensor while the layer runs.
    kwargs[OFFSET] = offset.clone() if isinstance(offset, Tensor) else offset
    name = ROW if module.compute_bias is _in_row else "position_bias"
    if kwargs.get(name) is None:
        kwargs[name] = _row(module, args[0] if args else kwargs["hidden_states"])
    return args, kwargs


def take_arguments(kwargs: Kwargs, position_bias: Tensor | None, query: Tensor) -> dict[str, Any]:
    """Take the arguments of a patched T5 out of `kwargs`; return those of `ops.attention`."""
    row: Any = kwargs.pop(ROW, position_bias)
    options = {"offset": kwargs.pop(OFFSET)}
    if row.shape[-1]:
        bias = row[0, :, 0].to(query.device, wide(query))
        options |= {"bias": bias, "bias_first": -(bias.shape[1] // 2), "bias_beyond": "edge"}
    return options


def _attentions(model: PreTrainedModel) -> list[Any]:
    """Return the layers of attention: of the encoder, of the decoder, and between them."""
    return [x for x in model.modules() if hasattr(x, "has_relative_attention_bias")]


def _row(module: Any, states: Tensor) -> Tensor:
    """Return the bias (1, H, 1, 2 far + 1) of the distances from -far on, for far = max_distance.

    Beyond, it is that of the last distance. A layer without a table has an empty row.
    """
    if TABLE not in module._modules:
        return states.new_zeros(1, module.n_heads, 1, 0)
    far = module.relative_attention_max_distance
    bias: Tensor = type(module).compute_bias(module, 1, 2 * far + 1, states.device, far)
    return bias.flip(-1)  # transformers counts from the query to the key


def _in_row(*_: Any, device: torch.device, **__: Any) -> Tensor:
    """Stand in for `compute_bias` in a UMT5, whose bias is in the argument `ROW`."""
    return torch.empty(0, device=device)
