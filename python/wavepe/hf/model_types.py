"""The model types wavepe_<family>: models whose checkpoints keep their position encoding."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig

try:  # how weights are named on disk, since transformers 5
    from transformers import conversion_mapping
except ImportError:
    conversion_mapping = None

from .config import CLASS_PREFIX, CONFIGS, MODELS
from .families import NAME, decoder
from .install import install_own
from .learned import MODULE

# Each kind of model: its Auto class, and transformers' map from configurations to classes.
KINDS = (
    (transformers.AutoModel, transformers.MODEL_MAPPING),
    (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    (
        transformers.AutoModelForSequenceClassification,
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ),
    (
        transformers.AutoModelForTokenClassification,
        transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    ),
    (
        transformers.AutoModelForQuestionAnswering,
        transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    ),
)


class EncodedModel:
    """What makes a stock model one of a type wavepe_<family>."""

    # transformers chooses these by itself in places, and the encoding would be gone.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def post_init(self) -> None:
        super().post_init()  # type: ignore[misc] # of the stock class beside this one
        model: Any = self
        install_own(model)
        if hasattr(decoder(model), MODULE):
            kept = set(model._keep_in_fp32_modules_strict or ())
            model._keep_in_fp32_modules_strict = kept | {MODULE}

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation not in (None, NAME):
            raise ValueError(
                f"{type(self).__name__} needs attn_implementation={NAME!r}, where its position "
                f"encoding is; got {attn_implementation!r}"
            )
        return NAME


def _model_class(stock: Any, config: Any) -> Any:
    name = CLASS_PREFIX + stock.__name__
    doc = f"""A {stock.__name__} with the encoding `config.position_encoding`.

    `save_pretrained` and `from_pretrained` keep the encoding, and the Auto classes know the type
    once `wavepe.hf` is imported. `from_pretrained(folder, position_encoding=...)` reads a
    checkpoint, its own or a stock one, with another encoding.
    """
    body = {"__module__": __name__, "__doc__": doc, "config_class": config}
    globals()[name] = MODELS[name] = type(name, (EncodedModel, stock), body)
    return MODELS[name]


def register() -> None:
    """Make the types known to the Auto classes."""
    for kind, config in CONFIGS.items():
        AutoConfig.register(kind, config, exist_ok=True)
        _copy_conversion(config.stock.model_type, kind)
        for auto, classes in KINDS:
            if config.stock in classes:
                made = _model_class(classes[config.stock], config)
                auto.register(config, made, exist_ok=True)
                _copy_conversion(classes[config.stock].__name__, made.__name__)


def _copy_conversion(stock: str, own: str) -> None:
    """Read and write the weights of one's own type as those of the stock type or class."""
    if (mapping := _conversion(stock)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(own, mapping, overwrite=True)


def _conversion(name: str) -> Any:
    if conversion_mapping is None:
        return None
    return conversion_mapping.get_checkpoint_conversion_mapping(name)


def stored_as_named(model: Any) -> bool:
    """Return whether files hold a model's tensors under the names that it has in memory."""
    return (
        _conversion(type(model).__name__) is None and _conversion(model.config.model_type) is None
    )


register()
