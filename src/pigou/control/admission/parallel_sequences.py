"""How many sequences of one client's request may be at the workers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.admission.worker_capacity import WorkerCapacity
from pigou.control.latency_model.estimates import Estimates
from pigou.control.state import FleetState

#: The sequences of one request may make a step of a worker this many times as long as one alone.
MAX_SLOWDOWN = 2.0
#: They take at least and at most these parts of a worker's streams.
MIN_PART, MAX_PART = 1.0 / 64.0, 1.0 / 2.0
#: Part of each worker's streams and tokens that further sequences leave to other requests.
RESERVE = 1.0 / 8.0
#: No further sequence is sent while all workers have prompts for more than this many seconds.
AHEAD_S = 0.05
#: Streams of a worker that has no limit, as far as these bounds go.
UNLIMITED = 256
_LOADS = 2.0 ** np.arange(0, 11)


def max_per_worker(known: Estimates, streams: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many sequences of one request each worker is given at most, (workers,).

    It is the largest power of two n with f(n) <= `MAX_SLOWDOWN` f(1), where f is the worker's
    law of the time between tokens; within `MIN_PART` and `MAX_PART` of its streams.

    Args:
        known: speeds of the workers.
        streams: that each runs at once, (workers,).
    """
    rows = np.arange(len(streams))
    single_itl = known.itl(rows, np.ones(len(streams)))
    sequences = np.ones(len(streams))
    for load in _LOADS:
        slow = known.itl(rows, np.full(len(streams), load)) > MAX_SLOWDOWN * single_itl
        sequences = np.where(slow, sequences, load)
        if slow.all():
            break
    low = np.maximum(1.0, np.floor(streams * MIN_PART))
    high = np.maximum(1.0, np.floor(streams * MAX_PART))
    bounded: NDArray[np.int64] = np.clip(sequences, low, high).astype(np.int64)
    return bounded


def max_per_request(
    state: FleetState, known: Estimates, capacity: WorkerCapacity, limit: int
) -> int:
    """Return how many sequences of one request may run at once on the fleet.

    Args:
        known: their speeds.
        capacity: their limits.
        limit: that the operator sets; 0 for `max_per_worker` of each worker.
    """
    if limit:
        return limit
    sequences = max_per_worker(known, capacity.max_streams(state, UNLIMITED))
    return sum(sequences[state.columns.decodes].tolist())


def has_capacity(
    tokens: int, state: FleetState, known: Estimates, capacity: WorkerCapacity
) -> bool:
    """Whether a further sequence of a request need not wait, and leaves enough for others.

    The first sequence of a request waits in the queue as any other request does.

    Args:
        known: their speeds.
        capacity: their limits.
    """
    columns = state.columns
    decodes = columns.decodes
    streams = capacity.max_streams(state, UNLIMITED)
    open_ = columns.decode_requests < np.maximum(1.0, np.floor(streams * (1.0 - RESERVE)))
    limits = capacity.max_tokens(state)
    empty = columns.decode_requests == 0
    open_ &= (limits == 0) | empty | (capacity.tokens(state) + tokens <= limits * (1.0 - RESERVE))
    if not (open_ & decodes).any():
        return False
    computes = columns.prefills if columns.prefills.any() else decodes
    work = known.work(columns.prefill_requests, columns.prefill_tokens, columns.prefill_pairs)
    return bool(work[computes].min() <= AHEAD_S)
