"""Tool calls are told from content, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.text.reasoning import FAMILIES, ThinkParser
from pigou.text.tool_calls import (
    PARSERS,
    CallArguments,
    CallStart,
    JsonEnd,
    NamedParser,
    RequiredParser,
    ToolParser,
    detect_parser,
    make_parser,
    open_reasoning,
)

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "}]</tool_call>\\"{"}}\n</tool_call>'


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of a text that comes in pieces."""
    content, calls = "", list[tuple[str, str]]()
    for piece in [*pieces, None]:
        for event in parser.finish() if piece is None else parser.feed(piece):
            if isinstance(event, str):
                content += event
            elif isinstance(event, CallStart):
                assert event.index == len(calls)
                calls.append((event.name, ""))
            elif isinstance(event, CallArguments):
                assert event.index == len(calls) - 1
                name, said = calls[-1]
                calls[-1] = (name, said + event.text)
    assert parser.calls == len(calls)
    return content, calls


CALLS = {
    "deepseek_v3": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "pythonic": "[f(a=1)]",
    "qwen3_coder": "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
}
FUNCTIONS = {
    "f": {"parameters": {"properties": {
        "a": {"type": "integer"}, "s": {"type": "string"}, "b": {"anyOf": [{"type": "boolean"},
        {"type": "null"}]}, "o": {"type": ["object", "array"]}, "x": {"type": "number"}}}},
    "get_weather": {"parameters": None},
}  # fmt: skip
CODER = (
    "<tool_call>\n<function=f>\n<parameter=s>\n\nif a < 1:\n  b()\n\n</parameter>\n"
    "<parameter=a>7</parameter><parameter=o>[1, {}]</parameter></function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>"
    "<arg_value>True</arg_value><arg_key>x</arg_key><arg_value>1e999</arg_value></tool_call>"
)
V3 = ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
      '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
      '<｜tool▁call▁end｜><｜tool▁calls▁end｜>')  # fmt: skip
V31 = V3.replace("function<｜tool▁sep｜>", "").replace("\n```json\n", "<｜tool▁sep｜>")
V31 = V31.replace("\n```", "")
KIMI = ('<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>'
        '{"a": "}"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        '<|tool_call_end|><|tool_calls_section_end|>')  # fmt: skip
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Hello there. ", "Hello there. ", []),
    ("deepseek_v3", f"I look.\n{V3}", "I look.", [("f", {"a": 1}), ("g", {})]),
    ("deepseek_v3", V31, "", [("f", {"a": 1}), ("g", {})]),
    ("deepseek_v3", V3[:60], "", []),
    ("deepseek_v3", "Plain {text}.", "Plain {text}.", []),
    ("kimi_k2", f"So. {KIMI}", "So.", [("f", {"a": "}"}), ("g", {})]),
    ("kimi_k2", KIMI[:70], "", []),
    ("hermes", " \n", " \n", []),
    ("hermes", "a <tool_cal and <b>", "a <tool_cal and <b>", []),
    ("hermes", HERMES, "", [("f", {"a": '}]</tool_call>"{'})]),
    ("hermes", f"I look.\n\n{HERMES}\n", "I look.", [("f", {"a": '}]</tool_call>"{'})]),
    ("hermes", HERMES + "\n" + HERMES.replace('"f"', '"g"'), "",
     [("f", {"a": '}]</tool_call>"{'}), ("g", {"a": '}]</tool_call>"{'})]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', "",
     [("f", {"a": [1, {}]})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null, "id": {"x": "}"}}</tool_call> so',
     " so", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("hermes", 'x<tool_call>no call</tool_call>y', "xno cally", []),
    ("hermes", 'x<tool_call>{"name": "f", "argum', "x", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "get_weather", "arguments": {}}', "",
     [("f", {}), ("get_weather", {})]),
    ("llama3_json", '{"answer": {"a": 42}}', '{"answer": {"a": 42}}', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    ("llama3_json", "<|python_tag|>search.call(q='x')", "search.call(q='x')", []),
    ("llama3_json", "Plain {text}.", "Plain {text}.", []),
    ("llama3_json", '{"answer": 4', '{"answer": 4', []),
    ("mistral",
     '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]', "",
     [("f", {"a": "]"}), ("g", {})]),
    ("mistral", 'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Yes.", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}', "",
     [("f", {"a": 1}), ("g", {"b": {}})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
    # One object for a list, a list for one object, with and without what closes it.
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}', "",
     [("f", {}), ("g", {})]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}[TOOL_CALLS]{"name": "g"}', "",
     [("f", {}), ("g", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": {"b": [{}]}}}', "",
     [("f", {"a": {"b": [{}]}})]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
     '</tool_call>', "", [("f", {}), ("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}\n</tool_call>.', ".",
     [("f", {}), ("g", {})]),
    ("llama3_json", '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"a": 1}}]', "",
     [("f", {}), ("f", {"a": 1})]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "",
     [("f", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": "ü😀"}}', "",
     [("f", {"a": "ü😀"})]),
    # Prose before, between and after.
    ("mistral", "[TOOL_CALLS]I cannot call that.", "I cannot call that.", []),
    ("mistral", "[TOOL_CALLS]Sorry", "Sorry", []),
    ("mistral", "[TOOL_CALLS]get_wea", "", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] Done, then.', " Done, then.",
     [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "}"} so be it', " so be it", [("f", {"a": "}"})]),
    ("mistral", 'So. [TOOL_CALLS] Here it is: [{"name": "f", "arguments": {}}]', "So.  Here it is:",
     [("f", {})]),
    ("mistral", "[TOOL_CALLS] [1, 2]", " [1, 2]", []),
    ("hermes", '<tool_call>I call {"name": "f", "arguments": {}}</tool_call>x', "I callx",
     [("f", {})]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3_json", 'I look: {"name": "f", "parameters": {"a": 1}} and wait', "I look: and wait",
     [("f", {"a": 1})]),
    ("llama3_json", '{"a": {"name": "f", "parameters": {}}} {"name": "f", "parameters": {}}',
     '{"a": {"name": "f", "parameters": {}}}', [("f", {})]),
    ("llama3_json", 'int main() { return {0}; }', 'int main() { return {0}; }', []),
    # Code fences.
    ("llama3_json", 'So:\n```json\n{"name": "f", "parameters": {}}\n```\nDone', "So:\nDone",
     [("f", {})]),
    ("hermes", '```xml\n<tool_call>{"name": "f"}</tool_call>\n```', "", [("f", {})]),
    ("hermes", '<tool_call>\n```json\n{"name": "f"}\n```\n</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>\n```py\nx[0]\n```', "\n```py\nx[0]\n```",
     [("f", {})]),
    ("llama3_json", "```py\nx = []\n```", "```py\nx = []\n```", []),
    ("mistral", '[TOOL_CALLS]```json\n[{"name": "f", "arguments": {}}]\n```', "", [("f", {})]),
    # Cut off at max_tokens.
    ("hermes", 'x<tool_call>{"name": "f", "arguments": {"a": [1', "x", [("f", '{"a": [1')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"', "", [("f", '{"a"')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a"', "", [("f", '{"a"')]),
    ("mistral", '[TOOL_CALLS]f[AR', "", []),
    ("mistral", '[TOOL_CALLS][{"na', "", []),
    ("llama3_json", 'a {"name": "f", "parameters": {"a": "', "a", [("f", '{"a": "')]),
    ("llama3_json", 'a {"name": "f", "par', 'a {"name": "f", "par', []),
    # Python's notation: a list that ends, at the start, of known functions by keyword.
    ("pythonic", "[f(a='it\\'s ]', s=[null, -1, (True, {'k': 1.5})]), get_weather()]", "",
     [("f", {"a": "it's ]", "s": [None, -1, [True, {"k": 1.5}]]}), ("get_weather", {})]),
    ("pythonic", '<|python_start|>[f(a="é")]<|python_end|>', "", [("f", {"a": "é"})]),
    *[("pythonic", text, text, []) for text in (
        "[1, 2, 3]", "See [f(a=1)].", "[g(a=1)]", "[f(1)]", "[f(a=x)]", "[f(**a)]", "[f(a=1), 2]",
        "[f(a=1", "[f(a=b'x')]", "[f(a=1e999)]", "[f(a='\\ud800')]", "[f(a={**{}})]", "[f", "[")],
    # Marked parameters: values by the types of the function's schema.
    ("qwen3_coder", f"So. {CODER}\n{CODER}", "So.",
     [("f", {"s": "\nif a < 1:\n  b()\n", "a": 7, "o": [1, {}]})] * 2),
    ("qwen3_coder", "<function=f><parameter=a>x<parameter=b>null</function>", "",
     [("f", {"a": "x", "b": None})]),
    ("qwen3_coder", "<tool_call><function=get_weather></function>", "", [("get_weather", {})]),
    ("qwen3_coder", "use <function=g>", "use <function=g>", []),
    ("qwen3_coder", "<tool_call><function=get_w", "", []),
    ("qwen3_coder", f"{CODER[:80]}", "", [("f", '{"s": "\\nif a < 1:\\n  b()\\n"')]),
    ("glm45", f"So.\n{GLM}", "So.", [("f", {"s": "12", "b": True, "x": "1e999"})]),
    ("glm45", f"<tool_call>get_weather</tool_call>{GLM}", "",
     [("get_weather", {}), ("f", {"s": "12", "b": True, "x": "1e999"})]),
    ("glm45", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    ("glm45", "<tool_call>Sorry", "<tool_call>Sorry", []),
    # Reasoning.
    *[(name, f"<think>Maybe {call} or so</think>\n\n{call}", f"<think>Maybe {call} or so</think>",
       [("f", {"a": 1})]) for name, call in CALLS.items()],
    *[(name, f"[THINK]{call}[/THINK]So {call}", f"[THINK]{call}[/THINK]So",
       [("f", {"a": 1})]) for name, call in CALLS.items() if name != "pythonic"],
    *[(name, f"<think>{call} and {call}", f"<think>{call} and {call}", [])
      for name, call in CALLS.items()],
    *[(name, f"{call}<think>{call}</think>{call}", f"<think>{call}</think>",
       [("f", {"a": 1}), ("f", {"a": 1})]) for name, call in CALLS.items()],
    *[(f"{name} within", f"{call}</think>{call}", f"{call}</think>", [("f", {"a": 1})])
      for name, call in CALLS.items()],
    *[(f"{name} within", f"{call} <think>", f"{call} <think>", []) for name, call in CALLS.items()],
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>', "",
     [("f", {"a": "<think>"})]),
    ("required", '[{"name":"f","arguments":{"a":"x"}},{"name":"f","arguments":{}}]', "",
     [("f", {"a": "x"}), ("f", {})]),
    ("named", '{"a":"b"}', "", [("f", {"a": "b"})]),
]  # fmt: skip


def parser(name: str) -> ToolParser:
    if name == "required":
        return RequiredParser()
    if name == "named":
        return NamedParser("f")
    format, _, within = name.partition(" ")
    format_name = next(each for each in PARSERS if each == format)
    return make_parser(format_name, FUNCTIONS, "<think>" if within else "")


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # of a call that was cut off


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=lambda x: str(x)[:40])
def test_calls_and_content_are_told_apart_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    sizes = [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 7)]
    for pieces in [*sizes, *([text[:at], text[at:]] for at in range(len(text)))]:
        said, found = read(parser(name), pieces)
        assert said == content
        assert [(function, parsed(arguments)) for function, arguments in found] == calls


@settings(max_examples=examples(600))
@given(
    st.sampled_from([*PARSERS, *(f"{name} within" for name in PARSERS), "required", "named"]),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": ', '"f"',
             ', "arguments": ', "{}", "}", "]", "[", '"', "\\", ",", " ", "\n", "x", "é", ";", "f",
             "<think>", "</think>", "[THINK]", "[/THINK]", "```", "```json\n", "`", "[ARGS]", "f{",
             '{"name": "f", "arguments": {', "So be it. ", "{", '"parameters": ', "function",
             "[f(", "a=1", ")", "'", "<function=", "f>", "<parameter=a>", "</parameter>",
             "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
        ),
        max_size=25,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_text_means_the_same_in_any_pieces(name: str, parts: list[str], random: Any) -> None:
    text = "".join(parts)
    whole = read(parser(name), [text])
    pieces, at = [], 0
    while at < len(text):
        size = random.randint(1, 6)
        pieces.append(text[at : at + size])
        at += size
    assert read(parser(name), pieces) == whole


@settings(max_examples=examples(100))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    )
)
def test_the_end_of_a_json_value_is_where_json_says(value: Any) -> None:
    text = json.dumps({"a": value}, ensure_ascii=False)
    end = JsonEnd()
    assert end.feed(text + ', "b": {}}') == len(text)
    assert end.done


@pytest.mark.parametrize(
    ("prompt", "final", "opened"),
    [
        ("<|assistant|>\n<think>\n", None, "<think>"), ("[THINK]", None, "[THINK]"),
        ("<|assistant|>\n<think>\n\n</think>\n\n", None, ""), ("<think> and so", None, ""),
        ("", "<think>Hm, ", "<think>"), ("", "<think>Hm</think> So ", ""), ("<think>", "So", ""),
    ],
)  # fmt: skip
def test_a_reply_may_begin_within_reasoning(prompt: str, final: str | None, opened: str) -> None:
    assert open_reasoning(prompt, final) == opened


def test_every_known_template_is_detected() -> None:
    assert detect_parser("<tools>...<tool_call>") == "hermes"
    assert detect_parser("<tool_call><function=") == "qwen3_coder"
    assert detect_parser("<tool_call><arg_key>") == "glm45"
    assert detect_parser("[func_name1(params_name1=") == "pythonic"
    assert detect_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect_parser('<|start_header_id|>{"name": f, "parameters": d}') == "llama3_json"
    assert detect_parser("<|im_start|>") is None
    assert detect_parser(None) is None


@pytest.mark.parametrize("family", ["", "qwen3"])
def test_a_parser_tells_when_a_call_is_complete(family: str) -> None:
    parser = make_parser("hermes", {"f"})
    if family:
        parser = ThinkParser(FAMILIES[family], True, parser)
        parser.feed("I call <tool_call>.</think>")
    parser.feed('Well. <tool_call>{"name": "f", "arguments": {"a": [1, ')
    assert not parser.has_called
    parser.feed("2]}}")
    assert parser.has_called
