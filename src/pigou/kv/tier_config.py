"""Tier options as users write them, `NAME=SIZE[@PLACE][,key=value]...`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.kv.offload import RecomputeCost, TierSpeed, staging_of
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.kv.tiers import Tiers
from pigou.request import Medium

#: Tier in the worker's memory; all other tiers outlive their worker.
HOST = "host"
#: Entry point group of tier stores.
STORES = "pigou.tier_store"
_TEXT = re.compile(
    r"(?P<name>[\w.-]+)=(?P<size>[^@,]+)(?:@(?P<uri>.+?))?(?P<rest>(?:,[\w.]+=[^,]*)*)"
)


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


def split_tier(text: str) -> tuple[str, str, str, str]:
    """Split `NAME=SIZE[@PLACE][,key=value]...` into four parts; raises ConfigError otherwise."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"a tier is {text!r}; write NAME=SIZE[@PLACE][,key=value]..., as host=8GiB or "
            "disk=100GiB@/DIR"
        )
    return match["name"], match["size"], match["uri"] or "", match["rest"]


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
