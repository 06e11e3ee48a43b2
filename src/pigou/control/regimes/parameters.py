"""Routing parameters: what controllers set, and the sample that they take of each end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import msgspec

from pigou.config import ConfigError


class RoutingSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of the choice among candidates."""

    temperature: float = 0.0  # of the softmax over costs; 0 takes the cheapest
    # omega of Eq. 1 (Georgiou 2026): weight of the blocks that a worker would have to prefill, net
    # of cached ones, against the blocks that it has in use.
    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "overlap_weight"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite, at least 0")


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a request is routed under."""

    temperature: float = 0.0
    overlap_weight: float = 1.0  # of the blocks to prefill, net of cached ones
    # index of this choice of the controller's; the outcome of the request carries it back
    # (`TTFTSample.setting`, `E2ESample.setting`).
    setting: int = 0

    @classmethod
    def of(cls, setting: RoutingSetting, index: int = 0) -> Self:
        """Return a setting with its index."""
        return cls(setting.temperature, setting.overlap_weight, index)


class E2ESample(msgspec.Struct, frozen=True):
    """The end of a request."""

    seconds: float  # from its arrival to its last token
    # seconds that it would take with the fleet to itself, as far as known: what its latency is
    # compared with.
    unloaded: float = 1.0
    setting: int = 0  # index of the parameters that it was routed under
