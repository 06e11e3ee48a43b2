"""Tiers as users write them, `NAME=SIZE[@PLACE][,key=value]...`, and the `Tiers` made of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.events import Medium
from pigou.kv.offload import RecomputeCost, TierSpeed, staging_of
from pigou.kv.tier import Tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.kv.tiers import Tiers

#: The tier in the worker's own memory; all others outlive their worker.
HOST = "host"
#: Entry point group of the stores of other tiers, by the tier's name.
STORES = "pigou.tier_store"
_TEXT = re.compile(
    r"(?P<name>[\w.-]+)=(?P<size>[^@,]+)(?:@(?P<uri>.+?))?(?P<rest>(?:,[\w.]+=[^,]*)*)"
)


class TierOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier of a worker's KV blocks beyond its device."""

    name: str  # `host` for memory; else as registered under `pigou.tier_store`, in simulations any
    gib: float  # room for KV blocks, in 2^30 bytes
    policy: str = "price"  # eviction policy, as registered under `pigou.eviction`
    params: dict[str, Any] = {}  # of the policy

    def __post_init__(self) -> None:
        """Refuse a tier that nothing fits in."""
        if not 0.0 < self.gib < math.inf:
            raise ConfigError(f"tier {self.name}: gib is {self.gib}; it must be above 0")

    @property
    def size_bytes(self) -> int:
        """Bytes of its room."""
        return int(self.gib * 2**30)


def split_tier(text: str) -> tuple[str, str, str, str]:
    """Split `NAME=SIZE[@PLACE][,key=value]...` into name, size, place and the rest, as typed.

    Raises:
        ConfigError: it is not written so.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"a tier is {text!r}; write NAME=SIZE[@PLACE][,key=value]..., as host=8GiB or "
            "disk=100GiB@/DIR"
        )
    return match["name"], match["size"], match["uri"] or "", match["rest"]


def uri_below(text: str, part: str) -> str:
    """Return a tier's text with `part` appended to the path of its place, where it has one."""
    name, size, uri, rest = split_tier(text)
    if not uri:
        return text
    path, mark, query = uri.partition("?")
    return f"{name}={size}@{path.rstrip('/')}/{part}{mark}{query}{rest}"


def check_names(tiers: Sequence[TierOption]) -> None:
    """Refuse tiers of one name.

    Raises:
        ConfigError: names all of them.
    """
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
    """Make the tiers of one worker, nearest first.

    Args:
        capacities: blocks that each tier has room for.
        costs: of recomputing a block, and of reading it from each tier.
        copies: device blocks that may be copied at once.

    Raises:
        ConfigError: an unknown eviction policy, or a tier without room for a block.
    """
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
