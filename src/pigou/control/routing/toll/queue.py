"""The queue of prompts at each worker, and the toll of joining it; compiled."""

from __future__ import annotations

import math

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.estimates import (
    ARRIVAL_CV2,
    ARRIVALS,
    FLEET_ARRIVALS,
    MEAN_PREFILL,
    PREFILL_CV2,
    prefill_law,
    prefill_s,
)
from pigou.control.routing.toll.columns import (
    DELAYED_PROMPTS,
    TOLL_LIMIT_S,
    WAIT_S,
    Flags,
    LoadArrays,
    Numbers,
    PromptsUnderWay,
    UnderWayArrays,
    WorkerLoad,
)
from pigou.control.routing.toll.tail import wait_tail

#: Variances that are taken for none at all would make some tolls infinite.
_MIN_CV2 = 0.05
_MAX_POWER = 50.0
#: Weight of a second by which others' first tokens are delayed, their waits left out: their sizes
#: add a third in the mean (`rank_weight`).
_MEAN_WEIGHT = 4.0 / 3.0


@bare_kernel_over("control/routing/toll", "control/latency_model")
def write_waits(
    table: Numbers, load_arrays: LoadArrays, under_way: UnderWayArrays, now_ns: int,
    queues: Numbers,
) -> None:  # fmt: skip
    """Write the seconds of all prompts that each worker has to compute, by its law.

    The first has run since it began. It counts as running until its end is told; when it is late,
    it takes nothing off the prompts behind it.

    Args:
        table: `Estimates.table`.
        load_arrays: `WorkerLoad`.
        under_way: `PromptsUnderWay`.
        now_ns: nanoseconds.
        queues: rows are named in `columns`; takes the result, (5, workers).
    """
    load, first = WorkerLoad(*load_arrays), PromptsUnderWay(*under_way)
    for w in range(queues.shape[1]):
        law, prompts = prefill_law(table, w), load.prefill_requests[w]
        left = prefill_s(law, prompts, float(load.prefill_tokens[w]), float(load.prefill_pairs[w]))
        if first.since_ns.shape[0] and prompts > 0:
            whole = prefill_s(law, 1, float(first.tokens[w]), float(first.pairs[w]))
            left -= min(whole, max(0, now_ns - first.since_ns[w]) * 1e-9)
        queues[WAIT_S, w] = max(0.0, left)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def delayed_prompts(ahead: float, rho: float, cv2: float) -> float:
    """Return how many are delayed by one who joins a queue, itself not counted.

    With v = `cv2` / 2 and k = 1 + `ahead` / v, v times the sum of (k - i) rho^i over
    i = 1, 2, ... below k, in the closed form that goes for any k. v is 1 for an M/M/1 queue.

    Args:
        ahead: how many are before it.
        rho: seconds of work that come a second, at most.
        cv2: squared coefficients of variation, of gaps and of services, added up.
    """
    v = 0.5 * max(cv2, _MIN_CV2)
    position = 1.0 + ahead / v
    if rho > 0.999 and rho < 1.001:
        return v * 0.5 * position * (position - 1.0)
    rest = 1.0 - rho
    power = math.exp(min(position * math.log(rho), _MAX_POWER)) if rho > 0.0 else 0.0
    return v * max(0.0, rho * (position * rest - 1.0 + power) / (rest * rest))


@bare_kernel_over("control/routing/toll", "control/latency_model")
def delayed_at(
    wait_s: float, mean_s: float, rate: float, fleet_rate: float, arrival_cv2: float,
    prefill_cv2: float,
) -> float:  # fmt: skip
    """Return how many a prompt delays that joins a queue of so many seconds.

    Args:
        wait_s: seconds of the queue.
        mean_s: of a prompt.
        rate: prompts a second that could come.
        fleet_rate: prompts a second of the whole fleet, whose gaps vary by `arrival_cv2`.
        arrival_cv2, prefill_cv2: squared coefficients of variation.
    """
    share = rate / max(fleet_rate, 1e-9)
    cv2 = share * arrival_cv2 + 1.0 - share + prefill_cv2
    return delayed_prompts(wait_s / mean_s, rate * mean_s, cv2)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def joining_share(wait_s: float, patience: Numbers) -> float:
    """Return the share of prompts that would join a queue, the mean over waits up to `wait_s`.

    Args:
        wait_s: seconds of the queue.
        patience: seconds that recent prompts would have waited rather than go the other way,
            (prompts,). Without any, all join.
    """
    if wait_s <= 0.0 or len(patience) == 0:
        return 1.0
    total = 0.0
    for limit_s in patience:
        total += min(1.0, max(0.0, limit_s / wait_s))
    return total / len(patience)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def toll_limit(wait_s: float, mean_s: float, rate: float, gain_s: float) -> float:
    """Return what the next prompt would lose that went the other way: no toll of a queue is more.

    A second in which the worker is idle is worth gain / mean where more would come than it
    computes, and nothing where fewer would (the fluid limit).

    Args:
        wait_s: seconds of the queue.
        mean_s: of a prompt.
        rate: prompts a second that would come.
        gain_s: seconds that a prompt of mean length gains by coming to no queue at all.
    """
    gap_s = 1.0 / max(rate, 1e-9)
    loss_s = max(0.0, gain_s - max(0.0, wait_s - gap_s))
    if rate * mean_s < 1.0:
        return loss_s
    idle_s = gap_s * math.exp(-min(wait_s / gap_s, _MAX_POWER))
    return loss_s * max(0.0, 1.0 - idle_s / mean_s)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def write_queue_tolls(
    table: Numbers, prefills: Flags, decodes: Flags, patience: Numbers, local_s: float,
    queues: Numbers,
) -> None:  # fmt: skip
    """Write how many prompts one more delays at each worker, and the most that it may cost.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        patience: of recent prompts, in seconds, (prompts,).
        local_s: what the next prompt costs that no prefill worker computes (`slot_rent`).
        queues: rows are named in `columns`; reads the waits, (5, workers).
    """
    workers = prefills.shape[0]
    arrivals, mean = table[ARRIVALS], table[MEAN_PREFILL]
    total_rate, prefill_only = 0.0, 0
    for w in range(workers):
        total_rate += arrivals[w]
        prefill_only += prefills[w] and not decodes[w]
    for w in range(workers):
        mean_s, wait_s = max(mean[w], 1e-9), queues[WAIT_S, w]
        fleet_rate, rate, limit_s = total_rate, arrivals[w], math.inf
        if prefills[w] and not decodes[w]:
            fleet_rate = table[FLEET_ARRIVALS, w]
            rate = fleet_rate / prefill_only * joining_share(wait_s, patience)
            limit_s = toll_limit(wait_s, mean_s, rate, local_s - mean[w])
        queues[TOLL_LIMIT_S, w] = limit_s
        queues[DELAYED_PROMPTS, w] = delayed_at(
            wait_s, mean_s, rate, fleet_rate, table[ARRIVAL_CV2, w], table[PREFILL_CV2, w]
        )


@bare_kernel_over("control/routing/toll", "control/latency_model")
def delay_weight(wait_s: float, delay_s: float, scale_s: float) -> float:
    """Return what a second counts that those behind in a queue are delayed by one who joins it.

    They come to wait from `delay_s` to `wait_s` + `delay_s` seconds, as many for each second
    between: 4/3 and the mean of 10 F^9 / 3 over those waits (`wait_tail`).

    Args:
        wait_s: seconds of the queue that it joins, above 0.
        delay_s: seconds by which it delays them.
        scale_s: as of `wait_tail`.
    """
    added = wait_tail(wait_s + delay_s, scale_s) - wait_tail(delay_s, scale_s)
    return _MEAN_WEIGHT + added / wait_s


@bare_kernel_over("control/routing/toll", "control/latency_model")
def queue_toll(queues: Numbers, w: int, delay_s: float, scale_s: float) -> float:
    """Return what those behind lose to one who joins the queue of worker `w`, in seconds.

    Args:
        queues: rows are named in `columns`, (5, workers).
        delay_s, scale_s: as of `delay_weight`.
    """
    wait_s, delayed = queues[WAIT_S, w], queues[DELAYED_PROMPTS, w]
    if delayed <= 0.0 or wait_s <= 0.0:
        return 0.0
    loss_s = delay_weight(wait_s, delay_s, scale_s) * delay_s * delayed
    toll_s: float = min(loss_s, queues[TOLL_LIMIT_S, w])
    return toll_s
