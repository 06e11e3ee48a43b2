"""Per-link factors: KV transfer time between two hosts relative to within a rack."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.placement.topology import (
    Distance,
    DistanceCosts,
    TopologyLevel,
    domain,
    known_distance,
)
from pigou.request import SECOND, UNKNOWN_LOCATION, Location

Numbers: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.int64]

#: Transfers that a prior counts for, of a class and of a pair of hosts.
_PRIOR_WEIGHT = 2.0
#: Transfers that a mean remembers, and seconds after which they count half.
_MEMORY, _HALF_LIFE_S = 64.0, 600.0
#: A transfer moves a mean by at most this much, in logarithms.
_MAX_STEP = 1.0
#: Transfers of which tokens are a smaller share of the time say nothing of the link.
_MIN_SHARE = 0.1
#: Nanoseconds after which factors are renewed, though nothing was seen.
_RENEW_NS = 10 * SECOND


class LinkTable(NamedTuple):
    """Link factors as kernels read them."""

    hosts: Rows  # number of each worker's host; 0 where it is not known, (workers,)
    racks: Rows  # number of its rack, in the same way, (workers,)
    factors: Numbers  # times as long as within a rack, from host to host, (hosts, hosts)


def unlabelled(workers: int) -> LinkTable:
    """Return links of workers on unknown hosts: all factors are 1."""
    nobody = np.zeros(workers, dtype=np.int64)
    return LinkTable(nobody, nobody, np.ones((1, 1)))


class LinkFactors:
    """One factor per pair of hosts, 1 if either is unknown.

    A pair starts from its distance class (`DistanceCosts`), weighted as two transfers, and learns
    the mean of log(observed / common law).

        links = LinkFactors()
        links.add_worker(Location("h0", "r0", "a"))
        links.add_worker(Location("h9", "r3", "a"))
        links.factor(0, 1)  # 4.0: racks of one zone
    """

    def __init__(self, costs: DistanceCosts | None = None) -> None:
        self._costs = costs or DistanceCosts()
        self._locations: list[Location] = []
        self._known: list[Location] = [UNKNOWN_LOCATION]
        self._classes = np.zeros((1, 1), dtype=np.int64)
        self._weight, self._mean = np.zeros((1, 1)), np.zeros((1, 1))
        self._seen_at = np.zeros((1, 1), dtype=np.int64)
        self._class_weight = np.zeros(len(Distance))
        self._class_mean = np.log(np.array(self._costs.by_class) / self._costs.rack)
        self._table: LinkTable | None = None
        self._made_at = 0

    def add_worker(self, location: Location = UNKNOWN_LOCATION) -> None:
        """Add a worker as the last row."""
        self._locations.append(_with_host(location))
        self._add_host(self._locations[-1])

    def move_worker(self, row: int, location: Location) -> None:
        """Change a worker's labels."""
        location = _with_host(location)
        if self._locations[row] != location:
            self._locations[row] = location
            self._add_host(location)

    def remove_worker(self, row: int) -> None:
        """Remove a worker; factors of its host stay."""
        del self._locations[row]
        self._table = None

    @property
    def located(self) -> bool:
        """True if any worker's host is or was known."""
        return len(self._known) > 1

    def factor(self, source: int, target: int) -> float:
        """Return the factor between the hosts of two workers."""
        table = self._table or self.table(self._made_at)
        return table.factors.item(table.hosts.item(source), table.hosts.item(target))

    def learn(
        self, source: int, target: int, took_s: float, law: tuple[float, float], tokens: int,
        now: int,
    ) -> None:  # fmt: skip
        """Learn from a transfer of tokens in `took_s` seconds, the worker's factor removed."""
        base_s, tokens_s = law[0], law[1] * tokens
        if tokens_s > 0.0:
            ratio = max(took_s - base_s, 1e-3 * took_s) / tokens_s
            expected_s = base_s + self.factor(source, target) * tokens_s
            self.observe(source, target, ratio, 1.0 - base_s / expected_s, now)

    def observe(self, source: int, target: int, ratio: float, share: float, now: int) -> None:
        """Add a transfer at `ratio` times the rack's seconds; `share` of time is per token."""
        table = self._table or self.table(self._made_at)
        i, j = table.hosts.item(source), table.hosts.item(target)
        if not (i and j) or share < _MIN_SHARE:
            return
        expected = math.log(table.factors.item(i, j))
        step = min(max(math.log(ratio) - expected, -_MAX_STEP), _MAX_STEP)
        weight = min(_MEMORY, self._aged(now, i).item(j))
        self._mean[i, j] += share * (expected + step - self._mean.item(i, j)) / (weight + share)
        self._weight[i, j], self._seen_at[i, j] = weight + share, now
        level = self._classes.item(i, j)
        weight = min(_MEMORY, self._class_weight.item(level))
        total = weight + share + _PRIOR_WEIGHT
        self._class_mean[level] += share * (expected + step - self._class_mean.item(level)) / total
        self._class_weight[level] = weight + share
        self._table = None

    def table(self, now: int) -> LinkTable:
        """Return the factors at `now`."""
        table = self._table
        if table is not None and (not self.located or now - self._made_at < _RENEW_NS):
            return table
        table = self._solve(now) if self.located else unlabelled(len(self._locations))
        self._table, self._made_at = table, now
        return table

    def _solve(self, now: int) -> LinkTable:
        numbers = {location: number for number, location in enumerate(self._known)}
        racks: dict[str, int] = {}  # the first known location is in none: 0
        for location in self._known:
            racks.setdefault(domain(location, TopologyLevel.RACK), len(racks))
        weight, prior = self._aged(now), self._class_mean[self._classes]
        mean = (weight * self._mean + _PRIOR_WEIGHT * prior) / (weight + _PRIOR_WEIGHT)
        factors = np.exp(mean)
        factors[0, :] = factors[:, 0] = 1.0
        hosts = [numbers[location] for location in self._locations]
        rows = [racks[domain(location, TopologyLevel.RACK)] for location in self._locations]
        return LinkTable(np.array(hosts, dtype=np.int64), np.array(rows, dtype=np.int64), factors)

    def _aged(self, now: int, sources: int | slice = slice(None)) -> Numbers:
        age_s = np.maximum(0, now - self._seen_at[sources]) / SECOND
        weights: Numbers = self._weight[sources] * 0.5 ** (age_s / _HALF_LIFE_S)
        return weights

    def _add_host(self, location: Location) -> None:
        self._table = None
        if location in self._known:
            return
        self._known.append(location)
        for name in ("_weight", "_mean", "_seen_at", "_classes"):
            setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 1))))
        for number, other in enumerate(self._known):
            level = known_distance(location, other)
            self._classes[number, -1] = self._classes[-1, number] = level


def _with_host(location: Location) -> Location:
    return location if location.host else UNKNOWN_LOCATION
