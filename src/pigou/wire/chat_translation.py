"""Chats in the words of another API: the chat's body, and its reply translated back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from pigou.wire.errors import APIError, bad_field, decoded
from pigou.wire.openai_replies import Json, encode
from pigou.wire.openai_requests import without_bom
from pigou.wire.sse import DONE_PAYLOAD, Reader

object_decoder = msgspec.json.Decoder(dict[str, Any])
PartKind: TypeAlias = Literal["reasoning", "text", "call"]
Step: TypeAlias = Literal["begin", "start", "delta", "close", "end"]
#: Fields in an error's message; quoted values are skipped.
_FIELD = re.compile(r"""(?<!\w)(["']).*?\1(?!\w)|[a-z_]+(?:\[\d+\]|\.\w+)*""")
_MESSAGE = re.compile(r"messages\[(\d+)\](\.role|\.content)?")


@dataclass(slots=True)
class ReplyPart:
    """Reasoning, text, or a tool call of a reply."""

    kind: PartKind
    index: int  # position in the reply
    call: str = ""  # id of a call
    name: str = ""  # function of a call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text, or a call's arguments."""
        return "".join(self.pieces)


class ChatTranslation(ABC):
    """One request: `body` is the chat's; its reply comes back by `whole`, or by `feed`."""

    #: Patterns of a chat's fields, and their names in this API.
    NAMES: ClassVar[tuple[tuple[str, str], ...]]

    def __init__(self, chat: Json, sources: Sequence[str]) -> None:
        """`sources` are the fields that the chat's messages come from."""
        self._sources = sources
        if chat.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        self.body = encode({name: value for name, value in chat.items() if value is not None})
        self.parts: list[ReplyPart] = []
        self.model, self.created = "", 0
        self.finish: str | None = None
        self.stop: str | int | None = None  # the stop string that ended it
        self._usage: Json = {}
        self._reader = Reader()
        self._begun = False
        self._open: ReplyPart | None = None

    @abstractmethod
    def result(self) -> Json:
        """Return the whole reply."""

    @abstractmethod
    def render(self, step: Step, part: ReplyPart | None = None, text: str = "") -> Iterable[bytes]:
        """Return the events of a stream's step; `part` is given between begin and end."""

    @abstractmethod
    def fail(self, error: Json) -> Iterable[bytes]:
        """Return the events that end a stream with an error."""

    def whole(self, reply: bytes) -> bytes:
        """Return the translated JSON of a chat's reply that is not streamed."""
        list(self._take(object_decoder.decode(reply), "message"))
        return encode(self.result())

    def feed(self, frames: bytes) -> bytes:
        """Return the translated events of a chat's streamed frames."""
        payloads = self._reader.feed(frames)
        return b"".join(event for payload in payloads for event in self._events(payload))

    def field(self, path: str) -> str:
        """Return this API's name of a chat's field."""
        if (match := _MESSAGE.match(path)) and int(match[1]) < len(self._sources):
            source = self._sources[int(match[1])]
            return source + (match[2] or "" if source.endswith("]") else "")
        for pattern, name in self.NAMES:
            path = re.sub(pattern, name, path)
        return path

    def tokens(self, *path: str) -> int:
        """Return a count of the chat's usage; 0 if absent."""
        value: Any = self._usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, int) else 0

    def _events(self, payload: bytes) -> Iterator[bytes]:
        if payload.strip() == DONE_PAYLOAD:
            if self.finish is not None:
                yield from self._close()
                yield from self.render("end")
            return
        chunk = object_decoder.decode(payload)
        if error := chunk.get("error"):
            error["message"] = renamed(str(error.get("message")), self.field)
            yield from self.fail(error)
            return
        if not self._begun:
            self.model, self.created = chunk.get("model") or "", chunk.get("created") or 0
            self._begun = True
            yield from self.render("begin")
        yield from self._take(chunk, "delta")

    def _take(self, body: Json, kind: str) -> Iterator[bytes]:
        self.model, self.created = body.get("model") or self.model, body.get("created") or 0
        self._usage = body.get("usage") or self._usage
        for choice in body.get("choices") or ():
            said = choice.get(kind) or {}
            yield from self._add(
                said.get("reasoning") or said.get("reasoning_content"), "reasoning"
            )
            yield from self._add(said.get("content"), "text")
            for call in said.get("tool_calls") or ():
                function = call.get("function") or {}
                if name := function.get("name"):
                    yield from self._start("call", call.get("id") or "", name)
                yield from self._add(function.get("arguments"), "call")
            self.finish = choice.get("finish_reason") or self.finish
            self.stop = choice.get("stop_reason") or self.stop

    def _add(self, text: str | None, kind: PartKind) -> Iterator[bytes]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._start(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield from self.render("delta", self._open, text)

    def _start(self, kind: PartKind, call: str = "", name: str = "") -> Iterator[bytes]:
        yield from self._close()
        self._open = ReplyPart(kind, len(self.parts), call, name)
        self.parts.append(self._open)
        yield from self.render("start", self._open)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self.render("close", self._open)
        self._open = None


def read_fields(
    data: bytes, decoder: msgspec.json.Decoder[Any], refused: dict[str, str]
) -> tuple[Any, Json]:
    """Decode a request's own fields, and the others, which are the chat's; raises APIError 400."""
    data = without_bom(data)
    fields = decoded(decoder, data)
    rest = decoded(object_decoder, data)
    for name, remedy in refused.items():
        if rest.pop(name, None) not in (None, False, [], {}):
            raise bad_field(name, f"is refused: {remedy}.")
    return fields, {k: v for k, v in rest.items() if k not in fields.__struct_fields__}


def renamed(message: str, field: Callable[[str], str]) -> str:
    """Return an error's message with the fields that it names put through `field`."""

    def name(match: re.Match[str]) -> str:  # a lone word names a field at the beginning only
        return field(match[0]) if match.start() == 0 or re.search(r"[_.[]", match[0]) else match[0]

    return _FIELD.sub(name, message)


@contextmanager
def renaming(field: Callable[[str], str]) -> Iterator[None]:
    """Put the fields that errors name, a worker's answer too, through `field` (context)."""
    try:
        yield
    except APIError as error:
        try:
            said = object_decoder.decode(error.body())["error"]
            message, param = renamed(said["message"], field), said.get("param")
        except (msgspec.DecodeError, KeyError, TypeError):
            raise error from None  # a worker's answer in another form
        raise APIError(
            error.status, message, param and field(str(param)), type=said.get("type"),
            code=said.get("code"), retry_after=error.retry_after,
            final="x-should-retry" in error.headers,
        ) from None  # fmt: skip


def event(kind: str, fields: Json) -> bytes:
    """Return a named server-sent event, whose data names its type as well."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def function_tool(function: Any) -> Json:
    """Return a function of a chat's `tools` or `tool_choice`."""
    return {"type": "function", "function": function}


def text_part(text: Any) -> Json:
    """Return a text of a chat message's content."""
    return {"type": "text", "text": text}


def image_part(url: Any) -> Json:
    """Return an image of a chat message's content."""
    return {"type": "image_url", "image_url": {"url": url}}


def translate_parts(
    content: Any, read: Callable[[Any], Json | None], where: str, noun: str, known: str
) -> Any:
    """Return a content's parts as a chat's; APIError 400 for one that `read` does not know."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if (translated := read(part)) is None:
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_field(where, f"has a {noun} of type {str(kind)[:40]!r}; {known} works.")
        parts.append(translated)
    return parts


def call_of(id: Any, name: Any, arguments: Any) -> Json:
    """Return a tool call of a chat's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def switch_thinking(chat: Json, wanted: bool) -> None:
    """Set the template variables that switch reasoning, by both names that templates read."""
    given = chat.get("chat_template_kwargs")
    own = given if isinstance(given, dict) else {}
    chat["chat_template_kwargs"] = {"enable_thinking": wanted, "thinking": wanted, **own}
