"""The scaled pools of a `PigouFleet`, as a gateway reads them and writes their replicas."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pigou.background import cancel, wait_for
from pigou.config import ConfigError
from pigou.control.planner.actuation import UNPLACEABLE
from pigou.fleet.config import FleetError
from pigou.fleet.kubernetes.fleet_spec import read_fleet
from pigou.fleet.kubernetes.kubernetes_api import KubernetesApi, KubernetesError, account_api
from pigou.fleet.kubernetes.manifests import FLEET, MODEL, PART, ROLE, Manifest
from pigou.fleet.kubernetes.reconciliation import is_unschedulable
from pigou.fleet.member import Member, MemberSetup
from pigou.fleet.provider import ProvidedPool
from pigou.fleet.registry.entry import WorkerEntry
from pigou.fleet.registry.registry import Registry
from pigou.fleet.sources.registered import FollowedFleet, RegistryProvider
from pigou.request import SECOND, Role

_log = logging.getLogger("pigou.fleet")

#: Pod annotation: lowest cost is deleted first.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
#: Retries of a write after a conflict.
_TRIES = 5
#: Seconds between two reads of the pools.
_POLL_S = 2.0
_NOT_READY = "its pod is not ready yet"


class ScaledPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool scaled through its `PigouPool`."""

    name: str
    model: str
    role: Role
    replicas: int
    lowest: int
    highest: int
    gpus: int = 1
    unschedulable: int = 0  # pods for which no node has room
    pods: dict[str, str] = {}  # uids of its live pods, by name


class FleetScales:
    """Reads and scales the pools of one fleet; `async with` opens and closes the connection."""

    def __init__(self, api: KubernetesApi, namespace: str, fleet: str) -> None:
        self._api, self._namespace, self._fleet = api, namespace, fleet

    @classmethod
    def of(cls, registry: str) -> Self:
        """Return the pools of the fleet whose pods a registry's URL names. Raises ConfigError."""
        parts = urlsplit(registry)
        options = dict(parse_qsl(parts.query))
        fleet = re.search(rf"(?:^|,){re.escape(FLEET)}=([^,]+)", options.get("selector", ""))
        if parts.scheme != "k8s" or fleet is None:
            raise ConfigError(
                f"on is 'kubernetes', and registry is {registry!r}; give "
                f"k8s://NAMESPACE?selector={FLEET}=NAME of the fleet that is scaled"
            )
        return cls(account_api(options.get("api", "")), parts.netloc, fleet[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._api.close()

    async def read(self) -> list[ScaledPool]:
        """Return the scalable pools; raises KubernetesError or ConfigError."""
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
                lowest, highest = pool.range
                own_pods = [pod for pod in pods if _is_of(pod, model.label, pool.role)]
                pools.append(
                    ScaledPool(
                        name=scale["metadata"]["name"], model=model.name, role=Role(pool.role),
                        replicas=min(max(scale["spec"]["replicas"], lowest), highest),
                        lowest=lowest, highest=highest, gpus=max(1, pool.gpus_per_replica),
                        unschedulable=sum(map(is_unschedulable, own_pods)),
                        pods={pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in own_pods},
                    )
                )  # fmt: skip
        return pools

    async def scale(self, pool: ScaledPool, change: int) -> int:
        """Change a pool's replicas, within its range; return them. Raises KubernetesError."""
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
        """Mark a pod to go first when its pool shrinks, if it exists."""
        meta = {"name": pod, "namespace": self._namespace, "annotations": {DELETION_COST: "-1000"}}
        try:
            await self._api.patch({"kind": "Pod", "apiVersion": "v1", "metadata": meta})
        except KubernetesError as error:
            if error.code != 404:
                raise

    async def remove(self, pod: str, uid: str) -> None:
        """Delete a pod, if it exists; its pool replaces it."""
        meta = {"name": pod, "namespace": self._namespace, "uid": uid}
        await self._api.delete({"kind": "Pod", "metadata": meta})


def _is_of(pod: Manifest, model: str, role: str) -> bool:
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    own = tuple(labels.get(key) for key in (PART, MODEL, ROLE)) == ("worker", model, role)
    return own and not meta.get("deletionTimestamp")


class PendingPods:
    """The source of members whose pods are to come, or whose workers are not registered yet."""

    kind, starts = "registered", False

    async def live(self, member: Member) -> str:  # noqa: ARG002
        """Wait until cancelled: a registered worker takes the member's place."""
        return str(await asyncio.get_running_loop().create_future())


_PENDING = PendingPods()


class KubernetesProvider(RegistryProvider):
    """Uses the workers of a registry, and has pods made and ended through their pools' scales."""

    not_started: ClassVar[str] = (
        "its replicas are fixed; give minReplicas and maxReplicas in the PigouFleet"
    )

    def __init__(self, registry: Registry, setup: MemberSetup, scales: FleetScales) -> None:
        super().__init__(registry, setup)
        self._scales = scales
        self._pools: dict[str, ScaledPool] = {}
        self._pending: dict[str, list[Member]] = {}
        self._changes: Counter[str] = Counter()  # by pool, not written yet
        # Names of pods whose workers are let go, by those of their pools.
        self._leaving_pods: dict[str, str] = {}
        self._released_pods: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._error = "the pools were not read yet"
        self._start_up_s: dict[str, float] = {}
        self._number = 0

    async def follow(self, fleet: FollowedFleet) -> None:
        """Follow the registry and the pools until cancelled; `fleet` gets the members."""
        self._fleet = fleet
        following = self._setup.plane_driver.background.start("pools", self._follow_pools)
        try:
            await super().follow(fleet)
        finally:
            await cancel(following)

    # --- as a provider ------------------------------------------------------------------------

    @property
    def room(self) -> int | None:
        """Maximum replicas of its pools: `maxReplicas`."""
        return sum(pool.highest for pool in self._pools.values())

    @property
    def pools(self) -> Sequence[ProvidedPool]:
        """Pools of live workers' roles, and scaled pools, even empty ones."""
        provided = {pool.name: pool for pool in super().pools}
        for name, pool in self._pools.items():
            model = self._model_of(pool)
            provided[name] = ProvidedPool(
                name=name, role=pool.role, gpus=pool.gpus, model=model,
                start_up_s=self._start_up_s.get(name),
            )  # fmt: skip
        return list(provided.values())

    def start_refusal(self, pool: str) -> str:
        """Return why no further pod of a pool can be had now; empty where one can."""
        if self._error:
            return self._error
        if (scaled := self._pools.get(pool)) is None:
            return self.not_started
        if self._expected(pool) >= scaled.highest:
            return f"maxReplicas of the PigouFleet is {scaled.highest}"
        return ""

    def make(self, pool: str) -> Member:
        """Order one more pod; return its placeholder. Raises FleetError."""
        if refusal := self.start_refusal(pool):
            raise FleetError(refusal)
        self._change_scale(pool, 1)
        return self._pend(pool)

    def flip_refusal(self, member: Member, pool: str) -> str:  # noqa: ARG002
        """Return why a pod cannot serve in another pool: its Deployment goes by its labels."""
        return f"{member.id} is a pod of its pool; scale both pools instead"

    def discard(self, member: Member) -> None:
        """A member is let go: its pool has one less, unless others ended it."""
        if member.source is _PENDING:
            pending = self._pending.get(member.pool, [])
            if member in pending:  # not replaced by a worker: a planner takes it back
                pending.remove(member)
                self._change_scale(member.pool, -1)
            return
        entry = self._entries[member.id]
        known, name = self.discovery.view.entry(entry.identity), self._name_of(entry)
        super().discard(member)
        if known is not None and not known.draining and name in self._pools:
            self._leaving_pods[known.worker] = name
            self._change_scale(name, -1)

    def _add(self, entry: WorkerEntry) -> None:
        super()._add(entry)
        name = self._name_of(entry)
        if pending := self._pending.get(name):  # it takes the place of the first
            self._start_up_s[name] = (time.monotonic_ns() - pending[0].since_ns) / SECOND
        self._wake.set()

    # --- pools --------------------------------------------------------------------------------

    async def _follow_pools(self) -> None:
        async with self._scales:
            while True:
                self._wake.clear()
                try:
                    await self._write()
                    await self._read()
                except (KubernetesError, ConfigError) as error:
                    self._error = f"the pools cannot be scaled: {error}"
                    _log.warning("%s", self._error)
                await wait_for(self._wake, _POLL_S)

    async def _write(self) -> None:
        for pod in list(self._leaving_pods):
            await self._scales.release(pod)
            self._released_pods[pod] = self._leaving_pods.pop(pod)
        for name, change in list(self._changes.items()):
            pool = self._pools[name]
            if change:
                replicas = await self._scales.scale(pool, change)
                _log.info("%s has %d replicas now", pool.name, replicas)
                self._pools[name] = msgspec.structs.replace(pool, replicas=replicas)
            self._changes[name] -= change  # others may be ordered meanwhile
            if not self._changes[name]:
                del self._changes[name]

    async def _read(self) -> None:
        pools = await self._scales.read()
        models = {pool.model for pool in pools}
        if len(models) > 1 and not self._setup.models:
            raise ConfigError(
                f"the fleet has models {', '.join(sorted(models))}; give each as --model-pool"
            )
        self._pools = {self.pool(pool.role, self._model_of(pool)): pool for pool in pools}
        await self._remove_released()
        self._error = ""
        serving = Counter(map(self._name_of, self._entries.values()))
        for name in {*self._pools, *self._pending}:
            missing = self._expected(name) - serving[name] if name in self._pools else 0
            self._show_pending(name, max(0, missing))

    async def _remove_released(self) -> None:
        """Delete pods marked to go whose pools grew again."""
        for pod, name in list(self._released_pods.items()):
            pool = self._pools.get(name)
            uid = None if pool is None else pool.pods.get(pod)
            if pool is not None and uid is not None:
                if self._changes[name] or len(pool.pods) > pool.replicas:
                    continue  # the pool is about to shrink
                try:
                    await self._scales.remove(pod, uid)
                    _log.info("%s is deleted, as %s needs another in its place", pod, pool.name)
                except KubernetesError as error:
                    _log.warning("%s serves nobody and cannot be deleted: %s", pod, error)
            del self._released_pods[pod]

    def _show_pending(self, name: str, count: int) -> None:
        pending = self._pending.setdefault(name, [])
        while len(pending) > count:
            self._running.remove(pending.pop(0))
        while len(pending) < count:
            self._running.add(self._pend(name))
        scaled = self._pools.get(name)
        unschedulable = 0 if scaled is None else scaled.unschedulable
        for number, member in enumerate(pending):
            fails = number < unschedulable
            member.failed_starts = UNPLACEABLE if fails else 0
            member.row().note = "no node has room" if fails else _NOT_READY

    def _expected(self, name: str) -> int:
        pool = self._pools[name]
        return min(max(pool.replicas + self._changes[name], pool.lowest), pool.highest)

    def _change_scale(self, name: str, change: int) -> None:
        self._changes[name] += change
        self._wake.set()

    def _pend(self, name: str) -> Member:
        pool = self._pools[name]
        self._number += 1
        model = self._model_of(pool)
        id = f"{pool.name}.{self._number}"
        member = Member(id, pool.role, self._setup, _PENDING, model)
        member.row().note = _NOT_READY
        member.ready.set()  # nobody waits for it at the start
        self._pending.setdefault(name, []).append(member)
        return member

    def _model_of(self, item: ScaledPool | WorkerEntry) -> str:
        return item.model if self._setup.models else ""

    def _name_of(self, entry: WorkerEntry) -> str:
        return self.pool(entry.role, self._model_of(entry))
