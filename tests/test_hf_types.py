"""The model types wavepe_<family>: models save and load their position encoding."""

import copy
import itertools
import json
from unittest import TestCase

import pytest
import torch
import transformers
import wavepe
import wavepe.hf
from cases import every, soon
from encoding_cases import LEARNED, YARN
from hf_families import FAMILIES, LOCAL_THETA, THETA, UNROTATED, build, by_turns, stirred
from hf_model import (
    EACH_ENTRY,
    HEAD,
    SPECS,
    close,
    llamas,
    logits,
    own_tiny,
    patched_tiny,
    pickled,
    tiny,
    tiny_config,
    tokens,
)
from processes import forked, output
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    pipeline,
)
from wavepe.hf import WavePELlamaConfig, WavePELlamaForCausalLM, WavePELlamaModel
from wavepe.hf.config import CONFIGS, MODELS
from wavepe.hf.families import decoder
from wavepe.hf.model_types import AUTO_MODELS

WAVELET = "wavelet:scales=4"
IDS = tokens(2, 12)
each_family = by_turns()


def larger(text):
    """A vision-language model around a text model."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    configs = (transformers.LlavaConfig, transformers.CLIPVisionConfig)
    if "gemma3" in text.model_type:
        configs = (transformers.Gemma3Config, transformers.SiglipVisionConfig)
    config = configs[0](text_config=text, vision_config=configs[1](**vision))
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("spec", ["alibi", {"0": "shaw:clip=3"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_text_model_inside_a_larger_model(family, spec, tmp_path):
    text = tiny_config() if family == "llama" else build(family).config
    model, stored = larger(copy.deepcopy(text)), CONFIGS[f"wavepe_{family}"]
    inner = wavepe.hf.patch(model.model.language_model, spec)
    named = larger(stored.from_dict({**text.to_dict(), "position_encoding": spec}))
    named.load_state_dict(model.state_dict())
    refused = [model, model.model]
    if family == "llama":
        named.save_pretrained(tmp_path / "named")
        named = AutoModelForImageTextToText.from_pretrained(tmp_path / "named").eval()
    else:  # Gemma3Config reads no other text_config than its own
        refused.append(named)
    assert torch.equal(logits(named, IDS), logits(model, IDS))
    for owner in refused:
        with pytest.raises(ValueError, match="loaded without the position encoding"):
            owner.save_pretrained(tmp_path / "new", state_dict=owner.state_dict())
    assert not (tmp_path / "new").exists()
    inner.save_pretrained(tmp_path / "inner")
    wavepe.hf.unpatch(inner)
    model.save_pretrained(tmp_path / "new")


def test_a_head_around_a_patched_model(tmp_path):
    model = tiny()
    wavepe.hf.patch(model.model, "alibi")
    with pytest.raises(ValueError, match=r"of its LlamaModel: patch the outermost .* again$"):
        model.save_pretrained(tmp_path)


AMONG_OTHERS = """
import importlib
from transformers import LlamaConfig, LlamaModel, PreTrainedModel
PreTrainedModel.save_pretrained = lambda *args, **options: (args[1:], options)
import wavepe.hf.model_types
importlib.reload(wavepe.hf.model_types)
config = LlamaConfig(num_hidden_layers=0, vocab_size=8)
print(LlamaModel(config).save_pretrained("folder", max_shard_size=1))
"""


def test_saving_where_others_wrap_it_and_modules_are_loaded_again():
    assert output("-c", AMONG_OTHERS, start=forked) == "(('folder',), {'max_shard_size': 1})\n"


# --------------------------------------------------------------- the configuration
@pytest.mark.parametrize("spec", SPECS)
def test_configurations_keep_the_encoding(spec, tmp_path):
    encoding = wavepe.encoding(spec)
    for form in (spec, encoding, encoding.to_dict()):
        config = WavePELlamaConfig(position_encoding=form)
        assert config.position_encoding == str(encoding)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is WavePELlamaConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    other = AutoConfig.from_pretrained(tmp_path, position_encoding={"name": "alibi"})
    assert other.position_encoding == "alibi"


def test_wrong_encodings_are_seen_by_the_configuration():
    assert WavePELlamaConfig().position_encoding == "rope"
    with pytest.raises(ValueError, match="unknown encoding 'nosuch'"):
        WavePELlamaConfig(position_encoding="nosuch")
    config = WavePELlamaConfig()
    with pytest.raises(ValueError, match="unknown option"):
        config.position_encoding = "wavelet:nosuch=1"
    with pytest.raises(TypeError, match="spec"):
        config.position_encoding = 3
    assert config.position_encoding == "rope"


# --------------------------------------------------------------- Llamas under every encoding


QUICK = (*EACH_ENTRY, *LEARNED, "wavelet:kind=haar,scales=2,fixed_scale=true", YARN)
CHECKPOINTS = soon((*SPECS, *LEARNED), *QUICK)


@pytest.mark.parametrize("spec", CHECKPOINTS)
def test_a_checkpoint_keeps_its_encoding(spec, tmp_path):
    model, own_model = stirred(patched_tiny(spec)), own_tiny(spec)
    own_model.load_state_dict(model.state_dict())
    wanted = logits(model, IDS)
    assert torch.equal(logits(own_model, IDS), wanted)
    assert model.config.model_type == "llama"
    for saved in (own_model, model):
        saved.save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert stored["model_type"] == "wavepe_llama"
        assert stored["architectures"] == ["WavePELlamaForCausalLM"]
        assert stored["position_encoding"] == str(wavepe.encoding(spec))
    for auto in (WavePELlamaForCausalLM, AutoModelForCausalLM):
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is WavePELlamaForCausalLM
        assert not any(report.values())
        assert torch.equal(logits(loaded, IDS), wanted)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is WavePELlamaModel
    with torch.no_grad():
        hidden = base(IDS).last_hidden_state
        assert torch.equal(model.lm_head(hidden), wanted)
    assert torch.equal(logits(model, IDS), wanted)
    wavepe.hf.unpatch(model).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "llama"
    assert "position_encoding" not in stored


@pytest.mark.parametrize("spec", every(2, [*EACH_ENTRY, *LEARNED]))
def test_bfloat16_checkpoints(spec, tmp_path):
    """Learned parameters stay in float32."""
    model = stirred(wavepe.hf.patch(tiny().bfloat16(), spec))
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded, IDS), wanted)
    weights = dict(loaded.named_parameters())
    for name, value in model.named_parameters():
        learned = "position_encoding." in name
        assert weights[name].dtype == (torch.float32 if learned else torch.bfloat16), name
        assert torch.equal(weights[name], value), name
    tiny().save_pretrained(tmp_path / "stock")
    options = {"position_encoding": spec, "dtype": torch.bfloat16}
    first = WavePELlamaForCausalLM.from_pretrained(tmp_path / "stock", **options)
    assert {n: w.dtype for n, w in first.named_parameters()} == {
        n: w.dtype for n, w in weights.items()
    }


def test_first_weights_depend_on_the_seed_alone():
    states = []
    for spec in EACH_ENTRY:
        torch.manual_seed(3)
        config = tiny_config(WavePELlamaConfig, position_encoding=spec)
        states.append(WavePELlamaForCausalLM(config).state_dict())
    torch.manual_seed(3)
    states.append(LlamaForCausalLM(tiny_config()).state_dict())
    for state in states:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_another_process_fails_without_the_import(tmp_path):
    own_tiny(WAVELET).save_pretrained(tmp_path)
    script = """
import sys, transformers
for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
    try:
        cls.from_pretrained(sys.argv[1])
    except ValueError as error:
        print(error)
import wavepe.hf
print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    out = output("-c", script, tmp_path, start=forked)
    assert "trust_remote_code=True" in out
    assert "import wavepe.hf, and load with AutoModelForCausalLM" in out
    assert out.endswith("WavePELlamaForCausalLM\n")


@pytest.mark.parametrize("spec", ["rope:theta=20,inference_theta=300", WAVELET, "none"])
def test_a_checkpoint_under_another_encoding(spec, tmp_path):
    own_tiny("rope:theta=20").save_pretrained(tmp_path)
    wanted = logits(own_tiny(spec), IDS)
    loaded = WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding=spec)
    assert torch.equal(logits(loaded, IDS), wanted)
    config = AutoConfig.from_pretrained(tmp_path)
    config.position_encoding = spec
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(logits(loaded, IDS), wanted)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.position_encoding == spec
    assert torch.equal(logits(again, IDS), wanted)


@pytest.mark.filterwarnings("ignore")  # transformers reports the missing keys of learned ones
@pytest.mark.parametrize("spec", every(2, [*EACH_ENTRY, *LEARNED], 1))
def test_a_stock_checkpoint_read_with_an_encoding(spec, tmp_path):
    tiny().save_pretrained(tmp_path)
    wanted = logits(patched_tiny(spec), IDS)
    own = WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding=spec)
    config = WavePELlamaConfig.from_pretrained(tmp_path, position_encoding=spec)
    by_config = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    with llamas(spec):
        between = LlamaForCausalLM.from_pretrained(tmp_path)
    for loaded in (own, by_config, between):
        assert torch.equal(logits(loaded, IDS), wanted)


# --------------------------------------------------------------- refusals
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_refused(other, tmp_path):
    """Another attention, another spec on a live model, and patch and unpatch."""
    model = own_tiny(WAVELET)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"got '{other}'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=other)
    with pytest.raises(ValueError, match=f"got '{other}'"):
        model.set_attn_implementation(other)
    wanted = logits(model, IDS)
    model.config._attn_implementation = other
    with pytest.raises(ValueError, match=f"got '{other}'"):
        model(IDS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="wavepe")
    assert torch.equal(logits(loaded, IDS), wanted)
    with pytest.raises(ValueError, match="from_pretrained"):
        wavepe.hf.patch(loaded, "alibi")
    with pytest.raises(ValueError, match="it was not patched"):
        wavepe.hf.unpatch(loaded)
    loaded.config.position_encoding = "alibi"
    with pytest.raises(ValueError, match="no effect"):
        loaded(IDS)


def test_configurations_that_are_refused(tmp_path):
    for spec, message in (("wavelet:scales=3", "3 scales"), ("rope:interleaved=true", "interleav")):
        config = tiny_config(WavePELlamaConfig, position_encoding=spec)
        with pytest.raises(ValueError, match=message):
            WavePELlamaForCausalLM(config)
    for wrong in ("positional_encoding", "pos_encoding", "position_encodings"):
        with pytest.raises(TypeError, match=f"'{wrong}', did you mean 'position_encoding'"):
            tiny_config(WavePELlamaConfig, **{wrong: "alibi"})
    tiny_config(WavePELlamaConfig, position_embedding_type="absolute")  # old files have it
    tiny_config(MistralConfig).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of a llama or a wavepe_llama, got model_type 'mistral'"):
        WavePELlamaForCausalLM.from_pretrained(tmp_path, position_encoding="alibi")
    build("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="read from the files of a mistral or a wavepe_mistral"):
        wavepe.hf.WavePEMistralConfig.from_pretrained(tmp_path)


def forms(family):
    """Fields for the base of a family, as transformers before 5 and since then writes them."""
    given = {"rope_type": "default", "rope_theta": THETA}
    if family == "gemma3_text":
        local = {**given, "rope_theta": LOCAL_THETA}
        yield {"rope_theta": THETA, "rope_local_base_freq": LOCAL_THETA}
        yield {"rope_parameters": {"full_attention": given, "sliding_attention": local}}
    elif family == "gpt_neox":
        yield {"rotary_emb_base": THETA, "rotary_pct": 0.5}
        yield {"rope_parameters": {**given, "partial_rotary_factor": 0.5}}
    else:
        part = {"partial_rotary_factor": 0.5} if family == "phi3" else {}
        yield {"rope_theta": THETA, "rope_scaling": None, **part}
        yield {"rope_parameters": {**given, **part}}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt_neox"])
def test_files_of_any_transformers(family, tmp_path):
    """A bare "rope" takes the base and scaling in either form, by any version."""
    model = wavepe.hf.patch(build(family), "rope")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = {key for form in forms(family) for key in form}
    stored = {k: v for k, v in json.loads(path.read_text()).items() if k not in fields}
    for form in forms(family):
        path.write_text(json.dumps(stored | form))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(loaded, IDS), logits(model, IDS)), form
    if family == "llama":
        linear = {"rope_type": "linear", "factor": 2.0}
        wavepe.hf.patch(wavepe.hf.unpatch(model), "rope", theta=THETA, type="linear", factor=2)
        for form in (
            {"rope_parameters": {**linear, "rope_theta": THETA}},
            {"rope_theta": THETA, "rope_scaling": linear},
        ):
            path.write_text(json.dumps(stored | form))
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            assert torch.equal(logits(loaded, IDS), logits(model, IDS)), form


# --------------------------------------------------------------- families


OF_FAMILIES = ("wavelet:scales=4,learned=true", "rope:theta=30", {"1": "alibi"})


@by_turns(more=UNROTATED)
@pytest.mark.parametrize("spec", OF_FAMILIES, ids=str)
def test_a_patched_model_comes_back_from_a_folder(family, spec, tmp_path):
    if family in UNROTATED and spec == OF_FAMILIES[1]:
        spec = "relative"
    described = (FAMILIES | UNROTATED)[family]
    if described.reused and isinstance(spec, dict):  # they rotate as those whose keys it is
        with pytest.raises(ValueError, match=r"layer 3 .* reuses the keys of layer 1"):
            wavepe.hf.patch(build(family), spec)
        spec = {"1": "alibi", "3": "alibi"}
    model = stirred(wavepe.hf.patch(build(family), spec))
    kind = f"wavepe_{described.model_type}"
    wanted = logits(model, IDS)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    with pytest.raises(ValueError, match=r"import wavepe\.hf, and load with AutoModelForCausalLM"):
        type(model).from_pretrained(tmp_path)  # the stock class
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is MODELS["WavePE" + type(model).__name__]
    assert type(loaded.config) is CONFIGS[kind]
    assert loaded.config.position_encoding == model.config.position_encoding
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    # A copy is aligned in memory, and weights in a file are not: torch's sums depend on it.
    for other in (copy.deepcopy(loaded), copy.deepcopy(again), pickled(loaded)):
        assert torch.equal(logits(other, IDS), wanted)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.get_output_embeddings().weight.dtype == torch.bfloat16
    learned = [name for name in model.state_dict() if "position_encoding." in name]
    assert bool(learned) == (spec == OF_FAMILIES[0])
    for name in learned:  # in float32 too
        assert torch.equal(half.state_dict()[name], model.state_dict()[name]), name


@each_family
def test_a_stock_folder_read_with_an_encoding(family, tmp_path):
    stock = build(family)
    stock.save_pretrained(tmp_path)
    own = MODELS["WavePE" + type(stock).__name__]
    loaded = own.from_pretrained(tmp_path, position_encoding="alibi").eval()
    assert torch.equal(logits(loaded, IDS), logits(wavepe.hf.patch(stock, "alibi"), IDS))
    again = own.from_pretrained(tmp_path).eval()  # a bare rope
    assert close(logits(again, IDS), logits(wavepe.hf.unpatch(stock), IDS), 1e-5)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(stock)


@each_family
def test_every_head_of_transformers_has_its_type(family, tmp_path):
    config = copy.deepcopy(build(family).config)
    for auto in AUTO_MODELS:
        if type(config) not in auto._model_mapping:
            continue
        model = auto.from_config(config)
        wavepe.hf.patch(model.eval(), "alibi").save_pretrained(tmp_path)
        loaded, left = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is MODELS["WavePE" + type(model).__name__]
        assert not any(left["missing_keys"])
        with torch.no_grad():
            assert torch.equal(loaded.eval()(IDS)[0], model(IDS)[0])
        assert loaded.config is decoder(loaded).config
        assert type(loaded).__name__ in wavepe.hf.__all__
        assert getattr(wavepe.hf, type(loaded).__name__) is type(loaded)
    base = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert base.config.model_type == f"wavepe_{FAMILIES[family].model_type}"


EXPERTS = """
import transformers, wavepe.hf
sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
for make in (wavepe.hf.WavePEMixtralForCausalLM, transformers.MixtralForCausalLM):
    config = make.config_class(**sizes, **heads)
    print(make(config).config._experts_implementation)
"""


def test_the_experts_are_computed_as_in_the_family():
    """transformers asks the class, and remembers the answer of a stock one for those derived."""
    own, stock = output("-c", EXPERTS, start=forked).split()
    assert own == stock != "eager"


def test_output_attentions_in_the_configuration():
    """transformers allows it for the attention "eager" only: a patched model takes the argument."""
    patched = wavepe.hf.patch(build("mistral"), "wavelet:scales=4")
    with pytest.raises(ValueError, match="`output_attentions` attribute is not supported"):
        patched.config.output_attentions = True
    assert len(patched(IDS, output_attentions=True).attentions) == len(patched.model.layers)


def test_labels_that_are_shifted_already(tmp_path):
    """transformers passes arguments of the loss to the attention too."""
    wavepe.hf.patch(build("llama"), "wavelet:scales=4").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    shifted = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:].contiguous()
    got = model(IDS, labels=IDS, shift_labels=shifted).loss
    assert torch.equal(got, model(IDS, labels=IDS).loss)


# --------------------------------------------------------------- tokenizers and pipelines

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PIECES = [*SPECIAL.values(), "a", "b", "c", "ab", "Ġ", "Ġa", "▁", "▁a"]
# Names that a file may have; transformers corrects some of it by model_type.
NAMED = (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast", "Qwen2Tokenizer")


def write_tokenizer(folder, space, named):
    """A tokenizer of a few pieces; `space` is its sign for one, as of GPT-2 or of SentencePiece."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    model = models.BPE(vocabulary, merges=[("a", "b"), (space, "a")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    kind = "ByteLevel" if space == "Ġ" else "Metaspace"
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, kind)()
    tokenizer.decoder = getattr(decoders, kind)()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("tokenizer_class")
    if named is not None:
        config["tokenizer_class"] = named
    path.write_text(json.dumps(config))


def chosen(folder):
    """The class that AutoTokenizer takes and how that cuts a text, or the error's class."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return type(tokenizer), tokenizer("ab a b c")["input_ids"]


@each_family
def test_the_tokenizer_of_the_family(family, tmp_path):
    """AutoTokenizer makes the same choice as for the stock model."""
    stock, patched = build(family).config, wavepe.hf.patch(build(family), "alibi").config
    for space, named in itertools.product("Ġ▁", NAMED):
        write_tokenizer(tmp_path, space, named)
        found = []
        for config in (stock, patched):
            config.save_pretrained(tmp_path)
            found.append(chosen(tmp_path))
        assert found[0] == found[1], (space, named)


def test_pipelines(tmp_path):
    model = wavepe.hf.patch(build("mistral"), "wavelet:scales=4")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "▁", "PreTrainedTokenizerFast")
    wanted = model.generate(
        AutoTokenizer.from_pretrained(tmp_path)("ab", return_tensors="pt")["input_ids"],
        max_new_tokens=4,
        do_sample=False,
    )
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    for given in (str(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        with TestCase().assertNoLogs("transformers.pipelines", "ERROR"):  # that it is not supported
            generator = pipeline("text-generation", model=given, tokenizer=str(tmp_path))
            assert generator("ab", **options)[0]["generated_token_ids"] == wanted[0].tolist()


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ("wavelet:scales=4,learned=true", "wavelet:scales=2,learned=true", False),
        ("t5:buckets=6", "t5:buckets=6,max_distance=64", False),
        ("kerple", "kerple:kind=power", False),
        ("kerple", "kerple", True),
        ("rope+kerple", "alibi+kerple", True),
    ],
)
@pytest.mark.parametrize("cls", [transformers.AutoModelForCausalLM, WavePELlamaForCausalLM])
def test_another_encoding_learns_from_its_own_beginning(first, second, kept, cls, tmp_path):
    """Parameters of two encodings may have the same names and shapes."""
    model = own_tiny(first)
    learned = {n: x for n, x in model.named_parameters() if "position_encoding." in n}
    with torch.no_grad():
        for value in learned.values():
            value.add_(1.0)
    model.save_pretrained(tmp_path)
    config = tiny_config(WavePELlamaConfig, position_encoding=second)
    for args in ({"position_encoding": second}, {"config": config}):
        model = cls.from_pretrained(pretrained_model_name_or_path=tmp_path, **args)
        _check_beginning(model, second, learned if kept else None)


def _check_beginning(model, second, learned):
    found = dict(model.named_parameters())
    for name, value in own_tiny(second).named_parameters():
        if "position_encoding." in name:
            initial = wavepe.encoding(second).parameters(HEAD, 4)[name.partition("encoding.")[2]]
            initial = torch.from_numpy(initial).to(value.dtype)
            wanted = initial if learned is None else learned[name]
            assert torch.equal(found[name], wanted), name


def test_the_folder_says_which_wavepe_wrote_it(tmp_path):
    """And a second save writes the same, by whatever version the first one was written."""
    folders = tmp_path / "first", tmp_path / "second"
    patched_tiny(WAVELET).save_pretrained(folders[0])
    read, again = (folder / "config.json" for folder in folders)
    written = json.loads(read.read_text())
    assert written["wavepe_version"] == wavepe.__version__
    read.write_text(json.dumps({**written, "wavepe_version": "0.0.1"}))
    AutoModelForCausalLM.from_pretrained(folders[0]).save_pretrained(folders[1])
    assert json.loads(again.read_text()) == written
    card = (folders[1] / "README.md").read_text()
    assert '\n```\npip install ".[hf]"\n```\n' in card
