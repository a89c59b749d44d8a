"""The model types wavepe_<family>: models whose checkpoints keep their position encoding."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

from ..positions import Learned
from .config import CLASS_PREFIX, CONFIGS, MODELS
from .families import ATTENTION
from .folder import AUTO_CLASSES, OfFolder
from .install import check_owner, install_own
from .layers import LayerEncodings
from .learned import MODULE_NAME
from .lengths import check_lengths

AUTO_MODELS: tuple[Any, ...] = (
    transformers.AutoModel,
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
    transformers.AutoModelForQuestionAnswering,
)
# Arguments of from_pretrained that say where a file is.
PLACE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download")
# Tables of transformers, model_type -> class name, that the Auto classes do not fill. Pipelines
# read them. Trainer does too, to know which models are causal and need shifted labels.
NAMES = [table for key, table in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")]


class EncodedModel(OfFolder):
    """Mixin that turns a stock model class into one of a type wavepe_<family>."""

    stock: Any
    # transformers may choose these attentions by itself; they would ignore the encoding.
    _supports_flash_attn = False
    _supports_flex_attn = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a model as transformers does; see `forget_others`."""
        parent: Any = super()
        folder, place = pretrained_model_name_or_path, {x: kwargs[x] for x in PLACE if x in kwargs}
        loaded = parent.from_pretrained(folder, *args, **kwargs)
        forget_others(loaded[0] if isinstance(loaded, tuple) else loaded, folder, place)
        return loaded

    def post_init(self) -> None:
        super().post_init()  # type: ignore[misc] # that of the stock class
        model: Any = self
        install_own(model)
        check_lengths(model)
        if any(isinstance(module, Learned) for module in model.modules()):
            kept = set(model._keep_in_fp32_modules_strict or ())
            model._keep_in_fp32_modules_strict = kept | {MODULE_NAME}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks at the source of the module that defines the class.
        return cls.stock._can_set_experts_implementation()

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation not in (None, ATTENTION):
            raise ValueError(
                f"the encoding needs attn_implementation={ATTENTION!r}, got {attn_implementation!r}"
            )
        return ATTENTION


def forget_others(model: Any, folder: Any, place: dict[str, Any]) -> None:
    """Reset learned parameters of parts that the folder does not name: names may agree."""
    if folder is None or not any(isinstance(module, Learned) for module in model.modules()):
        return
    try:
        before = type(model.config).get_config_dict(folder, **place)[0].get("position_encoding")
    except OSError:  # weights without a configuration
        return
    if before is None or before == model.config.position_encoding:
        return
    known = {part for encoding in LayerEncodings(before).encodings for part in encoding.parts}
    for module in model.modules():
        # The module of a combination has those of its parts, and nothing itself.
        if isinstance(module, Learned) and not known.issuperset(module.encoding.parts):
            module.reset_own()


@functools.wraps(PreTrainedModel.save_pretrained)
def _checked_save(
    self: PreTrainedModel, *args: Any, _save: Any = PreTrainedModel.save_pretrained, **kwargs: Any
) -> Any:
    """Save any model of transformers; a model inside it may have been patched."""
    check_owner(self)
    return _save(self, *args, **kwargs)


def _model_class(stock: Any, config: Any) -> Any:
    name = CLASS_PREFIX + stock.__name__
    doc = f"""Build a {stock.__name__} with the position encoding that its configuration names.

    The encoding is `config.position_encoding`. `save_pretrained` and `from_pretrained` keep it. The
    Auto classes know this type once `wavepe.hf` is imported. To load a checkpoint, of this type or
    a stock one, with another encoding, call ``from_pretrained(folder, position_encoding=...)``.

    Parameters
    ----------
    config : {config.__name__}
        Sizes and position encoding of the model.

    Raises
    ------
    ValueError
        The encoding does not fit the sizes of the model.
    """
    body = {"__module__": __name__, "__doc__": doc, "config_class": config, "stock": stock}
    globals()[name] = MODELS[name] = type(name, (EncodedModel, stock), body)
    return MODELS[name]


def register() -> None:
    """Register the types wavepe_<family> with transformers' Auto classes and tables."""
    for kind, config in CONFIGS.items():
        AutoConfig.register(kind, config, exist_ok=True)
        _copy_conversion(config.stock.model_type, kind)
        _register_tokenizer(kind, config)
        for auto in AUTO_MODELS:
            classes = auto._model_mapping  # of configurations
            if config.stock in classes:
                cls = _model_class(classes[config.stock], config)
                auto.register(config, cls, exist_ok=True)
                AUTO_CLASSES[kind][auto.__name__] = cls.__name__
                _copy_conversion(classes[config.stock].__name__, cls.__name__)
        for names in NAMES:
            name = CLASS_PREFIX + str(names.get(config.stock.model_type))
            if name in MODELS:
                names[kind] = name


def _register_tokenizer(kind: str, config: Any) -> None:
    """Let AutoTokenizer choose the tokenizer of the stock type."""
    stock, tables = config.stock.model_type, tokenization_auto
    classes = tables.TOKENIZER_MAPPING.get(config.stock, None)
    if classes is not None:
        tables.TOKENIZER_MAPPING.register(config, classes, exist_ok=True)
    if stock in tables.TOKENIZER_MAPPING_NAMES:
        tables.TOKENIZER_MAPPING_NAMES[kind] = tables.TOKENIZER_MAPPING_NAMES[stock]
        # The table leads to the module that is named after the type.
        configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME[kind] = (
            configuration_auto.model_type_to_module_name(stock)
        )
    wrong: set[str] = getattr(tables, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    if stock in wrong:
        wrong.add(kind)


def _copy_conversion(stock: str, kind: str) -> None:
    """Read and write the weights of our type in the same way as those of the stock type."""
    if (mapping := get_checkpoint_conversion_mapping(stock)) is not None:
        register_checkpoint_conversion_mapping(kind, mapping, overwrite=True)


def stored_as_named(model: Any) -> bool:
    """Return whether the tensors in files have the same names as in memory."""
    names = type(model).__name__, model.config.model_type
    return all(get_checkpoint_conversion_mapping(name) is None for name in names)


register()
PreTrainedModel.save_pretrained = _checked_save
