"""What a provider of workers is: it knows pools, and makes members of a fleet for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from pigou.fleet.member import FleetMember
from pigou.request import Role


class ProvidedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role that run on the same."""

    name: str  # unique over all providers: `decode` for local workers, `decode.attached`
    role: Role
    gpus: int = 1  # of each worker, at least 1
    # seconds from the order of a worker until it serves, as seen; None where none was started yet.
    start_up_s: float | None = None
    model: str = ""  # of its workers, of several; empty where there is one, or it is not known


class Provider(Protocol):
    """Where workers come from: processes of this machine, servers that others run, a cluster.

    The supervisor runs the members that a provider makes, drains them and lets them go. A member
    says what its start, its end and a change of its role take (`FleetMember`).
    """

    kind: ClassVar[str]  # of its members, as `/workers` shows it: local, attached

    @property
    def room(self) -> int | None:
        """Workers that a planner may have by default; None for those that run, as it starts none.

        An operator may add more by hand, and `--max-workers` allow more.
        """
        ...

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """The pools, those without workers too."""
        ...

    def pool(self, role: Role, model: str = "") -> str:
        """Return the name of the pool that its workers of a role, and model, are in."""
        ...

    def start_refusal(self, pool: str) -> str:
        """Return why no further worker of a pool can be started now; empty where one can."""
        ...

    def make(self, pool: str) -> FleetMember:
        """Return a new member of a pool, which does not run yet; its id was never used before.

        Raises:
            FleetError: `start_refusal` says why not.
        """
        ...

    def flip_refusal(self, member: FleetMember, pool: str) -> str:
        """Return why one of its members cannot serve in another pool; empty where it can."""
        ...

    def flipped(self, member: FleetMember) -> None:
        """One of its members is in another pool now."""
        ...

    def discard(self, member: FleetMember) -> None:
        """A member is gone for good: what it used is free."""
        ...
