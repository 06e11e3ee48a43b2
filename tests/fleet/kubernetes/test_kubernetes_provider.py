"""A planner scales a `PigouFleet`: its pools, the operator, pods in memory, scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fleet.harness import WATCH
from tests.fleet.kubernetes.fleets import Cluster, Manifest, fleet, operated, pool, until
from tests.fleet.registry.entries import entry
from tests.gateway.stub import Script, Stub

from pigou.config import ConfigError, ControlConfig
from pigou.control.planner.config import PlannerConfig
from pigou.fleet.config import WorkersConfig
from pigou.fleet.kubernetes.kubernetes_provider import DELETION_COST, FleetScales
from pigou.fleet.kubernetes.manifests import DEPLOYMENT_VERSION
from pigou.fleet.registry.entry import write_entry
from pigou.fleet.registry.kubernetes_store import ENTRY, RESTARTS
from pigou.fleet.registry.registry import open_registry
from pigou.fleet.serve import Serving
from pigou.fleet.supervisor import FleetSetup
from pigou.gateway.config import GatewayConfig
from pigou.request import Role

POOL, SCALE = "both.registered", "chat-m-both"
MERGE = "application/merge-patch+json"


class Kubelet:
    """Runs the pods of workers' Deployments as scripted servers.

    Attributes:
        held: no pod becomes ready.
        full: pods are shown as unschedulable.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.store = cluster.store
        self.held = self.full = False
        self._runners: dict[str, Any] = {}
        self._number = 0

    async def run(self) -> None:
        while True:
            for item in self.store.all("deployments"):
                if DEPLOYMENT_VERSION in item["metadata"]["labels"]:
                    await self._keep(item)
            await asyncio.sleep(0.02)

    async def _keep(self, item: Manifest) -> None:
        pods = self.pods()
        pods.sort(  # as a ReplicaSet has it: those that are not ready go first
            key=lambda p: (
                ENTRY in p["metadata"]["annotations"],
                int(p["metadata"]["annotations"].get(DELETION_COST, 0)),
            )
        )
        for pod in pods[: max(0, len(pods) - item["spec"]["replicas"])]:
            name = pod["metadata"]["name"]
            self.store.delete(self.store.find("pods"), "default", name)
            if runner := self._runners.pop(name, None):
                await runner.cleanup()
        for _ in range(item["spec"]["replicas"] - len(pods)):
            self._number += 1
            meta = {
                "name": f"pod-{self._number}",
                "labels": item["spec"]["template"]["metadata"]["labels"],
            }
            self.store.put({"apiVersion": "v1", "kind": "Pod", "spec": {}, "metadata": meta})
        for pod in self.pods():
            name, meta = pod["metadata"]["name"], pod["metadata"]
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            if name in self._runners:
                continue
            if self.held:
                wanted = [condition] if self.full else []
                if (pod.get("status") or {}).get("conditions", []) != wanted:
                    self.store.put({**pod, "status": {"conditions": wanted}})
                continue
            stub = Stub(name, Role.BOTH, script=Script(delay_s=0.01))
            self._runners[name] = await stub.start()
            made = entry(name, f"inc-{name}", role=Role.BOTH, url=stub.url, model="m", ttl_s=60.0)
            stub.about = {"incarnation": made.incarnation}
            annotations = {ENTRY: write_entry(made, None).decode(), RESTARTS: "0"}
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            self.store.put({**pod, "metadata": {**meta, "annotations": annotations},
                            "status": ready})  # fmt: skip

    def pods(self) -> list[Manifest]:
        for pod in (pods := self.store.all("pods")):
            pod["metadata"].setdefault("annotations", {})
        return pods

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.cleanup()


@asynccontextmanager
async def scaled(planner: Manifest) -> AsyncIterator[tuple[Cluster, Kubelet, Serving]]:
    """Run operator, kubelet and a gateway with a planner that scales one pool of 1 to 3 pods."""
    async with operated() as cluster:
        cluster.store.put(fleet(pool("both", None, minReplicas=1, maxReplicas=3)))
        kubelet = Kubelet(cluster)
        running = asyncio.create_task(kubelet.run())
        await until(lambda: cluster.store.all("pigoupools") and kubelet.pods())
        url = f"k8s://default?selector=pigou.dev/fleet=chat,pigou.dev/part=worker&api={cluster.api.url}"
        registry = open_registry(url)
        config = PlannerConfig(slo="ttft=5,itl=1", planner=planner, interval_s=0.2)
        serving = Serving(GatewayConfig(port=0, strict=False), ControlConfig(),
                          FleetSetup(watch=WATCH, registry=registry, scales=FleetScales.of(url)),
                          config)  # fmt: skip
        try:
            await serving.start()
            yield cluster, kubelet, serving
        finally:
            await serving.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await kubelet.close()


def replicas(cluster: Cluster) -> int:
    return int(cluster.store.all("pigoupools")[0]["spec"]["replicas"])


def states(serving: Serving) -> list[str]:
    return sorted(row.state for row in serving.supervisor.rows())


def rescale(cluster: Cluster, count: int) -> None:
    """Scale the pool, as a human or an autoscaler does."""
    patch = {"spec": {"replicas": count}}
    cluster.store.patch(cluster.store.find("pigoupools"), "default", SCALE, patch, MERGE, "scale")


def pod_names(kubelet: Kubelet) -> set[str]:
    return {pod["metadata"]["name"] for pod in kubelet.pods()}


async def drain(serving: Serving, pod: str) -> None:
    url = f"http://127.0.0.1:{serving.port}/workers/{pod}/drain"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert response.status == 202


async def test_a_planner_scales_a_pool_and_takes_back_what_others_add() -> None:
    async with scaled({"planner": "static", "workers": 2}) as (cluster, kubelet, serving):
        await until(lambda: replicas(cluster) == 2 and states(serving) == ["up", "up"])
        assert serving.live_fleet.provided[POOL].start_up_s
        rescale(cluster, 3)
        await until(lambda: replicas(cluster) == 2 and len(kubelet.pods()) == 2)
        await until(
            lambda: (
                {row.id for row in serving.supervisor.rows()} == pod_names(kubelet)
                and states(serving) == ["up", "up"]
            )
        )
        await until(cluster.ready)


async def test_the_pod_of_a_drained_worker_is_the_one_that_goes() -> None:
    async with scaled({"planner": "static", "repair": False}) as (cluster, kubelet, serving):
        await until(lambda: replicas(cluster) == 1 and states(serving) == ["up"])
        kubelet.held = kubelet.full = True
        rescale(cluster, 3)
        await until(lambda: states(serving) == ["starting", "starting", "up"])
        await until(lambda: any(row.unplaceable for row in serving.supervisor.rows()))
        assert serving.live_fleet.start_refusal(POOL) == "maxReplicas of the PigouFleet is 3"
        kubelet.held = False
        await until(lambda: states(serving) == ["up", "up", "up"])
        refusal = serving.live_fleet.flip_refusal("pod-1", "decode.registered")
        assert "scale both pools" in refusal
        await drain(serving, "pod-1")
        await until(lambda: replicas(cluster) == 2 and pod_names(kubelet) == {"pod-2", "pod-3"})
        await until(lambda: states(serving) == ["up", "up"])


async def test_a_drained_worker_that_is_replaced_at_once_takes_its_pod_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool's size does not change, so nothing but a deletion ends the pod."""
    release = FleetScales.release
    async with scaled({"planner": "static", "workers": 2}) as (cluster, kubelet, serving):

        async def late(scales: FleetScales, pod: str) -> None:
            await until(lambda: "starting" in states(serving))
            await release(scales, pod)

        await until(lambda: replicas(cluster) == 2 and states(serving) == ["up", "up"])
        monkeypatch.setattr(FleetScales, "release", late)
        await drain(serving, "pod-1")
        await until(lambda: "pod-1" not in pod_names(kubelet))
        await until(lambda: states(serving) == ["up", "up"])
        assert replicas(cluster) == 2
        assert {row.id for row in serving.supervisor.rows()} == pod_names(kubelet)


def test_pods_are_scaled_only_where_the_registry_names_their_fleet() -> None:
    with pytest.raises(ConfigError, match=r"give k8s://NAMESPACE.selector=pigou.dev/fleet=NAME"):
        FleetScales.of("k8s://default?selector=app=x&api=http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="whose pods the PigouFleet counts"):
        WorkersConfig(on="kubernetes", registry="k8s://default", both=1)
