"""A fleet on the fake API server: its manifests, and controllers that a cluster would have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
from tests.lib.fake_kubernetes import FakeKubernetes

from pigou.fleet.kubernetes.definitions import API_VERSION, OperatorConfig, definitions
from pigou.fleet.kubernetes.manifests import DEPLOYMENT_VERSION, ROLE
from pigou.fleet.kubernetes.operator import FleetOperator

Manifest = dict[str, Any]
GPU = "nvidia.com/gpu"


def pool(role: str, replicas: int | None = 1, **fields: Any) -> Manifest:
    sizes = {} if replicas is None else {"replicas": replicas}
    return {"role": role, "gpusPerReplica": 1, **sizes, **fields}


def fleet(*pools: Manifest, name: str = "chat", model: str = "bundled", **spec: Any) -> Manifest:
    update = spec.pop("update", {"surge": 2, "unavailable": 1})
    models = [{"name": "m", "model": model, "pools": list(pools), "update": update}]
    meta = {"name": name, "namespace": "default"}
    return {"apiVersion": API_VERSION, "kind": "PigouFleet", "metadata": meta,
            "spec": {"models": models, **spec}}  # fmt: skip


def node(name: str, gpus: int | str) -> Manifest:
    status = {"allocatable": {GPU: str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


class Cluster:
    """The fake with a Deployment controller: pods of a version are ready unless it is `stuck`.

    Attributes:
        stuck: versions whose workers never become ready.
        steps: replicas by version and role after each change of a worker's Deployment.
    """

    def __init__(self, api: FakeKubernetes) -> None:
        self.api, self.store = api, api.store
        self.stuck: set[str] = set()
        self.steps: list[dict[tuple[str, str], int]] = []
        self._notify, self.store.notify = self.store.notify, self._note
        for crd in definitions():
            self.store.put(crd)

    async def control(self, workers: bool = True) -> None:
        while True:
            for item in self.store.all("deployments"):
                version = item["metadata"]["labels"].get(DEPLOYMENT_VERSION)
                if version and not workers:
                    continue
                generation, replicas = item["metadata"]["generation"], item["spec"]["replicas"]
                ready = 0 if version in self.stuck else replicas
                status = {"availableReplicas": ready, "updatedReplicas": replicas,
                          "observedGeneration": generation}  # fmt: skip
                if item.get("status") != status:
                    self.store.put({**item, "status": status})
            await asyncio.sleep(0.005)

    def _note(self) -> None:
        self._notify()
        replicas = self.replicas()
        if not self.steps or self.steps[-1] != replicas:
            self.steps.append(replicas)

    def replicas(self) -> dict[tuple[str, str], int]:
        """Return the replicas of workers by version and role."""
        return {
            (labels[DEPLOYMENT_VERSION], labels[ROLE]): item["spec"]["replicas"]
            for item in self.store.all("deployments")
            if DEPLOYMENT_VERSION in (labels := item["metadata"]["labels"])
        }

    def condition(self, name: str = "chat") -> Manifest:
        for item in self.store.all("pigoufleets"):
            if item["metadata"]["name"] == name:
                current = item["metadata"]["generation"]
                for condition in (item.get("status") or {}).get("conditions") or ():
                    if condition["observedGeneration"] == current:
                        return condition
        return {"status": "Unknown", "reason": "", "message": ""}

    def ready(self) -> bool:
        return self.condition()["status"] == "True"

    def version(self) -> str:
        """Return the version that the operator brings about."""
        return self.store.all("pigoufleets")[0]["status"]["models"][0]["version"]


async def until(true: Callable[[], Any], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def operated(gpus: int = 32, *, controlled: bool = True) -> AsyncIterator[Cluster]:
    """Run the operator, in a thread, against a fake cluster of one node."""
    async with FakeKubernetes() as api:
        cluster = Cluster(api)
        api.store.put(node("n1", gpus))

        def connect() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=api.url, token=api.token)

        config = OperatorConfig(namespace="default", interval=1.0)
        operator = FleetOperator(config, connect)
        stop = threading.Event()
        controller = asyncio.create_task(cluster.control(controlled))
        # At its end kopf waits for all tasks of its event loop, so it has one of its own.
        run = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(operator.run(stop))))
        try:
            yield cluster
        finally:
            stop.set()
            await run
            controller.cancel()


def kinds(api: FakeKubernetes, agent: str) -> set[tuple[str, str, str]]:
    """Return the kinds of requests of a client beside discovery: verb, resource, media type."""
    return {
        (seen.verb, seen.resource, seen.media_type)
        for seen in api.requests
        if seen.agent == agent and seen.verb != "discover"
    }
