"""Templates render as transformers renders them: families' shapes by kinds of conversations."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from chat_templates import TEMPLATES

from pigou.text.chat_template import ChatError, ChatTemplate

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Zürich", "days": 3, "<html>": "a & b"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says 'how' the weather is; naïve.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def user(content: Any = "Hello there") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "Hi!", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


RESULT = {
    "role": "tool",
    "content": '{"rain": true}',
    "tool_call_id": "abcdefghi",
    "name": "weather",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [user()],
    "turns": [user(" a "), assistant("b\n"), user("c\n\nd")],
    "system": [system(), user(), assistant(), user("more")],
    "late-system": [user(), assistant(), system("Now be long."), user()],
    "non-ascii": [
        system("你好 — naïve"),
        user("😀 e\u0301 \u2028 \u00a0x"),
        assistant("ß"),
        user("ok"),
    ],
    "empty": [system(""), user(""), assistant(""), user(" ")],
    "markup": [user("{{ 7 * 7 }} {% raw %} <b> & ' \" \\n"), assistant("{}"), user("%}")],
    "tool": [
        user(),
        assistant(None, tool_calls=[CALL]),
        RESULT,
        assistant("Rain."),
        user("Thanks"),
    ],
    "tool-and-text": [user(), assistant("Let me see.", tool_calls=[CALL]), RESULT],
    "tool-no-key": [user(), {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "no-calls": [user(), assistant("Hi", tool_calls=None), user("again")],
    "thinking": [user(), assistant("<think>\nhm\n</think>\n\nYes"), user("so?")],
    "reasoning": [user(), assistant("Yes", reasoning_content="hm"), user("so?")],
    "none": [user(None), assistant(None), user("x")],
    "long": [user("q") if i % 2 == 0 else assistant("a") for i in range(11)],
}
PARTS: dict[str, list[dict[str, Any]]] = {
    "one-part": [user([{"type": "text", "text": "Hello "}])],
    "parts": [
        system([{"type": "text", "text": "Be brief."}]),
        user([{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]),
        assistant([{"type": "text", "text": "c"}]),
        user("d"),
    ],
}


@cache
def parsed(source: str) -> ChatTemplate:
    return ChatTemplate(source, NAMES)


def transformers_render(source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers makes of it; None where it refuses."""
    from jinja2 import TemplateError
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), **NAMES)
    tokenizer.chat_template = source
    try:
        text = tokenizer.apply_chat_template(copy.deepcopy(chat), tokenize=False, **options)
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return None
    assert isinstance(text, str)
    return text


def expected_render(source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers makes of it; where it fails without content, with "", as vLLM does."""
    if "content'] is not none %}{% set content" in source:  # it asks, and transformers drops null
        chat = [m for m in chat if m["role"] != "assistant" or m.get("content") is not None]
    text = transformers_render(source, chat, **options)
    shown = [m if m.get("content") is not None else m | {"content": ""} for m in chat]
    return transformers_render(source, shown, **options) if text is None else text


def render(source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    fields = {
        name: options.pop(name, False)
        for name in ("add_generation_prompt", "continue_final_message")
    }
    before = copy.deepcopy(chat)
    try:
        return parsed(source).render(chat, **fields, variables=options)
    except ChatError:
        return None
    finally:
        assert chat == before, "the caller's messages stay as they are"


def test_there_are_at_least_forty_shapes() -> None:
    assert len(TEMPLATES) >= 40


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_conversations_render_as_in_transformers(name: str, tools: Any) -> None:
    source, shown = TEMPLATES[name], 0
    walks = parsed(source).needs
    for title, chat in CHATS.items():
        if not walks.strings:  # transformers loops over the characters of a string
            chat = as_parts(chat)
        for opens in (False, True):
            options = {"tools": tools, "add_generation_prompt": opens}
            expected = expected_render(source, chat, **options)
            assert render(source, chat, **options) == expected, title
            shown += expected is not None
    assert shown >= 4, "most conversations can be shown"


@pytest.mark.parametrize("name", TEMPLATES)
def test_variables_and_documents_reach_the_template_as_in_transformers(name: str) -> None:
    options = {
        "documents": [{"title": "T", "text": "é"}],
        "enable_thinking": False,
        "reasoning_effort": "high",
        "date_string": "today",
        "bos_token": "<other>",
    }
    source, chat = TEMPLATES[name], CHATS["turns"]
    if not parsed(source).needs.strings:
        chat = as_parts(chat)
    assert render(source, chat, **options) == transformers_render(source, chat, **options)


def as_parts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        m | {"content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m.get("content"), str)
        else m
        for m in chat
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", PARTS.values(), ids=PARTS)
def test_parts_are_given_to_templates_that_loop_over_them_and_text_to_others(
    name: str, chat: list[dict[str, Any]]
) -> None:
    source = TEMPLATES[name]
    joined = [
        m | {"content": m["content"] if isinstance(m["content"], str) else
             "\n".join(part["text"] for part in m["content"])}
        for m in chat
    ]  # fmt: skip
    needs = parsed(source).needs
    expected = chat if needs.parts else joined
    if not needs.strings:
        expected = as_parts(expected)
    text = render(source, chat)
    assert text == transformers_render(source, expected)
    for part in [] if text is None or "minicpm" in name else chat[-1:]:
        last = part["content"] if isinstance(part["content"], str) else part["content"][-1]["text"]
        assert last.strip() in text, "the message is there"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("chatml", False), ("llama3", False), ("llama3.1-tools", False), ("qwen3-thinking", False),
        ("smollm3", False), ("mistral-v3-tools", False), ("llama3.2-vision", True),
        ("llama4", True), ("qwen2-vl", True), ("gemma3", True), ("glm4.5", True), ("kimi", True),
        ("smolvlm", True), ("loops-through-a-variable", True), ("command-a", True),
    ],
)  # fmt: skip
def test_the_form_of_the_content_is_read_from_the_template(name: str, parts: bool) -> None:
    assert parsed(TEMPLATES[name]).needs.parts is parts


@pytest.mark.parametrize("name", ["smolvlm", "loops-through-a-variable"])
def test_text_is_one_part_for_a_template_that_only_loops(name: str) -> None:
    assert render(TEMPLATES[name], CHATS["one"]) == transformers_render(
        TEMPLATES[name], as_parts(CHATS["one"])
    )
    assert "Hello there" in str(render(TEMPLATES[name], CHATS["one"]))


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n not in ("ascii-json",)])
@pytest.mark.parametrize("final", ["So I ", "  So\n", [{"type": "text", "text": "So "}], None])
def test_the_final_message_is_continued_as_in_transformers(name: str, final: Any) -> None:
    source = TEMPLATES[name]
    needs = parsed(source).needs
    chat = [user("x"), assistant(final)]
    as_text = isinstance(final, list) and not needs.parts
    given = [user("x"), assistant(final[0]["text"])] if as_text else chat
    if not needs.strings:
        given = as_parts(given)
    options = {"continue_final_message": True}
    assert render(source, chat, **options) == transformers_render(source, given, **options)


def test_arguments_are_objects_where_the_template_writes_json() -> None:
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = '{"city": "Zürich", "days": 3, "<html>": "a & b"}'
    text = [user(), assistant(None, tool_calls=[call]), RESULT]
    objects = [user(), assistant(None, tool_calls=[CALL]), RESULT]
    for name in (
        "llama3.1-tools",
        "qwen2.5-tools",
        "mistral-v3-tools",
        "hermes-tool-use",
        "glm4.5",
    ):
        assert render(TEMPLATES[name], text) == render(TEMPLATES[name], objects) is not None
    name = "qwen3-thinking"  # takes both
    assert render(TEMPLATES[name], text) == transformers_render(TEMPLATES[name], text)
    joins = "{% for m in messages %}{% for c in m.tool_calls %}{{ 'A' + c.function.arguments }}"
    joins += "{% endfor %}{% endfor %}"
    assert render(joins, text) == transformers_render(joins, text) is not None
    broken = copy.deepcopy(call)
    broken["function"]["arguments"] = "{not json"
    assert "{not json" in str(
        render(TEMPLATES["qwen2.5-tools"], [user(), assistant(None, tool_calls=[broken])])
    )


ASKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if QUESTION %}YES{% else %}NO"
    "{% endif %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("null", [{"content": None}, {}], ids=["null", "missing"])
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("m.content is none", "YES"), ("m['content'] is not none", "NO"),
        ("m.content == none", "YES"), ("m.content != None", "NO"), ("m.content == ''", "YES"),
        ("m.content is string", "NO"), ("m.content", "NO"), ("m.content is defined", "YES"),
        ("m.content is defined and m.content is not none", "NO"),
        ("m.content is string and m.content", "NO"), ("(m.content | length) == 0", "YES"),
        ("'</think>' in m.content", "NO"), ("('x' + m.content) == 'x'", "YES"),
        ("m.content.strip() == ''", "YES"), ("(m.content | default('', true)) == ''", "YES"),
    ],
)  # fmt: skip
def test_a_template_that_asks_is_told_that_a_content_is_null(
    question: str, answer: str, null: dict[str, Any]
) -> None:
    chat = [user(), {"role": "assistant", **null, "tool_calls": [CALL]}, RESULT]
    assert render(ASKS.replace("QUESTION", question), chat) == answer
    texts = ASKS.replace("QUESTION", "m.content is none")
    assert render(texts, [user(), assistant("", tool_calls=[CALL])]) == "NO"


def test_arguments_are_text_where_the_template_joins_them_and_objects_where_it_loops() -> None:
    text = copy.deepcopy(CALL)
    text["function"]["arguments"] = '{"a": 1, "b": "ü"}'
    objects = copy.deepcopy(CALL)
    objects["function"]["arguments"] = {"a": 1, "b": "ü"}
    each = "{% for m in messages %}{% for c in m.tool_calls %}BODY{% endfor %}{% endfor %}"
    loop = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    pairs = loop.replace(".items()", "|items")
    for body, shown in {
        "{{ 'A' + c.function.arguments }}": 'A{"a": 1, "b": "ü"}',
        "{{ c.function.arguments | tojson }}": '{"a": 1, "b": "ü"}',
        loop: "a=1;b=ü;",
        "{% set c = c.function %}" + pairs.replace("c.function", "c"): "a=1;b=ü;",
        "{% if c.function.arguments is mapping %}" + loop + "{% else %}"
        "{{ c.function.arguments }}{% endif %}": "a=1;b=ü;",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}": '{"a": 1, "b": "ü"}',
    }.items():
        for call in (text, objects):
            chat = [user(), assistant(None, tool_calls=[call])]
            assert render(each.replace("BODY", body), chat) == shown, body


def test_a_chat_uses_the_template_that_is_named_for_its_use() -> None:
    template = ChatTemplate.choose({"default": "D", "tool_use": "T", "rag": "R"}, NAMES)
    assert template is not None
    documents = [{"title": "T", "text": "x"}]
    assert template.render([user()]) == "D"
    assert template.render([user()], variables={"tools": TOOLS}) == "T"
    assert template.render([user()], variables={"documents": documents}) == "R"
    assert template.render([user()], variables={"tools": TOOLS, "documents": documents}) == "T"
    assert ChatTemplate.choose({"tool_use": "T"}, NAMES) is None
    alone = ChatTemplate.choose({"default": "D"}, NAMES)
    assert alone is not None
    assert alone.render([user()], variables={"tools": TOOLS}) == "D"
    assert alone.identity != template.identity


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ tojson.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.x }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate(source, {}).render([user()])
