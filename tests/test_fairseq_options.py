"""--pos-enc and its shorthands on the command line: valid values, and the errors of others."""

import re

import pytest
import wavepe
from fairseq_cases import (
    GPT,
    MARKS,
    WIKI103,
    arguments,
    command,
    composed,
    configuration,
    corpus,
    features,
    model,
    models,
    options,
    tasks,
    tokens,
    torch,
    train,
)
from wavepe.fairseq.model import WavePELanguageModel

pytestmark = MARKS

OF_TRANSFORMER_LM = [
    arch for arch, name in models.ARCH_MODEL_NAME_REGISTRY.items() if name == "transformer_lm"
]


def parsed(*given, recipe=WIKI103):
    return options.parse_args_and_arch(
        options.get_training_parser(), arguments("unused", *given, recipe=recipe)
    )


def refused(capsys, *given):
    """Run the train command; return its last line and its exit code."""
    with pytest.raises(SystemExit) as ended:
        command("train", *arguments("unused", *given))
    return capsys.readouterr().err.splitlines()[-1], ended.value.code


# --------------------------------------------------------------- --pos-enc


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("wavelett", "unknown encoding 'wavelett', did you mean 'wavelet'?"),
        ("", "needs a name first"),
        ("wavelet:knd=haar", "knd"),
        ("wavelet:kind=har", "unknown wavelet kind 'har'"),
        ("rope:theta=", "needs key=value"),
        ("rope:theta=-1", "theta"),
        ("rope:theta=64,theta=64", "gives theta twice"),
        ("rope,theta=64", "rope,theta=64"),
    ],
)
def test_a_wrong_spec_is_told_before_anything_is_done(spec, told, capsys):
    line, code = refused(capsys, "--pos-enc", spec)
    assert code == 2
    assert "error: argument --pos-enc: " in line
    assert told in line


def test_a_wrong_name_and_a_wrong_option_list_the_known_ones(capsys):
    line, _ = refused(capsys, "--pos-enc", "learned")
    for name in wavepe.encodings.known_encodings():
        assert name in line
    line, _ = refused(capsys, "--pos-enc", "wavelet:knd=haar")
    for option in ("kind", "scales", "min_scale", "fixed_scale", "mirrored", "learned"):
        assert option in line


@pytest.mark.parametrize(
    "spec",
    [
        "wavelet:kind=haar,scales=1+2.5+8+16",
        "rope:theta=1e+20,fraction=0.25,interleaved=true",
        "rope:type=longrope,short_factor=1+1+1+1,long_factor=1+2+4+8.5,factor=2",
        "sinusoidal:theta=length",
        "wavelet:scales=3+",
    ],
)
def test_a_spec_survives_the_configuration(spec):
    """Hydra reads : , = + as its own grammar if they are not quoted."""
    given = configuration(arguments("unused", "--pos-enc", spec)).model.pos_enc
    assert wavepe.encoding(given) == wavepe.encoding(spec)


def test_without_it_nothing_is_chosen():
    cfg = configuration(arguments("unused")).model
    shorthands = (cfg.rope_theta, cfg.wavelet_kind, cfg.wavelet_scales)
    assert (cfg.pos_enc, *shorthands) == (None,) * 4


# --------------------------------------------------------------- architectures


def test_every_architecture_is_served():
    of_name = {arch for arch in models.ARCH_MODEL_REGISTRY if arch.startswith("transformer_lm")}
    other_models = {"transformer_lm_megatron", "transformer_lm_megatron_11b"}
    assert of_name == {*OF_TRANSFORMER_LM, *other_models}
    assert len(of_name) >= 20
    served = {models.ARCH_MODEL_REGISTRY[arch] for arch in OF_TRANSFORMER_LM}
    assert served == {WavePELanguageModel}


@pytest.mark.parametrize("arch", OF_TRANSFORMER_LM)
def test_every_architecture_takes_it(arch):
    given = ("--pos-enc", "rope", "--rope-theta", 64, "--arch", arch)
    args, plain = parsed(*given), parsed("--arch", arch)
    assert (args.pos_enc, args.rope_theta) == ("rope", 64)
    own = {"pos_enc", "rope_theta"}
    assert {k: v for k, v in vars(args).items() if k not in own} == vars(plain)


def test_other_models_do_not_take_it():
    with pytest.raises(SystemExit):
        parsed("--pos-enc", "rope", "--arch", "lightconv_lm")


def test_learned_positions_of_an_architecture_are_replaced():
    """GPT-3's are learned where no other positions are asked for."""
    recipe = (*GPT[2:], "--arch", "transformer_lm_gpt3_small")
    cfg = configuration(arguments("unused", "--pos-enc", "alibi", recipe=recipe))
    task = tasks.setup_task(cfg.task)
    decoder = task.build_model(cfg.model).decoder
    assert cfg.model.decoder_learned_pos
    assert decoder.embed_positions is None
    assert decoder.max_positions() >= 10**6
    cfg = configuration(arguments("unused", recipe=recipe))
    assert task.build_model(cfg.model).decoder.embed_positions is not None


def test_a_configuration_of_hydra():
    sizes = ("decoder_layers=1", "decoder_embed_dim=32", "decoder_attention_heads=4")
    line = ["task=language_modeling", f"task.data={corpus()}", "model=transformer_lm"]
    line += [f"model.{key}" for key in ("pos_enc='wavelet:scales=1+3'", *sizes)]
    cfg = composed(*line)
    made = tasks.setup_task(cfg.task).build_model(cfg.model)
    assert str(made.decoder.position_encoding.encoding) == "wavelet:scales=1+3"


# --------------------------------------------------------------- shorthands


@pytest.mark.parametrize(
    ("spec", "shorthands", "wanted"),
    [
        ("rope", {"rope_theta": 64.0}, "rope:theta=64"),
        ("rope:fraction=0.5", {"rope_theta": 64.0}, "rope:theta=64,fraction=0.5"),
        ("rope:theta=64", {"rope_theta": 64.0}, "rope:theta=64"),
        ("wavelet", {"wavelet_kind": "haar"}, "wavelet:kind=haar"),
        ("wavelet", {"wavelet_scales": "4"}, "wavelet:scales=4"),
        ("wavelet", {"wavelet_scales": "1+3"}, "wavelet:scales=1+3"),
        ("wavelet", {"wavelet_scales": "2", "wavelet_kind": "haar"}, "wavelet:kind=haar,scales=2"),
    ],
)
def test_shorthands(spec, shorthands, wanted):
    made, ids = model(spec, **shorthands), tokens()
    assert made.decoder.position_encoding.encoding == wavepe.encoding(wanted)
    assert torch.equal(features(made, ids), features(model(wanted), ids))


@pytest.mark.parametrize(
    ("spec", "shorthands", "told"),
    [
        (None, {"rope_theta": 64.0}, "--rope-theta 64.0 needs --pos-enc rope, got no"),
        ("alibi", {"rope_theta": 64.0}, "needs --pos-enc rope, got --pos-enc alibi"),
        ("rope", {"wavelet_kind": "haar"}, "needs --pos-enc wavelet, got --pos-enc rope"),
        ("rope", {"wavelet_scales": "4"}, "--wavelet-scales 4 needs --pos-enc wavelet"),
        ("rope:theta=32", {"rope_theta": 64.0}, "both give theta: give one"),
        ("wavelet:kind=haar", {"wavelet_kind": "morlet"}, "both give kind: give one"),
        ("wavelet", {"wavelet_scales": "1,2"}, "1,2"),
        ("wavelet", {"wavelet_kind": "har"}, "unknown wavelet kind 'har'"),
    ],
)
def test_shorthands_that_do_not_fit(spec, shorthands, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        model(spec, **shorthands)


def test_shorthands_on_the_command_line(tmp_path):
    cfg = configuration(
        arguments("unused", "--pos-enc", "wavelet", "--wavelet-scales", "1+3", "--rope-theta", "8")
    ).model
    assert (cfg.wavelet_scales, cfg.rope_theta) == ("1+3", 8)
    with pytest.raises(ValueError, match=r"--rope-theta 8\.0 needs --pos-enc rope"):
        train(tmp_path, "--rope-theta", 8)
    assert not list(tmp_path.glob("*.pt"))


# --------------------------------------------------------------- what does not fit the model


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("wavelet:scales=3", "head size 8 is not divisible by 3 scales: choose scales, e.g. wav"),
        ("wavelet:scales=3,learned=true", "head size 8 is not divisible by 3 scales"),
        ("wavelet:scales=16", "head size 8 is not divisible by 16 scales"),
    ],
)
def test_a_head_size_that_does_not_fit(spec, told):
    with pytest.raises(ValueError, match=told):
        model(spec)


@pytest.mark.parametrize("spec", ["rope", "transformer_xl"])
def test_an_odd_head_size(spec):
    with pytest.raises(ValueError, match=r"even.*9|9.*even"):
        model(spec, decoder_embed_dim=36, decoder_input_dim=36, decoder_output_dim=36)


def test_another_attention_is_refused():
    other = {"decoder_xformers_att_config": "{'name': 'scaled_dot_product'}"}
    with pytest.raises(ValueError, match="does not go with --decoder-xformers-att-config"):
        model("rope", **other)
