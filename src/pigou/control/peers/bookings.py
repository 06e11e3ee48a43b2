"""Bookings: a gateway's load on each worker and service of tenants, and their messages."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.admission.budgets import Spending
from pigou.kv.manifest import ManifestEntry
from pigou.request import SECOND, BlockKeys, Counts

#: Weight of the last request in the mean booked times.
_BOOKED_KEEP = 1.0 / 64.0


class WorkerBookings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's requests in flight on a worker; names as in `Columns`."""

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
    sent_prompts: int = 0  # total of prompts sent there; only grows

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
#: Pairs of a number and the whole that it is a part of.
_PARTS = tuple(
    (BOOKED.index(part), BOOKED.index(of))
    for part, of in (
        ("pending_prefill_tokens", "decode_tokens"),
        ("over_expected_tokens", "decode_tokens"),
        ("decoding", "decode_requests"),
        ("background_requests", "prefill_requests"),
        ("background_tokens", "prefill_tokens"),
        ("background_pairs", "prefill_pairs"),
    )
)
#: Numbers that count prompts to be computed, shape (numbers of `BOOKED`,).
_OF_PROMPTS = np.array([name.startswith(("prefill", "background", "pending")) for name in BOOKED])


class TenantService(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's service for a tenant."""

    tenant: str
    prompt_tokens: int = 0  # total of uncached tokens sent to workers; only grows (a G-counter)
    output_tokens: int = 0
    streams: int = 0  # sequences on workers
    waiting: int = 0  # queued requests
    # total tokens of KV times milliseconds held, where the order counts them; only grows.
    kv_token_ms: int = 0


class ClassLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's requests of a class with a cap on its streams."""

    name: str
    streams: int = 0
    waiting: int = 0  # queued requests


class PredictedPrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt predicted on a worker without KV events: router keys, shape (blocks,)."""

    worker: str
    keys: BlockKeys


def growth(before: int, after: int) -> int:
    """Return the growth of a counter; one that fell restarted from 0."""
    return after - before if after >= before else after


class PeerLedger:
    """Load of other gateways on each worker; `FleetState` adds the sums to its columns.

    Reports are old by the lag, so gateways that all correct the same difference would herd:

        w = exp(-lag / T) / (1 + U),    total = a + w (booked - a)

    T is the mean seconds a prompt or stream stays booked, U the prompts others sent in the lag, a
    an estimate as if others spread their load as this gateway does. 1 / (1 + U) is the linear
    estimate of least error.
    """

    def __init__(self) -> None:
        #: Part of the fleet's columns that others booked, shape (numbers of `BOOKED`, workers).
        self.total: Counts = np.zeros((len(BOOKED), 0), dtype=np.int64)
        self.streams = 0
        self.weights: NDArray[np.float64] = np.ones(len(BOOKED))  # w of each number
        self._raw = self.total.copy()
        self._booked: dict[str, dict[str, tuple[int, ...]]] = {}
        self._busy_at: Counts = np.zeros(0, dtype=np.int64)

    @property
    def gateways(self) -> list[str]:
        """Names of gateways with bookings."""
        return [name for name, booked in self._booked.items() if booked]

    def up(self, worker: str) -> Counts:
        """Add a worker as the last row; return the others' bookings there, (numbers,)."""
        have = [booked[worker] for booked in self._booked.values() if worker in booked]
        column: Counts = np.array(have or [_NONE], dtype=np.int64).sum(axis=0)
        self.total = np.hstack((self.total, column[:, None]))
        self._raw = np.hstack((self._raw, column[:, None]))
        self._busy_at = np.append(self._busy_at, 0)
        self.streams = int(self._raw[STREAMS].sum())
        return column

    def down(self, row: int) -> None:
        """Remove a worker's row; its bookings count again once it is up."""
        for name in ("total", "_raw"):
            setattr(self, name, np.delete(getattr(self, name), row, axis=1))
        self.streams = int(self._raw[STREAMS].sum())
        self._busy_at = np.delete(self._busy_at, row)

    def book(self, gateway: str, bookings: WorkerBookings, row: int | None, now: int) -> int:
        """Store a gateway's bookings on a worker; return the prompts sent there since."""
        booked = self._booked.setdefault(gateway, {})
        counts = bookings.counts
        before = booked.get(bookings.worker, _NONE)
        sent = growth(before[SENT], counts[SENT]) if bookings.worker in booked else 0
        booked[bookings.worker] = counts
        if row is None:
            return 0
        self._raw[:, row] += np.subtract(counts, before)
        self.streams += counts[STREAMS] - before[STREAMS]
        if counts[PREFILLS] or before[PREFILLS]:
            self._busy_at[row] = now
        return sent

    def own(self, columns: object) -> Counts:
        """Return this gateway's own numbers, (numbers of `BOOKED`, workers)."""
        own = np.zeros(self.total.shape, dtype=np.int64)
        for index, name in enumerate(BOOKED[:COLUMNS]):
            own[index] = getattr(columns, name)
        own[:COLUMNS] -= self.total[:COLUMNS]
        return own

    def settle(self, columns: object) -> Counts:
        """Return the change of `total` to add to the columns, (numbers of `BOOKED`, workers)."""
        raw = self._raw
        if self.weights[0] < 1.0 and raw.size:
            own = self.own(columns)
            whole, mine = (n.sum(axis=1, keepdims=True) for n in (raw, own))
            anchor = np.where(mine > 0, whole * (own / np.maximum(mine, 1)), raw)
            raw = np.rint(anchor + self.weights[:, None] * (raw - anchor)).astype(np.int64)
            for part, of in _PARTS:  # estimates of a part and its whole are made apart
                np.minimum(raw[part], raw[of], out=raw[part])
        change: Counts = raw - self.total
        self.total += change
        return change

    def set_weights(self, lag_s: float, unseen: float, prefill_s: float, stream_s: float) -> None:
        """Set weights from the lag, `unseen` prompts in it, and seconds booked (0: unknown)."""
        last_s = np.where(_OF_PROMPTS, prefill_s, stream_s)
        left = np.exp(-lag_s / np.where(last_s > 0.0, last_s, np.inf))
        self.weights = left / (1.0 + unseen)

    def forget(self, gateway: str) -> list[WorkerBookings]:
        """Return empty bookings of a gateway that left: `book` each, then `remove` it."""
        return [WorkerBookings(worker) for worker in self._booked.get(gateway, {})]

    def remove(self, gateway: str) -> None:
        """Forget a gateway without bookings."""
        self._booked.pop(gateway, None)

    def prompts_since(self, row: int, since: int) -> bool:
        """True if a worker had prompts of others at `since` (nanoseconds) or later."""
        return self._raw.item(PREFILLS, row) > 0 or self._busy_at.item(row) >= since > 0


class BookedTimes(msgspec.Struct):
    """Mean seconds that prompts and streams stay booked; 0 while unknown."""

    prompt: float = 0.0
    stream: float = 0.0


def next_mean_s(mean_s: float, nanos: int) -> float:
    """Return the mean seconds booked, with one more that stayed `nanos`."""
    seconds = nanos / SECOND
    return mean_s + _BOOKED_KEEP * (seconds - mean_s) if mean_s else seconds


class PeerState(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="state"):
    """A gateway's changes since its last message, or its whole state (`snapshot`)."""

    gateway: str
    seq: int  # message number from 1; a snapshot repeats the last one
    # Bookings by worker; a snapshot leaves out workers without any.
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()  # service by tenant
    prompts: tuple[PredictedPrompt, ...] = ()
    # Number of the last message from each gateway, and nanoseconds since it came.
    heard: dict[str, tuple[int, int]] = {}
    manifest: tuple[ManifestEntry, ...] = ()  # changed versions, which void cached artifacts
    spending: tuple[Spending, ...] = ()  # changed use of budgets
    classes: tuple[ClassLoad, ...] | None = None  # all classes with caps; None if as before
    snapshot: bool = False  # True if it has the whole state
    leaves: bool = False  # True for the last message


class ResendRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="ask"):
    """Asks a gateway to resend missed messages by number; 0 for a snapshot."""

    gateway: str
    to: str = ""
    first: int = 0
    last: int = 0


SyncMessage: TypeAlias = PeerState | ResendRequest
