"""Tool calls in a model's text: the formats of Hermes, Llama 3 and Mistral, and forced calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias

from pigou.text.tool_call_reader import CallArguments, CallReader, CallStart, Event, JsonEnd

ParserName = Literal["hermes", "llama3_json", "mistral"]
PARSERS: tuple[ParserName, ...] = ("hermes", "llama3_json", "mistral")
#: Tokens that a format's markup consists of; they are shown to its parser.
MARKUP: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
#: Characters of Mistral's second form before its arguments, at most.
_LONGEST_HEAD = 256
#: What a parser does with the text at hand; it returns what that means.
State: TypeAlias = Callable[[], list[Event]]
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class ToolParser:
    """Tells calls from content in a text that grows.

    What it has told after any piece is a function of the text so far alone, up to how pieces of
    content and arguments are cut. So a stream that goes on elsewhere feeds the text so far, drops
    the events, and goes on. White space around calls is no content.

    Attributes:
        calls: that have begun.
    """

    def __init__(self) -> None:
        """Begin before the text."""
        self.calls = 0
        self._rest = ""
        self._space = ""
        self._reader = CallReader(0)
        self._state: State = self._content

    def feed(self, text: str) -> list[Event]:
        """Take a piece of text; return what it means."""
        self._rest += text
        events: list[Event] = []
        while True:
            before = self._state, len(self._rest)
            events += self._state()
            if before == (self._state, len(self._rest)) or not self._rest:
                return events

    def finish(self) -> list[Event]:
        """End the text; return what was held back and is content."""
        rest, self._rest = self._rest, ""
        events = self._say(rest)
        if self._space and not self.calls:
            events.append(self._space)
        self._space = ""
        return events

    def _content(self) -> list[Event]:
        raise NotImplementedError

    def _say(self, text: str) -> list[Event]:
        """Return content, without white space at its end, which may be before a call."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [shown] if shown else []

    def _until(self, marker: str, then: State) -> list[Event]:
        """Pass content on up to a marker; hold back what may begin one."""
        before, mark, after = self._rest.partition(marker)
        if mark:
            events = self._say(before)
            self._rest, self._space, self._state = after, "", then
            return events
        stop = len(self._rest) - _begun(self._rest, marker)
        shown, self._rest = self._rest[:stop], self._rest[stop:]
        return self._say(shown)

    def _read_call(self, following: State, fallback: State) -> list[Event]:
        """Let the reader take all that there is.

        Args:
            following: state behind the call.
            fallback: state before the text of what is no call.
        """
        reader = self._reader
        begun = reader.begun
        events, self._rest = reader.feed(self._rest)
        self.calls += reader.begun and not begun
        if reader.failed:
            self._rest = reader.text + self._rest
            self._state = fallback
        elif reader.done:
            self._state = following
        return events


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def finish(self) -> list[Event]:
        """End the text; a call that was cut off before its name is dropped."""
        if self._state == self._call:
            self._rest = ""
        return super().finish()

    def _content(self) -> list[Event]:
        return self._until(self._OPEN, self._begin)

    def _begin(self) -> list[Event]:
        self._reader = CallReader(self.calls)
        self._state = self._call
        return []

    def _call(self) -> list[Event]:
        return self._read_call(self._after, self._faulty)

    def _after(self) -> list[Event]:
        """Skip what closes a call."""
        self._rest = self._rest.lstrip()
        if self._rest.startswith(self._CLOSE):
            self._rest = self._rest[len(self._CLOSE) :]
            self._state = self._content
        elif self._rest and not self._CLOSE.startswith(self._rest):
            self._state = self._content
        return []

    def _faulty(self) -> list[Event]:
        """Show what stands in place of a call, without its markup."""
        return self._until(self._CLOSE, self._content)


class LlamaParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` at the beginning, or after `<|python_tag|>`.

    Further calls follow after `;`. An object that names no function of the request is content.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        """Begin before the text; `names` are those of the request's functions."""
        super().__init__()
        self._names = frozenset(names)
        self._reader = CallReader(0, self._names)
        self._state = self._first

    def finish(self) -> list[Event]:
        """End the text; an object that was not whole is content."""
        if self._state == self._call and not self._reader.begun:
            self._rest = self._reader.text + self._rest
        return super().finish()

    def _first(self) -> list[Event]:
        """Look whether the text begins with an object."""
        text = self._rest.lstrip()
        if not text or (text != self._TAG and self._TAG.startswith(text)):
            return []
        if text.startswith(self._TAG):
            self._rest = text[len(self._TAG) :]
        elif text.startswith("{"):
            self._rest = text
            self._begin()
        else:
            self._state = self._content
        return []

    def _content(self) -> list[Event]:
        return self._until(self._TAG, self._first)

    def _begin(self) -> None:
        self._reader = CallReader(self.calls, self._names)
        self._state = self._call

    def _call(self) -> list[Event]:
        return self._read_call(self._after, self._content)

    def _after(self) -> list[Event]:
        self._rest = self._rest.lstrip(" \t\r\n;")
        if self._rest:
            self._state = self._first
        return []


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    _MARK = "[TOOL_CALLS]"

    def __init__(self) -> None:
        """Begin before the text."""
        super().__init__()
        self._arguments = JsonEnd()

    def finish(self) -> list[Event]:
        """End the text; what is left of calls is dropped."""
        if self._state != self._content:
            self._rest = ""
        return super().finish()

    def _content(self) -> list[Event]:
        return self._until(self._MARK, self._begin)

    def _begin(self) -> list[Event]:
        """Tell the two forms apart."""
        self._rest = self._rest.lstrip()
        if self._rest.startswith("["):
            self._rest = self._rest[1:]
            self._state = self._between
        elif match := _MISTRAL_HEAD.match(self._rest):
            self._rest = self._rest[match.end() :]
            self._arguments = JsonEnd()
            self._state = self._named
            self.calls += 1
            return [CallStart(self.calls - 1, match[1])]
        elif len(self._rest) > _LONGEST_HEAD:
            self._state = self._content
        return []

    def _between(self) -> list[Event]:
        """Skip to the next object of the list, or to its end."""
        self._rest = self._rest.lstrip(" \t\r\n,")
        if self._rest.startswith("]"):
            self._rest = self._rest[1:]
            self._state = self._content
        elif self._rest:
            self._reader = CallReader(self.calls)
            self._state = self._call
        return []

    def _call(self) -> list[Event]:
        return self._read_call(self._between, self._content)

    def _named(self) -> list[Event]:
        used = self._arguments.feed(self._rest)
        piece, self._rest = self._rest[:used], self._rest[used:]
        if self._arguments.done:
            self._state = self._content
        return [CallArguments(self.calls - 1, piece)] if piece else []


class RequiredParser(MistralParser):
    """A list of calls and nothing else, as a grammar makes it."""

    def __init__(self) -> None:
        """Begin before the list."""
        super().__init__()
        self._state = self._begin


class NamedParser(ToolParser):
    """The arguments of one call and nothing else, as a grammar makes them."""

    def __init__(self, name: str) -> None:
        """Begin before the arguments of this function."""
        super().__init__()
        self._name = name

    def _content(self) -> list[Event]:
        piece, self._rest = self._rest, ""
        if not piece:
            return []
        start: list[Event] = [] if self.calls else [CallStart(0, self._name)]
        self.calls = 1
        return [*start, CallArguments(0, piece)]


def detect_parser(template: str | None) -> ParserName | None:
    """Return the format that a chat template asks the model for; None where it names none."""
    if template is None:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    llama = "<|python_tag|>" in template or "<|start_header_id|>" in template
    return "llama3_json" if llama and "parameters" in template else None


def make_parser(name: ParserName, functions: Collection[str]) -> ToolParser:
    """Return a fresh parser of a format; `functions` are the names of the request's."""
    if name == "hermes":
        return HermesParser()
    return MistralParser() if name == "mistral" else LlamaParser(functions)


def _begun(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
