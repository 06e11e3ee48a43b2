"""Attached servers, run by others, and their common part with registered ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pigou.fleet.config import AttachedWorker, FleetError
from pigou.fleet.member import Member, MemberSetup
from pigou.fleet.probe import POLL, EventSource, ProbeFailed, ProbeResult, fleet_key, probe
from pigou.fleet.provider import ProvidedPool, Provider
from pigou.fleet.registry.entry import WorkerEntry
from pigou.request import Location, Role


class ServerSource:
    """Source of one running server; with an `entry`, of that incarnation."""

    starts = False

    def __init__(self, spec: AttachedWorker, entry: WorkerEntry | None = None) -> None:
        self.spec = spec
        self.kind = "attached" if entry is None else "registered"
        self._entry = entry

    def member(self, setup: MemberSetup) -> Member:
        """Return its member."""
        spec = self.spec
        member = Member(spec.id, spec.role, setup, self)
        member.location = Location(spec.host, spec.rack, spec.zone)
        member.row().url = spec.url
        return member

    async def live(self, member: Member) -> str:
        """Let the member serve while the server is there; return why it is not any more."""
        url, key, secret = self.spec.url, self.spec.key, member.setup.secret
        if not key and secret is not None:
            key = await fleet_key(url, secret)
        probed = self._checked(await probe(url, key))
        why = await member.serve(url, probed, key, self._events(probed), load=self._load())
        member.row().restarts += 1
        return why

    def _checked(self, probed: ProbeResult) -> ProbeResult:
        spec = self.spec
        if probed.role not in (None, spec.role):
            raise FleetError(
                f"{spec.url} was started for role={probed.role}, and is to have role={spec.role}; "
                "give it the role that its --disaggregation-mode says"
            )
        if spec.events == POLL and probed.engine.family != "trtllm":
            raise FleetError(f"attach: {spec.url} has events={POLL}, and is no TensorRT-LLM server")
        if self._entry is not None:
            check_incarnation(self._entry, probed)
            # A stock engine knows no version of its deployment.
            return replace(probed, version=probed.version or self._entry.version)
        if not spec.pin:
            return probed
        if not probed.engine.dynamo:
            raise FleetError(f"attach: {spec.url} has pin={spec.pin}, and is no frontend of Dynamo")
        return replace(probed, engine=replace(probed.engine, pin=spec.pin))

    def _events(self, probed: ProbeResult) -> tuple[EventSource, ...]:
        spec = self.spec
        if not spec.events:
            return probed.sources
        encrypted = any(source.encrypted for source in probed.sources)
        return (EventSource(spec.events, spec.replay, spec.topic, encrypted),)

    def _load(self) -> EventSource | None:
        """Return where the load is pushed from, if anywhere."""
        endpoint = self.spec.load.removeprefix("curve+")
        return EventSource(endpoint, encrypted=endpoint != self.spec.load) if endpoint else None


def check_incarnation(entry: WorkerEntry, probed: ProbeResult) -> None:
    """Raise ProbeFailed for another process at a worker's address; a stock engine has none."""
    if probed.engine.incarnation not in ("", entry.incarnation):
        raise ProbeFailed(f"{entry.url} is another worker's by now, and not {entry.identity}'s")


class AttachedProvider(Provider):
    """Uses servers by their URL, of Pigou in any role, of others in one; it starts none."""

    kind: ClassVar[str] = "attached"
    not_started: ClassVar[str] = "servers are attached by their URL, and not started here"
    not_flipped: ClassVar[str] = (
        "is no server of Pigou, and its role was set when it was started; remove it, and attach "
        "it again in its new role"
    )

    def __init__(self, setup: MemberSetup) -> None:
        self._setup = setup
        self._members: dict[str, tuple[Member, AttachedWorker]] = {}
        self._number = 0

    def adopt(self, spec: AttachedWorker) -> Member:
        """Return the member of a server."""
        member = ServerSource(spec).member(self._setup)
        self._members[spec.id] = member, spec
        self._number += 1
        return member

    def attach(self, text: str) -> Member:
        """Return the member of one more server. Raises ConfigError, FleetError: it is attached."""
        spec = AttachedWorker.parse(text, self._number)
        for member, other in self._members.values():
            if (other.url, other.pin) == (spec.url, spec.pin):
                raise FleetError(f"{spec.url} is attached as {member.id}")
        return self.adopt(spec)

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """Pools by role and model of the servers."""
        members = [member for member, _ in self._members.values()]
        pairs = {(member.role, member.model) for member in members}
        return [
            ProvidedPool(name=self.pool(role, model), role=role, model=model)
            for model in dict.fromkeys(member.model for member in members)
            for role in Role
            if (role, model) in pairs
        ]

    def discard(self, member: Member) -> None:
        """A server is let go: its URL can be attached again."""
        self._members.pop(member.id, None)
