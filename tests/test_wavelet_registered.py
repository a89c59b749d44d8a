"""wavepe.register_wavelet: a kind of a user's own in NumPy, torch, specs and models."""

import math

import cases
import numpy as np
import oracle
import pytest
import wavepe
from wavepe.arrays import wavelet_registered

SCALES = np.array([0.7, 1.0, 3.0, 2.0**40, -5.0])
SHIFTS = np.array([0.0, 2.0, -1.5, 7.0, 3.0])
OFFSETS = np.array([-9, -1, 0, 1, 2, 40, 2**31])


@pytest.fixture(autouse=True)
def register(monkeypatch):
    """register_wavelet, with a register that forgets what the test adds."""
    cases.forget_registrations(monkeypatch)
    return wavepe.register_wavelet


def lopsided(u):
    """Neither even nor odd, so that a wrong sign shows."""
    return np.exp(-np.abs(u)) * (1 + np.tanh(u))


def lopsided_slope(u):
    steep = 1 / np.cosh(np.clip(u, -300, 300)) ** 2
    return np.exp(-np.abs(u)) * (steep - np.sign(u) * (1 + np.tanh(u)))


def table(offsets, scale, shift, kind, dtype=np.float64, **options):
    return wavepe.wavelet_table(offsets, scale, shift, kind=kind, dtype=dtype, **options)


def written_out(offsets, scale, shift, mirrored=False):
    """The formula by math alone, entry for entry."""
    out = np.empty((len(offsets), len(scale)))
    for r, offset in enumerate(offsets.tolist()):
        for c, (a, b) in enumerate(zip(scale.tolist(), shift.tolist(), strict=True)):
            u = ((-offset if mirrored else offset) - b) / a
            out[r, c] = math.exp(-abs(u)) * (1 + math.tanh(u))
    return out


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("mirrored", [None, False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values(register, mirrored, dtype):
    register("lopsided", lopsided)
    given = OFFSETS, SCALES, SHIFTS, "lopsided", dtype
    got = table(*given, mirrored=mirrored)
    exact = written_out(OFFSETS, SCALES, SHIFTS, mirrored=bool(mirrored))
    assert got.dtype == dtype
    cases.assert_within(got, exact.astype(dtype), 0 if dtype != np.float64 else 4e-16)
    out = np.empty(got.shape[::-1], dtype).T
    assert table(*given, mirrored=mirrored, out=out) is out
    cases.assert_same_bits(out, got)


@pytest.mark.parametrize("kind", ["ricker", "gaussian", "haar"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_built_in_written_by_a_user(register, kind, mirrored):
    """Against the oracle, at scale 0, NaN and infinity too."""
    psi = np.vectorize(getattr(oracle, kind))
    register("own", psi)
    scale = np.array([0.0, 1.0, 2.5, np.nan, np.inf, 8.0])
    shift = np.array([0.0, 1.0, -3.0, 0.0, 2.0, np.nan])
    got = table(OFFSETS, scale, shift, "own", mirrored=mirrored)
    want = oracle.wavelet_table(OFFSETS, scale, shift, kind, mirrored)
    assert np.isnan(got[:, [0, 3, 5]]).all()
    cases.assert_within(got, want, 1e-15)


def test_results_in_float16(register):
    """They are rounded once, and overflow in silence.

    1 + 2^-11 + 2^-30 lies just above the middle of two float16 numbers; by way of float32 it would
    come to lie on it and be rounded down to even.
    """
    for value, want in ((1 + 2.0**-11 + 2.0**-30, 1 + 2.0**-10), (1e6, np.inf)):
        register("constant", lambda u, value=value: np.full(u.shape, value))
        assert table(1, [1.0], [0.0], "constant", np.float16)[0, 0] == want


def test_what_a_function_may_do(register):
    def greedy(u):
        u *= u
        return np.exp(-u, out=u)

    register("greedy", greedy)  # it changes its argument
    got = table(5, [2.0], [1.0], "greedy")
    cases.assert_within(got, table(5, [2.0], [1.0], "gaussian"), 1e-15)
    register("sinc", lambda u: np.where(u == 0, 1.0, np.sin(u) / u))  # it drops a bad quotient
    assert table(1, [1.0], [0.0], "sinc")[0, 0] == 1
    register("late", lambda u: np.where(u > 100, np.nan, u))  # it is not finite later on
    table(101, [1.0], [0.0], "late")
    with pytest.raises(ValueError, match=r"got nan at u = 101\.0"):
        table(102, [1.0], [0.0], "late")
    assert table(0, SCALES, SHIFTS, "late").shape == (0, 5)
    assert table(4, [], [], "late").shape == (4, 0)


# ------------------------------------------------------------------ the register
@pytest.mark.parametrize("name", ["mexican", "x", "db", "db-4", "sym", "bior_2", "Ricker", "δ"])
def test_names(register, name):
    register(name, lopsided)
    encoding = wavepe.encoding("wavelet", kind=name, scales=[1, 3])
    assert wavepe.encoding(str(encoding)) == encoding
    assert wavepe.encoding(encoding.to_dict()) == encoding
    want = wavepe.wavelet_table(9, *wavepe.wavelet_grid(8, [1, 3]), kind=name)
    cases.assert_same_bits(encoding.table(9, 8)[0], want)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        *((name, TypeError, "must be a string") for name in (None, 3)),
        *((name, ValueError, "blank") for name in ("", "two words", "a:b", "a,b", "a=b", "a+b")),
        *((name, ValueError, "number") for name in ("1", "1e5", "true")),
        *((name, ValueError, "wavepe's own") for name in ("ricker", "haar")),
        *((name, ValueError, "PyWavelets's own") for name in ("db4", "db99", "rbio2.2", "dmey")),
    ],
)
def test_unusable_names(register, name, error, words):
    with pytest.raises(error, match=words):
        register(name, lopsided)
    assert wavelet_registered.names() == ()


@pytest.mark.parametrize(
    ("psi", "error", "words"),
    [
        (None, TypeError, "psi must be a function of u, got None"),
        ("lambda u: u", TypeError, "must be a function"),
        (lambda u: 1.0, ValueError, r"elementwise\), got a number"),
        (lambda u: u.sum(), ValueError, "got a number"),
        (lambda u: u.ravel(), ValueError, r"u's shape \(2, 3\).*got shape \(6,\)"),
        (lambda u: u[..., None], ValueError, r"got shape \(2, 3, 1\)"),
        (lambda u: np.exp(1j * u), TypeError, "real numbers, got dtype complex128"),
        (lambda u: u.astype(str), TypeError, "real numbers"),
        (lambda u: None, TypeError, "real numbers, got dtype object"),
        (lambda u: np.sin(u) / u, ValueError, r"finite for every u, got nan at u = 0\.0"),
        (lambda u: np.exp(u**4), ValueError, r"got inf at u = 20\.0"),
        (lambda u: math.exp(-(u**2)), TypeError, r"must take an array \(np.exp, not math.exp\)"),
    ],
)
@pytest.mark.parametrize("which", ["psi", "derivative"])
def test_unfit_functions(register, psi, error, words, which):
    functions = {"psi": lopsided, which: psi}
    if which == "derivative" and psi is None:
        return  # there may be none
    with pytest.raises(error, match=words.replace("psi", which)) as raised:
        register("own", **functions)
    assert "wavelet 'own'" in str(raised.value)
    with pytest.raises(ValueError, match="unknown kind 'own'"):
        wavepe.wavelet_table(3, [1.0], [0.0], kind="own")


@pytest.mark.parametrize("wrong", [lambda u: 5.0 + 0 * u, lambda u: np.exp(-(u**2))])
def test_a_derivative_that_is_not_psi_s(register, wrong):
    with pytest.raises(ValueError, match=r"derivative must be the derivative of psi: at u = "):
        register("mistaken", lambda u: 2 * np.exp(-(u**2)), derivative=wrong)
    # corners and steps are allowed
    slope = lambda u: -np.sign(u) * (np.abs(u) < 1)  # noqa: E731
    register("hat", lambda u: np.maximum(1 - np.abs(u), 0), derivative=slope)


def test_registered_again(register):
    """A notebook's cell that is run again replaces; another module does not."""
    register("own", lambda u: 0 * u)
    register("own", lopsided)
    before = table(3, [1.0], [0.0], "own")
    cases.assert_within(before, written_out(np.arange(3), np.ones(1), np.zeros(1)), 1e-15)
    with pytest.raises(ValueError, match=f"'own' is taken by {__name__}"):
        register("own", np.linalg.norm)
    with pytest.raises(TypeError, match="must be a function"):
        register("own", 3)
    cases.assert_same_bits(table(3, [1.0], [0.0], "own"), before)


def test_unknown_kinds_list_what_there_is(register):
    register("mine", lopsided)
    words = "ricker, gaussian, morlet, haar, mine, .*register_wavelet.*PyWavelets, such as db4"
    with pytest.raises(ValueError, match=f"unknown kind 'mexican'; known: {words}"):
        wavepe.wavelet_table(3, [1.0], [0.0], kind="mexican")
    with pytest.raises(ValueError, match=f"unknown wavelet kind 'mexican'; known: {words}"):
        wavepe.encoding("wavelet:kind=mexican")


# ------------------------------------------------------------------ torch
def leaves(torch, dtype="float64"):
    rng = cases.generator("leaves")
    arrays = rng.uniform(0.7, 9, 5), rng.uniform(-5, 5, 5)
    return [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]


@pytest.mark.parametrize("mirrored", [None, False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_torch_gives_what_numpy_gives(register, torch, ops, mirrored, dtype):
    register("lopsided", lopsided)
    scale, shift = leaves(torch, dtype)
    options = {"kind": "lopsided", "mirrored": mirrored}
    got = ops.wavelet_table(torch.from_numpy(OFFSETS), scale, shift, **options)
    want = table(OFFSETS, scale.double().numpy(), shift.double().numpy(), **options)
    assert got.dtype == scale.dtype
    assert torch.equal(got, torch.from_numpy(want).to(got.dtype))
    count = ops.wavelet_table(7, scale, shift, **options)
    assert torch.equal(count, ops.wavelet_table(torch.arange(7), scale, shift, **options))


@pytest.mark.parametrize("mirrored", [False, True])
def test_derivatives(register, torch, ops, mirrored):
    register("lopsided", lopsided, derivative=lopsided_slope)
    inputs = [x.requires_grad_() for x in leaves(torch)]
    offsets = torch.tensor([-7, -1, 0, 2, 5, 30])

    def of(scale, shift):
        return ops.wavelet_table(offsets, scale, shift, kind="lopsided", mirrored=mirrored)

    for needed in ((0, 1), (0,), (1,)):
        given = [x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs)]
        assert torch.autograd.gradcheck(of, given)
    first = torch.autograd.grad(of(*inputs).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_derivatives_are_those_of_the_built_in_kind(register, torch, ops):
    """In far tails too: 0, never inf * 0."""

    def slope(u):
        return np.where(np.abs(u) > 30, 0.0, -2 * u * np.exp(-np.minimum(u * u, 900)))

    register("own", lambda u: np.exp(-(np.minimum(np.abs(u), 40) ** 2)), derivative=slope)
    grads = []
    for kind in ("own", "gaussian"):
        scale = torch.tensor([1e-3, 1e-308, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
        shift = torch.tensor([0.0, 0.0, 1.5, 0.0], dtype=torch.float64, requires_grad=True)
        p = ops.wavelet_table(torch.tensor([2, 5, 2**31]), scale, shift, kind=kind)
        p[:, :3].sum().backward()
        grads.append((scale.grad[:3], shift.grad[:3]))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=1e-300)


def test_gradients_are_never_lost_in_silence(register, torch, ops):
    register("plain", lopsided)
    scale, shift = leaves(torch)
    scale.requires_grad_()
    with pytest.raises(RuntimeError, match=r"'plain' is not differentiable.*derivative="):
        ops.wavelet_table(5, scale, shift, kind="plain")
    with torch.no_grad():
        assert not ops.wavelet_table(5, scale, shift, kind="plain").requires_grad


def test_opcheck(register, torch, ops):
    register("lopsided", lopsided, derivative=lopsided_slope)
    scale, shift = (x.requires_grad_() for x in leaves(torch))
    op = torch.ops.wavepe.sampled_wavelet_table.default
    torch.library.opcheck(op, (torch.arange(-3, 5), scale, shift, "lopsided", True))


def test_compiles_whole_for_any_length(register, torch, ops):
    register("lopsided", lopsided, derivative=lopsided_slope)
    backend = cases.recording_backend()

    def bias(q, scale, shift):
        p = ops.wavelet_table(q.shape[-2], scale, shift, kind="lopsided")
        return ops.relative_bias(q, p, q.shape[-2])

    compiled = torch.compile(bias, backend=backend, fullgraph=True, dynamic=True)
    for length in (6, 9, 23):
        results = []
        for function in (bias, compiled):
            q = torch.ones(3, length, 5, dtype=torch.float64, requires_grad=True)
            inputs = [q, *(x.requires_grad_() for x in leaves(torch))]
            out = function(*inputs)
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), inputs)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert cases.compiled_once(backend)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torch_errors(register, torch, ops, device):
    register("late", lambda u: np.where(u > 100, np.nan, u))
    offsets, ones = torch.arange(5, device=device), torch.ones(4, device=device)
    for words, args, kind in [
        ("known: ricker, .*haar, late", (offsets, ones, ones), "mexican"),
        ("one size", (offsets, ones, ones[:3]), "late"),
        ("1-D", (offsets[None], ones, ones), "late"),
        ("offsets", (offsets.float(), ones, ones), "late"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            ops.wavelet_table(*args, kind=kind)
    other = torch.ones(4, device="meta" if device == "cpu" else "cpu")
    with pytest.raises(RuntimeError, match="device"):
        ops.wavelet_table(offsets, ones, other, kind="late")
    assert ops.wavelet_table(offsets, ones, ones, kind="late").device.type == device
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"wavelet 'late': psi .* nan at u = 101\.0"):
            ops.wavelet_table(102, ones, 0 * ones, kind="late")


# ------------------------------------------------------------------ models
def test_a_wavelet_registered_again_reaches_a_model(register, torch, hf):
    """Tables are kept by the wavelet's name, and must not outlive its meaning."""
    ids = hf.tokens(2, 12)
    register("own", lambda u: np.exp(-u * u / 2) * (1 - u * u))
    model = hf.patched_tiny("wavelet:kind=own,scales=4")
    first = hf.logits(model, ids)
    register("own", lopsided)
    second = hf.logits(model, ids)
    assert not torch.equal(first, second)
    assert torch.equal(second, hf.logits(hf.patched_tiny("wavelet:kind=own,scales=4"), ids))


def test_a_checkpoint_of_a_wavelet_that_is_not_registered(register, hf, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    register("own", lopsided)
    hf.patched_tiny("wavelet:kind=own,scales=4").save_pretrained(tmp_path)
    cases.forget_registrations(monkeypatch)
    with pytest.raises(ValueError, match="unknown wavelet kind 'own'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
