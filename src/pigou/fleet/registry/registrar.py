"""Registers the worker of this process, and takes orders that others write into its entry."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pigou.background import Background
from pigou.config import ConfigError
from pigou.fleet.registry.config import RegistrationConfig
from pigou.fleet.registry.entry import KVShape, WorkerEntry
from pigou.fleet.registry.registration import Registration
from pigou.fleet.registry.registry import Registry
from pigou.fleet.registry.stores import open_registry
from pigou.request import Role
from pigou.wire.addresses import advertised, reachable, url_host
from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import deployment_version

_log = logging.getLogger("pigou.registry")


class WorkerRegistrar:
    """Keeps a worker registered from when it is ready until it ends (a worker's `Registrar`).

    An entry that is marked as draining by a gateway ends the worker, as SIGTERM does. Where the
    role is changed, the entry has the new one: Pigou's workers serve in any.
    """

    def __init__(
        self, config: RegistrationConfig, secret: FleetSecret | None, gpus: int = 0, tp: int = 1
    ) -> None:
        """Prepare.

        Args:
            tp: GPUs that the model's heads are split over.

        Raises:
            ConfigError: the URL is not understood, or its client is not installed.
        """
        self._config = config
        self._gpus, self._tp = gpus, tp
        self._registry: Registry = open_registry(config.registry, secret)
        self._registration: Registration | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop: Callable[[], None] | None = None

    async def ready(self, about: dict[str, Any], stop: Callable[[], None]) -> None:
        """Register the worker, in the background: it serves whether the registry answers or not.

        Args:
            about: what the worker says of itself when it is ready.
            stop: drains and ends it.

        Raises:
            ConfigError: the entry is not valid: naming the option.
        """
        self._stop = stop
        self._registration = Registration(self._registry, self._entry(about), self._changed)
        run = self._registration.run
        self._task = Background().start("registration", run)

    async def draining(self) -> None:
        """Say that the worker takes nothing new."""
        if self._registration is not None and not self._registration.entry.draining:
            await self._registration.change(draining=True)

    async def leave(self) -> None:
        """Remove the worker's entry."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._registration is not None:
            await self._registration.leave()
        await self._registry.close()

    def _changed(self, entry: WorkerEntry) -> None:
        """Follow what somebody else wrote."""
        _log.info("epoch %d: role %s%s", entry.epoch, entry.role.value,
                  ", draining" if entry.draining else "")  # fmt: skip
        if entry.draining and self._stop is not None:
            _log.warning("the fleet lets this worker go: it drains, and ends")
            self._stop()

    def _entry(self, about: dict[str, Any]) -> WorkerEntry:
        url = urlsplit(str(about["url"]))
        host = advertised(url.hostname or "", self._config.advertise)
        topology = self._config.topology(socket.gethostname(), self._gpus, about.get("location"))
        in_pod = self._config.registry.startswith("k8s:")
        incarnation = str(about["incarnation"])
        try:
            return WorkerEntry(
                worker=self._config.worker_id
                or default_id(topology.host, "" if in_pod else incarnation),
                incarnation=incarnation,
                role=Role(about["role"]),
                model=str(about["model"]),
                version=deployment_version(about),
                shape=KVShape(tp=self._tp, kv_layout=str(about.get("kv_layout") or "")),
                url=f"http://{url_host(host)}:{url.port}",
                kv_events=reachable(str(about.get("kv_events") or ""), host),
                kv_replay=reachable(str(about.get("kv_replay") or ""), host),
                transfer=str(about.get("kv_transfer") or ""),
                kv_address=host,
                topology=topology,
                ttl_s=self._config.lease,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"registry: the worker's entry is not valid: {error}") from error


def default_id(host: str, incarnation: str = "") -> str:
    """Return a worker's name: the host's, and the beginning of its incarnation.

    Args:
        incarnation: of its process; empty in a pod of Kubernetes, whose name is the worker's.
    """
    if not incarnation:
        return os.environ.get("HOSTNAME") or socket.gethostname()
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', host.partition('.')[0])}-{incarnation[:8]}"
