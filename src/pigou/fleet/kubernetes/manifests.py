"""The objects that a fleet is made of: workloads of workers, the gateway, services."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pigou.fleet.kubernetes.definitions import API_VERSION
from pigou.fleet.kubernetes.fleet_spec import FleetSpec, ModelSpec, PoolRole, PoolSpec
from pigou.fleet.kubernetes.pod_templates import (
    FLEET,
    GROVE_GANG,
    LWS_GANG,
    MODEL,
    PART,
    ROLE,
    WORKER_PORT,
    Manifest,
    PodTemplates,
)

#: Annotation of what the operator keeps as it is: the digest of the specification it wrote.
DIGEST = "pigou.dev/spec-digest"
#: Seconds that a worker is ready before old ones go: gateways know it by then.
_KNOWN_S = 10
#: Letters of a workload's name: those of its pods and revisions, at most 63, are longer.
_NAME_LETTERS = 46


class FleetObjects:
    """Makes the objects of one fleet, all of which it owns."""

    def __init__(self, fleet: Manifest, spec: FleetSpec) -> None:
        """Take the `PigouFleet` as it was read, and its specification."""
        meta = fleet["metadata"]
        self.name, self.namespace = meta["name"], meta.get("namespace", "default")
        self._spec = spec
        self._pods = PodTemplates(self.name, self.registry, spec)
        self._owner = {
            "apiVersion": API_VERSION, "kind": "PigouFleet", "name": self.name,
            "uid": meta["uid"], "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip

    @property
    def registry(self) -> str:
        """URL of the registry in which the gateway finds the workers: their pods."""
        selector = f"{FLEET}={self.name},{PART}=worker"
        return f"k8s://{self.namespace}?selector={selector}&port={WORKER_PORT}"

    def version(self, model: ModelSpec) -> str:
        """Return the digest of all that makes a model's workers, their number aside.

        Any change that reaches a pod makes another version, so that KV of two kinds never meets.
        """
        specs = [self.workload(model, pool, "", 0)["spec"] for pool in model.pools]
        return _digest(specs)[:10]

    def workload(
        self, model: ModelSpec, pool: PoolSpec, version: str, replicas: int, grove: bool = False
    ) -> Manifest:
        """Return the workers of a pool and version; several hosts a worker make a gang.

        A gang is one replica of a LeaderWorkerSet, or with `grove` of a PodCliqueSet.
        """
        labels = self._pods.worker_labels(model, pool, version)
        name = f"{self.name}-{model.label}-{pool.role}-{version}"
        grove = grove and pool.hosts_per_replica > 1
        if grove or len(name) > _NAME_LETTERS:  # Grove's name and its clique's have 45 letters
            short = self.name[:16].rstrip("-")
            name = f"{short}-{pool.role}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        meta = self._meta(name, labels)
        if pool.hosts_per_replica > 1:
            gang = GROVE_GANG if grove else LWS_GANG
            leader, worker = (self._pods.worker(model, pool, version, host) for host in gang)
            hosts = pool.hosts_per_replica
            return (_clique_set if grove else _leader_worker_set)(
                meta, hosts, leader, worker, replicas
            )
        return {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
            "spec": {
                "replicas": replicas, "selector": {"matchLabels": labels},
                "minReadySeconds": _KNOWN_S,
                "progressDeadlineSeconds": pool.load_seconds + 600,
                "template": self._pods.worker(model, pool, version),
            },
        }  # fmt: skip

    def scale(self, model: ModelSpec, pool: PoolSpec) -> Manifest:
        """Return the `PigouPool` through which a pool is scaled, with its fewest replicas."""
        labels = {FLEET: self.name, MODEL: model.label, ROLE: pool.role}
        return {
            "apiVersion": API_VERSION, "kind": "PigouPool",
            "metadata": self._meta(self.scale_name(model, pool.role), labels),
            "spec": {"fleet": self.name, "model": model.name, "role": pool.role,
                     "replicas": pool.min_replicas or 0},
        }  # fmt: skip

    def scale_name(self, model: ModelSpec, role: PoolRole) -> str:
        """Return the name of a pool's `PigouPool`."""
        return f"{self.name}-{model.label}-{role}"

    def gateway(self) -> tuple[Manifest, Manifest]:
        """Return the Deployment and the Service of the gateway."""
        labels = {FLEET: self.name, PART: "gateway"}
        spec = {
            "replicas": self._spec.gateway.replicas, "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": self._pods.gateway(labels),
        }  # fmt: skip
        meta = self._meta(f"{self.name}-gateway", labels)
        deployment = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {**meta, "annotations": {DIGEST: _digest(spec)[:16]}}, "spec": spec,
        }  # fmt: skip
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
        service = {
            "apiVersion": "v1", "kind": "Service", "metadata": self._meta(self.name, labels),
            "spec": {"selector": labels, "ports": ports},
        }  # fmt: skip
        return deployment, service

    # Within
    def _meta(self, name: str, labels: dict[str, str]) -> Manifest:
        return {"name": name, "namespace": self.namespace, "labels": labels,
                "ownerReferences": [self._owner]}  # fmt: skip


def _leader_worker_set(
    meta: Manifest, hosts: int, leader: Manifest, worker: Manifest, replicas: int
) -> Manifest:
    gang = {
        "size": hosts, "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader, "workerTemplate": worker,
    }  # fmt: skip
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
        "metadata": meta, "spec": {"replicas": replicas, "leaderWorkerTemplate": gang},
    }  # fmt: skip


def _clique_set(
    meta: Manifest, hosts: int, leader: Manifest, worker: Manifest, replicas: int
) -> Manifest:
    """Return gangs of Grove: cliques of pods that are scheduled together, or not."""
    cliques = [
        {
            "name": name, **template["metadata"],
            "spec": {"roleName": name, "replicas": count, "minAvailable": count,
                     "podSpec": template["spec"]},
        }
        for name, count, template in (("leader", 1, leader), ("worker", hosts - 1, worker))
    ]  # fmt: skip
    return {
        "apiVersion": "grove.io/v1alpha1", "kind": "PodCliqueSet", "metadata": meta,
        "spec": {"replicas": replicas, "template": {"cliques": cliques}},
    }  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def gpus_of_workload(workload: Manifest, resource: str) -> int:
    """Return the GPUs of one replica of a workload, over all its pods."""
    spec = workload["spec"]
    if gang := spec.get("leaderWorkerTemplate"):
        worker = gang["workerTemplate"]["spec"]
        leader = gang.get("leaderTemplate", gang["workerTemplate"])["spec"]
        hosts: int = gang["size"]
        return gpus_of_pod(leader, resource) + (hosts - 1) * gpus_of_pod(worker, resource)
    if cliques := spec["template"].get("cliques"):
        return sum(
            clique["spec"]["replicas"] * gpus_of_pod(clique["spec"]["podSpec"], resource)
            for clique in cliques
        )
    return gpus_of_pod(spec["template"]["spec"], resource)


def gpus_of_pod(spec: Manifest, resource: str) -> int:
    """Return the GPUs that a pod's containers take.

    Raises:
        ValueError: a number is none.
    """
    limits = ((c.get("resources") or {}).get("limits") or {} for c in spec.get("containers") or ())
    return sum(int(limit.get(resource, 0)) for limit in limits)
