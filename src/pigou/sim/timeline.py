"""A timeline: what a simulated fleet looked like as it ran, sampled on the virtual clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH, Phase

#: Of the fleet. `client` waits for a connection, or is on its way; `queued` waits for a worker;
#: `running` and `waiting` are the sums over the workers; `rho` is active over device blocks,
#: `evicted` counts blocks since the beginning.
FLEET = (
    "client", "queued", "running", "waiting", "regime", "signal", "temperature",
    "poa", "poa_queueing", "poa_routing", "poa_prefill_decode", "poa_legacy",
    "poa_caching", "rho", "evicted",
)  # fmt: skip
#: Of one worker: requests that run and wait, share of KV blocks in use, and the toll in seconds.
WORKER = ("running", "waiting", "kv_usage", "toll")
#: Key of the samples among the last events of a moment: after all plans.
_LAST = 2**50


class Timeline:
    """Takes a sample every `period` of virtual time.

    Memory is bounded: when there are `most` samples, every second one is dropped, and the period
    doubles. A sample only reads: results are the same, to the last digit, with and without.

    Attributes:
        period: nanoseconds between two samples.
        workers: names, in the order of the arrays.
    """

    def __init__(
        self, simulation: Simulation, *, period: int = SECOND // 20, most: int = 1024
    ) -> None:
        """Follow a simulation that has not run yet.

        Args:
            simulation: to follow.
            period: nanoseconds between the first samples.
            most: samples to keep, even.

        Raises:
            ValueError: `period` or `most` is not positive, or `most` is odd.
        """
        if period < 1 or most < 2 or most % 2:
            raise ValueError(f"period {period} and most {most} must be positive, and most even")
        self.period = period
        self.workers = tuple(each.name for each in simulation.fleet.members)
        self._simulation, self._count = simulation, 0
        self._row = {name: row for row, name in enumerate(self.workers)}
        self._time = np.zeros(most, dtype=np.int64)
        self._fleet = np.full((most, len(FLEET)), np.nan)
        shape = (most, len(WORKER), len(self.workers))
        self._worker: NDArray[np.float32] = np.full(shape, np.nan, dtype=np.float32)
        simulation.clock.at(EPOCH, Phase.PLAN, _LAST, self._sample)

    @property
    def times(self) -> NDArray[np.float64]:
        """When the samples were taken, seconds from the beginning, (samples,)."""
        found: NDArray[np.float64] = (self._time[: self._count] - EPOCH) / SECOND
        return found

    def fleet(self, name: str) -> NDArray[np.float64]:
        """Return one of `FLEET`, (samples,); NaN where there was no value yet."""
        return self._fleet[: self._count, FLEET.index(name)]

    def worker(self, name: str) -> NDArray[np.float32]:
        """Return one of `WORKER`, (samples, workers); NaN where a worker was dead or unknown."""
        return self._worker[: self._count, WORKER.index(name)]

    def _sample(self, now: int) -> None:
        if self._count == len(self._time):
            self._thin()
        row, self._count = self._count, self._count + 1
        self._time[row] = now
        loads = self._loads(row, now)
        self._prices(row, now)
        simulation = self._simulation
        plane, inflight = simulation.fleet.plane, simulation.fleet.dispatcher.inflight
        self._fleet[row, :4] = (
            simulation.client.open - inflight, len(plane.queue), *loads,
        )  # fmt: skip
        simulation.clock.at(now + self.period, Phase.PLAN, _LAST, self._sample)

    def _loads(self, row: int, now: int) -> tuple[float, float]:
        """Note what the workers have to do; return all that run, and all that wait."""
        found = self._worker[row]
        found[:] = np.nan
        for place, member in enumerate(self._simulation.fleet.members):
            if member.sim is not None:
                found[:3, place] = member.sim.load(now)
        return float(np.nansum(found[0])), float(np.nansum(found[1]))

    def _prices(self, row: int, now: int) -> None:
        """Note what the control plane thinks."""
        status = self._simulation.fleet.plane.status(now)
        for name, toll in zip(status.workers, status.tolls.tolist(), strict=True):
            self._worker[row, 3, self._row[name]] = toll
        found, poa = status.poa, np.full(5, np.nan)
        if found is not None:
            parts = found.anarchy
            poa[:] = (
                parts.whole.value, parts.queueing.value, parts.routing.value,
                parts.prefill_decode.value, found.legacy,
            )  # fmt: skip
        caching = status.caching
        placed = np.nan if caching.placement is None else caching.placement.poa
        self._fleet[row, 4:] = (
            status.regime.level, status.signal, status.temperature, *poa,
            placed, caching.fleet_rho, caching.evicted,
        )  # fmt: skip

    def _thin(self) -> None:
        """Drop every second sample; those that stay are even multiples of the period."""
        half = self._count // 2
        for array in (self._time, self._fleet, self._worker):
            array[:half] = array[: self._count : 2]
        self._count, self.period = half, self.period * 2
