"""What the gateway asks of a fleet whose workers are to change."""

from __future__ import annotations

from typing import Protocol

from pigou.gateway.status_api import WorkerRow
from pigou.request import Role


class ChangeRefused(Exception):
    """A change that the fleet cannot make now; the message says why."""


class UnknownWorker(Exception):
    """There is no worker of this id."""


class FleetChanges(Protocol):
    """Changes a fleet by an operator's word.

    Calls return at once with the rows of the workers that they are about: one that is added is
    starting then, one that leaves is draining.
    """

    def start(self, role: Role, count: int, model: str = "") -> tuple[list[WorkerRow], str]:
        """Start local workers, of a model where there are several.

        Returns:
            Their rows, and why not all of `count`.

        Raises:
            ChangeRefused: none can be started.
        """
        ...

    def attach(self, text: str) -> WorkerRow:
        """Use one more server, described as `--attach` of `pigou serve` has it.

        Raises:
            ConfigError: the description is not understood. ChangeRefused: it is attached already.
        """
        ...

    def drain(self, id: str, limit_s: float | None) -> WorkerRow:
        """Let a worker end what it has, for `limit_s` seconds at most, then go.

        Raises:
            UnknownWorker: there is none of that id. ChangeRefused: it cannot go.
        """
        ...

    def flip(self, id: str, role: Role, limit_s: float | None) -> WorkerRow:
        """Let a worker drain, then serve in another role. Raises as `drain`."""
        ...

    def restart(self, id: str, limit_s: float | None) -> WorkerRow:
        """Let a local worker drain, then start again. Raises as `drain`."""
        ...

    def remove(self, id: str) -> WorkerRow:
        """Let a worker go at once; its streams go on elsewhere. Raises as `drain`."""
        ...
