"""Which pairs of workers could serve a request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request

#: Prefill workers that are considered with each decode worker.
PREFILL_CHOICES = 4

Flags = NDArray[np.bool_]


def candidates(request: Request, fleet: FleetView, open_: Flags, room: Flags) -> Candidates:
    """Return the pairs that may serve a request.

    Every decode worker with room, with local prefill, and with each of the prefill workers that
    would have computed this prompt soonest (fewest tokens, those that wait and the prompt's own
    uncached ones). A worker that also decodes computes prompts for pure decode workers only
    where there is no pure prefill worker. A prompt below one block of the prefill worker has
    nothing to transfer, so it is computed where it is decoded; so is one that may not be split.

    Args:
        request: the request.
        fleet: as this request sees it.
        open_: workers that may be used, (workers,).
        room: workers that can take one more stream, (workers,).
    """
    decode = np.flatnonzero(open_ & room & fleet.decodes)
    local = np.full(len(decode), -1)
    pure_prefill = fleet.prefills & ~fleet.decodes
    pure_decode = fleet.decodes & ~fleet.prefills
    if not (request.splits and (pure_prefill.any() or pure_decode.any())):
        return Candidates(local.astype(np.int32), decode.astype(np.int32))
    prefill = _prefillers(request, fleet, open_, pure_prefill)
    first = np.repeat(prefill, len(decode))
    second = np.tile(decode, len(prefill))
    helps = (first != second) & (pure_prefill[first] | pure_decode[second])
    return Candidates(
        np.concatenate([local, first[helps]]).astype(np.int32),
        np.concatenate([decode, second[helps]]).astype(np.int32),
    )


def _prefillers(
    request: Request, fleet: FleetView, open_: Flags, pure: Flags
) -> NDArray[np.integer]:
    able = open_ & fleet.prefills & (request.prompt >= fleet.block_size)
    chosen = np.flatnonzero(able & pure)
    if not len(chosen):
        chosen = np.flatnonzero(able)
    if len(chosen) <= PREFILL_CHOICES:
        return chosen
    tokens = fleet.prefill_tokens[chosen] - fleet.cached(request.prompt)[chosen]
    return chosen[np.argsort(tokens, kind="stable")[:PREFILL_CHOICES]]
