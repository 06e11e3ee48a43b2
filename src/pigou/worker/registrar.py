"""What a worker asks of the registrar that keeps it known to a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pigou.wire.fleet_secret import FleetSecret


class Registrar(Protocol):
    """Keeps a running worker known to others; a failure of theirs never ends the worker."""

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Make the worker known, which serves from now on."""

    async def draining(self) -> None:
        """Say that it takes nothing new."""

    async def leave(self) -> None:
        """Say that it is gone."""


#: Makes the registrar of a worker, from the fleet's secret.
MakeRegistrar = Callable[[FleetSecret | None], Registrar]
