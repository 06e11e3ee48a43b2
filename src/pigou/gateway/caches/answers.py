"""Exact answers: which requests are cacheable, their canonical form, and replies replayed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pigou.gateway.caches.layers import SAMPLED, AnswerLookup, CacheControl, CacheLayer, Caches
from pigou.gateway.request import GatewayRun, ParsedRequest
from pigou.kv.manifest import Bound
from pigou.kv.tenure import Tenure
from pigou.wire.sse import DONE, frame

#: Fields that do not change an answer.
_IRRELEVANT = frozenset({
    "stream", "stream_options", "request_id", "priority", "deadline_ms", "cache_salt", "user",
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "return_token_ids",
})  # fmt: skip
#: Fields whose replies are not replayed in both forms.
_NOT_REPLAYED = ("prompt_logprobs", "echo")
#: Ends of choices that are whole.
_WHOLE = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
#: Parts of a delta that are joined; others are replaced.
_CONCATENATED = frozenset(
    {"content", "reasoning", "reasoning_content", "refusal", "arguments", "text"}
)
_PIECES = re.compile(r"(?:\S*\s*){1,8}")


class AnswerCache:
    """Finds and stores whole replies; one of several equal requests is computed."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._flights: dict[tuple[Bound, bytes], asyncio.Future[None]] = {}

    def ask(self, run: GatewayRun, tenure: Tenure, control: CacheControl) -> AnswerLookup | None:
        """Return a request's place under its whole tenure; None if its answer is not cacheable."""
        parsed, options = run.parsed, run.parsed.fields.stream_options
        raws = [parsed.body[name] for name in _NOT_REPLAYED if name in parsed.body]
        if (
            not (is_repeatable(parsed) or SAMPLED in control.wants)
            or parsed.wants_ids
            or any(msgspec.json.decode(raw) for raw in raws)
            or (options is not None and options.continuous_usage_stats)
        ):
            return None
        return self.lookup(run, tenure, control)

    def lookup(self, run: GatewayRun, tenure: Tenure, control: CacheControl) -> AnswerLookup:
        """Return the place of any request, also of one whose answer is not stored."""
        bound = self._caches.bind(CacheLayer.ANSWER, tenure)
        return AnswerLookup(bound, canonical(run.parsed), control, time.monotonic())

    def find(self, lookup: AnswerLookup) -> bytes | None:
        """Return a whole reply as it was stored; None on a miss."""
        if not lookup.control.reads:
            return None
        age = lookup.control.max_age_s
        cached: bytes | None = self._caches.get(
            CacheLayer.ANSWER, lookup.bound, lookup.content, age
        )
        if cached is not None:
            lookup.status = "hit"
        return cached

    async def lead(self, lookup: AnswerLookup) -> bool:
        """Wait for an equal request under way; True if there was none, so compute this one."""
        flight = self._flights.get((lookup.bound, lookup.content))
        if flight is None or not (lookup.control.reads and lookup.control.stores):
            return True
        await asyncio.wait([flight])
        return False

    @contextmanager
    def single_flight(self, lookup: AnswerLookup | None) -> Iterator[None]:
        """Let equal requests wait until this one is over (context)."""
        key = None if lookup is None else (lookup.bound, lookup.content)
        if lookup is None or key is None or key in self._flights or not lookup.control.stores:
            yield
            return
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._flights[key]
            flight.set_result(None)

    def store(
        self, lookup: AnswerLookup, run: GatewayRun, reply: bytes | None = None
    ) -> bytes | None:
        """Store and return a whole reply, or the recorded stream; None if it is not whole."""
        if not lookup.control.stores or canonical(run.parsed) != lookup.content:
            return None
        stats = run.stats
        if reply is None:
            value = merged(b"".join(lookup.frames), chat=run.parsed.chat)
            if value is None or not stats.prompt_tokens:
                return None
            value["usage"] = {
                "prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.completion_tokens,
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            }  # fmt: skip
        else:
            value = msgspec.json.decode(reply)
            value.pop("kv_transfer_params", None)
        choices = value.get("choices") or [{}]
        if any(choice.get("finish_reason") not in _WHOLE for choice in choices):
            return None
        data = msgspec.json.encode(value)
        cost_s = time.monotonic() - lookup.began
        size = len(data)
        layer, bound = CacheLayer.ANSWER, lookup.bound
        is_stored = self._caches.put(layer, bound, lookup.content, data, size, cost_s)
        return data if is_stored else None


def is_repeatable(parsed: ParsedRequest) -> bool:
    """True if the same request gives the same answer: greedy, or with a seed."""
    return parsed.fields.temperature == 0 or parsed.seeded


def canonical(parsed: ParsedRequest) -> bytes:
    """Return what an answer depends on within a tenure, in one form for equal requests."""
    body = {
        name: _integral(msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value)
        for name, value in parsed.body.items()
        if name not in _IRRELEVANT
    }
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("n") == 1:
        del body["n"]
    return parsed.path.encode() + msgspec.json.encode(body, order="deterministic")


def _integral(value: Any) -> Any:
    """Return 0 for 0.0, which JSON writes in both ways."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# --- replies ------------------------------------------------------------------------------------


def whole(reply: bytes, run: GatewayRun) -> bytes:
    """Return a stored reply as the answer to this request; its prompt counts as cached."""
    return msgspec.json.encode(_renewed(reply, run))


def reply_id(run: GatewayRun) -> str:
    """Return the id of a request's reply."""
    return f"{'chatcmpl' if run.parsed.chat else 'cmpl'}-{run.parsed.wire_id}"


def _renewed(reply: bytes, run: GatewayRun) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(reply)
    value["id"] = reply_id(run)
    value["created"] = int(time.time())
    if usage := value.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        usage["prompt_tokens_details"] = details | {"cached_tokens": usage["prompt_tokens"]}
        run.stats.add(usage["prompt_tokens"], usage["completion_tokens"])
    return value


def chunks(reply: bytes, run: GatewayRun) -> bytes:
    """Return a stored reply as the frames of a stream."""
    value = _renewed(reply, run)
    chat, usage = run.parsed.chat, value.pop("usage", None)
    head = {name: value[name] for name in ("id", "object", "created", "model") if name in value}
    head |= {"object": "chat.completion.chunk"} if chat else {}
    out = []
    for choice in value["choices"]:
        for part in _parts(choice) if chat else _texts(choice):
            out.append(head | {"choices": [{"index": choice["index"]} | part]})
    if run.parsed.wants_usage:
        out.append(head | {"choices": [], "usage": usage})
    return b"".join(frame(msgspec.json.encode(chunk)) for chunk in out) + DONE


def _end(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice.get(name) for name in ("finish_reason", "stop_reason")}


def _pieces(text: str, logprobs: Any) -> list[str]:
    return [text] if logprobs else _PIECES.findall(text)[:-1]


def _texts(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    for piece in _pieces(choice.get("text") or "", logprobs):
        yield {"text": piece, "logprobs": logprobs, "finish_reason": None}
    yield {"text": "", "logprobs": None} | _end(choice)


def _parts(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    message, logprobs = dict(choice["message"]), choice.get("logprobs")
    calls, content = message.pop("tool_calls", None), message.pop("content", None)
    none = {"logprobs": None, "finish_reason": None}
    yield {"delta": {"role": message.pop("role", "assistant"), "content": ""}} | none
    for name, value in message.items():
        if value is not None and value != []:
            yield {"delta": {name: value}} | none
    for piece in _pieces(content or "", logprobs):
        yield {"delta": {"content": piece}, "logprobs": logprobs, "finish_reason": None}
    for index, call in enumerate(calls or ()):
        yield {"delta": {"tool_calls": [{"index": index} | call]}} | none
    yield {"delta": {}, "logprobs": None} | _end(choice)


def merged(frames: bytes, *, chat: bool) -> dict[str, Any] | None:
    """Return the whole reply that a stream's frames make up; None if it did not end well."""
    if not frames.endswith(DONE):
        return None
    reply: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in frames[: -len(DONE)].split(b"\n\n"):
        if not event.startswith(b"data: "):
            continue
        chunk = msgspec.json.decode(event[6:])
        if "error" in chunk:
            return None
        reply = reply or {name: chunk[name] for name in ("id", "created", "model") if name in chunk}
        for part in chunk.get("choices") or ():
            part.pop("token_ids", None)
            part.pop("prompt_token_ids", None)
            if chat:
                part["message"] = part.pop("delta", None) or {}
            _merge(choices.setdefault(part["index"], {}), part)
    for choice in choices.values():
        message = choice.get("message")
        if chat and message is not None and (calls := message.get("tool_calls")):
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
            message["content"] = message.get("content") or None
    kind = "chat.completion" if chat else "text_completion"
    return reply | {"object": kind, "choices": [choices[index] for index in sorted(choices)]}


def _merge(into: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None:
            into.setdefault(name, None)
        elif name == "tool_calls":
            for call in value:
                calls = into[name] = into.get(name) or {}
                _merge(calls.setdefault(call.pop("index", len(calls)), {}), call)
        elif isinstance(value, str) and name in _CONCATENATED:
            into[name] = (into.get(name) or "") + value
        elif isinstance(value, list):
            into[name] = (into.get(name) or []) + value
        elif isinstance(value, dict):
            into[name] = into.get(name) or {}
            _merge(into[name], value)
        else:
            into[name] = value
