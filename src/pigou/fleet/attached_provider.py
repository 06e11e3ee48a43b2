"""The provider of attached workers: servers that somebody else runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pigou.fleet.attached_member import AttachedMember
from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.member import FleetMember, MemberSetup
from pigou.fleet.provider import ProvidedPool
from pigou.fleet.server_provider import ServerProvider
from pigou.request import Role


class AttachedProvider(ServerProvider):
    """Uses servers by their URL. It starts none, and lets go of those that leave.

    A server of Pigou serves in any role. What a stock server can do was set at its start, so it
    is not flipped: it can be attached again in another role.
    """

    kind: ClassVar[str] = AttachedMember.kind
    not_started: ClassVar[str] = "servers are attached by their URL, and not started here"
    not_flipped: ClassVar[str] = (
        "is no server of Pigou, and its role was set when it was started; remove it, and attach "
        "it again in its new role"
    )

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._members: dict[str, AttachedMember] = {}
        self._number = 0

    def adopt(self, spec: AttachedWorker) -> AttachedMember:
        """Return the member of a server."""
        member = AttachedMember(spec, self._setup)
        self._members[spec.id] = member
        self._number += 1
        return member

    def attach(self, text: str) -> AttachedMember:
        """Return the member of one more server, described as `AttachedWorker.parse` reads it.

        Raises:
            ConfigError: the description is not understood. FleetError: the server is attached.
        """
        spec = AttachedWorker.parse(text, self._number)
        for member in self._members.values():
            if member.server == (spec.url, spec.pin):
                raise FleetError(f"{spec.url} is attached as {member.id}")
        return self.adopt(spec)

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """One pool for each role that a server has now, and each model."""
        pairs = {(member.role, member.model) for member in self._members.values()}
        models = dict.fromkeys(member.model for member in self._members.values())
        return [
            ProvidedPool(name=self.pool(role, model), role=role, model=model)
            for model in models
            for role in Role
            if (role, model) in pairs
        ]

    def flipped(self, member: FleetMember) -> None:
        """A server is in another pool."""

    def discard(self, member: FleetMember) -> None:
        """A server is let go: its URL can be attached again."""
        self._members.pop(member.id, None)
