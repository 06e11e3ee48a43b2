"""OpenAI's Responses API as chats."""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from pigou.wire import chat_translation as chats
from pigou.wire.chat_translation import ChatTranslation, ReplyPart, Step, call_of, event
from pigou.wire.errors import APIError, bad_field, bad_kind
from pigou.wire.openai_replies import Json, encode
from pigou.wire.openai_requests import StreamOptions

#: Refused fields, and the remedy.
_REFUSED = {
    "background": "responses are computed while you wait; remove it",
    "conversation": "conversations are not stored; use previous_response_id",
    "prompt": "prompt templates are not stored; send instructions and input",
    **dict.fromkeys(("logprobs", "top_logprobs"), "use /v1/chat/completions for log-probabilities"),
    **dict.fromkeys(
        ("messages", "max_tokens", "max_completion_tokens", "response_format", "n"),
        "it belongs to /v1/chat/completions; write input, max_output_tokens and text.format",
    ),
}
#: Fields of chats that a response repeats, and their defaults.
_ECHOED = {"temperature": 1.0, "top_p": 1.0, "parallel_tool_calls": True, "user": None,
           "service_tier": "default", "safety_identifier": None, "prompt_cache_key": None,
           "prompt_cache_retention": None}  # fmt: skip
#: Prefix of an item's id, name of its events, and of the part that holds its text, by kind.
_NAMES = {"text": ("msg", "output_text", "content_part"),
          "call": ("fc", "function_call_arguments", ""),
          "reasoning": ("rs", "reasoning_text", "content_part"),
          "summary": ("rs", "reasoning_summary_text", "reasoning_summary_part")}  # fmt: skip


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning` of a response; a summary is the reasoning itself."""

    effort: str | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None


class ResponseText(msgspec.Struct, forbid_unknown_fields=True):
    """`text` of a response."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct):
    """Fields of `POST /v1/responses` that chats lack, or name otherwise."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: ReasoningOptions | None = None
    text: ResponseText | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None  # hosted tools', which are refused
    stream_options: StreamOptions | None = None


_request = msgspec.json.Decoder(ResponsesRequest)


class KeptResponse(NamedTuple):
    """A stored response."""

    body: bytes
    messages: list[Json]  # chat so far, the reply included; no instructions
    size: int  # bytes
    expiry_s: float


class ResponseStore:
    """Keeps responses of each tenant: up to a number of bytes, the latest, and an age."""

    def __init__(
        self, now_s: Callable[[], float], max_bytes: int = 64 * 2**20, ttl_s: float = 3600.0
    ) -> None:
        """`max_bytes` are a tenant's; 0 keeps nothing."""
        self._now_s, self._max_bytes, self._ttl_s = now_s, max_bytes, ttl_s
        self._stored: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._bytes: dict[str, int] = {}
        self._lock = threading.RLock()  # large bodies are translated on threads

    def put(self, tenant: str, id: str, body: bytes, messages: list[Json]) -> None:
        """Keep a response, in place of the oldest ones that leave it no room."""
        size = len(body) + len(encode(messages))
        with self._lock:
            stored = self._stored.setdefault(tenant, OrderedDict())
            stored[id] = KeptResponse(body, messages, size, self._now_s() + self._ttl_s)
            self._bytes[tenant] = self._bytes.get(tenant, 0) + size
            while self._bytes[tenant] > self._max_bytes:
                self.drop(tenant, next(iter(stored)))

    def find(self, tenant: str, id: str) -> KeptResponse | None:
        """Return a response; None if it was never stored, or is no longer."""
        with self._lock:
            stored = self._stored.get(tenant)
            while stored and next(iter(stored.values())).expiry_s <= self._now_s():
                self.drop(tenant, next(iter(stored)))
            return None if stored is None else stored.get(id)

    def drop(self, tenant: str, id: str) -> bool:
        """Forget a response; return whether it was stored."""
        with self._lock:
            item = self._stored.get(tenant, OrderedDict()).pop(id, None)
            if item is not None:
                self._bytes[tenant] -= item.size
        return item is not None


def absent(id: str, param: str | None = None) -> APIError:
    """Return OpenAI's error for a response or item that is not stored."""
    what = f"{'Previous response' if param else 'Response'} with id '{id[:80]}' not found."
    code = "previous_response_not_found" if param else None
    return APIError(404, what, param, type="invalid_request_error", code=code, final=True)


def answer_stored(store: ResponseStore, tenant: str, method: str, id: str) -> bytes:
    """Return a stored response, or the JSON of its deletion; POST would cancel it."""
    stored = store.find(tenant, id)
    if stored is None:
        raise absent(id)
    if method == "POST":
        text = "Cannot cancel a synchronous response."
        raise APIError(400, text, type="invalid_request_error")
    if method == "GET":
        return stored.body
    store.drop(tenant, id)
    return encode({"id": id, "object": "response", "deleted": True})


class Responses(ChatTranslation):
    """A request for a response, as a chat; the response is put into `store` at its end."""

    NAMES = (
        (r"^max_(completion_)?tokens\b", "max_output_tokens"), (r"^(messages|prompt)\b", "input"),
        (r"^response_format(\.json_schema)?", "text.format"), (r"\.function\b", ""),
        ("^reasoning_effort", "reasoning.effort"), ("^verbosity", "text.verbosity"),
    )  # fmt: skip

    def __init__(self, data: bytes, id: str, tenant: str, store: ResponseStore) -> None:
        """`id` is hexadecimal, and new. Raises APIError 400 or 404."""
        fields, chat = chats.read_fields(data, _request, _REFUSED)
        self.id, self._tenant, self._store = f"resp_{id}", tenant, store
        self._fields: ResponsesRequest = fields
        self._count = 0
        reasoning, text = fields.reasoning or ReasoningOptions(), fields.text or ResponseText()
        self._sources: list[str] = []
        summary = reasoning.summary or reasoning.generate_summary
        verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
        self._thought = "reasoning" if summary is None else "summary"
        self._encodes = bool(fields.include)
        self._said: Json = {
            **_ECHOED, **{k: chat[k] for k in _ECHOED if chat.get(k) is not None},
            "instructions": fields.instructions, "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls, "metadata": fields.metadata or {},
            "previous_response_id": fields.previous_response_id, "background": False,
            "reasoning": {"effort": reasoning.effort, "summary": summary},
            "store": fields.store is not False, "top_logprobs": 0, "truncation": "disabled",
            "text": {"format": text.format or {"type": "text"}, **verbosity},
            "tools": fields.tools or [], "tool_choice": fields.tool_choice or "auto",
        }  # fmt: skip
        self.messages: list[Json] = []
        self._read_input()
        given = fields.instructions is not None
        system = [{"role": "system", "content": fields.instructions}] * given
        chat |= {"messages": system + self.messages,
                 "max_completion_tokens": fields.max_output_tokens, "verbosity": text.verbosity,
                 "reasoning_effort": reasoning.effort, "response_format": _form(text.format),
                 **_tools(fields)}  # fmt: skip
        if reasoning.effort == "none":
            chats.switch_thinking(chat, False)
        if fields.stream_options is not None and fields.stream_options.include_obfuscation:
            raise bad_field("stream_options.include_obfuscation", "is refused: set it to false.")
        super().__init__(chat, ["instructions"] * len(system) + self._sources)

    # --- input --------------------------------------------------------------------------------

    def _read_input(self) -> None:
        fields = self._fields
        if (previous := fields.previous_response_id) is not None:
            if (stored := self._store.find(self._tenant, previous)) is None:
                raise absent(previous, "previous_response_id")
            self.messages += stored.messages
            self._sources += ["previous_response_id"] * len(stored.messages)
        items = fields.input
        thought = ""
        for index, item in enumerate(
            [{"role": "user", "content": items}] if isinstance(items, str) else items
        ):
            where = "input" if isinstance(items, str) else f"input[{index}]"
            source = where
            if item.get("type") == "item_reference":
                item = self._kept_item(str(item.get("id")))  # noqa: PLW2901
            match item.get("type", "message"):
                case "reasoning":
                    thought += _thought(item, where)
                    continue
                case "message":
                    message = {"role": item.get("role"), "content": _content(item, where)}
                case "function_call":
                    call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
                    message = {"role": "assistant", "content": None, "tool_calls": [call]}
                case "function_call_output":
                    message = {"role": "tool", "tool_call_id": item.get("call_id"),
                               "content": _content(item, where, "output")}  # fmt: skip
                    source += ".output"
                case kind:
                    raise bad_kind(f"{where}.type", kind, "message, reasoning, function_call and "
                                   "function_call_output work")  # fmt: skip
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            last = self.messages[-1] if self.messages else {}
            if "tool_calls" in message and last.get("role") == "assistant":
                calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
                self.messages[-1] = {**last, "tool_calls": calls}
            else:
                self.messages.append(message)
                self._sources.append(source)

    def _kept_item(self, id: str) -> Json:
        """Return the stored item that an id names (`PREFIX_RESPONSE_INDEX`)."""
        response = id.partition("_")[2].partition("_")[0]
        stored = self._store.find(self._tenant, f"resp_{response}")
        output: list[Json] = chats.object_decoder.decode(stored.body)["output"] if stored else []
        item = next((item for item in output if item["id"] == id), None)
        if item is None:
            raise absent(id)
        return item

    # --- the response -------------------------------------------------------------------------

    def _kind(self, part: ReplyPart) -> str:
        return self._thought if part.kind == "reasoning" else part.kind

    def _item(self, part: ReplyPart, status: str) -> Json:
        kind, done = self._kind(part), status == "completed"
        item: Json = {"id": f"{_NAMES[kind][0]}_{self.id[5:]}_{part.index}", "status": status}
        shown = [self._shown(kind, part.text)] if done else []
        if kind == "call":
            return item | {"type": "function_call", "call_id": part.call, "name": part.name,
                           "arguments": part.text if done else ""}  # fmt: skip
        if kind == "text":
            return item | {"type": "message", "role": "assistant", "content": shown}
        encoded = base64.b64encode(part.text.encode()).decode()
        item |= {"type": "reasoning", "encrypted_content": encoded if self._encodes else None}
        item["summary"] = shown if kind == "summary" else []
        return item if kind == "summary" else item | {"content": shown}

    @staticmethod
    def _shown(kind: str, text: str) -> Json:
        if kind == "text":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text" if kind == "reasoning" else "summary_text", "text": text}

    def _response(self, status: str, error: Json | None = None) -> Json:
        cached = self.tokens("prompt_tokens_details", "cached_tokens")
        reasoning = self.tokens("completion_tokens_details", "reasoning_tokens")
        usage = {
            "input_tokens": self.tokens("prompt_tokens"),
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self.tokens("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": self.tokens("total_tokens"),
        }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "error": error, "model": self.model, "incomplete_details": cut,
            "usage": None if status == "in_progress" else usage,
            "output": [self._item(part, "completed") for part in self.parts], **self._said,
        }  # fmt: skip

    def result(self) -> Json:
        """Return the response, and keep it."""
        response = self._response("incomplete" if self.finish == "length" else "completed")
        if response["store"]:
            said = {kind: "".join(part.text for part in self.parts if part.kind == kind)
                    for kind in ("text", "reasoning")}  # fmt: skip
            message: Json = {"role": "assistant", "content": said["text"]}
            calls = [call_of(part.call, part.name, part.text) for part in self.parts if part.name]
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": said["reasoning"]} if said["reasoning"] else {}
            messages = [*self.messages, message]
            self._store.put(self._tenant, self.id, encode(response), messages)
        return response

    # --- events -------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        return event(f"response.{kind}", {"sequence_number": self._count - 1, **fields})

    def render(self, step: Step, part: ReplyPart | None = None, text: str = "") -> Iterator[bytes]:
        """Return the events of a step, in OpenAI's order."""
        if step == "begin":
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response("in_progress"))
        elif part is None:
            response = self.result()
            yield self._event(response["status"], response=response)
        else:
            yield from self._part_events(step, part, text)

    def _part_events(self, step: Step, part: ReplyPart, text: str) -> Iterator[bytes]:
        kind = self._kind(part)
        prefix, said, holder = _NAMES[kind]
        at: Json = {"item_id": f"{prefix}_{self.id[5:]}_{part.index}", "output_index": part.index}
        if holder:
            at["summary_index" if kind == "summary" else "content_index"] = 0
        rest: Json = {"logprobs": []} if kind == "text" else {}
        if step == "delta":
            yield self._event(f"{said}.delta", **at, delta=text, **rest)
            return
        if step == "start":
            item = self._item(part, "in_progress")
            yield self._event("output_item.added", output_index=part.index, item=item)
            if holder:
                yield self._event(f"{holder}.added", **at, part=self._shown(kind, ""))
            return
        whole = {"text": part.text} if holder else {"arguments": part.text, "name": part.name}
        yield self._event(f"{said}.done", **at, **whole, **rest)
        if holder:
            yield self._event(f"{holder}.done", **at, part=self._shown(kind, part.text))
        item = self._item(part, "completed")
        yield self._event("output_item.done", output_index=part.index, item=item)

    def fail(self, error: Json) -> Iterator[bytes]:
        """Return the event of a response that failed."""
        said = {"code": "server_error", "message": str(error.get("message"))}
        yield self._event("failed", response=self._response("failed", said))


def _form(form: Json | None) -> Json | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _tools(fields: ResponsesRequest) -> Json:
    tools, choice = [], fields.tool_choice
    for index, tool in enumerate(fields.tools or ()):
        function = dict(tool)
        if (kind := function.pop("type", None)) != "function":
            raise bad_kind(
                f"tools[{index}].type", kind, "hosted tools are not supported: use functions"
            )
        tools.append(chats.function_tool(function))
    if isinstance(choice, dict):
        if (kind := choice.get("type")) != "function":
            raise bad_kind("tool_choice.type", kind, "function works")
        choice = chats.function_tool({"name": choice.get("name")})
    return {"tools": tools or None, "tool_choice": choice}


def _content(item: Json, where: str, name: str = "content") -> Any:
    where = f"{where}.{name}"
    return chats.translate_parts(item.get(name), _chat_part, where, "part", "input_text")


def _chat_part(part: Any) -> Json | None:
    match part:
        case {"type": "input_text" | "output_text"}:
            return chats.text_part(part.get("text"))
        case {"type": "input_image", "image_url": str(url)}:
            return chats.image_part(url)
        case {"type": "text" | "refusal"}:
            return dict(part)
    return None


def _thought(item: Json, where: str) -> str:
    try:
        if (encoded := item.get("encrypted_content")) is not None:
            return base64.b64decode(encoded, validate=True).decode()
        return "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
    except (TypeError, KeyError, ValueError):
        raise bad_field(where, "has reasoning that this server did not write: remove it.") from None
