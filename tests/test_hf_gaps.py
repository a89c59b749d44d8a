"""Positions with gaps, trees, and caches that lost keys: right, or refused.

Encodings that only rotate or add vectors take positions as they are. A term of the distance counts
tokens, so it refuses positions that do not.
"""

import pytest
import torch
import wavepe
from encoding_cases import LEARNED
from hf_families import FAMILIES, build, by_turns
from hf_model import close, logits, patched_tiny, tokens
from transformers import DynamicCache, StaticCache
from wavepe.hf.sequences import SHIFTS

COUNTING = (
    "wavelet:scales=4", "alibi", "sandwich:dim=16", "rope+alibi", "alibi@1", *LEARNED,
    "wavelet:scales=4,biases=true,projection=true", "rope:theta=30+wavelet:scales=4",
    "pope:theta=30", "xpos:theta=30,scale_base=8", "relative:extent=6,rank=3", "kerple", "fox",
    "t5:buckets=6,max_distance=9", "shaw:clip=3", "transformer_xl", "window:size=4+rope",
    "rope:self_extend=2,neighbors=3", {"1": "alibi"},
)  # fmt: skip
FREE = (
    "rope:theta=30", "none", "sinusoidal", "rope+temperature:floor=3,alpha=0.5", "rope+sink",
)  # fmt: skip
GAPS = torch.tensor([[0, 1, 2, 7, 8, 9, 10, 14]])
IDS = tokens(1, 8)
ONES = torch.ones(1, 8, dtype=torch.long)
# Two branches after four tokens.
TREE = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]])
BRANCH = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
VISIBLE = (BRANCH[None] == BRANCH[:, None]) | (BRANCH[None] == 0)
VISIBLE = (VISIBLE & torch.ones(8, 8, dtype=torch.bool).tril())[None, None]
PATHS = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7])
REFUSED = r"measures distances in tokens, so positions must rise by 1 per token; row 0 of.* has "
UNKNOWN = r"position {} of row 0 does not follow the {} cached keys, .*continue at position {}: "


def names(specs):
    return pytest.mark.parametrize("spec", [pytest.param(spec, id=str(spec)) for spec in specs])


def with_hidden(model, ids, positions):
    """Return the logits of tokens at these positions of a longer row, whose others are hidden."""
    row = positions[0]
    whole, mask = torch.zeros(2, 1, int(row[-1]) + 1, dtype=torch.long)
    whole[0, row], mask[0, row] = ids[0], 1
    args = {"attention_mask": mask, "position_ids": torch.arange(whole.shape[1])[None]}
    return logits(model, whole, **args, use_cache=False)[:, row]


def by_path(model, ids):
    first, second = (logits(model, ids[:, path]) for path in PATHS)
    return torch.cat([first, second[:, 4:]], 1)


def filled(model, ids, **args):
    cache = DynamicCache(config=model.config)
    logits(model, ids, past_key_values=cache, **args)
    return cache


@names(COUNTING)
def test_terms_of_the_distance_refuse_gaps_and_trees(spec):
    model = patched_tiny(spec)
    for mask in (None, ONES):
        with pytest.raises(ValueError, match=REFUSED + "7 after 2: give position_ids without"):
            logits(model, IDS, position_ids=GAPS, attention_mask=mask, use_cache=False)
    for form in (VISIBLE, torch.where(VISIBLE, 0.0, -torch.inf)):
        with pytest.raises(ValueError, match=REFUSED + "4 after 5"):
            logits(model, IDS, position_ids=TREE, attention_mask=form, use_cache=False)
    cache = filled(model, IDS[:, :4])
    for count in (1, 2):
        position = torch.arange(9, 9 + count)[None]
        with pytest.raises(ValueError, match=UNKNOWN.format(9, 4, 4)):
            logits(model, IDS[:, :count], position_ids=position, past_key_values=cache)
    assert cache.get_seq_length() == 4


@names(FREE)
def test_other_encodings_take_positions_as_they_are(spec):
    model = patched_tiny(spec)
    wanted = with_hidden(model, IDS, GAPS)
    got = logits(model, IDS, position_ids=GAPS, attention_mask=ONES, use_cache=False)
    assert close(got, wanted, 1e-5)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 2), (2, 5), (5, 6), (6, 7), (7, 8)):
        part = IDS[:, start:stop], GAPS[:, start:stop]
        pieces.append(logits(model, part[0], position_ids=part[1], past_key_values=cache))
    assert close(torch.cat(pieces, 1), wanted, 1e-5)
    tree = logits(model, IDS, position_ids=TREE, attention_mask=VISIBLE, use_cache=False)
    assert close(tree, by_path(model, IDS), 1e-5)


@by_turns()
def test_families(family):
    args = {"position_ids": TREE, "attention_mask": VISIBLE, "use_cache": False}
    assert logits(wavepe.hf.patch(build(family), "rope"), IDS, **args).isfinite().all()
    with pytest.raises(ValueError, match=REFUSED):
        logits(wavepe.hf.patch(build(family), "alibi"), IDS, **args)


def taken(layers, keep):
    """Leave these keys in layers of a cache, as programs that prune do."""
    for layer in layers:
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]


def copied(cache, count):
    """A cache that is built by hand, from the last keys of another one."""
    made = DynamicCache()
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys[:, :, -count:], layer.values[:, :, -count:], index)
    return made


@names((*(spec for spec in COUNTING if "@" not in spec and "self_extend" not in spec), "fox+t5"))
def test_caches_that_lost_keys(spec):
    model, ids = patched_tiny(spec), tokens(1, 10)
    whole = logits(model, ids)

    def step(cache, start, stop=9):
        args = {"position_ids": torch.arange(start, stop)[None], "past_key_values": cache}
        return logits(model, ids[:, start:stop], **args)

    cache = filled(model, ids[:, :8])
    taken(cache.layers, [0, 1, 2, 3, 4])  # a crop: the keys that are left are the first ones
    assert close(step(cache, 5), whole[:, 5:9], 1e-5)
    for stop in (9, 10):  # one token, and two
        cache = filled(model, ids[:, :8])
        taken(cache.layers, [0, 3, 4, 7])
        with pytest.raises(ValueError, match=UNKNOWN.format(8, 4, 4)):
            step(cache, 8, stop)
        with pytest.raises(ValueError, match=UNKNOWN.format(8, 6, 6)):
            step(copied(filled(model, ids[:, :8]), 6), 8, stop)
        cache = filled(model, ids[:, :8])
        taken(cache.layers[1:], [0, 3, 4, 7])  # as where each layer keeps another number
        with pytest.raises(ValueError, match="layer 1 has 4 keys of the 8 cached tokens"):
            step(cache, 8, stop)
    assert close(step(copied(filled(model, ids[:, :8]), 8), 8), whole[:, 8:9], 1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("length", [5, 9])
def test_caches_with_windows_that_lost_keys(family, length):
    model, ids = wavepe.hf.patch(build(family), "rope+wavelet:scales=4"), tokens(1, 11)
    for config in (model.config, None):  # without it, the cache keeps what no window shows
        cache, pieces = DynamicCache(config=config), []
        for part in ids.split([length, 1, 10 - length], 1):
            pieces.append(logits(model, part, past_key_values=cache))
        assert close(torch.cat(pieces, 1), logits(model, ids), 1e-5)
    cache = filled(model, ids[:, :length])
    taken(cache.layers[:1], [0, 1, 3])
    with pytest.raises(ValueError, match=f"layer 0 has 3 keys of the {length} cached tokens"):
        logits(model, ids[:, length:], past_key_values=cache)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_of_families_count_tokens(family):
    """So a gap does not equal hidden tokens there, in the stock model either."""
    stock, model = build(family), wavepe.hf.patch(build(family), "rope")
    options = {"position_ids": GAPS, "attention_mask": ONES, "use_cache": False}
    got, hidden = logits(model, IDS, **options), with_hidden(model, IDS, GAPS)
    assert close(got, logits(stock, IDS, **options), 1e-5)
    assert close(hidden, with_hidden(stock, IDS, GAPS), 1e-5)
    assert not close(got, hidden, 1e-2)


@pytest.mark.parametrize("kinds", [(), ("full_attention", "sliding_attention")])
def test_own_masks_pack_nothing(kinds):
    """Also where the caller gives a mask for each type of layer."""
    model, mask = wavepe.hf.patch(build("gemma3_text"), "alibi"), torch.ones(1, 1, 8, 8).tril()
    mask[:, :, 5:, :5] = 0
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    mask = dict.fromkeys(kinds, mask.bool()) if kinds else mask.bool()
    with pytest.raises(ValueError, match=REFUSED + "0 after 4: .*not one of queries x keys"):
        logits(model, IDS, position_ids=positions, attention_mask=mask, use_cache=False)
    packed = logits(model, IDS, position_ids=positions, use_cache=False)
    assert close(packed[:, 5:], logits(model, IDS[:, 5:]), 1e-5)


def test_a_rotation_takes_any_cache():
    model, ids = patched_tiny("rope:theta=30"), tokens(1, 10)
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[:, :2] = 0
    positions = torch.arange(10)[None]
    wanted = logits(model, ids, attention_mask=mask, position_ids=positions)[:, 8:]
    cache = filled(model, ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8])
    got = logits(model, ids[:, 8:], position_ids=positions[:, 8:], past_key_values=copied(cache, 6))
    assert close(got, wanted, 1e-5)


@names(("alibi", "rope+wavelet:scales=4"))
def test_padding_between_tokens(spec):
    """A prompt that holds the padding token, or padding on the right that is then continued."""
    model, ids = patched_tiny(spec), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 4:6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with pytest.raises(ValueError, match=REFUSED + "4 after 3: .*hides no tokens"):
        logits(model, ids, attention_mask=mask, position_ids=positions)
    cache = filled(model, ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6])
    args = {"attention_mask": mask[:, :7], "position_ids": positions[:, 6:7]}
    with pytest.raises(ValueError, match=UNKNOWN.format(4, 6, 6)):
        logits(model, ids[:, 6:7], **args, past_key_values=cache)


def test_positions_that_count_tokens_are_taken():
    model, ids = patched_tiny("alibi"), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    for positions, args in (
        (None, {"attention_mask": mask}),
        ((mask.cumsum(1) - 1).clamp(min=0), {"attention_mask": mask}),
        (mask.cumsum(1) - 1, {"attention_mask": mask}),
        ((mask.cumsum(1) - 1).masked_fill(mask == 0, 1), {"attention_mask": mask}),
        (torch.arange(12)[None] + 100, {}),
        (torch.cat([torch.arange(5), torch.arange(7)])[None], {"use_cache": False}),
        (torch.tensor([[0, 1, 2, 3, 0, 0, 0, 1, 2, 0, 1, 2]]), {"use_cache": False}),
    ):
        wanted = logits(model, ids, position_ids=positions, **args)
        if args.get("use_cache") is False:
            continue
        cache, pieces = DynamicCache(config=model.config), []
        for start, stop in ((0, 7), (7, 8), (8, 12)):
            part = {} if positions is None else {"position_ids": positions[:, start:stop]}
            if "attention_mask" in args:
                part["attention_mask"] = mask[:, :stop]
            pieces.append(logits(model, ids[:, start:stop], **part, past_key_values=cache))
        assert close(torch.cat(pieces, 1)[mask == 1], wanted[mask == 1], 1e-5)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    made = model(ids, position_ids=positions, attention_mask=mask).past_key_values
    more = torch.cat([mask, mask[:, -2:]], 1)
    args = {"position_ids": positions[:, -1:] + torch.arange(1, 3), "attention_mask": more}
    model(ids[:, :2], **args, past_key_values=made)
    one = torch.ones(2, 1, dtype=torch.long)
    model(ids[:, :1], position_ids=one * 0, attention_mask=one)
    cache = filled(model, ids[:, :9])
    cache.crop(-5)
    model(ids[:, 4:6], position_ids=torch.tensor([[4, 5]]), past_key_values=cache)
    for options in ({"num_beams": 3}, {"cache_implementation": "static"}):
        seen, prompt = mask.clone(), ids.clone()
        prompt[0, :5] = 0  # the padding token
        model.generate(prompt, attention_mask=seen, max_new_tokens=4, do_sample=False, **options)


@names(("alibi", "rope+wavelet:scales=4"))
@pytest.mark.parametrize("padding", [0, 2])
def test_rows_of_a_cache_are_repeated_and_chosen(spec, padding):
    """As beams and several continuations of one prompt do it."""
    model, ids = patched_tiny(spec), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[:, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = filled(model, ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6])
    cache.batch_repeat_interleave(2)
    rows = [0, 0, 1, 1]
    args = {"attention_mask": mask[rows], "position_ids": positions[rows, 6:]}
    got = logits(model, ids[rows, 6:], **args, past_key_values=cache)
    wanted = logits(model, ids[:, padding:])[rows, -1:]
    assert close(got, wanted, 1e-5)
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([3]))
    args = {"attention_mask": mask[1:], "position_ids": positions[1:, 6:]}
    got = logits(model, ids[1:, 6:], **args, past_key_values=cache)
    assert close(got, wanted[3:], 1e-5)


@names(("alibi", "wavelet:scales=4"))
@pytest.mark.parametrize("pads", [-1, 1])
@pytest.mark.parametrize("how", ["turned", "turned and cropped", "made anew"])
def test_padded_rows_need_no_note(spec, pads, how):
    """Rows of a cache in another order, and a cache of others' tensors."""
    model, ids = patched_tiny(spec), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, pads)
    cache = filled(model, ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5])
    assert getattr(cache, SHIFTS) == [-3, 0]
    rows = torch.tensor([1, 0] if how.startswith("turned") else [0, 1])
    if how.startswith("turned"):
        cache.reorder_cache(rows)
    if how == "turned and cropped":
        cache.crop(-1)
    if how == "made anew":
        cache = copied(cache, 5)
    start = 4 if how == "turned and cropped" else 5
    part = {"attention_mask": mask[rows], "position_ids": positions[rows, start:]}
    got = logits(model, ids[rows, start:], **part, past_key_values=cache)
    args = {"attention_mask": mask[rows], "position_ids": positions[rows]}
    assert close(got, logits(model, ids[rows], **args, use_cache=False)[:, start:], 1e-5)
    reset = filled(model, ids[:, :5])
    assert not hasattr(reset, SHIFTS)


@pytest.mark.parametrize(
    ("rows", "name", "advice"),
    [
        ([1, 0], "position_ids", "rows were reordered .* Give the .* attention_mask of all"),
        ([0, 1], "attention_mask", "continue at position 3: .* earlier calls gave position_ids"),
    ],
)
def test_a_refused_cache_says_why(rows, name, advice):
    model, ids = patched_tiny("alibi"), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = filled(model, ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6])
    cache.reorder_cache(torch.tensor(rows))
    options = {"attention_mask": mask[rows], "position_ids": positions[rows, 6:]}
    with pytest.raises(ValueError, match=f"does not follow the 6 cached keys, .*{advice}"):
        logits(model, ids[rows, 6:], past_key_values=cache, **{name: options[name]})
    logits(model, ids[rows, 6:], past_key_values=cache, **options)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("length", [4, 6])
def test_a_piece_of_padding_alone(kind, length):
    """As a prompt in chunks has it; later chunks may come without a mask (windows)."""
    model, ids = patched_tiny("alibi"), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    cache = kind(config=model.config, **({"max_cache_len": 12} if kind is StaticCache else {}))
    for start, stop in ((0, 4), (4, length), (length, 9)):
        if start == stop:
            continue
        args = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits(model, ids[:, start:stop], **args, past_key_values=cache)
    assert getattr(cache, SHIFTS) == [-4, 0]
    args = {"position_ids": positions[:, -1:] + 1, "past_key_values": cache}
    logits(model, ids[:, :1], **args)
    with pytest.raises(ValueError, match="position 7 of row 0 does not follow the 10 cached keys"):
        logits(model, ids[:, :1], **args | {"position_ids": positions[:, -1:] + 3})


def test_an_exported_program_refuses_gaps():
    """It counts tokens, so it raises where its input position_ids do not."""
    model, ids = patched_tiny("alibi+wavelet:scales=4", num_hidden_layers=1), tokens(2, 9)
    positions = torch.arange(9).repeat(2, 1)
    args = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    length = {1: torch.export.Dim("length", min=2)}
    shapes = {"input_ids": length, "position_ids": length, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (), args, dynamic_shapes=shapes).module()
    packed = positions - 5 * (positions >= 5)
    for good in (positions, packed, positions + 3):
        got = program(**args | {"position_ids": good}).logits.detach()
        assert close(got, logits(model, ids, position_ids=good, use_cache=False), 1e-5)
    with pytest.raises(RuntimeError, match="positions must rise by 1 per token"):
        program(**args | {"position_ids": positions + 3 * (positions >= 5)})


def test_windows_of_a_static_cache_drop_the_columns_of_padding():
    """The mask of such a cache has a column for each key that is left, not for each token."""
    model = wavepe.hf.patch(build("mistral"), "wavelet:scales=4")
    ids, mask = tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, :9] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "disable_compile": True,
    }  # fmt: skip
    whole = model.generate(ids, **options, use_cache=False)
    chunked = model.generate(ids, **options, cache_implementation="static", prefill_chunk_size=4)
    assert torch.equal(chunked, whole)


def test_left_padding_in_a_mask_of_pairs_is_refused():
    """Such a mask does not say which tokens are real: one of tokens does."""
    model, mask = patched_tiny("alibi"), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    pairs = torch.ones(8, 8, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    pairs = pairs | torch.eye(8, dtype=torch.bool)
    options = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    with pytest.raises(ValueError, match=r"0 after 0: .*an attention_mask \(batch, tokens\)"):
        logits(model, IDS.expand(2, -1), attention_mask=pairs, **options)
    got = logits(model, IDS.expand(2, -1), attention_mask=mask, **options)
    assert close(got[1:, 3:], logits(model, IDS[:, 3:]), 1e-5)


def test_siblings_in_a_mask_of_pairs_are_no_padding():
    """Nobody sees a leaf of a tree, but the leaf sees others."""
    positions, visible = torch.tensor([[0, 1, 2, 7, 4]]), torch.ones(5, 5, dtype=torch.bool).tril()
    visible[4, 3] = False
    with pytest.raises(ValueError, match="measures distances in tokens"):
        logits(
            patched_tiny("alibi"), IDS[:, :5], attention_mask=visible[None, None],
            position_ids=positions, use_cache=False,
        )  # fmt: skip


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="it needs transformers 5.24")
def test_layers_that_reuse_keys_take_their_decay_with_and_without_a_cache():
    model = wavepe.hf.patch(build("gemma4_text"), "fox")
    assert any(layer.self_attn.is_kv_shared_layer for layer in model.model.layers)
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if "position_encoding" in name:
            weight.data += torch.randn(weight.shape, generator=generator)
    assert close(logits(model, IDS, use_cache=False), logits(model, IDS, use_cache=True), 1e-5)


def test_a_static_cache_without_room_for_the_decay():
    model = patched_tiny("fox")
    cache = StaticCache(config=model.config, max_cache_len=8)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"StaticCache has no room for the decay.*DynamicCache"):
        logits(model, IDS[:, :5], past_key_values=cache)
