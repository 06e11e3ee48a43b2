"""Admission queue: waiting requests, tenant quotas, and the drain rate."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pigou.control.admission.queue_order import (
    Heap,
    QueuedRequest,
    QueueLane,
    QueueOrder,
    WorkerLimits,
)
from pigou.request import SECOND, Request

#: Hard limit of the queue over its limit, which keeps room for the tenants' shares.
_OVERFLOW = 2
#: A tenant is active until this time after its last request came or ended, in nanoseconds.
LINGERS = 10 * SECOND
#: Maximum of requests shed for one newcomer.
_MAX_SHED = 8
_NOBODY: frozenset[str] = frozenset()
#: Streams that must have ended before any counts as long, and those of the typical output.
_LEARNED, _RECENT = 32, 256
#: Departures in the window.
_WINDOW = 64
#: Mean gaps of silence that lower the rate: such gaps are rare (5% of Poisson's).
_SILENCE = 3.0
MIN_RETRY = SECOND
MAX_RETRY = 60 * SECOND


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not wait; `tenant`: its tenant's share is full, not the fleet."""

    reason: str
    tenant: bool


@dataclass(slots=True)
class _TenantCounts:
    requests: int = 0
    tokens: int = 0


class TenantQuota:
    """Limits of waiting requests and tokens per tenant.

    Above `max_requests` or `max_tokens` (0: no limit), a tenant may queue up to limit * its weight
    / weights of all active tenants, so a flood of one tenant leaves room for others. The whole
    queue stays below twice the limit.
    """

    def __init__(self, activity: TenantActivity, max_requests: int, max_tokens: int = 0) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self._activity = activity
        self._queued: dict[str, _TenantCounts] = {}
        self._groups: dict[str, tuple[str, int, int]] = {}

    def queued(self, tenant: str) -> tuple[int, int]:
        """Return the waiting requests and tokens of a tenant."""
        queued = self._queued.get(tenant)
        return (0, 0) if queued is None else (queued.requests, queued.tokens)

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants with waiting requests."""
        return self._queued.keys()

    def add(self, waiting: QueuedRequest) -> None:
        """Count a waiting request."""
        self._count(waiting.request.account, waiting.request.sequences, waiting.tokens)

    def remove(self, waiting: QueuedRequest) -> None:
        """Uncount a request that left the queue."""
        self._count(waiting.request.account, -waiting.request.sequences, -waiting.tokens)

    def reserve(self, waiting: QueuedRequest) -> None:
        """Reserve room for the sequences of a group that follow this one."""
        request = waiting.request
        self.release(request.group)
        if request.held > 0:
            self._groups[request.group] = request.account, request.held, waiting.held_tokens
            self._count(request.account, request.held, waiting.held_tokens)

    def release(self, group: str) -> None:
        """Release a group's reservation, if any."""
        tenant, sequences, tokens = self._groups.pop(group, ("", 0, 0))
        if sequences:
            self._count(tenant, -sequences, -tokens)

    @property
    def reserved(self) -> int:
        """Reserved sequences not submitted yet."""
        return sum(sequences for _, sequences, _ in self._groups.values())

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        queued = self._queued.setdefault(tenant, _TenantCounts())
        queued.requests += requests
        queued.tokens += tokens
        self.requests += requests
        self.tokens += tokens
        if queued.requests == 0:
            del self._queued[tenant]

    def refusal(
        self, waiting: QueuedRequest, without: Sequence[QueuedRequest] = ()
    ) -> Refusal | None:
        """Return why a newcomer may not wait, were those `without` gone; None if it may."""
        tenant = waiting.request.account
        requests, tokens = self.queued(tenant)
        own = [queued for queued in without if queued.request.account == tenant]
        requests -= sum(queued.request.sequences for queued in own)
        tokens -= sum(queued.tokens for queued in own)
        part = self._activity.part(tenant, waiting.weight)
        asks = waiting.request.sequences + waiting.request.held
        total = self.requests - sum(queued.request.sequences for queued in without)
        refusal = _refusal("requests", self.max_requests, total, requests, asks, part)
        if refusal is None and self.max_tokens:
            asks = waiting.tokens + waiting.held_tokens
            total = self.tokens - sum(queued.tokens for queued in without)
            refusal = _refusal("tokens", self.max_tokens, total, tokens, asks, part)
        return refusal


def _refusal(what: str, limit: int, total: int, own: int, asks: int, part: float) -> Refusal | None:
    if total + asks <= limit or (limit > 0 and total == 0):
        return None
    share = limit * part
    within = own + asks <= share or (limit > 0 and own == 0 and part < 1.0)
    if within and (total + asks <= _OVERFLOW * limit or own == 0):
        return None
    several = f"; n and prompt ask for {asks} more: send fewer at once" if asks > 1 else ""
    several = several if what == "requests" else ""
    if part < 1.0 and not within:
        text = f"the tenant's share of the queue is full: {own} of {share:.0f} {what}"
        return Refusal(text + several, tenant=True)
    return Refusal(f"the queue is full: {total} of {limit} {what}{several}", tenant=False)


class TenantActivity:
    """Active tenants and their streams."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._weights = 0.0
        self._streams: Counter[str] = Counter()
        self._peer_streams: Counter[str] = Counter()  # part of `_streams` at other gateways
        self._total = self._peer_total = 0

    def seen(self, tenant: str, weight: float, now: int) -> None:
        """Record that a request of a tenant arrived or ended."""
        if len(self._seen) == 1 and tenant in self._seen:  # no other tenant shares the fleet
            self._seen[tenant], self._weights = (now, weight), weight
            return
        _, before = self._seen.pop(tenant, (0, 0.0))
        self._seen[tenant] = (now, weight)
        self._weights += weight - before
        while self._seen:
            oldest, (when, gone) = next(iter(self._seen.items()))
            if now - when <= LINGERS:
                break
            del self._seen[oldest]
            self._weights -= gone
        if len(self._seen) == 1:
            self._weights = weight  # no rounding stays behind

    def part(self, tenant: str, weight: float) -> float:
        """Return a tenant's weight over that of all active tenants, itself included."""
        _, before = self._seen.get(tenant, (0, 0.0))
        return weight / max(weight, self._weights - before + weight)

    def began(self, tenant: str, sequences: int = 1) -> None:
        """Record that a request of a tenant was sent to a worker."""
        self._streams[tenant] += sequences
        self._total += sequences

    def ended(self, tenant: str, sequences: int = 1) -> None:
        """Record that a request of a tenant left its worker."""
        self._total -= sequences
        self._streams[tenant] -= sequences
        if not self._streams[tenant]:
            del self._streams[tenant]

    def streams(self, tenant: str) -> tuple[int, int]:
        """Return a tenant's streams, and how many of them are at other gateways."""
        return self._streams[tenant], self._peer_streams[tenant]

    def peer_streams(self, tenant: str, change: int) -> None:
        """Record a change of a tenant's streams at other gateways."""
        if change:
            self._total += change
            self._peer_total += change
            for streams in (self._streams, self._peer_streams):
                streams[tenant] += change
                if not streams[tenant]:
                    del streams[tenant]

    def own_streams(self) -> dict[str, int]:
        """Return the streams of each tenant at this gateway."""
        peers = self._peer_streams
        own = {tenant: streams - peers[tenant] for tenant, streams in self._streams.items()}
        return {tenant: streams for tenant, streams in own.items() if streams}

    @property
    def own_total(self) -> int:
        """Streams of all tenants at this gateway."""
        return self._total - self._peer_total

    def above(self, tenant: str, weight: float) -> bool:
        """True if a tenant exceeds its share of streams, and others are active."""
        part = self.part(tenant, weight)
        return part < 1.0 and self._streams[tenant] > part * self._total


class LongStreams:
    """Streams that run beyond `overrun` times the typical output, by tenant.

    The typical output is a median over tenants of the output of the stream that a token belongs to.
    Each counts by its output tokens, up to the median tenant's, so that of three and more no flood
    of short or long requests moves it far. A stream goes on for as long again as it ran, as long
    tails do, so it weighs its output over the typical one. A tenant whose long streams weigh its
    share of the places gets none beyond that share, until `LINGERS` after: their places come free
    for nobody else, and its next are like them.
    """

    def __init__(self, overrun: float) -> None:
        self._overrun = overrun
        self._typical = 0.0  # output tokens of a sequence
        self._ended = 0
        self._sums: dict[str, tuple[float, float]] = {}  # output, and its square, by tenant
        self._tokens: dict[str, int] = {}  # output by request
        self._long: dict[str, dict[str, float]] = {}  # weights by tenant and request
        self._weighed: dict[str, int] = {}  # when they weighed the tenant's share last

    def __bool__(self) -> bool:
        """True if any tenant may be held."""
        return bool(self._long or self._weighed)

    def grew(self, request: Request, tokens: int) -> None:
        """Count output."""
        tokens += self._tokens.get(request.id, 0)
        self._tokens[request.id] = tokens
        typical = self._typical * request.sequences
        if tokens > self._overrun * typical > 0.0 and self._ended >= _LEARNED:
            self._long.setdefault(request.account, {})[request.id] = tokens / typical

    def ended(self, request: Request) -> None:
        """Forget a stream, and learn from its output."""
        tokens = self._tokens.pop(request.id, 0)
        if tokens:
            self._ended += 1
            self._learn(request.account, tokens / request.sequences, request.sequences)
        own = self._long.get(request.account)
        if own is not None:
            own.pop(request.id, None)
            if not own:
                del self._long[request.account]

    def _learn(self, tenant: str, tokens: float, sequences: int) -> None:
        total, squares = self._sums.get(tenant, (0.0, 0.0))
        self._sums[tenant] = total + tokens * sequences, squares + tokens**2 * sequences
        whole = sum(total for total, _ in self._sums.values())
        if whole > _RECENT * self._typical > 0.0:
            halved = {name: (a / 2, b / 2) for name, (a, b) in self._sums.items()}
            self._sums = {name: sums for name, sums in halved.items() if sums[0] >= 1.0}
        totals = sorted(total for total, _ in self._sums.values())
        cap = totals[(len(totals) - 1) // 2]
        means = sorted((b / a, min(a, cap)) for a, b in self._sums.values())
        left = sum(weight for _, weight in means) / 2
        for mean, weight in means:
            left -= weight
            if left <= 0.0:
                self._typical = mean
                break

    def held(
        self, activity: TenantActivity, places: float, weights: Mapping[str, float], now: int
    ) -> list[str]:
        """Return the tenants that get no further stream of the fleet's `places`."""
        held = []
        for tenant in [*self._long, *(name for name in self._weighed if name not in self._long)]:
            part = activity.part(tenant, weights.get(tenant, 1.0))
            streams, elsewhere = activity.streams(tenant)
            share = max(1.0, part * places)
            weight = sum(self._long.get(tenant, {}).values())
            if weight * streams / max(1, streams - elsewhere) >= share:
                self._weighed[tenant] = now
            elif now - self._weighed.get(tenant, now) >= LINGERS:
                del self._weighed[tenant]
            if part < 1.0 and streams >= share and tenant in self._weighed:
                held.append(tenant)
        return held


class AdmissionQueue:
    """Waiting requests: those that lost their worker first, others by the queue order.

    None overtakes the first of its lane, so no request starves for its size; only requests with
    `QueuedRequest.limits` let others pass. Each step costs O(log n) and O(sets of limits + lanes).
    """

    def __init__(self, order: QueueOrder, quota: TenantQuota) -> None:
        self.order = order
        self.quota = quota
        self._all: OrderedDict[str, QueuedRequest] = OrderedDict()  # the oldest first
        self._limited: dict[WorkerLimits, Heap] = {}  # those that returned, or stepped aside
        self.lanes: Counter[QueueLane] = Counter()  # waiting requests of each
        self._returns = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over a copy of the waiting requests, oldest first."""
        return iter(list(self._all.values()))

    def waited_s(self, now: int) -> float:
        """Return the seconds that the oldest request waits; 0 if none does."""
        oldest = next(iter(self._all.values()), None)
        return 0.0 if oldest is None else (now - oldest.since) / SECOND

    def add(self, waiting: QueuedRequest) -> int:
        """Queue a request; return how many others may go before it."""
        self._serial += 1
        waiting.serial = self._serial
        self._all[waiting.request.id] = waiting
        self.lanes[waiting.lane] += 1
        if waiting.returned:
            self._join(waiting)
            return self._returns - 1
        self.quota.add(waiting)
        self.order.add(waiting)
        return len(self._all) - 1

    def remove(self, request: str) -> QueuedRequest | None:
        """Remove and return an unserved request; None if unknown."""
        waiting = self._all.pop(request, None)
        if waiting is not None:
            self._uncount(waiting)
            if not waiting.returned:
                self.quota.remove(waiting)
            if waiting.returned or waiting.aside:
                self._leave(waiting)
            else:
                self.order.remove(waiting)
        return waiting

    def step_aside(self, waiting: QueuedRequest) -> None:
        """Let others pass a request that waits for particular workers."""
        if waiting.request.eligible and not (waiting.returned or waiting.aside):
            self.order.remove(waiting)
            waiting.aside = True
            self._join(waiting)

    def take(self, waiting: QueuedRequest, uncached: int) -> None:
        """Remove a request sent to a worker that computes `uncached` tokens."""
        del self._all[waiting.request.id]
        self._uncount(waiting)
        if waiting.returned:
            self._leave(waiting)
            return
        self.quota.remove(waiting)
        if waiting.aside:
            self._leave(waiting)
            self.order.add(waiting)
        self.order.taken(waiting, uncached)

    def passed(self, waiting: QueuedRequest, uncached: int) -> None:
        """Count a newcomer routed at once, the queue being empty."""
        self._serial += 1
        waiting.serial = self._serial
        self.order.add(waiting)
        self.order.taken(waiting, uncached)

    def next(
        self, now: int, skip: Collection[WorkerLimits] = (), blocked: Collection[QueueLane] = ()
    ) -> QueuedRequest | None:
        """Return the next request, except those with limits in `skip` and of `blocked` lanes."""
        firsts = [heap.first() for limits, heap in self._limited.items() if limits not in skip]
        returned = [waiting for waiting in firsts if waiting is not None]
        if returned:
            return min(returned, key=lambda waiting: waiting.serial)
        self.order.blocked = blocked
        return self.order.first(now)

    def refusal(self, waiting: QueuedRequest) -> Refusal | None:
        """Return why a newcomer may not wait; None if it may."""
        return None if waiting.returned or waiting.accepted else self.quota.refusal(waiting)

    def displace(self, waiting: QueuedRequest) -> list[QueuedRequest]:
        """Remove and return less urgent requests so that an urgent newcomer may wait."""
        own = (refusal := self.refusal(waiting)) is not None and refusal.tenant
        last = getattr(self.order, "last", None)  # a plugin may have none
        candidates = [] if last is None else last(waiting, _MAX_SHED, own)
        for count in range(1, len(candidates) + 1):
            gone = candidates[:count]
            if self.quota.refusal(waiting, gone) is None:
                for shed in gone:
                    self.remove(shed.request.id)
                return gone
        return []

    def limits(self) -> list[WorkerLimits]:
        """Return the limits of requests that let others pass."""
        return [limits for limits in self._limited if any(limits)]

    def overdue(self, before: int, keep_accepted: bool = True) -> Iterator[QueuedRequest]:
        """Remove requests waiting since `before`, by default not those accepted."""
        late: list[QueuedRequest] = []
        for waiting in self._all.values():
            if waiting.since > before:
                break
            if not (keep_accepted and waiting.accepted):
                late.append(waiting)
        for waiting in late:
            self.remove(waiting.request.id)
            yield waiting

    def readmit(self, worker: str) -> None:
        """Remove a recovered worker from all exclusions."""
        for limits in self.limits():
            if worker in limits[0]:
                for waiting in list(self._limited[limits]):
                    self._reopen(waiting, limits[0] - {worker})

    def forgive(self, before: int) -> None:
        """Clear the exclusions of requests waiting since `before` or longer."""
        for limits in self.limits():
            waiting = self._limited[limits].first() if limits[0] else None
            while waiting is not None and waiting.since <= before:
                self._reopen(waiting, _NOBODY)
                heap = self._limited.get(limits)
                waiting = None if heap is None else heap.first()

    def _reopen(self, waiting: QueuedRequest, exclude: frozenset[str]) -> None:
        self._leave(waiting)
        waiting.exclude = exclude
        self._join(waiting)

    def _uncount(self, waiting: QueuedRequest) -> None:
        self.lanes[waiting.lane] -= 1
        if not self.lanes[waiting.lane]:
            del self.lanes[waiting.lane]

    def _join(self, waiting: QueuedRequest) -> None:
        self._limited.setdefault(waiting.limits, Heap()).add(0, waiting)
        self._returns += 1

    def _leave(self, waiting: QueuedRequest) -> None:
        heap = self._limited[waiting.limits]
        heap.remove(waiting)
        self._returns -= 1
        if not heap:
            del self._limited[waiting.limits]


class DrainRate:
    """Requests and tokens that leave per second, robust to bursts and pauses.

    Theil-Sen estimator (Theil 1950, Sen 1968): median slope of the cumulative count over pairs of
    departures half a window apart. It falls while nothing leaves.
    """

    def __init__(self) -> None:
        self._departures: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)
        self._requests = 0
        self._tokens = 0

    def ended(self, now: int, tokens: int = 0) -> None:
        """Record a departure and its token count (uncached and output)."""
        self._requests += 1
        self._tokens += tokens
        self._departures.append((now, self._requests, self._tokens))

    def rates(self, now: int) -> tuple[float, float]:
        """Return requests and tokens that leave per second; zeros while unknown."""
        if len(self._departures) < 2:
            return 0.0, 0.0
        times, requests, tokens = np.array(self._departures, dtype=np.float64).T
        half = len(times) // 2
        span = (times[half:] - times[: len(times) - half]) / SECOND
        whole = max((now - times[0]) / SECOND, 1e-9)
        silence = max((now - times[-1]) / SECOND, 1e-9)
        rates = []
        for counts in (requests, tokens):
            steps = counts[half:] - counts[: len(counts) - half]
            if (span > 0).all():
                rate = float(np.median(steps / span))
            else:  # many at the same time: the whole window tells how fast
                rate = float(counts[-1] - counts[0]) / whole
            mean = float(counts[-1] - counts[0]) / (len(counts) - 1)
            rates.append(min(rate, _SILENCE * mean / silence))
        return rates[0], rates[1]

    def retry_after(self, requests: float, tokens: float, now: int, part: float = 1.0) -> int:
        """Return nanoseconds (1 to 60 s) until so much has left; `part` is the usable share."""
        by_requests, by_tokens = self.rates(now)
        seconds = requests / (by_requests * part) if by_requests > 0.0 else 0.0
        if by_tokens > 0.0:
            seconds = max(seconds, tokens / (by_tokens * part))
        return int(min(MAX_RETRY, max(MIN_RETRY, seconds * SECOND)))
