"""Templates of pods: workers on one or several hosts, and the gateway."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pigou.fleet.kubernetes.definitions import API_VERSION
from pigou.fleet.kubernetes.fleet_spec import (
    CACHE,
    KEYS,
    FleetSpec,
    KubernetesObject,
    ModelSpec,
    PodFields,
    PoolRole,
    PoolSpec,
)

Manifest = KubernetesObject
#: Labels of all objects of a fleet, and of its pods; pods whose workers do not register themselves
#: have STOCK_ROLE. The further hosts of a worker are PART `gang-worker`.
FLEET, MODEL, ROLE, DEPLOYMENT_VERSION, STOCK_ROLE, PART = (
    "pigou.dev/fleet", "pigou.dev/model", "pigou.dev/role", "pigou.dev/version",
    "pigou.dev/stock-role", "pigou.dev/part",
)  # fmt: skip
#: Annotations of workers' pods: the model's name, which no label can have, and a worker's GPUs.
MODEL_NAME, GPUS = "pigou.dev/model-name", "pigou.dev/gpus"
#: Topology level -> label of nodes.
_LEVELS = {
    "host": "kubernetes.io/hostname",
    "rack": "topology.kubernetes.io/rack",
    "zone": "topology.kubernetes.io/zone",
}
GATEWAY_PORT, WORKER_PORT, _MASTER_PORT = 8000, 8100, 29501
#: Seconds between two probes; those after the drain in which a container may end.
_PROBE_S, _END_S = 10, 15
#: vLLM ends at once at SIGTERM. Before that, gateways see that its pod goes, and its requests end.
#: The further hosts of a worker wait for its leader, which has the metrics.
_VLLM_DRAIN = """\
import os, re, time, urllib.request
time.sleep(5)
end = time.monotonic() + {drain_s}
page_url = os.path.expandvars("http://{leader}:{port}/metrics")
busy = re.compile(r"^vllm:num_requests_(?:running|waiting)\\S* (\\S+)", re.M)
while time.monotonic() < end:
    page = urllib.request.urlopen(page_url, timeout=5).read().decode()
    if not any(float(count) for count in busy.findall(page)):
        break
    time.sleep(1)
"""
_LWS, _GROVE = (
    "$(LWS_LEADER_ADDRESS)",
    "$(GROVE_PCS_NAME)-$(GROVE_PCS_INDEX)-leader-0.$(GROVE_HEADLESS_SERVICE)",
)
#: Annotation of what the operator keeps as it is: the digest of the specification it wrote.
DIGEST = "pigou.dev/spec-digest"
#: Seconds that a worker is ready before old ones go: gateways know it by then.
_KNOWN_S = 10
#: Letters of a workload's name: those of its pods and revisions, at most 63, are longer.
_NAME_LETTERS = 46


class GangHost(msgspec.Struct, frozen=True):
    """One host of a multi-host worker; $(...) are the controller's variables."""

    leader: str  # address of the first host
    rank: str  # position among the hosts; "0" is the leader
    shell: bool = False  # whether a shell computes the rank


#: A leader binds sockets to its address, for which ZMQ takes no name.
_LEADER = GangHost("$(POD_IP)", "0")
#: Leader and further hosts of a LeaderWorkerSet, and of a PodCliqueSet with cliques of these names.
LWS_GANG = _LEADER, GangHost(_LWS, "$(LWS_WORKER_INDEX)")
GROVE_GANG = _LEADER, GangHost(_GROVE, "$((GROVE_PCLQ_POD_INDEX + 1))", shell=True)


class PodTemplates:
    """Makes the templates of one fleet's pods."""

    def __init__(self, fleet: str, registry: str, spec: FleetSpec) -> None:
        self._fleet, self._registry, self._spec = fleet, registry, spec

    def worker_labels(self, model: ModelSpec, pool: PoolSpec, version: str) -> dict[str, str]:
        """Return the labels of a pool's workload and pods."""
        labels = {FLEET: self._fleet, PART: "worker", MODEL: model.label, ROLE: pool.role}
        labels[DEPLOYMENT_VERSION] = version
        if pool.engine == "vllm":
            labels[STOCK_ROLE] = pool.role
        return labels

    def worker(
        self, model: ModelSpec, pool: PoolSpec, version: str, host: GangHost | None = None
    ) -> Manifest:
        """Return the pod of a worker, or of one host."""
        labels = self.worker_labels(model, pool, version)
        leads = host is None or host.rank == "0"
        if not leads:
            labels = {k: v for k, v in labels.items() if k != STOCK_ROLE} | {PART: "gang-worker"}
        resources: Manifest = {
            "requests": {"memory": pool.memory, **pool.resources.requests},
            "limits": dict(pool.resources.limits),
        }
        if pool.gpus_per_replica:
            gpus = pool.gpus_per_replica // pool.hosts_per_replica
            resources["limits"][self._spec.gpu_resource] = gpus
        shm = {"medium": "Memory", "sizeLimit": pool.shm_size}
        volumes: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        if self._spec.model_cache:
            claim = {"claimName": self._spec.model_cache}
            volumes.append({"name": "models", "persistentVolumeClaim": claim})
            mounts.append({"name": "models", "mountPath": CACHE})
        environment = [*self._environment(), {"name": "HF_HOME", "value": CACHE}]
        if pool.engine == "vllm":
            command = _vllm(model, pool, host)
            environment.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"})
        else:
            command = self._pigou(model, pool, version)
        container: Manifest = {
            "name": "worker", "image": pool.image or self._spec.image,
            "command": command[:1], "args": command[1:], "env": environment,
            "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
            "volumeMounts": mounts,
        }  # fmt: skip
        if leads:
            container["ports"] = [{"name": "http", "containerPort": WORKER_PORT}]
            loading = -(-pool.load_seconds // _PROBE_S)
            for probe, failures in (("startup", loading), ("readiness", 3), ("liveness", 12)):
                container[f"{probe}Probe"] = _probe("/health", WORKER_PORT, failures)
        if pool.engine == "vllm":
            leader = "127.0.0.1" if host is None or leads else host.leader
            code = _VLLM_DRAIN.format(
                drain_s=pool.drain_seconds, port=WORKER_PORT,
                leader=leader.replace("(", "{").replace(")", "}"),
            )  # fmt: skip
            container["lifecycle"] = {"preStop": {"exec": {"command": ["python3", "-c", code]}}}
        spec: Manifest = {
            "containers": [container], "volumes": volumes,
            "terminationGracePeriodSeconds": pool.drain_seconds + _END_S,
        }  # fmt: skip
        annotations = {MODEL_NAME: model.name, GPUS: str(pool.gpus_per_replica)}
        template = _with_fields(pool, spec, labels, annotations)
        if pool.topology is not None:
            _pack(spec, self._fleet, model.label, pool)
        return template

    def gateway(self, labels: dict[str, str]) -> Manifest:
        """Return the pod of a gateway."""
        spec, gateway = self._spec, self._spec.gateway
        args = [
            "serve", "--host", "0.0.0.0", "--port", str(GATEWAY_PORT), "--registry",
            self._registry, "--log-format", "json",
        ]  # fmt: skip
        if spec.slo is not None:
            slo = spec.slo
            percentile = f"percentile={slo.percentile:g}"
            args += ["--slo", f"ttft={slo.ttft_seconds:g},itl={slo.itl_seconds:g},{percentile}"]
        volumes: list[Manifest] = []
        mounts: list[Manifest] = []
        if gateway.api_keys_secret:
            volumes.append({"name": "keys", "secret": {"secretName": gateway.api_keys_secret}})
            mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
            args += ["--api-keys-file", f"{KEYS}/keys"]
        container: Manifest = {
            "name": "gateway", "image": gateway.image or spec.image, "command": ["pigou"],
            "args": [*args, *gateway.args], "env": self._environment(),
            "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
            "resources": {
                kind: amounts
                for kind, amounts in msgspec.to_builtins(gateway.resources).items() if amounts
            },
            "volumeMounts": mounts,
            "startupProbe": _probe("/health/live", GATEWAY_PORT, 30),
            "readinessProbe": _probe("/health/ready", GATEWAY_PORT, 3),
            "livenessProbe": _probe("/health/live", GATEWAY_PORT, 6),
        }  # fmt: skip
        pod: Manifest = {
            "containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 60,
        }  # fmt: skip
        return _with_fields(gateway, pod, labels, {})

    def _pigou(self, model: ModelSpec, pool: PoolSpec, version: str) -> list[str]:
        """Return the command of a self-registering Pigou worker."""
        return [
            "pigou", "worker", "--host", "0.0.0.0", "--port", str(WORKER_PORT),
            "--model", model.model, "--served-model-name", model.name, "--role", pool.role,
            "--device", "cuda" if pool.gpus_per_replica else "cpu",
            "--deployment-version", version, "--registry", self._registry,
            "--worker-id", "$(POD_NAME)", "--advertise", "$(POD_IP)",
            "--drain", str(pool.drain_seconds), "--log-format", "json", *pool.args,
        ]  # fmt: skip

    def _environment(self) -> list[Manifest]:
        secret = {"name": self._spec.fleet_secret, "key": "secret"}
        fields = (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
        return [
            {"name": "PIGOU_FLEET_SECRET", "valueFrom": {"secretKeyRef": secret}},
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
              for name, path in fields),
        ]  # fmt: skip


def _vllm(model: ModelSpec, pool: PoolSpec, host: GangHost | None) -> list[str]:
    """Return the command of a vLLM server or host; roles add NIXL."""
    split = pool.parallelism
    command = [
        "vllm", "serve", model.model, "--host", "0.0.0.0", "--port", str(WORKER_PORT),
        "--served-model-name", model.name, "--tensor-parallel-size", str(split.tp),
        "--pipeline-parallel-size", str(split.pp), "--data-parallel-size", str(split.dp),
        *(["--enable-expert-parallel"] if split.ep else []),
    ]  # fmt: skip
    if pool.role != "both":
        command += ["--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
    if host is None:
        return [*command, *pool.args]
    command += [
        "--distributed-executor-backend", "mp", "--nnodes", str(pool.hosts_per_replica),
        "--master-addr", host.leader, "--master-port", str(_MASTER_PORT),
    ]  # fmt: skip
    if host.rank != "0":
        command.append("--headless")
    if host.shell:
        return ["sh", "-c", f'exec "$@" --node-rank {host.rank}', "sh", *command, *pool.args]
    return [*command, "--node-rank", host.rank, *pool.args]


def _with_fields(
    fields: PodFields, spec: Manifest, labels: dict[str, str], annotations: dict[str, str]
) -> Manifest:
    """Return a pod template with `fields` added, ours first in lists."""
    container = spec["containers"][0]
    given = msgspec.json.decode(msgspec.json.encode(fields))
    named = {item["name"] for item in given.get("env", ())}
    ours = [item for item in container["env"] if item["name"] not in named]
    container["env"] = [*ours, *given.get("env", ())]
    container["volumeMounts"] += given.get("volumeMounts", ())
    spec["volumes"] += given.get("volumes", ())
    spec["serviceAccountName"] = fields.service_account_name
    if fields.security_context:
        container["securityContext"] = given["securityContext"]
    for name in (
        "nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "imagePullSecrets",
        "schedulerName", "priorityClassName", "runtimeClassName",
    ):  # fmt: skip
        if name in given:
            spec[name] = given[name]
    metadata = {
        "labels": {**fields.labels, **labels},
        "annotations": {**fields.annotations, **annotations},
    }
    return {"metadata": metadata, "spec": spec}


def _pack(spec: Manifest, fleet: str, model: str, pool: PoolSpec) -> None:
    """Add affinity to the other workers of the model."""
    assert pool.topology is not None
    same = {"matchLabels": {FLEET: fleet, MODEL: model}}
    term: Manifest = {"labelSelector": same, "topologyKey": _LEVELS[pool.topology.pack]}
    mode = "required"
    if pool.topology.mode == "preferred":
        mode, term = "preferred", {"weight": 100, "podAffinityTerm": term}
    affinity = spec.setdefault("affinity", {}).setdefault("podAffinity", {})
    affinity.setdefault(f"{mode}DuringSchedulingIgnoredDuringExecution", []).append(term)


def _probe(path: str, port: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port}, "periodSeconds": _PROBE_S, "timeoutSeconds": 5,
        "failureThreshold": failures,
    }  # fmt: skip


class FleetObjects:
    """Builds the objects that one fleet owns."""

    def __init__(self, fleet: Manifest, spec: FleetSpec) -> None:
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
        """Registry URL of the gateway: the workers' pods."""
        selector = f"{FLEET}={self.name},{PART}=worker"
        return f"k8s://{self.namespace}?selector={selector}&port={WORKER_PORT}"

    def version(self, model: ModelSpec) -> str:
        """Return the digest of a model's pod templates: workers of two versions share no KV."""
        specs = [self.workload(model, pool, "", 0)["spec"] for pool in model.pools]
        return _digest(specs)[:10]

    def workload(
        self, model: ModelSpec, pool: PoolSpec, version: str, replicas: int, grove: bool = False
    ) -> Manifest:
        """Return a pool's workers; gangs as a LeaderWorkerSet, or (`grove`) a PodCliqueSet."""
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
        """Return a pool's `PigouPool`, at minimum replicas."""
        labels = {FLEET: self.name, MODEL: model.label, ROLE: pool.role}
        return {
            "apiVersion": API_VERSION, "kind": "PigouPool",
            "metadata": self._meta(self.scale_name(model, pool.role), labels),
            "spec": {"fleet": self.name, "model": model.name, "role": pool.role,
                     "replicas": pool.range[0]},
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
    """Return Grove gangs: cliques of co-scheduled pods."""
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
    """Return the GPU limit of a pod's containers; raises ValueError."""
    limits = ((c.get("resources") or {}).get("limits") or {} for c in spec.get("containers") or ())
    return sum(int(limit.get(resource, 0)) for limit in limits)
