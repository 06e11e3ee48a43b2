"""What seconds of slow streams count for more than others', compiled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.routing.laws_kernel import among, itl

#: What a second counts at most.
_MOST = 3.0


@bare_kernel
def counts(ratio: float, power: float) -> float:
    """Return what a second of a stream counts: 1 up to the fleet's mean, r^k beyond, 3 at most.

    Args:
        ratio: how long requests take that stream with it, over the mean of the fleet (r).
        power: k, from 0.
    """
    found: float = min(_MOST, max(1.0, ratio) ** power)
    return found


@bare_kernel
def beyond(ratio: float, power: float) -> float:
    """Return what a stream's own seconds count for more: the integral of `counts` - 1 from 1.

    Args:
        ratio: where it ends: how long its request is to take, over the mean of the fleet.
        power: as of `counts`.
    """
    if ratio <= 1.0 or power <= 0.0:
        return 0.0
    knee = _MOST ** (1.0 / power)
    rising = min(ratio, knee)
    area: float = (rising ** (power + 1.0) - 1.0) / (power + 1.0) - (rising - 1.0)
    found: float = area + (_MOST - 1.0) * max(0.0, ratio - knee)
    return found


@bare_kernel
def slowness(time: float, more: float, mean: float, power: float) -> tuple[float, float]:
    """Return what a second of a worker's streams counts, and what the next one's own add to it.

    Args:
        time: seconds that requests take there (`request_times`).
        more: by which the next one makes them longer.
        mean: of the fleet; infinite where nobody streams.
        power: as of `counts`.
    """
    own = mean * beyond((time + more) / mean, power) if time + more > mean else 0.0
    return counts(time / mean, power), own


@bare_kernel
def request_times(
    table: NDArray[np.float64], decodes: NDArray[np.bool_], prompts: NDArray[np.int64],
    tokens: NDArray[np.int64], pairs: NDArray[np.int64], streams: NDArray[np.int64],
    contexts: NDArray[np.int64], output: float, waits: NDArray[np.float64],
    found: NDArray[np.float64],
) -> float:  # fmt: skip
    """Write how long requests like most take on each decode worker, and return the streams' mean.

    `Toll` has the formula (T_d). The mean is infinite where nobody streams: nobody is slower.

    Args:
        table: `Estimates.table`.
        decodes: roles of the workers, (workers,).
        prompts, tokens, pairs: that the workers have to compute, (workers,).
        streams, contexts: of the workers, and tokens that they hold, (workers,).
        output: tokens expected.
        waits: seconds of the prompts that each has to compute, (workers,).
        found: takes the result, in seconds, (workers,).
    """
    wait, many = 0.0, 0
    for w in range(decodes.shape[0]):
        if decodes[w]:
            wait += waits[w]
            many += 1
    wait /= max(many, 1)
    total, everybody = 0.0, 0.0
    for w in range(decodes.shape[0]):
        if not decodes[w]:
            continue
        n = float(streams[w])
        law = table[6, w], table[7, w], table[8, w], table[9, w], table[10, w], table[11, w]
        pace = itl(law, n) + table[22, w] * (contexts[w] - table[23, w] * n)
        taken = among(
            (table[0, w], table[1, w], table[17, w]), (table[12, w], table[13, w]),
            prompts[w], float(tokens[w]), float(pairs[w]),
        )  # fmt: skip
        found[w] = wait + table[14, w] + output * pace + taken
        total += n * found[w]
        everybody += n
    return total / everybody if total > 0.0 else math.inf
