"""What the server fills in or refuses when an object is written."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from tests.lib.fake_kubernetes.errors import ApiError
from tests.lib.fake_kubernetes.resources import Resource
from tests.lib.fake_kubernetes.selectors import Object


def merged(value: Any, patch: Any) -> Any:
    """Return a value changed by a merge patch (RFC 7386); `value` stays as it is."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(value) if isinstance(value, dict) else {}
    for key, inner in patch.items():
        if inner is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), inner)
    return json.loads(json.dumps(result))


def long_name(resource: Resource) -> str:
    return f"{resource.plural}.{resource.group}".rstrip(".")


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def spec_of(item: Object, resource: Resource) -> Object:
    apart = {"metadata", "status"} if resource.status else {"metadata"}
    return {key: value for key, value in item.items() if key not in apart}


def check_preconditions(resource: Resource, old: Object, new: Object, whole: bool) -> None:
    given, before = new.get("metadata") or {}, old["metadata"]
    revision = given.get("resourceVersion")
    if whole and not revision and resource.schema is not None:
        raise ApiError(422, "metadata.resourceVersion: must be specified for an update")
    name = f'{long_name(resource)} "{before["name"]}"'
    if revision and revision != before["resourceVersion"]:
        message = "the object has been modified; please apply your changes to the latest version"
        raise ApiError(409, f"Operation cannot be fulfilled on {name}: {message}")
    if given.get("uid", before["uid"]) != before["uid"]:
        raise ApiError(409, f"{name}: the UID in the precondition is not the object's")


def check_finalizers(resource: Resource, meta: Object, before: Object) -> None:
    added = set(meta.get("finalizers") or ()) - set(before.get("finalizers") or ())
    if "deletionTimestamp" in before and added:
        raise ApiError(422, f'{resource.kind} "{before["name"]}" is invalid: metadata.finalizers: '
                       "none can be added if the object is being deleted")  # fmt: skip


def named(kind: str, name: str) -> Object:
    labels = {"kubernetes.io/metadata.name": name}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
