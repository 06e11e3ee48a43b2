"""Tells tool calls from content as a reply's text grows, by the format of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from pigou.text.call_values import json_of, loaded, python_calls, schema_types
from pigou.text.stop_strings import begun

#: Key of the arguments, after the name.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])',
    re.DOTALL,
)
#: First key of an object, or its replacement.
_FIRST = re.compile(r'\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]))', re.DOTALL)
_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}
#: Characters searched for a name before the object is complete.
_HEAD_LENGTH = 4096
_SCALAR_ENDS = ",]} \t\r\n"
_LONGEST_NAME = 200
ParserName = Literal[
    "hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "pythonic", "qwen3_coder", "glm45"
]  # fmt: skip
PARSERS: tuple[ParserName, ...] = get_args(ParserName)
#: Begin and end of reasoning, which has no calls.
REASONING: Mapping[str, str] = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_FENCES = ("```json", "```tool_call", "```")
#: An open code fence at the end of a text, or what may become one.
_FENCE_END = re.compile(r"`{1,3}\w{0,12}\Z")


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A further piece of the reasoning."""

    text: str


#: Text is content.
Event: TypeAlias = str | Thought | CallStart | CallArguments


class JsonEnd:
    """Finds the end of one JSON value in streamed text."""

    __slots__ = ("_begun", "_depth", "_escaped", "_quoted", "_quotes", "done")

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        """Begin before a value, or `depth` brackets within one."""
        self._quotes = quotes
        self._depth = depth
        self._begun = depth > 0
        self._quoted, self._escaped = "", False
        self.done = False

    def feed(self, text: str) -> int:
        """Feed a piece; return how much belongs to the value."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quoted:
                    self._quoted = ""
                    if not self._depth:
                        return self._end(at + 1)
            elif char in self._quotes:
                self._quoted, self._begun = char, True
            elif char in "{[":
                self._depth += 1
                self._begun = True
            elif not self._depth and self._begun and char in _SCALAR_ENDS:
                return self._end(at)
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._end(at + 1)
            elif not char.isspace():
                self._begun = True
        return len(text)

    def _end(self, at: int) -> int:
        self.done = True
        return at


class CallReader:
    """Parses one object of `names`; streams its arguments once its name is known."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._whole = JsonEnd()
        self._arguments: JsonEnd | None = None
        self._tail: JsonEnd | None = None
        self.done = False  # the object has ended
        self.begun = False  # the name is known
        self.failed = False  # it is no call; `text` is the input so far
        self.is_json = False  # the first key is quoted
        self.text = ""  # text before the name was known

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Feed a piece; return its events, and the text after the object."""
        events: list[Event] = []
        if not self.begun:
            text, events = self._head(text)
        if self._arguments is not None and not self._arguments.done and text:
            used = self._arguments.feed(text)
            if used:
                events.append(CallArguments(self._index, text[:used]))
            text = text[used:]
        if self._arguments is not None and self._arguments.done and not self.done:
            self._tail = self._tail or JsonEnd(1)
            text = text[self._tail.feed(text) :]
            self.done = self._tail.done
        return events, text

    def _head(self, text: str) -> tuple[str, list[Event]]:
        used = self._whole.feed(text)
        self.text += text[:used]
        rest = text[used:]
        if self.text.strip() and not self.text.lstrip().startswith("{"):
            self.failed = True
            return rest, []
        if not self.is_json and (first := _FIRST.match(self.text)):
            self.is_json = first[1] is not None
            self.failed = self._names is not None and first[1] not in _KEYS
            if self.failed:
                return rest, []
        match = _HEAD.match(self.text) if len(self.text) <= _HEAD_LENGTH else None
        if match is not None:
            name = loaded(match[1])
            if isinstance(name, str) and (self._names is None or name in self._names):
                self.begun = True
                self._arguments = JsonEnd()
                return self.text[match.end() :] + rest, [CallStart(self._index, name)]
            if self._whole.done:
                self.failed = True
            return rest, []
        if not self._whole.done:
            return rest, []
        return rest, self._entire()

    def _entire(self) -> list[Event]:
        call = loaded(self.text)
        call = call if isinstance(call, dict) else {}
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = call.get("name", call.get("function"))
        if self._names is not None and not call.keys() & {"arguments", "parameters"}:
            name = None
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            self.failed = True
            return []
        given = call.get("arguments", call.get("parameters"))
        if not isinstance(given, str):
            given = json.dumps({} if given is None else given, ensure_ascii=False)
        self.begun = self.done = True
        return [CallStart(self._index, name), CallArguments(self._index, given or "{}")]


def cut(text: str, marks: Collection[str]) -> tuple[str, str, str]:
    """Return text before the first mark, the mark, and the rest; "" and what may begin one."""
    at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
    if at < 0:
        at = len(text) - begun(text, marks, max(map(len, marks)))
    return text[:at], mark, text[at + len(mark) :]


#: State of a parser: takes the text at hand, and returns its events.
State: TypeAlias = Callable[[], list[Event]]


class ToolParser:
    """Tells tool calls from content (and reasoning) in a growing text; to resume, replay it."""

    thinking = False  # the text so far ends within reasoning

    def __init__(self) -> None:
        self.calls = 0
        self._rest = ""
        self._state: State = self._content

    def feed(self, text: str) -> list[Event]:
        """Feed text; return its events."""
        self._rest += text
        events: list[Event] = []
        while True:
            before = self._state, len(self._rest)
            events += self._state()
            if before == (self._state, len(self._rest)) or not self._rest:
                return events

    def finish(self) -> list[Event]:
        """End the text; return held content."""
        raise NotImplementedError

    @property
    def has_called(self) -> bool:
        """True if a call is complete, as far as the format shows it."""
        return False

    def _content(self) -> list[Event]:
        raise NotImplementedError


class MarkedParser(ToolParser):
    """Calls behind a marker: one object, several, or a list, with or without prose.

    An unmarked object is a call if it names a function of the request, after prose behind a marker
    or in a format without markers. `reasoning` is the tag opened before the text.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str] = ""
    SECTION: ClassVar[tuple[str, ...]] = ()  # marks around all calls, which are not content
    HEAD_MARKS: ClassVar[tuple[str, ...]] = ()  # marks between a call's name and its arguments
    BARE: ClassVar[bool] = False  # calls need no marker
    SHOWN: ClassVar[str] = ""  # marker, if content where no call follows

    def __init__(self, names: Collection[str] = (), reasoning: str = "") -> None:
        super().__init__()
        self._names = frozenset(names)
        self._functions: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._bare = self.BARE
        self._fenced = False
        self._held = self._skipped = ""
        self._marked = False
        self._reader = CallReader(0)
        self._end = JsonEnd()
        self._closer = REASONING.get(reasoning, "")
        if reasoning:
            self._state = self._reasoning

    def finish(self) -> list[Event]:
        """End the text; a call that was cut off before its name is dropped."""
        rest, self._rest = self._rest, ""
        if self._state == self._open and self._is_prose(rest):
            rest = self._skipped + rest
        elif self._state == self._call and not self._reader.begun and not self._marked:
            rest = self._reader.text + rest
        elif self._state not in (self._content, self._reasoning, self._other_json):
            rest = ""
        events = self._say(rest)
        held, self._held = self._held.rstrip() if self.calls else self._held, ""
        return [*events, held] if held else events

    @property
    def has_called(self) -> bool:
        """True after a call's end."""
        return self.calls > 0 and self._state in (self._after, self._content)

    # --- content ----------------------------------------------------------------------------

    def _content(self) -> list[Event]:
        marks = [self.OPEN, *self.SECTION, *REASONING]
        if self._bare:
            marks += ["{", self.CLOSE] if self.CLOSE else ["{"]
        mark, events = self._until(marks)
        if mark == self.OPEN:
            self._skipped, self._state = self.SHOWN, self._open
        elif mark == "{":
            self._rest = "{" + self._rest
            self._begin(marked=False)
        elif mark in REASONING:
            events += self._say(mark)
            self._closer, self._state = REASONING[mark], self._reasoning
        elif mark:
            self._bare = False
        return events

    def _reasoning(self) -> list[Event]:
        mark, events = self._until([self._closer])
        if mark:
            events += self._say(mark)
            self._state = self._content
        return events

    def _other_json(self) -> list[Event]:
        used = self._end.feed(self._rest)
        events, self._rest = self._say(self._rest[:used]), self._rest[used:]
        if self._end.done:
            self._state = self._content
        return events

    def _until(self, marks: list[str]) -> tuple[str, list[Event]]:
        """Pass content up to the first marker, and consume it; hold back a possible beginning."""
        shown, mark, self._rest = cut(self._rest, marks)
        return mark, self._say(shown)

    def _say(self, text: str) -> list[Event]:
        text = self._held + text
        shown = text.rstrip()
        if shown.endswith("["):
            shown = shown[:-1].rstrip()
        if fence := _FENCE_END.search(shown[-16:]):
            shown = shown[: len(shown) - len(fence[0])].rstrip()
        self._held = text[len(shown) :]
        return [shown] if shown else []

    # --- calls ------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        self._bare = True
        if not self._skip(" \t\r\n[,", _FENCES):
            return []
        if self._rest.startswith("{"):
            self._begin(marked=not self.BARE)
            return []
        return self._head()

    def _head(self) -> list[Event]:
        self._rest = self._skipped + self._rest
        self._state = self._content
        return []

    def _is_prose(self, rest: str) -> bool:
        """Whether a text that ends behind a marker is more than a call that was cut off."""
        return bool(rest) and not self.CLOSE.startswith(rest) and not rest.startswith("`")

    def _begin(self, *, marked: bool) -> None:
        self._marked = marked
        self._reader = CallReader(self.calls, None if marked else self._names)
        self._state = self._call

    def _call(self) -> list[Event]:
        reader = self._reader
        begun = reader.begun
        events, self._rest = reader.feed(self._rest)
        if reader.begun and not begun:
            self._note_call()
        if reader.failed:
            self._rest = reader.text + self._rest
            self._end, self._state = JsonEnd(), self._other_json
            if not reader.is_json:
                events += self._say("{")
                self._rest, self._state = self._rest[1:], self._content
        elif reader.done:
            self._skipped, self._state = "", self._after
        return events

    def _note_call(self) -> None:
        self.calls += 1
        self._fenced = "```" in self._held + self._skipped
        self._held = ""

    def _after(self) -> list[Event]:
        closing = [mark for mark in (self.CLOSE, "```" if self._fenced else "") if mark]
        if not self._skip(" \t\r\n,;]", closing):
            return []
        if self.CLOSE and self.CLOSE in self._skipped:
            self._bare = False
        if self._bare and self._rest.startswith("{"):
            self._begin(marked=self._marked)
        else:
            self._rest = self._skipped[len(self._skipped.rstrip()) :] + self._rest
            self._state = self._content
        return []

    def _skip(self, chars: str, marks: Collection[str]) -> bool:
        """Skip characters and marks; return whether it is known that none follows."""
        while self._rest:
            if self._rest[0] in chars:
                length = 1
            elif any(mark.startswith(self._rest) and mark != self._rest for mark in marks):
                return False
            else:
                length = max((len(m) for m in marks if self._rest.startswith(m)), default=0)
            if not length:
                return True
            self._skipped += self._rest[:length]
            self._rest = self._rest[length:]
        return False


class HermesParser(MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"


class LlamaParser(MarkedParser):
    """`{"name": ..., "parameters": {...}}`, joined by `;`, with or without `<|python_tag|>`."""

    OPEN = "<|python_tag|>"
    BARE = True


class MistralParser(MarkedParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    OPEN = "[TOOL_CALLS]"
    HEAD_MARKS: ClassVar[tuple[str, ...]] = ("[ARGS]", "[CALL_ID]")
    #: Name of a call and what follows it.
    HEAD = re.compile(r"([\w.-]+?)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
    #: Possible beginning of such a head; more characters are content.
    BEGUN = re.compile(r"[\w.-]{1,128}\s*(?:\[[A-Z_]*\]?\s*[\w-]{0,64}\s*){0,2}")

    def _head(self) -> list[Event]:
        if match := self.HEAD.match(self._rest):
            self._skipped += match[0]
            self._rest = self._rest[match.end() :]
            self._end, self._state, self._marked = JsonEnd(), self._named, True
            self._note_call()
            return [CallStart(self.calls - 1, match[1])]
        return [] if self.BEGUN.fullmatch(self._rest) else super()._head()

    def _is_prose(self, rest: str) -> bool:
        name = re.match(r"[\w.-]*", rest)
        cut = name is not None and any(known.startswith(name[0]) for known in self._names)
        return super()._is_prose(rest) and not cut and "[ARGS" not in rest

    def _named(self) -> list[Event]:
        used = self._end.feed(self._rest)
        piece, self._rest = self._rest[:used], self._rest[used:]
        if self._end.done:
            self._skipped, self._state = "", self._after
        return [CallArguments(self.calls - 1, piece)] if piece else []


class DeepSeekParser(MistralParser):
    """DeepSeek's calls, with the arguments in a fence (V3, R1) or without one (V3.1)."""

    SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    HEAD_MARKS = ("<｜tool▁sep｜>",)
    HEAD = re.compile(
        r"(?:function<｜tool▁sep｜>)?([\w.-]{1,128})(?:<｜tool▁sep｜>)?\s{0,8}(?:```json\s{0,8})?(?=\{)"
    )
    BEGUN = re.compile(r"[^{]{1,200}")

    def _is_prose(self, rest: str) -> bool:  # noqa: ARG002
        return False


class KimiParser(DeepSeekParser):
    """Kimi's calls: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}`."""

    SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    OPEN, CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
    HEAD_MARKS = ("<|tool_call_argument_begin|>",)
    HEAD = re.compile(
        r"(?:functions\.)?([\w.-]{1,128})(?::\d{1,6})?\s{0,8}"
        r"<\|tool_call_argument_begin\|>\s{0,8}(?=\{)"
    )


class PythonicParser(MarkedParser):
    """`[f(a=1, b='x'), g()]`: calls in Python's notation at the start of a reply (Llama 3.2, 4)."""

    SECTION = ("<|python_start|>", "<|python_end|>")
    OPEN = SHOWN = "["
    HEAD = re.compile(r"\s{0,8}(?:([A-Za-z_][\w.]{0,127})(\(.*)?)?", re.DOTALL)
    _prose, _used = False, 0  # content came before; characters of a list that were read

    def _is_prose(self, rest: str) -> bool:  # noqa: ARG002
        return True

    def _reasoning(self) -> list[Event]:
        events = super()._reasoning()
        self._prose = self._state != self._content
        return events

    def _say(self, text: str) -> list[Event]:
        self._prose = self._prose or bool(text.strip())
        return super()._say(text)

    def _content(self) -> list[Event]:
        events = super()._content()
        self._end, self._used = JsonEnd(1, "\"'"), 0
        return events

    def _open(self) -> list[Event]:
        head = self.HEAD.fullmatch(self._rest)
        if self._prose or head is None or (head[2] and head[1] not in self._names):
            self._state = self._content
            return self._say(self.OPEN)
        self._used += self._end.feed(self._rest[self._used :])
        if not self._end.done:
            return []
        text, self._rest = self.OPEN + self._rest[: self._used], self._rest[self._used :]
        self._state = self._content
        events: list[Event] = []
        for name, arguments in (calls := python_calls(text, self._names)):
            self._note_call()
            events += [CallStart(self.calls - 1, name), CallArguments(self.calls - 1, arguments)]
        return events if calls else self._say(text)


class QwenParser(MarkedParser):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` (Qwen3-Coder)."""

    SECTION: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    OPEN = SHOWN = "<function="
    CLOSE = "</function>"
    NAME_END: ClassVar[tuple[str, ...]] = (">",)
    PARAMETER_END: ClassVar[str] = "</parameter>"
    PARAMETER = re.compile(r"<parameter=([^<>]*)>\n?(.*?)\n?(?=<parameter=|\Z)", re.DOTALL)

    def _is_prose(self, rest: str) -> bool:
        return not any(name.startswith(rest.strip()) for name in self._names)

    def _open(self) -> list[Event]:
        said, mark, rest = cut(self._rest, self.NAME_END)
        if not mark and len(said) <= _LONGEST_NAME:
            return []
        name = said.strip()
        if len(said) > _LONGEST_NAME or name not in self._names:
            self._state = self._content
            return self._say(self.OPEN)
        self._rest = rest if mark == ">" else mark + rest
        given = ((self._functions.get(name) or {}).get("parameters") or {}).get("properties")
        self._properties: Mapping[str, Any] = given if isinstance(given, dict) else {}
        self._parts, self._separator, self._state = list[str](), "{", self._parameters
        self._note_call()
        return [CallStart(self.calls - 1, name)]

    def _parameters(self) -> list[Event]:
        text, mark, rest = cut(self._rest, (self.PARAMETER_END, self.CLOSE))
        self._rest = rest if mark else self._rest[len(text) :]
        self._parts.append(text)
        if not mark:
            return []
        said = ""
        for key, value in self.PARAMETER.findall("".join(self._parts)):
            typed = json_of(value, schema_types(self._properties.get(key.strip())))
            said += f"{self._separator}{json.dumps(key.strip(), ensure_ascii=False)}: {typed}"
            self._separator = ", "
        self._parts = []
        if mark == self.CLOSE:
            said += "{}" if self._separator == "{" else "}"
            self._state = self._content
        return [CallArguments(self.calls - 1, said)] if said else []


class GlmParser(QwenParser):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` (GLM 4.5 to 4.7)."""

    SECTION = ()
    OPEN = SHOWN = "<tool_call>"
    CLOSE = "</tool_call>"
    NAME_END = ("<arg_key>", "</tool_call>")
    PARAMETER_END = "</arg_value>"
    PARAMETER = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
    HEAD_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class RequiredParser(MistralParser):
    """A list of calls and nothing else, as a grammar makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._open


class NamedParser(ToolParser):
    """The arguments of one call and nothing else, as a grammar makes them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def finish(self) -> list[Event]:
        """End the text, of which nothing was held back."""
        return []

    def _content(self) -> list[Event]:
        piece, self._rest = self._rest, ""
        if not piece:
            return []
        start: list[Event] = [] if self.calls else [CallStart(0, self._name)]
        self.calls = 1
        return [*start, CallArguments(0, piece)]


_KINDS: Mapping[ParserName, type[MarkedParser]] = {
    "hermes": HermesParser, "llama3_json": LlamaParser, "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser, "kimi_k2": KimiParser, "pythonic": PythonicParser,
    "qwen3_coder": QwenParser, "glm45": GlmParser,
}  # fmt: skip
#: Markup tokens of a format, shown to its parser.
MARKUP: Mapping[ParserName, tuple[str, ...]] = {
    name: tuple(filter(None, (kind.OPEN, kind.CLOSE, *kind.SECTION, *kind.HEAD_MARKS)))
    for name, kind in _KINDS.items()
}


def detect_parser(template: str | None) -> ParserName | None:
    """Return a chat template's tool call format, or None."""
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<｜tool▁calls▁begin｜>" in text:
        return "deepseek_v3"
    if "<|tool_call_begin|>" in text:
        return "kimi_k2"
    if "<tool_call>" in text:
        return (
            "qwen3_coder" if "<function=" in text else "glm45" if "<arg_key>" in text else "hermes"
        )
    if "func_name1(" in text:
        return "pythonic"
    llama = "<|python_tag|>" in text or "<|start_header_id|>" in text
    return "llama3_json" if llama and "parameters" in text else None


def make_parser(name: ParserName, functions: Collection[str], reasoning: str = "") -> ToolParser:
    """Return a fresh parser of a format; `reasoning` is the tag that opened it before the text."""
    return _KINDS[name](functions, reasoning)


def is_open(
    opens: Collection[str], closes: Collection[str], prompt: str, final: str | None
) -> bool:
    """Return whether a prompt ends within tags; `final` is the text of a message it continues."""
    if final is None:
        return prompt.rstrip().endswith(tuple(opens))
    opened = max(map(final.rfind, opens), default=-1)
    return opened > max(map(final.rfind, closes))


def open_reasoning(prompt: str, final: str | None) -> str:
    """Return the open reasoning tag at the start of a reply, or ""."""
    tags = (tag for tag, end in REASONING.items() if is_open((tag,), (end,), prompt, final))
    return next(tags, "")
