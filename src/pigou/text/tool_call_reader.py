"""Reads one tool call, a JSON object with `name` and `arguments`, as its text grows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

#: Where a call that says its name first has its arguments.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])',
    re.DOTALL,
)
#: The first key of an object, or what stands in its place.
_FIRST = re.compile(r'\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]))', re.DOTALL)
_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}
#: Characters within which a name is looked for before the object is whole.
_HEAD_LENGTH = 4096
_SCALAR_ENDS = ",]} \t\r\n"


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


#: Text is content.
Event: TypeAlias = str | CallStart | CallArguments


class JsonEnd:
    """Finds where one JSON value ends, in text that comes in pieces."""

    __slots__ = ("_begun", "_depth", "_escaped", "_quoted", "done")

    def __init__(self, depth: int = 0) -> None:
        """Begin before a value, or `depth` brackets within one."""
        self._depth = depth
        self._begun = depth > 0
        self._quoted = self._escaped = False
        self.done = False

    def feed(self, text: str) -> int:
        """Take a piece; return how much of it belongs to the value."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
                    if not self._depth:
                        return self._end(at + 1)
            elif char == '"':
                self._quoted = self._begun = True
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
    """Reads one object; its arguments are passed on as they come, where its name comes first.

    Attributes:
        done: the object has ended.
        begun: the name is known.
        failed: it is no call; `text` is what came.
        is_json: a quoted key is in the place of an object's first.
        text: what came before the name was known.
    """

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """Begin before an object.

        Args:
            names: of functions; an object that names another is no call. None for any name.
        """
        self._index = index
        self._names = names
        self._whole = JsonEnd()
        self._arguments: JsonEnd | None = None
        self._tail: JsonEnd | None = None
        self.done = self.begun = self.failed = self.is_json = False
        self.text = ""

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Take a piece; return what it means, and what of it comes after the object."""
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
        """Look for the name; return what is left, and what it means."""
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
            name = _loaded(match[1])
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
        """Read an object that is whole, whatever the order of its keys."""
        call = _loaded(self.text)
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        name = call.get("name", call.get("function")) if isinstance(call, dict) else None
        known = isinstance(name, str) and (self._names is None or name in self._names)
        keys = call.keys() & {"arguments", "parameters"} if isinstance(call, dict) else ()
        if not isinstance(call, dict) or not isinstance(name, str) or not known:
            self.failed = True
            return []
        if self._names is not None and not keys:
            self.failed = True
            return []
        given = call.get("arguments", call.get("parameters"))
        if not isinstance(given, str):
            given = json.dumps({} if given is None else given, ensure_ascii=False)
        self.begun = self.done = True
        return [CallStart(self._index, name), CallArguments(self._index, given or "{}")]


def _loaded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
