"""Topology: nodes and labels, distances, and KV transfer cost per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum

import msgspec

from pigou.config import ConfigError, key_values
from pigou.request import Location


class TopologyLevel(StrEnum):
    """A topology level, narrowest first; nodes with the same label form a domain."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"


class Distance(IntEnum):
    """Distance class: the narrowest level shared by two locations."""

    HOST = 0
    RACK = 1
    ZONE = 2
    REMOTE = 3


def read_location(text: str) -> Location:
    """Read `host=H[,rack=R][,zone=Z]`, empty for unknown; raises ConfigError otherwise."""
    form = "host=H[,rack=R][,zone=Z]"
    labels = key_values("location", text, form)
    for name, value in labels.items():
        if name not in Location._fields or not value:
            raise ConfigError(f"location: {name}={value} is not understood; write {form}")
    if labels and "host" not in labels:
        raise ConfigError(f"location is {text!r}; host= is missing")
    return Location(**labels)


def distance(a: Location, b: Location) -> Distance:
    """Return the distance class; a missing label matches nothing."""
    if a.host and a.host == b.host:
        return Distance.HOST
    if a.zone == b.zone:
        if a.rack and a.rack == b.rack:
            return Distance.RACK
        if a.zone:
            return Distance.ZONE
    return Distance.REMOTE


def known_distance(a: Location, b: Location) -> Distance:
    """Return the distance class for routing: missing labels count as near until measured."""
    level = distance(a, b)
    if level is Distance.ZONE and not (a.rack and b.rack):
        return Distance.RACK
    return Distance.RACK if level is Distance.REMOTE and not (a.zone and b.zone) else level


def domain(location: Location, level: TopologyLevel) -> str:
    """Return the domain name of a location; empty without the label."""
    if level is TopologyLevel.HOST:
        return location.host
    if level is TopologyLevel.ZONE:
        return location.zone
    return f"{location.zone}/{location.rack}" if location.rack else ""


class DistanceCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Default KV seconds a byte by distance: 200 GB/s; 400, 100 and 10 Gbit/s."""

    host: float = 5e-12
    rack: float = 2e-11
    zone: float = 8e-11
    remote: float = 8e-10

    def __post_init__(self) -> None:
        costs = self.by_class
        if not (costs[0] > 0.0 and costs[-1] < math.inf and list(costs) == sorted(costs)):
            raise ConfigError(
                f"costs by distance are {costs}; give seconds a byte above 0, none below the one "
                "before it (host, rack, zone, remote)"
            )

    @property
    def by_class(self) -> tuple[float, float, float, float]:
        """Seconds a byte, by `Distance`."""
        return self.host, self.rack, self.zone, self.remote

    def seconds(self, a: Location, b: Location) -> float:
        """Return seconds a byte between two locations."""
        return self.by_class[distance(a, b)]


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A machine for workers; absent labels are empty."""

    host: str
    rack: str = ""
    zone: str = ""
    gpus: int = 0
    kind: str = ""
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.host or self.gpus < 0:
            raise ConfigError(
                f"node: host is {self.host!r} and gpus {self.gpus}; give a name, and at least 0"
            )

    @property
    def location(self) -> Location:
        """Topology labels."""
        return Location(self.host, self.rack, self.zone)


def label_warning(nodes: Iterable[Node]) -> str:
    """Return a warning about nodes without rack or zone labels; empty if all have both."""
    lacking = sorted(node.host for node in nodes if not (node.rack and node.zone))
    if not lacking:
        return ""
    names = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
    return (
        f"no rack or zone label on {names}: such a node counts as far from all others, and no "
        "gang that requires that level is placed there"
    )
