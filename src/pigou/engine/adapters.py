"""Device slots of LoRA adapters: at most `EngineConfig.max_loras` compute at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pigou.engine.plan import AdapterLoad
from pigou.kv.memory_price import UseRates, held_value


class AdapterSlots:
    """Which adapter is in which slot; of the idle ones that of least `value` is evicted.

    Others overtake an adapter that waits for a slot. After `patience` admissions the adapter of
    least value admits nobody more, until its slot is idle. Ties go to the least recently used.
    """

    def __init__(self, slots: int, patience: int, is_wanted: Callable[[str], bool]) -> None:
        """`is_wanted` says whether a waiting request needs an adapter."""
        self.loads: list[AdapterLoad] = []  # loads for the next plan
        self._slots: dict[str, int] = {}  # least recently used first
        self._free = list(range(slots))
        self._users: Counter[str] = Counter()  # rows
        self._loading: set[str] = set()
        self._unused: set[str] = set()  # since they were given their slot
        self._queue: dict[str, int] = {}  # admissions since an adapter waits for a slot, in order
        self._closing = ""  # admits nobody
        self._rates = UseRates()
        self._load_s: dict[str, float] = {}  # seconds of the last load
        self._patience, self._is_wanted = patience, is_wanted

    def admits(self, adapter: str) -> bool:
        """True if requests of an adapter may start; otherwise it is loaded or waits for a slot."""
        if adapter in self._slots and adapter != self._closing:
            self._slots[adapter] = self._slots.pop(adapter)
            return adapter not in self._loading
        if adapter not in self._queue:
            self._queue[adapter] = 0
            self._forget_older(adapter)
        self.assign()
        return False

    def enter(self, adapter: str) -> None:
        """Note that a request took a row."""
        self._unused.discard(adapter)
        self._users[adapter] += bool(adapter)
        if adapter:
            self._rates.use(adapter)
        for first in self._queue:
            self._queue[first] += 1
            if self._queue[first] >= self._patience and not self._closing:
                ready = [name for name in self._slots if name not in self._loading | self._unused]
                self._closing = min(ready, key=self.value, default="")
            break

    def leave(self, adapter: str) -> None:
        """Note that a request lost its row."""
        self._users[adapter] -= bool(adapter)
        self.assign()

    def value(self, adapter: str) -> float:
        """Return what a slot is worth to an adapter, `held_value` per slot: all are of one size."""
        return held_value(self._rates.rate(adapter), self._load_s.get(adapter, 1.0), 1)

    def loaded(self, adapter: str, good: bool, seconds: float = 0.0) -> None:
        """Note the end of a load; a failed one frees the slot."""
        self._loading.remove(adapter)
        if good and seconds > 0:
            self._load_s[adapter] = seconds
        elif not good:
            self._unused.remove(adapter)
            self._free.append(self._slots.pop(adapter))
        self.assign()

    def assign(self) -> None:
        """Give free and idle slots to those that wait, in order."""
        self._queue = {name: count for name, count in self._queue.items() if self._is_wanted(name)}
        for adapter in list(self._queue):
            if adapter in self._slots:  # closing: it must be idle before it waits in turn
                if self._users[adapter]:
                    continue
                self._closing = ""
                self._free.append(self._slots.pop(adapter))
            if not self._free:
                idles = [name for name in self._slots if self._is_idle(name)]
                if not idles:
                    return
                idle = min(idles, key=lambda name: (name != self._closing, self.value(name)))
                self._closing = "" if idle == self._closing else self._closing
                self._free.append(self._slots.pop(idle))
            del self._queue[adapter]
            slot = self._slots[adapter] = self._free.pop()
            self._loading.add(adapter)
            self._unused.add(adapter)
            self.loads.append(AdapterLoad(adapter, slot))

    def _forget_older(self, adapter: str) -> None:
        """Forget the uses of an adapter's older versions: keys are NAME@VERSION."""
        name = adapter.partition("@")[0] + "@"
        for held in [key for key in self._slots if key.startswith(name) and key != adapter]:
            self._rates.forget(held)

    def _is_idle(self, adapter: str) -> bool:
        if self._users[adapter] or adapter in self._loading:
            return False
        return adapter not in self._unused or not self._is_wanted(adapter)
