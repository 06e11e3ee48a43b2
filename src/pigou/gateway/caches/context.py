"""Context compiler: one prompt from its parts, the stable ones first, within token budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pigou.wire.errors import bad_request

#: Bytes of a token, where no tokenizer is known.
_BYTES_PER_TOKEN = 4
#: Parts in the order of the prompt.
PARTS = ("system", "tools", "history", "evidence", "user")


class Passage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Evidence, with its id in its corpus."""

    id: str
    text: str


class Budgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Most tokens of each part; None for no limit."""

    system: int | None = None
    tools: int | None = None
    history: int | None = None
    evidence: int | None = None
    user: int | None = None
    total: int | None = None


class Context(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parts of a prompt; tools, history and evidence are dropped from where they matter least."""

    user: str
    system: str = ""
    tools: list[dict[str, Any]] = []  # most important first
    history: list[dict[str, Any]] = []  # messages, oldest first
    evidence: list[Passage] = []  # most relevant first
    budgets: Budgets = Budgets()


class CompiledContext(msgspec.Struct, kw_only=True):
    """Messages and tools for a chat, tokens of each part, and what was dropped."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tokens: dict[str, int]
    dropped: dict[str, list[str]]  # names of tools, numbers of messages, ids of passages


def estimated_tokens(text: str) -> int:
    """Return a text's tokens, estimated from its bytes."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def compile_context(
    context: Context, count: Callable[[str], int] = estimated_tokens
) -> CompiledContext:
    """Compile a prompt; raises APIError 400 if system or user alone exceed a budget.

    Tools are sorted by name with sorted keys, so that the same set gives the same prefix. Evidence
    comes after system, tools and history, in the last message: another evidence leaves the prefix
    cached.
    """
    limits, room = context.budgets, context.budgets.total
    tokens, dropped = dict.fromkeys(PARTS, 0), dict[str, list[str]]()
    for part, text in (("system", context.system), ("user", context.user)):
        tokens[part] = count(text)
        limit = getattr(limits, part)
        if limit is not None and tokens[part] > limit:
            raise bad_request(
                f"context.{part} has {tokens[part]} tokens, its budget is {limit}: it is never "
                "cut, so shorten it or raise the budget.", f"context.budgets.{part}",
            )  # fmt: skip
        room = None if room is None else room - tokens[part]
    if room is not None and room < 0:
        raise bad_request(
            f"context.budgets.total is {limits.total}, and system and user alone have "
            f"{tokens['system'] + tokens['user']} tokens.", "context.budgets.total",
        )  # fmt: skip

    def fit(part: str, texts: list[str], names: list[str], *, stops: bool = False) -> list[int]:
        nonlocal room
        limit = getattr(limits, part)
        chosen: list[int] = []
        for index, text in enumerate(texts):
            size = count(text)
            bounds = [bound for bound in (limit, room) if bound is not None]
            fits = not bounds or tokens[part] + size <= min(bounds)
            if fits and not (stops and len(chosen) < index):
                chosen.append(index)
                tokens[part] += size
            else:
                dropped.setdefault(part, []).append(names[index])
        room = None if room is None else room - tokens[part]
        return chosen

    written = [_json(tool) for tool in context.tools]
    names = [_tool_name(tool) for tool in context.tools]
    tools = sorted(fit("tools", written, names), key=lambda index: (names[index], written[index]))
    newest = context.history[::-1]
    numbers = [str(len(newest) - 1 - index) for index in range(len(newest))]
    history = fit("history", [_json(message) for message in newest], numbers, stops=True)[::-1]
    while history and newest[history[0]].get("role") not in ("user", "system"):
        dropped.setdefault("history", []).append(numbers[history[0]])  # a reply to what is gone
        tokens["history"] -= count(_json(newest[history.pop(0)]))
    passages = list({passage.id: passage for passage in reversed(context.evidence)}.values())[::-1]
    texts = [f"[{passage.id}] {passage.text}" for passage in passages]
    evidence = fit("evidence", texts, [passage.id for passage in passages])
    parts = [*(texts[index] for index in evidence), context.user]
    messages = [{"role": "system", "content": context.system}] if context.system else []
    messages += [msgspec.json.decode(_json(newest[index])) for index in history]
    messages.append({"role": "user", "content": "\n\n".join(parts)})
    return CompiledContext(
        messages=messages, tools=[msgspec.json.decode(written[index]) for index in tools],
        tokens=tokens, dropped=dropped,
    )  # fmt: skip


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))
