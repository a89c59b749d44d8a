"""Masks of a patched Llama: padding, packed sequences, own masks, caches, dropout.

Packed sequences are each as if they were alone, whatever else the caller passes. How all this
compiles is tested in test_hf_compile.py.
"""

import inspect
import itertools

import pytest
import torch
import wavepe.hf
from encoding_cases import LEARNED
from hf_model import (
    HEAD,
    begun_pass,
    close,
    gradients,
    logits,
    patched_tiny,
    recompute,
    tiny,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask
from wavepe.hf import masks
from wavepe.hf.attention import attention_forward

# One of each kind of term in the scores.
SCORES = ("wavelet:scales=4", "transformer_xl:biases=false", "alibi", "sandwich:dim=16", *LEARNED)
EACH = (*SCORES, "none", "rope:theta=100", "sinusoidal")
# One for each place where an encoding enters, if its kind of term does not matter.
SPECS = ("wavelet:scales=4", "shaw:clip=3", "alibi", "none", "rope", "sinusoidal")
IDS = tokens(2, 12)
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)


def mask_of(model, length, mask=None, cache=None, positions=None, rows=2):
    """Return the mask that transformers makes for a pass of `length` tokens."""
    embeds = torch.zeros(rows, length, model.config.hidden_size)
    args = {"inputs_embeds": embeds}
    if "input_embeds" in inspect.signature(create_causal_mask).parameters:  # transformers <= 5.0
        places = torch.arange(length) + (0 if cache is None else cache.get_seq_length())
        args = {"input_embeds": embeds, "cache_position": places}
    return create_causal_mask(
        config=model.config,
        **args,
        attention_mask=mask,
        past_key_values=cache,
        position_ids=positions,
    )


def padded(rows=2, length=9, padding=3):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


# ------------------------------------------------------------------ the form of masks
@pytest.mark.parametrize("spec", SPECS[::2])
def test_forms(spec):
    model, mask = patched_tiny(spec), padded()
    assert mask_of(model, 9) is None
    assert mask_of(model, 9, torch.ones(2, 9)) is None
    seen = mask_of(model, 9, mask)
    assert seen.dtype == torch.uint8
    assert torch.equal(seen, mask[:, None, None])
    # A pass has found packed sequences before it asks for this mask.
    assert mask_of(model, 9, positions=torch.arange(9)[None] % 4) is None
    pairs = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    assert mask_of(model, 9, pairs) is pairs


@pytest.mark.parametrize("spec", SPECS[::2])
def test_forms_with_a_cache(spec):
    model, mask = patched_tiny(spec), padded()
    growing = DynamicCache(config=model.config)
    fixed = StaticCache(config=model.config, max_cache_len=20)
    for cache in (growing, fixed):
        logits(model, tokens(2, 6), past_key_values=cache)
    assert mask_of(model, 3, cache=growing) is None
    assert mask_of(model, 3, cache=fixed) is None
    assert torch.equal(mask_of(model, 3, mask, growing), mask[:, None, None])
    seen = mask_of(model, 3, mask, fixed)
    assert seen.shape == (2, 1, 1, 20)
    assert torch.equal(seen[..., :9], mask[:, None, None])
    assert not seen[..., 9:].any()
    assert mask_of(model, 3, seen, fixed) is seen  # generate makes masks in advance


def looking_both_ways(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


TRIANGLE = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()


def test_layers_that_look_both_ways():
    """As the stock model, where that looks both ways or is told by a mask of queries x keys."""
    ids, more = IDS[:, :9], {"max_new_tokens": 4, "do_sample": False}
    models = [looking_both_ways(tiny()) for _ in range(3)]
    models[1].set_attn_implementation("wavepe")
    wavepe.hf.patch(models[2], "rope")
    for options in (
        {},
        {"attention_mask": padded() | 1},
        {"attention_mask": TRIANGLE},
        {"attention_mask": torch.where(TRIANGLE, 0.0, -torch.inf)},
        {"attention_mask": TRIANGLE | True},
    ):
        wanted, *got = (logits(model, ids, **options) for model in models)
        assert all(close(each, wanted, 1e-5) for each in got)
    assert not close(wanted, logits(tiny(), ids), 1e-2)
    wanted, *got = (model.generate(ids, **more) for model in models)
    assert all(torch.equal(each, wanted) for each in got)
    out = models[2](ids, output_attentions=True)
    assert close(out.logits.detach(), logits(models[0], ids), 1e-5)
    assert all(weights.all() for weights in out.attentions)


@pytest.mark.parametrize("spec", ["rope", "none", "wavelet:scales=4", "relative:extent=6,rank=3"])
@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": padded()},
        {"attention_mask": padded().flip(1)},
        {"position_ids": POSITIONS[:, :9] % 5},
        {"position_ids": POSITIONS[:, :9] % 5, "use_cache": False},
        {"past_key_values": StaticCache},
    ],
)
def test_layers_that_look_both_ways_take_no_padding(options, spec):
    """Stock models are causal there, or see the empty room of a cache."""
    model = looking_both_ways(patched_tiny(spec))
    if "past_key_values" in options:
        options = {"past_key_values": StaticCache(config=model.config, max_cache_len=20)}
    message = "needs causal attention, got is_causal=False"
    if spec in ("rope", "none"):
        message = "a layer with is_causal=False takes no padding, packed .*: set config.is_causal"
    with pytest.raises(ValueError, match=message):
        logits(model, IDS[:, :9], **options)


# ------------------------------------------------------------------ no tensor of queries x keys
class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


LONG = [("plain", spec) for spec in EACH]
LONG += [(how, EACH[index]) for how in ("padding", "packed", "cached") for index in (0, 1, -2)]


@pytest.mark.parametrize(("how", "spec"), LONG)
def test_no_tensor_grows_with_queries_times_keys(how, spec):
    length, model = 400, patched_tiny(spec, num_hidden_layers=1).train()
    ids, options = tokens(1, length), {"use_cache": False}
    if how == "padding":
        options["attention_mask"] = padded(1, length)
    if how == "packed":
        options["position_ids"] = torch.cat([torch.arange(150), torch.arange(250)])[None]
    if how == "cached":
        options = {"past_key_values": DynamicCache(config=model.config)}
        logits(model, ids[:, :100], **options)
        ids = ids[:, 100:]
    with LargestTensor() as largest:
        model(ids, labels=ids, **options).loss.backward()
    assert largest.elements < length * length / 2
    wanted = "output_attentions"  # where the weights are asked for, there is one
    with LargestTensor() as largest:
        model(ids, **{wanted: True})
    assert largest.elements >= ids.shape[1] ** 2


# ------------------------------------------------------------------ masks of the user's own
@pytest.mark.parametrize("spec", EACH)
def test_the_operator_and_pytorch_agree_under_any_mask(spec):
    """The mask may show keys in the future, because it alone decides."""
    model, ids = patched_tiny(spec), tokens(2, 11)
    causal = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, 11, 11)
    assert close(logits(model, ids, attention_mask=causal), logits(model, ids), 1e-5)
    with pytest.raises((TypeError, RuntimeError), match="bool"):
        logits(model, ids, attention_mask=causal.long())
    generator = torch.Generator().manual_seed(3)
    for heads in (1, 4):
        mask = torch.rand((2, heads, 11, 11), generator=generator) < 0.5
        mask |= torch.eye(11, dtype=torch.bool)
        fused = logits(model, ids, attention_mask=mask)
        assert close(logits(model, ids, attention_mask=mask, output_attentions=True), fused, 1e-5)
        added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        assert close(logits(model, ids, attention_mask=added), fused, 1e-5)


@pytest.mark.parametrize("spec", SCORES)
def test_weights_do_not_lose_digits_under_autocast(spec):
    layer = patched_tiny(spec).model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, layer.config.num_attention_heads, 11, HEAD)

    def both():
        args = {"scaling": HEAD**-0.5, "output_attentions": True}
        return attention_forward(
            layer, q, k[:, :2], v[:, :2], None, **args, wavepe_pass=begun_pass()
        )

    with torch.no_grad():
        exact = both()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, both(), exact))


@pytest.mark.parametrize("spec", EACH)
def test_weights_and_added_masks_in_bfloat16(spec):
    model, ids = patched_tiny(spec).bfloat16(), tokens(2, 11)
    seen = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    wanted = logits(model, ids)
    assert wanted.dtype == torch.bfloat16
    for options in ({"output_attentions": True}, {"attention_mask": added}):
        assert close(logits(model, ids, **options).float(), wanted.float(), 0.05)


# ------------------------------------------------------------------ packed sequences
def alone(model, ids=IDS):
    return torch.cat([logits(model, ids[:, :5]), logits(model, ids[:, 5:])], dim=1)


@pytest.mark.parametrize("spec", SPECS)
def test_positions_that_start_again(spec):
    """With a mask of ones or a cache, transformers itself would not see them."""
    model = patched_tiny(spec)
    for rows in (1, 2):
        ids, wanted = IDS[:rows], alone(model, IDS[:rows])
        for options in (
            {},
            {"use_cache": False},
            {"attention_mask": torch.ones(rows, 12, dtype=torch.long)},
            {"past_key_values": DynamicCache(config=model.config)},
            {"past_key_values": StaticCache(config=model.config, max_cache_len=20)},
            {"use_cache": False, "position_ids": POSITIONS.expand(rows, -1)},
        ):
            got = logits(model, ids, **{"position_ids": POSITIONS, **options})
            assert close(got, wanted, 1e-5), (rows, options.keys())


@pytest.mark.parametrize("spec", SPECS)
def test_padding_beside_and_between_them(spec):
    model = patched_tiny(spec)
    mask, positions = torch.ones(2, 12, dtype=torch.long), POSITIONS.repeat(2, 1)
    mask[:, 10:], positions[:, 10:] = 0, 0
    wanted = torch.cat([logits(model, IDS[:, :5]), logits(model, IDS[:, 5:10])], dim=1)
    got = logits(model, IDS, position_ids=positions, attention_mask=mask)
    assert close(got[:, :10], wanted, 1e-5)
    weights = model(IDS, position_ids=positions, attention_mask=mask, output_attentions=True)
    assert close(weights.logits.detach()[:, :10], wanted, 1e-5)
    assert not weights.attentions[0][:, :, 5:10, :5].any()
    # As collators leave it that pad each sequence to a multiple; and a sequence of one token.
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5]])
    got = logits(model, IDS[:1], position_ids=positions, attention_mask=mask)
    for part in (slice(3), slice(5, 6), slice(6, 12)):
        assert close(got[:, part], logits(model, IDS[:1, part]), 1e-5)


@pytest.mark.parametrize("counted", ["tokens", "places"])
def test_padding_within_a_sequence_is_none_of_theirs(counted):
    model, mask = patched_tiny("rope"), torch.ones(1, 12, dtype=torch.long)
    mask[:, 3:5] = 0
    positions = mask.cumsum(1) - 1 if counted == "tokens" else torch.arange(12)[None]
    seen = torch.ones(12, 12, dtype=torch.bool).tril() & mask.bool()
    wanted = logits(model, IDS[:1], position_ids=positions, attention_mask=seen[None, None])
    got = logits(model, IDS[:1], position_ids=positions, attention_mask=mask)
    assert close(got[:, mask[0] == 1], wanted[:, mask[0] == 1], 1e-5)


def test_masks_and_lengths_that_are_given_otherwise():
    """Masks of the room in a static cache and of the sequences' own numbers; emptied caches."""
    model = patched_tiny("wavelet:scales=4")
    wanted, whole = alone(model), logits(model, IDS)
    cache = StaticCache(config=model.config, max_cache_len=20)
    for mask, filled in (
        (torch.ones(2, 20, dtype=torch.long), None),
        (torch.ones(2, 20, dtype=torch.long), cache),
        (torch.tensor([[2] * 5 + [1] * 7] * 2), None),
    ):
        args = {"attention_mask": mask, "past_key_values": filled}
        assert close(logits(model, IDS, position_ids=POSITIONS, **args), wanted, 1e-5)
    cache.reset()
    parts = [logits(model, ids, past_key_values=cache) for ids in (IDS[:, :6], IDS[:, 6:])]
    assert close(torch.cat(parts, 1), whole, 1e-5)
    # Lengths of one sequence leave its cache alone.
    out = model(IDS[:1, :6], cu_seq_lens_q=torch.tensor([0, 6]), use_cache=True)
    more = logits(model, IDS[:1, 6:], past_key_values=out.past_key_values)
    assert close(more, whole[:1, 6:], 1e-5)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model.model(position_ids=POSITIONS)  # the model's own message


def test_gradients():
    model = patched_tiny("wavelet:scales=4").train()
    model(IDS, position_ids=POSITIONS).logits.square().sum().backward()
    packed = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for piece in (IDS[:, :5], IDS[:, 5:]):
        model(piece).logits.square().sum().backward()
    for got, weight in zip(packed, model.parameters(), strict=True):
        assert close(got, weight.grad, 1e-5)


@pytest.mark.parametrize("spec", ["alibi", "none"])
@pytest.mark.parametrize("use_cache", [False, None])
def test_packed_sequences_of_one_token(spec, use_cache):
    """Their position is that of the token before, and does not fall."""
    model, ids, ends = patched_tiny(spec), tokens(1, 6), (0, 2, 3, 4, 6)
    got = logits(model, ids, position_ids=torch.tensor([[0, 1, 0, 0, 0, 1]]), use_cache=use_cache)
    alone = [logits(model, ids[:, a:b]) for a, b in itertools.pairwise(ends)]
    assert close(got, torch.cat(alone, 1), 1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_is_no_packing(spec):
    """Positions of generate and of left padding start late; a cache goes on."""
    model, mask = patched_tiny(spec), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    got = model(IDS, attention_mask=mask, position_ids=positions, use_cache=True)
    assert got.past_key_values.get_seq_length() == 12
    assert close(got.logits.detach()[0, 4:], logits(model, IDS[:1, 4:])[0], 1e-5)
    more = logits(
        model,
        IDS[:, :1],
        attention_mask=torch.cat([mask, mask[:, :1] | 1], 1),
        position_ids=positions[:, -1:] + 1,
        past_key_values=got.past_key_values,
    )
    whole = torch.cat([IDS, IDS[:, :1]], 1)
    assert close(more[1], logits(model, whole)[1, -1:], 1e-5)


@pytest.mark.parametrize("spec", ["none", "rope", "sinusoidal"])
def test_gaps_begin_no_sequence(spec):
    """Positions may be drawn at random; test_hf_gaps.py has who takes them."""
    model, positions = patched_tiny(spec), torch.arange(12)[None] ** 2
    got = logits(model, IDS, position_ids=positions)
    mask = torch.ones(2, 12, dtype=torch.long)
    for args in ({"attention_mask": mask}, {"use_cache": False}):
        assert torch.equal(logits(model, IDS, position_ids=positions, **args), got)
    assert close(got, logits(model, IDS), 1e-5) == (spec == "none")


def test_what_cannot_be_right_is_refused():
    model = patched_tiny("wavelet:scales=4")
    cache = DynamicCache(config=model.config)
    logits(model, IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds packed sequences"):
        model(IDS[:, :1], past_key_values=cache)
    cache = DynamicCache(config=model.config)
    logits(model, IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"new ones begin at \[5\]\) cannot follow the 12 tokens"):
        model(IDS, position_ids=POSITIONS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"new ones begin at \[5\]\) cannot follow the 12 tokens"):
        model(IDS[:1], cu_seq_lens_q=ENDS, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be continued: pass use_cache=False"):
        model(IDS, position_ids=POSITIONS, use_cache=True)
    for args, message in (
        ({"cu_seq_lens_q": ENDS[:2]}, "rise from 0 to the number of tokens, 12; got .0, 5."),
        ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1}, "must be equal to cu_seq_lens_k"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 5, 12])}, "rise from 0 .*; got .0, 8, 5, 12."),
        ({"cu_seq_lens_q": ENDS[:0]}, "number of tokens, 12; got .. and"),
    ):
        with pytest.raises(ValueError, match=message):
            model(IDS[:1], **args)
    with pytest.raises(ValueError, match=r"packed sequences of one row .* for 2 rows"):
        model(IDS, cu_seq_lens_q=ENDS)
    with pytest.raises(TypeError, match="cu_seq_lens_q must be a tensor, got list"):
        model(IDS[:1], cu_seq_lens_q=[0, 5, 12])
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="cannot follow the 12 tokens of a cache"):
        model(IDS[:1, :2], cu_seq_lens_q=torch.tensor([0, 1, 2]), past_key_values=cache)
    follows = patched_tiny("normalised")
    with pytest.raises(ValueError, match="normalised depends on the sequence length"):
        follows(IDS, position_ids=POSITIONS)


@pytest.mark.parametrize("spec", SPECS)
def test_on_a_device_nobody_looks_and_the_same_is_seen(spec, monkeypatch):
    """There every mask counts as one that hides something, and positions as packed sequences."""
    model, ones = patched_tiny(spec).train(), torch.ones(2, 12, dtype=torch.long)
    padding = ones.clone()
    padding[0, :3] = 0

    def run():
        yield logits(model, IDS)
        yield logits(model, IDS, use_cache=False)
        yield logits(model, IDS, use_cache=False, output_attentions=True)
        for mask in (None, ones, padding):
            for positions in (None, POSITIONS, torch.arange(12)[None]):
                args = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
                yield logits(model, IDS, **args)
        yield logits(model, IDS[:1], cu_seq_lens_q=ENDS, use_cache=False)
        cache = DynamicCache(config=model.config)
        yield logits(model, IDS[:, :5], past_key_values=cache)
        yield logits(model, IDS[:, 5:6], past_key_values=cache, attention_mask=ones[:, :6])

    wanted = list(run())
    monkeypatch.setattr(masks, "reading_waits", lambda device: True)
    looked = []
    monkeypatch.setattr(torch.Tensor, "any", lambda *x: looked.append("any"))
    monkeypatch.setattr(torch.Tensor, "all", lambda *x: looked.append("all"))
    for got, expected in zip(run(), wanted, strict=True):
        assert close(got, expected, 1e-5)
    assert not looked


# ------------------------------------------------------------------ dropout
@pytest.mark.parametrize("spec", EACH)
def test_dropout_follows_the_seed(spec):
    model, ids = patched_tiny(spec, attention_dropout=0.5).train(), tokens(2, 12)

    def run(seed):
        torch.manual_seed(seed)
        return gradients(model, ids)

    first, again, other = run(0), run(0), run(1)
    recompute(model)
    recomputed = run(0)
    for a, b, c, d in zip(first, again, other, recomputed, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert torch.equal(a, d)


# ------------------------------------------------------------------ the operator and devices
def test_the_operator_that_is_compiled():
    """Schema, fake tensors and autograd of wavepe::attention_in_graph agree."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, HEAD, generator=generator)
    k, v = torch.randn(2, 2, 2, 70, HEAD, generator=generator)
    seen = torch.ones(2, 70, dtype=torch.bool).tril(60)
    options = {"window": 50, "softcap": 4.0, "scale": 0.3}
    options |= {"offset": torch.tensor(64), "key_mask": seen}
    bias = torch.randn(4, 70, generator=generator)
    for more in (
        {},
        {"dropout_p": 0.5, "seed": torch.tensor(5)},
        {"q_rel": q.clone().requires_grad_(), "bias": bias.requires_grad_()},
        {"numbers": torch.tensor([0.2, 3.0, 0.0], dtype=torch.float64)},
    ):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(
            torch.ops.wavepe.attention_in_graph.default,
            tensors,
            options | more | {"name": "wavelet:scales=4", "one_sided": True},
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.fixture
def no_kernel(monkeypatch):
    """As on a GPU: layers without a score go to PyTorch's attention. Counts them."""
    calls, stock = [], wavepe.hf.attention.sdpa_attention_forward

    def counted(*args, **kwargs):
        calls.append(args[4] is not None)  # the mask
        return stock(*args, **kwargs)

    monkeypatch.setattr(wavepe.hf.families, "FUSED_ON", ())
    monkeypatch.setattr(wavepe.hf.attention, "sdpa_attention_forward", counted)
    return calls


@pytest.mark.parametrize("spec", ["none", "rope:theta=100", "sinusoidal"])
def test_pytorchs_attention_sees_the_same(spec, no_kernel, monkeypatch):
    model, ids = patched_tiny(spec), tokens(2, 12)
    mask, positions = padded(2, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
    steps = [(0, 5), (5, 6), (6, 9), (9, 10), (10, 12)]

    def run():
        yield logits(model, ids, use_cache=False)
        yield logits(model, ids, attention_mask=mask)[mask.bool()]
        yield logits(model, ids, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool).tril())
        yield logits(model, ids, position_ids=positions)
        for seen in (None, mask):
            for cache in (DynamicCache, StaticCache):
                room = {"max_cache_len": 20} if cache is StaticCache else {}
                filled = cache(config=model.config, **room)
                for start, stop in steps:
                    args = {} if seen is None else {"attention_mask": seen[:, :stop]}
                    got = logits(model, ids[:, start:stop], past_key_values=filled, **args)
                    yield got if seen is None else got[seen[:, start:stop].bool()]
        packed = StaticCache(config=model.config, max_cache_len=20)
        yield logits(model, ids, position_ids=positions, past_key_values=packed)

    got = list(run())
    assert len(no_kernel) == 2 * len(got)  # each layer
    assert no_kernel[:2] == [False, False]  # plain causal: no mask
    monkeypatch.setattr(wavepe.hf.families, "FUSED_ON", ("cpu",))
    for a, b in zip(got, run(), strict=True):
        assert close(a, b, 1e-5)
    assert len(no_kernel) == 2 * len(got)


def test_scores_and_caps_do_not_go_there(no_kernel):
    logits(patched_tiny("wavelet:scales=4"), tokens(1, 5))
    layer = patched_tiny("none").model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, HEAD), torch.randn(1, 2, 3, HEAD)
    wavepe.hf.attention.attention_forward(
        layer, query, key, key, None, softcap=2.0, wavepe_pass=begun_pass()
    )
    assert not no_kernel
    wavepe.hf.attention.attention_forward(
        layer, query, key, key, None, sliding_window=2, wavepe_pass=begun_pass()
    )
    assert no_kernel == [True]
