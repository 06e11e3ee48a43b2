"""Laws of the shape of a JSON text, and of the bounds on a body's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.wire import json_limits
from pigou.wire.errors import APIError
from pigou.wire.json_limits import SMALL, is_deep, measure, read_fields

#: What a counter of bytes may take for structure, though it is text.
_texts = st.text() | st.text(alphabet='{}[],:"\\\u00e9\U0001f600 \n', max_size=20)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_texts, inner, max_size=5),
    max_leaves=40,
)


def commas(value: Any) -> int:
    """Count the commas between the members and items of a document."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(0, len(value) - 1) + sum(map(commas, inner))


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


def encoded(value: Any, indent: int | None, ascii: bool) -> bytes:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    return text.encode("utf-8", "surrogatepass")


def counted(data: bytes) -> tuple[int, int, int]:
    """Count commas, those at depth 1, and depth, with sets of indices in place of a state."""
    total = outer = now = deepest = 0
    i = 0
    while i < len(data):
        match data[i : i + 1]:
            case b'"':
                i += 1
                while i < len(data) and data[i : i + 1] != b'"':
                    i += 2 if data[i : i + 1] == b"\\" else 1
            case b",":
                total, outer = total + 1, outer + (now == 1)
            case b"{" | b"[":
                now += 1
                deepest = max(deepest, now)
            case b"}" | b"]":
                now -= 1
        i += 1
    return total + 1, outer + 1, deepest


@given(_values, st.none() | st.integers(0, 3), st.booleans())
def test_the_shape_of_a_text_is_that_of_its_document(
    value: Any, indent: int | None, ascii: bool
) -> None:
    shape = measure(encoded(value, indent, ascii))
    outer = len(value) if isinstance(value, dict | list) else 1
    assert (shape.values, shape.items, shape.depth) == (
        commas(value) + 1, max(1, outer), depth(value),
    )  # fmt: skip


@given(_values, st.floats(0, 1), st.booleans())
def test_a_text_that_is_cut_off_counts_as_far_as_it_goes(
    value: Any, share: float, ascii: bool
) -> None:
    whole = encoded(value, None, ascii)
    part = whole[: round(share * len(whole))]
    shape, limit = measure(part), measure(whole)
    assert (shape.values, shape.items, shape.depth) == counted(part)
    assert shape.values <= limit.values
    assert shape.depth <= limit.depth


@given(st.binary() | st.text(alphabet='{}[],"\\x ').map(str.encode))
def test_bytes_that_are_no_json_have_a_shape_too(data: bytes) -> None:
    shape = measure(data)
    assert (shape.values, shape.items, shape.depth) == counted(data)
    assert measure(memoryview(data)) == shape


@given(_values)
def test_only_what_is_nested_too_deeply_is_deep(value: Any) -> None:
    assert not is_deep(json.dumps([value] * 40).encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_deep_texts_are_deep_and_braces_in_strings_are_not(opening: bytes) -> None:
    levels = opening.count(b"[") + opening.count(b"{")
    fitting = opening * (json_limits.MAX_DEPTH // levels)
    assert not is_deep(fitting)
    assert is_deep(fitting + opening)
    assert not is_deep(json.dumps("[{" * 1000).encode())


def refused(body: bytes, context: int = 0) -> APIError:
    with pytest.raises(APIError) as raised:
        read_fields(body, context)
    assert raised.value.status == 400
    return raised.value


def test_a_field_that_is_named_twice_is_refused_in_a_large_body() -> None:
    """Only the last would be checked, and all would be decoded."""
    entries = json.dumps({str(i): 0 for i in range(100_000)})
    body = f'{{"prompt":"a","logit_bias":{entries},"logit_bias":{{}}}}'.encode()
    assert "3 fields of 2 names" in refused(body).message


def test_a_large_body_of_white_space_alone_is_no_fault() -> None:
    assert read_fields(b"{" + b" " * SMALL + b"}") == {}
    assert list(read_fields(b'{"a":1' + b" " * SMALL + b"}")) == ["a"]


@pytest.mark.parametrize("count", [json_limits.MAX_FIELDS, json_limits.MAX_FIELDS + 1])
@pytest.mark.parametrize("padding", [0, SMALL])
def test_fields_are_counted_in_bodies_of_any_size(count: int, padding: int) -> None:
    body = json.dumps({f"f{i}": i for i in range(count)}).encode() + b" " * padding
    if count <= json_limits.MAX_FIELDS:
        assert len(read_fields(body)) == count
    else:
        assert f"{count} fields" in refused(body).message


@pytest.mark.parametrize("space", ["", " ", "\n" * 100])
def test_white_space_before_the_first_prompt_hides_no_prompts(space: str) -> None:
    prompts = ",".join(['"a"'] * (json_limits.MAX_PROMPTS + 1))
    body = f'{{"prompt":[{space}{prompts}]}}'.encode()
    assert f"{json_limits.MAX_PROMPTS + 1} prompts" in refused(body, context=100_000).message


def test_token_ids_are_held_against_the_context_unless_they_are_to_be_cut() -> None:
    ids = {"prompt": [1] * 2000}
    assert "2000 token ids" in refused(json.dumps(ids).encode(), context=1999).message
    assert read_fields(json.dumps(ids).encode(), context=2000)
    assert read_fields(json.dumps(ids | {"truncate_prompt_tokens": 5}).encode(), context=100)
