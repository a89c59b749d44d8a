"""Mother wavelets that users register under a name of their own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from ..common.spec import is_word, read_value
from . import wavelet_pywt

Psi = Callable[[np.ndarray], np.ndarray]

BUILT_IN = ("ricker", "gaussian", "morlet", "haar")

# A new wavelet is tried on these u: near the middle and on both sides, without symmetry.
_PROBE = np.array([[0.0, 0.5, -1.0], [2.0, -3.75, 20.0]])


@dataclasses.dataclass(frozen=True)
class Registered:
    """A mother wavelet psi and, if the user gave it, its derivative dpsi/du."""

    name: str
    psi: Psi
    derivative: Psi | None = None

    def values(self, u: np.ndarray) -> np.ndarray:
        """Return psi(u), float64 in the shape of u; 0 where u is NaN."""
        return _checked_call(f"wavelet {self.name!r}: psi", self.psi, u)

    def slopes(self, u: np.ndarray) -> np.ndarray:
        """Return dpsi/du at u, float64 in the shape of u; 0 where u is NaN."""
        if self.derivative is None:
            raise ValueError(
                f"wavelet {self.name!r} has no derivative: "
                "wavepe.register_wavelet(name, psi, derivative=...) takes dpsi/du"
            )
        return _checked_call(f"wavelet {self.name!r}: derivative", self.derivative, u)


_known: dict[str, Registered] = {}
_registrations = 0
registering = threading.RLock()  # of a name that is looked up and then taken


def register_wavelet(name: str, psi: Psi, *, derivative: Psi | None = None) -> None:
    """Register your own mother wavelet under a name.

    Then ``kind=name`` works in `wavepe.wavelet_table`, in `wavepe.ops.wavelet_table` and in the
    encoding ``wavelet:kind=name``, which Hugging Face models, fairseq and ``wavepe compare`` read.

    Parameters
    ----------
    name : str
        The new name. It holds no blank and none of ``: , = +``, and is neither a built-in kind nor
        a name of PyWavelets. A module may register its name again, as a notebook does when a cell
        runs twice. A name of another module is refused.
    psi : callable
        The wavelet as an elementwise function of u = (t - shift) / scale. It takes and returns a
        float64 array of any shape, and its result is finite wherever u is not NaN.
    derivative : callable, optional
        The derivative dpsi/du, a function of the same form. With it, tables are differentiable in
        scale and shift, and the option ``learned=true`` works.

    Raises
    ------
    TypeError, ValueError
        If a function is not callable, or does not return finite real numbers in the shape of u; if
        the name cannot be used, or if `derivative` is not the derivative of `psi`.

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
    with registering:
        owner = _module_of(_known[name].psi) if name in _known else None
        if owner not in (None, _module_of(psi)):
            raise ValueError(f"wavelet name {name!r} is taken by {owner}; choose another")
        new = Registered(name, psi, derivative)
        new.values(_PROBE)
        if derivative is not None:
            _check_derivative(new)
        _known[name] = new
        note_registration()


def registered(name: str) -> Registered | None:
    """Return the wavelet registered under `name`, or None."""
    return _known.get(name)


def names() -> tuple[str, ...]:
    """Return the registered names, oldest first."""
    return tuple(_known.copy())  # another thread may register one meanwhile


def note_registration() -> None:
    """Count a registration, with `registering`: a wavelet or an encoding was added or replaced."""
    global _registrations
    _registrations += 1


def registrations() -> int:
    """Return the number of registrations so far; each one may change what a spec means."""
    return _registrations


def table(wavelet: Registered, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return psi((t - shift) / scale), float64 (w, dim) for t (w,); NaN where scale is 0."""
    u, _ = _arguments(t, scale, shift)
    values = wavelet.values(u)
    values[np.isnan(u)] = np.nan
    return values


def table_gradients(
    wavelet: Registered, grad: np.ndarray, t: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of scale and shift for `grad`, the gradient of `table`'s result.

    dpsi/dshift = -psi'(u)/scale and dpsi/dscale = -u psi'(u)/scale.
    """
    u, scale = _arguments(t, scale, shift)
    with np.errstate(all="ignore"):
        by_shift = -wavelet.slopes(u) / scale
        # Where the slope is 0, u may be infinite: 0 * inf would be NaN.
        by_scale = np.where(by_shift == 0, by_shift, by_shift * u)
        return (grad * by_scale).sum(0), (grad * by_shift).sum(0)


def _arguments(
    t: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return u (w, dim), and the scales with NaN in place of 0."""
    with np.errstate(all="ignore"):
        scale = np.where(scale == 0, np.nan, scale)
        return (t[:, None] - shift) / scale, scale


def _checked_call(label: str, function: Psi, u: np.ndarray) -> np.ndarray:
    """Return function(u), with 0 where u is NaN; raise unless it is a finite array like u."""
    is_number = ~np.isnan(u)
    try:
        # No warnings: the function may use np.where to drop the values that would warn.
        with np.errstate(all="ignore"):
            result = function(np.where(is_number, u, 0.0))
    except TypeError as error:  # most often the function calls math.exp
        raise TypeError(f"{label} must take an array (np.exp, not math.exp): {error}") from error
    values = np.asarray(result)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{label} must return real numbers, got dtype {values.dtype}")
    if values.shape != u.shape:
        raise ValueError(
            f"{label} must return an array of u's shape {u.shape} (elementwise), got "
            f"{'a number' if values.ndim == 0 else f'shape {values.shape}'}"
        )
    values = np.array(values, dtype=np.float64)
    wrong = is_number & ~np.isfinite(values)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise ValueError(
            f"{label} must be finite for every u, got {values[at]} at u = {float(u[at])!r}"
        )
    values[~is_number] = 0.0
    return values


def _check_derivative(wavelet: Registered) -> None:
    """Raise ValueError if the derivative differs from difference quotients of psi.

    psi may have corners and steps, where the two differ, so more than half of the points decide.
    """
    wavelet.slopes(_PROBE)
    u, step = np.linspace(-3.013, 3.117, 40), 1e-5
    slopes = wavelet.slopes(u)
    quotient = (wavelet.values(u + step) - wavelet.values(u - step)) / (2 * step)
    wrong = np.abs(slopes - quotient) > 1e-3 * (np.abs(slopes) + np.abs(quotient)) + 1e-6
    if 2 * wrong.sum() > wrong.size:
        at = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"wavelet {wavelet.name!r}: derivative must be the derivative of psi: at u = "
            f"{u[at]:.4g} it returns {slopes[at]:.6g}, but psi has the slope {quotient[at]:.6g}"
        )


def _module_of(function: Psi) -> str:
    """Return the name of the module that defines a function, or the class of a callable object."""
    return getattr(function, "__module__", None) or type(function).__module__


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a wavelet's name must be a string, got {name!r}")
    if not is_word(name) or read_value(name) != name:
        raise ValueError(
            "a wavelet's name must hold no blank and no : , = +, and not read as a number or a "
            f"truth value; got {name!r}"
        )
    if name in BUILT_IN or wavelet_pywt.is_family(name):
        owner = "wavepe" if name in BUILT_IN else "PyWavelets"
        raise ValueError(f"wavelet name {name!r} is {owner}'s own; choose another")
