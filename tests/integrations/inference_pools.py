"""The InferencePool of the Gateway API Inference Extension (v1), as its definition has it."""

from __future__ import annotations

from typing import Any

TEXT, PORT = {"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_NUMBER = {"type": "object", "required": ["number"], "properties": {"number": PORT}}
_SPEC = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object", "required": ["matchLabels"],
            "properties": {"matchLabels": {
                "type": "object", "maxProperties": 64, "additionalProperties": TEXT}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _NUMBER},
        "appProtocol": {"type": "string", "enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object", "required": ["name"],
            "properties": {
                "group": {"type": "string", "default": ""},
                "kind": {"type": "string", "default": "Service"},
                "name": NAME,
                "port": _NUMBER,
                "failureMode": {
                    "type": "string", "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
            },
        },
    },
}  # fmt: skip
DEFINITION: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "inferencepools.inference.networking.k8s.io"},
    "spec": {
        "group": "inference.networking.k8s.io", "scope": "Namespaced",
        "names": {"kind": "InferencePool", "plural": "inferencepools",
                  "singular": "inferencepool", "shortNames": ["infpool"]},
        "versions": [{
            "name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
            "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"],
                                           "properties": {"spec": _SPEC}}},
        }],
    },
}  # fmt: skip


def inference_pool(labels: dict[str, str], *ports: int, **fields: Any) -> dict[str, Any]:
    """Return a pool named `chat` of the pods with these labels."""
    spec = {
        "selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "chat-epp", "port": {"number": 9002}}, **fields,
    }  # fmt: skip
    return {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"name": "chat", "namespace": "default"}, "spec": spec}  # fmt: skip


def pod(
    name: str, address: str, *, ready: bool = True, role: str = "", **labels: str
) -> dict[str, Any]:
    """Return a pod of `app: vllm`; `role` is llm-d's label."""
    labels = {"app": "vllm", **labels} | ({"llm-d.ai/role": role} if role else {})
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"nodeName": "n1", "containers": [{"name": "vllm", "image": "vllm"}]},
        "status": {
            "podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }  # fmt: skip
