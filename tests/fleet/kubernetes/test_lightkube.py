"""lightkube, a client of others, reads and writes the fake as it does a real API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fleet.kubernetes.fleets import Cluster, fleet, kinds, pool
from tests.lib.fake_kubernetes import FakeKubernetes

lightkube = pytest.importorskip("lightkube", reason="lightkube is not installed")

#: First part of its user agent.
AGENT = "python-httpx2"
DEPLOYMENTS, MERGE = "apps/deployments", "application/merge-patch+json"
#: All kinds of requests that lightkube 1.0 sent: verb, resource, media type of the body.
RECORDED = {
    ("create", "pigou.dev/pigoufleets", "application/json"), ("get", DEPLOYMENTS, ""),
    ("create", DEPLOYMENTS, "application/json"), ("list", DEPLOYMENTS, ""),
    ("watch", DEPLOYMENTS, ""), ("update", DEPLOYMENTS, "application/json"),
    ("patch", DEPLOYMENTS, MERGE), ("patch", f"{DEPLOYMENTS}/scale", MERGE),
    ("delete", DEPLOYMENTS, ""),
}  # fmt: skip


def use(config: dict[str, Any]) -> None:
    from lightkube import Client, KubeConfig
    from lightkube.core.exceptions import ApiError
    from lightkube.generic_resource import create_namespaced_resource
    from lightkube.models.apps_v1 import DeploymentSpec
    from lightkube.models.core_v1 import Container, PodSpec, PodTemplateSpec
    from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
    from lightkube.resources.apps_v1 import Deployment
    from lightkube.types import PatchType

    client = Client(config=KubeConfig.from_dict(config), namespace="default")
    labels = {"app": "x"}
    template = PodTemplateSpec(
        metadata=ObjectMeta(labels=labels), spec=PodSpec(containers=[Container("main", image="i")])
    )
    spec = DeploymentSpec(LabelSelector(matchLabels=labels), template, replicas=1)
    made = client.create(Deployment(metadata=ObjectMeta(name="d", labels=labels), spec=spec))
    made.spec.replicas = 2
    assert client.replace(made).metadata.generation == 2
    with pytest.raises(ApiError, match="has been modified"):
        client.replace(made)
    change = {"spec": {"replicas": 3}}
    client.patch(Deployment, "d", change, patch_type=PatchType.MERGE)
    scaled = client.patch(Deployment.Scale, "d", {"spec": {"replicas": 4}},
                          patch_type=PatchType.MERGE)  # fmt: skip
    assert scaled.spec.replicas == 4
    assert client.get(Deployment, "d").spec.replicas == 4
    assert [d.metadata.name for d in client.list(Deployment, labels=labels)] == ["d"]
    event, seen = next(iter(client.watch(Deployment, labels=labels)))
    assert (event, seen.metadata.name) == ("ADDED", "d")
    client.delete(Deployment, "d")
    kind = create_namespaced_resource("pigou.dev", "v1alpha1", "PigouFleet", "pigoufleets")
    body = fleet(pool("both", 1))
    assert client.create(kind(metadata=body["metadata"], spec=body["spec"])).metadata.uid


async def test_lightkube_finds_what_it_expects() -> None:
    async with FakeKubernetes() as api:
        Cluster(api)
        await asyncio.to_thread(use, api.kubeconfig())
        assert kinds(api, AGENT) == RECORDED
