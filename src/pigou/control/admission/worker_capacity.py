"""The room: what a worker can be given now, in streams, in tokens, and in pending prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.latency_model.estimates import Estimates
from pigou.control.messages import Choice, LoadReport
from pigou.control.routing.view import FleetView
from pigou.control.state import State, everybody
from pigou.request import SECOND, Request

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

#: Milliseconds of pending prompts after which no more are sent, where an order holds back.
PREFILL_AHEAD_MS = 50
_MILLISECONDS = 1000.0


class _Held(msgspec.Struct):
    """Tokens that a routed request holds on its decode worker."""

    worker: str
    uncached: int
    output: int


class Room:
    """Which workers can take one more request.

    A worker has room for a stream while it has fewer than `max_inflight` of them, while the
    tokens it is to hold (uncached prompts, and the output that is expected or came, if more) stay
    within `max_inflight_tokens`, and while the prompts that are to be computed there take no more
    than `prefill_ahead_ms`. An empty worker takes anything: else what is larger than the budget
    could never run.
    """

    def __init__(self, config: ControlConfig, holds_back: bool, reserve: float = 0.0) -> None:
        """Start without workers.

        Args:
            config: the limits.
            holds_back: whether next to nothing should wait inside the workers.
            reserve: share of streams and tokens that is closed to tenants above their part.
        """
        self._open = 1.0 - reserve
        self._most = config.max_inflight
        self._budget = config.max_inflight_tokens
        ahead = config.prefill_ahead_ms or (PREFILL_AHEAD_MS if holds_back else 0)
        self._ahead = ahead / _MILLISECONDS
        self._bound = StreamBound() if holds_back and not config.max_inflight else None
        self._held: dict[str, _Held] = {}
        self._tokens: dict[str, int] = {}
        self._total = 0  # of these; what comes beyond is in `State`
        self._changed: dict[str, int] = {}

    @property
    def holds_prompts(self) -> bool:
        """Whether the end of a prompt makes room."""
        return self._ahead > 0.0

    def take(self, request: Request, choice: Choice, row: int, fleet: FleetView, now: int) -> None:
        """A request was routed to decode on worker `row`; `fleet` is as it saw it."""
        output = int(fleet.output) * request.sequences
        need = request.prompt - fleet.resident_on(row, request.prompt) + output
        self._held[request.id] = _Held(choice.decode, need - output, output)
        self._tokens[choice.decode] = self._tokens.get(choice.decode, 0) + need
        self._total += need
        self._changed[choice.prefill or choice.decode] = now

    def prefilled(self, worker: str | None, now: int) -> None:
        """A worker computed a prompt, or was spared it."""
        if worker is not None:
            self._changed[worker] = now

    def free(self, request: str) -> int:
        """A request left its workers; return the tokens that it had asked for, 0 if unknown."""
        held = self._held.pop(request, None)
        if held is None:
            return 0
        gone = held.uncached + held.output
        self._tokens[held.worker] -= gone
        self._total -= gone
        return gone

    def down(self, worker: str) -> None:
        """A worker is gone, with all it held."""
        for request in [key for key, held in self._held.items() if held.worker == worker]:
            del self._held[request]
        self._total -= self._tokens.pop(worker, 0)
        self._changed.pop(worker, None)
        if self._bound is not None:
            self._bound.forget(worker)

    def report(self, report: LoadReport, state: State) -> None:
        """Learn from what a worker says of itself."""
        row = state.row.get(report.worker)
        if self._bound is not None and row is not None:
            self._bound.report(report, int(state.columns.decode_requests[row]))

    def streams(self, state: State, above: bool = False) -> Flags:
        """Return which workers can take one more stream, whichever it is, (workers,).

        It may be an array of `state`, and is not to be changed.
        `above`: its tenant has more than its part of the fleet.
        """
        columns = state.columns
        most: Counts = columns.max_seqs
        if self._most * (self._open if above else 1.0) > len(state.loads):
            return columns.decodes  # any worker has room for all that there are
        if self._most:
            most = np.full(len(most), self._most)
        elif self._bound is not None:
            most = self._bound.of(most, state.ids)
        elif not state.limited:
            return columns.decodes
        if above:
            most = np.ceil(most * self._open).astype(np.int64)
        found: Flags = columns.decodes & ((most == 0) | (columns.decode_requests < most))
        return found

    def several(self, request: Request, state: State) -> Flags:
        """Return which workers can take all sequences of a request together, (workers,)."""
        streams = state.columns.decode_requests
        most = self.slots(state, 2**62)
        found: Flags = (streams == 0) | (streams + request.sequences <= most)
        return found

    def slots(self, state: State, unlimited: int) -> Counts:
        """Return the streams that each worker runs at once, `unlimited` where nobody said."""
        most: Counts = state.columns.max_seqs
        if self._most:
            most = np.full(len(most), self._most)
        elif self._bound is not None:
            most = self._bound.of(most, state.ids)
        found: Counts = np.where(most > 0, most, unlimited)
        return found

    def budget(self, state: State) -> Counts:
        """Return the tokens that each worker may hold at once, (workers,); 0 for no limit."""
        columns = state.columns
        if self._budget:
            return np.full(len(state.ids), self._budget)
        found: Counts = columns.blocks * columns.block_size
        return found

    def held(self, state: State) -> Counts:
        """Return the tokens that each worker holds, or is to hold, (workers,)."""
        expected = [self._tokens.get(worker, 0) for worker in state.ids]
        found: Counts = np.array(expected, dtype=np.int64) + state.columns.beyond
        return found

    def fits(self, request: Request, fleet: FleetView, state: State, above: bool = False) -> Flags:
        """Return which workers have the tokens for a request, (workers,)."""
        if not self._budget and not state.sized:
            return everybody(len(fleet.ids))
        output = int(fleet.output) * request.sequences
        most = self._total + state.beyond + request.prompt + output
        if most <= self._budget * (self._open if above else 1.0):
            return everybody(len(fleet.ids))  # any worker has room for all that there is
        columns = state.columns
        budget: Counts = columns.blocks * columns.block_size
        if self._budget:
            budget = np.full(len(fleet.ids), self._budget)
        if above:
            budget = np.ceil(budget * self._open).astype(np.int64)
        empty = columns.decode_requests == 0
        needed = self.held(state) + _need(request, fleet)
        found: Flags = (budget == 0) | empty | (needed <= budget)
        return found

    def ready(
        self, request: Request, fleet: FleetView, now: int, above: bool = False
    ) -> tuple[Flags, Flags]:
        """Return which workers may be sent this prompt, and which its stream, (workers,) each.

        Where there are prefill workers and one may compute this prompt, one of them must be
        ready for it. It is not worked off by decode workers only because those have much to do.
        Tenants `above` their part are sent no prompt where another is pending.
        """
        everywhere = everybody(len(fleet.ids))
        if not self._ahead:
            return everywhere, everywhere
        ready = self._pending(fleet, now) <= (0.0 if above else self._ahead)
        ready |= fleet.prefill_requests == 0
        pure = fleet.prefills & ~fleet.decodes
        able = pure & (request.prompt >= fleet.block_size)
        if not (request.splits and able.any()):
            return everywhere, ready
        return ready | ~pure, everywhere if (ready & able).any() else ~everywhere

    def _pending(self, fleet: FleetView, now: int) -> NDArray[np.float64]:
        """Return the seconds that the prompts of each worker still take, (workers,).

        What passed since a prompt was sent there, or computed, is taken off. So where the
        estimates are too high nobody waits for good.
        """
        known = fleet.estimates
        changed = np.array([self._changed.get(worker, now) for worker in fleet.ids], dtype=np.int64)
        seconds = known.work(fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_pairs)
        found: NDArray[np.float64] = seconds - (now - changed) / SECOND
        return found


_PRIOR = Estimates.prior(1)


def least_seconds(request: Request, fleet: FleetView) -> float:
    """Return the seconds that a first token takes on the quickest worker; 0 while unknown."""
    known, prior = fleet.estimates, _PRIOR
    seen = (known.prefill_token != prior.prefill_token) | (known.prefill_base != prior.prefill_base)
    if not seen.all() or not len(seen):
        return 0.0
    rows = np.arange(len(seen))
    uncached = request.prompt - fleet.cached(request.prompt).astype(np.float64)
    seconds = known.service(rows, uncached, request.prompt)
    return float(seconds.min())


def _need(request: Request, fleet: FleetView) -> Counts:
    """Return the tokens that a request needs on each worker, (workers,).

    What comes back from a tier takes room on the device as what is computed does.
    """
    output = int(fleet.output) * request.sequences
    found: Counts = request.prompt - fleet.resident(request.prompt) + output
    return found


#: Streams that a worker is given before it has said anything of itself.
FIRST = 32.0
_LESS = 0.7
_MORE = 1.0 / 16.0


class StreamBound:
    """A bound a worker that does not say its own, by what it reports.

    While a report has requests waiting inside the worker, the bound falls by 30%, but not below
    what runs there. While none waits although the bound is reached, it doubles until the first
    fall, and rises by a sixteenth after. (Additive increase, multiplicative decrease: Chiu and
    Jain 1989.)
    """

    def __init__(self) -> None:
        self._bound: dict[str, float] = {}
        self._fell: set[str] = set()

    def report(self, report: LoadReport, streams: int) -> None:
        """Learn from a report; `streams` were sent there and have not ended."""
        bound = self._bound.get(report.worker, FIRST)
        if report.waiting > 0 and report.running > 0:
            self._fell.add(report.worker)
            bound = max(1.0, float(report.running), _LESS * bound)
        elif report.waiting == 0 and streams >= int(bound):
            bound += max(1.0, _MORE * bound) if report.worker in self._fell else bound
        self._bound[report.worker] = bound

    def of(self, said: NDArray[np.int64], ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the bounds, (workers,): what the workers said, or what was learned."""
        if said.all():
            return said
        learned = np.array([int(self._bound.get(worker, FIRST)) for worker in ids])
        found: NDArray[np.int64] = np.where(said > 0, said, learned)
        return found

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._bound.pop(worker, None)
        self._fell.discard(worker)
