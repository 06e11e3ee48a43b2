"""Fair sharing between tenants by virtual token counters."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.control.admission.queue_order import Heap, QueuedRequest, QueueOrder
from pigou.control.peers.bookings import TenantService
from pigou.request import Request

#: With this many tenants counted, those that owe nothing are forgotten.
_MAX_TENANTS = 1024

#: How the requests of one tenant are ordered.
Within = Literal["fcfs", "priority", "edf"]
_WITHIN: dict[str, Callable[[QueuedRequest], Any]] = {
    "fcfs": lambda _: 0,
    "priority": lambda waiting: waiting.request.priority,
    "edf": lambda waiting: waiting.request.deadline,
}
#: Bands that have counters; with more, the one that was idle longest begins anew.
_MAX_BANDS = 64
_HIGHEST = 2**31 - 1  # limit of priorities on the wire


class FairParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Fair`."""

    input_weight: float = 1.0  # service per uncached prompt token (w_p)
    output_weight: float = 2.0  # service per output token (w_q)
    within: Within = "fcfs"  # order of one tenant's own requests
    # share of each worker's streams and tokens withheld from tenants above their share of the
    # fleet, while others use it.
    reserve: float = 0.0625
    # unused service that a tenant keeps, per unit of weight. 0 is the published rule: a tenant
    # below its share still waits for its turn after each small burst.
    credit: float = 16384.0

    def __post_init__(self) -> None:
        check_fields(self, "input_weight", "output_weight", "credit", ge=0)
        check_bounds("reserve", self.reserve, ge=0, lt=1)
        if self.input_weight == self.output_weight == 0.0:
            raise ConfigError("input_weight and output_weight are both 0; one must be above")


class _Tenant:
    __slots__ = ("counter", "entry", "queue", "weight")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.weight = 1.0
        self.queue = Heap()
        self.entry: tuple[float, int, str] | None = None


class Fair(QueueOrder):
    """Serves the tenant with the lowest virtual token counter first (Sheng et al., OSDI 2024).

    Counter c_f is tenant f's service over its weight: w_p per uncached and w_q per output token,
    counted while requests wait. A tenant that starts waiting gets c_f = max(c_f, floor - credit);
    the floor is the highest minimum among waiting tenants so far.

    Two backlogged tenants differ by at most 2 max(w_p L, w_q M) + credit: L is the longest prompt,
    M the most tokens in flight, each over the lower weight. Each step costs O(log tenants),
    amortised. Service at other gateways counts (`StreamAllowance`).
    """

    Params: ClassVar[type[msgspec.Struct]] = FairParams
    holds_back: ClassVar[bool] = True

    def __init__(self, params: FairParams | None = None) -> None:
        self.params: FairParams = params or FairParams()
        self._within = _WITHIN[self.params.within]
        self._tenants: dict[str, _Tenant] = {}
        self._counters: list[tuple[float, int, str]] = []
        self._pushes = 0
        self._base = -self.params.credit  # counter of a tenant that is not known, or no more
        self._highest = 0.0  # highest floor so far
        self._max = self._base  # highest counter so far
        self._last: _Tenant | None = None
        self._elsewhere: dict[str, int] = {}  # requests of tenants that wait at other gateways
        self.service: dict[str, tuple[int, int]] = {}

    @property
    def reserve(self) -> float:
        """Share of each worker closed to tenants above their share of the fleet."""
        return self.params.reserve

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request; raise its tenant's counter to the floor minus credit."""
        name = waiting.request.tenant
        tenant = self._tenant(name)
        tenant.weight = waiting.weight
        if not tenant.queue:
            tenant.counter = max(tenant.counter, self._floor())
            self._push(name, tenant)
        tenant.queue.add(self._within(waiting), waiting)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a waiting request."""
        tenant = self._tenants.get(waiting.request.tenant)
        if tenant is None or tenant.entry is None:
            return
        tenant.queue.remove(waiting)
        if not tenant.queue:
            tenant.entry = None
            self._last = tenant

    def first(self, now: int) -> QueuedRequest | None:
        """Return the first request of the tenant with the lowest counter."""
        tenant = self._lowest()
        return None if tenant is None else tenant.queue.first()

    def peer_service(self, change: TenantService, weight: float) -> None:
        """Count another gateway's service of a tenant, and its requests waiting there."""
        name, params = change.tenant, self.params
        if change.waiting:
            waiting = self._elsewhere.pop(name, 0) + change.waiting
            if waiting > 0:
                tenant = self._tenant(name)
                tenant.weight = weight
                if waiting == change.waiting and not tenant.queue:  # it begins to wait
                    tenant.counter = max(tenant.counter, self._floor())
                self._elsewhere[name] = waiting
        served = params.input_weight * change.prompt_tokens
        served += params.output_weight * change.output_tokens
        if served > 0.0:
            self._charge(name, served)

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return the tenant's own requests behind this one; never another tenant's."""
        tenant = self._tenants.get(waiting.request.tenant)
        if tenant is None or self.params.within == "fcfs":
            return []
        return tenant.queue.last(max_count, self._within(waiting))

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt of a routed request."""
        self.remove(waiting)
        self._count(waiting.request.tenant, uncached, 0)
        self._charge(waiting.request.tenant, self.params.input_weight * uncached)

    def served(self, request: Request, tokens: int) -> None:
        """Charge output tokens."""
        self._count(request.tenant, 0, tokens)
        self._charge(request.tenant, self.params.output_weight * tokens)

    def counter(self, tenant: str) -> float:
        """Return a tenant's service over its weight."""
        known = self._tenants.get(tenant)
        return self._base if known is None else known.counter

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if the tenant is behind another by half the credit; False without credit."""
        margin = 0.5 * self.params.credit
        return margin > 0.0 and self.counter(waiting.request.tenant) < self._max - margin

    def priority(self, waiting: QueuedRequest, above: bool) -> int | None:
        """Return the priority sent to workers: tenants above their share yield."""
        return int(above)

    def newest(self, max_count: int, tenant: str | None) -> list[QueuedRequest]:
        """Return up to `max_count` of the newest waiting requests, of one tenant or all."""
        if max_count < 1:
            return []
        names = self._tenants if tenant is None else (tenant,)
        queues = [self._tenants[name].queue for name in names if name in self._tenants]
        waiting = (queued for queue in queues for queued in queue if not queued.accepted)
        return heapq.nlargest(max_count, waiting, key=lambda queued: queued.serial)

    @property
    def idle(self) -> bool:
        """True if no request waits."""
        return self._lowest() is None

    def _charge(self, name: str, service: float) -> None:
        """Count service while requests wait; otherwise it cost no tenant."""
        if self._lowest() is None and not self._elsewhere:
            return
        tenant = self._tenant(name)
        tenant.counter += service / tenant.weight
        self._max = max(self._max, tenant.counter)

    def _count(self, name: str, prompt: int, output: int) -> None:
        prompts, outputs = self.service.pop(name, (0, 0))
        self.service[name] = prompts + prompt, outputs + output
        if len(self.service) > _MAX_TENANTS:  # one that was idle for long begins anew
            del self.service[next(iter(self.service))]

    def _floor(self) -> float:
        lowest = self._lowest() or self._last
        if lowest is not None:
            self._highest = max(self._highest, lowest.counter)
        return self._highest - self.params.credit

    def _lowest(self) -> _Tenant | None:
        heap = self._counters
        while heap:
            entry = heap[0]
            tenant = self._tenants.get(entry[2])
            if tenant is None or tenant.entry is not entry:
                heapq.heappop(heap)
            elif entry[0] < tenant.counter:
                heapq.heappop(heap)
                self._push(entry[2], tenant)
            else:
                return tenant
        return None

    def _push(self, name: str, tenant: _Tenant) -> None:
        self._pushes += 1
        tenant.entry = (tenant.counter, self._pushes, name)
        heapq.heappush(self._counters, tenant.entry)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget()
            tenant = self._tenants[name] = _Tenant(self._base)
        return tenant

    def _forget(self) -> None:
        """Forget tenants that would restart at the floor anyway."""
        floor = self._floor()
        self._base = floor
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.queue or tenant.counter > floor or name in self._elsewhere
        }


class PriorityFair(QueueOrder):
    """Lower `Request.priority` first; `Fair` within one priority, with counters of its own.

    Tenants choose their priorities: if they are not trusted, use `fair` with `within: priority`.
    """

    Params: ClassVar[type[msgspec.Struct]] = FairParams
    holds_back: ClassVar[bool] = True

    def __init__(self, params: FairParams | None = None) -> None:
        self.params: FairParams = params or FairParams()
        self._bands: dict[int, Fair] = {}

    @property
    def reserve(self) -> float:
        """Share of each worker closed to tenants above their share of the fleet."""
        return self.params.reserve

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        priority = waiting.request.priority
        band = self._bands.pop(priority, None) or Fair(self.params)
        self._bands[priority] = band  # the last used is the last of the dictionary
        band.add(waiting)
        if len(self._bands) > _MAX_BANDS:
            idle = next((name for name, band in self._bands.items() if band.idle), None)
            if idle is not None:
                del self._bands[idle]

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a waiting request."""
        self._band(waiting.request).remove(waiting)

    def first(self, now: int) -> QueuedRequest | None:
        """Return the next request, in O(priorities in use)."""
        waiting = [(name, band) for name, band in self._bands.items() if not band.idle]
        return min(waiting)[1].first(now) if waiting else None

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return requests of higher priority numbers, highest first; then as `Fair`."""
        last: list[QueuedRequest] = []
        priority = waiting.request.priority
        tenant = waiting.request.tenant if own else None
        for name in sorted(self._bands, reverse=True):
            if name > priority:
                last += self._bands[name].newest(max_count - len(last), tenant)
            elif name == priority:
                last += self._bands[name].last(waiting, max_count - len(last), own)
            if len(last) >= max_count:
                break
        return last

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt of a routed request."""
        self._band(waiting.request).taken(waiting, uncached)

    def served(self, request: Request, tokens: int) -> None:
        """Charge output tokens."""
        self._band(request).served(request, tokens)

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if the tenant is behind others waiting in this band."""
        return self._band(waiting.request).underserved(waiting)

    def priority(self, waiting: QueuedRequest, above: bool) -> int | None:
        """Return the request's priority: tenants above their share yield within it."""
        return max(-_HIGHEST, min(2 * waiting.request.priority + above, _HIGHEST))

    def _band(self, request: Request) -> Fair:
        return self._bands.get(request.priority) or Fair(self.params)
