"""Fields of Kubernetes' pods that a `PigouFleet` passes through, and what they may not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pigou.config import ConfigError

#: Prefix of labels and annotations that the operator sets itself.
OWN_KEYS = "pigou.dev/"
#: Folders of a worker's hub cache and of a gateway's keys, in their containers.
CACHE, KEYS = "/var/cache/huggingface", "/etc/pigou/keys"
OWN_VOLUMES, OWN_MOUNTS = ("shm", "models", "keys"), ("/dev/shm", CACHE, KEYS)
#: An object of Kubernetes' API whose fields the API server checks.
KubernetesObject = dict[str, Any]


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
    """An environment variable, with its value or where that comes from."""

    name: str
    value: str | None = None
    value_from: VariableSource | None = None


class Toleration(Typed, frozen=True):
    """A taint of nodes that pods tolerate."""

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
    """Fields of Kubernetes' pods and containers, under Kubernetes' names.

    `labels` and `annotations` are the pod's; `env`, `resources`, `security_context` and
    `volume_mounts` are the container's.
    """

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
    """Refuse what the operator sets itself, and variables without one source.

    Args:
        pod: fields of a pool or of the gateway.
        where: path of `pod` in the specification.
        own_resources: resources that other fields set -> those fields.

    Raises:
        ConfigError: naming the field, its value and the remedy.
    """
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
