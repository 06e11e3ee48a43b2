"""Anthropic's Messages API as chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from pigou.wire import chat_translation as chats
from pigou.wire.chat_translation import ChatTranslation, ReplyPart, Step, call_of, event
from pigou.wire.errors import APIError, bad_field, bad_kind
from pigou.wire.openai_replies import Json, encode

#: Prefix of the paths.
PATH = "/v1/messages"
_REFUSED = {
    "container": "there are no containers; remove it",
    "mcp_servers": "servers of tools are not called from here; declare tools",
    "context_management": "the context is not edited; remove it",
    "max_completion_tokens": "it belongs to /v1/chat/completions; write max_tokens",
    "response_format": "it belongs to /v1/chat/completions; write output_config.format",
    **dict.fromkeys(("n", "stop", "logprobs", "top_logprobs"), "it belongs to chats; remove it"),
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
          404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
          503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking` of a message; `budget_tokens` is a target, which max_tokens bounds."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` of a message."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config` of a message."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesRequest(msgspec.Struct):
    """Fields of `POST /v1/messages` that chats lack, or name otherwise."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None


_request = msgspec.json.Decoder(MessagesRequest)


def error_body(error: APIError, request_id: str | None = None) -> bytes:
    """Encode an error in Anthropic's form."""
    said = {"type": _TYPES.get(error.status, "api_error"), "message": error.message}
    return encode({"type": "error", "error": said, "request_id": request_id})


class Messages(ChatTranslation):
    """A request for a message, as a chat; `counts` only to count its tokens."""

    NAMES = (
        ("^max_completion_tokens", "max_tokens"), (r"^stop\b", "stop_sequences"),
        (r"^response_format(\.json_schema)?", "output_config.format"), (r"\.function\b", ""),
        ("^reasoning_effort", "output_config.effort"), ("^include_reasoning", "thinking.display"),
        (r"^(tools.*)\.parameters\b", r"\1.input_schema"), (r"^prompt\b", "messages"),
        ("^parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    )  # fmt: skip

    def __init__(self, data: bytes, id: str, *, counts: bool = False) -> None:
        """`id` is hexadecimal, and new. Raises APIError 400."""
        fields, chat = chats.read_fields(data, _request, _REFUSED)
        if fields.max_tokens is None and not counts:
            raise bad_field("max_tokens", "is required, and missing.")
        self.id = f"msg_{id}"
        messages, sources = list[Json](), list[str]()
        if fields.system is not None:
            messages.append({"role": "system", "content": _content(fields.system, "system")})
            sources.append("system")
        for index, message in enumerate(fields.messages):
            messages += (said := _chat_messages(message, f"messages[{index}]"))
            sources += [f"messages[{index}]"] * len(said)
        chat |= {"messages": messages, "stop": fields.stop_sequences, **_tools(fields)}
        if fields.thinking is not None and fields.thinking.type != "adaptive":
            chats.switch_thinking(chat, fields.thinking.type == "enabled")
        if fields.thinking is not None and fields.thinking.display == "omitted":
            chat["include_reasoning"] = False
        config = fields.output_config or OutputConfig()
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.get("schema")}
            chat["response_format"] = {"type": config.format.get("type"), "json_schema": schema}
        chat |= {"max_tokens": fields.max_tokens, "reasoning_effort": config.effort}
        super().__init__(chat, sources)

    def tokenize_body(self) -> bytes:
        """Return the body of `/tokenize` that counts the prompt's tokens."""
        chat = chats.object_decoder.decode(self.body)
        names = ("model", "messages", "tools", "chat_template_kwargs")
        return encode({name: chat[name] for name in names if name in chat})

    def result(self) -> Json:
        """Return the message."""
        return self._message([self._block(part, part.text) for part in self.parts], self._ending())

    def _message(self, content: list[Json], ending: Json) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": content, **ending, "usage": self._usage_counts()}  # fmt: skip

    def _usage_counts(self) -> Json:
        cached = self.tokens("prompt_tokens_details", "cached_tokens")
        return {
            "input_tokens": max(0, self.tokens("prompt_tokens") - cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.tokens("completion_tokens"),
        }

    def _ending(self) -> Json:
        by_text = self.finish == "stop" and isinstance(self.stop, str)
        reason = "stop_sequence" if by_text else _STOPS.get(self.finish or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": self.stop if by_text else None}

    @staticmethod
    def _block(part: ReplyPart, text: str) -> Json:
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if part.kind == "text":
            return {"type": "text", "text": text}
        try:
            arguments = chats.object_decoder.decode(text)
        except msgspec.DecodeError:
            arguments = {}  # not begun, or cut off by max_tokens
        return {"type": "tool_use", "id": part.call, "name": part.name, "input": arguments}

    def render(self, step: Step, part: ReplyPart | None = None, text: str = "") -> Iterator[bytes]:
        """Return the events of a step, in Anthropic's order."""
        if part is not None:
            at: Json = {"index": part.index}
            if step == "start":
                yield event("content_block_start", at | {"content_block": self._block(part, "")})
            elif step == "delta":
                kind, name = _DELTAS[part.kind]
                yield event("content_block_delta", at | {"delta": {"type": kind, name: text}})
            else:
                yield event("content_block_stop", at)
        elif step == "begin":
            nothing = {"stop_reason": None, "stop_sequence": None}
            yield event("message_start", {"message": self._message([], nothing)})
            yield event("ping", {})
        else:
            ending = {"delta": self._ending(), "usage": self._usage_counts()}
            yield event("message_delta", ending)
            yield event("message_stop", {})

    def fail(self, error: Json) -> Iterator[bytes]:
        """Return the event of an error."""
        status = error.get("code") if isinstance(error.get("code"), int) else 500
        said = {"type": _TYPES.get(status or 500, "api_error"), "message": error.get("message")}
        yield event("error", {"error": said})


def _tools(fields: MessagesRequest) -> Json:
    tools = []
    for index, tool in enumerate(fields.tools or ()):
        if (kind := tool.get("type")) not in (None, "custom"):
            raise bad_kind(f"tools[{index}].type", kind, "hosted tools are not supported: declare "
                           "name and input_schema")  # fmt: skip
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        tools.append(chats.function_tool(function))
    chat: Json = {"tools": tools or None}
    if (choice := fields.tool_choice) is not None:
        chat["tool_choice"] = _CHOICES.get(choice.type, chats.function_tool({"name": choice.name}))
        chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return chat


def _chat_messages(message: Json, where: str) -> list[Json]:
    """Return a message as a chat's: results of tools are messages of their own, and come first."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_kind(f"{where}.role", role, "it must be user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    said: list[Json] = []
    calls, results, thought = list[Json](), list[Json](), ""
    for block in content:
        match block if isinstance(block, dict) else {}:
            case {"type": "tool_use", "id": id, "name": name, "input": given}:
                calls.append(call_of(id, name, encode(given).decode()))
            case {"type": "tool_result", "tool_use_id": id}:
                result = _content(block.get("content", ""), f"{where}.content")
                if block.get("is_error"):
                    texts = [chats.text_part(result)] if isinstance(result, str) else result
                    result = [chats.text_part("Error:"), *texts]
                results.append({"role": "tool", "tool_call_id": id, "content": result})
            case {"type": "thinking", "thinking": str(text)}:
                thought += text
            case {"type": "redacted_thinking"}:
                raise bad_field(f"{where}.content", "has redacted_thinking, which this server did "
                                "not write: remove it.")  # fmt: skip
            case _:
                said.append(block)
    chat: Json = {"role": role, "content": _content(said, f"{where}.content") if said else None}
    if calls:
        chat["tool_calls"] = calls
    if thought:
        chat["reasoning_content"] = thought
    return results + ([chat] if said or calls or thought else [])


def _content(content: Any, where: str) -> Any:
    return chats.translate_parts(content, _chat_part, where, "block", "text")


def _chat_part(block: Any) -> Json | None:
    match block:
        case {"type": "text", "text": text}:
            return chats.text_part(text)
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return chats.image_part(f"data:{kind};base64,{data}")
        case {"type": "image", "source": {"type": "url", "url": url}}:
            return chats.image_part(url)
    return None
