"""What several simulated gateways are configured with."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.control.planner.config import check_wait

_MAX_GATEWAYS = 64


class GatewaysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gateways in front of a simulated fleet."""

    count: Annotated[
        int, option("Gateways, each with a control plane of its own.", "Gateways", name="gateways")
    ] = 1
    lag_s: Annotated[
        float,
        option("Seconds that what one tells the others takes.", "Gateways", name="gateway_lag"),
    ] = 0.0
    loss: Annotated[
        float, option("Part of these messages that are lost.", "Gateways", name="gateway_loss")
    ] = 0.0
    split: Annotated[
        Literal["random", "tenant"],
        option("How requests are split over them: random or tenant.", "Gateways",
               name="gateway_split"),
    ] = "random"  # fmt: skip
    exchanges: Annotated[
        bool,
        option(
            "Whether they tell one another what they sent.", "Gateways",
            flags=("--gateway-exchange/--no-gateway-exchange",),
        ),
    ] = True  # fmt: skip

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
