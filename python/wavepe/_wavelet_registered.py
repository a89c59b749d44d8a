"""Mother wavelets that users register under a name of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from . import _wavelet_pywt

Psi = Callable[[np.ndarray], np.ndarray]

BUILT_IN = ("ricker", "gaussian", "morlet", "haar")

# What a wavelet is asked for as it is registered: the middle, both sides, no symmetry.
_PROBE = np.array([[0.0, 0.5, -1.0], [2.0, -3.75, 20.0]])


@dataclasses.dataclass(frozen=True)
class Registered:
    """A wavelet psi and, where it is known, its derivative dpsi/du."""

    name: str
    psi: Psi
    derivative: Psi | None = None

    def values(self, u: np.ndarray) -> np.ndarray:
        """psi(u), float64 of u's shape; 0 where u is NaN."""
        return _called(f"wavelet {self.name!r}: psi", self.psi, u)

    def slopes(self, u: np.ndarray) -> np.ndarray:
        """dpsi/du at u, float64 of u's shape; 0 where u is NaN."""
        if self.derivative is None:
            raise ValueError(
                f"wavelet {self.name!r} has no derivative: "
                "wavepe.register_wavelet(name, psi, derivative=...) takes dpsi/du"
            )
        return _called(f"wavelet {self.name!r}: derivative", self.derivative, u)


_known: dict[str, Registered] = {}
_registrations = 0


def register_wavelet(name: str, psi: Psi, *, derivative: Psi | None = None) -> None:
    """Make a mother wavelet of your own known as a `kind`.

    From then on ``kind=name`` works in `wavepe.wavelet_table`, `wavepe.ops.wavelet_table` and the
    encoding ``wavelet:kind=name``, and so in Hugging Face models and ``wavepe compare``.

    Parameters
    ----------
    name : str
        Without blanks and ``: , = +``; no built-in kind and no name of PyWavelets. A name that is
        registered already is replaced by a function of the same module (a notebook's cell that is
        run again), and refused to one of another.
    psi : callable
        psi(u), elementwise: takes and returns a float64 array of any shape, u = (t - shift)/scale.
        It must be finite wherever u is.
    derivative : callable, optional
        dpsi/du in the same form. With it, tables are differentiable in scale and shift, and the
        option ``learned=true`` can be used.

    Raises
    ------
    TypeError
        psi or derivative is not callable, or does not return an array of real numbers.
    ValueError
        The name cannot be used, or psi or derivative returns another shape or a number that is not
        finite.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> wavepe.register_wavelet("bump", lambda u: np.exp(-np.abs(u)))
    >>> wavepe.wavelet_table(3, [1.0], [0.0], kind="bump")[:, 0].round(3)
    array([1.   , 0.368, 0.135], dtype=float32)
    """
    _check_name(name)
    functions = {"psi": psi} | ({} if derivative is None else {"derivative": derivative})
    for label, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"wavelet {name!r}: {label} must be a function of u, got "
                f"{function!r} ({type(function).__name__})"
            )
    old = _known.get(name)
    if old is not None and _home(old.psi) != _home(psi):
        raise ValueError(f"wavelet name {name!r} is taken by {_home(old.psi)}; choose another")
    new = Registered(name, psi, derivative)
    new.values(_PROBE)
    if derivative is not None:
        _check_derivative(new)
    _known[name] = new
    note_registration()


def registered(name: str) -> Registered | None:
    """The wavelet registered under that name."""
    return _known.get(name)


def names() -> tuple[str, ...]:
    """The registered names, in the order of their registration."""
    return tuple(_known)


def note_registration() -> None:
    """Something that a spec may name has been registered, perhaps in place of another."""
    global _registrations
    _registrations += 1


def registrations() -> int:
    """How many there were so far; what is cached under a spec is valid for one count."""
    return _registrations


def table(wavelet: Registered, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """psi((t - shift) / scale), float64 (w, dim) for t (w,); NaN where scale is 0."""
    u, _ = _arguments(t, scale, shift)
    values = wavelet.values(u)
    values[np.isnan(u)] = np.nan
    return values


def table_gradients(
    wavelet: Registered, grad: np.ndarray, t: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What `grad` (w, dim), the gradient to `table`'s result, is to scale and to shift.

    dpsi/dshift = -psi'(u)/scale and dpsi/dscale = -u psi'(u)/scale.

    Returns
    -------
    (by_scale, by_shift) : float64 (dim,)
    """
    u, scale = _arguments(t, scale, shift)
    with np.errstate(all="ignore"):
        by_shift = -wavelet.slopes(u) / scale
        by_scale = np.where(by_shift == 0, by_shift, by_shift * u)  # no 0 * inf in far tails
        return (grad * by_scale).sum(0), (grad * by_shift).sum(0)


def _arguments(
    t: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """u (w, dim), and the scale, NaN for 0."""
    with np.errstate(all="ignore"):
        scale = np.where(scale == 0, np.nan, scale)
        return (t[:, None] - shift) / scale, scale


def _called(label: str, function: Psi, u: np.ndarray) -> np.ndarray:
    known = ~np.isnan(u)
    asked = np.where(known, u, 0.0)
    try:
        with np.errstate(all="ignore"):  # a quotient that np.where drops afterwards is no concern
            given = function(asked.copy())
    except TypeError as error:  # math.exp, most often
        raise TypeError(f"{label} must take an array (np.exp, not math.exp): {error}") from error
    values = np.asarray(given)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{label} must return real numbers, got dtype {values.dtype}")
    if values.shape != u.shape:
        raise ValueError(
            f"{label} must return an array of u's shape {u.shape} (elementwise), got "
            f"{'a number' if values.ndim == 0 else f'shape {values.shape}'}"
        )
    values = np.array(values, dtype=np.float64)
    wrong = known & ~np.isfinite(values)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise ValueError(
            f"{label} must be finite for every u, got {values[at]} at u = {float(u[at])!r}"
        )
    values[~known] = 0.0
    return values


def _check_derivative(wavelet: Registered) -> None:
    """Against a difference of psi; it may have corners and steps, so most of the places decide."""
    wavelet.slopes(_PROBE)
    u, step = np.linspace(-3.013, 3.117, 40), 1e-5
    slopes = wavelet.slopes(u)
    quotient = (wavelet.values(u + step) - wavelet.values(u - step)) / (2 * step)
    wrong = np.abs(slopes - quotient) > 1e-3 * (np.abs(slopes) + np.abs(quotient)) + 1e-6
    if 2 * wrong.sum() > wrong.size:
        at = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"wavelet {wavelet.name!r}: derivative is not that of psi: at u = {u[at]:.4g} it is "
            f"{slopes[at]:.6g}, and psi's slope {quotient[at]:.6g}"
        )


def _home(function: Psi) -> str:
    """The module that a function is from; of a callable object, its class's."""
    return getattr(function, "__module__", None) or type(function).__module__


def _check_name(name: str) -> None:
    from .encodings.spec import is_word, read_value  # it imports the wavelets

    if not isinstance(name, str):
        raise TypeError(f"a wavelet's name must be text, got {name!r}")
    if not is_word(name) or read_value(name) != name:
        raise ValueError(
            "a wavelet's name must hold no blank and no : , = +, and not read as a number or a "
            f"truth value; got {name!r}"
        )
    if name in BUILT_IN or _wavelet_pywt.is_family(name):
        owner = "wavepe" if name in BUILT_IN else "PyWavelets"
        raise ValueError(f"wavelet name {name!r} is {owner}'s own; choose another")
