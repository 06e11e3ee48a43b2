"""A rolling update under load: the operator, a gateway and workers as processes, pods in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fleet.kubernetes.fleets import Cluster, Manifest, fleet, operated, pool, until
from tests.lib.server_process import free_ports

from pigou.fleet.kubernetes.manifests import DEPLOYMENT_VERSION
from pigou.wire.fleet_secret import VARIABLE

ENVIRONMENT = {**os.environ, VARIABLE: "s" * 32, "OMP_NUM_THREADS": "1"}
#: Workers sleep 5 ms a token.
SLEEP = ("--executor", "sleep", "--sleep-base", "5000000", "--repeat", "1", "--rehearse", "0")
TOKENS, CLIENTS = 60, 6
MERGE = "application/merge-patch+json"


class Kubelet:
    """Runs the pods of Deployments of workers as processes of this machine.

    Attributes:
        processes: by the names of their pods.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.store, self.folder = cluster, cluster.store, folder
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._ready: set[str] = set()
        self._made = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                for item in self.store.all("deployments"):
                    if DEPLOYMENT_VERSION in item["metadata"]["labels"]:
                        await self._deployment(item, session)
                names = {d["metadata"]["name"] for d in self.store.all("deployments")}
                for pod in self.store.all("pods"):
                    if pod["metadata"]["annotations"]["owner"] not in names:
                        self._end(pod)
                    if self.processes[pod["metadata"]["name"]].returncode is not None:
                        self._patch(pod, {"metadata": {"finalizers": None}})
                await asyncio.sleep(0.05)

    async def _deployment(self, item: Manifest, session: aiohttp.ClientSession) -> None:
        pods = [p for p in self.store.all("pods")
                if p["metadata"]["annotations"]["owner"] == item["metadata"]["name"]
                and "deletionTimestamp" not in p["metadata"]]  # fmt: skip
        for _ in range(item["spec"]["replicas"] - len(pods)):
            await self._start(item)
        for pod in pods[item["spec"]["replicas"] :]:
            self._end(pod)
        for pod in pods:
            await self._probe(pod, session)
        ready = sum(pod["metadata"]["name"] in self._ready for pod in pods)
        status = {"availableReplicas": min(ready, item["spec"]["replicas"])}
        if item.get("status") != status:
            self.store.put({**item, "status": status})

    async def _start(self, item: Manifest) -> None:
        template = item["spec"]["template"]
        self._made += 1
        name = f"{item['metadata']['name']}-{self._made}"
        (port,) = free_ports(1)
        self.store.put({
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {
                "name": name, "labels": template["metadata"]["labels"], "finalizers": ["kubelet"],
                "annotations": {"owner": item["metadata"]["name"], "port": str(port)},
            },
        })  # fmt: skip
        container = template["spec"]["containers"][0]
        words = {"$(POD_NAME)": name, "$(POD_IP)": "127.0.0.1", "0.0.0.0": "127.0.0.1",
                 "8100": str(port)}  # fmt: skip
        args = [words.get(arg, arg) for arg in container["args"]]
        place = args.index("--registry") + 1
        args[place] += f"&api={self.cluster.api.url}"
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *container["command"], *args, *SLEEP,
                stdout=asyncio.subprocess.DEVNULL, stderr=log, env=ENVIRONMENT,
            )  # fmt: skip

    async def _probe(self, pod: Manifest, session: aiohttp.ClientSession) -> None:
        name, port = pod["metadata"]["name"], pod["metadata"]["annotations"]["port"]
        if name in self._ready:
            return
        try:
            async with session.get(f"http://127.0.0.1:{port}/health") as reply:
                if reply.status != 200:
                    return
        except aiohttp.ClientError:
            return
        ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        self._patch(pod, {"status": ready}, "status")
        self._ready.add(name)

    def _end(self, pod: Manifest) -> None:
        process = self.processes[pod["metadata"]["name"]]
        if "deletionTimestamp" not in pod["metadata"]:
            self.store.delete(self.store.find("pods"), "default", pod["metadata"]["name"])
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)

    def _patch(self, pod: Manifest, patch: Manifest, part: str = "") -> None:
        pods = self.store.find("pods")
        self.store.patch(pods, "default", pod["metadata"]["name"], patch, MERGE, part)

    def kill(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()


async def client(url: str, session: aiohttp.ClientSession, counts: list[Any]) -> None:
    """Ask for streams, one after another; note the tokens of each, or what went wrong."""
    while True:
        prompt = f"{len(counts)} {id(session)} " * 40
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            text = (await reply.read()).decode()
        if reply.status != 200:
            counts.append((reply.status, text))
            continue
        events = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
        usage = json.loads(events[-1]).get("usage") or {}
        counts.append(usage.get("completion_tokens", text[-300:]))


async def answers(url: str, session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(90):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_no_stream_is_lost_in_a_rolling_update(tmp_path: Path) -> None:
    async with operated(controlled=False) as cluster:
        kubelet = Kubelet(cluster, tmp_path)
        running = asyncio.create_task(kubelet.run())
        gateway = None
        clients: list[asyncio.Task[None]] = []
        try:
            pools = [pool("prefill", 1, gpusPerReplica=0), pool("decode", 2, gpusPerReplica=0)]
            body = fleet(*pools, update={"surge": 1, "unavailable": 0})
            cluster.store.put(body)
            (port,) = free_ports(1)
            await until(lambda: sum(cluster.replicas().values()) == 3)
            arguments = cluster.store.all("deployments")[0]["spec"]["template"]["spec"]
            args = arguments["containers"][0]["args"]
            registry = f"{args[args.index('--registry') + 1]}&api={cluster.api.url}"
            with (tmp_path / "gateway.log").open("wb") as log:
                gateway = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pigou", "serve", "--port", str(port), "--registry",
                    registry, "--policy", "random", stdout=asyncio.subprocess.DEVNULL, stderr=log,
                    env=ENVIRONMENT,
                )  # fmt: skip
            url = f"http://127.0.0.1:{port}"
            async with aiohttp.ClientSession() as session:
                await answers(f"{url}/health/ready", session)
                await until(cluster.ready, 60)
                first, counts = cluster.version(), []
                clients = [
                    asyncio.create_task(client(url, session, counts)) for _ in range(CLIENTS)
                ]
                await until(lambda: len(counts) >= 2 * CLIENTS, 30)
                body["spec"]["models"][0]["pools"][1]["env"] = [{"name": "NEW", "value": "1"}]
                cluster.store.put(body)
                await until(lambda: cluster.ready() and cluster.version() != first, 90)
                done = len(counts)
                await until(lambda: len(counts) >= done + 2 * CLIENTS, 30)
                async with session.get(f"{url}/decisions?limit=1000") as reply:
                    decisions = (await reply.json())["decisions"]
                pairs = [(d["prefill"], d["decode"]) for d in decisions if d["prefill"]]
                print(len(counts), "streams,", len(pairs), "of two workers")
                # Pods are named FLEET-MODEL-ROLE-VERSION-NUMBER.
                versions = {(p.split("-")[3], d.split("-")[3]) for p, d in pairs}
                assert len(versions) == 2
                assert all(prefill == decode for prefill, decode in versions)
                assert {str(count) for count in counts} == {str(TOKENS)}
        finally:
            for task in [running, *clients]:
                task.cancel()
            await asyncio.gather(running, *clients, return_exceptions=True)
            kubelet.kill()
            if gateway is not None:
                gateway.kill()
