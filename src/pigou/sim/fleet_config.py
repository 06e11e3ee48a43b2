"""What a simulated fleet is made of: checked values, unknown keys refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields, option
from pigou.control.planner.config import PlannerConfig, RequestClassConfig, check_wait
from pigou.models.parallelism import ParallelConfig
from pigou.placement.gang import Pack
from pigou.placement.topology import Distance, DistanceCosts, Node
from pigou.registry import read_struct
from pigou.request import Role
from pigou.sim.arrival_rate import MAX_SECONDS
from pigou.sim.network import LinkConfig
from pigou.sim.setup import Setup, TierConfig
from pigou.small_file import read_yaml

_MAX_GATEWAYS = 64
_MAX_FACTOR = 10**6  # limit of factors of a step's time, and of losses an hour
_MAX_HOSTS = 10_000
_PART = re.compile(r"(\d+)(x?)(p|d|both|prefill|decode)")
#: Each takes a megabyte and more, and all of them are candidates of every decision.
_MAX_WORKERS = 10_000
_ROLES = {
    "p": Role.PREFILL, "d": Role.DECODE, "both": Role.BOTH,
    "prefill": Role.PREFILL, "decode": Role.DECODE,
}  # fmt: skip


class GatewaysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gateways in front of a simulated fleet."""

    count: int = 1  # number of gateways, a control plane each
    lag_s: float = 0.0  # seconds until other gateways receive a message
    loss: float = 0.0  # share of these messages that are lost
    split: Literal["random", "tenant"] = "random"  # how requests are split over gateways
    exchanges: bool = True  # whether gateways exchange their bookings

    def __post_init__(self) -> None:
        check_bounds("count", self.count, ge=1, le=_MAX_GATEWAYS)
        check_wait("lag_s", self.lag_s, 1)
        check_bounds("loss", self.loss, ge=0, lt=1)
        if self.count == 1 and (self.lag_s or self.loss):
            raise ConfigError(
                f"lag_s is {self.lag_s} and loss {self.loss}, and there is 1 gateway, which tells "
                "nobody anything; give a count, or leave them out"
            )


class StartUpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The start of a worker that joins while the fleet runs."""

    seconds: float = 100.0  # mean start-up time
    cv: float = 0.0  # standard deviation of that time over its mean, lognormal; 0 for a constant
    failures: float = 0.0  # share of starts that fail, at their end; the next follows at once
    warm_up_s: float = 0.0  # seconds of slower steps after the start
    warm_up_factor: float = 1.0  # at least 1
    losses_per_hour: float = 0.0  # rate per worker, as of spot machines; deaths are final

    def __post_init__(self) -> None:
        for name in ("seconds", "warm_up_s"):
            check_wait(f"start_up.{name}", getattr(self, name))
        check_bounds("start_up.cv", self.cv, ge=0, le=10)
        check_bounds("start_up.losses_per_hour", self.losses_per_hour, ge=0, le=_MAX_FACTOR)
        check_bounds("start_up.failures", self.failures, ge=0, le=1)
        check_bounds("start_up.warm_up_factor", self.warm_up_factor, ge=1, le=_MAX_FACTOR)
        if self.failures and not self.seconds:
            raise ConfigError(
                f"start_up.failures is {self.failures}, and starts take no time; give "
                "start_up.seconds above 0"
            )


class RoleFlipConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change of role."""

    drains: bool = True  # finish streams first; else the role changes at once
    seconds: float = 0.0
    keeps_cache: bool = True  # whether the prefix cache survives

    def __post_init__(self) -> None:
        check_wait("flip.seconds", self.seconds)


class ScalingConfig(PlannerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Objective of a simulated fleet, and its planner."""

    classes: Annotated[
        tuple[RequestClassConfig, ...],
        option(
            "Class of requests: NAME[,preset=realtime|chat|agent|document|batch][,ttft=T][,itl=T]"
            "[,percentile=P][,weight=W][,chunk=TOKENS][,concurrency=STREAMS]"
            "[,lane=short|long|background][,key=TENANT][,min_prompt_tokens=N]"
            "[,max_prompt_tokens=N]. Repeatable.",
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
            "Performance file of `pigou sweep` for the planner.  [default: measured by the "
            "workers' timing]",
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
            if config.is_named:
                raise ConfigError(
                    f"class {config.name}: preset is {config.preset!r}, and nothing says which "
                    "simulated requests it is of; give key, min_prompt_tokens or max_prompt_tokens"
                )


class DistanceLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The way between two workers of a distance class."""

    gbps: float  # maximum Gb/s of one transfer
    latency_us: float  # microseconds to the first byte

    def __post_init__(self) -> None:
        if not 0.0 < self.gbps < math.inf or not 0.0 <= self.latency_us < math.inf:
            raise ConfigError(
                f"topology: gbps is {self.gbps} and latency_us {self.latency_us}; give above 0, "
                "and at least 0"
            )


class HostGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`count` equal hosts in a rack of a zone."""

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
    """Placement of a fleet's workers; transfers take the slower of both links."""

    hosts: tuple[HostGroup, ...]
    placement: Literal["cost", "random"] = "cost"  # cost: all as one gang
    pack: Pack | None = None  # required proximity of the workers
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


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Interval with steps `factor` times as long; seconds from the start."""

    factor: float
    start: float = 0.0
    end: float = math.inf

    def __post_init__(self) -> None:
        check_bounds("factor", self.factor, gt=0, le=_MAX_FACTOR)
        _check_times(self.start, self.end)


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Interval of a worker's death; seconds from the start. Its cache is lost."""

    start: float
    end: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start, self.end)


def _check_times(start: float, end: float) -> None:
    if not 0.0 <= start < end or start > MAX_SECONDS or MAX_SECONDS < end < math.inf:
        raise ConfigError(
            f"start is {start} and end {end}; start must be at least 0 and before end, and both at "
            f"most {MAX_SECONDS} seconds (a year); leave end out where there is none"
        )


class WorkerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of equal workers."""

    role: Role = Role.BOTH
    count: int = 1
    gpu: str = ""  # overrides `--gpu`; "" for none
    tp: int = 0  # overrides `--tp`; 0 for none
    dp: int = 0  # overrides `--data-parallel-size`; 0 for none
    ep: bool | None = None  # overrides `--enable-expert-parallel`
    redundant_experts: int | None = None  # overrides `--num-redundant-experts`
    timing: str = ""  # overrides `--timing`; "" for none
    blocks: int = 0  # KV blocks of each; overrides `--blocks`; 0 for none
    block_size: int = 16  # tokens in a block
    max_seqs: int = 0  # overrides `--max-seqs`; 0 for none
    max_batched_tokens: int = 0  # overrides `--max-batched-tokens`; 0 for none
    prefix_caching: bool = True  # whether to cache prefixes
    tiers: tuple[TierConfig, ...] = ()  # nearest first; overrides `--tier`
    events: bool = True  # whether workers publish KV events; else the gateway predicts
    starts: float = 0.0  # seconds until they are up
    slow: tuple[Slow, ...] = ()  # periods of slowness
    fails: tuple[Outage, ...] = ()  # outages

    def __post_init__(self) -> None:
        check_fields(self, "count", "block_size", ge=1)
        check_fields(self, "blocks", "max_seqs", "max_batched_tokens", "tp", "dp", ge=0)
        check_bounds("redundant_experts", self.redundant_experts or 0, ge=0)
        if self.tiers and not self.prefix_caching:
            raise ConfigError("prefix_caching is off, and tiers are given; leave one of them out")
        check_wait("starts", self.starts, 1)

    def parallelism(self, setup: Setup) -> ParallelConfig:
        """Return the parallelism of a worker: the group's own, or the fleet's."""
        ep = setup.ep if self.ep is None else self.ep
        more = self.redundant_experts
        if more is None:
            more = setup.redundant_experts if ep else 0
        return ParallelConfig(self.tp or setup.tp, self.dp or setup.dp, ep, more)


class Signals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How late, and how completely, the control plane hears from workers."""

    event_delay_ms: float = 0.0  # delay of KV events in ms
    event_loss: float = 0.0  # share of KV event batches lost
    # whether lost batches are sent again when the next arrives; if not, all that was known of the
    # worker's cache is forgotten then.
    replay: bool = True
    report_every_ms: float = 1000.0  # interval of load reports in ms; 0 for none
    report_delay_ms: float = 0.0  # delay of load reports in ms
    report_loss: float = 0.0  # share of load reports lost

    def __post_init__(self) -> None:
        for name in ("event_delay_ms", "report_every_ms", "report_delay_ms"):
            check_wait(name, getattr(self, name), 1000)
        if 0.0 < self.report_every_ms < 1.0:
            raise ConfigError(
                f"report_every_ms is {self.report_every_ms}; it must be at least 1, or 0 for none"
            )
        check_fields(self, "event_loss", "report_loss", ge=0, le=1)


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet."""

    workers: tuple[WorkerGroup, ...]
    link: LinkConfig = LinkConfig()
    signals: Signals = Signals()
    overhead_ms: float | None = None  # ms from client to worker; None uses the timing law's
    leg_ms: float = 0.0  # each leg takes besides: the request to its engine, its first token back
    detect_ms: float = 0.0  # ms until a death is noticed; requests sent there fail at once
    lease_s: float = 30.0  # seconds that prefill workers hold a prompt's blocks
    start_up: StartUpConfig = StartUpConfig()
    flip: RoleFlipConfig = RoleFlipConfig()
    drain_s: float = 0.0  # seconds until a draining worker's streams migrate; 0 never
    gateways: GatewaysConfig = GatewaysConfig()
    topology: TopologyConfig | None = None  # None where all workers are equally far apart

    def __post_init__(self) -> None:
        if not any(group.role.decodes for group in self.workers):
            raise ConfigError("fleet: nobody decodes; add a worker of role decode or both")
        count = sum(group.count for group in self.workers)
        if count > _MAX_WORKERS:
            raise ConfigError(f"fleet: there are {count:,} workers; give at most {_MAX_WORKERS:,}")
        for name in ("overhead_ms", "leg_ms", "detect_ms"):
            check_wait(name, getattr(self, name) or 0.0, 1000)
        for name in ("lease_s", "drain_s"):
            check_wait(name, getattr(self, name), 1)


def read_fleet(text: str) -> FleetConfig:
    """Read `4xboth`, `1p+2d`, or the name of a YAML file."""
    if Path(text).suffix in (".yaml", ".yml"):
        return _of_yaml(text)
    groups = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if not match or (match[2] == "x") == (len(match[3]) == 1) or int(match[1]) < 1:
            raise ConfigError(
                f"fleet is {text!r}; write for example 4xboth, 1p+2d, or the name of a YAML file"
            )
        groups.append(WorkerGroup(role=_ROLES[match[3]], count=int(match[1])))
    return FleetConfig(workers=tuple(groups))


def _of_yaml(path: str) -> FleetConfig:
    try:
        values = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"fleet: {error}") from error
    return read_struct(f"fleet: {path}", FleetConfig, values, strict=True)
