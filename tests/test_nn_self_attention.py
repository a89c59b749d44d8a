"""wavepe.nn.SelfAttention: numbers, padding, packed sequences, positions, dropout, gradients."""

import dataclasses

import numpy as np
import oracle_rope
import pytest
from cases import forget_registrations, load_torch

torch, ops = load_torch()

import wavepe
from encoding_cases import LEARNED, YARN
from self_attention_cases import ROTARY, SPECS, assert_exact, exact, made, tokens
from wavepe.nn import SelfAttention

CONTIGUOUS = [spec for spec in SPECS if spec not in ROTARY and spec != "none"]

# --------------------------------------------------------------- numbers


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_the_formula(spec, causal):
    for kv_heads in (4, 2, 1):
        module = made(spec, kv_heads=kv_heads, causal=causal)
        for length in (1, 2, 11):
            x = tokens(length)
            assert_exact(module(x), module, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_every_dtype(spec, dtype):
    module, x = made(spec, dtype), tokens(dtype=dtype)
    assert_exact(module(x), module, x)


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi", YARN])
def test_options(spec):
    x = tokens()
    module = made(spec, window=4, bias=True)
    assert_exact(module(x), module, x, window=4)
    wide = SelfAttention(20, 4, 2, encoding=spec, head_dim=8, dtype=torch.float64)
    assert wide.o_proj.weight.shape == (20, 32)
    x = tokens(dim=20)
    assert_exact(wide(x), wide, x)


def test_a_table_longer_than_the_first():
    """Lengths on both sides of a capacity; a later token changes nothing before it."""
    for spec in ("wavelet:scales=4", "wavelet:scales=4,learned=true", "alibi", "none"):
        module = made(spec)
        x = tokens(140, batch=1)
        whole = module(x)
        for length in (127, 128, 129):
            assert (module(x[:, :length]) - whole[:, :length]).abs().max() < 1e-6
        both = made(spec, causal=False)
        assert_exact(both(x[:, :129]), both, x[:, :129])


def test_nothing_to_attend_to():
    module = made("wavelet:scales=4", bias=True)
    assert module(tokens(0)).shape == (2, 0, 32)
    assert module(tokens(3, batch=0)).shape == (0, 3, 32)
    for rows in (0, 1):
        positions, mask = torch.arange(3).expand(rows, 3), torch.ones(1, 3, dtype=torch.bool)
        for key_mask in (None, mask):
            got = module(tokens(3, batch=0), positions=positions, key_mask=key_mask)
            assert got.shape == (0, 3, 32)
    x = tokens(3)
    hidden = module(x, key_mask=torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(hidden, module.o_proj.bias.expand(2, 3, 32))


# --------------------------------------------------------------- padding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_on_either_side(spec, causal):
    module = made(spec, causal=causal)
    x = tokens()
    for seen in (range(3, 11), range(7)):
        mask = torch.ones(2, 11, dtype=torch.bool)
        mask[0] = False
        mask[0, seen] = True
        got = module(x, key_mask=mask)
        assert_exact(got, module, x, key_mask=mask.tolist())
        alone = module(x[:1, seen])
        assert (got[:1, seen] - alone).abs().max() < 1e-6
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)  # as Hugging Face counts
        assert (module(x, key_mask=mask, positions=places) - got)[mask].abs().max() < 1e-6


def test_a_mask_for_all_rows():
    module, x = made("alibi"), tokens()
    mask = torch.arange(11)[None] > 2
    assert torch.equal(module(x, key_mask=mask), module(x, key_mask=mask.expand(2, -1)))


# --------------------------------------------------------------- packed sequences and positions


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_packed_sequences(spec, causal):
    module, x = made(spec, causal=causal), tokens()
    segments = torch.tensor([[3] * 4 + [1] * 5 + [2] * 2, [0] * 11])
    again = torch.tensor([[*range(4), *range(5), *range(2)], [*range(11)]])
    parts = [module(part) for part in x[:1].split([4, 5, 2], dim=1)]
    wanted = torch.cat([torch.cat(parts, 1), module(x[1:])])
    for positions in (None, again):
        got = module(x, segments=segments, positions=positions)
        assert (got - wanted).abs().max() < 1e-6
        assert_exact(got, module, x, segments=segments.tolist())
    one = module(x, segments=segments[0])
    assert (one[:1] - wanted[:1]).abs().max() < 1e-6
    if spec == "none":
        return
    with pytest.raises(RuntimeError, match=r"positions .*pass segments="):
        module(x, positions=again)


@pytest.mark.parametrize("spec", SPECS)
def test_a_shift_of_positions_is_no_matter(spec):
    module, x = made(spec), tokens()
    wanted = module(x)
    for positions in (torch.arange(11) + 50, torch.stack([torch.arange(11), torch.arange(11) + 7])):
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert (module(x, positions=positions.to(dtype)) - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("spec", CONTIGUOUS)
def test_distances_that_are_no_number_of_tokens_are_refused(spec):
    module, x = made(spec), tokens()
    for positions in ([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11], [*range(5), 4, 5, 6, 7, 8, 9]):
        with pytest.raises(RuntimeError, match="must go up by 1"):
            module(x, positions=torch.tensor(positions))
        with pytest.raises(RuntimeError, match="must go up by 1"):
            module(x, positions=torch.tensor([list(range(11)), positions]))


@pytest.mark.parametrize("spec", ROTARY)
def test_rotary_takes_gaps(spec):
    module, x = made(spec), tokens()
    positions = torch.tensor([0, 1, 2, 3, 7, 8, 9, 100, 101, 102, 5000])
    assert_exact(module(x, positions=positions), module, x, positions=positions.numpy())
    rows = torch.stack([positions, torch.arange(11)])
    assert_exact(module(x, positions=rows), module, x, positions=rows.numpy())
    for i in (4, 10):
        positions[i] = positions[i - 1]
        with pytest.raises(RuntimeError, match="must rise"):
            module(x, positions=positions)


def test_the_order_of_hidden_tokens_is_no_matter():
    x = tokens(6)
    mask = torch.tensor([[0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    for spec in SPECS:
        module = made(spec)
        wanted = module(x, key_mask=mask)
        for first in ([9, 9, 2, 2, 4, 5], [-1, 7, 7, 7, 9, 10]):
            positions = torch.tensor([first, [*range(6)]])
            got = module(x, key_mask=mask, positions=positions)
            assert (got - wanted)[mask].abs().max() < 1e-6
        bad = torch.tensor([[0, 0, 2, 3, 2, 5], [*range(6)]])
        if spec != "none":
            with pytest.raises(RuntimeError, match="positions of a row"):
                module(x, key_mask=mask, positions=bad)
    # A hole that positions leave out: the distance in tokens is another one.
    holes = torch.tensor([[0, 0, 0, 0, 1, 2], [*range(6)]])
    with pytest.raises(RuntimeError, match="must go up by 1"):
        made("alibi")(x, key_mask=mask, positions=holes)
    module = made("rope")
    got = module(x, key_mask=mask, positions=holes)
    assert_exact(got, module, x, where=mask, key_mask=mask.tolist(), positions=holes.numpy())


# --------------------------------------------------------------- rotary types that move


def test_a_base_for_evaluation():
    module, x = made("rope:theta=50,inference_theta=10000"), tokens()
    plain = made("rope")
    assert torch.equal(module(x), plain(x))
    trained = made("rope:theta=50")
    assert torch.equal(module.train()(x), trained(x))
    assert not torch.equal(module(x), plain(x))


FOLLOWING = {  # spec -> the oracle's frequencies of a length, trained with 16 tokens
    "rope:type=dynamic,factor=4": lambda length: oracle_rope.dynamic(8, 1e4, 4, length, 16),
    "rope:theta=128,inference_theta=scaled": lambda length: oracle_rope.default(
        8, 128 * max(1, length / 16)
    ),
}


@pytest.mark.parametrize("spec", FOLLOWING)
def test_types_that_follow_the_length(spec):
    module = made(spec, max_length=16)
    for length in (11, 40):
        x, rotation = tokens(length), (*FOLLOWING[spec](length), False)
        parts = {"rotation": rotation}
        for positions in (None, torch.arange(length)):
            assert_exact(module(x, positions=positions), module, x, parts=parts)
    with pytest.raises(ValueError, match="SelfAttention calls it max_length"):
        SelfAttention(32, 4, encoding=spec)


# --------------------------------------------------------------- dropout and gradients


def test_dropout_in_training_only():
    module, x = made("wavelet:scales=4", dropout=0.5), tokens()
    plain = made("wavelet:scales=4")(x)
    assert torch.equal(module(x), plain)
    module.train()
    torch.manual_seed(3)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    with torch.no_grad():
        mean = sum(module(x) for _ in range(400)) / 400
    assert (mean - plain).abs().mean() < 0.1 * plain.abs().mean()
    assert not made("none", dropout=1.0).train()(x).any()


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi", "rope", *LEARNED])
def test_gradients(spec):
    module, x = made(spec, heads=2, kv_heads=1), tokens(4, dim=16, batch=1)
    names = [name for name, _ in module.named_parameters()]
    values = [value.detach().clone().requires_grad_() for _, value in module.named_parameters()]

    def function(x, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(module, given, (x,))

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), *values), fast_mode=True)


@pytest.mark.parametrize("spec", LEARNED)
def test_what_is_learned_gets_a_gradient(spec):
    module = made(spec).train()
    module(tokens()).sum().backward()
    for name, value in module.position_encoding.named_parameters():
        assert value.grad.abs().max() > 0, name


# --------------------------------------------------------------- encodings of one's own


@pytest.fixture
def own(monkeypatch):
    """A register that forgets."""
    forget_registrations(monkeypatch)


def test_every_entry_point_of_ones_own(own):
    from wavepe.encodings import Encoding, RoPE

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True)
    class Near(Encoding):
        name = "near"
        entry = "relative"
        reach: int = 100

        def table(self, length, head_dim, *, causal=True):
            if length > self.reach:
                raise ValueError(f"near ends at {self.reach}, got {length}")
            return np.full((1, head_dim), 3.0, np.float32), 0, "zero"

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True)
    class Steep(Encoding):
        name = "steep"
        entry = "slope"
        slope: float = 1.5

        def slopes(self, heads):
            return np.full(heads, self.slope)

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True, repr=False)
    class Slow(RoPE):
        name = "slow"

        def frequencies(self, head_dim, **lengths):
            return np.full(2, 0.25), 1.0

    x = tokens(5)
    near, none = made("near"), made("none")
    q, k, v = (
        getattr(none, name)(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )

    def wanted(**options):
        out = ops.attention(**({"q": q, "k": k, "v": v} | options))
        return none.o_proj(out.transpose(1, 2).flatten(2))

    p = torch.full((1, 8), 3.0, dtype=torch.float64)
    assert (near(x) - wanted(p=p)).abs().max() < 1e-12
    slopes = torch.full((4,), 1.5, dtype=torch.float64)
    assert (made("steep")(x) - wanted(slopes=slopes)).abs().max() < 1e-12
    angle = torch.arange(5.0, dtype=torch.float64)[:, None] * 0.25 * torch.ones(2)
    cos, sin = angle.cos(), angle.sin()
    turned = {"q": ops.rope(q, cos, sin), "k": ops.rope(k, cos, sin)}
    assert (made("slow")(x) - wanted(**turned)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="near ends at 100, got 101"):
        near(tokens(101))
    with pytest.raises(ValueError, match="rotates 4 dims, more than head_dim=2"):
        SelfAttention(4, 2, encoding="slow")


def test_a_wavelet_registered_anew(own):
    wavepe.register_wavelet("own", lambda u: np.exp(-(u**2)))
    module, x = made("wavelet:kind=own,scales=4"), tokens()
    gaussian = made("wavelet:kind=gaussian,scales=4")
    assert (module(x) - gaussian(x)).abs().max() < 1e-6
    wavepe.register_wavelet("own", lambda u: (1 - u**2) * np.exp(-(u**2) / 2))
    assert (module(x) - made("wavelet:scales=4")(x)).abs().max() < 1e-6


def test_the_formula_of_the_tests_can_fail():
    module, x = made("wavelet:scales=4"), tokens()
    other = made("wavelet:kind=haar,scales=2")
    assert np.abs(exact(module, x) - exact(other, x)).max() > 1e-2
    with pytest.raises(AssertionError):
        assert_exact(other(x), module, x)
