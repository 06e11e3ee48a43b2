"""Operator: reconciles each `PigouFleet` until it is deleted.

Events only wake a round, which reads all state anew: a lost event does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pigou.background import cancel, wait_for
from pigou.config import ConfigError
from pigou.fleet.kubernetes.definitions import GROUP, VERSION, OperatorConfig
from pigou.fleet.kubernetes.kubernetes_api import Connection, KubernetesApi, KubernetesError
from pigou.fleet.kubernetes.manifests import FLEET
from pigou.fleet.kubernetes.reconciliation import (
    Observation,
    Reconciliation,
    Write,
    reconcile,
    refusal,
)
from pigou.stop_signals import END_S, StopSignals

if TYPE_CHECKING:
    import kopf


_log = logging.getLogger("pigou.operator")
#: Seconds between a change and the round that it wakes, so that several wake one.
_COALESCED_S = 0.05
#: Answers to a write that come again until its object is another one: invalid, or not permitted.
_REFUSED = (400, 403, 422)


class FleetOperator:
    """Keeps fleets as they are specified; runs handlers of kopf in one event loop."""

    def __init__(self, config: OperatorConfig, connect: Callable[[], Any] | None = None) -> None:
        """`connect` returns kopf's `ConnectionInfo`: as kubectl by default. Raises ConfigError."""
        self._config = config
        self._connect = connect or _connection
        self._connect()
        self._wakes: dict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self._loops: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._api = KubernetesApi(lambda: Connection.of(self._connect()))

    async def serve(self) -> None:
        """Serve until a signal ends the process; a second one ends it at once."""
        stop = asyncio.Event()
        with StopSignals(stop.set, END_S) as signals:
            await self.run(stop, signals.take)

    async def run(
        self, stop: asyncio.Event | threading.Event, started: Callable[[], None] | None = None
    ) -> None:
        """Serve until `stop` is set; kopf has taken the signals when `started` is called."""
        import kopf

        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        scope: dict[str, Any] = {"clusterwide": True}
        if self._config.namespace:
            scope = {"namespaces": [self._config.namespace]}
        async with self._api:
            await kopf.operator(
                registry=self._handlers(started), settings=settings, standalone=True,
                stop_flag=stop,
                liveness_endpoint=self._config.liveness or None, **scope,
            )  # fmt: skip

    async def round(self, namespace: str, name: str) -> Reconciliation | None:
        """Observe and write the next step; None if the fleet is gone."""
        try:
            fleet = await self._api.get("PigouFleet", namespace, name)
        except KubernetesError as error:
            if error.code == 404:
                return None
            raise
        if "deletionTimestamp" in fleet["metadata"]:
            return None
        observed = await self._observe(fleet)
        changes = reconcile(observed)
        try:
            for write in changes.writes:
                await self._write(write)
        except KubernetesError as error:
            taken = error.code == 409 and write.verb == "create"  # by another fleet's object
            if error.code not in _REFUSED and not taken:
                raise
            manifest = write.manifest
            what = f"{write.verb} {manifest['kind']} {manifest['metadata']['name']}"
            changes = refusal(observed, "WriteRefused", f"{what}: {error}")
            _log.warning("fleet %s: %s: %s", name, what, error)
        if changes.status != fleet.get("status"):
            await self._api.patch({**fleet, "status": changes.status}, "status")
        return changes

    async def _write(self, write: Write) -> None:
        match write.verb:
            case "create":
                await self._api.create(write.manifest)
            case "patch":
                await self._api.patch(write.manifest)
            case "replace":
                await self._api.replace(write.manifest)
            case "status":
                await self._api.patch(write.manifest, "status")
            case "delete":
                await self._api.delete(write.manifest)

    async def _observe(self, fleet: dict[str, Any]) -> Observation:
        api, meta = self._api, fleet["metadata"]
        own = f"{FLEET}={meta['name']}"
        gangs = [kind for kind in ("LeaderWorkerSet", "PodCliqueSet") if await api.serves(kind)]
        everywhere = "" if not self._config.namespace else meta["namespace"]
        workloads = [
            w for kind in ("Deployment", *gangs) for w in await api.list(kind, everywhere, FLEET)
        ]
        return Observation(
            fleet=fleet, workloads=workloads, gangs="LeaderWorkerSet" in gangs,
            grove="PodCliqueSet" in gangs, nodes=await self._readable("Node"),
            pods=await self._readable("Pod"), now=_now(),
            services=await api.list("Service", meta["namespace"], own),
            pools=await api.list("PigouPool", meta["namespace"], own),
        )  # fmt: skip

    async def _readable(self, kind: str) -> list[dict[str, Any]] | None:
        """Return all objects of a kind; None where they may not, or cannot, be read."""
        try:
            return await self._api.list(kind)
        except KubernetesError as error:
            _log.warning("%ss cannot be read, so that no GPU is taken: %s", kind, error)
            return None

    def _handlers(self, started: Callable[[], None] | None) -> kopf.OperatorRegistry:
        """Return kopf handlers of fleet loops; none needs a finalizer."""
        import kopf

        registry = kopf.OperatorRegistry()
        on: Any = kopf.on  # kopf passes handlers the arguments they name

        def login(**_: Any) -> Any:
            return self._connect()

        async def end(**_: Any) -> None:
            await cancel(*self._loops.values())

        async def begin(**_: Any) -> None:
            if started is not None:
                started()

        on.startup(registry=registry)(begin)
        on.login(registry=registry)(login)
        on.cleanup(registry=registry)(end)
        on.event(GROUP, VERSION, "pigoufleets", registry=registry)(self._fleet_changed)
        for kind in ((GROUP, VERSION, "pigoupools"), ("apps", "v1", "deployments")):
            on.event(*kind, registry=registry, labels={FLEET: kopf.PRESENT})(self._part_changed)
        return registry

    async def _fleet_changed(self, type: str | None, namespace: str, name: str, **_: Any) -> None:
        fleet = namespace, name
        if type == "DELETED":
            self._wakes.pop(fleet, None)
            if loop := self._loops.pop(fleet, None):
                loop.cancel()
        elif fleet not in self._loops:
            self._loops[fleet] = asyncio.create_task(self._keep(namespace, name))
        else:
            self._wakes[fleet].set()

    async def _part_changed(self, namespace: str, labels: Any, **_: Any) -> None:
        self._wakes[namespace, labels[FLEET]].set()

    async def _keep(self, namespace: str, name: str) -> None:
        wake = self._wakes[namespace, name]
        while True:
            wake.clear()
            try:
                changes = await self.round(namespace, name)
                for write in changes.writes if changes is not None else ():
                    manifest = write.manifest
                    _log.info(
                        "fleet %s: %s %s %s", name, write.verb, manifest["kind"],
                        manifest["metadata"]["name"],
                    )  # fmt: skip
            except KubernetesError as error:
                _log.warning("fleet %s: %s; it is tried again", name, error)
                if error.code == 409:
                    wake.set()
            except Exception:
                _log.exception("fleet %s: this round failed; the next one is tried", name)
            await wait_for(wake, self._config.interval)
            await asyncio.sleep(_COALESCED_S)


def _connection() -> Any:
    import kopf

    settings = kopf.OperatorSettings()
    try:
        info = kopf.login_with_service_account(settings=settings)
        info = info or kopf.login_with_kubeconfig(settings=settings)
    except (OSError, KeyError, kopf.LoginError) as error:
        raise ConfigError(f"the kubeconfig cannot be used: {error!r}; see KUBECONFIG") from error
    if info is None:
        raise ConfigError("no API server is known: set KUBECONFIG, or run it in a pod")
    return info


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
