"""The bound of the queue, and each tenant's share of it."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.control.admission.activity import Activity
from pigou.control.admission.waiting import Waiting

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
    """Who may begin to wait; nobody who waits is ever put out for another.

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

    def held(self, tenant: str) -> tuple[int, int]:
        """Return requests and tokens that a tenant has waiting."""
        found = self._held.get(tenant)
        return (0, 0) if found is None else (found.requests, found.tokens)

    def add(self, waiting: Waiting) -> None:
        """Count a request that waits."""
        held = self._held.get(waiting.request.tenant)
        if held is None:
            held = self._held[waiting.request.tenant] = _Held()
        held.requests += 1
        held.tokens += waiting.tokens
        self.requests += 1
        self.tokens += waiting.tokens

    def remove(self, waiting: Waiting) -> None:
        """Count out a request that waited."""
        held = self._held[waiting.request.tenant]
        held.requests -= 1
        held.tokens -= waiting.tokens
        self.requests -= 1
        self.tokens -= waiting.tokens
        if held.requests == 0:
            del self._held[waiting.request.tenant]

    def refusal(self, waiting: Waiting) -> Refusal | None:
        """Return why a newcomer may not wait; None when it may."""
        tenant = waiting.request.tenant
        requests, tokens = self.held(tenant)
        part = self._activity.part(tenant, waiting.weight)
        found = _refusal("requests", self.most, self.requests, requests, 1, part)
        if found is None and self.most_tokens:
            asks = waiting.tokens
            found = _refusal("tokens", self.most_tokens, self.tokens, tokens, asks, part)
        return found


def _refusal(what: str, most: int, total: int, held: int, asks: int, part: float) -> Refusal | None:
    if total + asks <= most or (most > 0 and total == 0):
        return None
    share = most * part
    within = held + asks <= share or (most > 0 and held == 0 and part < 1.0)
    if within and (total + asks <= _OVERFLOW * most or held == 0):
        return None
    if part < 1.0 and not within:
        return Refusal(
            f"the tenant's share of the queue is full: {held} of {share:.0f} {what}", tenant=True
        )
    return Refusal(f"the queue is full: {total} of {most} {what}", tenant=False)
