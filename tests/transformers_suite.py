"""transformers' own tests of a model, on types wavepe_<family> and, to compare, the stock types.

`make test-transformers` fetches the tests, which are in transformers' sdist and in no wheel, and
runs this file; its name keeps it out of `make test`. The sdist lacks the tests of generation and of
export: TRANSFORMERS_TESTS=folder names the tests of a whole checkout of transformers instead.
"""

import importlib
import inspect
import os
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5")

import wavepe.hf  # noqa: F401 - it registers the types
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.testing_utils import _TEXT_MODEL_TESTER_DEFAULTS as SIZES
from wavepe.hf.config import EncodedConfig
from wavepe.hf.families import ATTENTION
from wavepe.hf.model_types import KINDS, EncodedModel

BUILD = Path(__file__).parents[1] / "build/transformers"
FOLDER = Path(os.environ.get("TRANSFORMERS_TESTS") or BUILD / "tests")
if not (FOLDER / "test_modeling_common.py").exists():
    pytest.skip(f"no tests of transformers in {FOLDER}", allow_module_level=True)
sys.path.append(str(BUILD / "packages"))  # parameterized

# Each family brings what the others lack: Gemma 2 a cap, windows and tied embeddings; Mixtral
# experts, and weights that are stored under other names; GPT-NeoX names of its own, and heads that
# are turned in part.
FAMILIES = ("llama", "gemma2", "mixtral", "gpt_neox")
ENCODINGS = {
    "Stock": None,
    "Rope": "rope",
    "Wavelet": "wavelet:scales=4",
    "Learned": "wavelet:scales=4,learned=true",
}

ONE_ATTENTION = "a type here has one attention and refuses others: tests/test_hf_types.py"
# Tests by the beginning of their names -> why they cannot hold for a type of wavepe.
EXCEPTED = {
    "test_can_set_attention_dynamically": ONE_ATTENTION,
    "test_config_attn_implementation_setter": ONE_ATTENTION,
    "test_eager_matches_sdpa_inference": ONE_ATTENTION,
    "test_sdpa_can_dispatch_non_composite_models": ONE_ATTENTION,
    "test_inherits_generation_mixin": (
        "it looks for GenerationMixin among the direct bases: here it is one of the stock class's"
    ),
}
WITHOUT_ROPE = {
    "test_model_rope_scaling_from_config": (
        "rope scaling has to change what the model computes: this encoding has no rope to scale"
    ),
}

# Names that the tests import from modules that only a checkout has.
LACKING = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "return_dict": False, "output_hidden_states": True, "output_attentions": True,
            "dtype": "float16", "chunk_size_feed_forward": 5, "architectures": ["LlamaModel"],
            "id2label": {0: "label"}, "label2id": {"label": "0"}, "problem_type": "regression",
        }
    },
}  # fmt: skip


def import_tests():
    """Make FOLDER the package `tests`, and stand in for the modules that it lacks."""
    package = types.ModuleType("tests")
    package.__path__ = [str(FOLDER)]
    sys.modules["tests"] = package
    for name, content in LACKING.items():
        if not (FOLDER / f"{name.replace('.', '/')}.py").exists():
            module = types.ModuleType(f"tests.{name}")
            vars(module).update(content)
            sys.modules[module.__name__] = module
    names = ("test_modeling_common", "test_configuration_common", "test_training_mixin")
    return [importlib.import_module(f"tests.{name}") for name in names]


common, configuration, training = import_tests()


class SmallModel:
    """Answers to transformers' tests about a model: its classes, a small configuration, inputs."""

    type_vocab_size = 16
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]

    def __init__(self, kind, encoding):
        vars(self).update(SIZES)
        if encoding is not None:
            self.position_encoding = encoding
        self.config_class = CONFIG_MAPPING[kind]
        self.all_model_classes = [
            classes[self.config_class] for _, classes in KINDS if self.config_class in classes
        ]
        by_ending = {made.__name__.partition("For")[2]: made for made in self.all_model_classes}
        self.causal_lm_class = by_ending["CausalLM"]
        self.sequence_classification_class = by_ending["SequenceClassification"]

    def get_config(self):
        args = {}
        for name in (*inspect.signature(self.config_class).parameters, "pad_token_id"):
            common_name = self.config_class.attribute_map.get(name, name)
            for own in (name, common_name):
                if hasattr(self, own):
                    args[name] = getattr(self, own)
        return self.config_class(**args)

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class OneType(common.ModelTesterMixin, common.GenerationTesterMixin, training.TrainingTesterMixin):
    kind = encoding = model_tester = None
    model_split_percents = (0.5, 0.7, 0.8)  # as for the stock Llama
    test_can_init_all_missing_weights_before_2023 = True  # whatever year it finds in our file

    def setUp(self):
        self.model_tester = SmallModel(self.kind, self.encoding)
        self.all_model_classes = self.model_tester.all_model_classes
        # The tests name "eager" in passing, for the attention's weights, which these types give.
        named = property(lambda config: ATTENTION, lambda config, value: None)
        for owner, name, value in (
            (EncodedConfig, "_attn_implementation", named),
            (
                EncodedModel,
                "_check_and_adjust_attn_implementation",
                lambda *args, **kwargs: ATTENTION,
            ),
        ):
            change = mock.patch.object(owner, name, value, create=True)
            change.start()
            self.addCleanup(change.stop)

    def test_config(self):
        tester = configuration.ConfigTester(self, config_class=self.model_tester.config_class)
        tester.run_common_tests()


def class_of(family, word, encoding):
    """The tests of one type with one encoding; None for the stock type."""
    kind, excepted = family, {}
    if encoding is not None:
        kind, excepted = f"wavepe_{family}", dict(EXCEPTED)
        if not encoding.startswith("rope"):
            excepted |= WITHOUT_ROPE
    name = f"{word}{family.title().replace('_', '')}Test"
    made = type(name, (OneType, unittest.TestCase), {"kind": kind, "encoding": encoding})
    made.__module__ = __name__
    for test in dir(made):
        for beginning, reason in excepted.items():
            if test.startswith(beginning) and callable(getattr(made, test)):
                setattr(made, test, unittest.skip(f"wavepe: {reason}")(lambda self: None))
    return made


for family in FAMILIES:
    for word, encoding in ENCODINGS.items():
        made = class_of(family, word, encoding)
        globals()[made.__name__] = made
del made
