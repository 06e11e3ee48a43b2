"""Sharing between tenants: counters by tenant, and fair shares by virtual token counters."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.control.admission.queue_order import Heap, QueuedRequest, QueueOrder
from pigou.control.admission.usage_prices import FleetRates
from pigou.control.peers.allowance import TokenCharges
from pigou.control.peers.bookings import TenantService
from pigou.request import Flags, Request

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


class Served(NamedTuple):
    """Service of a tenant."""

    prompt: float = 0.0  # uncached tokens
    output: float = 0.0  # tokens
    kv_token_s: float = 0.0  # tokens of KV times seconds that they were held


class ShareParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of all orders that share between tenants."""

    within: Within = "fcfs"  # order of one tenant's own requests
    # share of each worker's streams and tokens withheld from tenants above their share of the
    # fleet, while others use it.
    reserve: float = 0.0625
    # streams are long beyond this many times the typical output (`LongStreams`); 0: none is.
    overrun: float = 0.0

    def __post_init__(self) -> None:
        check_bounds("reserve", self.reserve, ge=0, lt=1)
        check_bounds("overrun", self.overrun, ge=0)


class TokenParams(ShareParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of orders whose service is a sum of tokens."""

    input_weight: float = 1.0  # service per uncached prompt token (w_p)
    output_weight: float = 2.0  # service per output token (w_q)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "input_weight", "output_weight", ge=0)
        if self.input_weight == self.output_weight == 0.0:
            raise ConfigError("input_weight and output_weight are both 0; one must be above")

    def service(self, served: Served) -> float:
        """Return the weighted tokens."""
        return self.input_weight * served.prompt + self.output_weight * served.output


class FairParams(TokenParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Fair`."""

    # unused service that a tenant keeps, per unit of weight. 0 is the published rule: a tenant
    # below its share still waits for its turn after each small burst.
    credit: float = 16384.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("credit", self.credit, ge=0)


class Tenant:
    """A tenant's waiting requests and its counter."""

    __slots__ = ("counter", "entry", "name", "queue", "weight")

    def __init__(self, name: str, counter: float) -> None:
        self.name = name
        self.counter = counter
        self.weight = 1.0
        self.queue = Heap()
        self.entry: tuple[Any, int, str] | None = None


class TenantOrder(QueueOrder):
    """Serves the waiting tenant with the lowest counter first; subclasses say what counts.

    Service counts while requests wait. A tenant that starts waiting gets c_f = max(c_f, floor -
    credit); the floor is the highest minimum among waiting tenants so far. Each step costs O(log
    tenants), amortised. Service at other gateways counts (`StreamAllowance`).
    """

    holds_back: ClassVar[bool] = True
    holds: ClassVar[bool] = True
    #: Whether it is told of `began`, `ended` and the time, to count KV and claims.
    follows: ClassVar[bool] = False
    #: Whether it is told of the fleet's rates and prices (`reprice`).
    priced: ClassVar[bool] = False
    #: Whether it says which workers a tenant may use (`allowed`).
    masks: ClassVar[bool] = False
    kind: ClassVar[type[Tenant]] = Tenant

    def __init__(self, params: Any = None, credit: float = 0.0) -> None:
        super().__init__(params)
        self._within = _WITHIN[self.params.within]
        self._tenants: dict[str, Tenant] = {}
        self._counters: list[tuple[Any, int, str]] = []
        self._pushes = 0
        self._credit = credit
        self._base = -credit  # counter of a tenant that is not known, or no more
        self._highest = 0.0  # highest floor so far
        self._max = self._base  # highest counter so far
        self._last: Tenant | None = None
        self._elsewhere: dict[str, int] = {}  # requests of tenants that wait at other gateways
        self.service: dict[str, tuple[int, int]] = {}

    # --- what an order says -------------------------------------------------------------------

    def charge(self, name: str, served: Served) -> None:
        """Count a tenant's service."""
        raise NotImplementedError

    @property
    def token_charges(self) -> TokenCharges:
        """Service per prompt token and per output token."""
        return TokenCharges(self.params.input_weight, self.params.output_weight)

    def rank(self, tenant: Tenant) -> Any:
        """Return the sort key of a waiting tenant; it may only rise without a push."""
        return tenant.counter

    def lift(self, tenant: Tenant) -> None:
        """Raise the counter of a tenant that starts waiting to the floor minus credit."""
        tenant.counter = max(tenant.counter, self._floor())

    def owes(self, tenant: Any, floor: float) -> bool:
        """True if a tenant would gain by being forgotten."""
        return bool(tenant.counter > floor)

    def began(self, request: Request, worker: str, now: int) -> None:
        """Record that a request was sent to a worker (`follows`)."""

    def ended(self, request: Request, now: int) -> None:
        """Record that a request left its worker (`follows`)."""

    def reprice(self, rates: FleetRates) -> None:
        """Take the fleet's rates and prices of the moment (`priced`)."""

    def allowed(self, request: Request, ids: Sequence[str], room: Flags) -> Flags:
        """Return the workers with room that a request may use, (workers,) (`masks`)."""
        return room

    # --- a queue order ------------------------------------------------------------------------

    @property
    def reserve(self) -> float:
        """Share of each worker closed to tenants above their share of the fleet."""
        reserve: float = self.params.reserve
        return reserve

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request; lift its tenant if it starts waiting."""
        name = waiting.request.account
        tenant = self._tenant(name)
        tenant.weight = waiting.weight
        if not tenant.queue:
            self.lift(tenant)
            tenant.queue.add(self._within(waiting), waiting)
            self._push(tenant)
        else:
            tenant.queue.add(self._within(waiting), waiting)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a waiting request."""
        tenant = self._tenants.get(waiting.request.account)
        if tenant is None or tenant.entry is None:
            return
        tenant.queue.remove(waiting)
        if not tenant.queue:
            tenant.entry = None
            self._last = tenant

    def first(self, now: int) -> QueuedRequest | None:
        """Return the first request of the tenant with the lowest counter."""
        tenant = self._lowest()
        if tenant is None or not (self.blocked or self.held):
            return None if tenant is None else tenant.queue.first()
        waiting = [tenant for tenant in self._served() if tenant.entry]
        tenant = min(waiting, key=lambda one: (self.rank(one), one.entry or ()), default=None)
        return None if tenant is None else tenant.queue.first(self.blocked)

    def peer_service(self, change: TenantService, weight: float) -> None:
        """Count another gateway's service of a tenant, and its requests waiting there."""
        name = change.tenant
        if change.waiting:
            waiting = self._elsewhere.pop(name, 0) + change.waiting
            if waiting > 0:
                tenant = self._tenant(name)
                tenant.weight = weight
                if waiting == change.waiting and not tenant.queue:  # it begins to wait
                    self.lift(tenant)
                self._elsewhere[name] = waiting
        served = Served(change.prompt_tokens, change.output_tokens, change.kv_token_ms / 1000)
        if any(served):
            self.charge(name, served)

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return the tenant's own requests behind this one; never another tenant's."""
        tenant = self._tenants.get(waiting.request.account)
        if tenant is None or self.params.within == "fcfs":
            return []
        return tenant.queue.last(max_count, self._within(waiting))

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt of a routed request."""
        self.remove(waiting)
        self._count(waiting.request.account, uncached, 0)
        self.charge(waiting.request.account, Served(uncached))

    def served(self, request: Request, tokens: int) -> None:
        """Charge output tokens."""
        self._count(request.account, 0, tokens)
        self.charge(request.account, Served(0, tokens))

    def kv_token_ms(self, tenant: str) -> int:
        """Return the KV token-milliseconds of a tenant here; 0 where they do not count."""
        return 0

    def counter(self, tenant: str) -> float:
        """Return a tenant's service over its weight."""
        known = self._tenants.get(tenant)
        return self._base if known is None else known.counter

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if the tenant is behind another by half the credit; False without credit."""
        margin = 0.5 * self._credit
        return margin > 0.0 and self.counter(waiting.request.account) < self._max - margin

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

    @property
    def contended(self) -> bool:
        """True if a request waits here or at another gateway; else service costs no tenant."""
        return self._lowest() is not None or bool(self._elsewhere)

    def _served(self) -> list[Any]:
        """Return the tenants with a request that may go."""
        tenants = (one for one in self._tenants.values() if one.name not in self.held)
        return [tenant for tenant in tenants if tenant.queue.first(self.blocked)]

    def _raise(self, name: str, service: float) -> None:
        """Add service over weight to a tenant's counter."""
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
        return self._highest - self._credit

    def _lowest(self) -> Tenant | None:
        heap = self._counters
        while heap:
            entry = heap[0]
            tenant = self._tenants.get(entry[2])
            if tenant is None or tenant.entry is not entry:
                heapq.heappop(heap)
            elif entry[0] < self.rank(tenant):
                heapq.heappop(heap)
                self._push(tenant)
            else:
                return tenant
        return None

    def _push(self, tenant: Tenant) -> None:
        self._pushes += 1
        tenant.entry = (self.rank(tenant), self._pushes, tenant.name)
        heapq.heappush(self._counters, tenant.entry)

    def _push_all(self) -> None:
        """Sort all waiting tenants anew, their ranks having changed."""
        self._counters = []
        for tenant in self._tenants.values():
            if tenant.queue:
                self._push(tenant)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget()
            tenant = self._tenants[name] = self.kind(name, self._base)
        return tenant

    def _forget(self) -> None:
        """Forget tenants that would restart at the floor anyway."""
        floor = self._floor()
        self._base = floor
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.queue or self.owes(tenant, floor) or name in self._elsewhere
        }


class Fair(TenantOrder):
    """Serves the tenant with the lowest virtual token counter first (Sheng et al., OSDI 2024).

    Counter c_f is tenant f's service over its weight: w_p per uncached and w_q per output token,
    counted while requests wait.

    Two backlogged tenants differ by at most 2 max(w_p L, w_q M) + credit: L is the longest prompt,
    M the most tokens in flight, each over the lower weight.
    """

    Params: ClassVar[type[msgspec.Struct]] = FairParams

    def __init__(self, params: FairParams | None = None) -> None:
        params = params or FairParams()
        super().__init__(params, params.credit)

    def charge(self, name: str, served: Served) -> None:
        """Count w_p per prompt token and w_q per output token."""
        if self.contended:
            self._raise(name, self.params.service(served))


class PriorityFair(QueueOrder):
    """Lower `Request.priority` first; `Fair` within one priority, with counters of its own.

    Tenants choose their priorities: if they are not trusted, use `fair` with `within: priority`.
    """

    Params: ClassVar[type[msgspec.Struct]] = FairParams
    holds_back: ClassVar[bool] = True
    holds: ClassVar[bool] = True

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
        for _, band in sorted(one for one in self._bands.items() if not one[1].idle):
            band.blocked, band.held = self.blocked, self.held
            if (waiting := band.first(now)) is not None:
                return waiting
        return None

    def last(self, waiting: QueuedRequest, max_count: int, own: bool) -> list[QueuedRequest]:
        """Return requests of higher priority numbers, highest first; then as `Fair`."""
        last: list[QueuedRequest] = []
        priority = waiting.request.priority
        tenant = waiting.request.account if own else None
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
