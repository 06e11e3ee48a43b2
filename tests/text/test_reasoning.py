"""Reasoning is split from content and tool calls, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.text.reasoning import (
    FAMILIES,
    HARMONY,
    Reasoning,
    ReasoningEnd,
    begins_inside,
    detect_family,
)
from pigou.text.tool_calls import CallArguments, CallStart, Thought, make_parser

CALL = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = "commentary to=functions.f <|constrain|>json<|message|>"
#: Family, whether the reply begins inside, text; reasoning, content, calls.
CASES: list[tuple[str, bool, str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "\n\nYes.", [])),
    ("qwen3", True, "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("qwen3", True, "<think>Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("qwen3", False, "Yes. <think>a</think>", ("", "Yes. <think>a</think>", [])),
    ("qwen3", False, "<think>never closed </thin", ("never closed </thin", "", [])),
    ("qwen3", False, " <thin", ("", " <thin", [])),
    ("qwen3", False, "", ("", "", [])),
    ("qwen3", False, f"<think>{CALL}</think>No.", ('<tool_call>{"name": "f", "arguments": {"a": "',
     '"}}</tool_call></think>No.', [])),
    ("qwen3", True, f"a</think>{CALL}", ("a", "", [("f", '{"a": "</think>"}')])),
    ("qwen3", True, "a<tool_call>{}</think>b</think>", ("a<tool_call>{}", "b</think>", [])),
    ("deepseek_r1", True, "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.", [])),
    ("granite", False, "Here's my thought process: a Here is my response: b", (" a ", " b", [])),
    ("granite", False, "Here is my dog.", ("", "Here is my dog.", [])),
    ("kimi_k2", True, "a<|tool_calls_section_begin|>b", ("a", "<|tool_calls_section_begin|>b", [])),
    (HARMONY, True, f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", ("Hm.", "Yes.", [])),
    (HARMONY, True, f'{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>{TO_F}{{"a": 1}}<|call|>',
     ("Hm.", "", [("f", '{"a": 1}')])),
    (HARMONY, True, " to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    (HARMONY, True, f"<|channel|>commentary<|message|>I look.<|end|>{FINAL}Yes.",
     ("", "I look.Yes.", [])),
    (HARMONY, True, "<|channel|>commentary to=browser.search<|message|>x", ("x", "", [])),
    (HARMONY, True, f"{ANALYSIS}to=functions.f<|end|>{FINAL}a", ("to=functions.f", "a", [])),
    (HARMONY, True, f"{FINAL}cut<|start|>assista", ("", "cut", [])),
    (HARMONY, True, "No markup < at all.", ("", "No markup < at all.", [])),
]  # fmt: skip


def read(family: str, inside: bool, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    inner = None if family == HARMONY else make_parser("hermes", ["f"])
    parser = Reasoning(family, inside).parser(inner, ["f"])
    thoughts, content, calls = "", "", list[tuple[str, str]]()
    for piece in [*pieces, None]:
        for event in parser.finish() if piece is None else parser.feed(piece):
            match event:
                case Thought(text):
                    thoughts += text
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append((name, ""))
                case CallArguments(index, text):
                    calls[index] = (calls[index][0], calls[index][1] + text)
                case _:
                    content += event
    return thoughts, content, calls


@pytest.mark.parametrize(("family", "inside", "text", "expected"), CASES)
def test_reasoning_content_and_calls_are_told_apart(
    family: str, inside: bool, text: str, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    assert read(family, inside, [text]) == expected
    assert read(family, inside, list(text)) == expected
    for at in range(len(text)):
        assert read(family, inside, [text[:at], text[at:]]) == expected


PIECES = st.sampled_from([
    "<think>", "</think>", "<thi", "nk>", "a", " ", "\n", CALL, "<tool_call>", "[THINK]",
    "[/THINK]", "Here is my ", "thought process:", "response:", ANALYSIS, FINAL, TO_F, "<|end|>",
    "<|channel|>", "<|start|>assistant", "<|message|>", "{}",
])  # fmt: skip


@settings(max_examples=examples(300))
@given(st.sampled_from(sorted(FAMILIES)), st.booleans(), st.lists(PIECES, max_size=12), st.data())
def test_any_cut_of_any_text_reads_the_same(
    family: str, inside: bool, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, inside, pieces) == read(family, inside, [text])


def test_the_prompts_end_tells_whether_a_reply_begins_inside() -> None:
    qwen, r1 = FAMILIES["qwen3"], FAMILIES["deepseek_r1"]
    assert begins_inside(qwen, "<|im_start|>assistant\n<think>\n", None)
    assert not begins_inside(qwen, "<|im_start|>assistant\n<think>\n\n</think>\n\n", None)
    assert not begins_inside(qwen, "user: what is <think>?<|im_end|>assistant\n", None)
    assert begins_inside(r1, "<｜Assistant｜>", None)
    assert not begins_inside(r1, "<think></think>", None)
    assert begins_inside(qwen, "", "<think>I begin")
    assert not begins_inside(qwen, "", "<think>a</think>I end")


@pytest.mark.parametrize(("template", "family"), [
    ("{{ x }}<|im_start|>", None), (None, None), ("<|channel|>analysis", HARMONY),
    ("[THINK]", "mistral"), ("'<think>\\n\\n</think>\\n\\n'", "qwen3"), ("[gMASK]<think>", "glm45"),
    ("<｜Assistant｜><think>", "qwen3"), ("<｜Assistant｜> .split('</think>')", "deepseek_r1"),
])  # fmt: skip
def test_a_template_shows_its_family(template: str | None, family: str | None) -> None:
    assert detect_family(template) == family


def test_the_end_of_reasoning_is_found_across_tokens() -> None:
    texts = {0: b"<think>", 1: b"</th", 2: b"ink>", 3: b"a", 4: b"<"}
    end = ReasoningEnd(FAMILIES["qwen3"], True, texts.__getitem__, ())
    assert [end.take(token) for token in (3, 4, 1, 2, 3)] == [True, True, True, True, False]
    end = ReasoningEnd(FAMILIES["qwen3"], False, texts.__getitem__, {0})
    assert [end.take(token) for token in (0, 3, 1, 2, 3)] == [True, True, True, True, False]
    end = ReasoningEnd(FAMILIES["qwen3"], False, texts.__getitem__, {0})
    assert [end.take(token) for token in (3, 0)] == [False, False]


def test_a_grammar_of_harmony_holds_from_the_body_of_the_final_message() -> None:
    text = "<|channel|>/analysis/<|message|>/final/<|end|>/<|start|>/assistant/"
    pieces = (text + "<|channel|>/final/ /<|constrain|>/json/<|message|>/{").split("/")
    texts = {token: piece.encode() for token, piece in enumerate(pieces)}
    end = ReasoningEnd(FAMILIES[HARMONY], True, texts.__getitem__, ())
    assert [end.take(token) for token in texts] == [True] * 13 + [False]
