"""An `out` that shares memory with an input, or with itself; test_rope.py has more of rope's."""

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator

pytestmark = pytest.mark.usefixtures("small_pieces")
each_threads = pytest.mark.parametrize("threads", [1, 4])

CALLS = {  # a function, and the shapes of its inputs, of 8 bytes an element as out is, and of out
    "rope": (wavepe.rope, {"x": (6, 8), "cos": (6, 4), "sin": (6, 4)}, (6, 8)),
    "relative_bias": (
        lambda q, p, out=None: wavepe.relative_bias(q, p, 8, first=-1, out=out),
        {"q": (6, 5), "p": (9, 5)},
        (6, 8),
    ),
    "wavelet_table": (
        lambda offsets, scale, shift, out=None: wavepe.wavelet_table(
            offsets, scale, shift, dtype=np.float64, out=out
        ),
        {"offsets": (6,), "scale": (8,), "shift": (8,)},
        (6, 8),
    ),
    "sinusoidal": (
        lambda positions, out=None: wavepe.sinusoidal(positions, 8, out=out),
        {"positions": (6,)},
        (6, 8),
    ),
}


def drawn(rng, name, shape):
    if name in ("offsets", "positions"):
        return rng.integers(-9, 99, shape)
    return rng.uniform(0.5, 2, shape)


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (_, names, _) in CALLS.items() for name in names]
)
@each_threads
def test_out_over_an_input(variant, call, name, threads):
    """As if the inputs had been copied before."""
    wavepe.set_num_threads(threads)
    function, shapes, shape = CALLS[call]
    rng = generator("overlap", call)
    for start in (0, 1, 8, 40, 60):
        memory, given = np.zeros(200), {n: drawn(rng, n, s) for n, s in shapes.items()}
        want = function(**given)
        size = given[name].size
        view = memory[start : start + size].view(given[name].dtype).reshape(shapes[name])
        view[...] = given[name]
        out = memory[20 : 20 + want.size].reshape(shape)
        assert function(**given | {name: view}, out=out) is out
        assert_same_bits(out, want, f"{name} from {start}")


@pytest.mark.parametrize("call", CALLS)
@each_threads
def test_out_over_itself(variant, call, threads):
    """Half of each row is the next one's: one of the two results stands there, none beside."""
    wavepe.set_num_threads(threads)
    function, shapes, (rows, columns) = CALLS[call]
    rng = generator("over itself", call)
    given = {n: drawn(rng, n, s) for n, s in shapes.items()}
    want, half = function(**given), columns // 2
    memory = np.full(32 + (rows + 1) * half + 32, 7.0)
    inner = memory[32:-32]
    out = np.lib.stride_tricks.as_strided(inner, (rows, columns), (half * 8, 8))
    function(**given, out=out)
    assert (memory[:32] == 7).all()
    assert (memory[-32:] == 7).all()
    firsts = np.concatenate([want[:, :half].ravel(), want[-1, half:]])
    seconds = np.concatenate([want[0, :half], want[:, half:].ravel()])
    assert ((inner == firsts) | (inner == seconds)).all()
