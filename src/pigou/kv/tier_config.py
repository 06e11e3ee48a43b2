"""Tier options as users write them, `NAME=SIZE[@PLACE][,key=value]...`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from pigou.config import ConfigError, check_bounds, key_values
from pigou.kv.offload import RecomputeCost, TierSpeed, staging_of
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.kv.tiers import Tiers
from pigou.registry import read_struct
from pigou.request import Medium

#: Tier in the worker's memory; all other tiers outlive their worker.
HOST = "host"
#: Entry point group of tier stores.
STORES = "pigou.tier_store"
_TEXT = re.compile(
    r"(?P<name>[\w.-]+)=(?P<size>[^@,]+)(?:@(?P<uri>.+?))?(?P<rest>(?:,[\w.]+=[^,]*)*)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


class TierOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configuration of one tier of a worker's KV blocks."""

    name: str  # `host`, or a name registered under `pigou.tier_store`; any in simulations
    gib: float  # capacity in 2^30 bytes
    policy: str = "price"  # eviction policy, as registered under `pigou.eviction`
    params: dict[str, Any] = {}  # policy parameters

    def __post_init__(self) -> None:
        check_bounds(f"tier {self.name}: gib", self.gib, gt=0)

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return int(self.gib * 2**30)


class StoreTier(TierOption, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of KV blocks, and the place of its store."""

    uri: str = ""  # a folder or URL; empty for host memory

    def __post_init__(self) -> None:
        TierOption.__post_init__(self)
        if self.name == HOST and self.uri:
            raise ConfigError(f"tier {HOST} has place {self.uri!r}; leave it out")
        if self.name != HOST and not self.uri:
            raise ConfigError(f"tier {self.name} has no place; write {self.name}=SIZE@PLACE")


def parse_size(text: str) -> int:
    """Return the bytes that a size like `512MiB` or `2G` means (powers of 1,024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size; write for example 512MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """Return a size as `parse_size` reads it, in the largest unit that divides it."""
    for unit in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}iB"
    return str(size_bytes)


def split_tier(text: str) -> tuple[str, str, str, str]:
    """Split `NAME=SIZE[@PLACE][,key=value]...` into four parts; raises ConfigError otherwise."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"a tier is {text!r}; write NAME=SIZE[@PLACE][,key=value]..., as host=8GiB or "
            "disk=100GiB@/DIR"
        )
    return match["name"], match["size"], match["uri"] or "", match["rest"]


def read_tier(text: str) -> StoreTier:
    """Read `NAME=SIZE[@PLACE][,policy=NAME][,params.KEY=VALUE]...`; raises ConfigError."""
    name, size, uri, rest = split_tier(text)
    values: dict[str, Any] = {"name": name, "gib": parse_size(size) / 2**30, "uri": uri}
    for key, value in key_values(f"tier {text!r}", rest.split(",")[1:]).items():
        into = values.setdefault("params", {}) if key.startswith("params.") else values
        if (key := key.removeprefix("params.")) in into:
            raise ConfigError(f"tier {text!r}: {key} is given twice; give it once")
        into[key] = value
    return read_struct(f"tier {text!r}", StoreTier, values)


def uri_below(text: str, part: str) -> str:
    """Return a tier's text with `part` appended to the path of its place, if it has one."""
    name, size, uri, rest = split_tier(text)
    if not uri:
        return text
    path, mark, query = uri.partition("?")
    return f"{name}={size}@{path.rstrip('/')}/{part}{mark}{query}{rest}"


def check_names(tiers: Sequence[TierOption]) -> None:
    """Raise a ConfigError if two tiers share a name."""
    names = [tier.name for tier in tiers]
    if any(count > 1 for count in Counter(names).values()):
        raise ConfigError(
            f"tiers are named {', '.join(names)}; give each a name of its own, by which its "
            "figures are reported"
        )


def build_tiers(
    options: Sequence[TierOption],
    capacities: Sequence[int],
    block_bytes: int,
    costs: Sequence[RecomputeCost],
    copies: int,
    speeds: Sequence[TierSpeed] | None = None,
) -> Tiers:
    """Build a worker's tiers, nearest first, `capacities` in blocks; raises ConfigError."""
    staging = staging_of(list(capacities))
    tiers = []
    for option, blocks, staged, cost in zip(options, capacities, staging, costs, strict=True):
        if blocks <= staged:
            raise ConfigError(
                f"tier {option.name} has {option.size_bytes} bytes, room for {blocks} blocks of "
                f"{block_bytes} bytes; it needs room for {staged + 1}: give it more"
            )
        cap = (blocks - staged) * block_bytes
        tiers.append(Tier(cap, load(option.policy, TierSetting(cap, cost), option.params)))
    media = [Medium.HOST if option.name == HOST else Medium.STORAGE for option in options]
    return Tiers(tiers, block_bytes, staging, speeds, copies, media)
