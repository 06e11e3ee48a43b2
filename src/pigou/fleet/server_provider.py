"""What the providers of servers have in common that are not started here."""

from __future__ import annotations

from typing import ClassVar

from pigou.fleet.attached_member import AttachedMember, pool_of
from pigou.fleet.config import FleetError
from pigou.fleet.member import FleetMember
from pigou.request import Role


class ServerProvider:
    """Names the pools of servers that run already, starts none, and flips those of Pigou."""

    kind: ClassVar[str]
    not_started: ClassVar[str]  # why no further server can be started
    not_flipped: ClassVar[str]  # what is said of a server that is not Pigou's

    @property
    def room(self) -> int | None:
        """None: the servers that run already."""
        return None

    def pool(self, role: Role, model: str = "") -> str:
        """Return the name of the pool of a role, and model, like `decode.attached`."""
        return pool_of(self.kind, role, model)

    def start_refusal(self, pool: str) -> str:  # noqa: ARG002 (as every provider has it)
        """Return why no further server can be started."""
        return self.not_started

    def make(self, pool: str) -> FleetMember:
        """Refuse.

        Raises:
            FleetError: always; `start_refusal` says why.
        """
        raise FleetError(self.start_refusal(pool))

    def flip_refusal(self, member: FleetMember, pool: str) -> str:
        """Return why a server cannot serve in another pool; empty where it can."""
        if pool == member.pool or pool not in [self.pool(role, member.model) for role in Role]:
            return f"{member.id} cannot serve in pool {pool!r}"
        if not isinstance(member, AttachedMember) or member.stock is not False:
            return f"{member.id} {self.not_flipped}"
        return ""
