"""Which pairs of workers could serve a request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import both
from pigou.request import Request

#: Prefill workers that are considered with each decode worker.
PREFILL_CHOICES = 4
#: Sets of pairs that are remembered; more are forgotten all at once.
_SETS = 256

Flags = NDArray[np.bool_]
Rows = NDArray[np.integer]


class Offers:
    """Makes candidates, and remembers those of workers that were asked for before.

    What pairs there are depends on the roles, on who decodes and on who prefills; these rarely
    change from one request to the next.
    """

    def __init__(self) -> None:
        self._prefills: Flags | None = None
        self._decodes: Flags | None = None
        self._apart = False
        self._sets: dict[bytes | tuple[bytes, bytes], Candidates] = {}

    def of(self, request: Request, fleet: FleetView, open_: Flags, room: Flags) -> Candidates:
        """Return what `candidates` does, perhaps the same object as before.

        Roles are taken to have changed when the arrays of the view are others.
        """
        if fleet.prefills is not self._prefills or fleet.decodes is not self._decodes:
            self._prefills, self._decodes = fleet.prefills, fleet.decodes
            self._apart = not np.array_equal(fleet.prefills, fleet.decodes)
            self._sets.clear()
        streams = both(room, open_)
        if streams is not fleet.decodes:
            streams = streams & fleet.decodes
        name: bytes | tuple[bytes, bytes] = streams.tobytes()
        prefill = _NOBODY
        if self._apart and request.splits:
            prefill = _prefillers(request, fleet, open_)
            name = (streams.tobytes(), prefill.tobytes())
        found = self._sets.get(name)
        if found is None:
            if len(self._sets) >= _SETS:
                self._sets.clear()
            found = self._sets[name] = _pairs(fleet, np.flatnonzero(streams), prefill)
        return found


_NOBODY: Rows = np.zeros(0, dtype=np.int64)


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
    return Offers().of(request, fleet, open_, room)


def _pairs(fleet: FleetView, decode: Rows, prefill: Rows) -> Candidates:
    """Return each decode worker by itself, and with each prefill worker that helps it."""
    local = np.full(len(decode), -1)
    pure_prefill = fleet.prefills & ~fleet.decodes
    pure_decode = fleet.decodes & ~fleet.prefills
    first = np.repeat(prefill, len(decode))
    second = np.tile(decode, len(prefill))
    helps = (first != second) & (pure_prefill[first] | pure_decode[second])
    return Candidates(
        np.concatenate([local, first[helps]]).astype(np.int32),
        np.concatenate([decode, second[helps]]).astype(np.int32),
    )


def _prefillers(request: Request, fleet: FleetView, open_: Flags) -> Rows:
    """Return the workers that prompts may be sent to for others, (chosen,)."""
    pure = fleet.prefills & ~fleet.decodes
    able = open_ & fleet.prefills & (request.prompt >= fleet.block_size)
    chosen = np.flatnonzero(able & pure)
    if not len(chosen):
        chosen = np.flatnonzero(able)
    if len(chosen) <= PREFILL_CHOICES:
        return chosen
    tokens = fleet.prefill_tokens[chosen] - fleet.cached(request.prompt)[chosen]
    return chosen[np.argsort(tokens, kind="stable")[:PREFILL_CHOICES]]
