"""Stream allowance: this gateway's share of streams while requests wait at any gateway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from pigou.control.peers.bookings import TenantService, growth
from pigou.request import SECOND

#: Nanoseconds between two updates, for each 64 tenants of all gateways.
_UPDATE_NS, _ROWS = SECOND // 100, 64
#: Seconds over which a tenant's service for each second of a stream is averaged.
_WINDOW_S = 10.0
#: Seconds of a stream at the mean rate that each tenant begins with.
_PRIOR_S = 4.0
#: More streams than run, where tokens lack: what that leaves is to be used.
_MORE, _MORE_STREAMS = 1.05, 2.0
#: Golden ratio's fractional part; fractional parts of its multiples fill [0, 1) evenly.
_GOLDEN = 0.6180339887498949
_NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


class TenantDemand(msgspec.Struct):
    """Demand of a tenant."""

    own: int = 0  # streams and waiting requests here
    all: int = 0  # here and at other gateways
    streams: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    weight: float = 1.0
    rate: float = 1.0  # service for each second of a stream, over the mean of the tenants

    def add(self, service: TenantService, own: bool) -> None:
        """Add a gateway's service for the tenant; `own` if it is this gateway."""
        requests = service.streams + service.waiting
        self.all += requests
        self.own += requests if own else 0
        self.streams += service.streams
        self.prompt_tokens += service.prompt_tokens
        self.output_tokens += service.output_tokens


def stream_allowance(places: float, demands: Iterable[TenantDemand]) -> float:
    """Return this gateway's share of `places` (streams); infinite if all demand fits.

    Tenants get weight / rate, at most their demand (weighted max-min by water filling), divided
    among gateways by demand.
    """
    known = [demand for demand in demands if demand.all > 0]
    if sum(demand.all for demand in known) <= places:
        return math.inf
    known.sort(key=lambda demand: demand.all * demand.rate / demand.weight)
    claims = sum(demand.weight / demand.rate for demand in known)
    left, allowance = places, 0.0
    for demand in known:
        claim = demand.weight / demand.rate
        part = min(float(demand.all), left * claim / claims)
        left -= part
        claims -= claim
        allowance += part * demand.own / demand.all
    return allowance


class TokenCharges(NamedTuple):
    """Service per prompt token and per output token."""

    prompt: float
    output: float


def dithered(limit: float, starts: int) -> float:
    """Return a limit of streams whose fraction is served in its mean, after `starts` streams."""
    return limit + starts * _GOLDEN % 1.0


class StreamAllowance:
    """Limits this gateway's streams to its share while requests wait anywhere.

    Reports of other gateways are old, so all would take the same free place. Places are the
    workers' maximum of streams, or little more than those running if tokens lacked within 1 s.
    """

    def __init__(self) -> None:
        self.limit = math.inf  # streams of this gateway; fractional in the mean
        self._updated_at = self._wait_ns = 0
        self._lacked_at = -SECOND
        self._starts = 0
        self._served: dict[str, float] = {}
        self._stream_s: dict[str, float] = {}
        self._counters: dict[str, tuple[int, int]] = {}

    def began(self) -> None:
        """Count a stream that started here."""
        self._starts += 1

    def tokens_lacked(self, now: int) -> None:
        """Record that a request waited for tokens, not for a stream."""
        self._lacked_at = now

    def spent(self, streams: int) -> bool:
        """True if this gateway must wait for one of its `streams` to end."""
        return streams > 0 and streams + 1 > dithered(self.limit, self._starts)

    def due(self, now: int) -> bool:
        """True if an update is due."""
        return now - self._updated_at >= self._wait_ns

    def update(
        self, now: int, places: float, own: Sequence[TenantService],
        others: Sequence[TenantService], weights: Mapping[str, float] = _NO_WEIGHTS,
        charges: TokenCharges | None = None,
    ) -> None:  # fmt: skip
        """Update the limit from the service of all gateways; `places` is the maximum of streams."""
        elapsed_s, self._updated_at = (now - self._updated_at) / SECOND, now
        self._wait_ns = _UPDATE_NS * (1 + (len(own) + len(others)) // _ROWS)
        demands: dict[str, TenantDemand] = {}
        for is_own, services in ((True, own), (False, others)):
            for service in services:
                name = "" if charges is None else service.tenant
                demand = demands.setdefault(name, TenantDemand(weight=weights.get(name, 1.0)))
                demand.add(service, is_own)
        if charges is not None:
            self._learn(min(elapsed_s, _WINDOW_S), demands, charges)
        if now - self._lacked_at < SECOND:
            running = sum(demand.streams for demand in demands.values())
            places = min(places, _MORE * running + _MORE_STREAMS)
        self.limit = stream_allowance(places, demands.values())

    def _learn(
        self, elapsed_s: float, demands: Mapping[str, TenantDemand], charges: TokenCharges
    ) -> None:
        """Update mean service, streams and rate of each tenant."""
        keep = math.exp(-elapsed_s / _WINDOW_S)
        for name, demand in demands.items():
            counters = demand.prompt_tokens, demand.output_tokens
            before = self._counters.get(name, counters)
            served = charges.prompt * growth(before[0], counters[0])
            served += charges.output * growth(before[1], counters[1])
            self._counters[name] = counters
            self._served[name] = keep * self._served.get(name, 0.0) + served
            stream_s = keep * self._stream_s.get(name, 0.0) + elapsed_s * demand.streams
            self._stream_s[name] = stream_s
        for known in (self._served, self._stream_s, self._counters):
            for name in known.keys() - demands.keys():
                del known[name]
        whole, stream_s = sum(self._served.values()), sum(self._stream_s.values())
        if whole <= 0.0 or stream_s <= 0.0:
            return
        mean = whole / stream_s
        for name, demand in demands.items():
            own = self._served[name] + _PRIOR_S * mean
            demand.rate = own / (self._stream_s[name] + _PRIOR_S) / mean
