"""Budgets of API keys and sessions: configuration, claims of requests, errors and headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from prometheus_client.core import Metric

from pigou.config import ConfigError, check_bounds
from pigou.control.admission.budgets import (
    PERIODS,
    SESSION_IDLE_NS,
    BudgetExceeded,
    BudgetSlot,
    BudgetState,
    KeyBudgets,
    Spending,
)
from pigou.gateway.auth.keys import NO_KEY, Key, KeyBudget, KeyLimits
from pigou.gateway.caches.layers import SESSION_HEADER
from pigou.gateway.metrics import TENANT
from pigou.gateway.request import GatewayRun
from pigou.metric_rows import counter_family
from pigou.request import SECOND
from pigou.wire.errors import APIError

#: Seconds of waiting from which clients are told not to try again by themselves.
_MAX_RETRY_S = 60
#: Units that OpenAI's headers name.
_HEADERS = ("requests", "tokens")


def read_budgets(texts: Sequence[str]) -> KeyLimits:
    """Parse `PERIOD.UNIT=LIMIT` texts; raise `ConfigError`."""
    limits: dict[str, dict[str, int | float]] = {period: {} for period in PERIODS}
    for text in texts:
        name, equals, number = text.partition("=")
        period, _, unit = name.partition(".")
        if not equals or period not in PERIODS or unit not in KeyBudget.__struct_fields__:
            raise ConfigError(
                f"key_budgets has {text!r}; write PERIOD.UNIT=LIMIT with a period of "
                f"{', '.join(PERIODS)} and a unit of {', '.join(KeyBudget.__struct_fields__)}"
            )
        if unit in limits[period]:
            raise ConfigError(f"key_budgets has {name} twice; give it once")
        try:
            limits[period][unit] = float(number)
        except ValueError:
            raise ConfigError(f"key_budgets: {name} is {number!r}; it must be a number") from None
        check_bounds(f"key_budgets: {name}", limits[period][unit], gt=0)
        if limits[period][unit] == int(limits[period][unit]):  # also 2e6
            limits[period][unit] = int(limits[period][unit])
    try:
        return msgspec.convert(limits, KeyLimits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"key_budgets: {error}") from error


class BudgetLedger:
    """Budgets of all keys and payers of a gateway; `default` is for keys without any."""

    def __init__(
        self, default: KeyLimits, keys: Iterable[Key], priced: bool, now: Callable[[], int]
    ) -> None:
        """Raise `ConfigError` for a budget of prices where nothing is `priced`."""
        self._default, self._now = default, now
        self.is_shared = False  # True if other gateways are told
        self._keys = {key.purse: key for key in (NO_KEY, *keys)}
        self._changed: dict[BudgetSlot, bytes] = {}  # use that others were not told, its purse
        # by key or payer: payer or tenant, beginning of the first key's hash
        self._budgets: dict[bytes, tuple[str, str, KeyBudgets]] = {}
        self._refused: Counter[tuple[str, str]] = Counter()  # by tenant and budget
        for limits in (default, *(key.limits for key in self._keys.values())):
            if not priced and any(getattr(limits, period).price for period in PERIODS):
                raise ConfigError(
                    "a budget of `price` is given, and the gateway has no prices; give --prices"
                )

    def of(self, key: Key) -> KeyBudgets | None:
        """Return the budgets of a key; None without any."""
        limits = key.limits if key.limits.has_budgets else self._default
        if not limits.has_budgets:
            return None
        if key.purse not in self._budgets:
            by_period = {
                period: {unit: limit for unit, limit in
                         msgspec.structs.asdict(getattr(limits, period)).items() if limit}
                for period in PERIODS
            }  # fmt: skip
            digest = key.digest.hex()[:12]
            self._budgets[key.purse] = key.payer or key.tenant, digest, KeyBudgets(by_period)
        return self._budgets[key.purse][-1]

    @contextmanager
    def spending(
        self, key: Key, run: GatewayRun, headers: Mapping[str, str],
        bill: Callable[[str], Callable[[], float]],
    ) -> Iterator[None]:  # fmt: skip
        """Claim a request's part of its budgets, and settle it at the end (context).

        `bill` returns what tells the dollars of a sequence that was sent. Raises `APIError` 429.
        """
        budgets = self.of(key)
        if budgets is None:
            yield
            return
        session = headers.get(SESSION_HEADER, "")
        sequences, tokens = run.load
        try:
            claim = budgets.claim(sequences * tokens, session, self._now())
        except BudgetExceeded as over:
            self._refused[key.tenant, over.state.name] += 1
            raise _exceeded(over, _headers(budgets.states(session, self._now()))) from None
        self._note(key.purse, claim.slots)
        run.budget_headers = _headers(budgets.states(session, self._now()))
        run.quota.bill = bill
        is_priced = any(budget.unit == "price" for budget, _ in claim.slots)
        try:
            yield
        finally:
            self._note(key.purse, budgets.settle(claim, _used(run, is_priced), self._now()))

    def _note(self, purse: bytes, slots: list[BudgetSlot]) -> None:
        if self.is_shared:
            self._changed |= dict.fromkeys(slots, purse)

    def changes(self, limit: int) -> tuple[Spending, ...]:
        """Return use that other gateways were not told, of `limit` slots at most."""
        changed = [self._changed.popitem() for _ in range(min(limit, len(self._changed)))]
        return tuple(slot.spending(purse) for slot, purse in changed)

    def own(self) -> tuple[Spending, ...]:
        """Return all use of this gateway that still counts."""
        return tuple(
            slot.spending(purse) for purse, (_, _, budgets) in self._budgets.items()
            for slot in budgets.own()
        )  # fmt: skip

    def merge(self, gateway: str, seq: int, spending: Iterable[Spending]) -> None:
        """Take another gateway's use, from its message number `seq`; unknown keys' is dropped."""
        now = self._now()
        for one in spending:
            key = self._keys.get(one.purse)
            budgets = None if key is None else self.of(key)
            if budgets is not None:
                budgets.merge(gateway, seq, one, now)

    def document(self, key: Key) -> dict[str, Any]:
        """Return budgets as JSON builtins: of the key, and of all for an administrator."""
        now = self._now()
        own = self.of(key)
        document: dict[str, Any] = {}
        if own is not None:
            document["budgets"] = [_row(state) for state in own.states("", now)]
        if key.admin and self._budgets:
            document["keys"] = [
                {"tenant": tenant, "sha256": digest,
                 "budgets": [_row(state) for state in budgets.states("", now)]}
                for tenant, digest, budgets in self._budgets.values()
            ]  # fmt: skip
        return document

    def families(self) -> Iterator[Metric]:
        """Yield `pigou_budget_refused`; nothing before a refusal."""
        if self._refused:
            yield counter_family(
                "pigou_budget_refused", "Requests refused over a budget.",
                list(self._refused.items()), TENANT, "budget",
            )  # fmt: skip


def _used(run: GatewayRun, is_priced: bool) -> dict[str, float]:
    """Return what a request used; nothing if none of it reached a worker."""
    quota, stats = run.quota, run.stats
    if not quota.bills:
        return {}
    tokens = 0 if run.metered is None else run.metered.tokens
    return {
        "requests": 1.0,
        "tokens": (stats.prompt_tokens or run.prompt_tokens) + max(stats.completion_tokens, tokens),
        "seconds": quota.worker_s,
        "price": sum(bill() for bill in quota.bills) if is_priced else 0.0,
    }


def _exceeded(over: BudgetExceeded, headers: dict[str, str]) -> APIError:
    state = over.state
    fits = over.requested <= state.limit
    unit = {"price": "dollars", "seconds": "worker seconds"}
    what = unit.get(state.name.partition(".")[2], state.name.partition(".")[2])
    if state.reset_ns is not None:
        retry_s = math.ceil(state.reset_ns / SECOND)
        remedy = f"it fits in {retry_s} s"
    else:
        retry_s = SESSION_IDLE_NS // SECOND
        remedy = (
            "end this session; its count is forgotten after an hour without requests"
            if fits
            else "send fewer in one request: it never fits"
        )
    details = {
        "name": state.name, "limit": state.limit, "used": round(state.used, 6),
        "requested": round(over.requested, 6),
        "reset_s": None if state.reset_ns is None else retry_s,
    }  # fmt: skip
    return APIError(
        429,
        f"The budget {state.name} of this API key is {state.limit:g} {what}: {state.used:g} are "
        f"used, and this request asks for {over.requested:g}; {remedy}.",
        "max_tokens" if not fits else None,
        retry_after=max(1, retry_s),
        final=retry_s > _MAX_RETRY_S or not fits,
        details={"budget": details},
        extra_headers=headers,
    )


def _headers(states: Iterable[BudgetState]) -> dict[str, str]:
    """Return OpenAI's headers, for requests and tokens of the fullest budget each."""
    fullest: dict[str, BudgetState] = {}
    for state in states:
        unit = state.name.partition(".")[2]
        known = fullest.get(unit)
        if known is None or state.used / state.limit > known.used / known.limit:
            fullest[unit] = state
    headers = {}
    for unit in _HEADERS:
        if unit in fullest:
            state = fullest[unit]
            headers[f"x-ratelimit-limit-{unit}"] = f"{state.limit:.0f}"
            headers[f"x-ratelimit-remaining-{unit}"] = str(
                max(0, math.floor(state.limit - state.used))
            )
            if state.reset_ns is not None:
                headers[f"x-ratelimit-reset-{unit}"] = f"{state.reset_ns / SECOND:.3f}s"
    return headers


def _row(state: BudgetState) -> dict[str, Any]:
    reset_s = None if state.reset_ns is None else round(state.reset_ns / SECOND, 3)
    return {"name": state.name, "limit": state.limit, "used": state.used, "reset_s": reset_s}
