"""The timeline of a simulated fleet: samples of its state on the virtual clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.request import SECOND
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH, Phase

#: Series of the fleet: `client` waits for a connection or is on its way; `queued` waits for a
#: worker; `running` and `waiting` are sums over the workers; `rho` is active over device blocks;
#: `evicted` counts blocks since the beginning.
FLEET = (
    "client", "queued", "running", "waiting", "regime", "signal", "temperature",
    "poa", "poa_queueing", "poa_routing", "poa_prefill_decode", "poa_legacy",
    "poa_caching", "rho", "evicted",
)  # fmt: skip
#: Series of one worker: running and waiting requests, share of KV blocks in use, toll in seconds.
WORKER = ("running", "waiting", "kv_usage", "toll")
#: Key of the samples among the last events of a moment: after all plans.
_LAST = 2**50


def _columns(workers: int) -> list[tuple[str, type[np.float32], tuple[int]]]:
    return [(name, np.float32, (workers,)) for name in WORKER]


class Timeline:
    """Samples a simulation every `period` of virtual time; beyond `max_samples` it doubles."""

    def __init__(
        self, simulation: Simulation, *, period: int = SECOND // 20, max_samples: int = 1024
    ) -> None:
        if period < 1 or max_samples < 2 or max_samples % 2:
            raise ValueError(
                f"period {period} and most {max_samples} must be positive, and most even"
            )
        self.period = period
        self._simulation, self._count = simulation, 0
        self._row: dict[str, int] = {}
        self._time = np.zeros(max_samples, dtype=np.int64)
        self._fleet = np.full(max_samples, np.nan, dtype=[(name, np.float64) for name in FLEET])
        self._worker = np.full(max_samples, np.nan, dtype=_columns(0))
        simulation.clock.at(EPOCH, Phase.PLAN, _LAST, self._sample)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers so far, in array order."""
        self._add_workers()
        return tuple(self._row)

    @property
    def times(self) -> NDArray[np.float64]:
        """When the samples were taken, seconds from the beginning, (samples,)."""
        seconds: NDArray[np.float64] = (self._time[: self._count] - EPOCH) / SECOND
        return seconds

    def fleet(self, name: str) -> NDArray[np.float64]:
        """Return a series of `FLEET`, (samples,); NaN if missing."""
        column: NDArray[np.float64] = self._fleet[name][: self._count]
        return column

    def worker(self, name: str) -> NDArray[np.float32]:
        """Return a series of `WORKER`, (samples, workers); NaN if dead or unknown."""
        column: NDArray[np.float32] = self._worker[name][: self._count]
        return column

    def _sample(self, now: int) -> None:
        if self._count == len(self._time):
            self._thin()
        row, self._count = self._count, self._count + 1
        self._time[row] = now
        running, waiting = self._sample_workers(row, now)
        simulation = self._simulation
        planes, inflight = simulation.fleet.planes, simulation.fleet.dispatcher.inflight
        sample = {
            "client": simulation.client.open - inflight,
            "queued": sum(len(plane.queue) for plane in planes),
            "running": running,
            "waiting": waiting,
            **self._sample_plane(row, now),
        }
        for name, value in sample.items():
            self._fleet[name][row] = value
        simulation.clock.at(now + self.period, Phase.PLAN, _LAST, self._sample)

    def _sample_workers(self, row: int, now: int) -> tuple[float, float]:
        self._add_workers()
        columns = [self._worker[name][row] for name in WORKER]
        for column in columns:
            column[:] = np.nan
        running, waiting, kv_usage, _ = columns
        for index, worker in enumerate(self._simulation.fleet.workers):
            if worker.sim is not None:
                running[index], waiting[index], kv_usage[index] = worker.sim.load(now)
        return float(np.nansum(running)), float(np.nansum(waiting))

    def _sample_plane(self, row: int, now: int) -> dict[str, float]:
        status = self._simulation.fleet.plane.status(now)
        tolls = self._worker["toll"][row]
        for name, toll in zip(status.workers, status.tolls.tolist(), strict=True):
            tolls[self._row[name]] = toll
        caching = status.caching
        sample = {
            "regime": status.regime.level,
            "signal": status.signal,
            "temperature": status.temperature,
            "poa_caching": np.nan if caching.placement is None else caching.placement.poa,
            "rho": caching.fleet_rho,
            "evicted": caching.evicted,
        }
        if status.poa is not None:
            parts = status.poa.anarchy
            sample |= {
                "poa": parts.whole.value,
                "poa_queueing": parts.queueing.value,
                "poa_routing": parts.routing.value,
                "poa_prefill_decode": parts.prefill_decode.value,
                "poa_legacy": status.poa.legacy,
            }
        return sample

    def _add_workers(self) -> None:
        workers = self._simulation.fleet.workers
        known = len(self._row)
        if len(workers) == known:
            return
        self._row |= {worker.name: row for row, worker in enumerate(workers)}
        wider = np.full(len(self._worker), np.nan, dtype=_columns(len(workers)))
        for name in WORKER:
            wider[name][:, :known] = self._worker[name]
        self._worker = wider

    def _thin(self) -> None:
        """Drop every second sample; those that stay are even multiples of the period."""
        half = self._count // 2
        for array in (self._time, self._fleet, self._worker):
            array[:half] = array[: self._count : 2]
        self._count, self.period = half, self.period * 2
