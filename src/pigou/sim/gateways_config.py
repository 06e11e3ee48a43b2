"""What several simulated gateways are configured with."""

from __future__ import annotations

from typing import Literal

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.config import check_wait

_MAX_GATEWAYS = 64


class GatewaysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gateways in front of a simulated fleet."""

    count: int = 1  # each with a control plane of its own
    lag_s: float = 0.0  # seconds until a message reaches the other gateways
    loss: float = 0.0  # share of these messages that are lost
    split: Literal["random", "tenant"] = "random"  # how requests are split over them
    exchanges: bool = True  # whether they send one another what they route

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MAX_GATEWAYS:
            raise ConfigError(f"count is {self.count}; it must be 1 to {_MAX_GATEWAYS}")
        check_wait("lag_s", self.lag_s, 1)
        if not 0.0 <= self.loss < 1.0:
            raise ConfigError(f"loss is {self.loss}; it must be at least 0, and below 1")
        if self.count == 1 and (self.lag_s or self.loss):
            raise ConfigError(
                f"lag_s is {self.lag_s} and loss {self.loss}, and there is 1 gateway, which tells "
                "nobody anything; give a count, or leave them out"
            )
