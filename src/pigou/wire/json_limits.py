"""Bounds of what one request may hold; more is answered 400, with the field, count and bound."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.wire.errors import bad_field, bad_request, check_count, decoded

MAX_DEPTH = 128
MAX_FIELDS = 1024
MAX_FIELD_BYTES = 1024 * 1024
MAX_VALUES = 200_000
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_TOKEN_IDS = 2**20
MAX_TOOLS = 1024
#: Maximum tokens in `logit_bias` and `stop_token_ids`: each costs time at every step.
MAX_BIASED = 4096
MAX_STOP_TOKENS = 1024
#: Bytes up to which a body is decoded on the event loop: well under a millisecond of work.
SMALL = 64 * 1024

_IDS = ("prompt", "prompt_token_ids", "tokens")
_LONG = (*_IDS, "messages")
#: Most items of a list or an object, by field, and the remedy.
_ITEMS = {
    "messages": (MAX_MESSAGES, "leave out the oldest, or join them"),
    "logit_bias": (MAX_BIASED, "leave out those that matter least"),
    "stop_token_ids": (MAX_STOP_TOKENS, "leave some out"),
    **dict.fromkeys(
        ("tools", "functions"), (MAX_TOOLS, "leave out those that the chat does not need")
    ),
}
_SHORTEN = "work: shorten it"
_SEVERAL = "work in one request: send several requests"
#: How a list of texts begins.
_QUOTE = ord('"')
_TEXTS = re.compile(rb'\s*\[\s*"')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Counts of a JSON text."""

    values: int  # members and items of all objects and lists, by commas
    items: int
    depth: int


@kernel
def _measure(data: NDArray[np.uint8], out: NDArray[np.int64]) -> None:
    """Count commas, commas at depth 1, and the greatest depth, outside strings."""
    commas, outer, depth, deepest = 0, 0, 0, 0
    quoted, escaped = False, False
    for i in range(data.shape[0]):
        byte = data[i]
        if quoted:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                quoted = False
        elif byte == 0x22:
            quoted = True
        elif byte == 0x2C:
            commas += 1
            if depth == 1:
                outer += 1
        elif byte | 0x20 == 0x7B:  # { or [
            depth += 1
            deepest = max(deepest, depth)
        elif byte | 0x20 == 0x7D:  # } or ]
            depth -= 1
    out[0], out[1], out[2] = commas, outer, deepest


def measure(data: bytes | bytearray | memoryview) -> JsonSize:
    """Return the shape of a JSON text, valid or not; does not hold the interpreter lock."""
    out = np.zeros(3, dtype=np.int64)
    _measure(np.frombuffer(data, dtype=np.uint8), out)
    return JsonSize(int(out[0]) + 1, int(out[1]) + 1, int(out[2]))


def is_deep(data: bytes | bytearray) -> bool:
    """Whether a JSON text is nested more deeply than `MAX_DEPTH`: many clients fail on such."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    return measure(data).depth > MAX_DEPTH


def read_fields(data: bytes, context: int = 0) -> dict[str, msgspec.Raw]:
    """Return a body's encoded fields, within bounds for `context` tokens; APIError 400."""
    count = _check_body(data)
    fields = decoded(_fields, data)
    if count > max(1, len(fields)):  # fields beyond `fields` would be decoded, too
        raise bad_request(
            f"The body has {count} fields of {len(fields)} names; send each field once."
        )
    _check_count(len(fields))
    _check_fields(fields, context)
    return fields


def _check_body(data: bytes) -> int:
    """Check a whole body before it is decoded; return its fields' number, 0 for a small one."""
    if len(data) <= SMALL and data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return 0
    shape = measure(data)
    if shape.depth > MAX_DEPTH:
        raise bad_request(
            f"The body is nested too deeply: {shape.depth} levels; at most {MAX_DEPTH} work: "
            "send it flatter."
        )
    _check_count(shape.items)
    return shape.items if len(data) > SMALL else 0


def _check_count(count: int) -> None:
    if count > MAX_FIELDS:
        raise bad_request(
            f"The body has {count} fields; at most {MAX_FIELDS} work: leave some out."
        )


def _check_fields(fields: dict[str, msgspec.Raw], context: int) -> None:
    cut = "truncate_prompt_tokens" in fields
    for name, raw in fields.items():
        view, shown = memoryview(raw), name[:80]
        if name not in _LONG:
            check_count(shown, len(view), MAX_FIELD_BYTES, "bytes", _SHORTEN)
        if len(view) < 2 * MAX_TOOLS or view[0] == _QUOTE:
            continue  # short enough for all bounds but the model's context, or one text
        shape = measure(view)
        if name in _IDS:
            _check_ids(name, view, shape, 0 if cut else context)
            continue
        max_items, remedy = _ITEMS.get(name, (MAX_VALUES, "shorten it"))
        check_count(shown, shape.items, max_items, "entries", f"work: {remedy}")
        check_count(shown, shape.values, MAX_VALUES, "values", _SHORTEN)


def _check_ids(name: str, view: memoryview, shape: JsonSize, context: int) -> None:
    if shape.depth == 0:
        return
    if shape.depth > 1 or _TEXTS.match(view) is not None:
        check_count(name, shape.items, MAX_PROMPTS, "prompts", _SEVERAL)
    elif context and shape.items > context:
        raise bad_field(
            name,
            f"has {shape.items} token ids; the model's context is {context} tokens: shorten it.",
        )
    check_count(name, shape.values, MAX_TOKEN_IDS, "token ids", _SEVERAL)


def warm_up() -> None:
    """Compile and load the kernel."""
    measure(b'{"a":[1]}')
