"""What runs on a Ray node for one worker: an actor that starts and ends its process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pigou.fleet.worker_process import WorkerProcess
from pigou.wire.addresses import url_host
from pigou.wire.fleet_secret import FleetSecret


class WorkerActor:
    """Runs `pigou worker` on its node, one process at a time; tokens never pass through it."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None

    async def start(
        self, name: str, arguments: Sequence[str], secret: bytes, timeout_s: float
    ) -> dict[str, Any]:
        """Start the process; return the line that says where it listens.

        Args:
            arguments: of `pigou worker`, besides its addresses.
            secret: of the fleet; empty for none.
            timeout_s: seconds that it may take.

        Raises:
            FleetError: it ended before, or took too long.
        """
        import ray

        host = ray.util.get_node_ip_address()
        endpoint = f"tcp://{url_host(host)}:*"
        endpoints = ["--kv-events-endpoint", endpoint, "--kv-replay-endpoint", endpoint]
        await self.stop(0.0)
        known = FleetSecret(secret.decode("utf-8", "surrogateescape")) if secret else None
        self._process = await WorkerProcess.start(name, [*endpoints, *arguments], known, host)
        try:
            return await self._process.ready(timeout_s)
        except BaseException:
            await self.stop(0.0)
            raise

    async def exited(self) -> tuple[str, int]:
        """Return how the process ended, and its status, once it has."""
        process = self._process
        if process is None:
            return "was stopped", 0
        return await process.exited(), process.code or 0

    async def stop(self, drain_s: float) -> None:
        """End the process, by force after so many seconds."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(drain_s)

    async def pids(self) -> tuple[int, int]:
        """Return the process ids of the actor and of the worker; 0 for none."""
        return os.getpid(), 0 if self._process is None else self._process.pid
