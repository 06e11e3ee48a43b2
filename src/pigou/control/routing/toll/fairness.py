"""Fairness: the extra weight of seconds of slow streams; compiled."""

from __future__ import annotations

import math

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.estimates import (
    CONTEXT_TOKEN,
    MEAN_CONTEXT,
    MEAN_PREFILL,
    interference_law,
    interference_s,
    itl_law,
    itl_s,
    prefill_law,
)
from pigou.control.routing.toll.columns import (
    REQUEST_S,
    WAIT_S,
    LoadArrays,
    Numbers,
    WorkerLoad,
)

#: Largest weight of a second.
_MAX_WEIGHT = 3.0


@bare_kernel_over("control/routing/toll", "control/latency_model")
def second_weight(ratio: float, power: float) -> float:
    """Return what a second of a stream counts: 1 up to the fleet's mean, r^k beyond, 3 at most.

    Args:
        ratio: how long requests take that stream with it, over the mean of the fleet (r).
        power: k, from 0.
    """
    weight: float = min(_MAX_WEIGHT, max(1.0, ratio) ** power)
    return weight


@bare_kernel_over("control/routing/toll", "control/latency_model")
def surcharge(ratio: float, power: float) -> float:
    """Return what a stream's own seconds count for more: the integral of `second_weight` - 1.

    Args:
        ratio: where it ends, from 1: how long its request is to take, over the fleet's mean.
        power: as of `second_weight`.
    """
    if ratio <= 1.0 or power <= 0.0:
        return 0.0
    knee = _MAX_WEIGHT ** (1.0 / power)
    rising = min(ratio, knee)
    area: float = (rising ** (power + 1.0) - 1.0) / (power + 1.0) - (rising - 1.0)
    whole: float = area + (_MAX_WEIGHT - 1.0) * max(0.0, ratio - knee)
    return whole


@bare_kernel_over("control/routing/toll", "control/latency_model")
def fairness_terms(
    request_s: float, added_s: float, mean_s: float, power: float
) -> tuple[float, float]:
    """Return what a second of a worker's streams counts, and what the next one's own add to it.

    Args:
        request_s: seconds that requests take there (`write_request_times`).
        added_s: by which the next one makes them longer.
        mean_s: of the fleet; infinite without streams.
        power: as of `second_weight`.
    """
    whole_s, own_s = request_s + added_s, 0.0
    if whole_s > mean_s:
        own_s = mean_s * surcharge(whole_s / mean_s, power)
    return second_weight(request_s / mean_s, power), own_s


@bare_kernel_over("control/routing/toll", "control/latency_model")
def write_request_times(
    table: Numbers, load_arrays: LoadArrays, output: float, queues: Numbers
) -> float:
    """Write how long mean requests take on each decode worker; return the mean over all streams.

    `Toll` has the formula (T_d). The mean is infinite without streams: then none is slow.

    Args:
        table: `Estimates.table`.
        load_arrays: `WorkerLoad`.
        output: tokens expected.
        queues: rows are named in `columns`; reads the waits, (5, workers).
    """
    load = WorkerLoad(*load_arrays)
    wait_s, decoders = 0.0, 0
    for w in range(load.decodes.shape[0]):
        if load.decodes[w]:
            wait_s += queues[WAIT_S, w]
            decoders += 1
    wait_s /= max(decoders, 1)
    total_s, streams = 0.0, 0.0
    for w in range(load.decodes.shape[0]):
        if not load.decodes[w]:
            continue
        n = float(load.decode_requests[w])
        excess = load.decode_tokens[w] - table[MEAN_CONTEXT, w] * n
        step_s = itl_s(itl_law(table, w), n) + table[CONTEXT_TOKEN, w] * excess
        stall_s = interference_s(
            prefill_law(table, w), interference_law(table, w), load.prefill_requests[w],
            float(load.prefill_tokens[w]), float(load.prefill_pairs[w]),
        )  # fmt: skip
        queues[REQUEST_S, w] = wait_s + table[MEAN_PREFILL, w] + output * step_s + stall_s
        total_s += n * queues[REQUEST_S, w]
        streams += n
    return total_s / streams if total_s > 0.0 else math.inf
