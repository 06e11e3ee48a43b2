"""The interface of tier eviction policies, and their registry."""

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
    """What a policy knows of its tier."""

    cap_bytes: int  # bytes that the tier may hold
    # seconds that a hit of a block saves.
    recompute_cost: RecomputeCost = field(default_factory=RecomputeCost)
    seed: int = 0


class NoEvictionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy without parameters."""


class EvictionPolicy:
    """The order in which the blocks of one tier go; by itself it admits all, and notes nothing.

    It is made as `Policy(setting, params)`, where `params` is of the type in its class attribute
    `Params`. A tier calls it so: `on_miss` with blocks that are used and that it does not hold;
    `admits` with those that it is offered and does not hold; then, for each one that it takes,
    `victim` until there is room; at last `insert` for all that were taken, the last of the chain
    first. Only a block that is `Entry.free` may be a victim.
    """

    #: The type of its parameters, a frozen `msgspec.Struct` with defaults.
    Params: type[msgspec.Struct] = NoEvictionParams
    paths = False  # whether `hit` wants every block of the path; if not, the deepest
    price = 0.0  # of a byte of the tier: seconds of prefill for each second that it is held
    exclusive = False  # whether it heeds `above`
    #: Whether the tier above holds a block, and will offer it again before it gives it up; None
    #: where nothing above does that.
    above: Callable[[bytes], bool] | None = None

    def __init__(self, setting: TierSetting, params: msgspec.Struct | None = None) -> None:
        self.setting = setting

    def learn(self, cost: RecomputeCost) -> None:
        """Take another recompute cost from now on."""
        self.setting = replace(self.setting, recompute_cost=cost)

    def on_miss(self, blocks: Sequence[Block], now: int) -> None:
        """Take note of a use of blocks that are not held, a run of one chain."""

    def admits(self, blocks: Sequence[Block], now: int) -> list[bool]:
        """Return which blocks may come in: those of one chain that are offered and not held."""
        return [True] * len(blocks)

    def victim(self, newcomer: Block, now: int) -> Entry | None:
        """Return a free block that should make room for the newcomer, or None: it stays out."""
        raise NotImplementedError

    def insert(self, entry: Entry, now: int) -> None:
        """Take note of a block that is now held."""

    def hit(self, entry: Entry, now: int) -> None:
        """Take note of a use; `entry.last` and `entry.uses` already tell of it."""

    def freed(self, entry: Entry, now: int) -> None:
        """Take note of a held block that has become free: its last child or pin has gone."""

    def remove(self, entry: Entry, evicted: bool, now: int) -> None:
        """Forget a block: evicted as the policy's victim, or dropped for another reason.

        `entry.up` is still its parent, which has inherited `uses` and `last`.
        """


def load(
    name: str, setting: TierSetting, params: Mapping[str, Any] | None = None
) -> EvictionPolicy:
    """Return a new policy by its name in the group `pigou.eviction`, or raise a ConfigError."""
    return make(named(GROUP, name, "eviction policy"), setting, params, name)


def make(
    kind: Any, setting: TierSetting, params: Mapping[str, Any] | None = None, name: str = ""
) -> EvictionPolicy:
    """Return a new policy of this class; raise a ConfigError for an unknown or wrong parameter."""
    values = dict(params or {})
    try:
        given = msgspec.convert(values, kind.Params, strict=False)
        policy: EvictionPolicy = kind(setting, given)
    except (msgspec.ValidationError, ValueError) as error:
        reason = wrong(error, kind.Params, values)
        raise ConfigError(f"eviction policy {name or kind.__name__}: {reason}") from None
    return policy
