"""Bodies that break one bound each, and what the refusal must name: for gateway and worker."""

from __future__ import annotations

import json
from typing import Any

from pigou.wire import json_limits

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_MESSAGE = {"role": "user", "content": "a"}
_HI = {"messages": [_MESSAGE]}
_TOOL = {"type": "function", "function": {"name": "f"}}
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}]


def _deep(levels: int) -> bytes:
    return b'{"prompt":"a","stop":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def _text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "a", **fields}


#: By name: route, body, field, and what the message must say.
CASES: dict[str, tuple[str, dict[str, Any] | bytes, str | None, tuple[str, ...]]] = {
    "depth": (TEXT, _deep(json_limits.MAX_DEPTH + 1), None, ("129 levels", "128", "flatter")),
    "fields": (*_text(**{f"f{i}": 0 for i in range(json_limits.MAX_FIELDS)}), None,
               ("1025 fields", "1024", "leave some out")),
    "field bytes": (*_text(user="a" * json_limits.MAX_FIELD_BYTES), "user",
                    ("1048578 bytes", "1048576", "shorten it")),
    "values": (CHAT, {"messages": _PARTS * 1001}, "messages",
               ("201", "200000", "shorten it")),
    "messages": (CHAT, {"messages": [_MESSAGE] * (json_limits.MAX_MESSAGES + 1)}, "messages",
                 ("10001 entries", "10000", "leave out the oldest")),
    "prompts": (TEXT, {"prompt": ["a"] * (json_limits.MAX_PROMPTS + 1)}, "prompt",
                ("1025 prompts", "1024", "several requests")),
    "prompts of ids": (TEXT, {"prompt": [[5]] * (json_limits.MAX_PROMPTS + 1)}, "prompt",
                       ("1025 prompts", "1024", "several requests")),
    "ids": (TEXT, {"prompt": [[5] * 1025] * 1024}, "prompt",
            ("1049600 token ids", "1048576", "several requests")),
    "logit_bias": (*_text(logit_bias={str(i): 0 for i in range(json_limits.MAX_BIASED + 1)}),
                   "logit_bias", ("4097 entries", "4096", "matter least")),
    "stop_token_ids": (*_text(stop_token_ids=[5] * (json_limits.MAX_STOP_TOKENS + 1)),
                       "stop_token_ids", ("1025 entries", "1024", "leave some out")),
    "tools": (CHAT, {**_HI, "tools": [_TOOL] * (json_limits.MAX_TOOLS + 1)}, "tools",
              ("1025 entries", "1024", "does not need")),
    "a field twice": (TEXT, b'{"prompt":"a","logit_bias":{%b},"logit_bias":{}}' % b",".join(
        b'"%d":0' % i for i in range(50_000)), None, ("3 fields", "2 names", "once")),
}  # fmt: skip


def encode(body: dict[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
