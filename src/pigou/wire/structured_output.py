"""From `response_format` and `structured_outputs` to the grammar that the output must match."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.sampling import Grammar
from pigou.wire.errors import APIError, bad_request
from pigou.wire.openai_requests import GenerationRequest, StructuredOutputs

#: Most bytes of a grammar's source, by its kind.
MAX_BYTES = {"json_schema": 512 * 1024, "choice": 512 * 1024, "regex": 32 * 1024,
             "grammar": 128 * 1024}  # fmt: skip
#: Most strings of `choice`.
MAX_CHOICES = 10_000
#: Deepest nesting of a schema, and of brackets in a regular expression or a Lark grammar.
MAX_DEPTH = 64
MAX_PATTERN = 256

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPENS, _CLOSES = "([{", ")]}"


def grammar(request: GenerationRequest, flexible: bool = False) -> Grammar | None:
    """Return what the output must match.

    Args:
        request: of a client.
        flexible: JSON may have white space between its parts, where the request does not say.

    Raises:
        APIError: 400, that is said badly, or is too large.
    """
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
            raise bad_request(
                "response_format.json_schema.schema is missing: json_schema needs one.",
                "response_format",
            )
        return _json_grammar("response_format", form.json_schema.schema, wanted, flexible)
    if wanted is None:
        return None
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise bad_request(
            f"structured_outputs has {named}; give exactly one of json, regex, choice, grammar, "
            "json_object.",
            "structured_outputs",
        )
    return _structured(given[0], getattr(wanted, given[0]), wanted, flexible)


def schema_grammar(schema: Any, field: str, flexible: bool = False) -> Grammar:
    """Return the grammar of a JSON schema; raise `APIError` 400 that names `field` if too large."""
    if _too_deep(schema):
        raise bad_request(
            f"{field} has a schema that is nested deeper than {MAX_DEPTH}: flatten it.", field
        )
    return _bounded(Grammar("json_schema", _text(schema), flexible), field)


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
            raise bad_request(
                "structured_outputs.choice must hold at least one string, none of them empty.",
                field,
            )
        if len(value) > MAX_CHOICES:
            raise bad_request(
                f"structured_outputs.choice has {len(value)} strings; at most {MAX_CHOICES} work.",
                field,
            )
        return _bounded(Grammar("choice", _text(value)), field)
    if name in ("regex", "grammar"):
        bounded = _bounded(Grammar("regex" if name == "regex" else "grammar", value), field)
        if _brackets(value) > MAX_DEPTH:
            raise bad_request(
                f"structured_outputs.{name} has brackets nested deeper than {MAX_DEPTH}: flatten "
                "it.",
                field,
            )
        return bounded
    schema = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value.encode())
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise bad_request(
                "structured_outputs.json is not JSON: send a schema.", field
            ) from None
    if not isinstance(schema, dict | bool):
        raise bad_request("structured_outputs.json must be a JSON schema (an object).", field)
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
            if _too_deep(schema):
                return schema_grammar(schema, field)
            schema = _closed(schema)
    if pattern is None:
        if schema is None:
            return Grammar("json_object", "", flexible)
        return schema_grammar(schema, field, flexible)
    if wanted is not None and wanted.disable_any_whitespace:
        raise bad_request(
            "structured_outputs has whitespace_pattern and disable_any_whitespace; keep one.",
            "structured_outputs",
        )
    if len(pattern) > MAX_PATTERN:
        raise bad_request(
            f"structured_outputs.whitespace_pattern has {len(pattern)} characters; at most "
            f"{MAX_PATTERN} work.",
            "structured_outputs",
        )
    base = Grammar("json_object") if schema is None else schema_grammar(schema, field)
    return Grammar(base.kind, base.source, True, pattern)


def _bounded(output_grammar: Grammar, field: str) -> Grammar:
    max_bytes = MAX_BYTES[output_grammar.kind]
    # A character has at least one byte, so that huge texts are not encoded to be measured.
    size = len(output_grammar.source)
    if size <= max_bytes:
        size = len(output_grammar.source.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise bad_request(
            f"{field} has a {output_grammar.kind} of {size} bytes; at most {max_bytes} work.", field
        )
    return output_grammar


def _too_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


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


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, as vLLM does."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    names_some = "properties" in schema or schema.get("type") == "object"
    if names_some and "additionalProperties" not in schema and "patternProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise APIError(400, f"the grammar cannot be written as JSON: {error}.") from None
