"""Tool calls of a worker's replies: from text to deltas and messages in OpenAI's shapes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pigou.text.call_reader import CallArguments, CallStart, Event
from pigou.text.tokenizer import Tokenizer
from pigou.text.tool_calls import (
    MARKUP,
    PARSERS,
    NamedParser,
    ParserName,
    RequiredParser,
    ToolParser,
    make_parser,
)
from pigou.wire.errors import bad_request
from pigou.wire.openai_replies import Json
from pigou.wire.openai_requests import ChatRequest
from pigou.wire.tool_choice import ToolUse, tool_use


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request, and how the model's calls are read.

    Attributes:
        use: what the request wants.
        format: of the model's own calls; None where it has none.
        single: at most one call is passed on.
    """

    use: ToolUse
    format: ParserName | None
    single: bool = False

    def parser(self) -> ToolParser:
        """Return a fresh parser of a reply."""
        if self.use.mode == "named":
            return NamedParser(self.use.named)
        if self.use.mode == "required":
            return RequiredParser()
        assert self.format is not None
        return make_parser(self.format, self.use.functions)

    def markup(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control tokens that the parser must see."""
        if self.use.mode != "auto" or self.format is None:
            return frozenset()
        ids = [tokenizer.backend.token_to_id(token) for token in MARKUP[self.format]]
        return frozenset(index for index in ids if index is not None)


def request_tools(request: ChatRequest, format: ParserName | None) -> Tools | None:
    """Return a request's tools; None where it may call none.

    Args:
        request: of a client.
        format: of the model's own calls; None where it has none.

    Raises:
        APIError: 400, they are faulty, or the model has no format of its own and needs one.
    """
    use = tool_use(request)
    if use is None:
        return None
    if use.mode == "auto" and format is None:
        raise bad_request(
            "tools is given and tool_choice is auto, and the model's chat template names no known "
            f"format of tool calls: start the worker with --tool-call-parser {'|'.join(PARSERS)}, "
            'or set tool_choice to "required", a function, or "none".',
            "tools",
        )
    return Tools(use, format, request.parallel_tool_calls is False)


class ToolStream:
    """The tool calls of one choice, as its text grows.

    Attributes:
        calls: begun so far, as a message has them.
        content: pieces of the text that is no call.
    """

    def __init__(self, tools: Tools, key: str, replayed: str = "") -> None:
        """Begin before the text.

        Args:
            tools: of the request.
            key: tells this choice from all others; the ids of calls are made from it, so that a
                stream that goes on elsewhere keeps them.
            replayed: text that was told elsewhere.
        """
        self._parser = tools.parser()
        self._single = tools.single
        self._short = tools.format == "mistral"
        self._key = key
        self.calls: list[Json] = []
        self.content: list[str] = []
        self._take(self._parser.feed(replayed))
        self.content.clear()

    def feed(self, text: str, ended: bool) -> Json:
        """Take the text of a token; return the delta that it means, empty for none."""
        events = self._parser.feed(text)
        if ended:
            events += self._parser.finish()
        return self._take(events)

    def _take(self, events: list[Event]) -> Json:
        """Collect events; return them as one delta."""
        content, pieces = "", dict[int, Json]()
        for event in events:
            if isinstance(event, str):
                content += event
            elif self._single and event.index > 0:
                continue
            elif isinstance(event, CallStart):
                call = self._begin(event)
                pieces[event.index] = {
                    "index": event.index,
                    **call,
                    "function": {**call["function"]},
                }
            elif isinstance(event, CallArguments):
                self.calls[event.index]["function"]["arguments"] += event.text
                piece = pieces.setdefault(
                    event.index, {"index": event.index, "function": {"arguments": ""}}
                )
                piece["function"]["arguments"] += event.text
        delta: Json = {}
        if content:
            self.content.append(content)
            delta["content"] = content
        if pieces:
            delta["tool_calls"] = list(pieces.values())
        return delta

    def _begin(self, start: CallStart) -> Json:
        call: Json = {
            "id": call_id(self._key, start.index, short=self._short),
            "type": "function",
            "function": {"name": start.name, "arguments": ""},
        }
        self.calls.append(call)
        return call


def call_id(key: str, index: int, *, short: bool) -> str:
    """Return the id of a call; the same for the same key and index.

    Args:
        key: of the choice.
        index: of the call.
        short: nine letters and digits, which Mistral's templates demand.
    """
    found = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=12).hexdigest()
    return found[:9] if short else f"call_{found}"
