"""The model types wavepe_<family>: models whose checkpoints keep their position encoding."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

try:  # how weights are named on disk, since transformers 5
    from transformers import conversion_mapping
except ImportError:
    conversion_mapping = None

from .config import CLASS_PREFIX, CONFIGS, MODELS
from .families import NAME, decoder
from .install import install_own
from .learned import MODULE
from .lengths import check_lengths

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
# By model_type the names of classes, in tables of transformers that Auto classes do not write, but
# others look into: Trainer (is this a causal model, whose labels are shifted?), pipelines.
NAMES = [table for key, table in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")]


class EncodedModel:
    """What makes a stock model one of a type wavepe_<family>."""

    stock: Any
    # transformers chooses these by itself in places, and the encoding would be gone.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def post_init(self) -> None:
        super().post_init()  # type: ignore[misc] # of the stock class beside this one
        model: Any = self
        install_own(model)
        check_lengths(model)
        if hasattr(decoder(model), MODULE):
            kept = set(model._keep_in_fp32_modules_strict or ())
            model._keep_in_fp32_modules_strict = kept | {MODULE}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for it in the source of the module that the class is from.
        return cls.stock._can_set_experts_implementation()

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
    body = {"__module__": __name__, "__doc__": doc, "config_class": config, "stock": stock}
    globals()[name] = MODELS[name] = type(name, (EncodedModel, stock), body)
    return MODELS[name]


def register() -> None:
    """Make the types known to the Auto classes."""
    for kind, config in CONFIGS.items():
        AutoConfig.register(kind, config, exist_ok=True)
        _copy_conversion(config.stock.model_type, kind)
        _register_tokenizer(kind, config)
        for auto, classes in KINDS:
            if config.stock in classes:
                made = _model_class(classes[config.stock], config)
                auto.register(config, made, exist_ok=True)
                _copy_conversion(classes[config.stock].__name__, made.__name__)
        for names in NAMES:
            own = CLASS_PREFIX + str(names.get(config.stock.model_type))
            if own in MODELS:
                names[kind] = own


def _register_tokenizer(kind: str, config: Any) -> None:
    """Let AutoTokenizer choose as for the stock type.

    It goes by the class of the configuration, and in transformers 5 by model_type before that: by a
    table, and by a set of types whose files name a wrong class.
    """
    stock, tables = config.stock.model_type, tokenization_auto
    classes = tables.TOKENIZER_MAPPING.get(config.stock, None)
    if classes is not None:
        tables.TOKENIZER_MAPPING.register(config, classes, exist_ok=True)
    if stock in tables.TOKENIZER_MAPPING_NAMES:
        tables.TOKENIZER_MAPPING_NAMES[kind] = tables.TOKENIZER_MAPPING_NAMES[stock]
        # Where the table leads to a module of the type's name.
        configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME[kind] = (
            configuration_auto.model_type_to_module_name(stock)
        )
    wrong: set[str] = getattr(tables, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    if stock in wrong:
        wrong.add(kind)


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
