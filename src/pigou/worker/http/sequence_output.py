"""SequenceOutput: converts tokens of one choice to text, stop reasons, logprobs and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pigou.request import SamplingParams
from pigou.runtime.step_output import RankedLogprobs as Report
from pigou.text.detokenizer import Detokenizer
from pigou.text.reasoning import HARMONY, Reasoning
from pigou.text.stop_strings import StopMatch, Stops
from pigou.text.tokenizer import Tokenizer
from pigou.text.tool_calls import (
    MARKUP,
    PARSERS,
    REASONING,
    CallArguments,
    CallStart,
    Event,
    NamedParser,
    ParserName,
    RequiredParser,
    Thought,
    ToolParser,
    make_parser,
)
from pigou.wire.errors import bad_request
from pigou.wire.openai_replies import Json, Logprob, LogprobsEntry, reasoning_fields
from pigou.wire.openai_requests import ChatRequest
from pigou.wire.structured_output import ToolUse, tool_use


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Detokenization options."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True  # hide control tokens
    shown: frozenset[int] = frozenset()  # control tokens to show anyway


class SequenceOutput:
    """Converts one sequence's tokens to text; sets `finish` when it ends."""

    __slots__ = (
        "_detokenizer", "_end_tokens", "_eos", "_max_tokens", "_min_tokens", "_options", "_stops",
        "_tokenizer", "called", "count", "finish", "replayed", "stop", "tokens",
    )  # fmt: skip

    def __init__(
        self, tokenizer: Tokenizer, eos: frozenset[int], params: SamplingParams,
        options: TextOptions, resumed: list[int],
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._eos = frozenset[int]() if params.ignore_eos else eos
        self._end_tokens = self._eos | params.stop_token_ids
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer.vocabulary, options.skip_special, shown=options.shown, begins=False
        )
        self._stops = None
        if options.stops:
            self._stops = Stops(options.stops, options.include_stop, params.min_tokens)
        self.tokens: list[int] = []
        self.count = 0
        self.called = False  # ended behind its only tool call
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.replayed = [self.take(token) for token in resumed]  # text of each
        self.tokens.clear()

    def take(self, token: int) -> str:
        """Add a token; return the text to show, and set `finish` at the end."""
        self.tokens.append(token)
        self.count += 1
        if token in self._end_tokens and self.count > self._min_tokens:
            self.stop = None if token in self._eos else token
            text = self._detokenizer.next(token) if self._options.include_stop else ""
            return text + self.end("stop")
        text = self._detokenizer.next(token)
        if self._stops is not None:
            fed = self._stops.feed(text)
            if isinstance(fed, StopMatch):
                self.finish, self.stop = "stop", fed.stop
                return fed.text
            text = fed
        return text + self.end("length") if self.count >= self._max_tokens else text

    @property
    def stopped_by_text(self) -> bool:
        """True if a stop string ended it."""
        return isinstance(self.stop, str)

    @property
    def is_cut(self) -> bool:
        """True if its text ended it, which the engine does not know."""
        return self.called or self.stopped_by_text

    def end_at_call(self) -> bool:
        """End the choice behind a tool call, if `min_tokens` came."""
        if self.count >= self._min_tokens:
            self.called = True
            self.end("stop")
        return self.called

    def end(self, reason: str) -> str:
        """End the choice; return the held-back text."""
        self.finish = reason
        held = self._stops.flush() if self._stops is not None else ""
        return held + self._detokenizer.flush()


class Explainer:
    """Converts an executor's logprobs to API entries; text within a character is ""."""

    __slots__ = ("_detokenizer", "_tokenizer", "length")

    def __init__(self, tokenizer: Tokenizer, resumed: list[int], *, begins: bool = False) -> None:
        """Start after `resumed` tokens, or after a prompt, or at the prompt if `begins`."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.vocabulary, skip_special=False, begins=begins)
        self.length = len(self._detokenizer.feed(resumed))

    def fresh(self) -> Explainer:
        """Return an explainer that starts from empty text."""
        return Explainer(self._tokenizer, [], begins=True)

    def explain(self, report: Report) -> LogprobsEntry:
        """Convert the next token's report."""
        text = self._detokenizer.next(report.token)
        chosen = Logprob(report.token, text, report.logprob, report.rank, list(text.encode()))
        pairs = zip(report.top.tolist(), report.logprobs.tolist(), strict=True)
        top = [
            chosen if token == report.token else self._other(token, logprob, rank)
            for rank, (token, logprob) in enumerate(pairs, 1)
        ]
        return LogprobsEntry(chosen, top, text)

    def bare(self, token: int) -> LogprobsEntry:
        """Convert the next token, without logprobs."""
        return LogprobsEntry(None, [], self._detokenizer.next(token))

    def _other(self, token: int, logprob: float, rank: int) -> Logprob:
        data = self._tokenizer.vocabulary.bytes_of(token)
        return Logprob(token, self._tokenizer.name(token), logprob, rank, list(data))


@dataclass(frozen=True, slots=True)
class Tools:
    """A request's tools, and the format of the model's calls."""

    use: ToolUse
    format: ParserName | None  # format of the model's own calls, if any
    single: bool = False  # pass on at most one call

    def parser(self, reasoning: str) -> ToolParser | None:
        """Create a parser for a reply, which may begin within reasoning; None if harmony's will."""
        if self.use.mode == "named":
            return NamedParser(self.use.named)
        if self.use.mode == "required":
            return RequiredParser()
        if self.format is None:
            return None
        return make_parser(self.format, self.use.functions, reasoning)

    def markup(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control tokens that the parser needs."""
        if self.use.mode != "auto" or self.format is None:
            return frozenset()
        marks = (*MARKUP[self.format], *REASONING, *REASONING.values())
        return tokenizer.ids(marks)


def request_tools(
    request: ChatRequest, format: ParserName | None, reasoning: str | None = None
) -> Tools | None:
    """Return a request's tools, if it may call any; raises APIError 400 if invalid.

    `reasoning` is the model's family; harmony's parser reads tool calls as well.
    """
    use = tool_use(request)
    if use is None:
        return None
    if use.mode == "auto" and format is None and reasoning != HARMONY:
        raise bad_request(
            "tools is given and tool_choice is auto, and the model's chat template names no known "
            f"format of tool calls: start the worker with --tool-call-parser {'|'.join(PARSERS)}, "
            'or set tool_choice to "required", a function, or "none".',
            "tools",
        )
    return Tools(use, format, request.parallel_tool_calls is False)


class MessageStream:
    """Parses reasoning, content and tool calls of one choice incrementally."""

    def __init__(
        self, tools: Tools | None, key: str, replayed: Sequence[str] = (),
        reasoning: Reasoning | None = None, tag: str = "",
    ) -> None:  # fmt: skip
        """`replayed` are the texts of tokens before; `tag` opened reasoning of no known family."""
        parser = None if tools is None else tools.parser(tag)
        if reasoning is not None:
            names = tools.use.functions if tools is not None and tools.use.mode == "auto" else ()
            parser = reasoning.parser(parser, names)
        assert parser is not None
        self._parser = parser
        self._single = tools is not None and tools.single
        self._short = tools is not None and tools.format == "mistral"
        self._shows = reasoning is not None and reasoning.shown
        self._key = key
        self.calls: list[Json] = []
        self.content: list[str] = []
        self.thoughts: list[str] = []
        self.reasoning_tokens = None if reasoning is None else 0
        for text in replayed:
            self.feed(text, False)
        self.content.clear()
        self.thoughts.clear()

    def feed(self, text: str, ended: bool) -> Json:
        """Add a token's text; return the resulting delta, empty for none."""
        was_thinking = self._parser.thinking
        events = self._parser.feed(text)
        if self.reasoning_tokens is not None:
            self.reasoning_tokens += was_thinking or self._parser.thinking
        if ended:
            events += self._parser.finish()
        return self._take(events)

    @property
    def is_over(self) -> bool:
        """True if the only call that the client wants is complete."""
        return self._single and self._parser.has_called

    def _take(self, events: list[Event]) -> Json:
        content, thought, pieces = "", "", dict[int, Json]()
        for event in events:
            if isinstance(event, str):
                content += event
            elif isinstance(event, Thought):
                thought += event.text if self._shows else ""
            elif self._single and event.index > 0:
                continue
            elif isinstance(event, CallStart):
                call = self._begin(event)
                begun = {"index": event.index, **call, "function": {**call["function"]}}
                pieces[event.index] = begun
            elif isinstance(event, CallArguments):
                self.calls[event.index]["function"]["arguments"] += event.text
                piece = pieces.setdefault(
                    event.index, {"index": event.index, "function": {"arguments": ""}}
                )
                piece["function"]["arguments"] += event.text
        delta: Json = {}
        if thought:
            self.thoughts.append(thought)
            delta = reasoning_fields(thought)
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
    """Return a call's id, determined by key and index."""
    digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if short else f"call_{digest}"
