"""Hosts of a simulated fleet, the links between them, and how its workers are placed there."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pigou.config import ConfigError
from pigou.control.placement.gang import Pack
from pigou.control.placement.topology import Distance, DistanceCosts, Node

_MAX_HOSTS = 10_000


class DistanceLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The way between two workers of a distance class."""

    gbps: float  # gigabits a second that one transfer gets at most
    latency_us: float  # microseconds until the first byte arrives

    def __post_init__(self) -> None:
        if not 0.0 < self.gbps < math.inf or not 0.0 <= self.latency_us < math.inf:
            raise ConfigError(
                f"topology: gbps is {self.gbps} and latency_us {self.latency_us}; give above 0, "
                "and at least 0"
            )


class HostGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hosts that are alike: `count` of them, with so many GPUs, in a rack of a zone."""

    count: int = 1
    gpus: int = 8
    rack: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MAX_HOSTS or self.gpus < 1:
            raise ConfigError(
                f"topology: count is {self.count} and gpus {self.gpus}; give 1 to {_MAX_HOSTS}, "
                "and at least 1"
            )


class TopologyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the workers of a fleet run.

    A transfer is as quick as its part of the workers' links, and as the link of its distance
    class, whichever takes longer. Within a host it does not use the workers' links.
    """

    hosts: tuple[HostGroup, ...]
    # `cost` places all workers as one gang, `random` each on any host with room.
    placement: Literal["cost", "random"] = "cost"
    pack: Pack | None = None  # how near to each other the workers must be
    host: DistanceLink = DistanceLink(gbps=1600.0, latency_us=10.0)
    rack: DistanceLink = DistanceLink(gbps=400.0, latency_us=200.0)
    zone: DistanceLink = DistanceLink(gbps=100.0, latency_us=300.0)
    remote: DistanceLink = DistanceLink(gbps=10.0, latency_us=2000.0)

    @property
    def links(self) -> tuple[DistanceLink, ...]:
        """Links by `Distance`."""
        return self.host, self.rack, self.zone, self.remote

    @property
    def costs(self) -> DistanceCosts:
        """Seconds a byte by distance class."""
        names = [level.name.lower() for level in Distance]
        return DistanceCosts(
            **{n: 8e-9 / link.gbps for n, link in zip(names, self.links, strict=True)}
        )

    @property
    def nodes(self) -> list[Node]:
        """All hosts, named by their number."""
        groups = [group for group in self.hosts for _ in range(group.count)]
        return [
            Node(host=f"host-{number}", rack=group.rack, zone=group.zone, gpus=group.gpus)
            for number, group in enumerate(groups)
        ]
