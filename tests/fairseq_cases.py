"""Helpers of the fairseq tests: a tiny corpus, runs of fairseq's commands, models, attention.

The commands run in this process, and attention is written out in torch. If fairseq is not
installed, importing this skips the module.
"""

import atexit
import copy
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import pydoc_data.topics
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from cases import load_torch
from encoding_cases import attention_weights, learned_by, parts_of

if importlib.util.find_spec("fairseq") is None:
    pytest.skip("fairseq is not installed here: make test-fairseq", allow_module_level=True)

torch, ops = load_torch()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fairseq's and Hydra's own, while they are imported
    import wavepe.fairseq

    wavepe.fairseq.register()
    import fairseq.models.transformer_lm
    import fairseq_cli.eval_lm
    import fairseq_cli.train
    import hydra
    from fairseq import checkpoint_utils, models, options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.modules import MultiheadAttention
    from hydra.core.config_store import ConfigStore
    from wavepe.fairseq import commands

FIXED = "fairseq-fixed" in importlib.metadata.packages_distributions()["fairseq"]
# Python 3.11 can import fairseq 0.12.2 only with a shim.
NEEDS_SHIM = not FIXED and sys.version_info >= (3, 11)

# Warnings of fairseq and Hydra with today's packages, which no test is about.
MARKS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        r"hydra.experimental",
        r"\s*The version_base parameter is not specified",
        r"In '.*'. Usage of deprecated keyword in package header",
        r"\s*'.*' is validated against ConfigStore schema",
        r"\s*The strict flag in the compose API is deprecated",
        r"'pin_memory' argument is set as true",
        r"`torch.cuda.amp.autocast",
        r"`broadcast_buffers` is deprecated",
        r"Support for mismatched key_padding_mask and attn_mask",  # fairseq's own attention
    )
]

STOCK = fairseq.models.transformer_lm.TransformerLanguageModel
STOCK_OPTIONS = fairseq.models.transformer_lm.TransformerLanguageModelConfig
LENGTH = 32  # trained length
HEADS, HEAD = 4, 8
DIM = HEADS * HEAD


def split(words):
    return tuple(shlex.split(words))


COMMON = split(
    "--task language_modeling --sample-break-mode none --seed 1 --cpu --num-workers 0 "
    f"--no-progress-bar --tokens-per-sample {LENGTH}"
)
TRAINING = split(
    "--decoder-layers 2 --decoder-ffn-embed-dim 64 --max-tokens 256 --clip-norm 0.1 "
    f"--decoder-attention-heads {HEADS} --decoder-embed-dim {DIM} --decoder-input-dim {DIM} "
    f"--decoder-output-dim {DIM} --required-batch-size-multiple 1 --no-epoch-checkpoints "
    "--disable-validation --ddp-backend legacy_ddp"
)
# The recipe of [A] for WikiText-103, smaller.
WIKI103 = split(
    "--arch transformer_lm_wiki103 --adaptive-input-cutoff 100,200 --adaptive-softmax-cutoff "
    "100,200 --criterion adaptive_loss --optimizer nag --lr-scheduler cosine --lr 1.0 --t-mult 2 "
    "--lr-period-updates 40 --lr-shrink 0.75 --warmup-updates 20 --warmup-init-lr 1e-07 "
    "--stop-min-lr 1e-09 --min-lr 0.0001"
)
# The architecture without a name of its own, which fairseq builds in another way.
BARE = split("--arch transformer_lm --criterion cross_entropy --optimizer adam --lr 1e-3")
GPT = (*BARE, "--arch", "transformer_lm_gpt")
NO_DROPOUT = split(
    "--dropout 0 --attention-dropout 0 --activation-dropout 0 --adaptive-softmax-dropout 0"
)


class Run(NamedTuple):
    """A training: the loss per token of each update, and the last checkpoint."""

    losses: list[float]
    path: str
    state: dict[str, Any]


def command(name, *arguments):
    """Run one of our commands in this process."""
    with mock.patch.object(sys, "argv", [f"wavepe-fairseq-{name}", *map(str, arguments)]):
        getattr(commands, name)()


@functools.cache
def corpus():
    """A folder that our preprocess command wrote: English prose of the standard library, 900 lines
    of 4 to 17 words to train on and 100 to validate."""
    folder = Path(tempfile.mkdtemp(prefix="wavepe-fairseq-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = iter(" ".join(pydoc_data.topics.topics.values()).split())
    line = ["preprocess", "--only-source", "--workers", 1, "--thresholdsrc", 5]
    for option, repeats in (("trainpref", 180), ("validpref", 20)):
        lines = [itertools.islice(words, n) for _ in range(repeats) for n in (4, 9, 13, 17, 7)]
        (folder / option).write_text("".join(" ".join(x) + "\n" for x in lines))
        line += [f"--{option}", folder / option]
    command(*line, "--destdir", folder / "bin")
    return str(folder / "bin")


def arguments(folder, *given, recipe=WIKI103):
    """Return the command line of a training."""
    return [corpus(), *COMMON, *TRAINING, *recipe, "--save-dir", str(folder), *map(str, given)]


def configuration(line, parser=options.get_training_parser):
    """Return fairseq's configuration of a command line."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser(), list(line)))


def composed(*line):
    """Return a configuration as fairseq-hydra-train makes it, without parsing options."""
    with hydra.initialize_config_module("fairseq.config", version_base="1.1"):
        return hydra.compose("config", overrides=list(line))


def train(folder, *given, recipe=WIKI103):
    """Train in this process, 10 updates by default."""
    line = arguments(folder, "--max-update", 10, *given, recipe=recipe)
    losses = []
    step = tasks.FairseqTask.train_step

    def recorded(*args, **kwargs):
        loss, sample_size, logged = step(*args, **kwargs)
        losses.append(float(loss.detach()) / sample_size)
        return loss, sample_size, logged

    vars(checkpoint_utils.save_checkpoint).pop("best", None)  # left by an earlier run
    with mock.patch.object(tasks.FairseqTask, "train_step", recorded):
        fairseq_cli.train.main(configuration(line))
    path = Path(folder) / "checkpoint_last.pt"
    return Run(losses, str(path), torch.load(path, weights_only=True))


@functools.cache
def trained(*given, recipe=GPT):
    """Return a training that tests share; none of them may change its folder."""
    folder = tempfile.mkdtemp(prefix="wavepe-fairseq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train(folder, *given, recipe=recipe)


@functools.cache
def _evaluation(tokens, batch, given):
    size = {"--tokens-per-sample": tokens, "--max-tokens": 1024 if batch is None else 4096}
    if batch is not None:
        size["--batch-size"] = batch
    line = [corpus(), *COMMON, "--path", "checkpoint", "--gen-subset", "valid"]
    line += [*(x for pair in size.items() for x in pair), *given]
    return configuration(map(str, line), options.get_eval_lm_parser)


def evaluate(path, *given, tokens=LENGTH, batch=None, overrides=None, data=None):
    """Run eval-lm; return loss (base 2) and perplexity. `overrides` is --model-overrides."""
    cfg = copy.deepcopy(_evaluation(tokens, batch, given))
    cfg.common_eval.path = str(path)
    cfg.task.data = str(data or corpus())
    cfg.common_eval.model_overrides = str(overrides or {})
    return fairseq_cli.eval_lm.main(cfg)


def without_plugin(monkeypatch):
    """Let fairseq be as before the plug-in was registered, in a test."""
    monkeypatch.setitem(models.MODEL_REGISTRY, "transformer_lm", STOCK)
    monkeypatch.setitem(models.MODEL_DATACLASS_REGISTRY, "transformer_lm", STOCK_OPTIONS)
    for arch, name in models.ARCH_MODEL_NAME_REGISTRY.items():
        if name == "transformer_lm":
            monkeypatch.setitem(models.ARCH_MODEL_REGISTRY, arch, STOCK)
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    node = STOCK_OPTIONS()
    node._name = "transformer_lm"
    store.store(name="transformer_lm", group="model", node=node, provider="fairseq")


# --------------------------------------------------------------- models
@functools.cache
def _of_gpt():
    line = arguments("unused", *NO_DROPOUT, recipe=GPT)
    cfg = configuration(line)
    return cfg, tasks.setup_task(cfg.task)


RECORD = "decoder.position_encoding.record"


def record_of(state):
    """Return the record of the encoding in the state of a model, a dict."""
    return json.loads("".join(chr(round(number)) for number in state[RECORD].tolist()))


def model(spec, seed=0, *, stock=False, **changed):
    """A language model in evaluation mode, scores large enough that positions matter, and what an
    encoding learns off its initial values; `stock`: fairseq's own, of no positions at all."""
    base, task = _of_gpt()
    cfg = copy.deepcopy(base.model)
    if spec in EQUAL_COMPONENTS:  # a normalisation before each layer would remove it
        changed = {"_name": "transformer_lm", "decoder_normalize_before": False, **changed}
    # fairseq computes gelu in float32, whatever the model's dtype
    changed = {"no_token_positional_embeddings": stock, "activation_fn": "relu", **changed}
    for key, value in {"pos_enc": None if stock else spec, **changed}.items():
        cfg[key] = value
    torch.manual_seed(seed)
    made = task.build_model(cfg)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                x.mul_(3)
            if "position_encoding" in name:
                x.add_(0.3 * torch.randn(x.shape))
    return made.eval()


def dictionary():
    return _of_gpt()[1].source_dictionary


@functools.cache
def validation_words():
    """Return the valid split in one row: 1100 words and ends of lines."""
    task = _of_gpt()[1]
    task.load_dataset("valid")
    blocks = task.dataset("valid")
    return torch.cat([blocks[i]["target"] for i in range(len(blocks))])


def tokens(rows=3, length=24, seed=1):
    """Return random words."""
    known = dictionary()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(known.nspecial, len(known), (rows, length), generator=generator)


def features(made, ids, **options_):
    with torch.no_grad():
        return made.decoder(ids, features_only=True, **options_)[0]


# --------------------------------------------------------------- encodings, by their formulas

EQUAL_COMPONENTS = ("integer", "normalised")
# One of each way into attention; the others are for --all.
USUAL = (
    "wavelet:scales=4", "wavelet:scales=4,learned=true", "transformer_xl", "rope:theta=100",
    "alibi", "sandwich:dim=16", "none", "sinusoidal", "normalised",
)  # fmt: skip


def usually(specs, usual=USUAL):
    """Return the specs as parameters, of which those that are not usual are slow."""
    slow = pytest.mark.slow
    return [spec if spec in usual else pytest.param(spec, marks=slow) for spec in specs]


def parts_in(encoding, length, learned=None):
    """Return what `encoding` adds to a model, see encoding_cases.parts_of."""
    return parts_of(encoding, length, HEADS, dim=DIM, learned=learned, trained_length=LENGTH)


def dense(attention, x, parts, hidden):
    """Compute self-attention of x (T, B, C), all scores at once; `hidden` is (B|1, 1, T, T)."""
    q, k, v = (
        projection(x).unflatten(-1, (HEADS, HEAD)).permute(1, 2, 0, 3)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weights = attention_weights(parts, q, k, x.transpose(0, 1), hidden)
    weights = attention.dropout_module(weights)
    return attention.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))


class Reference(MultiheadAttention):
    """fairseq's attention module, with `dense` as its forward and fairseq's own masks."""

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, **_):
        hidden = attn_mask.isinf()[None, None]
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask[:, None, None]
        return dense(self, query, parts_in(self.encoding, len(query), self.learned), hidden), None


class ReferencePositions(torch.nn.Module):
    """Absolute position vectors. Padding gets zeros and does not count."""

    def __init__(self, encoding, padding):
        super().__init__()
        self.encoding, self.padding = encoding, padding

    def forward(self, ids, incremental_state=None):
        out = torch.zeros(*ids.shape, DIM, dtype=torch.float64)
        for row, vectors in zip(ids != self.padding, out, strict=True):
            vectors[row] = torch.from_numpy(parts_in(self.encoding, int(row.sum()))["added"])
        return out


def reference(made, spec, encoding=None):
    """fairseq's own model with the weights of `made`, in float64, its attention by `dense`; of
    another encoding than `spec`, where one is given."""
    encoding = spec if encoding is None else encoding
    stock = model(spec, stock=True).double()
    weights = {k: v for k, v in made.state_dict().items() if "position_encoding" not in k}
    stock.load_state_dict(weights)
    shared = {name: torch.nn.Parameter(x) for name, x in learned_by(made).items()}
    stock.learned = torch.nn.ParameterDict({k.replace(".", " "): x for k, x in shared.items()})
    for index, layer in enumerate(stock.decoder.layers):
        layer.self_attn.__class__ = Reference
        layer.self_attn.encoding = encoding
        layer.self_attn.learned = learned_by(made, index) | shared
    if "added" in parts_in(encoding, 2, layer.self_attn.learned):
        stock.decoder.embed_positions = ReferencePositions(encoding, stock.decoder.padding_idx)
    return stock
