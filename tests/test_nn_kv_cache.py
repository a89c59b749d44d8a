"""wavepe.nn.KVCache: generation gives the numbers of the full pass, or raises an error."""

import copy
import gc
import itertools

import pytest
import torch
from cases import every
from encoding_cases import LEARNED
from nn_cases import RELATIVE, SPECS, made, tokens
from wavepe.nn import KVCache, SelfAttention
from wavepe.nn import _cache as cache_module


def stepwise(module, x, cuts, cache=None, **options):
    """Outputs of the pieces between `cuts`; options of (B, L) are cut too."""
    cache = KVCache() if cache is None else cache
    parts = []
    for start, stop in itertools.pairwise(cuts):
        cut = {name: value[..., start:stop] for name, value in options.items()}
        parts.append(module(x[:, start:stop], cache=cache, **cut))
        assert cache.length == stop
    return torch.cat(parts, 1)


def close(a, b, bound=1e-12):
    return a.shape == b.shape and (a - b).abs().max() < bound


# --------------------------------------------------------------- the numbers of the full pass
@pytest.mark.parametrize("spec", every(2, SPECS))
def test_any_pieces(spec):
    bound = 1e-6 if "wavelet" in spec else 1e-12  # a longer table's zones
    for options in ({}, {"window": 3, "bias": True, "kv_heads": 4}):
        module, x = made(spec, **options), tokens(11)
        whole = module(x)
        for cuts in ([0, 11], range(12), [0, 5, 6, 7, 11], [0, 0, 4, 4, 11]):
            with torch.no_grad():
                assert close(stepwise(module, x, list(cuts)), whole, bound)
            assert close(stepwise(module, x, list(cuts)), whole, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["wavelet:scales=4", "transformer_xl", "rope", "alibi"])
def test_every_dtype(spec, dtype):
    module, x = made(spec, dtype), tokens(11, dtype=dtype)
    with torch.inference_mode():
        bound = 8 * torch.finfo(dtype).eps * module(x).abs().max()
        assert close(stepwise(module, x, list(range(12))), module(x), bound)


def test_long_enough_for_longer_tables_and_storage():
    for spec in ("wavelet:scales=4", "wavelet:scales=4,learned=true", "transformer_xl", "rope"):
        module, x = made(spec, torch.float32), tokens(140, batch=1, dtype=torch.float32)
        with torch.inference_mode():
            steps = stepwise(module, x, [0, 60, *range(61, 141)])
            assert close(steps, module(x), 1e-5)


@pytest.mark.parametrize("spec", every(2, SPECS, 1))
def test_prompts_padded_on_the_left(spec):
    module, x = made(spec), tokens(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    whole, alone = module(x, key_mask=mask), module(x[:1, 3:])
    assert close(whole[:1, 3:], alone, 1e-6)
    cuts = [0, 5, 6, 7, 9]
    with torch.no_grad():
        new_only = stepwise(module, x, cuts, key_mask=mask)
        cache, parts = KVCache(), []
        for start, stop in itertools.pairwise(cuts):  # the mask of all tokens
            parts.append(module(x[:, start:stop], key_mask=mask[:, :stop], cache=cache))
        of_all = torch.cat(parts, 1)
        cache = KVCache()  # no mask after the prompt
        first = module(x[:, :5], key_mask=mask[:, :5], cache=cache)
        remembered = torch.cat([first, stepwise(module, x, [5, 6, 9], cache)], 1)
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)
        placed = stepwise(module, x, cuts, key_mask=mask, positions=places)
    for got in (new_only, of_all, remembered, placed):
        assert close(got[mask], whole[mask], 1e-6)


def test_the_caller_may_write_into_a_mask_and_positions():
    module, x = made("alibi"), tokens(6)
    mask, positions = torch.ones(2, 4, dtype=torch.bool), torch.arange(4)
    cache = KVCache()
    module(x[:, :4], key_mask=mask, positions=positions, cache=cache)
    mask.zero_()
    positions.zero_()
    got = module(x[:, 4:], positions=torch.arange(4, 6), cache=cache)
    assert close(got, module(x)[:, 4:])


# --------------------------------------------------------------- positions
@pytest.mark.parametrize("spec", RELATIVE)
def test_positions_go_on_from_the_cache(spec):
    module, x = made(spec), tokens(6)
    whole = module(x)
    here = torch.arange(6)
    with torch.no_grad():
        assert close(stepwise(module, x, [0, 4, 6], positions=here + 20), whole, 1e-6)
        cache = KVCache()
        module(x[:, :4], cache=cache)  # they were 0..3
        branch = copy.deepcopy(cache)
        assert close(module(x[:, 4:], positions=here[4:], cache=cache), whole[:, 4:], 1e-6)
        with pytest.raises(RuntimeError, match="the cached tokens were given positions"):
            module(x[:, 5:], cache=cache)
        if spec == "none":
            return
        for wrong in ([3, 4], [0, 1]):
            with pytest.raises(RuntimeError, match="positions of a row"):
                module(x[:, 4:], positions=torch.tensor(wrong), cache=branch)
        assert close(module(x[:, 4:], cache=branch), whole[:, 4:], 1e-6)  # still as it was


def test_padding_on_the_right_of_a_prompt():
    """The next token is further away than its position says: only rotary encodings can know."""
    x = tokens(6)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    places = mask.long().cumsum(-1) - 1
    rope, alibi = made("rope"), made("alibi")
    with torch.no_grad():
        got = stepwise(rope, x, [0, 4, 5, 6], key_mask=mask, positions=places)
        alone = rope(x[:1, mask[0]])
        assert close(got[:1, mask[0]], alone)
        cache = KVCache()
        alibi(x[:, :4], key_mask=mask[:, :4], positions=places[:, :4], cache=cache)
        with pytest.raises(RuntimeError, match="must go up by 1"):
            alibi(x[:, 4:5], positions=places[:, 4:5], cache=cache)


@pytest.mark.parametrize("kind", ["type=dynamic,factor=4", "theta=128,inference_theta=scaled"])
def test_frequencies_that_have_moved_are_refused(kind):
    module, x = made(f"rope:{kind}", trained_length=8), tokens(10)
    cache = KVCache()
    with torch.no_grad():
        got = stepwise(module, x, [0, 5, 8], cache)
        assert close(got, module(x[:, :8]))
        with pytest.raises(RuntimeError, match=r"8 cached keys were rotated for .* reset\(\)"):
            module(x[:, 8:9], cache=cache)
        cache.reset()
        assert close(module(x, cache=cache), module(x))


def test_one_cache_does_not_disturb_another():
    module, x = made("rope:theta=50,inference_theta=10000"), tokens(6)
    first, second = KVCache(), KVCache()
    whole = module(x)
    module(x[:, :4], cache=first)
    module.train()(x[:, :4], cache=second)
    assert close(module.eval()(x[:, 4:], cache=first), whole[:, 4:])
    with pytest.raises(RuntimeError, match=r"in training, but .* in evaluation"):
        module(x[:, 4:], cache=second)


# --------------------------------------------------------------- what a cache does
@pytest.mark.parametrize("spec", ["wavelet:scales=4", "rope"])
def test_beams(spec):
    module, x = made(spec), tokens(7, batch=3)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, :2] = False
    cache = KVCache()
    with torch.no_grad():
        module(x[:, :4], key_mask=mask, cache=cache)
        for order in ([2, 0, 0, 1, 1], [4, 3, 1], [0, 0, 1]):
            order = torch.tensor(order)
            cache.reorder(order)
            x, mask = x[order], mask[order]
            x[:, cache.length :] += torch.randn(len(order), 7 - cache.length, 32)
            got = module(x[:, cache.length : cache.length + 1], cache=cache)
            mask = torch.cat([mask, torch.ones(len(order), 1, dtype=torch.bool)], 1)
            whole = module(x[:, : cache.length], key_mask=mask)
            assert close(got, whole[:, -1:], 1e-6)
    KVCache().reorder(torch.tensor([0]))
    for wrong in ([0], torch.tensor(0), torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match=r"indices must be an integer Tensor \(B,\)"):
            cache.reorder(wrong)
    for rows in ([5], [0, 3], [-1]):
        with pytest.raises(IndexError):
            cache.reorder(torch.tensor(rows))
    got = module(x[:, :1], cache=cache)
    assert (cache.length, got.shape) == (8, (3, 1, 32))  # it has not changed


def test_reset_crop_and_branches():
    module, x = made("alibi"), tokens(8)
    whole, cache = module(x), KVCache()
    assert str(cache) == "KVCache(length=0, layers=0)"
    with torch.no_grad():
        module(x[:, :6], cache=cache)
        branch = copy.copy(cache)
        cache.crop(4)
        assert (cache.length, branch.length) == (4, 6)
        other = tokens(8, seed=5)
        module(other[:, 4:], cache=cache)  # written over what was cut off
        assert close(module(x[:, 6:], cache=branch), whole[:, 6:])
        cache.crop(4)
        assert close(module(x[:, 4:], cache=cache), whole[:, 4:])
        with pytest.raises(ValueError, match="length must be at most 8, as cached, got 9"):
            cache.crop(9)
        with pytest.raises(ValueError, match="length"):
            cache.crop(-1)
        with pytest.raises(RuntimeError, match=r"keys \(B, Hk, n, d\) of shape \(2, 2, 'n', 8\)"):
            module(x[:1], cache=cache)
        cache.reset()
        assert cache.length == 0
        assert close(module(x[:1], cache=cache), whole[:1])
        assert str(cache) == "KVCache(length=8, layers=1)"


def test_layers_share_a_cache_and_stay_in_step():
    first, second, x = made("rope"), made("wavelet:scales=4", seed=3), tokens(7)
    whole, cache = second(first(x)), KVCache()
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            got = second(first(x[:, start:stop], cache=cache), cache=cache)
            assert close(got, whole[:, start:stop], 1e-6)
        cache.crop(4)
        first(x[:, 4:5], cache=cache)  # and then an error between the layers
        assert cache.length == 4
        with pytest.raises(RuntimeError, match="holds 5 tokens of this module and 4 of"):
            first(x[:, 4:5], cache=cache)
        cache.crop(cache.length)
        got = second(first(x[:, 4:], cache=cache), cache=cache)
        assert close(got, whole[:, 4:], 1e-6)
    del first, got
    gc.collect()
    assert str(cache) == "KVCache(length=7, layers=1)"


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    module, x = made("wavelet:scales=4"), tokens(6)
    cache = KVCache()
    with torch.no_grad():
        module(x[:, :4], cache=cache)
        for match, wrong in (
            (r"\(2, 6\), cached tokens.*got \(2, 3\)", {"key_mask": torch.ones(2, 3).bool()}),
            ("takes no segments", {"segments": torch.zeros(2, 2).long()}),
            ("positions of a row must go up by 1", {"positions": torch.tensor([0, 1])}),
        ):
            with pytest.raises(RuntimeError, match=match):
                module(x[:, 4:], cache=cache, **wrong)
        with pytest.raises(RuntimeError, match=r"here \(2, 2\) or \(2, 6\), cached tokens"):
            module(x[:, 4:], key_mask=torch.ones(2, 3).bool(), cache=cache)
        with pytest.raises(RuntimeError, match="float32"):
            module.float()(x[:, 4:].float(), cache=cache)
        module.double()
        assert close(module(x[:, 4:], cache=cache), module(x)[:, 4:], 1e-6)


def test_what_a_cache_cannot_do():
    module, x, cache = made("rope"), tokens(6), KVCache()
    with pytest.raises(RuntimeError, match="a cache needs causal=True"):
        made("alibi", causal=False)(x, cache=cache)
    with pytest.raises(RuntimeError, match="one sequence per row"):
        made("alibi")(x, segments=torch.zeros(6).long(), cache=cache)
    with torch.no_grad():
        module(x[:, :5], cache=cache)
        with pytest.raises(RuntimeError, match="5 tokens of other modules and none of this one"):
            made("rope")(x[:, 5:], cache=cache)
        cache.reset()
        made("rope")(x, cache=cache)


# --------------------------------------------------------------- storage and gradients
def test_storage_grows_by_doubling(monkeypatch):
    rows, original = [], cache_module._appended
    monkeypatch.setattr(
        cache_module, "_appended", lambda *args: rows.append(original(*args)) or rows[-1]
    )
    module, x, cache = made("none"), tokens(300, batch=1), KVCache()
    with torch.no_grad():
        stepwise(module, x, list(range(301)), cache)
    capacities = [storage.shape[2] for storage, _ in rows]
    assert capacities == [64] * 128 + [128] * 128 + [256] * 256 + [512] * 88


def test_inference_mode_first():
    module, x, cache = made("rope"), tokens(6), KVCache()
    with torch.inference_mode():
        module(x[:, :3], cache=cache)
    with torch.no_grad():
        module(x[:, 3:4], cache=cache)
    cache.reorder(torch.arange(2))
    with torch.inference_mode():
        cache.reorder(torch.arange(2))
        module(x[:, 4:5], cache=cache)
    with torch.no_grad():
        assert close(module(x[:, 5:], cache=cache), module(x)[:, 5:])


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "rope", *LEARNED])
def test_gradients_go_through_a_cache(spec):
    module = made(spec)
    gradients = []
    for cuts in ([0, 7], [0, 3, 4, 7]):
        x = tokens(7).requires_grad_()
        loss = stepwise(module, x, cuts).pow(2).sum()
        gradients.append(torch.autograd.grad(loss, [x, *module.parameters()]))
    for whole, pieces in zip(*gradients, strict=True):
        assert close(pieces, whole, 1e-5 * whole.abs().max())
    cache = KVCache()
    x = tokens(7).requires_grad_()
    loss = module(x[:, :3], cache=cache).sum()
    with torch.no_grad():  # writes into new storage, not into what backward needs
        module(x[:, 3:], cache=cache)
    loss.backward()


@pytest.mark.parametrize("spec", LEARNED)
def test_a_learned_table_is_made_once(spec, monkeypatch):
    module, x, cache = made(spec), tokens(9), KVCache()
    calls = []
    kind = type(module.encoding)
    method = f"learned_{module.encoding.terms[0]}"
    original = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *a, **k: calls.append(a[1]) or original(*a, **k))
    with torch.no_grad():
        stepwise(module, x, list(range(9)), cache)
        assert calls == [128]
        for value in module.position_encoding.parameters():
            value.add_(0.5)
        fresh = KVCache()
        module(x[:, :8], cache=fresh)
        assert close(module(x[:, 8:], cache=cache), module(x[:, 8:], cache=fresh))
        assert calls == [128, 128, 128]
    frozen = module(x, cache=KVCache())  # gradients are wanted: nothing is kept
    assert frozen.requires_grad
    assert calls == [128, 128, 128, 9]


def test_a_compiled_module_generates():
    torch._dynamo.reset()
    module, x = made("wavelet:scales=4"), tokens(6)
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        assert close(stepwise(compiled, x, [0, 4, 5, 6]), module(x), 1e-6)
    torch._dynamo.reset()


def test_gradients_of_the_query_alone():
    """Keys without a gradient are saved for the backward too, so the cache may not change them."""
    layer = SelfAttention(16, 2, encoding="none")
    for frozen in (layer.k_proj, layer.v_proj):
        frozen.requires_grad_(False)
    x, cache = torch.randn(1, 5, 16), KVCache()
    torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(5)], 1).sum().backward()
    got, layer.q_proj.weight.grad = layer.q_proj.weight.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(got, layer.q_proj.weight.grad)


def test_cropped_to_nothing():
    layer, cache = SelfAttention(16, 2, encoding="none").eval(), KVCache()
    with torch.no_grad():
        layer(torch.randn(2, 3, 16), cache=cache, key_mask=torch.ones(2, 3, dtype=torch.bool))
        cache.crop(0)
        x = torch.randn(1, 4, 16)
        torch.testing.assert_close(layer(x, cache=cache), layer(x))
