"""JSON schemas of clients before they become grammars: keywords that ask for nothing are left out.

Grammars know fewer keywords than JSON Schema has, and refuse the others by name. A keyword whose
value allows everything is no reason for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
#: Makes another schema of one whose inner ones are changed already; its second argument says
#: whether it is a part of a combination.
Change: TypeAlias = Callable[[Schema, bool], Schema]

#: Below these, an object's other properties may stand in another branch.
BRANCHES = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
#: What stands under these is data, in which keywords are none.
_DATA = ("const", "enum", "default", "examples", "example", "required")
#: Schemas stand under these by name.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
          "dependencies")  # fmt: skip
#: Formats that grammars keep. To JSON Schema a format is a note, so that others are left out.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: Keywords that say something of one type only.
_TYPES = {
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "unevaluatedItems": "array", "propertyNames": "object", "dependentRequired": "object",
    "dependentSchemas": "object", "dependencies": "object", "minProperties": "object",
    "maxProperties": "object", "unevaluatedProperties": "object", "format": "string",
}  # fmt: skip
_NOTES = {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
          "writeOnly", "$comment"}  # fmt: skip


def rewrite(schema: Any, change: Change, combined: bool = False) -> Any:
    """Return a schema with a change made to each object in it that is a schema."""
    if isinstance(schema, list):
        return [rewrite(item, change, combined) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner: Schema = {}
    for key, value in schema.items():
        below = combined or key in BRANCHES
        if key in _DATA:
            inner[key] = value
        elif key in _NAMED and isinstance(value, dict):
            inner[key] = {name: rewrite(item, change, below) for name, item in value.items()}
        else:
            inner[key] = rewrite(value, change, below)
    return change(inner, combined)


def without_void(schema: Any) -> Any:
    """Return a schema without keywords that allow everything, and draft 4's bounds as today's."""
    return rewrite(schema, _without_void)


def _without_void(schema: Schema, _combined: bool) -> Schema:
    result = {key: value for key, value in schema.items() if not _is_void(key, value, schema)}
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(result.get(bound), bool):
            exclusive = result.pop(bound)
            if exclusive and limit in result:
                result[bound] = result.pop(limit)
    return result


def _asks_for_an_item(schema: Schema) -> bool:
    optional = schema.get("minContains") == 0 and "maxContains" not in schema
    return "contains" in schema and not optional


def _has_branches(schema: Schema) -> bool:
    return "if" in schema and not all(_is_any(schema.get(key, True)) for key in ("then", "else"))


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(item == [] or _is_any(item) for item in value.values())


def _names_enough(value: Any, schema: Schema) -> bool:
    required = schema.get("required")
    return isinstance(required, list) and len({*map(str, required)}) >= value


def _names_few(value: Any, schema: Schema) -> bool:
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return closed and len(schema.get("properties", ())) <= value


#: Whether a keyword allows all that the rest of its schema does, by its value and that schema.
_VOID: dict[str, Callable[[Any, Schema], bool]] = {
    "format": lambda value, _: isinstance(value, str) and value not in FORMATS,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "propertyNames": lambda value, _: _is_any(value, {"type": "string"}),
    "unevaluatedProperties": lambda value, _: _is_any(value),
    "unevaluatedItems": lambda value, _: _is_any(value),
    **dict.fromkeys(
        ("contains", "minContains", "maxContains"), lambda _, schema: not _asks_for_an_item(schema)
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), lambda value, _: _is_empty(value)
    ),
    "not": lambda value, _: value is False,
    **dict.fromkeys(("if", "then", "else"), lambda _, schema: not _has_branches(schema)),
    "minProperties": _names_enough,
    "maxProperties": _names_few,
    # A reference to one of these is refused by its own name.
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), lambda _value, _schema: True),
}


def _is_void(key: str, value: Any, schema: Schema) -> bool:
    """Whether a keyword with this value allows all that the rest of its schema does."""
    if key in _TYPES and "type" in schema:
        types = schema["type"]
        if _TYPES[key] not in (types if isinstance(types, list) else [types]):
            return True
    return key in _VOID and _VOID[key](value, schema)


def _is_any(value: Any, rest: Schema | None = None) -> bool:
    """Whether a schema allows everything, or says no more than `rest`."""
    if not isinstance(value, dict):
        return value is True
    said = {key: item for key, item in value.items() if key not in _NOTES}
    return said in ({}, rest)
