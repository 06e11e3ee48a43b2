"""How a simulated fleet changes while it runs: its planner, and what starts and flips take."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.control.planner.config import PlannerConfig, RequestClassConfig, check_wait

_MAX_FACTOR = 1e6


class StartUpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The start of a worker that joins while the fleet runs."""

    seconds: float = 100.0  # mean time from the order to a worker that is ready
    cv: float = 0.0  # standard deviation of that time over its mean, lognormal; 0 for a constant
    failures: float = 0.0  # share of starts that fail, at their end; the next follows at once
    # seconds after the start in which steps take `warm_up_factor` times as long.
    warm_up_s: float = 0.0
    warm_up_factor: float = 1.0  # at least 1
    losses_per_hour: float = 0.0  # of one such worker, as of spot machines: it dies for good

    def __post_init__(self) -> None:
        for name in ("seconds", "warm_up_s"):
            check_wait(f"start_up.{name}", getattr(self, name))
        if not 0.0 <= self.cv <= 10.0:
            raise ConfigError(f"start_up.cv is {self.cv}; it must be 0 to 10")
        if not 0.0 <= self.losses_per_hour <= _MAX_FACTOR:
            raise ConfigError(
                f"start_up.losses_per_hour is {self.losses_per_hour}; it must be 0 to "
                f"{_MAX_FACTOR:g}"
            )
        if not 0.0 <= self.failures <= 1.0:
            raise ConfigError(f"start_up.failures is {self.failures}; it must be 0 to 1")
        if self.failures and not self.seconds:
            raise ConfigError(
                f"start_up.failures is {self.failures}, and starts take no time; give "
                "start_up.seconds above 0"
            )
        if not 1.0 <= self.warm_up_factor <= _MAX_FACTOR:
            raise ConfigError(
                f"start_up.warm_up_factor is {self.warm_up_factor}; it must be 1 to {_MAX_FACTOR:g}"
            )


class RoleFlipConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change of role."""

    # whether the worker ends its streams first; else the role is a label, at once.
    drains: bool = True
    seconds: float = 0.0
    keeps_cache: bool = True  # whether the prefix cache survives

    def __post_init__(self) -> None:
        check_wait("flip.seconds", self.seconds)


class ScalingConfig(PlannerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The objective of a simulated fleet, and the planner that changes the fleet for it."""

    classes: Annotated[
        tuple[RequestClassConfig, ...],
        option(
            "Objective of some: NAME,ttft=T,itl=T[,percentile=P][,weight=W][,key=TENANT]"
            "[,min_prompt_tokens=N][,max_prompt_tokens=N]; may be given again.",
            "Planner",
            name="slo_class",
            form="entries",
        ),
    ] = ()
    start_up: Annotated[
        float | None,
        option("Seconds until a new worker serves.  [default: the fleet's, 100]", "Planner"),
    ] = None
    performance: Annotated[
        str,
        option(
            "FILE of `pigou sweep`, for the planner.  [default: the workers' timing is measured]",
            "Planner",
        ),
    ] = ""

    def __post_init__(self) -> None:
        PlannerConfig.__post_init__(self)
        for config in self.classes:
            for name in ("header", "model"):
                if value := getattr(config, name):
                    raise ConfigError(
                        f"class {config.name}: {name} is {value!r}, and simulated requests have "
                        "none; leave it out"
                    )
