"""Orders that share between tenants by dominant shares, credits, or prices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import msgspec

from pigou.config import check_bounds
from pigou.control.admission.fair_order import (
    Served,
    ShareParams,
    Tenant,
    TenantOrder,
    TokenParams,
)
from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.admission.usage_prices import FleetRates, KVResidency
from pigou.control.peers.allowance import TokenCharges
from pigou.games.drf import DominantShares
from pigou.request import SECOND, Request

#: Output that is charged when a request is sent: what is expected of it, or its `max_tokens`.
Claim = Literal["expected", "max_tokens"]
#: Capacities of prefill, decode and KV for use in seconds of the fleet, and what clears use.
_SECOND_EACH, _ALL_BACK = (1.0, 1.0, 1.0), (-math.inf,) * 3
#: A tenant that was idle for so long no longer counts as a user (`karma`), in nanoseconds.
_IDLE_NS = 60 * SECOND
#: Weight of the last quantum in the learned capacity.
_NEW = 0.2
_PRICES = ("prefill_s", "output_s", "kv_token_s")


class UsageParams(ShareParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Drf` and `MarketOrder`."""

    claim: Claim = "expected"  # output charged when sent; what is not used is refunded
    credit: float = 1.0  # unused service that a tenant keeps, seconds of the fleet per weight

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("credit", self.credit, ge=0)


class _UsageTenant(Tenant):
    __slots__ = ("base", "kv_token_s")

    def __init__(self, name: str, counter: float) -> None:
        super().__init__(name, counter)
        self.base = counter  # counter without usage
        self.kv_token_s = 0.0  # charged so far


class UsageOrder(TenantOrder):
    """Charges prompts, output and KV residency, each for what is used.

    Output is claimed when a request is sent, and the rest of the claim is refunded when it ends.
    Residency counts from dispatch to end while requests wait, however slowly a client reads.
    """

    Params: ClassVar[type[msgspec.Struct]] = UsageParams
    follows: ClassVar[bool] = True
    priced: ClassVar[bool] = True
    kind: ClassVar[type[Tenant]] = _UsageTenant

    def __init__(self, params: UsageParams | None = None) -> None:
        params = params or UsageParams()
        super().__init__(params, params.credit)
        self._kv = KVResidency()
        self._rates = FleetRates()
        self._now = self._contended_ns = 0
        self._claims: dict[str, tuple[float, FleetRates]] = {}

    def apply(self, tenant: Any, served: Served, rates: FleetRates) -> None:
        """Add service to a tenant's counter."""
        raise NotImplementedError

    def charge(self, name: str, served: Served) -> None:
        """Count service; what nobody waited for becomes a debt of at most the credit."""
        tenant: Any = self._tenant(name)
        before = tenant.counter
        self._apply(tenant, served, self._rates)
        excess = tenant.counter - max(before, self._highest + self._credit)
        if excess > 0.0 and not self.contended:
            tenant.counter -= excess
            tenant.base -= excess

    def rank(self, tenant: Any) -> Any:
        """Return the counter, with the KV held so far."""
        self._accrue(tenant)
        return tenant.counter

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        self._advance(waiting.since)
        super().add(waiting)

    def first(self, now: int) -> QueuedRequest | None:
        """Return the next request."""
        self._advance(now)
        return super().first(now)

    def began(self, request: Request, worker: str, now: int) -> None:
        """Hold the prompt's KV."""
        self._advance(now)
        self._kv.began(request, worker, self._contended_ns)

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt, and claim output."""
        super().taken(waiting, uncached)
        request = waiting.request
        tokens = request.max_tokens if self.params.claim == "max_tokens" else waiting.output
        if self.contended:
            claim = float(min(tokens, request.max_tokens) * request.sequences)
            self._claims[request.id] = claim, self._rates
            self._apply(self._tenant(request.account), Served(0.0, claim), self._rates)

    def served(self, request: Request, tokens: int) -> None:
        """Charge the output tokens beyond the claim."""
        self._count(request.account, 0, tokens)
        self._kv.grew(request.id, tokens, self._contended_ns)
        left, rates = self._claims.get(request.id, (0.0, self._rates))
        if left:
            self._claims[request.id] = max(0.0, left - tokens), rates
        if tokens > left:
            self.charge(request.account, Served(0.0, tokens - left))

    def ended(self, request: Request, now: int) -> None:
        """Refund the rest of the claim, and free the KV."""
        self._advance(now)
        self._kv.ended(request.id, self._contended_ns)
        left, rates = self._claims.pop(request.id, (0.0, self._rates))
        if left:
            self._apply(self._tenant(request.account), Served(0.0, -left), rates)

    def kv_token_ms(self, tenant: str) -> int:
        """Return the KV token-milliseconds of a tenant here."""
        return round(1000.0 * self._kv.token_s(tenant, self._contended_ns))

    def reprice(self, rates: FleetRates) -> None:
        """Take the fleet's rates and prices."""
        self._rates = rates

    def _advance(self, now: int) -> None:
        if now > self._now:
            if self.contended:
                self._contended_ns += now - self._now
            self._now = now

    def _accrue(self, tenant: Any) -> None:
        held = self._kv.token_s(tenant.name, self._contended_ns)
        if held > tenant.kv_token_s:
            served = Served(kv_token_s=held - tenant.kv_token_s)
            tenant.kv_token_s = held
            self.apply(tenant, served, self._rates)

    def _apply(self, tenant: Any, served: Served, rates: FleetRates) -> None:
        before = tenant.counter
        self.apply(tenant, served, rates)
        self._max = max(self._max, tenant.counter)
        if tenant.counter < before and tenant.entry is not None:
            self._push(tenant)


class DrfParams(UsageParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Drf`; capacities of 0 are learned from the fleet."""

    prefill_tokens_s: float = 0.0  # uncached prompt tokens per second
    output_tokens_s: float = 0.0  # output tokens per second
    kv_tokens: float = 0.0  # KV tokens at once
    is_shared: bool = False  # with `prefill_tokens_s`: prefill and decode are one resource

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill_tokens_s", "output_tokens_s", "kv_tokens"):
            check_bounds(name, getattr(self, name), ge=0)


class Drf(UsageOrder):
    """Serves the tenant with the least dominant share first (Ghodsi et al., NSDI 2011), over time.

        s_f = max(u_prefill, u_decode, u_kv) / w_f

    u is cumulative use over capacity, in seconds of the fleet: of prompt tokens, output tokens and
    KV token-seconds. Where workers do both, prefill and decode are one resource, and u adds up.
    Use counts anew when a tenant that was below the floor returns. Where nobody waits, it becomes a
    debt of at most `credit`: a flood sent in such moments would be free otherwise.
    """

    Params: ClassVar[type[msgspec.Struct]] = DrfParams

    def __init__(self, params: DrfParams | None = None) -> None:
        super().__init__(params or DrfParams())
        self._shares = DominantShares(_SECOND_EACH)

    def apply(self, tenant: Any, served: Served, rates: FleetRates) -> None:
        """Add to the use of each resource, and set the dominant share."""
        capacities = self._capacities(rates)
        seconds = [s / c if c else 0.0 for s, c in zip(served, capacities, strict=True)]
        if self.params.is_shared if self.params.prefill_tokens_s else rates.is_shared:
            seconds[:2] = [sum(seconds[:2]), 0.0]
        self._shares.charge(tenant.name, seconds)
        tenant.counter = tenant.base + self._shares.share(tenant.name, tenant.weight)

    def lift(self, tenant: Any) -> None:
        """Begin anew from the floor minus credit, if that is above the dominant share."""
        self._accrue(tenant)
        floor = self._floor()
        if tenant.counter < floor:
            tenant.base = tenant.counter = floor
            self._shares.charge(tenant.name, _ALL_BACK)

    @property
    def token_charges(self) -> TokenCharges:
        """Seconds of the fleet per token."""
        prompt, output, _ = self._capacities(self._rates)
        return TokenCharges(1.0 / (prompt or 1.0), 1.0 / (output or 1.0))

    def _forget(self) -> None:
        before = set(self._tenants)
        super()._forget()
        for name in before - set(self._tenants):
            self._shares.charge(name, _ALL_BACK)

    def _capacities(self, rates: FleetRates) -> tuple[float, float, float]:
        own = self.params
        return (
            own.prefill_tokens_s or rates.prefill_tokens_s,
            own.output_tokens_s or rates.output_tokens_s,
            own.kv_tokens or rates.kv_tokens,
        )


class MarketOrder(UsageOrder):
    """Serves whose budget covers its next request first: a Fisher market at the fleet's prices.

        F_f = (spent_f + price of the next request) / w_f

    A tenant has w_f credits a second. It spends p_prefill per uncached token, p_output per output
    token and p_kv per token of KV and second (`fleet_rates`): own seconds, tolls and memory prices
    of the moment, scaled so that a second of the fleet costs a credit, the mean of one that
    prefills and one that decodes. The least F is who can pay soonest. Unused budget is kept up to
    `credit`.
    """

    def apply(self, tenant: Any, served: Served, rates: FleetRates) -> None:
        """Add the price of service."""
        price = rates.prefill_s * served.prompt + rates.output_s * served.output
        price += rates.kv_token_s * served.kv_token_s
        tenant.counter += price / tenant.weight

    def rank(self, tenant: Any) -> Any:
        """Return what is spent, and the price of the next request, over the budget."""
        self._accrue(tenant)
        waiting, rates = tenant.queue.first(), self._rates
        if waiting is None:
            return tenant.counter
        output = waiting.output * waiting.request.sequences
        price = rates.prefill_s * waiting.uncached + rates.output_s * output
        return tenant.counter + price / tenant.weight

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        super().add(waiting)
        self._sort(waiting)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a waiting request, and price the next."""
        super().remove(waiting)
        self._sort(waiting)

    def reprice(self, rates: FleetRates) -> None:
        """Take the fleet's prices, scale them to a credit a second, and sort by them."""
        prompts = rates.prefill_tokens_s * rates.prefill_s
        scale = 2.0 / (prompts + rates.output_tokens_s * rates.output_s)
        prices = {name: scale * getattr(rates, name) for name in _PRICES}
        super().reprice(dataclasses.replace(rates, **prices))
        self._push_all()

    @property
    def token_charges(self) -> TokenCharges:
        """Prices of the moment."""
        return TokenCharges(self._rates.prefill_s, self._rates.output_s)

    def _sort(self, waiting: QueuedRequest) -> None:
        tenant = self._tenants.get(waiting.request.account)
        if tenant is not None and tenant.queue:
            self._push(tenant)


class KarmaParams(TokenParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `KarmaOrder`."""

    guaranteed: float = 0.5  # part of its fair share that a tenant has without credits (alpha)
    quantum_s: float = 1.0
    service_s: float = 0.0  # service of the fleet per second; 0 learns it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("guaranteed", self.guaranteed, ge=0, le=1)
        check_bounds("quantum_s", self.quantum_s, gt=0)
        check_bounds("service_s", self.service_s, ge=0)


class _KarmaTenant(Tenant):
    __slots__ = ("credits", "seen", "used")

    def __init__(self, name: str, counter: float) -> None:
        super().__init__(name, counter)
        self.credits = self.used = 0.0  # service; used in this quantum
        self.seen = 0  # nanoseconds


class KarmaOrder(TenantOrder):
    """Serves by credits for service lent to others (Vuppalapati et al., OSDI 2023).

    In each quantum a tenant's fair share f is its part of the fleet's service, by weight, of which
    alpha f is guaranteed. Most credits per weight go first, until the rest of the quantum is no
    more than what is guaranteed and not had: then those below alpha f do. A unit beyond alpha f
    costs a credit. Tenants that left a part of alpha f get a credit for each unit borrowed, fewest
    credits first; (1 - alpha) f credits are free. Credits may fall below 0, so no service is idle.
    """

    Params: ClassVar[type[msgspec.Struct]] = KarmaParams
    kind: ClassVar[type[Tenant]] = _KarmaTenant

    def __init__(self, params: KarmaParams | None = None) -> None:
        super().__init__(params)
        self._quantum_ns = round(self.params.quantum_s * SECOND)
        self._quantum_end = 0
        self._capacity: float = self.params.service_s * self.params.quantum_s
        self._weights = 0.0  # sum of the users' weights
        self._left = self._capacity  # service that the quantum still has
        self._owed = 0.0  # guaranteed service that users have not had in it
        self._due = False  # the guaranteed parts come first
        self._mean = 0.0  # credits per weight as the quantum began
        self._was_contended = False

    def credits(self, tenant: str) -> float:
        """Return a tenant's credits, in units of service."""
        known: Any = self._tenants.get(tenant)
        return 0.0 if known is None else known.credits

    def charge(self, name: str, served: Served) -> None:
        """Count service, which costs credits beyond the guaranteed part."""
        tenant: Any = self._tenant(name)
        service = self.params.service(served)
        free = max(0.0, self._guaranteed(tenant) - tenant.used)
        tenant.used += service
        tenant.credits -= max(0.0, service - free)
        self._left -= service
        self._owed -= min(service, free)

    def owes(self, tenant: Any, floor: float) -> bool:
        """True if it has less than a newcomer would get."""
        return bool(tenant.credits < 0.0)

    def rank(self, tenant: Any) -> Any:
        """Sort by credits; when it is due, first those below their guaranteed part, by part."""
        guaranteed = self._guaranteed(tenant)
        if self._due and tenant.used < guaranteed:
            return False, tenant.used / guaranteed
        return True, -tenant.credits / tenant.weight

    def lift(self, tenant: Any) -> None:
        """Give a newcomer the mean of all credits; who returns keeps at most that."""
        if tenant.seen > self._quantum_end - _IDLE_NS and tenant.seen:
            return
        users = [user.credits for user in self._users() if user is not tenant]
        mean = sum(users) / len(users) if users else 0.0
        tenant.credits = min(tenant.credits, mean) if tenant.seen else mean
        self._weights += tenant.weight
        self._owed += self._guaranteed(tenant)
        tenant.seen = max(self._quantum_end, 1)
        self._push_all()

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        self._roll(waiting.since)
        super().add(waiting)
        tenant: Any = self._tenants[waiting.request.account]
        tenant.seen = max(tenant.seen, waiting.since)

    def first(self, now: int) -> QueuedRequest | None:
        """Return the next request."""
        self._roll(now)
        if not self._due:
            time_left = self._capacity * (self._quantum_end - now) / self._quantum_ns
            if min(self._left, time_left) <= self._owed:
                self._due = True
                self._push_all()
        return super().first(now)

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if it has more credits per weight than users had as the quantum began."""
        return self.credits(waiting.request.account) > self._mean * waiting.weight

    def _users(self) -> list[Any]:
        tenants: Any = self._tenants.values()
        since = self._quantum_end - _IDLE_NS
        return [t for t in tenants if t.seen and (t.seen > since or t.queue)]

    def _guaranteed(self, tenant: Any) -> float:
        share = self._capacity * tenant.weight / max(self._weights, tenant.weight)
        guaranteed: float = self.params.guaranteed * share
        return guaranteed

    def _roll(self, now: int) -> None:
        """End the quantum: pay those who lent, and give free credits."""
        if now < self._quantum_end:
            return
        users, quanta = self._users(), 1 + (now - self._quantum_end) // self._quantum_ns
        if self._quantum_end:
            self._pay(users)
            contended = self._was_contended and self.contended
            if contended and quanta == 1 and not self.params.service_s:
                whole = sum(user.used for user in users)
                self._capacity += (whole - self._capacity) * (_NEW if self._capacity else 1.0)
        for user in users:
            share = self._guaranteed(user) / self.params.guaranteed if self.params.guaranteed else 0
            user.credits += (1.0 - self.params.guaranteed) * share * quanta
            user.used = 0.0
        self._quantum_end = now - now % self._quantum_ns + self._quantum_ns
        users = self._users()
        self._weights = sum(user.weight for user in users)
        self._left, self._due = self._capacity, False
        self._owed = sum(self._guaranteed(user) for user in users)
        self._mean = sum(user.credits for user in users) / max(self._weights, 1e-9)
        self._was_contended = self.contended
        self._push_all()

    def _pay(self, users: list[Any]) -> None:
        """Pay a credit for each unit borrowed to who donated, fewest credits first."""
        borrowed, donated = 0.0, {}
        for user in users:
            left = self._guaranteed(user) - user.used
            borrowed -= min(left, 0.0)
            if left > 0.0 and not user.queue:
                donated[user.name] = left
        donors = [user for user in users if user.name in donated]
        owed = min(borrowed, sum(donated.values()))
        starts = [(user.credits, 1) for user in donors]
        stops = [(user.credits + donated[user.name], -1) for user in donors]
        level, rising, paid = -math.inf, 0, 0.0
        for at, change in sorted(starts + stops):  # the level rises to who has more
            if rising and paid + rising * (at - level) >= owed:
                break
            paid += rising * (at - level) if rising else 0.0
            level, rising = at, rising + change
        if rising:
            level += (owed - paid) / rising
        for user in donors:
            user.credits += min(donated[user.name], max(0.0, level - user.credits))
