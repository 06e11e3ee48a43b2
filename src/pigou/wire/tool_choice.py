"""`tools` and `tool_choice` of chat requests, and the grammar of a call that is demanded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pigou.sampling import Grammar
from pigou.wire.errors import APIError, bad_request
from pigou.wire.openai_requests import ChatRequest
from pigou.wire.structured_output import schema_grammar

MAX_TOOLS = 128
#: Most calls of one reply that a grammar makes.
MAX_CALLS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Below these, an object's other properties may stand in another branch.
_BRANCHES = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
#: What stands under these is data, in which "$ref" is no reference.
_DATA = ("const", "enum", "default", "examples")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools.

    Attributes:
        mode: what the model may or must do.
        functions: names of the functions.
        named: the function that must be called, of mode "named".
        grammar: of the output, where a call is demanded.
    """

    mode: Literal["auto", "required", "named"]
    functions: tuple[str, ...]
    named: str = ""
    grammar: Grammar | None = None


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Return how a request uses tools; None where it may call none.

    Raises:
        APIError: 400, tools or tool_choice are faulty.
    """
    if request.tool_choice == "none":
        return None
    functions = _functions(request.tools or [])
    mode, named = _mode(request.tool_choice, functions, bool(request.tools))
    if mode == "none":
        return None
    names = tuple(functions)
    if mode == "auto":
        return ToolUse("auto", names)
    if request.response_format is not None and request.response_format.type != "text":
        raise _conflict("response_format")
    if request.structured_outputs is not None:
        raise _conflict("structured_outputs")
    if mode == "named":
        grammar = schema_grammar(_parameters(functions[named], ""), "tools")
        return ToolUse("named", names, named, grammar)
    max_calls = 1 if request.parallel_tool_calls is False else MAX_CALLS
    return ToolUse("required", names, grammar=schema_grammar(_calls(functions, max_calls), "tools"))


def _functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions by name."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries; at most {MAX_TOOLS} work.", "tools")
    by_name: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if (kind := tool.get("type")) != "function":
            raise bad_request(
                f"{where}.type is {str(kind)[:40]!r}; tools of type function work.", "tools"
            )
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_request(
                f"{where}.function.name must have 1 to 64 letters, digits, '_', '-' or '.'.",
                "tools",
            )
        if name in by_name:
            raise bad_request(f"tools has the function {name!r} twice: keep one.", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(
                f"{where}.function.parameters must be a JSON schema (an object).", "tools"
            )
        by_name[name] = function
    return by_name


def _mode(choice: Any, functions: dict[str, Any], given: bool) -> tuple[str, str]:
    if choice is None:
        return ("auto" if given else "none"), ""
    if isinstance(choice, str) and choice in ("auto", "required"):
        if choice == "auto" and not given:
            return "none", ""
        if not given:
            raise bad_request(f"tool_choice is {choice!r}, and tools is missing.", "tool_choice")
        return choice, ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not name:
        raise bad_request(
            f"tool_choice is {str(choice)[:80]!r}; give none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}.',
            "tool_choice",
        )
    if name not in functions:
        raise bad_request(
            f"tool_choice names the function {str(name)[:80]!r}, which tools lacks.", "tool_choice"
        )
    return "named", str(name)


def _calls(functions: dict[str, dict[str, Any]], max_calls: int) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    items, definitions = [], {}
    for number, (name, function) in enumerate(functions.items()):
        definitions[f"tool{number}"] = _parameters(function, f"/$defs/tool{number}")
        items.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": {"$ref": f"#/$defs/tool{number}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {
        "$defs": definitions,
        "type": "array",
        "items": {"anyOf": items},
        "minItems": 1,
        "maxItems": max_calls,
    }


def _parameters(function: dict[str, Any], root: str) -> dict[str, Any]:
    """Return a function's parameters as a schema whose own root is at `root` (a JSON pointer).

    Objects that name their properties have no others, as in OpenAI's strict mode.
    """
    given = function.get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema: dict[str, Any] = _prepared(given, root, closes=True)
    except RecursionError:
        raise bad_request("tools has a schema that is nested too deeply: flatten it.",
                          "tools") from None  # fmt: skip
    for name in ("$schema", "$id"):
        schema.pop(name, None)
    return {"type": "object", **schema} if "$ref" not in schema else schema


def _prepared(schema: Any, root: str, *, closes: bool) -> Any:
    """Move references to `root`, and close objects that are not parts of a combination."""
    if isinstance(schema, list):
        return [_prepared(item, root, closes=closes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    prepared: dict[str, Any] = {}
    combined = any(name in schema for name in _BRANCHES)
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            prepared[key] = f"#{root}{value[1:]}"
        elif key in _DATA:
            prepared[key] = value
        elif key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            prepared[key] = {
                name: _prepared(inner, root, closes=closes) for name, inner in value.items()
            }
        else:
            prepared[key] = _prepared(value, root, closes=closes and key not in _BRANCHES)
    own = isinstance(schema.get("properties"), dict)
    if closes and own and not combined and "patternProperties" not in schema:
        prepared.setdefault("additionalProperties", False)
    return prepared


def _conflict(field: str) -> APIError:
    return bad_request(
        f"tool_choice demands a call, and {field} demands other output; keep one.", "tool_choice"
    )
