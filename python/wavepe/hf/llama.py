"""The model type wavepe_llama: Llamas whose checkpoints keep their position encoding."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from .config import WavePELlamaConfig
from .install import install_own
from .learned import MODULE
from .names import MODEL_TYPE, NAME
from .rope_config import TRANSFORMERS_5


class _WithEncoding:
    """What makes a Llama class one of the type wavepe_llama."""

    config_class = WavePELlamaConfig
    # transformers chooses these by itself in places, and the encoding would be gone.
    _supports_flash_attn = False
    _supports_flex_attn = False
    if TRANSFORMERS_5:
        _keep_in_fp32_modules_strict = {MODULE}  # as transformers has it

    def post_init(self) -> None:
        super().post_init()  # type: ignore[misc] # of the Llama class beside this one
        install_own(self)  # type: ignore[arg-type]
        base: Any = self.base_model  # type: ignore[attr-defined]
        if not TRANSFORMERS_5 and hasattr(base, MODULE):
            # transformers < 5 refuses names of modules that the model does not have yet
            self._keep_in_fp32_modules_strict = {MODULE}

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation not in (None, NAME):
            raise ValueError(
                f"{type(self).__name__} needs attn_implementation={NAME!r}, where its position "
                f"encoding is; got {attn_implementation!r}"
            )
        return NAME


class WavePELlamaModel(_WithEncoding, LlamaModel):
    """A LlamaModel with the encoding `config.position_encoding`."""

    config_class = WavePELlamaConfig


class WavePELlamaForCausalLM(_WithEncoding, LlamaForCausalLM):
    """A LlamaForCausalLM with the encoding `config.position_encoding`.

    `save_pretrained` and `from_pretrained` keep the encoding, and the Auto classes know the type
    once `wavepe.hf` is imported. `from_pretrained(folder, position_encoding=...)` reads a
    checkpoint, its own or a stock Llama's, with another encoding.

    Examples
    --------
    >>> import wavepe.hf
    >>> config = wavepe.hf.WavePELlamaConfig(
    ...     position_encoding="wavelet:scales=4", vocab_size=64, hidden_size=32,
    ...     intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    >>> model = wavepe.hf.WavePELlamaForCausalLM(config)
    >>> model.config.position_encoding
    'wavelet:scales=4'
    """

    config_class = WavePELlamaConfig


class WavePELlamaForSequenceClassification(_WithEncoding, LlamaForSequenceClassification):
    """A LlamaForSequenceClassification with the encoding `config.position_encoding`."""

    config_class = WavePELlamaConfig


class WavePELlamaForTokenClassification(_WithEncoding, LlamaForTokenClassification):
    """A LlamaForTokenClassification with the encoding `config.position_encoding`."""

    config_class = WavePELlamaConfig


class WavePELlamaForQuestionAnswering(_WithEncoding, LlamaForQuestionAnswering):
    """A LlamaForQuestionAnswering with the encoding `config.position_encoding`."""

    config_class = WavePELlamaConfig


def register() -> None:
    """Make the type known to the Auto classes."""
    AutoConfig.register(MODEL_TYPE, WavePELlamaConfig, exist_ok=True)
    for auto, model in (
        (AutoModel, WavePELlamaModel),
        (AutoModelForCausalLM, WavePELlamaForCausalLM),
        (AutoModelForSequenceClassification, WavePELlamaForSequenceClassification),
        (AutoModelForTokenClassification, WavePELlamaForTokenClassification),
        (AutoModelForQuestionAnswering, WavePELlamaForQuestionAnswering),
    ):
        auto.register(WavePELlamaConfig, model, exist_ok=True)
