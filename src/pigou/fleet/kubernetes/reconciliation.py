"""Reconciliation of a fleet: writes and a status from its objects and its specification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal

import msgspec

from pigou.config import ConfigError
from pigou.fleet.kubernetes.fleet_spec import FleetSpec, ModelSpec, PoolSpec, read_fleet
from pigou.fleet.kubernetes.manifests import (
    DEPLOYMENT_VERSION,
    DIGEST,
    FLEET,
    MODEL,
    PART,
    ROLE,
    FleetObjects,
    Manifest,
    gpus_of_pod,
    gpus_of_workload,
)
from pigou.fleet.kubernetes.rollout import RolloutState, RolloutStep, VersionReplicas, next_step

#: Phases of pods that hold nothing any more.
_ENDED = ("Succeeded", "Failed")


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator read of the cluster."""

    fleet: Manifest  # the `PigouFleet`
    workloads: Sequence[Manifest] = ()  # Deployments and gangs of all fleets, gateways among them
    services: Sequence[Manifest] = ()
    pools: Sequence[Manifest] = ()  # `PigouPool`s of the fleet
    nodes: Sequence[Manifest] | None = None  # nodes of the cluster; None if not readable
    pods: Sequence[Manifest] | None = None  # pods of the cluster; None if not readable
    gangs: bool = False  # whether LeaderWorkerSets can be made
    grove: bool = False  # whether PodCliqueSets can be made, which are where those cannot
    now: str = ""  # time of conditions, in RFC 3339


class Write(msgspec.Struct, frozen=True):
    """One change: a merge `patch`, also of the `status`, or a `replace` of the whole manifest."""

    verb: Literal["create", "patch", "replace", "status", "delete"]
    manifest: Manifest


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """Writes, in order, and the fleet's next status."""

    writes: tuple[Write, ...]
    status: Manifest


def reconcile(observed: Observation) -> Reconciliation:
    """Return the writes towards the specification; none if it is invalid."""
    try:
        spec = read_fleet(observed.fleet["spec"], observed.fleet["metadata"]["name"])
    except ConfigError as error:
        return refusal(observed, "InvalidSpec", str(error))
    gangs = any(pool.hosts_per_replica > 1 for model in spec.models for pool in model.pools)
    if gangs and not (observed.gangs or observed.grove):
        message = (
            "hostsPerReplica is above 1, and neither LeaderWorkerSet nor Grove is installed; "
            "install one of them"
        )
        return refusal(observed, "GangsUnavailable", message)
    return _Round(observed, spec).changes()


def free_gpus(observed: Observation, resource: str) -> int | None:
    """Return the free GPUs of ready nodes, or None if unknown; fleets count by desired replicas."""
    if observed.nodes is None or observed.pods is None:
        return None
    try:
        total: int = sum(
            int(node["status"]["allocatable"].get(resource, 0))
            for node in observed.nodes
            if not (node.get("spec") or {}).get("unschedulable") and _condition(node, "Ready")
        )
        taken = sum(
            gpus_of_pod(pod["spec"], resource)
            for pod in observed.pods
            if FLEET not in _labels(pod) and pod.get("status", {}).get("phase") not in _ENDED
        )
        taken += sum(
            _replicas(workload) * gpus_of_workload(workload, resource)
            for workload in observed.workloads
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return max(0, total - taken)


class _Round:
    def __init__(self, observed: Observation, spec: FleetSpec) -> None:
        self._observed, self._spec = observed, spec
        self._objects = FleetObjects(observed.fleet, spec)
        self._writes: list[Write] = []
        self._models: list[Manifest] = []
        self._steps: list[tuple[str, RolloutStep]] = []
        name = self._objects.name
        self._own = [
            w for w in observed.workloads
            if _labels(w).get(FLEET) == name
            and w["metadata"]["namespace"] == self._objects.namespace
        ]  # fmt: skip
        self._free = self._free_gpus()
        self._old_status = {
            model["name"]: model
            for model in (observed.fleet.get("status") or {}).get("models") or ()
        }

    def changes(self) -> Reconciliation:
        for manifest in self._objects.gateway():
            self._keep(manifest)
        models = {model.label for model in self._spec.models}
        for workload in self._own:
            if _labels(workload).get(PART) == "worker" and _labels(workload)[MODEL] not in models:
                self._writes.append(Write("delete", workload))
        wanted = {
            self._objects.scale_name(model, pool.role)
            for model in self._spec.models
            for pool in model.pools
            if pool.scaled
        }
        for scale in self._observed.pools:
            if scale["metadata"]["name"] not in wanted:
                self._writes.append(Write("delete", scale))
        for model in self._spec.models:
            self._roll(model)
        return Reconciliation(writes=tuple(self._writes), status=self._status())

    def _free_gpus(self) -> int | None:
        resource = self._spec.gpu_resource
        if not any(p.gpus_per_replica for m in self._spec.models for p in m.pools):
            return 0
        free = free_gpus(self._observed, resource)
        if free is None or self._spec.budget is None:
            return free
        used: int = sum(_replicas(w) * gpus_of_workload(w, resource) for w in self._own)
        return max(0, min(free, self._spec.budget.gpus - used))

    def _keep(self, manifest: Manifest) -> None:
        """Create or restore an object of the gateway."""
        existing = [*self._own, *self._observed.services]
        for item in existing:
            same = item["kind"] == manifest["kind"]
            if same and item["metadata"]["name"] == manifest["metadata"]["name"]:
                if not _as_written(manifest, item):
                    self._writes.append(_change(manifest, item))
                return
        self._writes.append(Write("create", manifest))

    # One model
    def _roll(self, model: ModelSpec) -> None:
        version = self._objects.version(model)
        workloads = self._workloads(model.label)
        target: dict[str, int] = {p.role: self._target(model, p) for p in model.pools}
        status = self._old_status.get(model.name, {})
        old = tuple(
            _version_of(name, workloads[name]) for name in _by_age(workloads) if name != version
        )
        current = {
            role: sum(v.replicas.get(role, 0) for v in old)
            for role in sorted({role for v in old for role in v.replicas})
        }
        begun = status.get("version") == version and status.get("initial")
        initial = status["initial"] if begun else current
        surge, unavailable = model.limits(target)
        step = next_step(
            RolloutState(
                target=target, new=_version_of(version, workloads.get(version, {})), old=old,
                initial=initial, surge=surge, unavailable=unavailable,
                gpus={pool.role: pool.gpus_per_replica for pool in model.pools},
                free_gpus=self._free, unschedulable=self._unschedulable(model.label, version),
            )
        )  # fmt: skip
        added = self._apply(model, version, workloads, step)
        if self._free is not None:
            self._free -= added
        self._steps.append((model.name, step))
        self._models.append({
            "name": model.name, "version": version, "reason": step.reason,
            "message": step.message, "initial": initial,
            "pools": [_pool_status(p, target[p.role], workloads, version) for p in model.pools],
        })  # fmt: skip
        self._report_scales(model, workloads)

    def _apply(
        self, model: ModelSpec, version: str, workloads: dict[str, dict[str, Manifest]],
        step: RolloutStep,
    ) -> int:  # fmt: skip
        current, added = workloads.get(version, {}), 0
        for pool in model.pools:
            replicas = step.new.get(pool.role, 0)
            existing = current.get(pool.role)
            if existing is None:
                if step.state != "scale" and not replicas:
                    continue
                manifest = self._objects.workload(
                    model, pool, version, replicas, grove=not self._observed.gangs
                )
                self._writes.append(Write("create", manifest))
                added += replicas * pool.gpus_per_replica
            elif more := replicas - _replicas(existing):
                self._scale(existing, replicas)
                added += max(0, more) * pool.gpus_per_replica
        for name, roles in step.old.items():
            gone = not any(roles.values())
            for role, workload in workloads[name].items():
                if gone:
                    self._writes.append(Write("delete", workload))
                elif _replicas(workload) != roles.get(role, 0):
                    self._scale(workload, roles.get(role, 0))
        return added

    def _scale(self, workload: Manifest, replicas: int) -> None:
        meta = workload["metadata"]
        keys = ("name", "namespace", "resourceVersion")
        patch = {
            "apiVersion": workload["apiVersion"], "kind": workload["kind"],
            "metadata": {key: meta[key] for key in keys if key in meta},
            "spec": {"replicas": replicas},
        }  # fmt: skip
        self._writes.append(Write("patch", patch))

    def _workloads(self, model: str) -> dict[str, dict[str, Manifest]]:
        workloads: dict[str, dict[str, Manifest]] = {}
        for workload in self._own:
            labels = _labels(workload)
            if labels.get(PART) == "worker" and labels[MODEL] == model:
                workloads.setdefault(labels[DEPLOYMENT_VERSION], {})[labels[ROLE]] = workload
        return workloads

    def _target(self, model: ModelSpec, pool: PoolSpec) -> int:
        if pool.replicas is not None:
            return pool.replicas
        lowest, highest = pool.range
        name = self._objects.scale_name(model, pool.role)
        for scale in self._observed.pools:
            if scale["metadata"]["name"] == name:
                requested: int = scale["spec"]["replicas"]
                return min(max(requested, lowest), highest)
        self._writes.append(Write("create", self._objects.scale(model, pool)))
        return lowest

    def _report_scales(self, model: ModelSpec, workloads: dict[str, dict[str, Manifest]]) -> None:
        """Report replicas and pods of all versions to autoscalers."""
        for scale in self._observed.pools:
            labels = _labels(scale)
            if labels.get(MODEL) != model.label:
                continue
            pool = next((p for p in model.pools if p.role == labels.get(ROLE)), None)
            if pool is None or not pool.scaled:
                continue
            roles = [roles[pool.role] for roles in workloads.values() if pool.role in roles]
            requested = scale["spec"]["replicas"]
            lowest, highest = pool.range
            outside = f"{requested} is outside of {lowest} to {highest}"
            status = {
                "replicas": sum(_replicas(w) for w in roles),
                "ready": sum(_ready(w) for w in roles),
                "selector": f"{FLEET}={self._objects.name},{PART}=worker,{MODEL}={model.label},"
                f"{ROLE}={pool.role}",
                "message": "" if lowest <= requested <= highest else outside,
            }  # fmt: skip
            if status != scale.get("status"):
                keep = {"name": scale["metadata"]["name"], "namespace": self._objects.namespace}
                self._writes.append(
                    Write("status", {"apiVersion": scale["apiVersion"], "kind": scale["kind"],
                                     "metadata": keep, "status": status})
                )  # fmt: skip

    def _unschedulable(self, model: str, version: str) -> bool:
        own = {MODEL: model, DEPLOYMENT_VERSION: version, FLEET: self._objects.name}.items()
        pods = self._observed.pods or ()
        return any(is_unschedulable(pod) for pod in pods if own <= _labels(pod).items())

    def _status(self) -> Manifest:
        unready = [(name, step) for name, step in self._steps if step.state != "done"]
        gateway = [w for w in self._own if _labels(w).get(PART) == "gateway"]
        if unready:
            reason = unready[0][1].reason
            message = "; ".join(f"{name}: {step.message}" for name, step in unready)
            return _status(self._observed, False, reason, message, self._models)
        changed = any(w.verb == "replace" for w in self._writes)
        if changed or not gateway or not all(map(_rolled, gateway)):
            message = "the gateway is not ready yet"
            return _status(self._observed, False, "WaitingForGateway", message, self._models)
        return _status(self._observed, True, "Ready", "", self._models)


def refusal(observed: Observation, reason: str, message: str) -> Reconciliation:
    """Return a status of refusal, without writes."""
    models = (observed.fleet.get("status") or {}).get("models") or []
    return Reconciliation(writes=(), status=_status(observed, False, reason, message, models))


def _status(
    observed: Observation, ready: bool, reason: str, message: str, models: list[Manifest]
) -> Manifest:
    meta, old = observed.fleet["metadata"], observed.fleet.get("status") or {}
    value = "True" if ready else "False"
    before: Manifest = next((c for c in old.get("conditions") or () if c["type"] == "Ready"), {})
    since = before.get("lastTransitionTime") if before.get("status") == value else None
    condition = {
        "type": "Ready", "status": value, "reason": reason, "message": message,
        "lastTransitionTime": since or observed.now, "observedGeneration": meta["generation"],
    }  # fmt: skip
    return {"observedGeneration": meta["generation"], "conditions": [condition], "models": models}


def is_unschedulable(pod: Manifest) -> bool:
    """Whether no node has room for a pod."""
    return any(
        condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in (pod.get("status") or {}).get("conditions") or ()
    )


def _version_of(version: str, workloads: dict[str, Manifest]) -> VersionReplicas:
    return VersionReplicas(
        version=version,
        replicas={role: _replicas(w) for role, w in workloads.items()},
        ready={role: _ready(w) for role, w in workloads.items()},
    )


def _pool_status(
    pool: PoolSpec, target: int, workloads: dict[str, dict[str, Manifest]], version: str
) -> Manifest:
    every = [roles[pool.role] for roles in workloads.values() if pool.role in roles]
    new = workloads.get(version, {}).get(pool.role)
    return {
        "role": pool.role, "replicas": target, "ready": sum(_ready(w) for w in every),
        "updated": 0 if new is None else _ready(new), "gpus": target * pool.gpus_per_replica,
    }  # fmt: skip


def _ready(workload: Manifest) -> int:
    counted = "readyReplicas" if workload["kind"] == "LeaderWorkerSet" else "availableReplicas"
    ready = (workload.get("status") or {}).get(counted, 0)
    return int(min(ready, _replicas(workload)))


def _rolled(deployment: Manifest) -> bool:
    """True if a Deployment has rolled out its present template."""
    status, replicas = deployment.get("status") or {}, _replicas(deployment)
    generation: int = deployment["metadata"].get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        return False
    return bool(min(status.get("updatedReplicas", 0), _ready(deployment)) >= replicas)


def _replicas(workload: Manifest) -> int:
    return int(workload["spec"].get("replicas", 1))


def _by_age(workloads: dict[str, dict[str, Manifest]]) -> list[str]:
    def age(version: str) -> Any:
        made = [w["metadata"].get("creationTimestamp", "") for w in workloads[version].values()]
        return min(made), version

    return sorted(workloads, key=age)


def _labels(item: Manifest) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _condition(item: Manifest, kind: str) -> bool:
    conditions: Iterable[Manifest] = (item.get("status") or {}).get("conditions") or ()
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def _as_written(wanted: Manifest, actual: Manifest) -> bool:
    """True if an object is unchanged since our last write."""
    noted = (actual["metadata"].get("annotations") or {}).get(DIGEST)
    digest = (wanted["metadata"].get("annotations") or {}).get(DIGEST)
    return noted == digest and _within(wanted["spec"], actual["spec"])


def _change(wanted: Manifest, actual: Manifest) -> Write:
    """Return the write that restores an object, whole if it has a digest."""
    meta, existing = wanted["metadata"], actual["metadata"]
    if DIGEST not in (meta.get("annotations") or {}):
        return Write("patch", wanted)
    merged = {key: {**(existing.get(key) or {}), **meta[key]} for key in ("labels", "annotations")}
    meta = {**meta, **merged, "resourceVersion": existing.get("resourceVersion", "")}
    return Write("replace", {**wanted, "metadata": meta})


def _within(wanted: Any, actual: Any) -> bool:
    """True if an object has all wanted fields; servers add defaults, and drop empty ones."""
    if actual is None:
        return wanted in ([], {}, "")
    if isinstance(wanted, dict):
        return isinstance(actual, dict) and all(
            _within(value, actual.get(key)) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        same = isinstance(actual, list) and len(wanted) == len(actual)
        return same and all(_within(a, b) for a, b in zip(wanted, actual, strict=True))
    return bool(wanted == actual) or _quantity(wanted) == (_quantity(actual) or "none")


def _quantity(value: Any) -> Fraction | None:
    """Parse a Kubernetes quantity; servers may rewrite 0.5 as 500m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|[kMGTP]|[KMGTP]i)?", str(value))
    if match is None:
        return None
    unit = match[2] or ""
    if unit == "m":
        return Fraction(match[1]) / 1000
    base, power = 1024 if unit.endswith("i") else 1000, " KMGTP".index(unit[:1].upper() or " ")
    return Fraction(match[1]) * Fraction(base) ** power
