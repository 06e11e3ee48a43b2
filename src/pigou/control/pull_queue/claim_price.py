"""Price of a claim: the wait saved against the cache lost on another worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.plane import ControlPlane
from pigou.request import Request

Seconds = NDArray[np.float64]

#: Claims whose values differ by less are worth the same; the earlier prompt goes.
SAME_S = 1e-9
#: Values that a recent mean remembers.
_MEMORY = 32


class ClaimLoad(NamedTuple):
    """Load that claims are priced by."""

    free_s: Seconds  # seconds until each worker has computed what it holds, (workers,)
    arrivals: float = 0.0  # prompts a second that come to the queue
    # extra weight of a second, for each second before it (urgency over mean time).
    rise: float = 0.0
    toll: float = 1.0  # weight of what later arrivals lose


def claim_values(service_s: Seconds, age_s: Seconds, own: int, load: ClaimLoad) -> Seconds:
    """Return the seconds saved if worker `own` takes each prompt now, (prompts,).

    value(i) = sum of C_j if `own` waits - sum of C_j if `own` takes i now C_j = T_j + rise T_j^2 /
    2 + toll (s_j - min s_j) l Q / c

    | symbol | meaning | |---|---| | T_j | age of prompt j when it is computed, others going to
    their cheapest worker in order | | s_j | its seconds at the worker that computes it, (prompts,
    workers); min: at its best | | l, Q, c | prompts a second; mean seconds of backlog of a worker;
    workers |

    A rollout of list scheduling (Bertsekas, Tsitsiklis and Wu 1997).
    """
    values, busy = np.empty(len(service_s)), load.free_s.copy()
    workers = len(busy)
    backlog_s = (busy.sum() + service_s.min(axis=1).sum()) / workers
    toll = load.toll * max(load.arrivals, 0.0) * backlog_s / workers
    _values(service_s, age_s, own, load.free_s, load.rise, toll, busy, values)
    return values


def best_claim(values: Seconds) -> int:
    """Return the prompt of highest value, the earliest of ties; -1 for none."""
    index = int(np.flatnonzero(values >= values.max() - SAME_S)[0])
    return index if values[index] > -SAME_S else -1


def warm_up() -> None:
    """Compile or load the kernels, which takes seconds once."""
    claim_values(np.ones((1, 2)), np.zeros(1), 0, ClaimLoad(np.zeros(2)))


@bare_kernel
def _values(
    service: Seconds, age: Seconds, own: int, free: Seconds, rise: float, toll: float,
    busy: Seconds, values: Seconds,
) -> None:  # fmt: skip
    prompts, workers = service.shape
    next_free = np.inf
    for w in range(workers):
        busy[w] = free[w]
        if w != own:
            next_free = min(next_free, free[w])
    if workers > 1:
        busy[own] = max(free[own], next_free)
    leave = _cost(service, age, busy, -1, rise, toll)
    for i in range(prompts):
        for w in range(workers):
            busy[w] = free[w]
        busy[own] += service[i, own]
        end = age[i] + busy[own]
        take = end + 0.5 * rise * end * end + toll * (service[i, own] - _fastest(service, i))
        values[i] = leave - take - _cost(service, age, busy, i, rise, toll)


@bare_kernel
def _fastest(service: Seconds, prompt: int) -> float:
    seconds = np.inf
    for w in range(service.shape[1]):
        seconds = min(seconds, service[prompt, w])
    return seconds


@bare_kernel
def _cost(
    service: Seconds, age: Seconds, busy: Seconds, taken: int, rise: float, toll: float
) -> float:
    """Return the sum of C_j of all prompts but `taken`; overwrites `busy`."""
    total = 0.0
    for i in range(service.shape[0]):
        if i == taken:
            continue
        best, lowest = 0, np.inf
        for w in range(service.shape[1]):
            cost = busy[w] + (1.0 + toll) * service[i, w]
            if cost < lowest:
                best, lowest = w, cost
        busy[best] += service[i, best]
        end = age[i] + busy[best]
        total += end + 0.5 * rise * end * end + toll * (service[i, best] - _fastest(service, i))
    return total


def recent_mean(mean: float, value: float) -> float:
    """Return a running mean over about 32 values with another value; a mean of 0 is unset."""
    return mean + (value - mean) / _MEMORY if mean else value


class ServiceTable(NamedTuple):
    """Service times of prompts on the workers of a queue."""

    seconds: Seconds  # (prompts, workers)
    tokens: NDArray[np.int64]  # uncached tokens, (prompts, workers)


def service_table(
    plane: ControlPlane, requests: Sequence[Request], workers: Sequence[str], now_ns: int
) -> ServiceTable:
    """Return seconds and uncached tokens of prompts on workers of the control plane."""
    rows = np.array([plane.state.row[worker] for worker in workers])
    seconds, tokens = np.empty((2, len(requests), len(rows)))
    for i, request in enumerate(requests):
        fleet = plane.view(request, now_ns)
        tokens[i] = request.prompt - fleet.cached(request.prompt)[rows]
        seconds[i] = fleet.estimates.service(rows, tokens[i], request.prompt)
    return ServiceTable(seconds, tokens.astype(np.int64))


def cached_at(plane: ControlPlane, request: Request, worker: str, now_ns: int) -> int:
    """Return the tokens of a prompt cached on a worker, 0 if unknown."""
    row = plane.state.row.get(worker)
    return 0 if row is None else int(plane.view(request, now_ns).cached(request.prompt)[row])
