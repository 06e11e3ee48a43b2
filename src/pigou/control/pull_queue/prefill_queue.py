"""PrefillQueue: prompts that workers pull; claims, leases, redelivery, dead letters."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import msgspec
import numpy as np

from pigou.control.pull_queue.claim_price import (
    SAME_S,
    ClaimLoad,
    Seconds,
    ServiceTable,
    best_claim,
    claim_values,
    recent_mean,
)
from pigou.control.pull_queue.config import PullQueueConfig
from pigou.request import NEVER, SECOND

_order = attrgetter("order")
#: A prompt that is delivered again sooner was not begun: its worker gave it back unanswered.
_MIN_ATTEMPT_NS = SECOND // 10


class PrefillItem(msgspec.Struct, frozen=True):
    """A prompt waiting for a prefill worker."""

    request: str
    tokens: int
    arrival_ns: int  # when the request arrived; waits and the order are counted from it
    incarnation: int = 0  # rises when the request is queued again; older ones are ignored
    deadline_ns: int = NEVER  # answered with an error if unclaimed by then
    priority: int = 0  # lower goes first


class PrefillClaim(msgspec.Struct, frozen=True):
    """A prompt claimed by a worker, until it is acked or its lease ends."""

    item: PrefillItem
    worker: str
    delivery: int  # 1 for the first time
    lease_end_ns: int  # redelivery, unless extended


class PrefillExpired(msgspec.Struct, frozen=True):
    """Nobody claimed a prompt by its deadline: answer it with an error."""

    item: PrefillItem


class PrefillDeadLetter(msgspec.Struct, frozen=True):
    """A prompt was delivered too often without an ack: answer it with an error."""

    item: PrefillItem
    deliveries: int


QueueEffect: TypeAlias = PrefillExpired | PrefillDeadLetter


ServiceLaw: TypeAlias = Callable[[Sequence[PrefillItem]], ServiceTable]


class QueueCounts(msgspec.Struct):
    """Totals of a queue; redelivered prompts are claimed several times."""

    queued: int = 0
    claimed: int = 0
    acked: int = 0
    redelivered: int = 0  # claims ended without an ack
    bypasses: int = 0  # prompts overtaken by a later one
    left: int = 0  # claims declined in favour of another worker
    duplicates: int = 0  # ignored prompts and acks
    expired: int = 0
    dead: int = 0
    cancelled: int = 0


class _Entry(msgspec.Struct, eq=False):
    """A waiting or claimed prompt."""

    item: PrefillItem
    queued_ns: int
    number: int
    deliveries: int = 0
    passed_over: int = 0
    claim: PrefillClaim | None = None
    given_ns: int = 0  # time of the claim
    end_ns: int = 0  # expected end of its prefill

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: priority, arrival, and order of arrival."""
        return self.item.priority, self.item.arrival_ns, self.number


class PrefillQueue:
    """Prompts of all gateways of a model, pulled by its prefill workers.

    Delivery is at least once; only the first ack of an incarnation counts. `now_ns` never falls.

    Example:
        queue = PrefillQueue(PullQueueConfig(order="fifo"))
        queue.worker_up("p0")
        queue.enqueue(PrefillItem("r1", tokens=800, arrival_ns=0), 0)
        (claim,) = queue.claim("p0", 0)
        assert queue.ack("r1", 0, 5)
    """

    def __init__(self, config: PullQueueConfig) -> None:
        self.config = config
        self.workers: tuple[str, ...] = ()
        self.counts = QueueCounts()
        self._waiting: list[_Entry] = []  # in their order
        self._entries: dict[str, _Entry] = {}  # by request, those that wait and the claimed ones
        self._claims: dict[str, list[_Entry]] = {}  # by worker, in the order of the claims
        self._dated = False  # whether any prompt ever had a deadline
        self._known: dict[str, tuple[int, int]] = {}  # incarnation, and time of the last use
        self._number = 0
        self._mean_s = 0.0  # from arrival to ack
        self._gap_s = self._last_ns = 0.0  # mean gap of prompts, and time of the last

    def __len__(self) -> int:
        return len(self._waiting)

    # --- workers ------------------------------------------------------------------------------

    def worker_up(self, worker: str) -> None:
        """Let a worker claim prompts."""
        if worker not in self.workers:
            self.workers = (*self.workers, worker)

    def worker_stops(self, worker: str) -> None:
        """Let a worker finish its claims, and claim nothing more."""
        self.workers = tuple(other for other in self.workers if other != worker)

    def worker_down(self, worker: str, now_ns: int) -> list[QueueEffect]:
        """Forget a worker, and redeliver its claims at once."""
        self.worker_stops(worker)
        lost = list(self._claims.get(worker, ()))
        return [effect for entry in lost for effect in self._redeliver(entry, now_ns)]

    def free_s(self, worker: str, now_ns: int) -> float:
        """Return the expected seconds until a worker finishes its claims."""
        claims = self._claims.get(worker)
        return max(0, claims[-1].end_ns - now_ns) / SECOND if claims else 0.0

    def incarnation(self, request: str) -> int | None:
        """Return the incarnation of a waiting or claimed prompt; None if unknown."""
        entry = self._entries.get(request)
        return None if entry is None else entry.item.incarnation

    def claimant(self, request: str) -> str:
        """Return the worker that claimed a prompt; empty for none."""
        entry = self._entries.get(request)
        return "" if entry is None or entry.claim is None else entry.claim.worker

    def claims_of(self, worker: str) -> int:
        """Return how many prompts a worker has claimed."""
        return len(self._claims.get(worker, ()))

    # --- prompts ------------------------------------------------------------------------------

    def enqueue(self, item: PrefillItem, now_ns: int) -> bool:
        """Add a prompt; return False for a known or older incarnation."""
        known = self._known.get(item.request)
        if known is not None and item.incarnation <= known[0]:
            self.counts.duplicates += 1
            return False
        if known is not None:
            self._drop(item.request)
        self._known[item.request] = item.incarnation, now_ns
        self._number += 1
        if self._last_ns:
            self._gap_s = recent_mean(self._gap_s, (now_ns - self._last_ns) / SECOND)
        self._last_ns = now_ns
        self._dated |= item.deadline_ns < NEVER
        entry = self._entries[item.request] = _Entry(item, now_ns, self._number)
        insort(self._waiting, entry, key=_order)
        self.counts.queued += 1
        return True

    def cancel(self, request: str) -> str | None:
        """Remove a prompt; return its claimant, "" for none, None if unknown."""
        worker = self._drop(request)
        self.counts.cancelled += worker is not None
        return worker

    def claim(
        self, worker: str, now_ns: int, service: ServiceLaw | None = None
    ) -> list[PrefillClaim]:
        """Claim the smallest batch that saturates a worker; empty if none is worth it."""
        if worker not in self.workers or not self._ready(now_ns):
            return []
        claims: list[PrefillClaim] = []
        tokens, end_ns = 0, now_ns + round(self.free_s(worker, now_ns) * SECOND)
        while tokens < self.config.batch_tokens:
            chosen = self._next(worker, end_ns, now_ns, service)
            if chosen is None:
                break
            entry, seconds, uncached = chosen
            end_ns += round(seconds * SECOND)
            claims.append(self._give(entry, worker, end_ns, now_ns))
            tokens += uncached
        if not claims and self._open():
            self.counts.left += 1
        return claims

    def claim_one(
        self, request: str, worker: str, now_ns: int, service: ServiceLaw | None = None,
        delay_s: float = 0.0,
    ) -> PrefillClaim | list[QueueEffect]:  # fmt: skip
        """Claim the prompt that a broker delivered to a worker, if the claim is worth it.

        Passing over it must save more than `delay_s`, for which the broker gives it to nobody. A
        claim of another worker ends; the effects returned may include a dead letter.
        """
        entry = self._entries.get(request)
        if entry is None or worker not in self.workers:
            return []
        if entry.claim is not None:
            if now_ns - entry.given_ns < _MIN_ATTEMPT_NS:
                entry.deliveries -= 1
            if effects := self._redeliver(entry, now_ns):
                return effects
        end_ns = now_ns + round(self.free_s(worker, now_ns) * SECOND)
        must_go, seconds_s = self._must_go(entry, now_ns), 0.0
        entries = [] if must_go else self._open()
        if entry not in entries:
            entries.append(entry)
        if service is not None:
            at, table = entries.index(entry), service([other.item for other in entries])
            seconds_s = float(table.seconds[at, self.workers.index(worker)])
            if not must_go:
                values = self._values(entries, table.seconds, worker, end_ns, now_ns)
                if values[at] < -SAME_S - delay_s:
                    entry.passed_over += 1
                    self.counts.left += 1
                    return []
        return self._give(entry, worker, end_ns + round(seconds_s * SECOND), now_ns)

    def extend(self, worker: str, now_ns: int, request: str = "") -> int:
        """Renew the leases of a worker, or of one request; return how many it has."""
        end_ns = now_ns + round(self.config.lease_s * SECOND)
        claims = self._claims.get(worker, ())
        for entry in claims:
            if entry.claim is not None and request in ("", entry.item.request):
                entry.claim = msgspec.structs.replace(entry.claim, lease_end_ns=end_ns)
        return len(claims)

    def ack(self, request: str, incarnation: int, now_ns: int) -> bool:
        """Record that a prompt is computed; return True for the first ack, even a late one."""
        entry = self._entries.get(request)
        if entry is None or entry.item.incarnation != incarnation:
            self.counts.duplicates += 1
            return False
        self._drop(request)
        self._known[request] = incarnation, now_ns
        self._mean_s = recent_mean(self._mean_s, (now_ns - entry.item.arrival_ns) / SECOND)
        self.counts.acked += 1
        return True

    def tick(self, now_ns: int) -> list[QueueEffect]:
        """End leases and deadlines; call it at `next_ns` or often."""
        effects: list[QueueEffect] = []
        for claims in self._claims.values():
            for entry in list(claims):
                if entry.claim is not None and entry.claim.lease_end_ns <= now_ns:
                    effects += self._redeliver(entry, now_ns)
        if self._dated:
            for entry in [entry for entry in self._waiting if entry.item.deadline_ns <= now_ns]:
                self._drop(entry.item.request)
                self.counts.expired += 1
                effects.append(PrefillExpired(entry.item))
        before_ns = now_ns - round(self.config.duplicate_window_s * SECOND)
        while self._known:
            request, (_, at_ns) = next(iter(self._known.items()))
            if at_ns > before_ns or request in self._entries:
                break
            del self._known[request]
        return effects

    def next_ns(self, now_ns: int) -> int:
        """Return when `tick` or a claim may next have work; `NEVER` for never."""
        claimed = (entry for claims in self._claims.values() for entry in claims)
        times = [entry.claim.lease_end_ns for entry in claimed if entry.claim]
        bypass_ns = round(self.config.max_bypass_s * SECOND)
        for entry in self._open():
            times.append(self._batch_ns(entry))
            if self.config.order == "price":
                times.append(entry.item.arrival_ns + bypass_ns)
        if self._dated:
            times += [entry.item.deadline_ns for entry in self._waiting]
        return min((at_ns for at_ns in times if at_ns > now_ns), default=NEVER)

    # --- inside -------------------------------------------------------------------------------

    def _open(self) -> list[_Entry]:
        return self._waiting[: self.config.window]

    def _ready(self, now_ns: int) -> bool:
        entries = self._open()
        if not entries or len(entries) == self.config.window:
            return bool(entries)
        if sum(entry.item.tokens for entry in entries) >= self.config.batch_tokens:
            return True
        return min(self._batch_ns(entry) for entry in entries) <= now_ns

    def _batch_ns(self, entry: _Entry) -> int:
        return entry.queued_ns + round(self.config.batch_wait_ms * 1_000_000)

    def _next(
        self, worker: str, free_ns: int, now_ns: int, service: ServiceLaw | None
    ) -> tuple[_Entry, float, int] | None:
        """Return the prompt that a worker claims next, with its seconds and tokens there."""
        entries = self._open()
        if not entries:
            return None
        if service is None:
            return entries[0], 0.0, entries[0].item.tokens
        must_go, index = self._must_go(entries[0], now_ns), 0
        table = service([entry.item for entry in (entries[:1] if must_go else entries)])
        if not must_go:
            index = best_claim(self._values(entries, table.seconds, worker, free_ns, now_ns))
            if index < 0:  # all are better left to other workers
                return None
            for entry in entries[:index]:
                entry.passed_over += 1
                self.counts.bypasses += 1
        own = self.workers.index(worker)
        return entries[index], float(table.seconds[index, own]), int(table.tokens[index, own])

    def _must_go(self, entry: _Entry, now_ns: int) -> bool:
        bypass_ns = entry.item.arrival_ns + round(self.config.max_bypass_s * SECOND)
        spent = entry.passed_over >= self.config.max_bypass or now_ns >= bypass_ns
        return spent or self.config.order == "fifo"

    def _values(
        self, entries: list[_Entry], seconds: Seconds, worker: str, free_ns: int, now_ns: int
    ) -> Seconds:
        own = self.workers.index(worker)
        free_s = np.array([self.free_s(other, now_ns) for other in self.workers])
        free_s[own] = (free_ns - now_ns) / SECOND
        rise = self.config.urgency / self._mean_s if self._mean_s > 0.0 else 0.0
        age_s = np.array([(now_ns - entry.item.arrival_ns) / SECOND for entry in entries])
        load = ClaimLoad(free_s, self._arrivals(now_ns), rise, self.config.toll)
        return claim_values(seconds, age_s, own, load)

    def _give(self, entry: _Entry, worker: str, end_ns: int, now_ns: int) -> PrefillClaim:
        self._leave(entry)
        entry.deliveries += 1
        entry.given_ns, entry.end_ns = now_ns, end_ns
        lease_ns = now_ns + round(self.config.lease_s * SECOND)
        entry.claim = PrefillClaim(entry.item, worker, entry.deliveries, lease_ns)
        self._claims.setdefault(worker, []).append(entry)
        self.counts.claimed += 1
        return entry.claim

    def _redeliver(self, entry: _Entry, now_ns: int) -> list[QueueEffect]:
        """Return a claimed prompt to its place, or make it a dead letter."""
        self._let_go(entry)
        if entry.deliveries >= self.config.max_deliveries:
            del self._entries[entry.item.request]
            self.counts.dead += 1
            return [PrefillDeadLetter(entry.item, entry.deliveries)]
        self.counts.redelivered += 1
        entry.queued_ns = now_ns - round(self.config.batch_wait_ms * 1_000_000)  # waits for nobody
        insort(self._waiting, entry, key=_order)
        return []

    def _leave(self, entry: _Entry) -> None:
        del self._waiting[bisect_left(self._waiting, entry.order, key=_order)]

    def _arrivals(self, now_ns: int) -> float:
        """Return prompts per second, falling while none arrives."""
        gap_s = max(self._gap_s, (now_ns - self._last_ns) / SECOND)
        return 1.0 / gap_s if gap_s > 0.0 else 0.0

    def _let_go(self, entry: _Entry) -> None:
        assert entry.claim is not None
        self._claims[entry.claim.worker].remove(entry)
        entry.claim = None

    def _drop(self, request: str) -> str | None:
        entry = self._entries.pop(request, None)
        if entry is None:
            return None
        if entry.claim is None:
            self._leave(entry)
            return ""
        worker = entry.claim.worker
        self._let_go(entry)
        return worker
