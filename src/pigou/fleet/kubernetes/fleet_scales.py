"""The scaled pools of a `PigouFleet`, as a gateway reads them and writes their replicas."""

from __future__ import annotations

import re
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pigou.config import ConfigError
from pigou.fleet.kubernetes.fleet_spec import read_fleet
from pigou.fleet.kubernetes.kubernetes_api import Connection, KubernetesApi, KubernetesError
from pigou.fleet.kubernetes.pod_templates import FLEET, MODEL, PART, ROLE, Manifest
from pigou.fleet.registry.kubernetes_store import ACCOUNT, api_server
from pigou.request import Role
from pigou.small_file import read_text

#: Of a pod: those with the lowest cost are deleted first.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
#: Tries of a write that somebody else overtakes.
_TRIES = 5


class ScaledPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that is scaled through its `PigouPool`."""

    name: str
    model: str
    role: Role
    replicas: int
    lowest: int
    highest: int
    gpus: int = 1
    unschedulable: int = 0  # pods for which no node has room
    pods: dict[str, str] = {}  # uids of its pods that are not terminating, by name


class FleetScales:
    """Reads and scales the pools of one fleet; `async with` opens and closes the connection."""

    def __init__(self, api: KubernetesApi, namespace: str, fleet: str) -> None:
        self._api, self._namespace, self._fleet = api, namespace, fleet

    @classmethod
    def of(cls, registry: str) -> Self:
        """Return the pools of the fleet whose pods a registry's URL names.

        Raises:
            ConfigError: it is no such URL, or there is no API server.
        """
        parts = urlsplit(registry)
        options = dict(parse_qsl(parts.query))
        fleet = re.search(rf"(?:^|,){re.escape(FLEET)}=([^,]+)", options.get("selector", ""))
        if parts.scheme != "k8s" or fleet is None:
            raise ConfigError(
                f"on is 'kubernetes', and registry is {registry!r}; give "
                f"k8s://NAMESPACE?selector={FLEET}=NAME of the fleet that is scaled"
            )
        server = options.get("api") or api_server()
        return cls(KubernetesApi(lambda: _connection(server)), parts.netloc, fleet[1])

    async def __aenter__(self) -> Self:
        """Open the connection."""
        await self._api.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Close it."""
        await self._api.__aexit__(*error)

    async def read(self) -> list[ScaledPool]:
        """Return the pools that have a range.

        Raises:
            KubernetesError: the server refused, or did not answer.
            ConfigError: the fleet's specification is invalid.
        """
        own = f"{FLEET}={self._fleet}"
        fleet = await self._api.get("PigouFleet", self._namespace, self._fleet)
        scales = await self._api.list("PigouPool", self._namespace, own)
        pods = await self._api.list("Pod", self._namespace, own)
        by_pool = {(s["spec"]["model"], s["spec"]["role"]): s for s in scales}
        pools = []
        for model in read_fleet(fleet["spec"], self._fleet).models:
            for pool in model.pools:
                scale = by_pool.get((model.name, pool.role))
                if not pool.scaled or scale is None:
                    continue
                lowest, highest = pool.min_replicas or 0, pool.max_replicas or 0
                own_pods = [pod for pod in pods if _is_of(pod, model.label, pool.role)]
                pools.append(
                    ScaledPool(
                        name=scale["metadata"]["name"], model=model.name, role=Role(pool.role),
                        replicas=min(max(scale["spec"]["replicas"], lowest), highest),
                        lowest=lowest, highest=highest, gpus=max(1, pool.gpus_per_replica),
                        unschedulable=sum(map(_is_unschedulable, own_pods)),
                        pods={pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in own_pods},
                    )
                )  # fmt: skip
        return pools

    async def scale(self, pool: ScaledPool, change: int) -> int:
        """Change the replicas of a pool, within its range, by its scale subresource.

        Returns:
            What they are then: others may have changed them since they were read.

        Raises:
            KubernetesError: the server refused, or did not answer.
        """
        for attempt in range(_TRIES):
            item = await self._api.get("PigouPool", self._namespace, pool.name)
            current: int = item["spec"]["replicas"]
            now = min(max(current, pool.lowest), pool.highest)
            wanted = min(max(now + change, pool.lowest), pool.highest)
            if wanted == current:
                return wanted
            try:
                await self._api.scale(item, wanted)
            except KubernetesError as error:
                if error.code != 409 or attempt == _TRIES - 1:
                    raise
                continue
            return wanted
        raise AssertionError("the last try returns or raises")

    async def release(self, pod: str) -> None:
        """Let a pod be the first that goes when its pool shrinks; one that is gone is no error."""
        meta = {"name": pod, "namespace": self._namespace, "annotations": {DELETION_COST: "-1000"}}
        try:
            await self._api.patch({"kind": "Pod", "apiVersion": "v1", "metadata": meta})
        except KubernetesError as error:
            if error.code != 404:
                raise

    async def remove(self, pod: str, uid: str) -> None:
        """Delete a pod, which its pool replaces; one that is gone is no error.

        Raises:
            KubernetesError: the server refused, or did not answer.
        """
        meta = {"name": pod, "namespace": self._namespace, "uid": uid}
        await self._api.delete({"kind": "Pod", "metadata": meta})


def _is_of(pod: Manifest, model: str, role: str) -> bool:
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    own = tuple(labels.get(key) for key in (PART, MODEL, ROLE)) == ("worker", model, role)
    return own and not meta.get("deletionTimestamp")


def _is_unschedulable(pod: Manifest) -> bool:
    return any(
        condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in (pod.get("status") or {}).get("conditions") or ()
    )


def _connection(server: str) -> Connection:
    """Return the connection of a pod's service account; without one, of `kubectl proxy`."""
    token, authority = ACCOUNT / "token", ACCOUNT / "ca.crt"
    return Connection(
        server=server,
        token=read_text(token).strip() if token.exists() else "",
        ca_path=str(authority) if authority.exists() else "",
    )
