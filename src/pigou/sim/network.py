"""Links between workers: bandwidth, latency, and who gets how much of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from pigou.config import ConfigError
from pigou.sim.virtual_clock import Clock, Event, Phase

#: Gigabits a second: a thousand bits. Microseconds: an hour.
_SLOWEST, _LONGEST = 1e-6, 3.6e9


class LinkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each worker is linked to the others by, both ways at once.

    Attributes:
        gbps: gigabits a second, each way; 0 for a link that takes no time but its latency.
        latency_us: microseconds until the first byte arrives, set-up included.
        sharing: `fair` gives each transfer an equal part of its sender's link and of its
            receiver's, whichever is less, at all times; `fifo` sends them one after another.
        ends: whose links transfers share: `both`, or the `receiver`'s alone, where a sender has
            more than all its receivers take.
    """

    gbps: float = 400.0
    latency_us: float = 200.0
    sharing: Literal["fair", "fifo"] = "fair"
    ends: Literal["both", "receiver"] = "both"

    def __post_init__(self) -> None:
        """Refuse links that never deliver."""
        if self.gbps and not _SLOWEST <= self.gbps < math.inf:
            raise ConfigError(f"gbps is {self.gbps}; it must be 0, or at least {_SLOWEST:g}")
        if not 0.0 <= self.latency_us <= _LONGEST:
            raise ConfigError(f"latency_us is {self.latency_us}; it must be 0 to {_LONGEST:g}")

    @property
    def nanos_per_byte(self) -> float:
        """Of a transfer that has the link to itself."""
        return 8.0 / self.gbps if self.gbps else 0.0


@dataclass(slots=True, eq=False)
class _Transfer:
    number: int
    source: int
    target: int
    left: float
    done: Event
    since: int = 0
    pace: float = 0.0  # nanoseconds a byte
    version: int = 0


class Network:
    """Moves bytes between workers, which are known by number."""

    def __init__(self, config: LinkConfig, clock: Clock) -> None:
        """Start with idle links."""
        self.config = config
        self.transfers = 0
        self.bytes = 0
        self._clock = clock
        self._both = config.ends == "both"
        self._latency = round(config.latency_us * 1000)
        self._out: dict[int, list[_Transfer]] = {}
        self._in: dict[int, list[_Transfer]] = {}
        self._free: dict[tuple[str, int], int] = {}

    def send(self, source: int, target: int, size: int, now: int, done: Event) -> None:
        """Move `size` bytes; `done` is called when the last has arrived, some time after `now`."""
        self.transfers += 1
        self.bytes += size
        transfer = _Transfer(self.transfers, source, target, float(size), done)
        if not self.config.gbps:
            self._arrive(transfer, now)
        elif self.config.sharing == "fifo":
            ends = [("in", target)]
            if self._both:
                ends.append(("out", source))
            begin = max(now, *(self._free.get(end, 0) for end in ends))
            last = begin + math.ceil(size * self.config.nanos_per_byte)
            self._free.update(dict.fromkeys(ends, last))
            self._arrive(transfer, last)
        else:
            transfer.since = now
            self._out.setdefault(source, []).append(transfer)
            self._in.setdefault(target, []).append(transfer)
            self._share(source, target, now)

    def _arrive(self, transfer: _Transfer, sent: int) -> None:
        at = max(sent + self._latency, self._clock.now + 1)
        self._clock.at(at, Phase.LINK, transfer.number, transfer.done)

    def _share(self, source: int, target: int, now: int) -> None:
        """Divide the links of a sender and of a receiver anew."""
        touched = {each.number: each for each in self._out[source] + self._in[target]}
        for each in touched.values():
            sharers = len(self._in[each.target])
            if self._both:
                sharers = max(sharers, len(self._out[each.source]))
            pace = self.config.nanos_per_byte * sharers
            if pace == each.pace:
                continue
            if each.pace:
                each.left = max(0.0, each.left - (now - each.since) / each.pace)
            each.since, each.pace = now, pace
            each.version += 1
            self._expect(each, now)

    def _expect(self, each: _Transfer, now: int) -> None:
        version = each.version
        self._clock.at(
            now + math.ceil(each.left * each.pace), Phase.LINK, each.number,
            lambda at: self._sent(each, at) if version == each.version else None,
        )  # fmt: skip

    def _sent(self, each: _Transfer, now: int) -> None:
        self._out[each.source].remove(each)
        self._in[each.target].remove(each)
        self._share(each.source, each.target, now)
        self._arrive(each, now)
