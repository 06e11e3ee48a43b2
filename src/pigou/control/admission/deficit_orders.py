"""Orders that serve the longest cached prefix of tenants with a deficit."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from pigou.config import ConfigError, check_bounds
from pigou.control.admission.fair_order import Served, Tenant, TenantOrder, TokenParams
from pigou.control.admission.queue_order import QueuedRequest
from pigou.request import Flags, Request

#: Blocks whose dispatch is remembered.
_MAX_BLOCKS = 65_536


class DlpmParams(TokenParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Dlpm`."""

    quantum: float = 4096.0  # service that a refill adds, per weight (Q)
    # refills that a tenant keeps while none of its requests waits, per weight; 0 is the published
    # rule, under which it waits a turn after each small burst.
    credit: float = 16384.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("quantum", self.quantum, gt=0)
        check_bounds("credit", self.credit, ge=0)
        if self.within != "fcfs":
            raise ConfigError(
                f"within is {self.within!r}: this order serves the longest prefix; leave it out"
            )


class _DlpmTenant(Tenant):
    __slots__ = ("deficit", "refills")

    def __init__(self, name: str, counter: float) -> None:
        super().__init__(name, counter)
        self.deficit = 0.0
        self.refills = -1.0  # refills of everybody when it last waited; -1: never


class Dlpm(TenantOrder):
    """Deficit longest prefix match (Cao et al., arXiv 2501.14312).

    The longest cached prefix goes first, of tenants with a deficit above 0; of equal prefixes that
    of the largest deficit per weight. A tenant's deficit falls by what is computed for it: w_p per
    uncached prompt token, w_q per output token. When nobody that waits has any, each of them gets Q
    times its weight until one is above 0.

    Cached is what a worker held when the request came, and what was sent to workers since. A step
    costs O(tenants that wait), and O(blocks) once for each request.
    """

    Params: ClassVar[type[msgspec.Struct]] = DlpmParams
    kind: ClassVar[type[Tenant]] = _DlpmTenant

    def __init__(self, params: DlpmParams | None = None) -> None:
        super().__init__(params)
        self._refills = 0.0
        self._sent: OrderedDict[int, None] = OrderedDict()  # router keys of blocks, newest last
        # waiting requests by the key of the first block that is not cached
        self._missing: dict[int, dict[str, tuple[QueuedRequest, int]]] = {}
        self._matched: dict[str, tuple[int, int]] = {}  # tokens, and the key that is missing

    def deficit(self, tenant: str) -> float:
        """Return the service that a tenant may still have."""
        known: Any = self._tenants.get(tenant)
        return 0.0 if known is None else known.deficit

    def charge(self, name: str, served: Served) -> None:
        """Take service from the deficit."""
        tenant: Any = self._tenant(name)
        tenant.deficit -= self.params.service(served)

    def owes(self, tenant: Any, floor: float) -> bool:
        """True if it has less than a newcomer would get."""
        return bool(tenant.deficit < 0.0)

    def lift(self, tenant: Any) -> None:
        """Add refills that it missed, up to the credit; limit debts of when nobody waited."""
        quantum, credit = (n * tenant.weight for n in (self.params.quantum, self.params.credit))
        if tenant.refills >= 0.0 and tenant.deficit < credit > 0.0:
            missed = self._refills - tenant.refills
            tenant.deficit = min(tenant.deficit + missed * quantum, credit)
        if not self.contended:
            tenant.deficit = max(tenant.deficit, -quantum)

    def add(self, waiting: QueuedRequest) -> None:
        """Add a waiting request."""
        tenant = self._tenant(waiting.request.account)
        tenant.weight = waiting.weight
        if not tenant.queue:
            self.lift(tenant)
        self._wait(tenant, waiting, waiting.request.prompt - waiting.uncached, 0)
        if tenant.entry is None:
            self._push(tenant)

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a waiting request."""
        super().remove(waiting)
        tenant: Any = self._tenants[waiting.request.account]
        tenant.refills = self._refills
        _, missing = self._matched.pop(waiting.request.id, (0, 0))
        held = self._missing.get(missing)
        if held is not None:
            held.pop(waiting.request.id)
            if not held:
                del self._missing[missing]

    def first(self, now: int) -> QueuedRequest | None:
        """Return the longest prefix of the tenants with a deficit, after a refill if none has."""
        waiting = self._served()
        if not waiting:
            return None
        quantum = self.params.quantum
        if all(tenant.deficit <= 0.0 for tenant in waiting):
            refills = min(1 + -tenant.deficit // (quantum * tenant.weight) for tenant in waiting)
            self._refills += refills
            for tenant in waiting:
                tenant.deficit += refills * quantum * tenant.weight
        best = min((t for t in waiting if t.deficit > 0.0), key=self._rank)
        first: QueuedRequest = best.queue.first(self.blocked)
        return first

    def underserved(self, waiting: QueuedRequest) -> bool:
        """True if a tenant that waits has less deficit per weight by half the credit."""
        tenants: list[Any] = [tenant for tenant in self._tenants.values() if tenant.queue]
        lowest = min((tenant.deficit / tenant.weight for tenant in tenants), default=math.inf)
        own = self.deficit(waiting.request.account) / waiting.weight
        return bool(own - lowest > 0.5 * self.params.credit > 0.0)

    def _rank(self, tenant: Any) -> tuple[int, float, int]:
        matched, serial = self._key(tenant.queue.first(self.blocked))
        return matched, -tenant.deficit / tenant.weight, serial

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt; its blocks are cached from now on."""
        super().taken(waiting, uncached)
        for key in _blocks(waiting.request)[1]:
            self._sent[key] = None
            self._sent.move_to_end(key)
            for other, index in self._missing.pop(key, {}).values():
                tenant = self._tenants[other.request.account]
                tenant.queue.remove(other)
                self._wait(tenant, other, 0, index + 1)
        while len(self._sent) > _MAX_BLOCKS:
            self._sent.popitem(last=False)

    def _wait(self, tenant: Tenant, waiting: QueuedRequest, cached: int, begin: int) -> None:
        """Queue a request by its prefix, of which `cached` tokens or `begin` blocks are known."""
        size, keys = _blocks(waiting.request)
        index = max(begin, min(cached // size, len(keys))) if size else 0
        while index < len(keys) and keys[index] in self._sent:
            index += 1
        missing = keys[index] if index < len(keys) else 0
        if missing:
            self._missing.setdefault(missing, {})[waiting.request.id] = waiting, index
        self._matched[waiting.request.id] = max(cached, index * size), missing
        tenant.queue.add(self._key(waiting)[0], waiting)

    def _key(self, waiting: QueuedRequest) -> tuple[int, int]:
        return -self._matched[waiting.request.id][0], waiting.serial


class D2lpmParams(DlpmParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `D2lpm`."""

    # service that a refill adds to a tenant's deficits of workers (Q_w).
    worker_quantum: float = 1024.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds("worker_quantum", self.worker_quantum, gt=0)


class _D2lpmTenant(_DlpmTenant):
    __slots__ = ("workers",)

    def __init__(self, name: str, counter: float) -> None:
        super().__init__(name, counter)
        self.workers: dict[str, float] = {}  # deficits


class D2lpm(Dlpm):
    """Distributed deficit longest prefix match (Cao et al., arXiv 2501.14312).

    As `Dlpm`, and a tenant goes only to workers of which it has a deficit above 0. When it has none
    of those with room, each of these gets Q_w until one has. So no worker is idle, and a tenant's
    service on two workers that had room all the while differs by at most

        Q_w + w_p L + w_q M

    L is its longest prompt, M its most output in flight on a worker. Each gateway keeps deficits of
    what it sent itself: with G gateways the bound is G times that.
    """

    Params: ClassVar[type[msgspec.Struct]] = D2lpmParams
    follows: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    kind: ClassVar[type[Tenant]] = _D2lpmTenant

    def __init__(self, params: D2lpmParams | None = None) -> None:
        super().__init__(params or D2lpmParams())
        self._running: dict[str, str] = {}  # workers by request

    def allowed(self, request: Request, ids: Sequence[str], room: Flags) -> Flags:
        """Return the workers of those with room that the tenant may use, (workers,)."""
        tenant: Any = self._tenant(request.account)
        workers = tenant.workers
        if len(workers) > 2 * len(ids) + 16:  # most of them are gone
            for worker in set(workers).difference(ids):
                del workers[worker]
        rows = np.flatnonzero(room)
        if not len(rows):
            return room
        names = [ids[row] for row in rows.tolist()]
        deficits = np.array([workers.get(name, 0.0) for name in names])
        quantum = self.params.worker_quantum
        if deficits.max() <= 0.0:
            deficits += (1.0 + -deficits.max() // quantum) * quantum
            workers.update(zip(names, deficits.tolist(), strict=True))
        allowed = np.zeros_like(room)
        allowed[rows] = deficits > 0.0
        return allowed

    def began(self, request: Request, worker: str, now: int) -> None:
        """Note the worker."""
        self._running[request.id] = worker

    def taken(self, waiting: QueuedRequest, uncached: int) -> None:
        """Charge the prompt."""
        super().taken(waiting, uncached)
        self._charge_worker(waiting.request, Served(uncached))

    def served(self, request: Request, tokens: int) -> None:
        """Charge output tokens."""
        super().served(request, tokens)
        self._charge_worker(request, Served(0, tokens))

    def ended(self, request: Request, now: int) -> None:
        """Forget the worker."""
        self._running.pop(request.id, None)

    def owes(self, tenant: Any, floor: float) -> bool:
        """True if it has less than a newcomer would get, in all or of a worker."""
        return super().owes(tenant, floor) or min(tenant.workers.values(), default=0.0) < 0.0

    def _charge_worker(self, request: Request, served: Served) -> None:
        worker = self._running.get(request.id)
        if worker is not None:
            tenant: Any = self._tenant(request.account)
            workers = tenant.workers
            workers[worker] = workers.get(worker, 0.0) - self.params.service(served)


def _blocks(request: Request) -> tuple[int, list[int]]:
    """Return a block's tokens and the router keys of a prompt's blocks."""
    size, keys = next(iter(request.keys.items()), (0, None))
    if keys is not None:
        return size, keys.tolist()
    hashes = request.hashes
    return (request.prompt // len(hashes), hashes[:, 1].tolist()) if len(hashes) else (0, [])
