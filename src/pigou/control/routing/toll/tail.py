"""The tail of the toll policy's cost: what a wait or a long prompt adds to the longest of ten."""

from __future__ import annotations

import math

import numpy as np

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.estimates import ARRIVAL_CV2, MEAN_PREFILL, PREFILL_CV2
from pigou.control.routing.toll.columns import (
    TAIL,
    TOLL_QUEUE,
    TOTAL,
    WAIT,
    WAIT_S,
    WAIT_TAIL_S,
    Indices,
    Numbers,
)

#: The longest of so many requests is what the tail is about.
_REQUESTS = 10.0
#: Prompts that are remembered: enough to know their sizes, few enough to forget old ones.
_REMEMBERED = 128


class RecentPrompts:
    """The last prompts, which a new one is compared with.

    The arrays are views of the moment: `record` may write to them.
    """

    def __init__(self) -> None:
        self._sizes, self._patience = _Ring(), _Ring()

    @property
    def sizes(self) -> Numbers:
        """Uncached tokens of each, shape (prompts,), in no order."""
        return self._sizes.values

    @property
    def patience(self) -> Numbers:
        """Seconds that they would have waited for a prefill worker rather than go elsewhere.

        For those that had the choice, shape (prompts,), in no order.
        """
        return self._patience.values

    def record(self, size: float, patience: float) -> None:
        """Add a prompt; `patience` is NaN for one without a choice."""
        self._sizes.push(size)
        if not math.isnan(patience):
            self._patience.push(patience)


class _Ring:
    def __init__(self) -> None:
        self._all = np.zeros(_REMEMBERED)
        self._seen = 0

    @property
    def values(self) -> Numbers:
        return self._all[: min(self._seen, _REMEMBERED)]

    def push(self, value: float) -> None:
        self._all[self._seen % _REMEMBERED] = value
        self._seen += 1


@bare_kernel_over("control/routing/toll", "control/latency_model")
def rank_weight(size: float, sizes: Numbers) -> float:
    """Return the extra weight of a second that a prompt of this size waits: 10 R^9 / 3.

    R is its rank among recent prompts, from 0 (the shortest) to 1. Prompts of one size share their
    ranks: the mean over them is (u^10 - b^10) / (3 (u - b)). b is the share that is shorter, u the
    share that is no longer, itself among them.

    Args:
        size: tokens of it that are not cached.
        sizes: of the prompts before it, (prompts,).
    """
    shorter, equal = 0, 1
    for other in sizes:
        shorter += other < size
        equal += other == size
    b, u = shorter / (len(sizes) + 1), (shorter + equal) / (len(sizes) + 1)
    weight: float = (u**_REQUESTS - b**_REQUESTS) / (3.0 * (u - b))
    return weight


@bare_kernel_over("control/routing/toll", "control/latency_model")
def wait_tail(wait_s: float, scale_s: float) -> float:
    """Return a third of what a wait adds to the longest of ten exponential waits, in seconds.

    The integral over t from 0 to `wait_s` of 10 F(t)^9 / 3, with F = 1 - exp(-t / scale_s): the
    longest of ten is longer than t by as much for each of them as 10 F^9 says.

    Args:
        wait_s: seconds.
        scale_s: mean of such waits, in seconds.
    """
    share = -math.expm1(-wait_s / max(scale_s, 1e-9))
    area, power = wait_s / max(scale_s, 1e-9), 1.0
    for j in range(1, int(_REQUESTS)):
        power *= share
        area -= power / j
    return _REQUESTS / 3.0 * scale_s * max(0.0, area)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def wait_scale(table: Numbers, w: int) -> float:
    """Return the scale of waits at worker `w`, in seconds: a mean prompt times the variances."""
    scale: float = table[MEAN_PREFILL, w] * (
        max(1.0, table[ARRIVAL_CV2, w]) + table[PREFILL_CV2, w]
    )
    return scale


@bare_kernel_over("control/routing/toll", "control/latency_model")
def write_wait_tails(table: Numbers, queues: Numbers) -> None:
    """Write what each worker's wait adds to the longest of ten (`wait_tail`).

    Args:
        table: `Estimates.table`.
        queues: rows are named in `columns`; reads the waits, (5, workers).
    """
    for w in range(queues.shape[1]):
        wait_s = queues[WAIT_S, w]
        queues[WAIT_TAIL_S, w] = wait_tail(wait_s, wait_scale(table, w)) if wait_s > 0.0 else 0.0


@bare_kernel_over("control/routing/toll", "control/latency_model")
def patience_s(prefill: Indices, costs: Numbers) -> float:
    """Return how long the prompt of some candidates would have waited for a prefill worker.

    That is how much more its best local candidate costs than the best of the others would with
    nobody before it, the tail left out. NaN where all are local, or none is.

    Args:
        prefill: of the candidates, -1 for local, (candidates,).
        costs: their parts and sums (`price`), (11, candidates).
    """
    local, remote = math.inf, math.inf
    for i in range(prefill.shape[0]):
        cost = costs[TOTAL, i] - costs[TAIL, i]
        if prefill[i] < 0:
            local = min(local, cost)
        else:
            remote = min(remote, cost - costs[WAIT, i] - costs[TOLL_QUEUE, i])
    return local - remote if max(local, remote) < math.inf else math.nan
