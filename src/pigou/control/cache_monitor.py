"""Cache monitor: memory occupancy of the fleet, evictions, and the caching game."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pigou.control.caching_game import CachingFleet, Placement, Prompt, caching_game
from pigou.control.latency_model.estimates import PRIOR_FETCH, PRIOR_TRANSFER, Estimates
from pigou.control.prefix_index import PrefixIndex
from pigou.control.state import Columns, FleetState
from pigou.request import SECOND, Request

Floats = NDArray[np.float64]

#: A game has the last prompts, this many; each counts half as much a minute later.
WINDOW = 192
HALF_LIFE = 60 * SECOND
#: Nanoseconds between two looks at what is evicted and how full the fleet is.
BEAT = 5 * SECOND
#: A game is played after this many new prompts, or after this time where there are any; the first
#: after fewer.
PROMPTS = 512
PERIOD = 60 * SECOND
MIN_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """Occupancy, evictions and placement of the fleet's caches."""

    # active over device blocks by worker (`occupancy`), (workers,); NaN if a worker does not report
    # its blocks.
    rho: Floats
    fleet_rho: float  # the same over all reporting workers; NaN if none reports
    evicted: int  # blocks evicted from the device since the start, as KV events tell
    rate: float  # evicted blocks a second over the last beat
    first_eviction: float  # seconds from the start to the first eviction; NaN before
    # the last game; None before the first, and where no worker publishes events.
    placement: Placement | None
    before: float  # PoA of the last game before the first eviction; NaN where there was none
    after: float  # PoA of the first game after it; NaN before


class CacheMonitor:
    """Monitors the caches of workers that publish KV events."""

    def __init__(self) -> None:
        self.placement: Placement | None = None  # the last game
        self.max_rho = math.nan  # highest rho of the fleet at any beat
        self.games = 0
        self._prompts: deque[tuple[int, str, Request, int, int]] = deque(maxlen=WINDOW)
        self._new = 0
        self._begun, self._beat, self._played = -1, 0, 0
        self._evicted, self._rate = 0, 0.0
        self._first = self._before = self._after = math.nan

    def routed(self, worker: str, request: Request, cached: int, known: int, now: int) -> None:
        """Record a prompt sent to a worker."""
        self._prompts.append((now, worker, request, cached, known))
        self._new += 1

    def tick(
        self, state: FleetState, index: PrefixIndex, estimates: Callable[[int], Estimates], now: int
    ) -> None:
        """Sample evictions and memory every beat, and play the game once in a while."""
        if self._begun < 0:
            self._begun = self._beat = self._played = now
        if now - self._beat < BEAT:
            return
        seconds, self._beat = (now - self._beat) / SECOND, now
        evicted = index.removed
        self._rate = (evicted - self._evicted) / seconds
        if evicted and not self._evicted:
            self._first = (now - self._begun) / SECOND
        self._evicted = evicted
        self.max_rho = float(np.fmax(self.max_rho, _together(state)))
        late = now - self._played >= PERIOD or (
            not self.games and len(self._prompts) >= MIN_PROMPTS
        )
        if self._new and (late or self._new >= PROMPTS):
            self._played, self._new = now, 0
            self._play(state, index, estimates(now), now)

    def status(self, state: FleetState) -> CacheStatus:
        """Return the current state of the caches."""
        return CacheStatus(
            rho=occupancy(state.columns), fleet_rho=_together(state), evicted=self._evicted,
            rate=self._rate, first_eviction=self._first, placement=self.placement,
            before=self._before, after=self._after,
        )  # fmt: skip

    def summary(self, index: PrefixIndex) -> dict[str, float | int | None]:
        """Return the figures of the whole run; None for unknown ones."""
        figures: dict[str, float | int | None] = {
            name: value if math.isfinite(value) else None
            for name, value in (
                ("rho_max", self.max_rho),
                ("first_eviction_s", self._first),
                ("poa_before_eviction", self._before),
                ("poa_after_eviction", self._after),
            )
        }
        return {"evicted_blocks": index.removed, "games": self.games, **figures}

    def _play(self, state: FleetState, index: PrefixIndex, known: Estimates, now: int) -> None:
        published = [
            row for row, worker in enumerate(state.workers) if worker.events and worker.blocks
        ]
        if not published:
            return
        size = Counter(state.workers[row].block_size for row in published).most_common(1)[0][0]
        rows = [row for row in published if state.workers[row].block_size == size]
        ids = tuple(state.ids[row] for row in rows)
        table = Estimates(known.table[:, rows])
        links = np.minimum(
            _learned(table.transfer_token, PRIOR_TRANSFER[1]),
            _learned(table.fetch_token, PRIOR_FETCH[1]),
        )
        capacity = state.columns.blocks[rows].astype(np.float64)
        fleet = CachingFleet(ids, size, capacity, table, links)
        placement = caching_game(self._window(size, now), fleet, partial(index.overlaps, ids))
        if placement is None:
            return
        self.games += 1
        self.placement = placement
        if not self._evicted:
            self._before = placement.poa
        elif math.isnan(self._after):
            self._after = placement.poa

    def _window(self, size: int, now: int) -> Iterator[Prompt]:
        for at, worker, request, cached, known in self._prompts:
            keys = request.keys_of(size)
            # A fully cached prompt leaves one token to compute, not a block.
            cached_blocks, known_blocks = -(-cached // size), -(-known // size)
            weight = 0.5 ** ((now - at) / HALF_LIFE)
            yield Prompt(
                worker, request.prompt, keys, cached_blocks, max(cached_blocks, known_blocks),
                weight,
            )  # fmt: skip


def occupancy(columns: Columns) -> Floats:
    """Return rho of each worker, active over device blocks, (workers,); NaN if unknown.

    Active blocks are those of running and waiting requests (Georgiou 2026, Proposition 5); a
    waiting one counts as the mean of those routed there.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        blocks = np.where(columns.blocks > 0, columns.blocks, math.nan)
        tokens = np.maximum(columns.decode_tokens, columns.prefill_tokens)
        wanted = tokens / columns.block_size / blocks
        requests = np.maximum(columns.decode_requests, columns.prefill_requests)
        mean_wanted = wanted / np.maximum(requests, 1)
        reported = columns.running + columns.waiting > 0
        with_waiting = columns.kv_usage + columns.waiting * mean_wanted
        rho: Floats = np.where(reported, with_waiting, wanted)
    return rho


def _learned(seconds: Floats, prior: float) -> Floats:
    links: Floats = np.where(seconds == prior, math.inf, seconds)
    return links


def _together(state: FleetState) -> float:
    """Return rho of all workers that report their blocks; NaN if none does."""
    blocks = state.columns.blocks
    total = int(blocks.sum())
    return float(np.nansum(occupancy(state.columns) * blocks)) / total if total else math.nan
