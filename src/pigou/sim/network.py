"""Links between workers: bandwidth, latency, and their sharing among transfers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from pigou.config import ConfigError, check_fields
from pigou.kv.resharding import TransferSplit
from pigou.sim.virtual_clock import Clock, Event, Phase

#: Gigabits a second: a thousand bits. Microseconds: an hour.
_MIN_GBPS, _MAX_LATENCY_US = 1e-6, 3_600_000_000


class LinkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The link of each worker to the others, both ways at once."""

    gbps: float = 400.0  # gigabits a second, each way; 0: only the latency takes time
    latency_us: float = 200.0  # microseconds until the first byte arrives, set-up included
    # `fair` gives each transfer an equal part of its sender's link and of its receiver's, whichever
    # is less, at all times; `fifo` sends them one after another.
    sharing: Literal["fair", "fifo"] = "fair"
    # ends whose links transfers share: `both`, or the `receiver`'s alone, where a sender has more
    # bandwidth than all its receivers take.
    ends: Literal["both", "receiver"] = "both"
    # owner of a link: a `worker` or a `gpu`. With `gpu`, ranks send the KV heads that the other
    # worker's ranks hold, and the slowest rank decides.
    per: Literal["worker", "gpu"] = "worker"
    # microseconds of each message that a rank handles after its first; for `gpu`.
    message_us: float = 20.0

    def __post_init__(self) -> None:
        if self.gbps and not _MIN_GBPS <= self.gbps < math.inf:
            raise ConfigError(f"gbps is {self.gbps}; it must be 0, or at least {_MIN_GBPS:g}")
        check_fields(self, "latency_us", "message_us", ge=0, le=_MAX_LATENCY_US)

    @property
    def nanos_per_byte(self) -> float:
        """Nanoseconds per byte of a transfer alone on the link."""
        return 8.0 / self.gbps if self.gbps else 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """Path between two workers, beside their own links."""

    nanos_per_byte: float  # minimum ns per byte of a transfer
    latency_ns: int  # ns to the first byte; overrides the link's
    own_links: bool = True  # whether it also uses the workers' links


@dataclass(slots=True, eq=False)
class _Transfer:
    number: int
    source: int
    target: int
    left: float
    done: Event
    way: Way
    split: TransferSplit
    since: int = 0
    pace: float = 0.0  # nanoseconds a byte
    version: int = 0


class Network:
    """Transfers bytes between workers, known by number."""

    def __init__(
        self, config: LinkConfig, clock: Clock, ways: Callable[[int, int], Way] | None = None,
        splits: Callable[[int, int], TransferSplit] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        direct = Way(0.0, round(config.latency_us * 1000))
        self._ways = ways or (lambda _source, _target: direct)
        whole = TransferSplit()
        self._splits = splits or (lambda _source, _target: whole)
        self.transfers = 0
        self.bytes = 0
        self._clock = clock
        self._both = config.ends == "both"
        self._out: dict[int, list[_Transfer]] = {}
        self._in: dict[int, list[_Transfer]] = {}
        self._free: dict[tuple[str, int], int] = {}

    def send(self, source: int, target: int, size: int, now: int, done: Event) -> None:
        """Move `size` bytes; `done` is called when the last has arrived, some time after `now`."""
        self.transfers += 1
        self.bytes += size
        way = self._ways(source, target)
        split = self._splits(source, target)
        transfer = _Transfer(self.transfers, source, target, float(size), done, way, split)
        if not self.config.gbps or not way.own_links:
            self._arrive(transfer, now + math.ceil(size * way.nanos_per_byte))
        elif self.config.sharing == "fifo":
            links, share = [("in", target)], split.target_share
            if self._both:
                links.append(("out", source))
                share = max(share, split.source_share)
            begin = max(now, *(self._free.get(link, 0) for link in links))
            pace = max(self.config.nanos_per_byte * share, way.nanos_per_byte)
            last = begin + math.ceil(size * pace)
            self._free.update(dict.fromkeys(links, last))
            self._arrive(transfer, last)
        else:
            transfer.since = now
            self._out.setdefault(source, []).append(transfer)
            self._in.setdefault(target, []).append(transfer)
            self._share(source, target, now)

    def _arrive(self, transfer: _Transfer, sent: int) -> None:
        messages_ns = round((transfer.split.messages - 1) * self.config.message_us * 1000)
        at = max(sent + transfer.way.latency_ns + messages_ns, self._clock.now + 1)
        self._clock.at(at, Phase.LINK, transfer.number, transfer.done)

    def _share(self, source: int, target: int, now: int) -> None:
        touched = {transfer.number: transfer for transfer in self._out[source] + self._in[target]}
        for transfer in touched.values():
            split = transfer.split
            sharers = len(self._in[transfer.target]) * split.target_share
            if self._both:
                sharers = max(sharers, len(self._out[transfer.source]) * split.source_share)
            pace = max(self.config.nanos_per_byte * sharers, transfer.way.nanos_per_byte)
            if pace == transfer.pace:
                continue
            if transfer.pace:
                transfer.left = max(0.0, transfer.left - (now - transfer.since) / transfer.pace)
            transfer.since, transfer.pace = now, pace
            transfer.version += 1
            self._expect(transfer, now)

    def _expect(self, transfer: _Transfer, now: int) -> None:
        version = transfer.version
        self._clock.at(
            now + math.ceil(transfer.left * transfer.pace), Phase.LINK, transfer.number,
            lambda at: self._sent(transfer, at) if version == transfer.version else None,
        )  # fmt: skip

    def _sent(self, transfer: _Transfer, now: int) -> None:
        self._out[transfer.source].remove(transfer)
        self._in[transfer.target].remove(transfer)
        self._share(transfer.source, transfer.target, now)
        self._arrive(transfer, now)
