"""Keywords that ask for nothing do not make a 400; those that are not honoured do, by name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from pigou.models import bundled_path
from pigou.wire.errors import APIError
from pigou.wire.openai_requests import decode_generation
from pigou.wire.structured_output import FORMATS, schema_grammar, tool_use, without_void

TEXT: dict[str, Any] = {"type": "string"}
LIST = {"type": "array", "items": TEXT}
OBJECT = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"]}

HARMLESS: list[tuple[Any, dict[str, Any]]] = [
    *[(TEXT, {"format": name}) for name in ("password", "int32", "json-pointer", "x-y", "regex")],
    ({"type": ["string", "null"]}, {"format": "binary"}), ({}, {"format": "int64"}),
    *[({"type": "string"}, {"format": name}) for name in sorted(FORMATS)],
    ({"type": "integer"}, {"format": "int32"}), ({"type": "integer"}, {"uniqueItems": True}),
    *[(TEXT, {key: "x"}) for key in ("title", "description", "default", "$comment", "x-order",
                                     "contentMediaType", "contentEncoding", "example", "$id")],
    *[(TEXT, {key: True}) for key in ("deprecated", "readOnly", "writeOnly", "nullable")],
    (TEXT, {"examples": ["a"], "$dynamicAnchor": "a", "contentSchema": {"type": "object"}}),
    (LIST, {"uniqueItems": False}), (LIST, {"uniqueItems": True, "maxItems": 1}),
    (LIST, {"contains": {"type": "string"}, "minContains": 0}), (LIST, {"minContains": 2}),
    (LIST, {"unevaluatedItems": True}), (LIST, {"unevaluatedItems": {}}),
    (OBJECT, {"propertyNames": {"type": "string"}}), (OBJECT, {"propertyNames": True}),
    (OBJECT, {"propertyNames": {"title": "Key", "type": "string"}}),
    (OBJECT, {"minProperties": 1}), (OBJECT, {"unevaluatedProperties": True}),
    (OBJECT, {"maxProperties": 2, "additionalProperties": False}),
    (OBJECT, {"dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": []}}),
    (OBJECT, {"not": False}), (OBJECT, {"then": {"required": ["b"]}}),
    (OBJECT, {"if": {"required": ["b"]}, "then": True}),
    ({"type": "integer", "minimum": 0}, {"exclusiveMinimum": False}),
]  # fmt: skip
DEMANDS: list[tuple[Any, dict[str, Any], str]] = [
    (LIST, {"uniqueItems": True}, "uniqueItems"), (LIST, {"contains": True}, "contains"),
    (LIST, {"contains": {"const": "a"}, "minContains": 2}, "minContains"),
    (OBJECT, {"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    (OBJECT, {"propertyNames": {"type": "string", "maxLength": 3}}, "propertyNames"),
    (OBJECT, {"unevaluatedProperties": False}, "unevaluatedProperties"),
    (OBJECT, {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    (OBJECT, {"not": {"required": ["b"]}}, "not"), (OBJECT, {"minProperties": 2}, "maxProperties"),
    (OBJECT, {"if": {"required": ["b"]}, "then": {"minProperties": 9}}, "then"),
    ({"uniqueItems": True}, {}, "uniqueItems"), ({"$dynamicRef": "#a"}, {}, "dynamicRef"),
]  # fmt: skip


@cache
def grammars() -> Any:
    pytest.importorskip("torch")
    from pigou.runtime.structured_output import read_grammars

    return read_grammars(bundled_path(), 2560, frozenset({1}))


def inside(schema: Any) -> Any:
    """Put a schema where pydantic puts it, beside properties that are named like keywords."""
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "uniqueItems": TEXT, "format": {"enum": ["x"]}},
        "required": ["a", "uniqueItems", "format"],
        "$defs": {"A": {"anyOf": [schema, {"type": "null"}]}},
    }


def fails(schema: Any) -> str:
    try:
        grammars().compile(schema_grammar(schema, "response_format"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("base", "extra"), HARMLESS, ids=lambda value: json.dumps(value)[:50])
def test_a_keyword_that_allows_everything_makes_no_error(base: Any, extra: dict[str, Any]) -> None:
    assert not fails({**base, **extra})
    assert not fails(inside({**base, **extra}))


@pytest.mark.parametrize(("base", "extra", "name"), DEMANDS, ids=lambda value: str(value)[:40])
def test_a_keyword_that_is_not_honoured_is_refused_by_name(
    base: Any, extra: dict[str, Any], name: str
) -> None:
    assert name in fails({**base, **extra})
    assert name in fails(inside({**base, **extra}))


def test_the_schema_true_allows_any_json_and_false_is_refused() -> None:
    assert not fails(True)
    with pytest.raises(APIError, match="false"):
        schema_grammar(False, "response_format")


def test_names_of_properties_and_data_are_no_keywords() -> None:
    schema = inside({"const": {"format": "x", "uniqueItems": False, "not": False}})
    assert without_void(schema) == schema


def test_bounds_of_draft_4_are_kept() -> None:
    above = {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "exclusiveMaximum": False}
    assert without_void(above) == {"type": "integer", "exclusiveMinimum": 0}


def test_parameters_of_tools_are_read_alike() -> None:
    function = {"name": "f", "parameters": inside({**LIST, "uniqueItems": False})}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required",
            "tools": [{"type": "function", "function": function}]}  # fmt: skip
    use = tool_use(decode_generation(json.dumps(body).encode()))
    assert use is not None
    assert use.grammar is not None
    tool = json.loads(use.grammar.source)["$defs"]["tool0"]
    assert tool["properties"]["a"] == {"$ref": "#/$defs/tool0/$defs/A"}
    assert tool["additionalProperties"] is False
    assert "uniqueItems" in tool["properties"]
    grammars().compile(use.grammar)
