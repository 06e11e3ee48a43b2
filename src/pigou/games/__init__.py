"""The theory of what is served live: pure functions, no clock. See `docs/internals/theory.md`.

Georgiou 2026 is "The Price of Anarchy in Disaggregated Inference".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


def checked(name: str, values: ArrayLike, shape: tuple[int | None, ...], *, low: float = 0.0,
            above: bool = False, finite: bool = True) -> Floats:  # fmt: skip
    """Return an array of this shape (None: any size) with numbers from `low`; or ValueError."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {values!r}: give numbers, in rows of equal length") from None
    sizes = [got == want for got, want in zip(array.shape, shape, strict=False) if want is not None]
    if array.ndim != len(shape) or not all(sizes):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {array.shape}: give one of ({wanted})")
    good = (array > low if above else array >= low) & (np.isfinite(array) | (not finite))
    if not good.all():
        bad = tuple(np.argwhere(~good)[0].tolist())
        what = f"{'above' if above else 'of at least'} {low:g}{', finite' if finite else ''}"
        at = f"[{', '.join(map(str, bad))}]" if bad else ""
        raise ValueError(f"{name}{at} is {array[bad]:g}: give numbers {what}")
    return array


def spread(name: str, values: ArrayLike, size: int, *, low: float = 0.0) -> Floats:
    """Return `size` numbers from `low`, given as many or one for all; or ValueError."""
    array = checked(name, values, (None,) * (np.ndim(values) > 0), low=low)
    return checked(name, np.full(size, array) if array.ndim == 0 else array, (size,), low=low)
