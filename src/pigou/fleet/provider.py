"""Where the members of a fleet come from: a provider knows pools, and makes members for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from pigou.fleet.config import FleetError
from pigou.fleet.member import Member, pool_name
from pigou.request import Role


class ProvidedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of equal workers of one role."""

    name: str  # unique over all providers: `decode` for local workers, `decode.attached`
    role: Role
    gpus: int = 1  # GPUs per worker, at least 1
    start_up_s: float | None = None  # seconds from order to service; None before a start
    model: str = ""  # model of its workers; empty if single or unknown


class Provider:
    """Provides a fleet's members: local processes, running servers, or a cluster."""

    kind: ClassVar[str]  # kind of its members, shown in `/workers`
    not_started: ClassVar[str] = ""  # why it starts no further server
    not_flipped: ClassVar[str] = ""  # why a stock server cannot be flipped

    @property
    def room(self) -> int | None:
        """Default worker limit; None for running servers."""
        return None

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """The pools, those without workers too."""
        raise NotImplementedError

    def pool(self, role: Role, model: str = "") -> str:
        """Return the pool name of a role and model."""
        return pool_name(role, model, self.kind)

    def start_refusal(self, pool: str) -> str:  # noqa: ARG002
        """Return why no further worker of a pool can be started now; empty where one can."""
        return self.not_started

    def make(self, pool: str) -> Member:
        """Return a new member, not yet started; raises FleetError with `start_refusal`."""
        raise FleetError(self.start_refusal(pool))

    def flip_refusal(self, member: Member, pool: str) -> str:
        """Return why a member cannot change to a pool, or ""."""
        if pool == member.pool or pool not in [self.pool(role, member.model) for role in Role]:
            return f"{member.id} cannot serve in pool {pool!r}"
        if self.not_flipped and member.stock is not False:
            return f"{member.id} {self.not_flipped}"
        return ""

    def flipped(self, member: Member) -> None:
        """Note a member's new pool."""

    def discard(self, member: Member) -> None:
        """Free the resources of a removed member."""

    async def close(self) -> None:
        """Release the fleet's remaining resources."""
