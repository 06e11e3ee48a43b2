"""Replies of a model that reasons: reasoning apart from content, calls and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.lib.reasoning_model import CLOSE, make
from worker_process import Worker, start, stop

from pigou.config import ConfigError
from pigou.worker.config import WorkerConfig

pytest.importorskip("torch")

ASKED = [{"role": "user", "content": "How warm is it in Rome?"}]
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a"]}}, "required": ["x"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
#: Some tokens of reasoning, the end of it, and more tokens: penalties let them take turns.
TURNS = {"temperature": 0, "frequency_penalty": 2, "max_tokens": 60,
         "logit_bias": {"300": 100, str(CLOSE): 70}}  # fmt: skip


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("reasoning")
    worker = start(
        str(make(folder / "model")), "--executor", "torch", "--rehearse", "0", "--dtype", "fp32",
        log=folder / "log",
    )  # fmt: skip
    yield worker
    stop(worker)


def chat(worker: Worker, **fields: Any) -> Any:
    reply = worker.post("/v1/chat/completions", {"messages": ASKED} | fields)
    assert reply.status == 200, reply.body
    return reply


def streamed(worker: Worker, **fields: Any) -> tuple[str, str, str, Any]:
    reasoning = content = arguments = ""
    options = {"include_usage": True}
    chunks = chat(worker, stream=True, stream_options=options, **fields).chunks
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        reasoning += delta.get("reasoning") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            arguments += call["function"]["arguments"]
    return reasoning, content, arguments, chunks[-1]["usage"]


def test_reasoning_comes_apart_from_content_streamed_or_not(worker: Worker) -> None:
    body = chat(worker, **TURNS).json
    message, usage = body["choices"][0]["message"], body["usage"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"]
    assert "think>" not in message["reasoning"] + message["content"].partition("</think>")[0]
    said = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 1 < said < usage["completion_tokens"]
    reasoning, content, _, counted = streamed(worker, **TURNS)
    assert (reasoning, content) == (message["reasoning"], message["content"])
    assert counted["completion_tokens_details"] == usage["completion_tokens_details"]


def test_reasoning_that_does_not_end_leaves_no_content(worker: Worker) -> None:
    body = chat(worker, max_tokens=3, logit_bias={"300": 100}).json
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["message"]["reasoning"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_include_reasoning_false_leaves_it_out(worker: Worker) -> None:
    message = chat(worker, include_reasoning=False, **TURNS).json["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == streamed(worker, **TURNS)[1]
    assert streamed(worker, include_reasoning=False, **TURNS)[0] == ""


def test_thinking_that_the_prompt_closed_is_content(worker: Worker) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    body = chat(worker, max_tokens=3, temperature=0, **off).json
    message = body["choices"][0]["message"]
    assert message["content"]
    assert "reasoning" not in message
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("asked", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
])  # fmt: skip
def test_structured_output_waits_for_the_end_of_reasoning(
    worker: Worker, asked: dict[str, Any]
) -> None:
    fields = TURNS | asked | {"max_tokens": 90}
    message = chat(worker, **fields).json["choices"][0]["message"]
    assert message["reasoning"]
    calls = message.get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else message["content"]
    assert json.loads(text) == {"x": "a"}
    reasoning, content, arguments, _ = streamed(worker, **fields)
    assert reasoning == message["reasoning"]
    assert (content or None, arguments) == (message["content"], text if calls else "")


def test_a_resumed_reply_goes_on_within_or_after_reasoning(worker: Worker) -> None:
    body = chat(worker, return_token_ids=True, **TURNS).json
    choice, usage = body["choices"][0], body["usage"]
    said = usage["completion_tokens_details"]
    for resumed in (1, said["reasoning_tokens"] - 1, said["reasoning_tokens"], 50):
        ids = [*body["prompt_token_ids"], *choice["token_ids"][:resumed]]
        rest = chat(worker, prompt_token_ids=ids, resume_tokens=resumed, **TURNS).json
        message = rest["choices"][0]["message"]
        assert choice["message"]["content"].endswith(message["content"])
        if "reasoning" in message:
            assert choice["message"]["reasoning"].endswith(message["reasoning"])
            assert message["content"] == choice["message"]["content"]
        assert ("reasoning" in message) is (resumed < said["reasoning_tokens"] - 1)
        assert rest["usage"]["completion_tokens_details"] == said


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="reasoning_parser is 'x'; give auto, none, or one of"):
        WorkerConfig(reasoning_parser="x")
