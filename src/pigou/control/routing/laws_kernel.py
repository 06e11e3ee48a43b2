"""What prompts and streams take by the laws that were learned, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel


@bare_kernel
def itl(law: tuple[float, float, float, float, float, float], n: float) -> float:
    """Return the seconds between tokens of n streams; `law` is (a, b, d, n_sat, beta, floor)."""
    a, b, d, n_sat, beta, floor = law
    found = a * n + b
    if d > 0.0:
        gap = n_sat - n
        near = max(gap, floor)
        found += d * near**-beta * (1.0 + (near - gap) * beta / near)
    return found


@bare_kernel
def alone(law: tuple[float, float, float], prompts: int, tokens: float, pairs: float) -> float:
    """Return the seconds that prompts take where nobody streams; `law` is (base, token, pair)."""
    base, token, pair = law
    return base * prompts + token * tokens + pair * pairs


@bare_kernel
def backlogs(
    table: NDArray[np.float64], prompts: NDArray[np.int64], tokens: NDArray[np.int64],
    pairs: NDArray[np.int64], first_tokens: NDArray[np.int64], first_pairs: NDArray[np.int64],
    since: NDArray[np.int64], now: int, found: NDArray[np.float64],
) -> None:  # fmt: skip
    """Write the seconds of all prompts that each worker has to compute, by its law.

    The first is under way, and as far as the time since it began; it is not taken for done before
    it is told to be, and takes nothing from those behind it when it is late.

    Args:
        table: `Estimates.table`.
        prompts, tokens, pairs: of the workers, (workers,).
        first_tokens, first_pairs, since: of the prompts that are under way (`Lines`), (workers,);
            empty where they are not known.
        now: nanoseconds.
        found: takes the result, (workers,).
    """
    for w in range(found.shape[0]):
        law = table[0, w], table[1, w], table[17, w]
        left = alone(law, prompts[w], float(tokens[w]), float(pairs[w]))
        if since.shape[0] and prompts[w] > 0:
            first = alone(law, 1, float(first_tokens[w]), float(first_pairs[w]))
            left -= min(first, max(0, now - since[w]) * 1e-9)
        found[w] = max(0.0, left)


@bare_kernel
def among(
    law: tuple[float, float, float], taken: tuple[float, float], prompts: int, tokens: float,
    pairs: float,
) -> float:  # fmt: skip
    """Return the seconds that prompts take from each stream beside them.

    A pair counts as so many tokens as it takes by `law`, (base, token, pair); `taken` is (base,
    token).
    """
    _, token, pair = law
    base, each = taken
    size = tokens if pair <= 0.0 else tokens + pair / token * pairs
    return base * prompts + each * size


@bare_kernel
def beside(
    law: tuple[float, float, float], taken: tuple[float, float], prompts: int, tokens: float,
    pairs: float, begins: float,
) -> float:  # fmt: skip
    """Return the seconds that prompts take from a stream that comes in `begins` seconds.

    Those before then do not delay it. (Hits that count for more than their prompts may have it come
    before now.)
    """
    ahead = alone(law, prompts, tokens, pairs)
    left = ahead - max(begins, 0.0)
    if left <= 0.0:
        return 0.0
    return min(left, left / ahead * among(law, taken, prompts, tokens, pairs))
