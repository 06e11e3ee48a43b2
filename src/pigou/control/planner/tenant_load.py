"""Load of tenants, and the workers that it may make a planner start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pigou.request import SECOND, payer_of

#: Half-life of the work that a tenant asked for, in nanoseconds.
_HALF_LIFE_NS = 60 * SECOND


class TenantWork:
    """Prompt and output tokens of ended requests by payer or tenant, halved each minute."""

    def __init__(self, now: int) -> None:
        self._tokens: dict[str, float] = {}
        self._decayed_ns = now

    def add(self, account: str, tokens: float, now: int) -> None:
        """Count an ended request."""
        self._decay(now)
        self._tokens[account] = self._tokens.get(account, 0.0) + tokens

    def recent(self, now: int, running: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
        """Return the tokens, with those of `running` requests by account."""
        self._decay(now)
        work = dict(self._tokens)
        for account, tokens in running:
            work[account] = work.get(account, 0.0) + tokens
        return work

    def _decay(self, now: int) -> None:
        if now - self._decayed_ns < SECOND:
            return
        keep = 0.5 ** ((now - self._decayed_ns) / _HALF_LIFE_NS)
        self._tokens = {name: keep * work for name, work in self._tokens.items() if work > 1e-3}
        self._decayed_ns = now


class TenantLoad(NamedTuple):
    """Parts of a fleet's load by payer or tenant."""

    tokens: Mapping[str, float]  # recent work; only its proportions matter
    weights: Mapping[str, float] = {}  # shares of tenants, 1 by default

    def max_workers(self, wanted: int, max_workers: int) -> int:
        """Return how many of the `wanted` workers a planner may have for this load.

        ceil(sum of min(N d_t, M s_t)), with N = `wanted`, M = `max_workers`, and tenant t's part
        d_t of the load and share s_t by weight.
        """
        parts: dict[str, float] = {}
        for name, tokens in self.tokens.items():
            account = payer_of(name, self.weights)
            parts[account] = parts.get(account, 0.0) + tokens
        tenants = {name: self.weights.get(name, 1.0) for name in (*self.weights, *parts)}
        total, load = sum(tenants.values()), sum(parts.values())
        if not load:
            return min(wanted, max_workers)
        limits = (
            min(wanted * part / load, max_workers * tenants[name] / total)
            for name, part in parts.items()
        )
        return max(1, math.ceil(sum(limits) - 1e-9))  # 0 would be no limit

    def refusal(self, limit: int) -> str:
        """Return why no more than `limit` workers are allowed."""
        name, tokens = max(self.tokens.items(), key=lambda entry: entry[1])
        part = tokens / sum(self.tokens.values())
        return (
            f": tenants' shares of it allow {limit}, as {part:.0%} of the load is tenant {name!r}'s"
        )
