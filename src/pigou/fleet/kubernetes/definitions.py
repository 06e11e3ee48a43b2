"""The definitions (CRD) of `PigouFleet` and `PigouPool`, made from the types of their specs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pigou.config import ConfigError, option
from pigou.fleet.kubernetes.fleet_spec import FleetSpec, PoolScale
from pigou.logs import LogFormatOption, LogLevelOption

GROUP, VERSION = "pigou.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_CONDITION: Schema = {
    "type": "object",
    "required": ["type", "status"],
    "properties": {
        "type": _TEXT, "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": _TEXT, "message": _TEXT, "lastTransitionTime": _TEXT,
        "observedGeneration": _INT,
    },
}  # fmt: skip
_POOL_STATUS: Schema = {
    "type": "object",
    "properties": {
        "role": _TEXT, "replicas": _INT, "ready": _INT, "updated": _INT, "gpus": _INT,
    },
}  # fmt: skip
_MODEL_STATUS: Schema = {
    "type": "object",
    "properties": {
        "name": _TEXT, "version": _TEXT, "reason": _TEXT, "message": _TEXT,
        "initial": {"type": "object", "additionalProperties": _INT},
        "pools": {"type": "array", "items": _POOL_STATUS},
    },
}  # fmt: skip
_FLEET_STATUS: Schema = {
    "type": "object",
    "properties": {
        "observedGeneration": _INT,
        "conditions": {"type": "array", "items": _CONDITION},
        "models": {"type": "array", "items": _MODEL_STATUS},
    },
}
_POOL_SCALE_STATUS: Schema = {
    "type": "object",
    "properties": {"replicas": _INT, "ready": _INT, "selector": _TEXT, "message": _TEXT},
}
_READY = '.status.conditions[?(@.type=="Ready")]'
_FLEET_COLUMNS = [
    {"name": "Ready", "type": "string", "jsonPath": f"{_READY}.status"},
    {"name": "Reason", "type": "string", "jsonPath": f"{_READY}.reason"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]
_POOL_COLUMNS = [
    {"name": "Replicas", "type": "integer", "jsonPath": ".spec.replicas"},
    {"name": "Ready", "type": "integer", "jsonPath": ".status.ready"},
]


def definitions() -> list[dict[str, Any]]:
    """Return both definitions, as objects of `apiextensions.k8s.io/v1`."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    fleet = _definition("PigouFleet", "pf", FleetSpec, _FLEET_STATUS, _FLEET_COLUMNS, {})
    pool = _definition(
        "PigouPool", "pp", PoolScale, _POOL_SCALE_STATUS, _POOL_COLUMNS, {"scale": scale}
    )
    return [fleet, pool]


def definitions_yaml() -> str:
    """Return both as YAML, as in the Helm chart's `crds/`."""
    import yaml

    unshared = msgspec.json.decode(msgspec.json.encode(definitions()))  # YAML needs no anchors
    return str(yaml.safe_dump_all(unshared, sort_keys=False, width=100))


def _definition(
    kind: str, short: str, spec: type, status: Schema, columns: list[Any], parts: dict[str, Any]
) -> dict[str, Any]:
    plural = kind.lower() + "s"
    properties = {
        "apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"},
        "spec": structural_schema(spec), "status": status,
    }  # fmt: skip
    version = {
        "name": VERSION, "served": True, "storage": True, "additionalPrinterColumns": columns,
        "subresources": {"status": {}, **parts},
        "schema": {"openAPIV3Schema": {
            "type": "object", "required": ["spec"], "properties": properties}},
    }  # fmt: skip
    names = {
        "kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(),
        "shortNames": [short],
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }  # fmt: skip


def structural_schema(kind: type) -> Schema:
    """Return the schema of a struct as Kubernetes wants it: without references and null."""
    schema = msgspec.json.schema(kind)
    inlined = _inlined(schema, schema.get("$defs", {}))
    assert isinstance(inlined, dict)
    return inlined


def _inlined(schema: Any, shared: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(inner, shared) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        result = dict(_inlined(shared[schema["$ref"].rpartition("/")[2]], shared))
    elif "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        several = len(choices) > 1
        result = {"x-kubernetes-int-or-string": True} if several else _inlined(choices[0], shared)
    else:
        result = {}
        for key, value in schema.items():
            result.update(_keyword(key, value, shared))
        if "enum" in result:
            result["type"] = "string"
        if schema.get("type") == "object" and not {"properties", "additionalProperties"} & set(
            schema
        ):
            result["x-kubernetes-preserve-unknown-fields"] = True
    default = schema.get("default")
    if default is not None and default not in ([], (), {}):
        result["default"] = default
    return result


def _keyword(key: str, value: Any, shared: dict[str, Any]) -> Schema:
    """Return a JSON Schema keyword in a structural schema, or {}."""
    match key:
        case "properties":
            return {key: {name: _inlined(inner, shared) for name, inner in value.items()}}
        case "description":
            return {key: " ".join(value.split("\n\n")[0].split())}
        case "exclusiveMinimum":
            return {"minimum": value, key: True}
        case "exclusiveMaximum":
            return {"maximum": value, key: True}
        case "$defs" | "title" | "default":
            return {}
    implied = (key, value) in (("additionalProperties", False), ("required", []))
    return {} if implied else {key: _inlined(value, shared)}


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `pigou operator`."""

    namespace: Annotated[str, option("Namespace of the fleets; empty for all.", "Operator")] = ""
    interval: Annotated[
        float, option("Seconds between two reconciliations without events.", "Operator")
    ] = 10.0
    liveness: Annotated[
        str, option("URL of its own health check, as http://0.0.0.0:8080/healthz.", "Operator")
    ] = ""

    definitions: Annotated[
        bool,
        option("Print the definitions (CRD) of its objects, for `kubectl apply`.", "Operator"),
    ] = False
    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "info"

    def __post_init__(self) -> None:
        if not 0 < self.interval <= 3600:
            raise ConfigError(f"interval is {self.interval}; it must be above 0, up to 3600 s")
