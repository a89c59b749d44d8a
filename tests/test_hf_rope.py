"""Llamas patched with every rope type, against stock Llamas with the same rope_parameters."""

import copy
import dataclasses

import pytest
import torch
import wavepe.hf
from cases import forget_registrations
from hf_model import HEAD, LENGTH, SCALINGS, close, gradients, logits, tiny, tokens
from rope_cases import ORIGINAL
from transformers import DynamicCache, StaticCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from wavepe.encodings import RoPE
from wavepe.hf.rotary import RopeRotation
from wavepe.training.recipes import untrained

THETA = 50.0  # small, so that positions matter in sequences this short
TYPES = {
    "default": {},
    **SCALINGS,
    "yarn with options": {
        "rope_type": "yarn", "factor": 3.0, ORIGINAL: LENGTH // 2, "beta_fast": 4.0,
        "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
LENGTHS = (1, 7, LENGTH // 2, LENGTH // 2 + 1, LENGTH, LENGTH + 1, 3 * LENGTH)
# The types of stock models: transformers 5.0 has no proportional.
KNOWN = ("default", *ROPE_INIT_FUNCTIONS)
STOCK = [name for name in TYPES if TYPES[name].get("rope_type", name) in KNOWN]
# Specs that change beyond the trained length: the second changes its attention factor alone.
FOLLOWING = {
    "theta": "rope:theta=20,inference_theta=scaled",
    "factor": "rope:theta=2,type=yarn,factor=scaled,beta_fast=1,beta_slow=0.5",
}
# Types whose frequencies stay: their caches may grow to any length.
STEADY = [name for name in STOCK if name not in ("dynamic", "longrope")]


def parameters(name):
    return {"rope_type": name, "rope_theta": THETA, **TYPES[name]}


def scaled(name, **changes):
    """A stock model with this scaling; a new one each time, for it remembers lengths."""
    return tiny(rope_parameters={**parameters(name), **changes})


def encoding(name):
    keys = parameters(name)
    return RoPE(theta=keys.pop("rope_theta"), type=keys.pop("rope_type"), **keys)


@pytest.mark.parametrize("name", STOCK)
def test_spec_and_bare_rope_equal_the_stock_model(name):
    by_spec = wavepe.hf.patch(tiny(), str(encoding(name)))
    bare = wavepe.hf.patch(scaled(name), "rope")
    plain = tiny(rope_parameters={"rope_type": "default", "rope_theta": THETA})
    for length in LENGTHS:
        ids = tokens(2, length)
        stock = logits(scaled(name), ids)
        assert close(logits(by_spec, ids), stock, 1e-5), length
        assert close(logits(bare, ids), stock, 1e-5), length
        if length > LENGTH and name != "default":
            assert not close(stock, logits(plain, ids), 1e-2)


@pytest.mark.filterwarnings("ignore:.*replaces the model's scaling linear")
@pytest.mark.parametrize("name", STOCK)
def test_type_alone_takes_the_base_of_the_model(name):
    keys = parameters(name)
    del keys["rope_theta"]
    options = {"type": keys.pop("rope_type"), **keys}
    ids = tokens(1, 2 * LENGTH)
    for model in (tiny(rope_parameters={"rope_type": "default", "rope_theta": THETA}),
                  scaled("linear")):  # fmt: skip
        wavepe.hf.patch(model, "rope", **options)
        assert close(logits(model, ids), logits(scaled(name), ids), 1e-5)


@pytest.mark.parametrize("name", STOCK)
def test_training_equals_the_stock_model(name):
    """Scalings that follow the length do so in training, too."""
    for length in (LENGTH // 2, 2 * LENGTH):
        ids = tokens(2, length)
        stock = gradients(scaled(name).train(), ids)
        model = wavepe.hf.patch(scaled(name), "rope").train()
        for got, wanted in zip(gradients(model, ids), stock, strict=True):
            assert close(got, wanted, 1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_lengths_in_any_order(name):
    """A stock model of the type dynamic keeps a long sequence's base for the next shorter ones.

    In transformers 5.0 for those within the trained length, later for those beyond it.
    """
    model = wavepe.hf.patch(scaled(name), "rope")
    for length in (3 * LENGTH, 2 * LENGTH, LENGTH, 3, LENGTH // 2 + 1, 2 * LENGTH):
        ids = tokens(1, length)
        assert close(logits(model, ids), logits(scaled(name), ids), 1e-5), length
    used = scaled("dynamic")
    logits(used, tokens(1, 3 * LENGTH))
    shorter = [tokens(1, length) for length in (2 * LENGTH, 3)]
    same = [close(logits(used, ids), logits(scaled("dynamic"), ids), 1e-3) for ids in shorter]
    assert not all(same)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_is_that_of_the_longest_row(name):
    model = wavepe.hf.patch(scaled(name), "rope")
    ids = tokens(2, LENGTH)
    positions = torch.stack((torch.arange(LENGTH), torch.arange(LENGTH) + LENGTH))
    wanted = logits(scaled(name), ids, position_ids=positions)
    assert close(logits(model, ids, position_ids=positions), wanted, 1e-5)


def in_chunks(model, ids, sizes, cache):
    parts = [logits(model, part, past_key_values=cache) for part in ids.split(sizes, 1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("name", "static"), [*((name, False) for name in STEADY), ("yarn", True)])
def test_cache_equals_the_full_pass(name, static):
    model = wavepe.hf.patch(scaled(name), "rope")
    ids = tokens(2, 2 * LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache()
    found = in_chunks(model, ids, (5, 1, LENGTH, 2 * LENGTH - LENGTH - 6), cache)
    assert close(found, logits(scaled(name), ids), 1e-5)


@pytest.mark.parametrize(
    ("name", "last"),
    [("dynamic", LENGTH), ("longrope", LENGTH // 2), *((name, LENGTH) for name in FOLLOWING)],
)
def test_cache_is_refused_as_the_base_changes(name, last):
    """transformers goes on with keys of two bases in one cache."""

    def make():
        if name in FOLLOWING:
            return wavepe.hf.patch(tiny(), FOLLOWING[name])
        return wavepe.hf.patch(scaled(name), "rope")

    model, ids, cache = make(), tokens(1, 3 * LENGTH), DynamicCache()
    found = in_chunks(model, ids[:, :last], (3, last - 4, 1), cache)
    assert close(found, logits(make(), ids[:, :last], use_cache=False), 1e-5)
    with pytest.raises(ValueError, match=f"{last} cached keys .*use_cache=False"):
        logits(model, ids[:, last : last + 1], past_key_values=cache)
    whole = logits(model, ids, use_cache=False)
    assert close(whole, logits(make(), ids, use_cache=False), 1e-5)
    cache = DynamicCache()  # beyond it longrope is steady again, the others are not
    logits(model, ids[:, : 2 * LENGTH], past_key_values=cache)
    if name == "longrope":
        step = logits(model, ids[:, 2 * LENGTH :], past_key_values=cache)
        assert close(step, whole[:, 2 * LENGTH :], 1e-5)
    else:
        with pytest.raises(ValueError, match="cached keys"):
            logits(model, ids[:, 2 * LENGTH :], past_key_values=cache)


@pytest.mark.parametrize("made", ["by the caller", "by the model"])
def test_cache_of_another_patched_model_is_refused(made):
    ids = tokens(1, 6)
    one, other = (wavepe.hf.patch(tiny(), f"rope:theta={theta}") for theta in (30, 50))
    cache = DynamicCache() if made == "by the caller" else None
    with torch.no_grad():
        cache = one(ids[:, :5], past_key_values=cache).past_key_values
    with pytest.raises(ValueError, match=r"5 cached keys .*theta=30 .*theta=50 .*empty cache"):
        logits(other, ids[:, 5:], past_key_values=cache)
    step = logits(one, ids[:, 5:], past_key_values=cache)
    assert close(step, logits(one, ids)[:, 5:], 1e-5)
    with torch.no_grad():  # and through a copy of the model
        copied = copy.deepcopy(one)
        wavepe.hf.set_theta(copied, 70.0)
        with pytest.raises(ValueError, match=r"theta=30 .*theta=70 "):
            copied(ids[:, :1], past_key_values=cache)
        one(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3", "longrope"])
def test_inference_theta_on_a_scaled_model(name):
    model = wavepe.hf.patch(scaled(name), "rope:inference_theta=300")
    ids = tokens(1, 2 * LENGTH)
    assert close(logits(model, ids), logits(scaled(name, rope_theta=300.0), ids), 1e-5)
    model.train()
    assert close(logits(model, ids), logits(scaled(name).train(), ids), 1e-5)


def test_refused():
    for spec, model, needs in [
        ("rope:fraction=0.5", scaled("yarn"), "rope_type 'yarn'.*fraction=0.5 cannot be"),
        ("rope:inference_theta=scaled", scaled("dynamic"), "rope_type 'dynamic'.*got both"),
        ("rope:partial_rotary_factor=0.5", tiny(), f"rotates 4 of {HEAD} dims.*fraction or type"),
        ("rope:type=linear,factor=2,partial_rotary_factor=0.5", tiny(), "rotates 4 of"),
        ("rope", scaled("linear", partial_rotary_factor=0.5), "rotates 4 of"),
        ("rope:type=longrope,short_factor=1+1,long_factor=1+1", tiny(), "4 for head size"),
        ("rope:type=yarn", tiny(), "'yarn' needs factor"),
    ]:
        before = dict(vars(model.model))
        with pytest.raises(ValueError, match=needs):
            wavepe.hf.patch(model, spec)
        assert dict(vars(model.model)) == before
        assert not hasattr(model.config, "position_encoding")


def test_a_scaling_that_is_replaced_is_told():
    """YaRN reckons with plain frequencies, and Llama 3.1 was not trained with them."""
    spec = "rope:type=yarn,factor=4"
    with pytest.warns(UserWarning, match=f"{spec} replaces the model's scaling llama3"):
        wavepe.hf.patch(scaled("llama3"), spec)
    for model, quiet in ((tiny(), spec), (scaled("yarn"), spec), (scaled("llama3"), "rope")):
        wavepe.hf.patch(model, quiet)  # a warning would be an error
    assert set(untrained(tiny(), 2000)) == {"yarn", "self-extend"}
    assert set(untrained(scaled("llama3"), 2000)) == {"self-extend"}
    assert not untrained(scaled("dynamic"), 2000)


def test_what_a_type_does_not_read():
    """As in the stock Llama: a share of the head in the type default, a factor of None."""
    for name, args, same in (
        ("default", {"partial_rotary_factor": 0.5}, {}),
        ("yarn", {"factor": None}, {"factor": 2.0}),  # the ratio of the lengths
    ):
        model, ids = scaled(name, **args), tokens(1, 2 * LENGTH)
        stock = logits(scaled(name, **same), ids)
        assert name == "yarn" or close(logits(model, ids), stock, 1e-6)
        assert close(logits(wavepe.hf.patch(model, "rope"), ids), stock, 1e-5)
    model = scaled("linear", beta_fast=3.0)
    stock = logits(model, tokens(1, 9))
    with pytest.warns(UserWarning, match=r"rope_parameters of the model: .*'linear': beta_fast"):
        wavepe.hf.patch(model, "rope")
    assert close(logits(model, tokens(1, 9)), stock, 1e-5)


def test_own_rotary_encoding_takes_the_scaling(monkeypatch):
    forget_registrations(monkeypatch)

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True)
    class Halved(RoPE):
        name = "halved"

        def frequencies(self, head_dim, **lengths):
            inv_freq, factor = super().frequencies(head_dim, **lengths)
            return inv_freq / 2, factor

    model = wavepe.hf.patch(scaled("linear", factor=2.0), "halved")
    assert [type(m) for m in model.model.rotary_emb.rotations] == [RopeRotation]
    ids = tokens(1, LENGTH)
    assert close(logits(model, ids), logits(scaled("linear", factor=4.0), ids), 1e-5)
