"""Grammars of requests are bounded, and JSON is compact unless somebody asks otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pigou.request import Grammar
from pigou.wire.errors import APIError
from pigou.wire.openai_requests import CompletionRequest, decode_generation
from pigou.wire.request_validation import check
from pigou.wire.structured_output import MAX_BYTES, MAX_CHOICES, MAX_DEPTH, grammar


def request(**fields: Any) -> CompletionRequest:
    return decode_generation(json.dumps({"prompt": "a", **fields}).encode())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a" * MAX_BYTES["choice"]]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * (MAX_BYTES["regex"] + 1)}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "é" * (MAX_BYTES["regex"] - 1)}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 65 + ")" * 65}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "a" * (MAX_BYTES["grammar"] + 1)}},
         "structured_outputs"),
        ({"structured_outputs": {"json": nested(MAX_DEPTH)}}, "structured_outputs"),
        ({"structured_outputs": {"json": json.dumps(nested(MAX_DEPTH))}}, "structured_outputs"),
        ({"structured_outputs": {"json": nested(MAX_DEPTH),
                                 "disable_additional_properties": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[" * 5000}}, "structured_outputs"),
        (schema_format(nested(MAX_DEPTH)), "response_format"),
        (schema_format({"enum": ["a" * 1000] * 600}), "response_format"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "a" * 257}},
         "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ",
                                 "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_costs_time_at_every_step_is_bounded_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(APIError) as refused:
        check(request(**fields))
    assert refused.value.status == 400
    assert refused.value.param == named
    assert named in refused.value.message


def test_what_is_at_the_bounds_is_taken() -> None:
    check(request(structured_outputs={"choice": [f"c{i}" for i in range(MAX_CHOICES)]}))
    check(request(structured_outputs={"json": nested(MAX_DEPTH // 2 - 1)}))
    check(request(stop=["a" * 1024] * 16, logit_bias={str(i): 1 for i in range(4096)}))


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize(
    ("said", "expected"), [(None, None), (True, False), (False, True)], ids=str
)
@pytest.mark.parametrize("way", ["json", "json_object", "response_format"])
def test_white_space_is_as_the_request_says_else_as_the_worker_says(
    flexible: bool, said: bool | None, expected: bool | None, way: str
) -> None:
    wanted: dict[str, Any] = {} if said is None else {"disable_any_whitespace": said}
    fields: dict[str, Any] = {"structured_outputs": wanted}
    if way == "response_format":
        fields |= schema_format({"type": "object"})
    else:
        wanted[way] = {"type": "object"} if way == "json" else True
    found = grammar(request(**fields), flexible)
    assert found is not None
    assert found.flexible == (flexible if expected is None else expected)


def test_a_pattern_of_white_space_and_closed_objects_reach_the_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    found = grammar(request(structured_outputs={"json": schema, "whitespace_pattern": " ?"}))
    assert found == Grammar("json_schema", json.dumps(schema, separators=(",", ":")), True, " ?")
    closed = grammar(
        request(structured_outputs={"json": schema, "disable_additional_properties": True})
    )
    assert closed is not None
    source = json.loads(closed.source)
    assert source["additionalProperties"] is False
    assert source["properties"]["a"]["additionalProperties"] is False
