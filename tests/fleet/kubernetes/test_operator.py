"""The operator against the API server in memory: create, scale, roll, revert, delete."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from tests.fleet.kubernetes.fleets import Cluster, fleet, kinds, node, operated, pool, until
from tests.lib.fake_kubernetes import FakeKubernetes
from tests.lib.fake_kubernetes.errors import ApiError
from tests.lib.server_process import free_ports
from tests.lib.stuck_command import STUCK_COMMAND

PREFILL, DECODE = pool("prefill", 5), pool("decode", 2)
#: New prefill and decode, old prefill and decode, after each step of 5P+2D with surge 2.
VECTOR = [
    (2, 1, 5, 2), (2, 1, 4, 2), (2, 1, 3, 2), (4, 2, 3, 2), (4, 2, 2, 1), (5, 2, 2, 1),
]  # fmt: skip

#: All kinds of requests that kopf 1.45 sent beside discovery: verb, resource, media type.
WATCHED = (
    "apiextensions.k8s.io/customresourcedefinitions", "namespaces", "apps/deployments",
    "pigou.dev/pigoufleets", "pigou.dev/pigoupools",
)  # fmt: skip
RECORDED = {(verb, resource, "") for verb in ("list", "watch") for resource in WATCHED}


def sides(cluster: Cluster, new: str, old: str) -> list[tuple[int, ...]]:
    names = ((new, "prefill"), (new, "decode"), (old, "prefill"), (old, "decode"))
    return [tuple(step.get(name, 0) for name in names) for step in cluster.steps]


async def test_a_fleet_is_rolled_by_the_vector_reverted_in_mid_roll_and_deleted() -> None:
    async with operated() as cluster:
        store = cluster.store
        store.put(fleet(PREFILL, DECODE))
        await until(cluster.ready)
        first = cluster.version()
        assert cluster.replicas() == {(first, "prefill"): 5, (first, "decode"): 2}
        cluster.steps.clear()
        store.put(fleet(PREFILL, DECODE, model="other"))
        await until(cluster.ready)
        second = cluster.version()
        assert cluster.replicas() == {(second, "prefill"): 5, (second, "decode"): 2}
        taken = sides(cluster, second, first)
        positions = [taken.index(step) for step in VECTOR]
        assert positions == sorted(positions)
        for new_p, new_d, old_p, old_d in taken:
            assert 4 <= new_p + old_p <= 7
            assert 1 <= new_d + old_d <= 4

        cluster.steps.clear()
        store.put(fleet(PREFILL, DECODE, model="broken"))
        await until(lambda: cluster.version() != second)
        third = cluster.version()
        cluster.stuck.add(third)
        await until(lambda: cluster.replicas().get((third, "prefill")))
        await until(lambda: cluster.condition()["reason"] == "WaitingForReady")
        assert cluster.replicas()[second, "prefill"] >= 4  # old ready workers are no success
        store.put(fleet(PREFILL, DECODE, model="other"))
        await until(cluster.ready)
        assert cluster.replicas() == {(second, "prefill"): 5, (second, "decode"): 2}
        assert all(step[0] >= 4 and step[1] >= 1 for step in sides(cluster, second, third))

        fleets = store.find("pigoufleets")
        store.delete(fleets, "default", "chat")
        await until(lambda: not store.all("pigoufleets"))
        assert not store.all("deployments")
        assert not store.all("services")
        assert kinds(cluster.api, "kopf") == RECORDED


async def test_a_pool_is_scaled_by_its_scale_subresource_within_range_and_budget() -> None:
    async with operated(gpus=4) as cluster:
        store = cluster.store
        workers = pool("both", None, minReplicas=1, maxReplicas=8)
        store.put(fleet(workers, budget={"gpus": 3}))
        await until(cluster.ready)
        pools = store.find("pigoupools")

        def scale(replicas: int) -> None:
            patch = {"spec": {"replicas": replicas}}
            merge = "application/merge-patch+json"
            store.patch(pools, "default", "chat-m-both", patch, merge, "scale")

        def status() -> dict[str, Any]:
            return store.all("pigoupools")[0].get("status") or {}

        scale(2)
        await until(lambda: status().get("ready") == 2)
        assert status()["selector"] == (
            "pigou.dev/fleet=chat,pigou.dev/part=worker,pigou.dev/model=m,pigou.dev/role=both"
        )
        scale(9)
        await until(lambda: cluster.condition()["reason"] == "InsufficientGpus")
        assert sum(cluster.replicas().values()) == 3
        assert status()["message"] == "9 is outside of 1 to 8"
        scale(0)
        await until(cluster.ready)
        assert sum(cluster.replicas().values()) == 1


async def test_what_the_operator_makes_is_kept_and_bad_specs_change_nothing() -> None:
    async with operated() as cluster:
        store = cluster.store
        store.put(fleet(pool("both", 2)))
        await until(cluster.ready)
        before = cluster.replicas()
        deployments = store.find("deployments")
        store.delete(deployments, "default", "chat-gateway")
        await until(lambda: len(store.all("deployments")) == 2)
        store.put(fleet(pool("both", 2), pool("prefill", 2), pool("prefill", 1)))
        await until(lambda: cluster.condition()["reason"] == "InvalidSpec")
        assert "give one pool a role" in cluster.condition()["message"]
        assert cluster.replicas() == before
        store.put(fleet(pool("both", 2, gpusPerReplica=2, hostsPerReplica=2,
                             parallelism={"tp": 2}, engine="vllm", image="vllm")))  # fmt: skip
        await until(lambda: cluster.condition()["reason"] == "GangsUnavailable")
        assert cluster.replicas() == before


async def test_a_write_that_the_server_refuses_is_told_in_the_status() -> None:
    async with operated() as cluster:
        create = cluster.store.create

        def refuse(resource: Any, namespace: str, body: Any, **options: Any) -> Any:
            if "no-such-class" in str(body):
                raise ApiError(403, "no PriorityClass with name no-such-class was found")
            return create(resource, namespace, body, **options)

        cluster.store.create = refuse  # type: ignore[method-assign]
        cluster.store.put(fleet(pool("both", 1)))
        await until(cluster.ready)
        cluster.store.put(fleet(pool("both", 1, priorityClassName="no-such-class")))
        await until(lambda: cluster.condition()["reason"] == "WriteRefused")
        assert "no PriorityClass" in cluster.condition()["message"]
        elsewhere = fleet(pool("both", None, minReplicas=1, maxReplicas=1), name="a-b", gateway={})
        same = fleet(pool("both", None, minReplicas=1, maxReplicas=1), name="a")
        same["spec"]["models"][0]["name"] = "b-m"
        cluster.store.put(elsewhere)
        await until(lambda: cluster.condition("a-b")["status"] == "True")
        cluster.store.put(same)
        await until(lambda: cluster.condition("a")["reason"] == "WriteRefused")
        assert "PigouPool a-b-m-both" in cluster.condition("a")["message"]
        cluster.store.put(fleet(pool("both", 1)))
        await until(cluster.ready)


async def test_gangs_of_grove_are_made_once_it_is_installed() -> None:
    """Its definition has the fields that are written; the API server prunes others."""
    names = {"kind": "PodCliqueSet", "plural": "podcliquesets", "singular": "podcliqueset"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "subresources": {"status": {}},
               "schema": {"openAPIV3Schema": schema}}  # fmt: skip
    async with operated() as cluster:
        gang = pool("both", 2, gpusPerReplica=8, hostsPerReplica=2, parallelism={"tp": 8},
                    engine="vllm", image="vllm")  # fmt: skip
        cluster.store.put(fleet(gang))
        await until(lambda: cluster.condition()["reason"] == "GangsUnavailable")
        cluster.store.put({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "podcliquesets.grove.io"},
            "spec": {"group": "grove.io", "scope": "Namespaced", "names": names,
                     "versions": [version]},
        })  # fmt: skip
        await until(lambda: cluster.store.all("podcliquesets"))
        (made,) = cluster.store.all("podcliquesets")
        assert made["spec"]["replicas"] == 2
        cluster.store.put({**made, "status": {"availableReplicas": 2}})
        await until(cluster.ready)


async def test_gpus_that_cannot_be_counted_are_not_taken() -> None:
    async with operated(gpus=1) as cluster:
        cluster.store.put(node("n2", "many"))
        cluster.store.put(fleet(pool("both", 1)))
        await until(lambda: cluster.condition()["reason"] == "GpuCountUnknown")
        assert not cluster.replicas()
        cluster.store.put(node("n2", 0))
        await until(cluster.ready)


async def test_a_token_that_expires_is_read_anew() -> None:
    """Tokens of service accounts live for an hour; their files are written anew."""
    async with operated() as cluster:
        cluster.api.token = "first"
        cluster.store.put(fleet(pool("both", 1)))
        await until(cluster.ready)
        cluster.api.token = "second"
        cluster.api.cut_watches()
        cluster.store.put(fleet(pool("both", 2)))
        await until(lambda: cluster.ready() and sum(cluster.replicas().values()) == 2)


async def test_the_command_finds_its_server_serves_health_and_ends_at_sigterm(
    tmp_path: Path,
) -> None:
    async with FakeKubernetes(token="secret") as api:
        cluster = Cluster(api)
        cluster.store.put(fleet(pool("both", 2, gpusPerReplica=0)))
        config = tmp_path / "config"
        config.write_text(json.dumps(api.kubeconfig()))
        (port,) = free_ports(1)
        health = f"http://127.0.0.1:{port}/healthz"
        os.mkfifo(fifo := str(tmp_path / "fifo"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STUCK_COMMAND, fifo, "operator", "--namespace", "default",
            "--liveness", health, env={**os.environ, "KUBECONFIG": str(config)},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        controller = asyncio.create_task(cluster.control())
        try:
            await until(cluster.ready)
            async with aiohttp.ClientSession() as session, session.get(health) as reply:
                assert reply.status == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            controller.cancel()
            if process.returncode is None:
                process.kill()
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert "create Deployment chat-m-both-" in log
        assert "Traceback" not in log, log
        assert "threads did not end" in log
