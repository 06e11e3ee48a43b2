"""What a simulated fleet is made of: checked values, unknown keys refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from pigou.config import ConfigError, wrong
from pigou.control.planner.config import check_wait
from pigou.request import Role
from pigou.sim.arrival_rate import MAX_SECONDS
from pigou.sim.gateways_config import GatewaysConfig
from pigou.sim.network import LinkConfig
from pigou.sim.scaling_config import RoleFlipConfig, StartUpConfig
from pigou.sim.setup import TierConfig
from pigou.sim.topology_config import TopologyConfig
from pigou.yaml_file import read_yaml

_PART = re.compile(r"(\d+)(x?)(p|d|both|prefill|decode)")
#: Times as long.
_MAX_FACTOR = 1e6
#: Each takes a megabyte and more, and all of them are candidates of every decision.
_MAX_WORKERS = 10_000
_ROLES = {
    "p": Role.PREFILL, "d": Role.DECODE, "both": Role.BOTH,
    "prefill": Role.PREFILL, "decode": Role.DECODE,
}  # fmt: skip


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time in which a worker's steps take `factor` times as long; seconds from the beginning."""

    factor: float
    start: float = 0.0
    end: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 < self.factor <= _MAX_FACTOR:
            raise ConfigError(
                f"factor is {self.factor}; it must be above 0, at most {_MAX_FACTOR:g}"
            )
        _check_times(self.start, self.end)


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time in which a worker is dead, in seconds from the start; its cache is empty after it."""

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
    """Workers that are alike."""

    role: Role = Role.BOTH
    count: int = 1
    gpu: str = ""  # in place of `--gpu`; "" for that
    tp: int = 0  # in place of `--tp`; 0 for that
    timing: str = ""  # in place of `--timing`; "" for that
    blocks: int = 0  # KV blocks of each, in place of `--blocks`; 0 for that
    block_size: int = 16  # tokens in a block
    max_seqs: int = 0  # in place of `--max-seqs`; 0 for that
    max_batched_tokens: int = 0  # in place of `--max-batched-tokens`; 0 for that
    prefix_caching: bool = True  # whether prefixes are kept
    # beyond the device, from the nearest on; in place of `--tier`.
    tiers: tuple[TierConfig, ...] = ()
    events: bool = True  # whether they publish KV events; if not, what they hold is predicted
    starts: float = 0.0  # seconds after which they are up
    slow: tuple[Slow, ...] = ()  # when they are slower than they should be
    fails: tuple[Outage, ...] = ()  # when they are dead

    def __post_init__(self) -> None:
        for name, minimum in (
            ("count", 1), ("block_size", 1), ("blocks", 0), ("max_seqs", 0),
            ("max_batched_tokens", 0), ("tp", 0),
        ):  # fmt: skip
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.tiers and not self.prefix_caching:
            raise ConfigError("prefix_caching is off, and tiers are given; leave one of them out")
        check_wait("starts", self.starts, 1)


class Signals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How late, and how completely, the control plane hears from workers."""

    event_delay_ms: float = 0.0  # milliseconds that KV events take
    event_loss: float = 0.0  # part of the batches of KV events that are lost
    # whether lost batches are sent again when the next arrives; if not, all that was known of the
    # worker's cache is forgotten then.
    replay: bool = True
    report_every_ms: float = 1000.0  # between two load reports of a worker; 0 for none
    report_delay_ms: float = 0.0  # milliseconds that they take
    report_loss: float = 0.0  # part of them that are lost; the control plane goes by the one before

    def __post_init__(self) -> None:
        for name in ("event_delay_ms", "report_every_ms", "report_delay_ms"):
            check_wait(name, getattr(self, name), 1000)
        if 0.0 < self.report_every_ms < 1.0:
            raise ConfigError(
                f"report_every_ms is {self.report_every_ms}; it must be at least 1, or 0 for none"
            )
        for name in ("event_loss", "report_loss"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 to 1")


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet."""

    workers: tuple[WorkerGroup, ...]
    link: LinkConfig = LinkConfig()
    signals: Signals = Signals()
    # latency from the client to a worker, milliseconds; left out, that of the timing law (0 for
    # other timings).
    overhead_ms: float | None = None
    # milliseconds that each leg takes besides: the gateway's request until the worker's engine
    # knows of it, and its first token's way back. A prompt that is computed remotely has two legs.
    leg_ms: float = 0.0
    # milliseconds after which the control plane knows that a worker died. Until then requests are
    # sent there, fail at once, and go elsewhere.
    detect_ms: float = 0.0
    # seconds for which a prompt's blocks are kept for a worker that does not ask.
    lease_s: float = 30.0
    start_up: StartUpConfig = StartUpConfig()
    flip: RoleFlipConfig = RoleFlipConfig()
    drain_s: float = 0.0  # seconds after which streams of a draining worker migrate; 0 for never
    gateways: GatewaysConfig = GatewaysConfig()
    # hosts that the workers are placed on; None where all are equally far apart.
    topology: TopologyConfig | None = None

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
    try:
        return msgspec.convert(values, FleetConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"fleet: {path}: {wrong(error, FleetConfig, values)}") from error
