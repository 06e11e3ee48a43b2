"""A worker process on a Ray node, as its member sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pigou.fleet.config import FleetError
from pigou.fleet.hang_detection import EngineProgress
from pigou.fleet.ray.cluster import ActorGone, Bundle, RayCluster
from pigou.fleet.worker_process import ProcessState
from pigou.wire.fleet_secret import FleetSecret

#: Seconds between two looks whether the node of a start is alive.
_LOOK_S = 1.0
#: Seconds beyond a drain that an actor is given to say that its process has ended.
_ANSWER_S = 5.0


class RayProcess:
    """`pigou worker` in an actor: started, waited for, ended by calls of the actor.

    Its health, load and progress come by HTTP, as those of an attached server do.

    Attributes:
        code: exit status; None while it runs, or where its node is gone.
    """

    pid: int = 0  # 0, as it is no process of this machine
    heartbeat: EngineProgress | None = None  # None, for the same reason
    process_state: ProcessState | None = None

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        secret: FleetSecret | None,
        cluster: RayCluster,
        bundle: Bundle,
    ) -> None:
        """Take what `ready` starts."""
        self.code: int | None = None
        self._name, self._arguments = name, list(arguments)
        self._secret = b"" if secret is None else secret.text()
        self._cluster, self._bundle = cluster, bundle

    async def ready(
        self, timeout_s: float, on_stage: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Start it; return the line that says where it listens.

        Raises:
            FleetError: it ended before, took too long, or its node is gone.
        """
        if on_stage is not None:
            on_stage(f"starting on {self._bundle.host}")
        arguments = self._name, self._arguments, self._secret, timeout_s
        answer = asyncio.create_task(self._cluster.call(self._bundle, "start", *arguments))
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_S):
                while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                    if not await self._cluster.is_alive(self._bundle.host):
                        raise FleetError(f"{self._name}: its node {self._bundle.host} is gone")
                line: dict[str, Any] = await answer
                return line
        except TimeoutError:
            raise FleetError(f"{self._name} was not ready within {timeout_s:g} s") from None
        except ActorGone:
            self._cluster.end_actor(self._bundle)
            raise
        finally:
            answer.cancel()

    async def exited(self) -> str:
        """Return how it ended, once it has."""
        while True:
            try:
                how, self.code = await self._cluster.call(self._bundle, "exited")
            except ActorGone as gone:
                self._cluster.end_actor(self._bundle)
                return str(gone)
            except FleetError:  # the worker itself is watched by HTTP
                await asyncio.sleep(_LOOK_S)
            else:
                return str(how)

    async def stop(self, drain_s: float) -> None:
        """End it, by force after `drain_s` seconds; one whose node is gone has ended."""
        if self._bundle.actor is None:
            return
        with suppress(FleetError, TimeoutError):
            async with asyncio.timeout(drain_s + _ANSWER_S):
                await self._cluster.call(self._bundle, "stop", drain_s)
                return
        self._cluster.end_actor(self._bundle)
