"""Label and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.lib.fake_kubernetes.errors import ApiError

Object = dict[str, Any]
Matches = Callable[[Object], bool]
_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
#: Fields by which real servers select; custom resources have the first two alone.
_FIELDS = {
    "metadata.name", "metadata.namespace", "status.phase", "spec.nodeName", "type",
    "involvedObject.name", "involvedObject.namespace", "involvedObject.kind",
    "involvedObject.uid", "reason", "status.podIP",
}  # fmt: skip


def selector(labels: str, fields: str) -> Matches:
    """Return whether an object matches both selectors; an empty one matches all.

    Raises:
        ApiError: 400, a selector is malformed or names a field that no server selects by.
    """
    tests = [_label(term) for term in re.split(r",(?![^()]*\))", labels) if term.strip()]
    tests += [_field(term) for term in fields.split(",") if term.strip()]
    return lambda item: all(test(item) for test in tests)


def _label(term: str) -> Matches:
    term = term.strip()

    def label(item: Object, key: str) -> str | None:
        return (item["metadata"].get("labels") or {}).get(key)

    if found := _SET.match(term):
        key, verb, values = found[1], found[2], {v.strip() for v in found[3].split(",")}
        return lambda item: (label(item, key) in values) == (verb == "in")
    if "!=" in term:
        key, value = (part.strip() for part in term.split("!=", 1))
        return lambda item: label(item, key) != value
    if "=" in term:
        key, value = (part.strip() for part in term.replace("==", "=").split("=", 1))
        return lambda item: label(item, key) == value
    if term.startswith("!"):
        return lambda item: label(item, term[1:].strip()) is None
    if re.search(r"\s|\(", term):
        raise ApiError(400, f"unable to parse requirement: {term!r}")
    return lambda item: label(item, term) is not None


def _field(term: str) -> Matches:
    unequal = "!=" in term
    key, value = re.split(r"!=|==|=", term.strip(), maxsplit=1) if "=" in term else (term, "")
    if key not in _FIELDS:
        raise ApiError(400, f"field label not supported: {key}")

    def matches(item: Object) -> bool:
        return (str(at(item, key) or "") == value) != unequal

    return matches


def at(item: Any, path: str) -> Any:
    """Return what is at a dotted path within an object; None where a part of it is missing."""
    for part in path.strip(".").split("."):
        item = item.get(part) if isinstance(item, dict) else None
    return item


def put_at(item: Any, path: str, value: Any) -> None:
    """Set what is at a dotted path within an object, and make the parts that are missing."""
    *parents, last = path.strip(".").split(".")
    for part in parents:
        item = item.setdefault(part, {})
    item[last] = value
