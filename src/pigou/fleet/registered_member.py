"""A member of a fleet that registered itself."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pigou.control.messages import WorkerDraining
from pigou.fleet.attached_member import AttachedMember
from pigou.fleet.config import AttachedWorker
from pigou.fleet.member import MemberSetup
from pigou.fleet.probe import ProbeFailed, ProbeResult, fleet_key, probe
from pigou.fleet.registry.entry import WorkerEntry
from pigou.request import Role
from pigou.wire.fleet_secret import FleetSecret

#: Seconds that a suspect may take to show that it lives.
_PROBE_S = 3.0


class RegisteredMember(AttachedMember):
    """Uses one worker of a registry, for as long as it is that incarnation.

    Attributes:
        suspected: why it gets nothing new; empty while it is trusted.
    """

    kind: ClassVar[str] = "registered"

    def __init__(self, id: str, entry: WorkerEntry, setup: MemberSetup) -> None:
        events, replay, node = entry.kv_events, entry.kv_replay, entry.topology
        spec = AttachedWorker(
            id=id, url=entry.url, role=entry.role, events=events, replay=replay if events else "",
            host=node.host, rack=node.rack, zone=node.zone,
        )  # fmt: skip
        super().__init__(spec, setup)
        self.entry = entry
        self.suspected = ""

    def suspect(self, why: str) -> None:
        """Send it nothing new; its streams go on."""
        self.suspected = why
        if self.id in self.plane_driver.upstreams and self._row.state == "up":
            self._say("draining", f"suspect: {why}")
            self.plane_driver.observe(WorkerDraining(self.id))

    def trust(self) -> None:
        """Send it requests again, unless it drains for another reason."""
        suspected, self.suspected = self.suspected, ""
        drains = self.leaving or self.next_role is not None
        if suspected and not drains and self.id in self.plane_driver.upstreams:
            self.plane_driver.flip(self.id, self.role)
            self._say("up", "")

    def change_role(self, role: Role, pool: str) -> None:
        """Have another role; a suspect gets nothing in that one, either."""
        super().change_role(role, pool)
        if self.suspected:
            self.suspect(self.suspected)

    def _is_up(self, url: str) -> None:
        super()._is_up(url)
        if self.suspected:
            self.suspect(self.suspected)

    def _pinned(self, probed: ProbeResult) -> ProbeResult:
        """Return the probe's result, where it is of this incarnation.

        A stock engine knows no version of its deployment; its entry, or its pod's label, does.
        """
        check_incarnation(self.entry, probed)
        return replace(probed, version=probed.version or self.entry.version)


def check_incarnation(entry: WorkerEntry, probed: ProbeResult) -> None:
    """Refuse another process at the address of a worker; a stock engine has no incarnation.

    Raises:
        ProbeFailed: it is another one.
    """
    if probed.engine.incarnation not in ("", entry.incarnation):
        raise ProbeFailed(f"{entry.url} is another worker's by now, and not {entry.identity}'s")


async def lives(entry: WorkerEntry, secret: FleetSecret | None) -> bool:
    """Ask a worker itself whether it lives, as that incarnation."""
    key = "" if secret is None else await fleet_key(entry.url, secret, _PROBE_S)
    try:
        check_incarnation(entry, await probe(entry.url, key, _PROBE_S))
    except ProbeFailed:
        return False
    return True
