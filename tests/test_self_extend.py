"""Self-Extend and ReRoPE against their formula [J], in modules and in models."""

import itertools

import numpy as np
import oracle
import pytest
import torch
import wavepe
from nn_cases import made, tokens
from wavepe.nn import Attention, KVCache

THETA, D = 100.0, 8
EXTENDED = f"rope:theta={THETA:g},self_extend=2,neighbors=3"


def scores(q, k, group, near, interleaved=False):
    """The scores (B, H, L, L), float64. Far keys have positions in groups; group None: of one."""
    length = q.shape[2]
    inv_freq = oracle.rope_frequencies(D, THETA)

    def products(queries, keys):
        turned = (
            oracle.rope(x.numpy(), *oracle.rope_table(places, inv_freq, 1.0), interleaved)
            for x, places in ((q, queries), (k, keys))
        )
        a, b = map(torch.from_numpy, turned)
        return a @ b.mT

    m = np.arange(length)
    if group is None:
        far = products(0 * m + near, 0 * m)
    else:
        far = products(m // group + near - near // group, m // group)
    delta = torch.from_numpy(m[:, None] - m)
    score = torch.where(delta < near, products(m, m), far) / D**0.5
    return score.masked_fill(delta < 0, -torch.inf)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
@pytest.mark.parametrize(("group", "near"), [(2, 3), (3, 4), (4, 4), (None, 3), (5, 1), (1, 2)])
def test_the_formula(group, near, length):
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 2, length, D, generator=generator, dtype=torch.float64)
    for interleaved in (False, True):
        spec = f"rope:theta={THETA},self_extend={group or 'inf'},neighbors={near}"
        module = Attention(f"{spec},interleaved={str(interleaved).lower()}", D, 2).eval()
        wanted = scores(q, k, group, near, interleaved)
        got = module(q, k, v)
        torch.testing.assert_close(got, wanted.softmax(-1) @ v, rtol=0, atol=1e-7)
        seen = torch.arange(length)[:, None] - torch.arange(length) < 6
        narrow = wanted.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(module(q, k, v, window=6), narrow, rtol=0, atol=1e-7)
        spec_with_sink = f"{spec},interleaved={str(interleaved).lower()}+sink:initial=-1"
        x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
        for options, size in (("", {}), (",from_input=true", {"dim": 3})):
            sink = Attention(spec_with_sink + options, D, 2, **size, dtype=torch.float64).eval()
            one = torch.full_like(wanted[..., :1], -1)
            if options:
                s_proj = torch.randn(2, 3, generator=generator, dtype=torch.float64)
                sink.position_encoding.sink.s_proj.data.copy_(s_proj)
                one = one + (x @ s_proj.mT).mT[..., None]
            weights = torch.cat([wanted, one], -1).softmax(-1)[..., :-1]
            got = sink(q, k, v, x=x if options else None)
            torch.testing.assert_close(got, weights @ v, rtol=0, atol=1e-7)


def test_training_is_plain_rope():
    q, k, v = torch.randn(3, 1, 2, 9, D)
    module = Attention("rope:self_extend=2,neighbors=3", D, 2)
    assert torch.equal(module(q, k, v), Attention("rope", D, 2)(q, k, v))


@pytest.mark.parametrize("spec", [EXTENDED, f"{EXTENDED}+temperature:floor=3,alpha=0.5"])
def test_where_a_sequence_begins_matters(spec):
    """Groups begin with each sequence: padded or packed, it is what it is alone."""
    module, x = made(spec), tokens(22, 1)
    alone = torch.cat([module(x[:, :9]), module(x[:, 9:])], 1)
    packed = module(x, segments=(torch.arange(22) >= 9).int())
    padded = torch.cat([x[:, :3], x[:, 9:]], 1)
    mask = torch.arange(16)[None] >= 3
    cache, pieces = KVCache(), []
    for start, stop in ((0, 5), (5, 11), (11, 12), (12, 16)):
        args = {"key_mask": mask[:, start:stop], "cache": cache}
        pieces.append(module(padded[:, start:stop], **args))
    for got, wanted in (
        (packed, alone),
        (module(padded, key_mask=mask)[:, 3:], alone[:, 9:]),
        (torch.cat(pieces, 1)[:, 3:], alone[:, 9:]),
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)
    assert (module(x) - alone).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_models(family):
    """Caches that forget what is outside of a window, padding and packed sequences."""
    pytest.importorskip("transformers")
    from hf_families import build
    from hf_model import close, logits
    from test_hf_situations import DynamicCache, fill, in_pieces, packed, padded, static

    model = wavepe.hf.patch(build(family), EXTENDED)
    ids, mask = padded("left")
    rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    alone = torch.cat([logits(model, row, use_cache=False)[0] for row in rows])
    assert close(logits(model, ids, attention_mask=mask)[mask.bool()], alone, 1e-5)
    fill(model, lambda: DynamicCache(config=model.config), (0, 5, 6, 9, 13))
    fill(model, lambda: static(model), (0, 9, 10, 11, 12, 13))
    row, positions, ends = packed((5, 9, 3))
    parts = [logits(model, row[:, a:b], use_cache=False) for a, b in itertools.pairwise(ends)]
    found = logits(model, row, position_ids=positions, use_cache=False)
    assert close(found, torch.cat(parts, 1), 1e-5)
    late = in_pieces(model, ids[:1], None, DynamicCache(config=model.config))
    plain = wavepe.hf.patch(build(family), "rope:theta=100")
    assert not close(late, logits(plain, ids[:1]), 1e-2)
    with pytest.raises(ValueError, match="takes no output_attentions=True"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="positions must rise by 1"):
        model(ids[:1], position_ids=torch.tensor([[0, 1, *range(5, 16)]]), use_cache=False)
