"""Changes of a fleet by an operator's word (`FleetChanges` of the gateway)."""

from __future__ import annotations

import logging
import time

from pigou.control.planner.actuation import drain_refusal, flip_refusal, removal_refusal
from pigou.control.planner.messages import WorkerState
from pigou.fleet.config import FleetError
from pigou.fleet.live_fleet import LiveFleet
from pigou.fleet.local_member import LocalMember
from pigou.fleet.member import FleetMember
from pigou.gateway.fleet_changes import ChangeRefused, UnknownWorker
from pigou.gateway.status_api import WorkerRow
from pigou.request import Role

_log = logging.getLogger("pigou.fleet")


class OperatorChanges:
    """Adds, drains, flips and removes workers, whatever a planner does.

    What is asked for a second time changes nothing: a draining worker goes on to drain, one of
    the wanted role stays.
    """

    def __init__(self, live_fleet: LiveFleet) -> None:
        self._fleet = live_fleet
        self._supervisor = live_fleet.supervisor

    def start(self, role: Role, count: int, model: str = "") -> tuple[list[WorkerRow], str]:
        """Start local workers, of a model where there are several.

        Returns:
            Their rows, and why not all of `count`.

        Raises:
            ChangeRefused: none can be started.
        """
        rows: list[WorkerRow] = []
        pool = self._supervisor.local.pool(role, model)
        for _ in range(count):
            if refusal := self._fleet.start_refusal(pool):
                if not rows:
                    raise ChangeRefused(f"no worker is started: {refusal}")
                return rows, f"{count - len(rows)} workers are not started: {refusal}"
            rows.append(self._member(self._fleet.add(pool, time.monotonic_ns())).row())
        _log.info("an operator adds %s", ", ".join(row.id for row in rows))
        return rows, ""

    def attach(self, text: str) -> WorkerRow:
        """Use one more server, described as `AttachedWorker.parse` reads it.

        Raises:
            ConfigError: the description is not understood. ChangeRefused: it is attached already.
        """
        try:
            member = self._supervisor.attached.attach(text)
        except FleetError as error:
            raise ChangeRefused(str(error)) from None
        self._supervisor.add(member)
        _log.info("an operator attaches %s", member.id)
        return member.row()

    def drain(self, id: str, limit_s: float | None) -> WorkerRow:
        """Let a worker end what it has, for `limit_s` seconds at most, then go.

        Raises:
            UnknownWorker: there is none of that id. ChangeRefused: it cannot go.
        """
        member = self._member(id)
        if member.state is WorkerState.READY:
            _check(drain_refusal(self._fleet, id))
        _log.info("an operator drains %s", id)
        self._supervisor.drain(member, limit_s)
        return member.row()

    def flip(self, id: str, role: Role, limit_s: float | None) -> WorkerRow:
        """Let a worker drain, then serve in another role. Raises as `drain`."""
        member = self._member(id)
        if role is (member.next_role or member.role) and not member.leaving:
            self._supervisor.limit_drain(member, limit_s)
            return member.row()
        pool = self._supervisor.provider(member).pool(role, member.model)
        _check(flip_refusal(self._fleet, id, pool))
        _log.info("an operator flips %s to %s", id, role.value)
        self._supervisor.flip(member, role, pool, limit_s)
        return member.row()

    def restart(self, id: str, limit_s: float | None) -> WorkerRow:
        """Let a local worker drain, then start again. Raises as `drain`."""
        member = self._member(id)
        if not isinstance(member, LocalMember):
            raise ChangeRefused(f"{id} is not started here; start it again where it runs")
        if member.next_role is member.role:
            self._supervisor.limit_drain(member, limit_s)
            return member.row()
        _check(drain_refusal(self._fleet, id))
        _log.info("an operator restarts %s", id)
        self._supervisor.restart(member, limit_s)
        return member.row()

    def remove(self, id: str) -> WorkerRow:
        """Let a worker go at once; its streams go on elsewhere. Raises as `drain`."""
        member = self._member(id)
        _check(removal_refusal(self._fleet, id))
        _log.info("an operator removes %s", id)
        self._supervisor.remove(member)
        return member.row()

    def _member(self, id: str) -> FleetMember:
        member = self._supervisor.member(id)
        if member is None:
            raise UnknownWorker(id)
        return member


def _check(refusal: str) -> None:
    """Raise `ChangeRefused` where there is a reason."""
    if refusal:
        raise ChangeRefused(refusal)
