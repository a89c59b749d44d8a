"""Positions that are not counted: distances come from them, or the pass is refused.

The references hide tokens, or compute each path of a tree alone, so their positions are counted.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from encoding_cases import LEARNED
from hf_families import build, by_turns, stirred
from hf_model import close, logits, patched_tiny, recompute, tokens
from transformers import DynamicCache, StaticCache
from wavepe.hf import counting
from wavepe.hf.call import Call

SPECS = (
    "wavelet:scales=4", "alibi", "sandwich:dim=16", "rope+alibi", "alibi@1", *LEARNED,
    "wavelet:scales=4,biases=true,projection=true", "rope:theta=30+wavelet:scales=4",
    "pope:theta=30", "xpos:theta=30,scale_base=8", "rope+temperature:floor=3,alpha=0.5",
    "relative:extent=6,rank=3",
)  # fmt: skip
GAPS = torch.tensor([[0, 1, 2, 7, 8, 9, 10, 14]])
IDS = tokens(1, 8)
ONES = torch.ones(1, 8, dtype=torch.long)
# Two branches after four tokens.
TREE = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]])
BRANCH = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
VISIBLE = (BRANCH[None] == BRANCH[:, None]) | (BRANCH[None] == 0)
VISIBLE = VISIBLE & torch.ones(8, 8, dtype=torch.bool).tril()
PATHS = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7])


def with_hidden(model, ids, positions):
    """Return the logits of tokens at these positions of a longer row, whose others are hidden."""
    row = positions[0]
    whole, mask = torch.zeros(2, 1, int(row[-1]) + 1, dtype=torch.long)
    whole[0, row], mask[0, row] = ids[0], 1
    given = {"attention_mask": mask, "position_ids": torch.arange(whole.shape[1])[None]}
    return logits(model, whole, **given, use_cache=False)[:, row]


def by_path(model, ids):
    first, second = (logits(model, ids[:, path]) for path in PATHS)
    return torch.cat([first, second[:, 4:]], 1)


@pytest.mark.parametrize("spec", SPECS)
def test_gaps(spec):
    model = patched_tiny(spec)
    wanted = with_hidden(model, IDS, GAPS)
    got = logits(model, IDS, position_ids=GAPS, attention_mask=ONES, use_cache=False)
    assert close(got, wanted, 1e-5)
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 2), (2, 5), (5, 6), (6, 7), (7, 8)):
        part = IDS[:, start:stop], GAPS[:, start:stop]
        pieces.append(logits(model, part[0], position_ids=part[1], past_key_values=cache))
    assert close(torch.cat(pieces, 1), wanted, 1e-5)


@pytest.mark.parametrize("spec", ["wavelet:scales=4,biases=true", "rope+alibi", "kerple"])
def test_gradients_over_gaps(spec):
    """A training by PoSE, with checkpoints too."""
    found = []
    for checkpoints in (False, True):
        model = patched_tiny(spec).train()
        if checkpoints:
            recompute(model)
        given = {"position_ids": GAPS, "attention_mask": ONES}
        model(IDS, **given, use_cache=False).logits.square().sum().backward()
        found.append([weight.grad for weight in model.parameters()])
    row = GAPS[0]
    whole, mask = torch.zeros(2, 1, int(row[-1]) + 1, dtype=torch.long)
    whole[0, row], mask[0, row] = IDS[0], 1
    model = patched_tiny(spec).train()
    model(whole, attention_mask=mask, use_cache=False).logits[:, row].square().sum().backward()
    for one, two, weight in zip(*found, model.parameters(), strict=True):
        assert torch.equal(one, two)
        if weight.shape[0] != model.config.vocab_size:  # a hidden token has an embedding, too
            assert close(one, weight.grad, 1e-4)


@pytest.mark.parametrize("spec", ["fox", "rope:self_extend=2,neighbors=3"])
def test_what_counts_the_tokens_between_takes_no_tree(spec):
    """They would be those too that a mask hides."""
    model = patched_tiny(spec)
    for given in ({"position_ids": TREE}, {}):
        with pytest.raises(ValueError, match=r"(fox|neighbors=3) counts the tokens between"):
            logits(model, IDS, attention_mask=VISIBLE[None, None], **given, use_cache=False)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", ["bool", "float"])
def test_trees(spec, form):
    model = patched_tiny(spec)
    mask = VISIBLE[None, None]
    if form == "float":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    wanted = by_path(model, IDS)
    given = {"position_ids": TREE, "attention_mask": mask}
    assert close(logits(model, IDS, **given, use_cache=False), wanted, 1e-5)
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :4], past_key_values=cache)
    got = logits(
        model,
        IDS[:, 4:],
        position_ids=TREE[:, 4:],
        attention_mask=mask[:, :, 4:],
        past_key_values=cache,
    )
    assert close(got, wanted[:, 4:], 1e-5)


@by_turns()
def test_families(family):
    model = stirred(wavepe.hf.patch(build(family), "alibi"))
    got = logits(model, IDS, position_ids=TREE, attention_mask=VISIBLE[None, None], use_cache=False)
    assert close(got, by_path(model, IDS), 1e-5)


def taken(cache, keep):
    """Leave these keys in a cache, as programs that prune do."""
    if hasattr(cache, "layers"):
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]


@pytest.mark.parametrize("spec", ["alibi", "rope+wavelet:scales=4"])
def test_caches_that_lost_keys(spec):
    model, ids = patched_tiny(spec), tokens(1, 9)
    last = ids[:, 8:]

    def filled():
        cache = DynamicCache(config=model.config)
        logits(model, ids[:, :4], past_key_values=cache)
        given = {"position_ids": TREE[:, 4:], "attention_mask": VISIBLE[None, None, 4:]}
        logits(model, ids[:, 4:8], **given, past_key_values=cache)
        return cache

    def step(cache, position):
        return logits(model, last, position_ids=torch.tensor([[position]]), past_key_values=cache)

    wanted = [logits(model, torch.cat([ids[:, path], last], 1))[:, -1:] for path in PATHS]
    for path, value in zip(PATHS, wanted, strict=True):  # the tree's usual end
        cache = filled()
        taken(cache, path)
        assert close(step(cache, 6), value, 1e-5)
    cache = filled()
    taken(cache, [0, 1, 2, 3, 4])  # a crop: the keys that are left are the first ones
    assert close(step(cache, 5), logits(model, torch.cat([ids[:, :5], last], 1))[:, -1:], 1e-5)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :8], past_key_values=cache)
    taken(cache, [0, 3, 4, 7])
    with pytest.raises(ValueError, match=r"holds 4 of 8 keys.*position is 8.*at position 4"):
        step(cache, 8)


@pytest.mark.parametrize("spec", ["alibi", "rope+wavelet:scales=4", "kerple"])
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_padding_between_tokens(spec, kind):
    """Prompts with padding on the right, which are then continued."""
    model, ids = patched_tiny(spec), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 4:6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=12)
    pieces = []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        pieces.append(logits(model, ids[:, start:stop], **given, past_key_values=cache))
    got, seen = torch.cat(pieces, 1), mask[0].bool()
    assert close(got[:1, seen], logits(model, ids[:1, seen]), 1e-5)
    assert close(got[1:], logits(model, ids[1:]), 1e-5)


def test_counted_positions_need_no_tensor_of_queries_and_keys(monkeypatch):
    model, ids = patched_tiny("alibi"), tokens(2, 12)
    monkeypatch.setattr(counting, "by_positions", None)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    for positions, given in (
        (None, {"attention_mask": mask}),
        ((mask.cumsum(1) - 1).clamp(min=0), {"attention_mask": mask}),
        (mask.cumsum(1) - 1, {"attention_mask": mask}),
        ((mask.cumsum(1) - 1).masked_fill(mask == 0, 1), {"attention_mask": mask}),
        (torch.arange(12)[None] + 100, {}),
        (torch.cat([torch.arange(5), torch.arange(7)])[None], {"use_cache": False}),
        (torch.tensor([[0, 1, 2, 3, 0, 0, 0, 1, 2, 0, 1, 2]]), {"use_cache": False}),
    ):
        model(ids, position_ids=positions, **given)
        if given.get("use_cache") is False:
            continue
        cache = DynamicCache(config=model.config)
        for start, stop in ((0, 7), (7, 8), (8, 12)):
            part = {} if positions is None else {"position_ids": positions[:, start:stop]}
            if "attention_mask" in given:
                part["attention_mask"] = mask[:, :stop]
            model(ids[:, start:stop], **part, past_key_values=cache)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    made = model(ids, position_ids=positions, attention_mask=mask).past_key_values
    more = torch.cat([mask, mask[:, -2:]], 1)
    given = {"position_ids": positions[:, -1:] + torch.arange(1, 3), "attention_mask": more}
    model(ids[:, :2], **given, past_key_values=made)
    one = torch.ones(2, 1, dtype=torch.long)
    model(ids[:, :1], position_ids=one * 0, attention_mask=one)
    cache = DynamicCache(config=model.config)
    model(ids[:, :9], past_key_values=cache)
    cache.crop(-5)
    model(ids[:, 4:6], position_ids=torch.tensor([[4, 5]]), past_key_values=cache)
    for options in ({"num_beams": 3}, {"cache_implementation": "static"}):
        ids[0, :5] = ids[1, 3] = 0  # the padding token, whose keys are zeros
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)


def test_rotations_and_stock_layers_stay_as_they_are():
    model = patched_tiny("rope:theta=30")
    assert close(
        logits(model, IDS, position_ids=GAPS, attention_mask=ONES),
        with_hidden(model, IDS, GAPS),
        1e-5,
    )
    assert model.base_model._wavepe.spec == "rope:theta=30"
    assert wavepe.hf.encoding_of(model) == "rope:theta=30"


@pytest.mark.parametrize("spec", ["alibi", "rope+wavelet:scales=4"])
@pytest.mark.parametrize("padding", [0, 2])
def test_rows_of_a_cache_are_repeated_and_chosen(spec, padding):
    """As beams and several continuations of one prompt do it."""
    model, ids = patched_tiny(spec), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[:, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    given = {"attention_mask": mask[:, :6], "position_ids": positions[:, :6]}
    logits(model, ids[:, :6], **given, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    rows = [0, 0, 1, 1]
    given = {"attention_mask": mask[rows], "position_ids": positions[rows, 6:]}
    got = logits(model, ids[rows, 6:], **given, past_key_values=cache)
    wanted = logits(model, ids[:, padding:])[rows, -1:]
    assert close(got, wanted, 1e-5)
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([3]))
    given = {"attention_mask": mask[1:], "position_ids": positions[1:, 6:]}
    got = logits(model, ids[1:, 6:], **given, past_key_values=cache)
    assert close(got, wanted[3:], 1e-5)


@pytest.mark.parametrize("spec", ["alibi", "wavelet:scales=4"])
@pytest.mark.parametrize("pads", [-1, 1])
@pytest.mark.parametrize("how", ["turned", "turned and cropped", "made anew", "noted late"])
def test_padded_rows_need_no_note(spec, pads, how):
    """Rows of a cache in another order, a cache of others' tensors, steps of a compiler."""
    model, ids = patched_tiny(spec), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, pads)
    cache = DynamicCache(config=model.config)
    part = {"attention_mask": mask[:, :5], "position_ids": positions[:, :5]}
    logits(model, ids[:, :5], **part, past_key_values=cache)
    rows = torch.tensor([1, 0] if how.startswith("turned") else [0, 1])
    if how.startswith("turned"):
        cache.reorder_cache(rows)
    if how == "turned and cropped":
        cache.crop(-1)
    if how == "made anew":
        del cache._wavepe_positions
    if how == "noted late":
        note = cache._wavepe_positions
        part = {"attention_mask": mask[:, :6], "position_ids": positions[:, 5:6]}
        logits(model, ids[:, 5:6], **part, past_key_values=cache)
        cache._wavepe_positions = note
    start = {"turned and cropped": 4, "noted late": 6}.get(how, 5)
    part = {"attention_mask": mask[rows], "position_ids": positions[rows, start:]}
    got = logits(model, ids[rows, start:], **part, past_key_values=cache)
    given = {"attention_mask": mask[rows], "position_ids": positions[rows]}
    assert close(got, logits(model, ids[rows], **given, use_cache=False)[:, start:], 1e-5)


@pytest.mark.parametrize("length", [4, 6])
def test_a_piece_of_padding_alone(length):
    """As a prompt in chunks has it; later chunks may come without a mask (windows)."""
    model, ids = patched_tiny("alibi"), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    cache = DynamicCache(config=model.config)
    for start, stop in ((0, 4), (4, length), (length, 9)):
        if start == stop:
            continue
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits(model, ids[:, start:stop], **given, past_key_values=cache)
    assert cache._wavepe_positions.known.keys is None
    call = Call(model.model, (), (), {"input_ids": ids[:, :2], "past_key_values": cache})
    call.kwargs["position_ids"] = positions[:, -1:] + torch.arange(1, 3)
    assert counting._look(call, ids[:, :2]).keys is None


@pytest.mark.parametrize("spec", ["alibi", "wavelet:scales=4"])
def test_an_exported_program_refuses_gaps(spec):
    """It counts tokens, so it raises where its input position_ids do not."""
    model, ids = patched_tiny(spec), tokens(2, 9)
    positions = torch.arange(9).repeat(2, 1)
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    length = {1: torch.export.Dim("length", min=2)}
    shapes = {"input_ids": length, "position_ids": length, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    packed = positions - 5 * (positions >= 5)
    for good in (positions, packed, positions + 3):
        got = program(**given | {"position_ids": good}).logits.detach()
        assert close(got, logits(model, ids, position_ids=good, use_cache=False), 1e-5)
    with pytest.raises(RuntimeError, match="positions must rise by 1 per token"):
        program(**given | {"position_ids": positions + 3 * (positions >= 5)})
