"""Which pairs of workers could serve a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pigou.control.routing.view import Candidates
from pigou.control.state import State
from pigou.request import Request, Role, Worker

#: Prefill workers that are considered with each decode worker: those with the fewest tokens.
PREFILL_CHOICES = 4


def candidates(
    request: Request, state: State, exclude: frozenset[str], max_inflight: int
) -> Candidates:
    """Return the pairs that may serve a request.

    Every decode worker with room, with local prefill, and with each of the least loaded prefill
    workers. A worker of role BOTH computes prompts for pure decode workers only where there is
    no pure prefill worker. A prompt below one block of the prefill worker has nothing to
    transfer, so it is computed where it is decoded.

    Args:
        request: the request.
        state: of the fleet.
        exclude: workers not to use.
        max_inflight: most streams of a decode worker; 0 asks the worker's own limit.
    """
    rows = [row for row, worker in enumerate(state.workers) if worker.id not in exclude]
    decode = [row for row in rows if _has_room(state, row, max_inflight)]
    prefill = _prefillers(request, state, rows)
    pairs: list[tuple[int, int]] = []
    for row in decode:
        pairs.append((-1, row))
        pairs += [(p, row) for p in prefill if _helps(state.workers, p, row)]
    found = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return Candidates(found[:, 0], found[:, 1])


def _has_room(state: State, row: int, max_inflight: int) -> bool:
    worker = state.workers[row]
    if not worker.role.decodes:
        return False
    most = max_inflight or worker.max_seqs
    return most == 0 or bool(state.counts["decode_requests"][row] < most)


def _prefillers(request: Request, state: State, rows: Sequence[int]) -> list[int]:
    workers = state.workers
    able = [
        row for row in rows
        if workers[row].role.prefills and request.prompt >= workers[row].block_size
    ]  # fmt: skip
    pure = [row for row in able if workers[row].role is Role.PREFILL]
    tokens = state.counts["prefill_tokens"]
    return sorted(pure or able, key=lambda row: int(tokens[row]))[:PREFILL_CHOICES]


def _helps(workers: Sequence[Worker], prefill: int, decode: int) -> bool:
    """Whether a transfer between these two makes sense."""
    if prefill == decode:
        return False
    return workers[prefill].role is Role.PREFILL or workers[decode].role is Role.DECODE
