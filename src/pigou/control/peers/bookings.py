"""Bookings: what one gateway has on each worker and had for tenants, and the messages with it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND, BlockKeys

Counts = NDArray[np.int64]


class WorkerBookings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has sent to a worker and has not seen end; names as in `Columns`."""

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
    sent_prompts: int = 0  # prompts that it ever sent there to be computed; only grows

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
#: Numbers that are a part of another one.
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
#: Which numbers are of prompts that are to be computed.
_OF_PROMPTS = np.array([name.startswith(("prefill", "background", "pending")) for name in BOOKED])
#: Weight of the last request in the mean times for which others stay booked.
_BOOKED_KEEP = 1.0 / 64.0


class TenantService(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway did for a tenant."""

    tenant: str
    prompt_tokens: int = 0  # uncached ones that it ever sent to workers; only grows (a G-counter)
    output_tokens: int = 0
    streams: int = 0  # sequences that workers have now
    waiting: int = 0  # requests that wait for a worker now


class PredictedPrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt that a worker without KV events holds soon: the router's keys, shape (blocks,)."""

    worker: str
    keys: BlockKeys


def growth(before: int, after: int) -> int:
    """Return by how much a counter that only grows did; one that fell began again from 0."""
    return after - before if after >= before else after


class PeerLedger:
    """What other gateways have on each worker; `FleetState` adds the sums to its own columns.

    Numbers are absolute, so one that is lost is put right by the next. What is known is old by the
    lag, in which others send prompts that are not known yet, and see the same differences between
    workers as this gateway: if all correct them, all overshoot (herding). So a difference counts
    by the weight

        w = exp(-lag / T) / (1 + U),    total = a + w (booked - a)

    T: mean time for which a prompt, or a stream, stays booked: what is left of it after the lag. U:
    prompts that others sent in the lag. a: as if the others had spread what they have as this
    gateway does its own. 1 / (1 + U) is the linear estimate of least error where the true
    difference has variance 1 and unseen prompts add theirs, U if all go to the worker that has
    least. Without lag w is 1.
    """

    def __init__(self) -> None:
        #: what is in the columns of the fleet's state, (numbers of `BOOKED`, workers)
        self.total: Counts = np.zeros((len(BOOKED), 0), dtype=np.int64)
        self.streams = 0
        self.weights: NDArray[np.float64] = np.ones(len(BOOKED))  # w of each number
        self._raw = self.total.copy()
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
        self._raw = np.hstack((self._raw, column[:, None]))
        self._busy_at = np.append(self._busy_at, 0)
        self.streams = int(self._raw[STREAMS].sum())
        return column

    def down(self, row: int) -> None:
        """Remove a worker; what others have there counts again once it is up."""
        for name in ("total", "_raw"):
            setattr(self, name, np.delete(getattr(self, name), row, axis=1))
        self.streams = int(self._raw[STREAMS].sum())
        self._busy_at = np.delete(self._busy_at, row)

    def book(self, gateway: str, bookings: WorkerBookings, row: int | None, now: int) -> int:
        """Take in what a gateway has on a worker; return the prompts that it sent there since."""
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
        """Return what the own gateway has on each worker, (numbers of `BOOKED`, workers)."""
        own = np.zeros(self.total.shape, dtype=np.int64)
        for index, name in enumerate(BOOKED[:COLUMNS]):
            own[index] = getattr(columns, name)
        own[:COLUMNS] -= self.total[:COLUMNS]
        return own

    def settle(self, columns: object) -> Counts:
        """Return by how much `total` changes with what was booked, (numbers of `BOOKED`, workers).

        The caller adds that to its columns.
        """
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
        """Set the weights for what is booked from now on.

        Messages take `lag_s`, in which others sent `unseen` prompts. A prompt stays booked for
        `prefill_s`, 0 where that is not known.
        """
        last_s = np.where(_OF_PROMPTS, prefill_s, stream_s)
        left = np.exp(-lag_s / np.where(last_s > 0.0, last_s, np.inf))
        self.weights = left / (1.0 + unseen)

    def forget(self, gateway: str) -> list[WorkerBookings]:
        """Return what a gateway that is gone has to be booked with: nothing on each worker.

        `book` each of them, then `remove` it.
        """
        return [WorkerBookings(worker) for worker in self._booked.get(gateway, {})]

    def remove(self, gateway: str) -> None:
        """Forget a gateway that has nothing."""
        self._booked.pop(gateway, None)

    def prompts_since(self, row: int, since: int) -> bool:
        """Whether a worker had prompts of others to compute, at `since` (nanoseconds) or after."""
        return bool(self._raw[PREFILLS, row] > 0 or self._busy_at[row] >= since > 0)


class BookedTimes(msgspec.Struct):
    """Mean seconds for which prompts and streams stay booked on a worker; 0 while unknown."""

    prompt: float = 0.0
    stream: float = 0.0

    def ended(self, name: str, nanos: int) -> None:
        """Record how long one stayed."""
        before, seconds = getattr(self, name), nanos / SECOND
        setattr(self, name, before + _BOOKED_KEEP * (seconds - before) if before else seconds)


class PeerState(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="state"):
    """What changed at a gateway since its message before, or all of it (`snapshot`)."""

    gateway: str
    seq: int  # number of the message, from 1; a snapshot has that of the last one before
    # what it has on workers; in a snapshot, those that are left out have nothing.
    workers: tuple[WorkerBookings, ...] = ()
    tenants: tuple[TenantService, ...] = ()  # what it did for tenants, and has of them
    prompts: tuple[PredictedPrompt, ...] = ()
    # last message of each other gateway, by name, and nanoseconds since that came.
    heard: dict[str, tuple[int, int]] = {}
    snapshot: bool = False  # whether it has all of its state
    leaves: bool = False  # whether it is the last


class ResendRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="ask"):
    """Asks another gateway for messages that were missed, by numbers; 0 for a snapshot."""

    gateway: str
    to: str = ""
    first: int = 0
    last: int = 0


SyncMessage: TypeAlias = PeerState | ResendRequest
