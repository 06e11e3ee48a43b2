"""Laws of the prompt tokenizer: chats for stock servers are rendered as by transformers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pigou.gateway.prompt_reader import NotTokenizable, PromptReader, PromptTokenizer
from pigou.gateway.request import BodyFields
from pigou.models import bundled_path
from pigou.text.chat_template import ChatTemplate

#: Shows tools, calls and their arguments, as templates of tool-calling models do.
TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{%- endif %}
{%- for message in messages %}<{{ message.role }}>
  {%- if message.content %}{{ message.content }}{% endif %}
  {%- for call in message.tool_calls or [] %}
[{{ call.function.name }}({% for name, value in call.function.arguments.items() %}
{{- name }}={{ value | tojson }};{% endfor %})]
  {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOLS = [{"type": "function", "function": {
    "name": "toll", "description": "Price of a road — today",
    "parameters": {"type": "object", "properties": {"road": {"type": "string"}}}}}]  # fmt: skip
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is <b>'it'?"}],
    [
        {"role": "user", "content": "The toll of the narrow road?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "toll", "arguments": '{"road": "narrow", "n": [1, 2.5]}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "4/3"},
        {"role": "user", "content": "And the wide one?"},
    ],
]  # fmt: skip


def speller() -> PromptTokenizer:
    made = PromptTokenizer.load(bundled_path())
    return PromptTokenizer(made.tokenizer, ChatTemplate(TEMPLATE, made.tokenizer.names))


def asked(messages: Any, **fields: Any) -> BodyFields:
    return BodyFields(messages=msgspec.Raw(json.dumps(messages).encode()), **fields)


def parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as vLLM hands them to transformers: arguments as objects."""
    made = json.loads(json.dumps(messages))
    for message in made:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(made)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_and_their_calls_are_shown_as_transformers_shows_them(
    messages: list[dict[str, Any]], tools: Any
) -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    [theirs], _ = chat.render_jinja_template(
        [parsed(messages)], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True
    )
    ours = speller().prompt_of(asked(messages, tools=tools), chat=True, stock=True)
    assert ours == theirs


UNSPELLABLE: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"},
    {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
    {"messages": [{"role": "assistant", "content": "",
                   "tool_calls": [{"function": {"name": "f", "arguments": "{not json"}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", UNSPELLABLE)
def test_what_cannot_be_rendered_is_left_to_the_worker(fields: dict[str, Any]) -> None:
    with pytest.raises(NotTokenizable):
        speller().prompt_of(asked(**fields), chat=True, stock=True)


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [["a"]], {"a": 1}, [1, "a"], [None]])
def test_what_is_no_prompt_is_left_to_the_worker(prompt: Any) -> None:
    made = speller()
    try:
        text = made.prompt_of(BodyFields(prompt=prompt), chat=False, stock=False)
    except NotTokenizable:
        return
    assert text == []


@pytest.mark.parametrize("allowed", [False, True])
def test_a_gateway_prepares_for_control_tokens_before_the_first_chat(allowed: bool) -> None:
    speller = PromptTokenizer.load(bundled_path())
    PromptReader(speller, allow_special_tokens=allowed)
    control = speller.tokenizer.control
    assert control is not None
    assert (control._copy is None) == allowed
