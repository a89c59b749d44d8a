"""--pos-enc in fairseq's decoder: values, padding, incremental decoding and gradients, against
attention written out in float64."""

import copy
import pickle

import pytest
import wavepe
from encoding_cases import ENCODINGS, FOLLOW_LENGTH, SCALED
from fairseq_cases import DIM, LENGTH, MARKS, features, model, reference, tokens, torch, usually

pytestmark = MARKS

PADDING = 1  # in every dictionary of fairseq's
LEARNED = "wavelet:scales=4,learned=true"


def assert_close(got, wanted, bound, where=...):
    error = (got.double() - wanted.double()).abs()[where]
    assert error.max() <= bound * wanted.abs().max(), error.max()


def bound(spec, dtype=torch.float64):
    """The bound over the largest output: two layers of sums of a hundred rounded terms, a position
    far larger than an embedding ("integer"); 2^-24 where float32 tables meet float64 ones."""
    if dtype == torch.float32:
        return 1e-4 if spec == "integer" else 1e-5
    encoding = wavepe.encoding(spec)
    float32 = encoding.adds or ("table" in encoding.terms and "table" not in encoding.learns)
    return 1e-6 if float32 else 1e-12


def padded(ids, lengths, side):
    """Rows of these lengths, the rest padding."""
    ids = ids.clone()
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = PADDING
        if side == "left":
            row.copy_(row.roll(len(row) - length))
    return ids


@pytest.mark.parametrize("spec", ENCODINGS)
def test_values(spec):
    made = model(spec)
    judge = reference(made, spec)
    for length in (1, 2, LENGTH, 2 * LENGTH + 3):
        ids = tokens(2, length)
        wanted = features(judge, ids)
        assert_close(features(made, ids), wanted, bound(spec, torch.float32))
        assert_close(features(copy.deepcopy(made).double(), ids), wanted, bound(spec))
    if spec != "none":  # a test of values must see the positions
        without = features(reference(made, spec, "none"), ids)
        assert (wanted - without).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.parametrize("spec", usually(ENCODINGS))
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(spec, side):
    made, lengths = model(spec).double(), (24, 17, 3)
    ids = tokens(3, 24)
    batch = padded(ids, lengths, side)
    real = batch != PADDING
    got = features(made, batch)
    assert got.isfinite().all()
    assert_close(got, features(reference(made, spec), batch), bound(spec), real)
    for row, length in enumerate(lengths):
        alone = features(made, ids[row : row + 1, :length])
        assert_close(got[row][real[row]], alone[0], 1e-12)


@pytest.mark.parametrize("spec", ["sinusoidal", "normalised"])
def test_padding_has_no_position(spec):
    vectors = model(spec).decoder.embed_positions(padded(tokens(2, 6), (6, 4), "left"))
    assert vectors.shape == (2, 6, DIM)
    assert not vectors[1, :2].any()
    assert vectors[1, -1].any()


@pytest.mark.parametrize("spec", [SCALED, "rope:type=dynamic,factor=2"])
def test_padding_adds_nothing_to_the_length(spec):
    """A base that follows the length follows that of the tokens."""
    made, ids = model(spec).double(), tokens(1, 2 * LENGTH)
    padding = ids.new_full((1, LENGTH), 1)
    wanted = features(made, ids)
    assert_close(features(made, torch.cat([padding, ids], 1))[:, LENGTH:], wanted, 1e-12)
    assert_close(features(made, torch.cat([ids, padding], 1))[:, : 2 * LENGTH], wanted, 1e-12)


def steps(made, ids, orders):
    """(step, what incremental decoding gives for it, the tokens so far); `orders` reorders rows
    before a step, as a beam search does."""
    state = {}
    for step in range(1, ids.shape[1] + 1):
        if step in orders:
            order = torch.tensor(orders[step])
            made.decoder.reorder_incremental_state_scripting(state, order)
            ids = ids[order]
        so_far = ids[:, :step]
        yield features(made, so_far, incremental_state=state)[:, 0], so_far


def assert_steps_are_the_full_pass(made, length):
    """With padding before and after a sentence, and rows taken from other rows."""
    ids = tokens(3, length)
    ids[0, :5] = PADDING
    ids[2, 30:] = PADDING  # a sentence that has ended
    orders = {10: [1, 1, 0], 20: [2, 0, 1], 34: [1, 2, 2]}
    for got, so_far in steps(made, ids, orders):
        real = so_far[:, -1] != PADDING
        assert_close(got, features(made, so_far)[:, -1], 1e-12, real)


@pytest.mark.parametrize("spec", usually(x for x in ENCODINGS if x not in (*FOLLOW_LENGTH, SCALED)))
def test_incremental_decoding_is_the_full_pass(spec):
    assert_steps_are_the_full_pass(model(spec).double(), LENGTH + 8)


def test_incremental_decoding_with_a_theta_that_follows_the_length():
    """As far as the theta stays; beyond, the cache is of another one, in every layer."""
    made, ids = model(SCALED).double(), tokens(1, LENGTH + 1)
    assert_steps_are_the_full_pass(made, LENGTH)
    rest = steps(made, ids, {})
    for _ in range(LENGTH):
        next(rest)
    with pytest.raises(RuntimeError, match="cached keys were rotated for"):
        next(rest)


@pytest.mark.parametrize("spec", FOLLOW_LENGTH)
def test_what_follows_the_length_is_not_decoded_incrementally(spec):
    rest = steps(model(spec), tokens(), {})
    next(rest)
    with pytest.raises(ValueError, match="depends on the sequence length"):
        next(rest)


@pytest.mark.parametrize(
    "spec", ["wavelet:scales=4", LEARNED, "rope:theta=100", "alibi", "none", "sinusoidal"]
)
def test_checkpointed_activations(spec):
    """Gradients of what all layers share as well, and the same dropout."""
    ids, results = tokens(), []
    for options in ({}, {"checkpoint_activations": True}):
        made = model(spec, dropout=0.1, attention_dropout=0.3, **options).train()
        wrapped = {hasattr(layer, "precheckpoint_forward") for layer in made.decoder.layers}
        assert wrapped == {bool(options)}
        torch.manual_seed(5)
        out = made(ids)[0]
        out.square().sum().backward()
        results.append((out, {name: x.grad for name, x in made.named_parameters()}))
    (out, gradients), (again, recomputed) = results
    assert torch.equal(out, again)
    assert gradients.keys() == recomputed.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, recomputed[name]), name


# In training rope does not take the theta of inference.
@pytest.mark.parametrize("spec", usually(x for x in ENCODINGS if "inference_theta=300" not in x))
def test_gradients(spec):
    """All parameters have them, those that an encoding learns included."""
    made, ids = model(spec), tokens()
    judge = reference(made, spec)
    made = made.double()
    for each in (made, judge):
        features_of = each.train().decoder(ids, features_only=True)[0]
        (features_of * torch.linspace(-1, 1, DIM)).square().sum().backward()
    wanted = {name: x.grad for name, x in judge.named_parameters()}
    largest = max(x.abs().max() for x in wanted.values() if x is not None)
    for name, x in made.named_parameters():
        if name != "decoder.output_projection.weight":  # which features do not reach
            learned = name.replace("decoder.position_encoding.attention.", "learned.")
            assert (x.grad - wanted[learned]).abs().max() <= 10 * bound(spec) * largest, name


def test_training_does_not_scale_theta():
    made, ids = model(SCALED).double(), tokens(1, 2 * LENGTH)
    short = features(made, ids[:, :LENGTH])[:, : LENGTH // 2]
    assert (features(made, ids)[:, : LENGTH // 2] - short).abs().max() > 1e-3
    assert_close(features(made.train(), ids)[:, : LENGTH // 2], short, 1e-12)


def test_dropout_of_weights():
    attention = model("alibi", attention_dropout=0.5).decoder.layers[0].self_attn
    x = torch.randn(16, 2, DIM, generator=torch.Generator().manual_seed(0))

    def out():
        with torch.no_grad():
            return attention(x, x, x, attn_mask=torch.empty(0), need_weights=False)[0]

    steady = out()
    assert torch.equal(out(), steady)
    attention.train()
    torch.manual_seed(0)
    drawn = torch.stack([out() for _ in range(500)])
    spread = drawn.std(0)
    assert spread[1:].min() > 0
    # 1024 means of 500 draws each: beyond 6 standard errors by chance once in a million
    assert ((drawn.mean(0) - steady).abs() <= 6 * spread / 500**0.5).all()
    attention.eval()
    attention.dropout_module.apply_during_inference = True  # --retain-dropout
    assert not torch.equal(out(), steady)


def test_dropout_during_inference_is_found_by_fairseqs_names():
    made = model("alibi", dropout=0.1, attention_dropout=0.1)
    names = ["MultiheadAttention", "TransformerDecoderLayerBase"]
    made.make_generation_fast_(retain_dropout=True, retain_dropout_modules=names)
    layer = made.decoder.layers[0]
    assert layer.self_attn.dropout_module.apply_during_inference
    assert layer.dropout_module.apply_during_inference
    assert not made.decoder.dropout_module.apply_during_inference


def test_copies_share_nothing():
    made, ids = model(LEARNED), tokens()
    wanted = features(made, ids)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(features(other, ids), wanted)
        for layer in other.decoder.layers:
            assert layer.self_attn.positions == (other.decoder.position_encoding,)
        with torch.no_grad():
            for x in other.decoder.position_encoding.parameters():
                x.add_(1)
        assert torch.equal(features(made, ids), wanted)
        assert not torch.equal(features(other, ids), wanted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"need_weights": True}, "cannot return"),
        ({"need_head_weights": True}, "cannot return"),
        ({"before_softmax": True}, "cannot return"),
        ({"key": torch.zeros(4, 1, DIM)}, "keys or values of another sequence"),
        ({"static_kv": True}, "keys or values of another sequence"),
        ({"attn_mask": None}, "got no mask"),
        ({"attn_mask": torch.zeros(4, 4)}, r"got a mask \(4, 4\)"),
        ({"incremental_state": {}}, "causal mask"),
    ],
)
def test_attention_refuses_what_it_does_not_do(changed, message):
    attention = model("alibi").decoder.layers[0].self_attn
    x = torch.zeros(4, 1, DIM)
    call = {
        "query": x, "key": x, "value": x, "attn_mask": torch.empty(0), "need_weights": False,
    }  # fmt: skip
    attention(**call)
    with pytest.raises(NotImplementedError, match=message):
        attention(**call | changed)


def test_attention_to_later_tokens_is_refused():
    with pytest.raises(NotImplementedError, match="got no mask"):
        features(model("rope"), tokens(), full_context_alignment=True)
