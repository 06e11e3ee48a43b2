"""PathTimes: which backend pulls of a host's blocks take first, by the seconds that they took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Pulls that each backend of a host gets before times decide.
TRIES = 2
#: Part of all seconds of a host's pulls that may be spent on trying slower backends again.
EXPLORED_SHARE = 0.02
#: Pulls of a host between two such trials of a backend, at least.
_MIN_IDLE = 32
#: Weight of what was known, at each new pull.
_DECAY = 0.9
#: Pulls of the host for which a backend that failed is put last; doubled by each further failure.
_MIN_PAUSE, _MAX_PAUSE = 8, 256
#: Hosts that are remembered: a sender may claim any name.
_MAX_HOSTS = 1024


@dataclass(slots=True)
class _PathLaw:
    """Seconds of a pull as base + size * seconds a byte; weighted least squares of late pulls."""

    pulls: int = 0
    failures: int = 0
    paused_until: int = 0
    last: int = 0
    weight: float = 0.0
    mean_size: float = 0.0
    mean_s: float = 0.0
    size_var: float = 0.0
    covariance: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        old = self.weight * _DECAY
        self.weight = old + 1.0
        off_size, off_s = size - self.mean_size, seconds - self.mean_s
        self.mean_size += off_size / self.weight
        self.mean_s += off_s / self.weight
        part = old / self.weight
        self.size_var = part * (self.size_var + off_size * off_size / self.weight)
        self.covariance = part * (self.covariance + off_size * off_s / self.weight)
        self.pulls += 1
        self.failures = 0

    def predict(self, size: int) -> float:
        """Return the seconds of a pull; of one size only, they are proportional to bytes."""
        proportional = self.mean_s / max(self.mean_size, 1.0)
        if self.size_var <= (0.05 * self.mean_size) ** 2:
            return proportional * size
        slope = min(max(self.covariance / self.size_var, 0.0), proportional)
        return self.mean_s + slope * (size - self.mean_size)


@dataclass(slots=True)
class _HostPaths:
    laws: dict[str, _PathLaw] = field(default_factory=dict)
    pulls: int = 0
    total_s: float = 0.0
    explored_s: float = 0.0


class PathTimes:
    """Learns seconds by host and backend. It has no clock and no randomness."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _HostPaths] = OrderedDict()

    def order(self, host: str, names: Sequence[str], size: int) -> list[str]:
        """Return backends in the order in which a pull is to try them.

        The quickest by its law is first. A backend with fewer than `TRIES` pulls goes before it. So
        does one that was not used for `_MIN_IDLE` pulls, if what it costs more is within
        `EXPLORED_SHARE` of the seconds of all pulls of the host. Those that just failed are last.
        """
        paths = self._paths(host)
        laws = {name: paths.laws.setdefault(name, _PathLaw()) for name in names}
        well = [name for name in names if laws[name].paused_until <= paths.pulls]
        paused = [name for name in names if name not in well]
        new = [name for name in well if laws[name].pulls < TRIES]
        known = sorted(
            (name for name in well if name not in new), key=lambda name: laws[name].predict(size)
        )
        if not new and len(known) > 1:
            best_s = laws[known[0]].predict(size)
            left_s = EXPLORED_SHARE * paths.total_s - paths.explored_s
            stale = min(known[1:], key=lambda name: laws[name].last)
            idle = paths.pulls - laws[stale].last >= _MIN_IDLE
            if idle and laws[stale].predict(size) - best_s <= left_s:
                known.remove(stale)
                known.insert(0, stale)
        return [*new, *known, *paused]

    def add(self, host: str, name: str, size: int, seconds: float) -> bool:
        """Note a pull that brought all its blocks; return whether it is the first of its path."""
        paths = self._paths(host)
        law = paths.laws.setdefault(name, _PathLaw())
        others = [other for key, other in paths.laws.items() if key != name and other.pulls]
        if law.pulls >= TRIES and others:
            best_s = min(other.predict(size) for other in others)
            if law.predict(size) > best_s:  # it was tried again, not chosen
                paths.explored_s += max(0.0, seconds - best_s)
        paths.pulls += 1
        paths.total_s += seconds
        law.add(size, seconds)
        law.last = paths.pulls
        return law.pulls == 1

    def fail(self, host: str, name: str) -> None:
        """Note a pull that the backend could not make."""
        paths = self._paths(host)
        law = paths.laws.setdefault(name, _PathLaw())
        paths.pulls += 1
        law.paused_until = paths.pulls + min(_MAX_PAUSE, _MIN_PAUSE << law.failures)
        law.failures += 1

    def predict(self, host: str, name: str, size: int) -> float | None:
        """Return the seconds of a pull of `size` bytes; None before the first one."""
        law = self._paths(host).laws.get(name)
        return law.predict(size) if law is not None and law.pulls else None

    def _paths(self, host: str) -> _HostPaths:
        paths = self._hosts.setdefault(host, _HostPaths())
        self._hosts.move_to_end(host)
        if len(self._hosts) > _MAX_HOSTS:
            self._hosts.popitem(last=False)
        return paths
