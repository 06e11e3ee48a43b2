"""Budgets over time: sliding windows, claimed when a request is admitted and settled at its end.

Gateways of one fleet tell each other their use by slot, so a window holds the use of all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from pigou.request import SECOND

#: Slots of a window.
_SLOTS = 60
#: Length of a window by period, in nanoseconds; 0 for the life of a session.
PERIODS = {"minute": 60 * SECOND, "day": 86_400 * SECOND, "session": 0}
#: Sessions of a key that are remembered, and for how long after their last request.
MAX_SESSIONS, SESSION_IDLE_NS = 65_536, 3600 * SECOND
_KEEP = 0.98  # weight of earlier requests in what a claimed token takes
_ROUNDING = 1e-9
#: Limits, or amounts, by unit: requests, tokens, seconds on workers, price.
Amounts: TypeAlias = Mapping[str, float]


class Spending(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway used of a budget in a slot; a later message replaces it."""

    purse: bytes  # hash of a key, or a payer
    session: str  # empty for a budget of the key
    budget: str  # period and unit, as in `minute.tokens`
    slot: int
    amount: float


class BudgetState(NamedTuple):
    """A budget at some time."""

    name: str  # period and unit, as in `minute.tokens`
    limit: float
    used: float
    reset_ns: int | None  # until a request fits, or all is free; None for never


class BudgetExceeded(Exception):
    """A request does not fit a budget."""

    def __init__(self, state: BudgetState, requested: float) -> None:
        super().__init__(state.name)
        self.state, self.requested = state, requested


class SlidingBudget:
    """Admits at most `limit` in any window of `window` nanoseconds, or ever (0).

    An amount counts until 60 slots after its own have passed: for a window, and 1/60 more at most.
    """

    def __init__(self, name: str, limit: float, window: int, session: str = "") -> None:
        self.name, self.limit, self.unit = name, limit, name.partition(".")[2]
        self.session = session
        self._width = window // _SLOTS
        self._slots: dict[int, float] = {}  # ascending
        # by slot and gateway ("" for this one): number of its message, and its use
        self._shares: dict[int, dict[str, tuple[int, float]]] = {}

    def state(self, requested: float, now: int) -> BudgetState:
        """Return the budget, with the time until `requested` fits."""
        self.slot(now)
        used = math.fsum(self._slots.values())
        over, wait = used + requested - self.limit, 0
        for slot, amount in self._slots.items() if self._width else ():
            if self._fits(over, requested):
                break
            over, wait = over - amount, (slot + _SLOTS + 1) * self._width - now
        return BudgetState(
            self.name, self.limit, used, wait if self._fits(over, requested) else None
        )

    def _fits(self, over: float, requested: float) -> bool:
        # What is not known before (`requested` 0) needs something left.
        slack = _ROUNDING * self.limit
        return over <= slack if requested > 0 else over < -slack

    def add(self, amount: float, slot: int) -> None:
        """Add to a slot, or give back; nothing where the slot has passed."""
        if slot in self._slots:
            self._put("", 0, slot, max(0.0, self.own(slot) + amount))

    def own(self, slot: int) -> float:
        """Return this gateway's use in a slot; 0 in one that has passed."""
        return self._shares.get(slot, {}).get("", (0, 0.0))[1]

    def own_slots(self) -> list[BudgetSlot]:
        """Return the slots that this gateway used."""
        return [BudgetSlot(self, slot) for slot, shares in self._shares.items() if "" in shares]

    def merge(self, gateway: str, seq: int, spending: Spending, now: int) -> None:
        """Take another gateway's use, from its message number `seq`."""
        slot = spending.slot
        if slot < self.slot(now) - _SLOTS:
            return
        self._open(slot)
        if seq >= self._shares[slot].get(gateway, (0, 0.0))[0]:
            self._put(gateway, seq, slot, spending.amount)

    def slot(self, now: int) -> int:
        """Return the slot of `now`; those that have passed are dropped."""
        slot = now // self._width if self._width else 0
        while self._slots and (oldest := next(iter(self._slots))) < slot - _SLOTS:
            del self._slots[oldest], self._shares[oldest]
        self._open(slot)
        return slot

    def _open(self, slot: int) -> None:
        if slot not in self._slots:
            last = next(reversed(self._slots), slot)
            self._slots[slot], self._shares[slot] = 0.0, {}
            if slot < last:  # another gateway's clock is ahead, or it was slow to tell
                self._slots = dict(sorted(self._slots.items()))

    def _put(self, gateway: str, seq: int, slot: int, amount: float) -> None:
        shares = self._shares[slot]
        shares[gateway] = seq, amount
        self._slots[slot] = math.fsum(used for _, used in shares.values())


class BudgetSlot(NamedTuple):
    """A slot of a budget."""

    budget: SlidingBudget
    slot: int

    def spending(self, purse: bytes) -> Spending:
        """Return this gateway's use, as others are told it."""
        budget, slot = self
        return Spending(purse, budget.session, budget.name, slot, budget.own(slot))


class BudgetClaim(NamedTuple):
    """What a request claimed, and the slots that hold it."""

    amounts: Amounts
    slots: list[BudgetSlot]


class KeyBudgets:
    """Budgets of a key, and of each of its sessions; `limits` are by period.

    Seconds and price claim what a token of earlier requests took, nothing before the first.
    """

    def __init__(self, limits: Mapping[str, Amounts]) -> None:
        self._limits = limits
        self._own = [*self._new("minute"), *self._new("day")]
        self._sessions: OrderedDict[str, list[SlidingBudget]] = OrderedDict()
        self._last: dict[str, int] = {}  # last request by session
        self._claimed_tokens = 0.0  # decayed, as the amounts that they took
        self._took = {"seconds": 0.0, "price": 0.0}

    def _new(self, period: str, session: str = "") -> list[SlidingBudget]:
        limits, window = self._limits.get(period, {}).items(), PERIODS[period]
        return [SlidingBudget(f"{period}.{u}", limit, window, session) for u, limit in limits]

    def claim(self, tokens: float, session: str, now: int) -> BudgetClaim:
        """Claim a request's amounts; raise `BudgetExceeded` for the budget that is free last."""
        per = tokens / self._claimed_tokens if self._claimed_tokens else 0.0
        amounts = {"requests": 1.0, "tokens": tokens}
        amounts |= {unit: took * per for unit, took in self._took.items()}
        budgets, over = [*self._own, *self._of_session(session, now)], []
        for budget in budgets:
            requested = amounts[budget.unit]
            if budget.unit in self._took:  # an estimate above the whole fits an empty budget
                requested = min(requested, budget.limit)
            state = budget.state(requested, now)
            if state.reset_ns != 0:
                over.append(BudgetExceeded(state, requested))
        if over:
            raise max(over, key=lambda refusal: refusal.state.reset_ns or math.inf)
        self._touch(session, now)
        slots = [BudgetSlot(budget, budget.slot(now)) for budget in budgets]
        for budget, slot in slots:
            budget.add(amounts[budget.unit], slot)
        return BudgetClaim(amounts, slots)

    def settle(self, claim: BudgetClaim, used: Amounts, now: int) -> list[BudgetSlot]:
        """Give back what was not used, or add what was used beyond; `{}` gives back all.

        Returns the slots that changed.
        """
        changed = []
        for budget, slot in claim.slots:
            more = used.get(budget.unit, 0.0) - claim.amounts[budget.unit]
            at = BudgetSlot(budget, slot if more < 0 else budget.slot(now))
            budget.add(more, at.slot)
            changed.append(at)
        if used:
            self._claimed_tokens = _KEEP * self._claimed_tokens + claim.amounts["tokens"]
            for unit in self._took:
                self._took[unit] = _KEEP * self._took[unit] + used[unit]
        return changed

    def own(self) -> Iterator[BudgetSlot]:
        """Yield all slots that this gateway used."""
        for budget in (*self._own, *(b for budgets in self._sessions.values() for b in budgets)):
            yield from budget.own_slots()

    def merge(self, gateway: str, seq: int, spending: Spending, now: int) -> None:
        """Take another gateway's use, from its message number `seq`."""
        for budget in self._of_session(spending.session, now) if spending.session else self._own:
            if budget.name == spending.budget:
                budget.merge(gateway, seq, spending, now)
        self._touch(spending.session, now)

    def states(self, session: str, now: int) -> Iterator[BudgetState]:
        """Yield the budgets of the key and a session, with the time until all is free."""
        for budget in (*self._own, *self._sessions.get(session, ())):
            yield budget.state(budget.limit, now)

    def _touch(self, session: str, now: int) -> None:
        if session in self._sessions:
            self._last[session] = now
            self._sessions.move_to_end(session)

    def _of_session(self, session: str, now: int) -> list[SlidingBudget]:
        if not session or not self._limits.get("session"):
            return []
        while self._sessions:
            oldest = next(iter(self._sessions))
            idle = now - self._last[oldest] >= SESSION_IDLE_NS
            if not idle and len(self._sessions) < MAX_SESSIONS:
                break
            del self._sessions[oldest], self._last[oldest]
        if session not in self._sessions:
            self._sessions[session], self._last[session] = self._new("session", session), now
        return self._sessions[session]
