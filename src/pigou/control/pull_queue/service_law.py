"""What prompts take on prefill workers: from the prefix index and the laws of the tolls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pigou.control.plane import ControlPlane
from pigou.control.pull_queue.messages import ServiceTable
from pigou.request import Request


def service_table(
    plane: ControlPlane, requests: Sequence[Request], workers: Sequence[str], now_ns: int
) -> ServiceTable:
    """Return seconds and uncached tokens of prompts on workers that the control plane knows."""
    rows = np.array([plane.state.row[worker] for worker in workers])
    seconds, tokens = np.empty((2, len(requests), len(rows)))
    for i, request in enumerate(requests):
        fleet = plane.view(request, now_ns)
        tokens[i] = request.prompt - fleet.cached(request.prompt)[rows]
        seconds[i] = fleet.estimates.service(rows, tokens[i], request.prompt)
    return ServiceTable(seconds, tokens.astype(np.int64))


def cached_at(plane: ControlPlane, request: Request, worker: str, now_ns: int) -> int:
    """Return the tokens of a prompt that a worker holds, 0 for an unknown one."""
    row = plane.state.row.get(worker)
    return 0 if row is None else int(plane.view(request, now_ns).cached(request.prompt)[row])
