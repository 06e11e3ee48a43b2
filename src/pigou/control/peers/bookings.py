"""Bookings: what one gateway has on each worker, and what its tenants had, as absolute numbers."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.request import BlockKeys

Counts = NDArray[np.int64]


class WorkerBookings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has sent to a worker and has not seen end.

    Attributes:
        worker: its name.
        prefill_requests, prefill_tokens, prefill_pairs: as of `FleetView`.
        background_requests, background_tokens, background_pairs: those that others overtake.
        decode_requests, decode_tokens: as of `FleetView`.
        over_expected_tokens, pending_prefill_tokens, decoding: as of `Columns`.
        expected_tokens: that its requests were expected to hold there.
        sent_prompts: prompts that it ever sent there to be computed; only grows.
    """

    worker: str
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    background_requests: int = 0
    background_tokens: int = 0
    background_pairs: int = 0
    decode_requests: int = 0
    decode_tokens: int = 0
    over_expected_tokens: int = 0
    pending_prefill_tokens: int = 0
    decoding: int = 0
    expected_tokens: int = 0
    sent_prompts: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers, in the order of `BOOKED`."""
        return msgspec.structs.astuple(self)[1:]


#: Names of the numbers of `WorkerBookings`; the first `COLUMNS` are columns of the fleet's state.
BOOKED: tuple[str, ...] = WorkerBookings.__struct_fields__[1:]
COLUMNS = BOOKED.index("expected_tokens")
PREFILLS, STREAMS = BOOKED.index("prefill_requests"), BOOKED.index("decode_requests")
BACKGROUND = BOOKED.index("background_requests")
OVER_EXPECTED = BOOKED.index("over_expected_tokens")
EXPECTED, SENT = BOOKED.index("expected_tokens"), BOOKED.index("sent_prompts")
_NONE = (0,) * len(BOOKED)


class TenantService(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway did for a tenant.

    Attributes:
        tenant: its name.
        prompt_tokens: uncached ones that it ever sent to workers; only grows (a G-counter).
        output_tokens: that ever came; only grows.
        streams: sequences that workers have now.
        waiting: requests that wait for a worker now.
    """

    tenant: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    streams: int = 0
    waiting: int = 0


class PredictedPrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt that a worker without KV events holds soon: the router's keys, shape (blocks,)."""

    worker: str
    keys: BlockKeys


def growth(before: int, after: int) -> int:
    """Return by how much a counter that only grows did; one that fell began again from 0."""
    return after - before if after >= before else after


class PeerLedger:
    """What other gateways have on each worker; `FleetState` adds the sums to its own columns.

    Numbers are absolute, so one that is lost is put right by the next.

    Attributes:
        total: sums over the gateways, (numbers of `BOOKED`, workers).
        streams: of all gateways on workers that are up.
    """

    def __init__(self) -> None:
        """Start without gateways and workers."""
        self.total: Counts = np.zeros((len(BOOKED), 0), dtype=np.int64)
        self.streams = 0
        self._booked: dict[str, dict[str, tuple[int, ...]]] = {}
        self._busy_at: Counts = np.zeros(0, dtype=np.int64)

    @property
    def gateways(self) -> list[str]:
        """Names of the gateways that have anything on a worker."""
        return [name for name, booked in self._booked.items() if booked]

    def up(self, worker: str) -> Counts:
        """Add a worker, whose row is the last; return what others have there, (numbers,)."""
        have = [booked[worker] for booked in self._booked.values() if worker in booked]
        column: Counts = np.array(have or [_NONE], dtype=np.int64).sum(axis=0)
        self.total = np.hstack((self.total, column[:, None]))
        self._busy_at = np.append(self._busy_at, 0)
        self.streams += int(column[STREAMS])
        return column

    def down(self, row: int) -> None:
        """Remove a worker; what others have there counts again once it is up."""
        self.streams -= int(self.total[STREAMS, row])
        self.total = np.delete(self.total, row, axis=1)
        self._busy_at = np.delete(self._busy_at, row)

    def book(
        self, gateway: str, bookings: WorkerBookings, row: int | None, now: int
    ) -> tuple[int, ...]:
        """Take in what a gateway has on a worker; return by how much each number changed.

        Args:
            gateway: its name.
            bookings: its numbers now.
            row: of the worker; None while it is not up here.
            now: nanoseconds.
        """
        booked = self._booked.setdefault(gateway, {})
        counts = bookings.counts
        before = booked.get(bookings.worker, _NONE)
        sent = growth(before[SENT], counts[SENT]) if bookings.worker in booked else 0
        booked[bookings.worker] = counts
        change = (*(n - o for n, o in zip(counts[:SENT], before[:SENT], strict=True)), sent)
        if row is not None:
            self.total[:, row] += change
            self.streams += change[STREAMS]
            if counts[PREFILLS] or before[PREFILLS]:
                self._busy_at[row] = now
        return change

    def forget(self, gateway: str) -> list[WorkerBookings]:
        """Return what a gateway that is gone has to be booked with: nothing on each worker.

        `book` each of them, then the gateway is not known any more.
        """
        return [WorkerBookings(worker) for worker in self._booked.get(gateway, {})]

    def remove(self, gateway: str) -> None:
        """Do not know a gateway any more, which has nothing."""
        self._booked.pop(gateway, None)

    def prompts_since(self, row: int, since: int) -> bool:
        """Whether a worker had prompts of others to compute, at `since` (nanoseconds) or after."""
        return bool(self.total[PREFILLS, row] > 0 or self._busy_at[row] >= since > 0)
