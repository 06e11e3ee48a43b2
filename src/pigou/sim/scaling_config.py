"""How a simulated fleet changes while it runs: its planner, and what starts and flips take."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.control.planner.objectives import Slo, WorkloadClass
from pigou.sim.arrival_rate import MAX_SECONDS

#: Stands for a fleet that no planner changes.
NO_PLANNER = "none"
_MAX_WORKERS = 10_000
_MAX_FACTOR = 1e6


class StartUpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The start of a worker that joins while the fleet runs.

    Attributes:
        seconds: mean time from the order to a worker that is ready.
        cv: standard deviation of that time over its mean, lognormal; 0 for a constant.
        failures: share of starts that fail, at their end; the next follows at once.
        warm_up_s: seconds after the start in which steps take `warm_up_factor` times as long.
        warm_up_factor: at least 1.
        losses_per_hour: of one such worker, as of spot machines: it dies for good.
    """

    seconds: float = 100.0
    cv: float = 0.0
    failures: float = 0.0
    warm_up_s: float = 0.0
    warm_up_factor: float = 1.0
    losses_per_hour: float = 0.0

    def __post_init__(self) -> None:
        """Refuse starts that never end."""
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
    """A change of role.

    Attributes:
        drains: whether the worker ends its streams first; else the role is a label, at once.
        seconds: that it takes after the drain.
        keeps_cache: whether the prefix cache survives.
    """

    drains: bool = True
    seconds: float = 0.0
    keeps_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse flips that never end."""
        check_wait("flip.seconds", self.seconds)


class RequestClassConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of requests, and its objective.

    Attributes:
        name: of the class.
        ttft, itl: seconds to the first token, and between tokens.
        percentile: per cent of its requests that shall be inside both.
        weight: what a second of its delay counts for.
        key: tenant of its requests; "" for any.
        min_prompt_tokens, max_prompt_tokens: range of its prompts, both ends counted.
    """

    name: str
    ttft: float = math.inf
    itl: float = math.inf
    percentile: float = 95.0
    weight: float = 1.0
    key: str = ""
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 2**62

    def __post_init__(self) -> None:
        """Refuse what no objective is."""
        _ = self.workload_class

    @property
    def workload_class(self) -> WorkloadClass:
        """As a planner is told of it."""
        try:
            return WorkloadClass(
                name=self.name,
                slo=Slo(ttft_s=self.ttft, itl_s=self.itl, percentile=self.percentile),
                weight=self.weight,
                key=self.key,
                min_prompt_tokens=self.min_prompt_tokens,
                max_prompt_tokens=self.max_prompt_tokens,
            )
        except ValueError as error:
            raise ConfigError(f"class {self.name}: {error}") from None


class ScalingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The objective of a fleet, and the planner that changes the fleet for it.

    Attributes:
        slo: as `Slo.parse` reads it; "" for none.
        classes: of requests with objectives of their own; one belongs to the first that fits.
        planner: name under `planner`, as registered under `pigou.planner`, and parameters.
        max_workers: starting and draining ones included; 0 for no limit.
        start_up: seconds, in place of the fleet's `start_up.seconds`; None for that.
        interval_s: between two looks of the planner.
    """

    slo: Annotated[
        str, option("Objective: ttft=S,itl=S[,percentile=P], in seconds.", "Planner")
    ] = ""
    classes: Annotated[
        tuple[RequestClassConfig, ...],
        option(
            "Objective of some: NAME,ttft=S,itl=S[,percentile=P][,weight=W][,key=TENANT]"
            "[,min_prompt_tokens=N][,max_prompt_tokens=N]; may be given again.",
            "Planner",
            name="slo_class",
            form="entries",
        ),
    ] = ()
    planner: Annotated[
        dict[str, Any],
        option(
            "price, static, dynamo, ... (NAME[,parameter=value]...); none changes nothing.",
            "Planner",
            form="named",
            key="planner",
        ),
    ] = msgspec.field(default_factory=lambda: {"planner": NO_PLANNER})
    max_workers: Annotated[
        int, option("Workers at once, in all states; 0 for no limit.", "Planner")
    ] = 0
    start_up: Annotated[
        float | None,
        option("Seconds until a new worker serves.  [default: the fleet's, 100]", "Planner"),
    ] = None
    interval_s: Annotated[
        float, option("Seconds between two decisions.", "Planner", name="planner_interval")
    ] = 5.0

    def __post_init__(self) -> None:
        """Refuse limits of no planner, and what no fleet is."""
        names = [config.name for config in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"classes are named {', '.join(names)}; give each a name of its own")
        if not 0 <= self.max_workers <= _MAX_WORKERS:
            raise ConfigError(
                f"max_workers is {self.max_workers}; it must be 0 to {_MAX_WORKERS:,}"
            )
        if self.start_up is not None:
            check_wait("start_up", self.start_up)
        if not 0.1 <= self.interval_s <= MAX_SECONDS:
            raise ConfigError(
                f"interval_s is {self.interval_s}; it must be 0.1 to {MAX_SECONDS} (a year)"
            )
        if not self.plans and self.max_workers:
            raise ConfigError(
                f"max_workers is {self.max_workers}, and no planner starts any; give --planner too"
            )
        if not self.plans and self.start_up is not None:
            raise ConfigError(
                f"start_up is {self.start_up}, and no planner starts a worker; give --planner too"
            )

    @property
    def plans(self) -> bool:
        """Whether there is a planner."""
        return bool(self.planner["planner"] != NO_PLANNER)

    @property
    def objective(self) -> Slo | None:
        """What `slo` says; None without one.

        Raises:
            ConfigError: it is not understood.
        """
        try:
            return Slo.parse(self.slo) if self.slo else None
        except ConfigError as error:
            raise ConfigError(f"slo is {self.slo!r}: {error}") from None

    @property
    def workload_classes(self) -> tuple[WorkloadClass, ...]:
        """What `classes` says."""
        return tuple(config.workload_class for config in self.classes)


def check_wait(name: str, value: float, unit: int = 1) -> None:
    """Refuse a wait of so many parts of a second that is below 0, or of more than a year."""
    if not 0.0 <= value <= MAX_SECONDS * unit:
        raise ConfigError(f"{name} is {value}; it must be 0 to {MAX_SECONDS * unit} (a year)")
