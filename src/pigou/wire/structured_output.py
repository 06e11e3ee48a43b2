"""Output grammars of requests, from structured outputs and tools.

Keywords of JSON schemas that allow everything are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from pigou.request import Grammar
from pigou.small_file import is_deep
from pigou.wire.errors import APIError, bad_field, bad_kind, bad_request, check_count
from pigou.wire.openai_requests import ChatRequest, GenerationRequest, StructuredOutputs

Schema: TypeAlias = dict[str, Any]
#: Makes another schema of one whose inner ones are changed already; its second argument says
#: whether it is a part of a combination.
Change: TypeAlias = Callable[[Schema, bool], Schema]

#: Below these, an object's other properties may stand in another branch.
BRANCHES = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
#: Values of these are data, not schemas.
_DATA = ("const", "enum", "default", "examples", "example", "required")
#: Maps of names to schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
          "dependencies")  # fmt: skip
#: Formats that grammars keep. To JSON Schema a format is a note, so that others are left out.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: Keywords that apply to one type only.
_TYPES = {
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "unevaluatedItems": "array", "propertyNames": "object", "dependentRequired": "object",
    "dependentSchemas": "object", "dependencies": "object", "minProperties": "object",
    "maxProperties": "object", "unevaluatedProperties": "object", "format": "string",
}  # fmt: skip
_NOTES = {"title", "description", "default", "examples", "example", "deprecated", "readOnly",
          "writeOnly", "$comment"}  # fmt: skip
#: Maximum bytes of a grammar's source, by kind.
MAX_BYTES = {"json_schema": 512 * 1024, "choice": 512 * 1024, "regex": 32 * 1024,
             "grammar": 128 * 1024}  # fmt: skip
#: Maximum strings of `choice`.
MAX_CHOICES = 10_000
#: Maximum nesting of a schema, and of brackets in a regular expression or Lark grammar.
MAX_DEPTH = 64
MAX_PATTERN = 256
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPENS, _CLOSES = "([{", ")]}"
MAX_TOOLS = 128
#: Maximum tool calls of a reply under a grammar.
MAX_CALLS = 16
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def rewrite(schema: Any, change: Change, combined: bool = False) -> Any:
    """Return a schema with a change applied to each subschema."""
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


def grammar(request: GenerationRequest, flexible: bool = False) -> Grammar | None:
    """Return the output grammar; JSON may have white space if `flexible`."""
    wanted, form = request.structured_outputs, request.response_format
    given = _given(wanted)
    if form is not None and form.type != "text":
        if given:
            raise bad_request(
                "response_format and structured_outputs are both given; keep one.",
                "structured_outputs",
            )
        if form.type == "json_object":
            return _json_grammar("json_object", None, wanted, flexible)
        if form.json_schema is None or form.json_schema.schema is None:
            raise bad_field(
                "response_format.json_schema.schema", "is missing: json_schema needs one."
            )
        return _json_grammar("response_format", form.json_schema.schema, wanted, flexible)
    if wanted is None:
        return None
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise bad_field(
            "structured_outputs",
            f"has {named}; give exactly one of json, regex, choice, grammar, json_object.",
        )
    return _structured(given[0], getattr(wanted, given[0]), wanted, flexible)


def schema_grammar(schema: Any, field: str, flexible: bool = False) -> Grammar:
    """Return the grammar of a JSON schema; raise `APIError` 400 that names `field` if too large."""
    if is_deep(schema, MAX_DEPTH):
        raise bad_field(field, f"has a schema that is nested deeper than {MAX_DEPTH}: flatten it.")
    if schema is False:
        raise bad_field(field, "has the schema false, which allows no output.")
    try:
        source = "{}" if schema is True else _text(without_void(schema))
    except TypeError:
        raise bad_field(
            field, "has a schema whose minProperties or maxProperties is no number."
        ) from None
    return _bounded(Grammar("json_schema", source, flexible), field)


def _given(wanted: StructuredOutputs | None) -> list[str]:
    if wanted is None:
        return []
    return [name for name in _KINDS if getattr(wanted, name) not in (None, False)]


def _structured(name: str, value: Any, wanted: StructuredOutputs, flexible: bool) -> Grammar:
    field = "structured_outputs"
    if name == "json_object":
        return _json_grammar("json_object", None, wanted, flexible)
    if name == "choice":
        if not value or "" in value:
            raise bad_field(
                "structured_outputs.choice", "must hold at least one string, none of them empty."
            )
        check_count("structured_outputs.choice", len(value), MAX_CHOICES, "strings")
        return _bounded(Grammar("choice", _text(value)), field)
    if name in ("regex", "grammar"):
        bounded = _bounded(Grammar("regex" if name == "regex" else "grammar", value), field)
        if _brackets(value) > MAX_DEPTH:
            raise bad_field(
                f"structured_outputs.{name}",
                f"has brackets nested deeper than {MAX_DEPTH}: flatten it.",
            )
        return bounded
    schema = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value.encode())
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise bad_field("structured_outputs.json", "is not JSON: send a schema.") from None
    if not isinstance(schema, dict | bool):
        raise bad_field("structured_outputs.json", "must be a JSON schema (an object).")
    return _json_grammar(field, schema, wanted, flexible)


def _json_grammar(
    field: str, schema: Any, wanted: StructuredOutputs | None, flexible: bool
) -> Grammar:
    """Return the grammar of JSON, written as the request says; without a schema, of any object."""
    pattern = None
    if wanted is not None:
        if wanted.disable_any_whitespace is not None:
            flexible = not wanted.disable_any_whitespace
        pattern = wanted.whitespace_pattern
        if wanted.disable_additional_properties and schema is not None:
            if is_deep(schema, MAX_DEPTH):
                return schema_grammar(schema, field)
            schema = rewrite(schema, _closed)
    if pattern is None:
        if schema is None:
            return Grammar("json_object", "", flexible)
        return schema_grammar(schema, field, flexible)
    if wanted is not None and wanted.disable_any_whitespace:
        raise bad_field(
            "structured_outputs", "has whitespace_pattern and disable_any_whitespace; keep one."
        )
    check_count("structured_outputs.whitespace_pattern", len(pattern), MAX_PATTERN, "characters")
    base = Grammar("json_object") if schema is None else schema_grammar(schema, field)
    return Grammar(base.kind, base.source, True, pattern)


def _bounded(output_grammar: Grammar, field: str) -> Grammar:
    max_bytes = MAX_BYTES[output_grammar.kind]
    # A character has at least one byte, so that huge texts are not encoded to be measured.
    size = len(output_grammar.source)
    if size <= max_bytes:
        size = len(output_grammar.source.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise bad_field(
            field, f"has a {output_grammar.kind} of {size} bytes; at most {max_bytes} work."
        )
    return output_grammar


def _brackets(text: str) -> int:
    """Return how deep brackets are nested; quoted and escaped ones count, which errs upwards."""
    depth = deepest = 0
    for char in text:
        if char in _OPENS:
            depth += 1
            deepest = max(deepest, depth)
        elif char in _CLOSES:
            depth = max(0, depth - 1)
    return deepest


def _closed(schema: dict[str, Any], _combined: bool) -> dict[str, Any]:
    """Close an object to properties that its schema does not name, as vLLM does."""
    names_some = "properties" in schema or schema.get("type") == "object"
    if names_some and "additionalProperties" not in schema and "patternProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return schema


def _text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise APIError(400, f"the grammar cannot be written as JSON: {error}.") from None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools."""

    mode: Literal["auto", "required", "named"]  # optional, any function, or one function
    functions: Mapping[str, Any]  # by name
    named: str = ""  # required function in mode "named"
    grammar: Grammar | None = None


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Return how a request uses tools; None where it may call none. Raises APIError."""
    if request.tool_choice == "none":
        return None
    functions = _functions(request.tools or [])
    mode, named = _mode(request.tool_choice, functions, bool(request.tools))
    if mode in ("auto", "none"):
        return ToolUse("auto", functions) if mode == "auto" else None
    if request.response_format is not None and request.response_format.type != "text":
        raise _conflict("response_format")
    if request.structured_outputs is not None:
        raise _conflict("structured_outputs")
    if mode == "named":
        grammar = schema_grammar(_parameters(functions[named], ""), "tools")
        return ToolUse("named", functions, named, grammar)
    max_calls = 1 if request.parallel_tool_calls is False else MAX_CALLS
    return ToolUse(
        "required", functions, grammar=schema_grammar(_calls(functions, max_calls), "tools")
    )


def _functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    check_count("tools", len(tools), MAX_TOOLS, "entries")
    by_name: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if (kind := tool.get("type")) != "function":
            raise bad_kind(f"{where}.type", kind, "tools of type function work")
        function = _object(tool.get("function"))
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise bad_field(
                f"{where}.function.name", "must have 1 to 64 letters, digits, '_', '-' or '.'."
            )
        if name in by_name:
            raise bad_field("tools", f"has the function {name!r} twice: keep one.")
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_field(f"{where}.function.parameters", "must be a JSON schema (an object).")
        by_name[name] = function
    return by_name


def _mode(choice: Any, functions: dict[str, Any], given: bool) -> tuple[str, str]:
    if choice is None or choice == "auto":
        return ("auto" if given else "none"), ""
    if choice == "required":
        if not given:
            raise bad_field("tool_choice", "is 'required', and tools is missing.")
        return "required", ""
    name = _object(_object(choice).get("function")).get("name")
    if _object(choice).get("type") != "function" or not name:
        raise bad_field(
            "tool_choice",
            f"is {str(choice)[:80]!r}; give none, auto, required, or the name of one of tools.",
        )
    if name not in functions:
        raise bad_field("tool_choice", f"names the function {str(name)[:80]!r}, which tools lacks.")
    return "named", str(name)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _calls(functions: dict[str, dict[str, Any]], max_calls: int) -> dict[str, Any]:
    items, definitions = [], {}
    for number, (name, function) in enumerate(functions.items()):
        definitions[f"tool{number}"] = _parameters(function, f"/$defs/tool{number}")
        fields = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{number}"}}
        items.append({"type": "object", "properties": fields, "required": [*fields],
                      "additionalProperties": False})  # fmt: skip
    return {"$defs": definitions, "type": "array", "items": {"anyOf": items}, "minItems": 1,
            "maxItems": max_calls}  # fmt: skip


def _parameters(function: dict[str, Any], root: str) -> dict[str, Any]:
    """Return a function's parameters as a schema, its root at a JSON pointer, closed if strict."""
    given = function.get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema: dict[str, Any] = rewrite(given, partial(_prepared, root))
    except RecursionError:
        raise bad_field("tools", "has a schema that is nested too deeply: flatten it.") from None
    for name in ("$schema", "$id"):
        schema.pop(name, None)
    return {"type": "object", **schema} if "$ref" not in schema else schema


def _prepared(root: str, schema: dict[str, Any], combined: bool) -> dict[str, Any]:
    """Move references to `root`, and close objects that are not parts of a combination."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        schema = {**schema, "$ref": f"#{root}{reference[1:]}"}
    combined = combined or any(name in schema for name in BRANCHES)
    own = isinstance(schema.get("properties"), dict)
    if own and not combined and "patternProperties" not in schema:
        return {"additionalProperties": False, **schema}
    return schema


def _conflict(field: str) -> APIError:
    return bad_field("tool_choice", f"demands a call, and {field} demands other output; keep one.")
