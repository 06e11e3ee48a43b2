"""Values of tool calls that are no JSON: Python's notation, and text typed by a schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping

_KIND_OF: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def loaded(text: str) -> object:
    """Return a JSON text's value, or None."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return name and arguments of each call in a list of calls; empty if it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = []
        for call in tree.elts if isinstance(tree, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in names:
                return []
            values = {keyword.arg or ...: _python_value(keyword.value) for keyword in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            calls.append((ast.unparse(call.func), arguments.encode().decode()))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
    return calls


def _python_value(node: ast.expr) -> object:
    """Return a literal's value; JSON's null, true and false are literals too."""
    if isinstance(node, ast.Name):
        return {"null": None, "true": True, "false": False}.get(node.id, ...)
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else ... for key in node.keys]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    return ast.literal_eval(node)


def schema_types(schema: object) -> set[str]:
    """Return the types that a schema allows; string where it says nothing."""
    if not isinstance(schema, Mapping):
        return {"string"}
    lists = {key: value if isinstance(value, list) else [value] for key, value in schema.items()}
    types = {kind for kind in lists.get("type", ()) if isinstance(kind, str)}
    types |= {_KIND_OF.get(type(value), "string") for value in lists.get("enum", ())}
    nested = (inner for key in ("anyOf", "oneOf", "allOf") for inner in lists.get(key, ()))
    return types.union(*map(schema_types, nested)) or {"string"}


def json_of(text: str, types: Collection[str]) -> str:
    """Return text as JSON of a type that fits; else as a string."""
    value, word = loaded(text), text.strip().lower()
    try:
        kind, whole = _KIND_OF.get(type(value)), json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        kind = None
    if "null" in types and word == "null":
        return "null"
    if kind != "null" and (kind in types or (kind == "integer" and "number" in types)):
        return whole
    if "boolean" in types and word in ("true", "1", "false", "0"):
        return "true" if word in ("true", "1") else "false"
    return json.dumps(text, ensure_ascii=False)
