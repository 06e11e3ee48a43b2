"""The objects that a fleet is made of: workloads of workers, the gateway, services."""

from __future__ import annotations

import hashlib
from typing import Any

from pigou.fleet.kubernetes.definitions import API_VERSION
from pigou.fleet.kubernetes.fleet_spec import FleetSpec, ModelSpec, PoolRole, PoolSpec

Manifest = dict[str, Any]
#: Labels of all objects of a fleet, and of its pods; pods whose workers do not register themselves
#: have STOCK_ROLE.
FLEET, MODEL, ROLE, DEPLOYMENT_VERSION, STOCK_ROLE, PART = (
    "pigou.dev/fleet", "pigou.dev/model", "pigou.dev/role", "pigou.dev/version",
    "pigou.dev/stock-role", "pigou.dev/part",
)  # fmt: skip
#: Topology level -> label of nodes.
_LEVELS = {
    "host": "kubernetes.io/hostname",
    "rack": "topology.kubernetes.io/rack",
    "zone": "topology.kubernetes.io/zone",
}
GATEWAY_PORT, WORKER_PORT = 8000, 8100
#: Seconds between two probes; those after the drain in which a container may end.
_PROBE_S, _END_S = 10, 15
_CACHE = "/var/cache/huggingface"
#: Seconds that a worker is ready before old ones go: gateways know it by then.
_KNOWN_S = 10
#: vLLM ends at once at SIGTERM. Before that, gateways see that its pod goes, and its requests end.
_VLLM_DRAIN = """\
import re, time, urllib.request
time.sleep(5)
end = time.monotonic() + {drain_s}
busy = re.compile(r"^vllm:num_requests_(?:running|waiting)\\S* (\\S+)", re.M)
while time.monotonic() < end:
    page = urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    if not any(float(count) for count in busy.findall(page)):
        break
    time.sleep(1)
"""


class FleetObjects:
    """Makes the objects of one fleet, all of which it owns."""

    def __init__(self, fleet: Manifest, spec: FleetSpec) -> None:
        """Take the `PigouFleet` as it was read, and its specification."""
        meta = fleet["metadata"]
        self.name, self.namespace = meta["name"], meta.get("namespace", "default")
        self._spec = spec
        self._owner = {
            "apiVersion": API_VERSION, "kind": "PigouFleet", "name": self.name,
            "uid": meta["uid"], "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip

    @property
    def registry(self) -> str:
        """URL of the registry in which the gateway finds the workers: their pods."""
        selector = f"{FLEET}={self.name},{PART}=worker"
        return f"k8s://{self.namespace}?selector={selector}&port={WORKER_PORT}"

    def workload(
        self, model: ModelSpec, pool: PoolSpec, version: str, replicas: int, grove: bool = False
    ) -> Manifest:
        """Return the workers of a pool and version; several hosts a worker make a gang.

        A gang is one replica of a LeaderWorkerSet, or with `grove` of a PodCliqueSet.
        """
        labels = self._worker_labels(model, pool, version)
        meta = self._meta(f"{self.name}-{model.name}-{pool.role}-{version}", labels)
        template = {"metadata": {"labels": labels}, "spec": self._pod(model, pool, version)}
        if pool.hosts_per_replica > 1 and grove:
            return self._clique_set(
                meta, labels, pool.hosts_per_replica, template["spec"], replicas
            )
        if pool.hosts_per_replica > 1:
            gang = {
                "size": pool.hosts_per_replica, "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            }  # fmt: skip
            return {
                "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
                "metadata": meta, "spec": {"replicas": replicas, "leaderWorkerTemplate": gang},
            }  # fmt: skip
        return {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
            "spec": {
                "replicas": replicas, "selector": {"matchLabels": labels},
                "minReadySeconds": _KNOWN_S,
                "progressDeadlineSeconds": pool.load_seconds + 600, "template": template,
            },
        }  # fmt: skip

    def _clique_set(
        self, meta: Manifest, labels: dict[str, str], hosts: int, pod: Manifest, replicas: int
    ) -> Manifest:
        """Return gangs of Grove: cliques of `hosts` pods that are scheduled together, or not.

        Its names are short: with those of its pods' sets they have 45 characters.
        """
        digest = hashlib.sha256(meta["name"].encode()).hexdigest()[:8]
        name = f"{self.name[:16].rstrip('-')}-{labels[ROLE]}-{digest}"
        clique = {
            "name": "w", "labels": labels,
            "spec": {"roleName": labels[ROLE], "replicas": hosts, "minAvailable": hosts,
                     "podSpec": pod},
        }  # fmt: skip
        return {
            "apiVersion": "grove.io/v1alpha1",
            "kind": "PodCliqueSet",
            "metadata": {**meta, "name": name},
            "spec": {"replicas": replicas, "template": {"cliques": [clique]}},
        }

    def scale(self, model: ModelSpec, pool: PoolSpec) -> Manifest:
        """Return the `PigouPool` through which a pool is scaled, with its fewest replicas."""
        labels = {FLEET: self.name, MODEL: model.name, ROLE: pool.role}
        return {
            "apiVersion": API_VERSION, "kind": "PigouPool",
            "metadata": self._meta(self.scale_name(model, pool.role), labels),
            "spec": {"fleet": self.name, "model": model.name, "role": pool.role,
                     "replicas": pool.min_replicas or 0},
        }  # fmt: skip

    def scale_name(self, model: ModelSpec, role: PoolRole) -> str:
        """Return the name of a pool's `PigouPool`."""
        return f"{self.name}-{model.name}-{role}"

    def gateway(self) -> tuple[Manifest, Manifest]:
        """Return the Deployment and the Service of the gateway."""
        spec, gateway = self._spec, self._spec.gateway
        labels = {FLEET: self.name, PART: "gateway"}
        args = [
            "serve", "--host", "0.0.0.0", "--port", str(GATEWAY_PORT), "--registry",
            self.registry, "--log-format", "json",
        ]  # fmt: skip
        if spec.slo is not None:
            slo = spec.slo
            percentile = f"percentile={slo.percentile:g}"
            args += ["--slo", f"ttft={slo.ttft_seconds:g},itl={slo.itl_seconds:g},{percentile}"]
        volumes: list[Manifest] = []
        mounts: list[Manifest] = []
        if gateway.api_keys_secret:
            volumes.append({"name": "keys", "secret": {"secretName": gateway.api_keys_secret}})
            mounts.append({"name": "keys", "mountPath": "/etc/pigou/keys", "readOnly": True})
            args += ["--api-keys-file", "/etc/pigou/keys/keys"]
        container = {
            "name": "gateway", "image": gateway.image or spec.image, "command": ["pigou"],
            "args": [*args, *gateway.args], "env": self._environment(),
            "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
            "volumeMounts": mounts,
            "startupProbe": _probe("/health/live", GATEWAY_PORT, 30),
            "readinessProbe": _probe("/health/ready", GATEWAY_PORT, 3),
            "livenessProbe": _probe("/health/live", GATEWAY_PORT, 6),
        }  # fmt: skip
        pod = {
            "serviceAccountName": "pigou-fleet", "terminationGracePeriodSeconds": 60,
            "containers": [container], "volumes": volumes,
        }  # fmt: skip
        deployment = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": self._meta(f"{self.name}-gateway", labels),
            "spec": {
                "replicas": gateway.replicas, "selector": {"matchLabels": labels},
                "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
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

    def _worker_labels(self, model: ModelSpec, pool: PoolSpec, version: str) -> dict[str, str]:
        labels = {FLEET: self.name, PART: "worker", MODEL: model.name, ROLE: pool.role}
        labels[DEPLOYMENT_VERSION] = version
        if pool.engine == "vllm":
            labels[STOCK_ROLE] = pool.role
        return labels

    def _pod(self, model: ModelSpec, pool: PoolSpec, version: str) -> Manifest:
        hosts, spec = pool.hosts_per_replica, self._spec
        resources: Manifest = {"requests": {"memory": pool.memory}}
        if pool.gpus_per_replica:
            resources["limits"] = {spec.gpu_resource: pool.gpus_per_replica // hosts}
        shm = {"medium": "Memory", "sizeLimit": pool.shm_size}
        volumes: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        if spec.model_cache:
            volumes.append(
                {"name": "models", "persistentVolumeClaim": {"claimName": spec.model_cache}}
            )
            mounts.append({"name": "models", "mountPath": _CACHE})
        arguments = (
            self._pigou(model, pool, version) if pool.engine == "pigou" else _vllm(model, pool)
        )
        variables = [{"name": v.name, "value": v.value} for v in pool.env]
        container = {
            "name": "worker", "image": pool.image or spec.image,
            "command": arguments[:1], "args": [*arguments[1:], *pool.args],
            "env": [*self._environment(), {"name": "HF_HOME", "value": _CACHE}, *variables],
            "ports": [{"name": "http", "containerPort": WORKER_PORT}],
            "resources": resources, "volumeMounts": mounts,
            "startupProbe": _probe("/health", WORKER_PORT, -(-pool.load_seconds // _PROBE_S)),
            "readinessProbe": _probe("/health", WORKER_PORT, 3),
            "livenessProbe": _probe("/health", WORKER_PORT, 12),
        }  # fmt: skip
        if pool.engine == "vllm":
            code = _VLLM_DRAIN.format(drain_s=pool.drain_seconds, port=WORKER_PORT)
            container["lifecycle"] = {"preStop": {"exec": {"command": ["python3", "-c", code]}}}
        pod: Manifest = {
            "serviceAccountName": "pigou-fleet", "containers": [container], "volumes": volumes,
            "terminationGracePeriodSeconds": pool.drain_seconds + _END_S,
        }  # fmt: skip
        if pool.node_selector:
            pod["nodeSelector"] = dict(pool.node_selector)
        if pool.topology is not None:
            same = {"matchLabels": {FLEET: self.name, MODEL: model.name}}
            term = {"labelSelector": same, "topologyKey": _LEVELS[pool.topology.pack]}
            pod["affinity"] = {"podAffinity": _affinity(term, pool.topology.mode == "required")}
        return pod

    def _pigou(self, model: ModelSpec, pool: PoolSpec, version: str) -> list[str]:
        """Return the command of a worker of Pigou, which registers itself in its own pod."""
        return [
            "pigou", "worker", "--host", "0.0.0.0", "--port", str(WORKER_PORT),
            "--model", model.model, "--served-model-name", model.name, "--role", pool.role,
            "--device", "cuda" if pool.gpus_per_replica else "cpu",
            "--deployment-version", version, "--registry", self.registry,
            "--worker-id", "$(POD_NAME)", "--advertise", "$(POD_IP)",
            "--drain", str(pool.drain_seconds), "--log-format", "json",
        ]  # fmt: skip

    def _environment(self) -> list[Manifest]:
        secret = {"name": self._spec.fleet_secret, "key": "secret"}
        fields = (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
        return [
            {"name": "PIGOU_FLEET_SECRET", "valueFrom": {"secretKeyRef": secret}},
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
              for name, path in fields),
        ]  # fmt: skip


def gpus_of_workload(workload: Manifest, resource: str) -> int:
    """Return the GPUs of one replica of a workload, over all its pods."""
    spec, hosts = workload["spec"], 1
    if cliques := spec["template"].get("cliques") if "template" in spec else None:
        return sum(
            clique["spec"]["replicas"] * gpus_of_pod(clique["spec"]["podSpec"], resource)
            for clique in cliques
        )
    if gang := spec.get("leaderWorkerTemplate"):
        hosts, template = gang["size"], gang["workerTemplate"]
    else:
        template = spec["template"]
    return hosts * gpus_of_pod(template["spec"], resource)


def gpus_of_pod(spec: Manifest, resource: str) -> int:
    """Return the GPUs that a pod's containers take.

    Raises:
        ValueError: a number is none.
    """
    limits = ((c.get("resources") or {}).get("limits") or {} for c in spec.get("containers") or ())
    return sum(int(limit.get(resource, 0)) for limit in limits)


def _vllm(model: ModelSpec, pool: PoolSpec) -> list[str]:
    """Return the command of a vLLM server; with roles its KV moves by NIXL."""
    split = pool.parallelism
    command = [
        "vllm", "serve", model.model, "--host", "0.0.0.0", "--port", str(WORKER_PORT),
        "--served-model-name", model.name, "--tensor-parallel-size", str(split.tp),
        "--pipeline-parallel-size", str(split.pp), "--data-parallel-size", str(split.dp),
    ]  # fmt: skip
    if pool.role != "both":
        command += ["--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
    return command


def _affinity(term: Manifest, required: bool) -> Manifest:
    if required:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}


def _probe(path: str, port: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port}, "periodSeconds": _PROBE_S, "timeoutSeconds": 5,
        "failureThreshold": failures,
    }  # fmt: skip
