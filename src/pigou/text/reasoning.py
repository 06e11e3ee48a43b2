"""Tells reasoning from content as a reply's text grows, by the tags of the model's family."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pigou.text.tool_calls import CallArguments, CallStart, Event, Thought, ToolParser, cut, is_open

if TYPE_CHECKING:
    from pigou.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How a family of models marks reasoning."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    inside: bool = False  # replies begin inside, unless the prompt closed it
    tool_marks: tuple[str, ...] = ()  # content that ends it as well: the beginning of tool calls
    signs: tuple[str, ...] = ()  # texts by which a chat template shows the family


_KIMI = "<|tool_calls_section_begin|>"
_THINK, _INSIDE = ReasoningFamily(), ReasoningFamily(inside=True)
HARMONY = "openai_gptoss"
#: Families by vLLM's names; `auto` takes the first whose sign is in the template.
FAMILIES: Mapping[str, ReasoningFamily] = {
    HARMONY: ReasoningFamily((), ("<|channel|>final<|message|>",), True, signs=("<|channel|>",)),
    "mistral": ReasoningFamily(("[THINK]",), ("[/THINK]",), signs=("[THINK]",)),
    "granite": ReasoningFamily(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"), signs=("my thought process",),
    ),
    "seed_oss": ReasoningFamily(("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",)),
    "kimi_k2": ReasoningFamily(tool_marks=(_KIMI,), signs=(_KIMI,)),
    "glm45": ReasoningFamily(signs=("[gMASK]", "think>")),
    "deepseek_r1": ReasoningFamily(inside=True, signs=("<｜Assistant｜>", "</think>")),
    "qwen3": ReasoningFamily(signs=("<think>",)),
    **dict.fromkeys(("deepseek_v3", "holo2", "ernie45", "hunyuan_a13b", "nemotron_v3"), _THINK),
    **dict.fromkeys(("minimax_m2", "olmo3", "step3"), _INSIDE),
}  # fmt: skip


def detect_family(template: str | None) -> str | None:
    """Return the reasoning family that a chat template shows, or None."""
    signs = ((name, family.signs) for name, family in FAMILIES.items() if family.signs)
    text = template or ""
    return next((name for name, signs in signs if all(sign in text for sign in signs)), None)


def begins_inside(family: ReasoningFamily, prompt: str, final: str | None) -> bool:
    """Return whether a reply begins within reasoning, by the end of its prompt's text.

    `final` is the text of a final message that the reply continues, if any.
    """
    if is_open(family.opens, family.closes, prompt, final):
        return True
    return final is None and family.inside and not prompt.rstrip().endswith(family.closes)


class ThinkParser(ToolParser):
    """Splits off the reasoning before the first closing tag; `inner` parses what follows."""

    def __init__(
        self, family: ReasoningFamily, inside: bool, inner: ToolParser | None = None
    ) -> None:
        super().__init__()
        self._family, self._inner = family, inner
        self.thinking = inside
        self._state = self._begin

    def finish(self) -> list[Event]:
        """End the text; return what was held back."""
        if self._state != self._content and self.thinking:
            return [Thought(self._rest)] if self._rest else []
        events = self._content()
        return events if self._inner is None else events + self._inner.finish()

    @property
    def has_called(self) -> bool:
        """True after the end of a call behind the reasoning."""
        return self._inner is not None and self._inner.has_called

    def _begin(self) -> list[Event]:
        text = self._rest.lstrip()
        opened = next((tag for tag in self._family.opens if text.startswith(tag)), "")
        if not opened and any(tag.startswith(text) for tag in self._family.opens):
            return []
        if opened:
            self._rest, self.thinking = text[len(opened) :], True
        self._state = self._reasoning if self.thinking else self._content
        return []

    def _reasoning(self) -> list[Event]:
        shown, mark, rest = cut(self._rest, (*self._family.closes, *self._family.tool_marks))
        self._rest = mark + rest if mark in self._family.tool_marks else rest
        if mark:
            self._state, self.thinking = self._content, False
        return [Thought(shown)] if shown else []

    def _content(self) -> list[Event]:
        text, self._rest = self._rest, ""
        if self._inner is not None:
            return self._inner.feed(text)
        return [text] if text else []


#: Bytes in which the end of reasoning is looked for.
_TAIL_BYTES = 96
_HEAD = re.compile(r"<\|channel\|>\s*(\w+)|\bto=([\w.-]+)")
_HEAD_MARKS = ("<|channel|>", "<|start|>", "<|message|>", "to=")
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
#: Control tokens shown to the parser of harmony.
HARMONY_MARKUP = (*_HEAD_MARKS[:3], *_BODY_ENDS, "<|constrain|>")


class HarmonyParser(ToolParser):
    """gpt-oss' messages: `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`.

    A message to a function of the request is a tool call; analysis, and messages to other
    recipients, are reasoning; the rest is content, which `inner` may parse.
    """

    def __init__(self, names: Collection[str] = (), inner: ToolParser | None = None) -> None:
        super().__init__()
        self._names, self._inner = frozenset(names), inner
        self.thinking = False
        self._called = False
        self._state = self._begin

    def finish(self) -> list[Event]:
        """End the text; a head that was cut off is dropped."""
        rest, self._rest = self._rest, ""
        events = [] if self._state == self._head or not rest else self._shown(rest)
        return events if self._inner is None else events + self._inner.finish()

    def _begin(self) -> list[Event]:
        text = self._rest.lstrip()
        if not any(mark.startswith(text) or text.startswith(mark) for mark in _HEAD_MARKS):
            self._state = self._content
        elif text.startswith(_HEAD_MARKS):
            self._state = self._head
        return []

    def _head(self) -> list[Event]:
        head, mark, rest = self._rest.partition("<|message|>")
        if not mark:
            return []
        self._rest, self._state = rest, self._content
        parts = _HEAD.findall(head)
        channel = next((name for name, _ in parts if name), "")
        recipient = next((name for _, name in parts if name), "")
        name = recipient.removeprefix("functions.")
        self._called = name in self._names
        self.thinking = not self._called and (channel == "analysis" or bool(recipient))
        if not self._called:
            return []
        self.calls += 1
        return [CallStart(self.calls - 1, name)]

    def _content(self) -> list[Event]:
        shown, mark, rest = cut(self._rest, _BODY_ENDS)
        self._rest = mark + rest
        if mark:
            self._state = self._head
        return self._shown(shown) if shown else []

    def _shown(self, text: str) -> list[Event]:
        if self._called:
            return [CallArguments(self.calls - 1, text)]
        if self.thinking:
            return [Thought(text)]
        return [text] if self._inner is None else self._inner.feed(text)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the replies to a request reason."""

    name: str  # key of `FAMILIES`
    inside: bool  # replies begin within reasoning
    shown: bool = True  # pass it on to the client

    @property
    def marks(self) -> tuple[str, ...]:
        """Markup that the parser must see."""
        family = FAMILIES[self.name]
        harmony = HARMONY_MARKUP if self.name == HARMONY else ()
        return (*family.opens, *family.closes, *family.tool_marks, *harmony)

    def parser(self, inner: ToolParser | None, names: Collection[str]) -> ToolParser:
        """Return a parser of replies; `names` are the functions that the model itself may call."""
        if self.name == HARMONY:
            return HarmonyParser(names, inner)
        return ThinkParser(FAMILIES[self.name], self.inside, inner)

    def end(self, tokenizer: Tokenizer) -> ReasoningEnd:
        """Return a watch for its end in a reply's tokens."""
        family = FAMILIES[self.name]
        opening = () if self.inside else tokenizer.ids(family.opens)
        return ReasoningEnd(family, self.inside, tokenizer.vocabulary.bytes_of, opening)


class ReasoningEnd:
    """Watches a reply's tokens for the end of reasoning, from which on a grammar holds."""

    def __init__(
        self, family: ReasoningFamily, inside: bool, bytes_of: Callable[[int], bytes],
        opening: Collection[int],
    ) -> None:  # fmt: skip
        self.open = inside
        self.opening = opening  # tokens that may open it as the reply's first
        # gpt-oss may tell the form of its final message before its body.
        pattern = "|".join(map(re.escape, family.closes)).replace("final", r"final[^<]*(?:<[^<]*)?")
        self._end = re.compile(pattern.encode())
        self._bytes_of, self._seen = bytes_of, b""

    def take(self, token: int) -> bool:
        """Add a token; return whether it is reasoning's, its closing tag included."""
        if self.open:
            self._seen += self._bytes_of(token)
            self.open = self._end.search(self._seen) is None
            self._seen = self._seen[-_TAIL_BYTES:]
            return True
        self.open = token in self.opening
        self.opening = ()
        return self.open
