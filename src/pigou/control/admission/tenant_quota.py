"""The bound of the queue, and each tenant's share of it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pigou.control.admission.queue_order import Waiting
from pigou.request import SECOND

#: All that wait may be this many times the bound, so that reserved shares stay open.
_OVERFLOW = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a newcomer may not wait; `tenant`: its tenant's own share is full, not the fleet."""

    reason: str
    tenant: bool


@dataclass(slots=True)
class _Held:
    requests: int = 0
    tokens: int = 0


class Shares:
    """Who may begin to wait.

    While requests (and tokens) are below their bound, everybody may. When they are not, a tenant
    may as long as it holds less than its share: bound * its weight / weights of all tenants that
    were here lately. So a flood of one tenant fills the bound, and the others still find their
    shares: all together stay below twice the bound, but for one request of each tenant that
    holds none.
    """

    def __init__(self, activity: Activity, most: int, most_tokens: int = 0) -> None:
        """Start empty.

        Args:
            activity: which tenants there are to share with.
            most: requests that may wait; 0: nobody.
            most_tokens: tokens that they may ask for; 0 for no bound.
        """
        self.most = most
        self.most_tokens = most_tokens
        self.requests = 0
        self.tokens = 0
        self._activity = activity
        self._held: dict[str, _Held] = {}
        self._groups: dict[str, tuple[str, int, int]] = {}

    def held(self, tenant: str) -> tuple[int, int]:
        """Return requests and tokens that a tenant has waiting."""
        found = self._held.get(tenant)
        return (0, 0) if found is None else (found.requests, found.tokens)

    def add(self, waiting: Waiting) -> None:
        """Count a request that waits."""
        self._count(waiting.request.tenant, waiting.request.sequences, waiting.tokens)

    def remove(self, waiting: Waiting) -> None:
        """Count out a request that waited."""
        self._count(waiting.request.tenant, -waiting.request.sequences, -waiting.tokens)

    def hold(self, waiting: Waiting) -> None:
        """Count the sequences of a group that follow this one, in place of those before."""
        request = waiting.request
        self.release(request.group)
        if request.held > 0:
            self._groups[request.group] = request.tenant, request.held, waiting.held_tokens
            self._count(request.tenant, request.held, waiting.held_tokens)

    def release(self, group: str) -> None:
        """Count out what follows of a group; an unknown one is no error."""
        tenant, sequences, tokens = self._groups.pop(group, ("", 0, 0))
        if sequences:
            self._count(tenant, -sequences, -tokens)

    @property
    def held_back(self) -> int:
        """Sequences of groups that were not submitted yet."""
        return sum(sequences for _, sequences, _ in self._groups.values())

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        held = self._held.setdefault(tenant, _Held())
        held.requests += requests
        held.tokens += tokens
        self.requests += requests
        self.tokens += tokens
        if held.requests == 0:
            del self._held[tenant]

    def refusal(self, waiting: Waiting, without: Sequence[Waiting] = ()) -> Refusal | None:
        """Return why a newcomer may not wait; None when it may, were those `without` gone."""
        tenant = waiting.request.tenant
        requests, tokens = self.held(tenant)
        own = [each for each in without if each.request.tenant == tenant]
        requests -= sum(each.request.sequences for each in own)
        tokens -= sum(each.tokens for each in own)
        part = self._activity.part(tenant, waiting.weight)
        asks = waiting.request.sequences + waiting.request.held
        total = self.requests - sum(each.request.sequences for each in without)
        found = _refusal("requests", self.most, total, requests, asks, part)
        if found is None and self.most_tokens:
            asks = waiting.tokens + waiting.held_tokens
            total = self.tokens - sum(each.tokens for each in without)
            found = _refusal("tokens", self.most_tokens, total, tokens, asks, part)
        return found


def _refusal(what: str, most: int, total: int, held: int, asks: int, part: float) -> Refusal | None:
    if total + asks <= most or (most > 0 and total == 0):
        return None
    share = most * part
    within = held + asks <= share or (most > 0 and held == 0 and part < 1.0)
    if within and (total + asks <= _OVERFLOW * most or held == 0):
        return None
    several = f"; n and prompt ask for {asks} more: send fewer at once" if asks > 1 else ""
    several = several if what == "requests" else ""
    if part < 1.0 and not within:
        text = f"the tenant's share of the queue is full: {held} of {share:.0f} {what}"
        return Refusal(text + several, tenant=True)
    return Refusal(f"the queue is full: {total} of {most} {what}{several}", tenant=False)


#: A tenant counts among those that share the fleet until so long after its last request came or
#: ended.
LINGERS = 10 * SECOND


class Activity:
    """The tenants that share the fleet now, and what each has of it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._weights = 0.0
        self._streams: Counter[str] = Counter()
        self._total = 0

    def seen(self, tenant: str, weight: float, now: int) -> None:
        """A request of a tenant came, or ended."""
        if len(self._seen) == 1 and tenant in self._seen:  # nobody else shares the fleet
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
        """Return a tenant's weight over that of all that share the fleet, itself among them."""
        _, before = self._seen.get(tenant, (0, 0.0))
        return weight / max(weight, self._weights - before + weight)

    def began(self, tenant: str, sequences: int = 1) -> None:
        """A request of a tenant was sent to a worker."""
        self._streams[tenant] += sequences
        self._total += sequences

    def ended(self, tenant: str, sequences: int = 1) -> None:
        """A request of a tenant left its worker."""
        self._total -= sequences
        self._streams[tenant] -= sequences
        if not self._streams[tenant]:
            del self._streams[tenant]

    def above(self, tenant: str, weight: float) -> bool:
        """Whether a tenant has more than its part of what is in flight, and others share it."""
        part = self.part(tenant, weight)
        return part < 1.0 and self._streams[tenant] > part * self._total
