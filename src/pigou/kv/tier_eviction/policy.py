"""Interface of tier eviction policies, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pigou.config import ConfigError, wrong
from pigou.kv.block import Block, Entry
from pigou.kv.offload import RecomputeCost
from pigou.registry import named

GROUP = "pigou.eviction"


@dataclass(frozen=True, slots=True)
class TierSetting:
    """The tier that a policy serves."""

    cap_bytes: int
    # seconds that a hit of a block saves.
    recompute_cost: RecomputeCost = field(default_factory=RecomputeCost)
    seed: int = 0


class NoEvictionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy without parameters."""


class EvictionPolicy:
    """Order of eviction in one tier, built as `Policy(setting, params)`; admits all by default.

    A tier calls `on_miss` for used blocks it does not hold, `admits` for blocks offered, `victim`
    until each fits, then `insert`, last of the chain first. Victims must be `Entry.free`.
    """

    #: Type of the parameters, a frozen `msgspec.Struct` with defaults.
    Params: type[msgspec.Struct] = NoEvictionParams
    paths = False  # True if `hit` is called for every block of the path, not only the deepest
    price = 0.0  # price of a byte of the tier, in seconds of prefill per second
    exclusive = False  # True if it uses `above`
    #: True for blocks that the tier above holds and will offer again before eviction; None if
    #: unknown.
    above: Callable[[bytes], bool] | None = None

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        self.setting = setting

    def learn(self, cost: RecomputeCost) -> None:
        """Replace the recompute cost."""
        self.setting = replace(self.setting, recompute_cost=cost)

    def on_miss(self, blocks: Sequence[Block], now: int) -> None:
        """Record a use of blocks not held, a run of one chain."""

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return which of the offered blocks of one chain to admit."""
        return [True] * len(blocks)

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return a free block to evict for the newcomer, or None to refuse the newcomer."""
        raise NotImplementedError

    def insert(self, entry: Entry, now: int) -> None:
        """Record an admitted block."""

    def hit(self, entry: Entry, now: int) -> None:
        """Record a hit; `entry.last` and `entry.uses` already include it."""

    def freed(self, entry: Entry, now: int) -> None:
        """Record that a block became free: it lost its last child or pin."""

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Forget a block, evicted or dropped; `entry.up` has inherited its uses."""


def load(
    name: str, setting: TierSetting, params: Mapping[str, Any] | None = None
) -> EvictionPolicy:
    """Build a policy by name from the group `pigou.eviction`; raises ConfigError."""
    return make(named(GROUP, name, "eviction policy"), setting, params, name)


def make(
    kind: Any, setting: TierSetting, params: Mapping[str, Any] | None = None, name: str = ""
) -> EvictionPolicy:
    """Build a policy of this class; raises ConfigError for an unknown or wrong parameter."""
    values = dict(params or {})
    try:
        given = msgspec.convert(values, kind.Params, strict=False)
        policy: EvictionPolicy = kind(setting, given)
    except (msgspec.ValidationError, ValueError) as error:
        reason = wrong(error, kind.Params, values)
        raise ConfigError(f"eviction policy {name or kind.__name__}: {reason}") from None
    return policy
