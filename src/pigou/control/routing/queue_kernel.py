"""The toll of a queue of prompts, compiled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

#: Variances that are taken for none at all would make some tolls infinite.
_LEAST_SPREAD = 0.05
_MOST_POWER = 50.0


@bare_kernel
def delayed(ahead: float, rho: float, spread: float) -> float:
    """Return how many are delayed by one who joins a queue, itself not counted.

    With v = `spread` / 2 and k = 1 + `ahead` / v, v times the sum of (k - i) rho^i over
    i = 1, 2, ... below k, in the closed form that goes for any k. v is 1 for an M/M/1 queue.

    Args:
        ahead: how many are before it.
        rho: seconds of work that come a second, at most.
        spread: squared coefficients of variation, of gaps and of services, added up.
    """
    v = 0.5 * max(spread, _LEAST_SPREAD)
    place = 1.0 + ahead / v
    if rho > 0.999 and rho < 1.001:
        return v * 0.5 * place * (place - 1.0)
    rest = 1.0 - rho
    power = math.exp(min(place * math.log(rho), _MOST_POWER)) if rho > 0.0 else 0.0
    return v * max(0.0, rho * (place * rest - 1.0 + power) / (rest * rest))


@bare_kernel
def behind(
    wait: float, mean: float, rate: float, everybody: float, bursts: float, uneven: float
) -> float:
    """Return how many a prompt delays that joins a queue of so many seconds.

    Args:
        wait: seconds of the queue.
        mean: of a prompt.
        rate: prompts a second that could come.
        everybody: prompts a second of the whole fleet, whose gaps have the spread `bursts`.
        uneven: spread of the prompts' seconds.
    """
    share = rate / max(everybody, 1e-9)
    return delayed(wait / mean, rate * mean, share * bursts + 1.0 - share + uneven)


@bare_kernel
def joining(wait: float, reaches: NDArray[np.float64]) -> float:
    """Return the share of prompts that would come to a queue, the mean over waits from 0 to `wait`.

    Args:
        wait: seconds of the queue.
        reaches: seconds that prompts of late would have waited rather than go the other way,
            (prompts,). Without any, everybody comes.
    """
    if wait <= 0.0 or len(reaches) == 0:
        return 1.0
    found = 0.0
    for each in reaches:
        found += min(1.0, max(0.0, each / wait))
    return found / len(reaches)


@bare_kernel
def forgone(wait: float, mean: float, rate: float, gain: float) -> float:
    """Return what the next prompt would lose that went the other way: no toll of a queue is more.

    A second in which the worker is idle is worth gain / mean where more would come than it
    computes, and nothing where fewer would (the fluid limit).

    Args:
        wait: seconds of the queue.
        mean: of a prompt.
        rate: prompts a second that would come.
        gain: seconds that a prompt of mean length gains by coming to no queue at all.
    """
    gap = 1.0 / max(rate, 1e-9)
    found = max(0.0, gain - max(0.0, wait - gap))
    if rate * mean < 1.0:
        return found
    idle = gap * math.exp(-min(wait / gap, _MOST_POWER))
    return found * max(0.0, 1.0 - idle / mean)


@bare_kernel
def queues(
    table: NDArray[np.float64], prefills: NDArray[np.bool_], decodes: NDArray[np.bool_],
    reaches: NDArray[np.float64], local: float, ahead: NDArray[np.float64],
) -> None:  # fmt: skip
    """Write how many prompts one more delays at each worker, and the most that it may cost.

    Other arguments as `price`.

    Args:
        local: what the next prompt costs that no prefill worker computes (`place`), in seconds.
        ahead: has the queue in seconds in its first row, and takes the result in the next two, of
            (5, workers).
    """
    workers = prefills.shape[0]
    arrivals, mean, bursts, uneven = table[4], table[14], table[15], table[16]
    everybody, apart = 0.0, 0
    for w in range(workers):
        everybody += arrivals[w]
        apart += prefills[w] and not decodes[w]
    for w in range(workers):
        usual = max(mean[w], 1e-9)
        wait = ahead[0, w]
        whole, rate, most = everybody, arrivals[w], math.inf
        if prefills[w] and not decodes[w]:
            whole = table[21, w]
            rate = whole / apart * joining(wait, reaches)
            most = forgone(wait, usual, rate, local - mean[w])
        ahead[2, w] = most
        ahead[1, w] = behind(wait, usual, rate, whole, bursts[w], uneven[w])
