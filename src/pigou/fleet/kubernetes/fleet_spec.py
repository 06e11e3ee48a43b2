"""Kubernetes pod fields that a `PigouFleet` passes through, and their refused values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pigou.config import ConfigError
from pigou.fleet.kubernetes.rollout import resolved

#: Prefix of labels and annotations that the operator sets itself.
OWN_KEYS = "pigou.dev/"
#: Folders of a worker's hub cache and of a gateway's keys, in their containers.
CACHE, KEYS = "/var/cache/huggingface", "/etc/pigou/keys"
OWN_VOLUMES, OWN_MOUNTS = ("shm", "models", "keys"), ("/dev/shm", CACHE, KEYS)
#: An object of Kubernetes' API whose fields the API server checks.
KubernetesObject = dict[str, Any]
_LABEL = "[a-z]([-a-z0-9]{0,28}[a-z0-9])?"
#: Options that pods are given, and the fields that set them; probes and gateways rely on others.
_OWN_OPTIONS = {
    "--served-model-name": "name", "--model": "model", "--role": "role",
    "--drain": "drainSeconds", "--device": "gpusPerReplica", "--nnodes": "hostsPerReplica",
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp",
                     "--data-parallel-size", "-dp", "--enable-expert-parallel", "-ep"),
                    "parallelism"),
    **dict.fromkeys(("--host", "--port", "--registry", "--worker-id", "--advertise", "--headless",
                     "--deployment-version", "--node-rank", "--master-addr"), ""),
}  # fmt: skip
_QUANTITY = "[0-9]+(Ki|Mi|Gi|Ti)"
FleetName = Annotated[str, Meta(pattern=f"^{_LABEL}$")]
ModelName = Annotated[str, Meta(pattern="^[!-~]+$", max_length=200)]
Quantity = Annotated[str, Meta(pattern=f"^{_QUANTITY}$")]
Positive = Annotated[int, Meta(ge=1, le=10_000)]
Count = Annotated[int, Meta(ge=0, le=10_000)]
Seconds = Annotated[float, Meta(gt=0)]
PoolRole = Literal["prefill", "decode", "both"]


class Typed(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True,
    omit_defaults=True,
):  # fmt: skip
    """Keys are in camel case, and unknown ones are errors."""


class KeyReference(Typed, frozen=True):
    """A key of a Secret or ConfigMap."""

    name: str
    key: str
    optional: bool = False


class FieldReference(Typed, frozen=True):
    """A field of the pod, such as `status.hostIP`."""

    field_path: str
    api_version: str = "v1"


class VariableSource(Typed, frozen=True):
    """Where a variable's value comes from; exactly one is given."""

    secret_key_ref: KeyReference | None = None
    config_map_key_ref: KeyReference | None = None
    field_ref: FieldReference | None = None


class Variable(Typed, frozen=True):
    """An environment variable: a value, or its source."""

    name: str
    value: str | None = None
    value_from: VariableSource | None = None


class Toleration(Typed, frozen=True):
    """A toleration of node taints."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = None


class ObjectReference(Typed, frozen=True):
    """The name of an object in the fleet's namespace."""

    name: str


class Resources(Typed, frozen=True):
    """Further requests and limits of a container; GPUs and memory have fields of their own."""

    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class PodFields(Typed, frozen=True):
    """Fields of Kubernetes' pods (`labels`, `annotations`, ...) and containers (`env`, ...)."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    env: tuple[Variable, ...] = ()
    resources: Resources = Resources()
    volumes: tuple[KubernetesObject, ...] = ()
    volume_mounts: tuple[KubernetesObject, ...] = ()
    security_context: KubernetesObject = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: KubernetesObject = {}
    topology_spread_constraints: tuple[KubernetesObject, ...] = ()
    image_pull_secrets: tuple[ObjectReference, ...] = ()
    scheduler_name: str = ""
    priority_class_name: str = ""
    runtime_class_name: str = ""
    service_account_name: str = "pigou-fleet"


def check_pod(pod: PodFields, where: str, own_resources: Mapping[str, str]) -> None:
    """Raise ConfigError for fields that the operator sets, and variables without one source."""
    for field, keys in (("labels", pod.labels), ("annotations", pod.annotations)):
        if own := sorted(key for key in keys if key.startswith(OWN_KEYS)):
            raise ConfigError(
                f"{where}.{field} has {own[0]}, which the operator sets; leave it out"
            )
    for variable in pod.env:
        source = variable.value_from
        sources = [variable.value, *(() if source is None else msgspec.structs.astuple(source))]
        if sum(item is not None for item in sources) != 1:
            raise ConfigError(
                f"{where}.env[{variable.name}]: give value, or valueFrom with one of "
                "secretKeyRef, configMapKeyRef and fieldRef"
            )
    for resource, field in own_resources.items():
        given = resource in pod.resources.requests
        if given or (field != resource and resource in pod.resources.limits):
            raise ConfigError(f"{where}.resources has {resource}; say it by {field} instead")
    for field, key, own_names, items in (
        ("volumes", "name", OWN_VOLUMES, pod.volumes),
        ("volumeMounts", "mountPath", OWN_MOUNTS, pod.volume_mounts),
    ):
        for item in items:
            if not isinstance(item.get(key), str) or item[key] in own_names:
                raise ConfigError(
                    f"{where}.{field}: {key} is {item.get(key)!r}; give one other than "
                    f"{', '.join(own_names)}, which the operator uses"
                )


class Parallelism(Typed, frozen=True):
    """Parallelism of an engine; the product is GPUs per replica."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    ep: bool = False  # whole experts on each GPU

    @property
    def gpus(self) -> int:
        """GPUs of all ranks together."""
        return self.tp * self.pp * self.dp


class TopologySpec(Typed, frozen=True):
    """How near to each other the workers of a model run."""

    pack: Literal["host", "rack", "zone"]
    mode: Literal["preferred", "required"] = "preferred"


class PoolSpec(PodFields, frozen=True, kw_only=True):
    """Workers of one role."""

    role: PoolRole
    # fixed number; otherwise a `PigouPool` is scaled from `min_replicas` to `max_replicas`.
    replicas: Count | None = None
    min_replicas: Count | None = None
    max_replicas: Count | None = None
    engine: Literal["pigou", "vllm"] = "pigou"
    image: str = ""
    args: tuple[str, ...] = ()  # extra engine arguments
    parallelism: Parallelism = Parallelism()
    gpus_per_replica: Count = 1  # GPUs of a worker over all its hosts; 0 computes on the CPU
    hosts_per_replica: Positive = 1  # pods of one worker, gang scheduled
    memory: Quantity = "16Gi"
    # size of /dev/shm, through which ranks and workers on one host exchange data.
    shm_size: Quantity = "8Gi"
    # time that a model may take to load before the worker counts as failed.
    load_seconds: Positive = 3600
    drain_seconds: Positive = 120
    topology: TopologySpec | None = None

    @property
    def scaled(self) -> bool:
        """Whether a `PigouPool` says how many replicas there are."""
        return self.replicas is None

    @property
    def range(self) -> tuple[int, int]:
        """Fewest and most replicas of a scaled pool."""
        return self.min_replicas or 0, self.max_replicas or 0


class UpdateSpec(Typed, frozen=True):
    """Limits of a rolling update per role, as counts or percents."""

    surge: int | str = "25%"
    unavailable: int | str = 0


class ModelSpec(Typed, frozen=True, kw_only=True):
    """A model and its pools: `both`, or `prefill` and `decode`."""

    name: ModelName
    model: str = "bundled"  # folder or hub id
    pools: Annotated[tuple[PoolSpec, ...], Meta(min_length=1, max_length=3)]
    update: UpdateSpec = UpdateSpec()

    @property
    def label(self) -> str:
        """Name as a label's value, and as a part of objects' names."""
        return name_label(self.name)

    def limits(self, replicas: dict[str, int]) -> tuple[int, int]:
        """Return surge and unavailable in workers; percents are of the widest role."""
        widest = max(replicas.values(), default=0)
        surge = resolved(self.update.surge, widest, up=True)
        unavailable = resolved(self.update.unavailable, widest, up=False)
        return surge, unavailable if surge else max(1, unavailable)  # as for Deployments


class SloSpec(Typed, frozen=True):
    """Objective: a percentile of requests has its first token, and each next one, in time."""

    ttft_seconds: Seconds
    itl_seconds: Seconds
    percentile: Annotated[float, Meta(gt=0, lt=100)] = 95.0


class BudgetSpec(Typed, frozen=True):
    """GPU budget of all pools, updates included."""

    gpus: Count


class GatewaySpec(PodFields, frozen=True):
    """The HTTP front: `args` are of `pigou serve`; `api_keys_secret` is a Secret with `keys`."""

    replicas: Count = 1
    image: str = ""
    args: tuple[str, ...] = ()
    api_keys_secret: str = ""


class FleetSpec(Typed, frozen=True):
    """What a `PigouFleet` asks for."""

    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1)]
    image: str = "pigou-worker:0.1.0"  # default image of Pigou's containers
    slo: SloSpec | None = None
    budget: BudgetSpec | None = None
    gateway: GatewaySpec = GatewaySpec()
    # name of the Secret whose key `secret` the processes of the fleet share.
    fleet_secret: str = "pigou-fleet"
    model_cache: str = ""  # PersistentVolumeClaim of the hub's cache; empty downloads into each pod
    gpu_resource: str = "nvidia.com/gpu"  # resource name of GPUs on nodes


class PoolScale(Typed, frozen=True):
    """What a `PigouPool` asks for: replicas of one pool, set through its scale subresource."""

    fleet: FleetName
    model: ModelName
    role: PoolRole
    replicas: Count = 0


def name_label(name: str) -> str:
    """Return a name as a label value, shortened with a digest if needed."""
    if re.fullmatch(_LABEL, name):
        return name
    slug = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{slug[:21]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def read_fleet(spec: Any, name: str = "fleet") -> FleetSpec:
    """Return the specification of a fleet of a name. Raises ConfigError."""
    if not re.fullmatch(_LABEL, name):
        raise ConfigError(
            f"metadata.name is {name!r}; name the fleet with up to 30 lower-case letters, digits "
            "and hyphens, a letter first"
        )
    try:
        fleet = msgspec.convert(spec, FleetSpec, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"spec: {error}") from error
    names = [model.name for model in fleet.models]
    if len({model.label for model in fleet.models}) < len(names):
        raise ConfigError(f"spec.models: names are {names}; give each model a name of its own")
    check_pod(fleet.gateway, "spec.gateway", {})
    _check_arguments(fleet.gateway.args, "spec.gateway", ("--host", "--port", "--registry"))
    for model in fleet.models:
        _check_model(model, fleet.gpu_resource)
    return fleet


def _check_model(model: ModelSpec, gpu_resource: str) -> None:
    where = f"spec.models[{model.name}]"
    roles = [pool.role for pool in model.pools]
    if len(roles) != len(set(roles)):
        raise ConfigError(f"{where}.pools: roles are {roles}; give one pool a role")
    if ("prefill" in roles) and not {"decode", "both"} & set(roles):
        raise ConfigError(f"{where}.pools: prefill needs a pool that decodes; add decode")
    if len({pool.engine for pool in model.pools}) > 1:
        raise ConfigError(f"{where}.pools: engines differ; workers that exchange KV need one")
    for pool in model.pools:
        _check_pool(pool, f"{where}.pools[{pool.role}]")
        own = {gpu_resource: "gpusPerReplica", "memory": "memory"}
        check_pod(pool, f"{where}.pools[{pool.role}]", own)
    for name, limit in (("surge", model.update.surge), ("unavailable", model.update.unavailable)):
        try:
            counted = resolved(limit, 100, up=True)
        except ValueError as error:
            raise ConfigError(f"{where}.update.{name}: {error}") from error
        if counted < 0:
            raise ConfigError(f"{where}.update.{name} is {limit}; it must be at least 0")
    if not re.search("[1-9]", f"{model.update.surge} {model.update.unavailable}"):
        raise ConfigError(f"{where}.update: surge and unavailable are 0; set one above 0")


def _check_arguments(arguments: tuple[str, ...], where: str, own: Iterable[str]) -> None:
    for option in (word.partition("=")[0] for word in arguments):
        if option in own:
            field = _OWN_OPTIONS[option]
            remedy = f"say it by {field}" if field else "leave it out"
            raise ConfigError(f"{where}.args has {option}, which the operator sets; {remedy}")


def _check_pool(pool: PoolSpec, where: str) -> None:
    _check_arguments(pool.args, where, _OWN_OPTIONS)
    lowest, highest = pool.min_replicas, pool.max_replicas
    if pool.scaled and (lowest is None or highest is None):
        raise ConfigError(f"{where}: give replicas, or minReplicas and maxReplicas")
    if not pool.scaled and (lowest is not None or highest is not None):
        raise ConfigError(f"{where}: replicas is given, and a range, too; give one of both")
    if lowest is not None and highest is not None and lowest > highest:
        raise ConfigError(f"{where}: minReplicas {lowest} is above maxReplicas {highest}")
    if pool.engine == "pigou" and pool.parallelism.gpus > 1:
        raise ConfigError(
            f"{where}: parallelism is {pool.parallelism.gpus} GPUs; Pigou's engine computes on "
            "one: set engine to vllm, or leave it out"
        )
    if pool.engine == "vllm" and not pool.image:
        raise ConfigError(f"{where}: engine is vllm without an image; name one that has vLLM")
    if pool.gpus_per_replica and pool.parallelism.gpus != pool.gpus_per_replica:
        raise ConfigError(
            f"{where}: gpusPerReplica is {pool.gpus_per_replica}, and tp x pp x dp is "
            f"{pool.parallelism.gpus}; make them equal"
        )
    hosts, dp = pool.hosts_per_replica, pool.parallelism.dp
    if hosts > 1 and (pool.engine != "vllm" or not pool.gpus_per_replica):
        raise ConfigError(
            f"{where}: hostsPerReplica is {hosts}; only vLLM on GPUs runs a worker on several "
            "hosts: leave it out, or set engine to vllm and gpusPerReplica"
        )
    if pool.gpus_per_replica % hosts or (dp % hosts and hosts % dp):
        raise ConfigError(
            f"{where}: gpusPerReplica is {pool.gpus_per_replica} with dp {dp}, which {hosts} hosts "
            "cannot share evenly"
        )
