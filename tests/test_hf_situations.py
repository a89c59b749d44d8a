"""Every family in every situation: padding, packing, caches, generation, checkpointing, compilers.

Each test is a cell of the table in docs/reference/families.md, test_<situation>[<family>], which
`benchmarks.hf_families` writes from pytest's --junitxml. Wanted is always what the same model
gives without the situation; tests/test_hf_families.py says that this is right.
"""

import contextlib
import copy
import itertools
import re

import pytest
import torch
import transformers
import wavepe.hf
from hf_families import FAMILIES, UNROTATED, WINDOW, build, by_turns
from hf_model import VOCABULARY, close, gradients, kept_gradients, logits, tokens
from torch._dynamo.exc import UserError
from transformers import DynamicCache, StaticCache

WAVELET, ALIBI = "wavelet:scales=4", "alibi"
each_family = by_turns(more=UNROTATED)
compiled_family = by_turns(1, always=(), more=UNROTATED)  # Llamas are in test_hf_compile.py
KINDS = FAMILIES | UNROTATED
OLDEST = transformers.__version__ == "5.0.0"

# Sums in another order: the padded and the cached passes cut the keys elsewhere. 1e-6 is seen.
ROUNDING = 1e-5

# Situation -> how stock models fail in some versions of transformers. A patched model may fail so
# where the stock one does: docs/reference/families.md says in which versions, and why.
OUT_OF_BOUNDS = (IndexError, "out of bounds")  # of a static cache
NO_GRAPH = (RuntimeError, "data-dependent|inputs of BF16")  # of experts
UPSTREAM = {
    "static_cache_in_pieces": (RuntimeError, "shape mismatch"),
    "chunked_prefill": OUT_OF_BOUNDS,
    "chunked_prefill_left_padding": OUT_OF_BOUNDS,
    "assisted": (ValueError, "Cannot `crop`"),
    "checkpointing": (AssertionError, "use_reentrant=True"),  # of keys that layers share
    "compile": NO_GRAPH,
    "export": NO_GRAPH,
}
# The mask of a static cache is longer than the keys that the cache of Inkling returns.
MASK = (RuntimeError, "must match the size of tensor b|key_mask must be")
UPSTREAM_OF_CONVOLUTIONS = {
    "packed": (AssertionError, "packed"),  # they reach from one sequence into the next
    "packed_unseen": (AssertionError, "evaluation's own cache"),
    "static_cache": MASK,
    "chunked_prefill_left_padding": MASK,
    "beams": MASK,
    "checkpointing": UPSTREAM["checkpointing"],  # of the earlier blocks of layers, in Inkling 2
    "export": (UserError, r"Constraints violated \(length\)"),  # at most 3 tokens, in Inkling 2
}


def cell(*specs, shallow=False):
    """A test for families, of a check that takes a patched model of each of `specs`.

    A shallow model has one layer where all are alike: compilers take seconds for each. The check
    may return a word for the table.
    Where it fails in a way of `UPSTREAM`, the stock model has to fail in the same way.
    """

    def make(check):
        situation = check.__name__.removeprefix("test_")

        @(compiled_family if shallow else each_family)
        def test(family, record_property):
            record_property("transformers", transformers.__version__)
            record_property("torch", str(torch.__version__))
            layers = {"num_hidden_layers": 1} if shallow and KINDS[family].uniform else {}
            known = UPSTREAM_OF_CONVOLUTIONS if KINDS[family].convolutions else UPSTREAM
            error, text = known.get(situation, ((), ""))
            try:
                words = [check(wavepe.hf.patch(build(family, **layers), spec)) for spec in specs]
            except error as ours:
                if not re.search(text, str(ours)):
                    raise
                with pytest.raises(error, match=text):
                    check(build(family, **layers))
                words = ["upstream"]
            record_property("cell", words[0] or "right")

        test.__doc__ = check.__doc__
        return test

    return make


def padded(side, lengths=(13, 9, 4)):
    """Random rows of these lengths, and their mask."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(longest - length, None) if side == "left" else slice(length)
        ids[row, place] = tokens(1, length, seed=row)[0]
        mask[row, place] = 1
    return ids, mask


def alone(model, ids, mask):
    """The logits of each row without its padding, one below the other."""
    rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    return torch.cat([logits(model, row, use_cache=False)[0] for row in rows])


def write(model, ids, new=8, **options):
    """Return the tokens that `generate` adds, without chance; in sum more than a window."""
    # An end that is not a token: without one, assisted generation fails in transformers 5.0.
    options = {"eos_token_id": VOCABULARY, "disable_compile": True, **options}
    options = {"max_new_tokens": new, "do_sample": False, **options}
    return model.generate(ids, **options)[:, ids.shape[1] :]


ODD = (0, 5, 6, 9, 13)  # one piece and the window end together
STEPS = (0, 9, 10, 11, 12, 13)


def in_pieces(model, ids, mask, cache, cuts=ODD):
    """Logits of a pass that is cut."""
    pieces = []
    for start, stop in itertools.pairwise(cuts):
        seen = None if mask is None else mask[:, :stop]
        options = {"attention_mask": seen, "past_key_values": cache}
        pieces.append(logits(model, ids[:, start:stop], **options))
    return torch.cat(pieces, dim=1)


# ------------------------------------------------------------------ padding
@cell(WAVELET, ALIBI, "sinusoidal")
def test_left_padding(model):
    ids, mask = padded("left")
    kept, wanted = mask.bool(), alone(model, ids, mask)
    if not KINDS[model.config.model_type].scales_queries:
        assert close(logits(model, ids, attention_mask=mask)[kept], wanted, ROUNDING)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = logits(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    assert close(output[kept], wanted, ROUNDING)
    assert not close(logits(model, ids)[kept], wanted, 1e-2)
    rows = [write(model, row[seen][None], 4) for row, seen in zip(ids, kept, strict=True)]
    assert torch.equal(write(model, ids, 4, attention_mask=mask), torch.cat(rows))


@cell(WAVELET, ALIBI, "sinusoidal")
def test_right_padding(model):
    ids, mask = padded("right")
    kept, wanted = mask.bool(), alone(model, ids, mask)
    for options in ({}, {"use_cache": False}):
        output = logits(model, ids, attention_mask=mask, **options)
        assert close(output[kept], wanted, ROUNDING)


# ------------------------------------------------------------------ packed sequences
def packed(lengths):
    """Sequences in one row: tokens, positions, and where each begins and ends."""
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return ids, positions, torch.tensor([0, *lengths]).cumsum(0)


def each_alone(model, ids, ends):
    pieces = [ids[:, a:b] for a, b in itertools.pairwise(ends)]
    return torch.cat([logits(model, piece, use_cache=False) for piece in pieces], dim=1)


def flash_arguments(ends):
    """As DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them."""
    ends, longest = ends.to(torch.int32), int(ends.diff().max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@cell(WAVELET, ALIBI, "sinusoidal")
def test_packed(model):
    first, second = packed((5, 9, 3)), packed((10, 7))
    wanted = torch.cat([each_alone(model, ids, ends) for ids, _, ends in (first, second)])
    ids, positions = (torch.cat(both) for both in list(zip(first, second, strict=True))[:2])
    output = logits(model, ids, position_ids=positions, use_cache=False)
    assert close(output, wanted, ROUNDING), "packed"
    assert not close(logits(model, ids, use_cache=False), wanted, 1e-2)
    model.train()
    output = logits(model, ids, position_ids=positions, use_cache=False)
    assert close(output, wanted, ROUNDING)
    ids, positions, ends = first
    options = {"position_ids": positions, "use_cache": False, **flash_arguments(ends)}
    assert close(logits(model, ids, **options), wanted[:1], ROUNDING)


@cell(WAVELET, ALIBI)
def test_packed_unseen(model):
    """Where transformers takes packed sequences for one."""
    ids, positions, ends = packed((5, 9, 3))
    wanted = each_alone(model, ids, ends)
    ways = {
        "evaluation's own cache": {"position_ids": positions},
        "a cache of the caller's": {
            "position_ids": positions, "past_key_values": DynamicCache(config=model.config)},
        "a mask of ones": {
            "position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False},
        "cu_seq_lens alone": {**flash_arguments(ends), "use_cache": False},
    }  # fmt: skip
    for way, options in ways.items():
        assert close(logits(model, ids, **options), wanted, ROUNDING), way
    with pytest.raises(ValueError, match="packed"):  # it could not be continued
        logits(model, ids, position_ids=positions, use_cache=True)


# ------------------------------------------------------------------ caches
def fill(model, make, cuts):
    """A pass in pieces into new caches, with and without padding, against one without a cache."""
    for ids, mask in ((tokens(2, 13), None), padded("left")):
        kept = (torch.ones_like(ids) if mask is None else mask).bool()
        wanted = logits(model, ids, attention_mask=mask, use_cache=False)[kept]
        output = in_pieces(model, ids, mask, make(), cuts)
        assert close(output[kept], wanted, ROUNDING)


def static(model):
    return StaticCache(config=model.config, max_cache_len=20)


def generate_with(model, cache):
    for ids, mask in ((tokens(2, 13), None), padded("left")):
        output = write(model, ids, attention_mask=mask, cache_implementation=cache)
        assert torch.equal(output, write(model, ids, attention_mask=mask, use_cache=False))


@cell(WAVELET, ALIBI)
def test_dynamic_cache(model):
    """One that forgets what is outside of windows, and one that does not."""
    fill(model, lambda: DynamicCache(config=model.config), ODD)
    if not KINDS[model.config.model_type].convolutions:
        fill(model, DynamicCache, ODD)
    generate_with(model, "dynamic")


@cell(WAVELET, ALIBI)
def test_static_cache(model):
    generate_with(model, "static")
    fill(model, lambda: static(model), STEPS)


@cell(WAVELET, ALIBI)
def test_static_cache_in_pieces(model):
    fill(model, lambda: static(model), ODD)


def prefill_in_chunks(model, ids, mask):
    """generate(prefill_chunk_size=...) with each cache, against no chunks and no cache."""
    wanted = write(model, ids, attention_mask=mask, use_cache=False)
    for cache in ("static", "dynamic"):
        options = {"attention_mask": mask, "cache_implementation": cache}
        # transformers 5.0 leaves one key of a static cache empty after the chunks.
        may_refuse = contextlib.nullcontext()
        if OLDEST and cache == "static":
            may_refuse = contextlib.suppress(ValueError)
        with may_refuse:
            assert torch.equal(write(model, ids, prefill_chunk_size=4, **options), wanted), cache


@cell(WAVELET)
def test_chunked_prefill(model):
    prefill_in_chunks(model, tokens(2, 14), None)


@cell(WAVELET)
def test_chunked_prefill_left_padding(model):
    prefill_in_chunks(model, *padded("left"))


# ------------------------------------------------------------------ other ways to generate
@cell(WAVELET)
def test_beams(model):
    ids, mask = padded("left", (9, 5, 7))
    options = {"attention_mask": mask, "num_beams": 3}
    wanted = write(model, ids, use_cache=False, **options)
    assert not torch.equal(wanted, write(model, ids, attention_mask=mask))
    for cache in ("dynamic", "static"):
        assert torch.equal(write(model, ids, cache_implementation=cache, **options), wanted)


@cell(WAVELET)
def test_assisted(model):
    """An assistant that is sometimes right, and one that looks in the prompt."""
    ids = tokens(1, 5).repeat(1, 3)
    wanted = write(model, ids, 12, use_cache=False)
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        text = write(model, ids, 12, **options)
        assert torch.equal(text[:, :12] if OLDEST else text, wanted)  # 5.0 may add one more


# ------------------------------------------------------------------ training
@cell(WAVELET, ALIBI)
def test_checkpointing(model):
    ids = tokens(2, 2 * WINDOW)
    wanted = gradients(model.train(), ids)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        for got, gradient in zip(gradients(model, ids), wanted, strict=True):
            assert torch.equal(got, gradient), f"use_reentrant={reentrant}"


# ------------------------------------------------------------------ compilers
def slopes(run, model, *args, **kwargs):
    """Logits, and gradients of a sum of them in which each counts."""
    model.zero_grad()
    output = run(*args, **kwargs).logits
    output.square().sum().backward()
    return output.detach(), kept_gradients(model)


@pytest.mark.usefixtures("fresh_compiler")
@cell(WAVELET, shallow=True)
def test_compile(model):
    """Forward and backward in one graph, at lengths that it was not traced with."""
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for lengths in ((11, 5), (17, 9)):
        ids, mask = padded("left", lengths)
        options = {"attention_mask": mask, "use_cache": False}
        found, got = slopes(compiled, model, ids, **options)
        wanted, exact = slopes(model, model, ids, **options)
        assert close(found[mask.bool()], wanted[mask.bool()], ROUNDING)
        largest = max(gradient.abs().max() for gradient in exact)
        for a, b in zip(got, exact, strict=True):
            assert (a - b).abs().max() <= ROUNDING * largest


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["a cache", "a mask of ones"])
def test_packed_unseen_compiled(way):
    """As test_packed_unseen, where no branch can follow what a tensor holds."""
    model = wavepe.hf.patch(build("mistral", num_hidden_layers=1), WAVELET)
    ids, positions, ends = packed((5, 9, 3))
    options = {"position_ids": positions}
    if way == "a mask of ones":
        options |= {"attention_mask": torch.ones_like(ids), "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert close(logits(compiled, ids, **options), each_alone(model, ids, ends), ROUNDING)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_derivative():
    """The derivative traced too, of a layer with a window and a cap."""
    model, ids = wavepe.hf.patch(build("gemma2", num_hidden_layers=1), WAVELET), tokens(2, 11)
    wanted = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    largest = max(gradient.abs().max() for gradient in wanted)
    for a, b in zip(gradients(compiled, ids), wanted, strict=True):
        assert (a - b).abs().max() <= ROUNDING * largest


@pytest.mark.usefixtures("fresh_compiler")
@cell(WAVELET, shallow=True)
def test_export(model):
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
    options = {"input_ids": tokens(2, 9), "use_cache": False}
    program = torch.export.export(model, (), options, dynamic_shapes=shapes, strict=False).module()
    for length in (2, 9, 20):
        ids = tokens(2, length)
        output = logits(program, input_ids=ids, use_cache=False)
        assert close(output, logits(model, ids, use_cache=False), ROUNDING)
