"""LoRA adapters of the workers: which are loaded, what a load costs, and where copies belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from pigou.control.messages import AdapterReport
from pigou.control.routing.view import AdapterPrices
from pigou.games.replication import whole_copies
from pigou.request import SECOND

#: Seconds over which requests of an adapter are counted.
_MEMORY_S = 60.0
#: Seconds of a load until a worker has measured one.
_LOAD_S = 0.1


@dataclass(slots=True)
class WorkerAdapters:
    """The adapters of one worker."""

    slots: int = 1
    load_s: float = _LOAD_S
    # when adapters are or were loaded, in ns, least recently used first.
    loaded: dict[str, int] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)  # adapters sent there since its last report
    free_at: int = 0  # end of the loads under way, which take turns

    def take(self, adapter: str, now: int, demand: Callable[[str, int], float]) -> bool:
        """Use an adapter, in the place of that of least demand; True if it has to be loaded."""
        ready_at = self.loaded.pop(adapter, None)
        new = ready_at is None
        if ready_at is None:
            ready_at = self.free_at = max(self.free_at, now) + int(self.load_s * SECOND)
            if len(self.loaded) >= self.slots:
                del self.loaded[min(self.loaded, key=lambda name: demand(name, now))]
        self.loaded[adapter] = ready_at
        self.fresh.add(adapter)
        return new

    def wait_s(self, adapter: str, now: int) -> float:
        """Return the seconds until a request for an adapter can start."""
        ready_at = self.loaded.get(adapter)
        if ready_at is None:
            return self.load_s + max(0, self.free_at - now) / SECOND
        return max(0, ready_at - now) / SECOND


class AdapterTable:
    """Adapters by worker, as reported and as later routes change them."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerAdapters] = {}
        self._counts: dict[str, tuple[float, int]] = {}  # decayed requests, and when, in ns
        self.cold: set[str] = set()  # requests that wait for a load

    def report(self, report: AdapterReport) -> None:
        """Take a worker's report; adapters sent there since the last one may be under way."""
        known = self._workers.setdefault(report.worker, WorkerAdapters())
        known.slots, known.load_s = report.slots, report.load_s or _LOAD_S
        present = {*report.loaded, *known.fresh}
        loaded = dict.fromkeys(report.loaded, 0)  # those that were not known to be, first
        for name, ready_at in known.loaded.items():
            loaded.pop(name, None)
            if name in present:
                loaded[name] = ready_at
        known.loaded = dict(list(loaded.items())[-known.slots :])
        known.fresh = set()

    def down(self, worker: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker, None)

    def routed(self, request: str, adapter: str, workers: Iterable[str], now: int) -> None:
        """Note a route to one or two workers."""
        self._counts[adapter] = self.demand(adapter, now) + 1.0, now
        for worker in workers:
            if worker in self._workers and self._workers[worker].take(adapter, now, self.demand):
                self.cold.add(request)

    def demand(self, adapter: str, now: int) -> float:
        """Return the requests for an adapter within about the last minute."""
        count, at = self._counts.get(adapter, (0.0, now))
        return count * exp((at - now) / (_MEMORY_S * SECOND))

    def prices(self, adapter: str, workers: Sequence[str], now: int) -> AdapterPrices | None:
        """Return each worker's seconds to load an adapter, and what it displaces; None for none.

        The evicted adapter is loaded again if it is asked for before the new one is: with
        probability r' / (r' + r), by their rates.
        """
        if not self._workers:
            return None
        load_s, displaced_s = np.zeros((2, len(workers)))
        own = self.demand(adapter, now)
        for row, worker in enumerate(workers):
            if (known := self._workers.get(worker)) is None:
                continue
            load_s[row] = known.wait_s(adapter, now)
            if adapter not in known.loaded and len(known.loaded) >= known.slots:
                other = min(self.demand(name, now) for name in known.loaded)
                displaced_s[row] = known.load_s * other / max(other + own, 1e-9)
        return AdapterPrices(load_s, displaced_s)

    def placement(self, now: int) -> dict[str, list[str]]:
        """Return the adapters that each worker should hold: the caching game's optimum."""
        workers = [name for name, known in self._workers.items() if known.slots]
        names = [name for name in self._counts if self.demand(name, now) >= 0.5]
        if not workers or not names:
            return {}
        demand = [self.demand(name, now) for name in names]
        held = whole_copies(demand, [self._workers[worker].slots for worker in workers])
        return {
            worker: [name for name, wanted in zip(names, row.tolist(), strict=True) if wanted]
            for worker, row in zip(workers, held, strict=True)
        }
