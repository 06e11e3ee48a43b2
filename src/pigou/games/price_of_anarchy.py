"""The Price of Anarchy of a live fleet: observed cost of its requests over the optimal cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pigou.games import Floats, Indices
from pigou.games.latency import LatencyLaw
from pigou.games.request_window import LOCAL, RequestWindow

#: Prefill/decode splits up to which all are enumerated; beyond, a local search.
MAX_SPLITS = 1024
#: Load grid: at least this many steps a request, and about this many points.
STEPS = 16
POINTS = 512
#: Completions in the paper's index, and requests in a worker's column.
_LEGACY_WINDOW, _LEGACY_CAPACITY = 200, 64


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its bootstrap interval over the window's requests."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PriceOfAnarchy:
    """Observed over optimal cost, and the factors that multiply to it; each is at least 1."""

    whole: Estimate
    routing: Estimate  # cost at the observed loads over the optimal routing on the same pools
    prefill_decode: Estimate  # optimal routing on these pools over that of the best split
    queueing: Estimate  # observed over expected cost at the observed loads: queues, bursts, stalls
    prefill_workers: tuple[int, ...]  # prefill workers of the best split
    # observed over optimal cost of each worker's requests; None without requests
    workers: tuple[float | None, ...] = ()
    split_saves: float = 0.0  # mean seconds a request that the best split would save
    worker_ranges: tuple[tuple[float, float] | None, ...] = ()  # intervals of `workers`


def calibrated(
    window: RequestWindow,
    laws: Sequence[LatencyLaw],
    prefill_laws: Sequence[LatencyLaw] | None = None,
    *,
    prefill_workers: Collection[int] | None = None,
    level: float = 0.9,
    draws: int = 400,
    seed: int = 0,
) -> PriceOfAnarchy:
    """Return a window's Price of Anarchy under laws (per unit of work) fitted to this fleet.

    `laws[w]` is worker w's decode law (the whole request where prefill is local), `prefill_laws[w]`
    its prefill law. Intervals are of `draws` circular block bootstraps at `level`, laws fixed.
    Raises ValueError for missing laws, pools that leave a stage without workers, or an optimum not
    above 0.
    """
    pools = _Pools.of(window, laws, prefill_laws, prefill_workers)
    expected = _expected(window, pools)
    spread = _Spread(window, pools)
    routed = spread.cost(pools.prefill)
    split = _best_split(spread, pools)
    best = spread.cost(split)
    if not (expected.sum() > 0 and routed.sum() > 0 and best.sum() > 0):
        raise ValueError("the laws say that requests cost nothing: a ratio needs costs above 0")
    draw = _bootstrap(len(best), draws, seed)
    chain = np.stack([window.observed, expected, routed, best], axis=1)
    # Where noise of the laws puts an optimum above what was had, the ratio is 1.
    totals, drawn = _clip_optima(chain.sum(axis=0)[None])[0], _clip_optima(draw @ chain)

    quantiles = [(1 - level) / 2, (1 + level) / 2]

    def ratio(above: int, below: int) -> Estimate:
        low, high = np.quantile(drawn[:, above] / drawn[:, below], quantiles)
        return Estimate(float(totals[above] / totals[below]), float(low), float(high))

    queueing, routing, prefill_decode = (ratio(i, i + 1) for i in range(3))
    shares, ranges = _by_worker(window, best, len(laws), draw, quantiles)
    saves = float(totals[2] - totals[3]) / len(best)
    pool = tuple(sorted(split))
    whole = ratio(0, 3)
    return PriceOfAnarchy(whole, routing, prefill_decode, queueing, pool, shares, saves, ranges)


def _clip_optima(chain: Floats) -> Floats:
    lowest: Floats = np.minimum.accumulate(chain, axis=1)
    return lowest


def _by_worker(
    window: RequestWindow, best: Floats, workers: int, draw: Floats, quantiles: Sequence[float]
) -> tuple[tuple[float | None, ...], tuple[tuple[float, float] | None, ...]]:
    observed = window.observed
    ratios: list[float | None] = []
    ranges: list[tuple[float, float] | None] = []
    for worker in range(workers):
        own = (window.decode == worker) | (window.prefill == worker)
        lowest = float(best[own].sum())
        taken = float(observed[own].sum())
        ratios.append(max(1.0, taken / lowest) if lowest > 0.0 else None)
        above, below = draw[:, own] @ observed[own], draw[:, own] @ best[own]
        drawn = np.maximum(above[below > 0.0] / below[below > 0.0], 1.0)
        known = lowest > 0.0 and len(drawn) > 0
        low, high = np.quantile(drawn, quantiles).tolist() if known else (1.0, 1.0)
        ranges.append((low, high) if known else None)
    return tuple(ratios), tuple(ranges)


@dataclass(frozen=True, slots=True)
class _Pools:
    laws: Sequence[LatencyLaw]
    prefill_laws: Sequence[LatencyLaw]
    prefill: frozenset[int]
    both: frozenset[int]  # seen in both roles: they keep both in any split

    @classmethod
    def of(
        cls,
        window: RequestWindow,
        laws: Sequence[LatencyLaw],
        prefill_laws: Sequence[LatencyLaw] | None,
        prefill_workers: Collection[int] | None,
    ) -> _Pools:
        seen = frozenset(np.unique(window.prefill[window.prefill != LOCAL]).tolist())
        prefill = seen if prefill_workers is None else frozenset(prefill_workers) | seen
        max_worker = max(int(window.decode.max()), max(prefill, default=0))
        if max_worker >= len(laws) or min(prefill, default=0) < 0:
            raise ValueError(f"worker {max_worker} has no law among {len(laws)}: give one a worker")
        if prefill and (prefill_laws is None or len(prefill_laws) != len(laws)):
            raise ValueError("a fleet with prefill workers needs prefill_laws, one a worker")
        decode = frozenset(np.unique(window.decode).tolist())
        return cls(laws, prefill_laws or laws, prefill, prefill & decode)

    def decoders(self, prefill: frozenset[int]) -> list[int]:
        return [w for w in range(len(self.laws)) if w not in prefill or w in self.both]


def _expected(window: RequestWindow, pools: _Pools) -> Floats:
    total = window.decode_work * _of_own(window.decode, window.decode_load, pools.laws)
    remote = window.prefill != LOCAL
    own = _of_own(window.prefill[remote], window.prefill_load[remote], pools.prefill_laws)
    total[remote] += window.prefill_work[remote] * own
    return total


def _of_own(worker: Indices, load: Floats, laws: Sequence[LatencyLaw]) -> Floats:
    seconds = np.zeros(len(worker))
    for w in np.unique(worker).tolist():
        mask = worker == w
        seconds[mask] = laws[w](load[mask])
    return seconds


class _Spread:
    def __init__(self, window: RequestWindow, pools: _Pools) -> None:
        self._pools = pools
        self._remote = window.prefill != LOCAL
        self._decode_work = window.decode_work
        self._prefill_work = window.prefill_work[self._remote]
        self._decode = Levelling(window.decode_total)
        self._prefill = Levelling(window.prefill_total[self._remote])

    def cost(self, prefill: frozenset[int]) -> Floats:
        laws = [self._pools.laws[w] for w in self._pools.decoders(prefill)]
        total = self._decode_work * self._decode.cost(laws)
        if self._remote.any():
            laws = [self._pools.prefill_laws[w] for w in sorted(prefill)]
            total[self._remote] += self._prefill_work * self._prefill.cost(laws)
        return total


def _best_split(spread: _Spread, pools: _Pools) -> frozenset[int]:
    if not pools.prefill:
        return pools.prefill
    movable = [w for w in range(len(pools.laws)) if w not in pools.both]

    def cost(prefill: frozenset[int]) -> float:
        return float(spread.cost(prefill).sum())

    best, lowest = pools.prefill, cost(pools.prefill)
    while True:
        everything = 2 ** len(movable) <= MAX_SPLITS
        offers = _splits(movable, pools) if everything else _nearby(best, movable, pools)
        costs = [(cost(offer), offer) for offer in offers]
        lower, offer = min(costs, key=lambda pair: pair[0], default=(lowest, best))
        if lower < lowest * (1.0 - 1e-9):
            best, lowest = offer, lower
            if not everything:
                continue
        return best


def _splits(movable: Sequence[int], pools: _Pools) -> Iterator[frozenset[int]]:
    for size in range(len(movable) + 1):
        for some in combinations(movable, size):
            prefill = frozenset(some) | pools.both
            if prefill and pools.decoders(prefill):
                yield prefill


def _nearby(
    prefill: frozenset[int], movable: Sequence[int], pools: _Pools
) -> Iterator[frozenset[int]]:
    for worker in movable:
        other = prefill ^ {worker}
        if other and pools.decoders(other):
            yield other


def _bootstrap(count: int, draws: int, seed: int) -> Floats:
    """Return each request's count in each draw of a circular block bootstrap: (draws, requests)."""
    rng = np.random.default_rng(seed)
    block = max(1, round(count ** (1.0 / 3.0)))
    starts = rng.integers(0, count, size=(draws, math.ceil(count / block)))
    taken = (starts[:, :, None] + np.arange(block)).reshape(draws, -1)[:, :count]
    taken[taken >= count] -= count
    places = taken + count * np.arange(draws)[:, None]
    drawn: Floats = np.bincount(places.ravel(), minlength=draws * count).astype(np.float64)
    return drawn.reshape(draws, count)


class Levelling:
    """Least mean cost over a pool when each request meets `totals` (requests,), itself counted.

    A fractional load x below 1 costs x f(1). Exact for whole totals.
    """

    def __init__(self, totals: Floats) -> None:
        self._totals = totals
        self._max_load = max(1, math.ceil(float(totals.max(initial=1.0))))
        steps = max(1, min(STEPS, POINTS // self._max_load))
        self._fine = np.arange(self._max_load * steps + 1) / steps
        self._whole = np.arange(self._max_load + 1, dtype=np.float64)
        self._tables: dict[LatencyLaw, tuple[Floats, Floats]] = {}

    def cost(self, laws: Sequence[LatencyLaw]) -> Floats:
        """Return seconds of each request, (requests,), over workers with these laws."""
        tables = [self._table(law) for law in laws]
        fine = self._cumulated([t[0] for t in tables], len(self._fine))
        whole = self._cumulated([t[1] for t in tables], len(self._whole))
        gap = np.ones_like(whole)
        gap[1:] = whole[1:] / np.interp(self._whole[1:], self._fine, fine)
        spread = np.interp(self._totals, self._fine, fine) / self._totals
        lowest: Floats = spread * np.interp(self._totals, self._whole, gap)
        return lowest

    def _table(self, law: LatencyLaw) -> tuple[Floats, Floats]:
        if law not in self._tables:
            fine = np.diff(self._fine * law(np.maximum(self._fine, 1.0)))
            self._tables[law] = fine, np.diff(self._whole * law(self._whole))
        return self._tables[law]

    @staticmethod
    def _cumulated(marginals: Sequence[Floats], size: int) -> Floats:
        """Return costs of 0, 1, 2 ... steps of load, each placed where it adds least."""
        added = np.sort(np.concatenate(marginals))[: size - 1]
        return np.concatenate([[0.0], np.cumsum(added)])


def legacy_costs(count: int) -> Floats:
    """Return the paper model's seconds of a worker's k-th request (Georgiou 2026, section 6.4)."""
    k = np.arange(1, count + 1, dtype=np.float64)
    costs: Floats = 0.005 * k + 0.020 + 0.010 / np.maximum(_LEGACY_CAPACITY - k, 0.4) ** 2.0
    return costs


def legacy_optimum(workers: int, count: int) -> float:
    """Return the seconds of the `count` cheapest places: the paper index's denominator."""
    costs = np.sort(legacy_costs(max(_LEGACY_CAPACITY, math.ceil(count / workers)))).tolist()
    return math.fsum(costs[rank // workers] for rank in range(count))


def legacy_index(seconds: Sequence[float], workers: int) -> float:
    """Return the paper's index (Eq. 12) of the last 200 latencies; see `calibrated`."""
    recent = seconds[-_LEGACY_WINDOW:]
    return math.fsum(recent) / legacy_optimum(workers, len(recent))
