"""Planner configuration, for simulation and running fleets."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from pigou.config import ClassLane, ConfigError, check_bounds, option
from pigou.objectives import PRESETS, Objectives, Slo, WorkloadClass, latency_s

#: Name for a fleet without a planner.
NO_PLANNER = "none"
#: Longest accepted wait, in seconds.
MAX_SECONDS = 366 * 86400
_MAX_WORKERS = 10_000
#: Request header by which requests name a class that matches nothing else.
CLASS_HEADER = "x-pigou-class"


class RequestClassConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of requests and its objective; latencies as `latency_s` reads them."""

    name: str
    preset: str = ""  # name in `PRESETS`, for what is not given
    ttft: float | str = math.inf
    itl: float | str = math.inf
    tpot: float | str = math.inf  # alias of `itl`
    percentile: float = 95.0  # per cent of requests that shall be inside both
    weight: float = 1.0  # weight of a second of delay
    header: str = ""  # `name=value` of an HTTP header; "" for any
    key: str = ""  # tenant; "" for any
    model: str = ""
    min_prompt_tokens: int = 0  # inclusive range
    max_prompt_tokens: int = 2**62
    chunk: int | None = None  # most tokens of a step on its workers; 0 for their own
    concurrency: int | None = None  # most streams for each worker that decodes; 0 for no limit
    lane: ClassLane = ""  # "" for its preset's

    def __post_init__(self) -> None:
        if self.preset not in ("", *PRESETS):
            raise ConfigError(
                f"class {self.name}: preset is {self.preset!r}; presets are {', '.join(PRESETS)}"
            )
        _ = self.workload_class

    @property
    def is_named(self) -> bool:
        """True if requests name it by header: it has a preset, and nothing that they match."""
        matches = self.header or self.key or self.model or self.min_prompt_tokens
        return bool(self.preset) and not matches and self.max_prompt_tokens == 2**62

    @property
    def workload_class(self) -> WorkloadClass:
        """The class in the planner's form."""
        if math.inf not in (self.itl, self.tpot):
            raise ConfigError(f"class {self.name}: itl and tpot are one objective; give one")
        preset = PRESETS.get(self.preset, WorkloadClass())
        header = f"{CLASS_HEADER}={self.name}" if self.is_named else self.header
        name, equals, value = header.partition("=")
        itl_s = latency_s("itl", self.itl if self.tpot == math.inf else self.tpot)
        ttft_s = latency_s("ttft", self.ttft)
        try:
            return WorkloadClass(
                name=self.name,
                slo=Slo(
                    ttft_s=preset.slo.ttft_s if ttft_s == math.inf else ttft_s,
                    itl_s=preset.slo.itl_s if itl_s == math.inf else itl_s,
                    percentile=self.percentile,
                ),
                weight=self.weight,
                header=name.lower() + equals + value,
                key=self.key,
                model=self.model,
                min_prompt_tokens=self.min_prompt_tokens,
                max_prompt_tokens=self.max_prompt_tokens,
                chunk=preset.chunk if self.chunk is None else self.chunk,
                concurrency=preset.concurrency if self.concurrency is None else self.concurrency,
                lane=self.lane or preset.lane,
            )
        except ValueError as error:
            raise ConfigError(f"class {self.name}: {error}") from None


class PlannerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The objective of a fleet, and the planner that scales for it."""

    slo: Annotated[
        str,
        option(
            "Objective (SLO): ttft=500ms,itl=40ms[,percentile=95]; seconds without a unit.",
            "Planner",
        ),
    ] = ""
    classes: Annotated[
        tuple[RequestClassConfig, ...],
        option(
            "Class of requests: NAME[,preset=realtime|chat|agent|document|batch][,ttft=T][,itl=T]"
            "[,percentile=P][,weight=W][,chunk=TOKENS][,concurrency=STREAMS]"
            "[,lane=short|long|background][,header=NAME=VALUE][,key=TENANT][,model=M]"
            "[,min_prompt_tokens=N][,max_prompt_tokens=N]. Repeatable.",
            "Planner",
            name="slo_class",
            form="entries",
        ),
    ] = ()
    planner: Annotated[
        dict[str, Any],
        option(
            "Planner of pool sizes: price, static, dynamo, ... (NAME[,parameter=value]...); none "
            "keeps them.",
            "Planner",
            form="named",
            key="planner",
        ),
    ] = msgspec.field(default_factory=lambda: {"planner": NO_PLANNER})
    max_workers: Annotated[
        int | None,
        option(
            "Maximum of workers in all states; 0 for no limit.  [default: what this machine's "
            "cores and GPUs allow, or the initial fleet; 16 on Ray or Kubernetes; no limit in "
            "simulation]",
            "Planner",
        ),
    ] = None
    start_up: Annotated[
        float | None,
        option("Seconds until a new worker serves.  [default: measured]", "Planner"),
    ] = None
    interval_s: Annotated[
        float, option("Seconds between two planner decisions.", "Planner", name="planner_interval")
    ] = 5.0
    performance: Annotated[
        str,
        option(
            "Performance file of `pigou sweep` for the planner.  [default: measured by the "
            "workers, or learned]",
            "Planner",
        ),
    ] = ""

    def __post_init__(self) -> None:
        names = [config.name for config in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"classes are named {', '.join(names)}; give each a name of its own")
        if self.max_workers is not None:
            check_bounds("max_workers", self.max_workers, ge=0, le=_MAX_WORKERS)
        if self.start_up is not None:
            check_wait("start_up", self.start_up)
        check_bounds("interval_s", self.interval_s, ge=0.1, le=MAX_SECONDS, unit=" (a year)")
        for name, given, why in (
            ("max_workers", bool(self.max_workers), "starts any"),
            ("start_up", self.start_up is not None, "starts a worker"),
            ("performance", bool(self.performance), "reads it"),
        ):
            if given and not self.plans:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, and no planner {why}; give --planner too"
                )

    def check_size(self, workers: int) -> None:
        """Refuse fewer `max_workers` than a fleet begins with."""
        if 0 < (self.max_workers or 0) < workers:
            raise ConfigError(
                f"max_workers is {self.max_workers}, and the fleet begins with {workers}; give at "
                "least as many"
            )

    @property
    def plans(self) -> bool:
        """True if there is a planner."""
        return bool(self.planner["planner"] != NO_PLANNER)

    @property
    def objective(self) -> Slo | None:
        """The objective of `slo`; None without one."""
        try:
            return Slo.parse(self.slo) if self.slo else None
        except ConfigError as error:
            raise ConfigError(f"slo is {self.slo!r}: {error}") from None

    @property
    def workload_classes(self) -> tuple[WorkloadClass, ...]:
        """`classes` in the planner's form."""
        return tuple(config.workload_class for config in self.classes)

    @property
    def objectives(self) -> Objectives:
        """The objectives of `slo` and `classes`."""
        return Objectives(self.objective, self.workload_classes)


def check_wait(name: str, value: float, unit: int = 1) -> None:
    """Raise ConfigError for a wait below 0 or over a year."""
    check_bounds(name, value, ge=0, le=MAX_SECONDS * unit, unit=" (a year)")
