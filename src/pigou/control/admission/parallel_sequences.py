"""How many sequences of one client's request may be at the workers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.admission.worker_capacity import Room
from pigou.control.latency_model.estimates import Estimates
from pigou.control.state import State

#: The sequences of one request may make a step of a worker this many times as long as one alone.
MOST_SLOWDOWN = 2.0
#: They take at least and at most these parts of a worker's slots.
LEAST_PART, MOST_PART = 1.0 / 64.0, 1.0 / 2.0
#: Part of each worker's slots and tokens that further sequences leave to other requests.
RESERVE = 1.0 / 8.0
#: No further sequence is sent while all workers have prompts for more than this many seconds.
AHEAD_S = 0.05
#: Slots of a worker that has no limit, as far as these bounds go.
UNLIMITED = 256
_LOADS = 2.0 ** np.arange(0, 11)


def most_at_once(known: Estimates, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many sequences of one request each worker is given at most, (workers,).

    It is the largest power of two n with f(n) <= `MOST_SLOWDOWN` f(1), where f is the worker's
    law of the time between tokens; within `LEAST_PART` and `MOST_PART` of its slots.

    Args:
        known: speeds of the workers.
        slots: sequences that each runs at once, (workers,).
    """
    rows = np.arange(len(slots))
    alone = known.itl(rows, np.ones(len(slots)))
    found = np.ones(len(slots))
    for load in _LOADS:
        slow = known.itl(rows, np.full(len(slots), load)) > MOST_SLOWDOWN * alone
        found = np.where(slow, found, load)
        if slow.all():
            break
    least = np.maximum(1.0, np.floor(slots * LEAST_PART))
    most = np.maximum(1.0, np.floor(slots * MOST_PART))
    bounded: NDArray[np.int64] = np.clip(found, least, most).astype(np.int64)
    return bounded


def most_of_one(state: State, known: Estimates, room: Room, most: int) -> int:
    """Return how many sequences of one request may run at once on the fleet.

    Args:
        state: of the workers.
        known: their speeds.
        room: their limits.
        most: that the operator allows; 0 for `most_at_once` of each worker.
    """
    if most:
        return most
    found = most_at_once(known, room.slots(state, UNLIMITED))
    return int(found[state.columns.decodes].sum())


def has_place(tokens: int, state: State, known: Estimates, room: Room) -> bool:
    """Whether a further sequence of a request need not wait, and leaves enough for others.

    The first sequence of a request waits in the queue as any other request does.

    Args:
        tokens: that the next one asks for, prompt and output.
        state: of the workers.
        known: their speeds.
        room: their limits.
    """
    columns = state.columns
    decodes = columns.decodes
    slots = room.slots(state, UNLIMITED)
    open_ = columns.decode_requests < np.maximum(1.0, np.floor(slots * (1.0 - RESERVE)))
    budget = room.budget(state)
    empty = columns.decode_requests == 0
    open_ &= (budget == 0) | empty | (room.held(state) + tokens <= budget * (1.0 - RESERVE))
    if not (open_ & decodes).any():
        return False
    computes = columns.prefills if columns.prefills.any() else decodes
    work = known.work(columns.prefill_requests, columns.prefill_tokens, columns.prefill_pairs)
    return bool(work[computes].min() <= AHEAD_S)
