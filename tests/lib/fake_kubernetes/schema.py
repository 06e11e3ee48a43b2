"""Structural schemas of custom resources: defaults, unknown fields, validation."""

from __future__ import annotations

from typing import Any

from openapi_schema_validator import OAS30Validator
from tests.lib.fake_kubernetes.errors import ApiError

_FREE = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"


def pruned(value: Any, schema: dict[str, Any], path: str, unknown: list[str]) -> Any:
    """Return a value with defaults and without unknown fields, whose paths are appended."""
    if isinstance(value, list):
        inner = schema.get("items", {})
        return [pruned(v, inner, f"{path}[{i}]", unknown) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties")
    result = {}
    for key, inner in value.items():
        here = f"{path}.{key}" if path else key
        if not path and key in ("apiVersion", "kind", "metadata"):
            result[key] = inner
        elif key in properties:
            result[key] = pruned(inner, properties[key], here, unknown)
        elif isinstance(other, dict):
            result[key] = pruned(inner, other, here, unknown)
        elif schema.get(_FREE) or other:
            result[key] = inner
        else:
            unknown.append(here)
    for key, inner in properties.items():
        if key not in result and "default" in inner:
            result[key] = pruned(inner["default"], inner, f"{path}.{key}", [])
    return result


def validate(item: dict[str, Any], schema: dict[str, Any], kind: str) -> None:
    """Check an object by its schema.

    Raises:
        ApiError: 422, with the fields that are wrong.
    """
    validator = OAS30Validator(_validator_schema(schema))
    errors = [
        f"{'.'.join(str(part) for part in error.absolute_path) or '<root>'}: {error.message}"
        for error in validator.iter_errors({k: v for k, v in item.items() if k != "metadata"})
    ]
    if errors:
        name = item["metadata"].get("name")
        raise ApiError(422, f'{kind} "{name}" is invalid: {"; ".join(errors[:8])}')


def _validator_schema(schema: Any) -> Any:
    """Return a schema without Kubernetes' extensions."""
    if isinstance(schema, list):
        return [_validator_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get(_INT_OR_STRING):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return {k: _validator_schema(v) for k, v in schema.items() if not k.startswith("x-kubernetes")}
