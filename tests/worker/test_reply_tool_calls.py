"""Tools: calls that are demanded always parse, streamed or not, and calls of the model are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from worker_process import Worker, start, stop

pytest.importorskip("torch")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/City"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "$defs": {"City": {"type": "string", "maxLength": 10}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "How warm is it in Rome?"}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("tools") / "log"
    worker = start(
        "bundled", "--executor", "torch", "--rehearse", "0", "--dtype", "fp32", log=Path(log)
    )
    yield worker
    stop(worker)


def chat(worker: Worker, **fields: Any) -> Any:
    body = {"messages": ASKED, "tools": [WEATHER, NOW], "max_tokens": 400} | fields
    reply = worker.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    if not fields.get("stream"):
        return reply.json["choices"][0]
    return joined(reply.chunks)


def joined(chunks: list[Any]) -> Any:
    """Put a stream's first choice together, as a client does."""
    calls: list[Any] = []
    content, finish = "", None
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for piece in choice["delta"].get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["id"]
                    assert piece["type"] == "function"
                    assert piece["function"]["name"]
                    # Copied: arguments are added, and the chunks are joined more than once.
                    calls.append(deepcopy({k: v for k, v in piece.items() if k != "index"}))
                else:
                    assert set(piece) == {"index", "function"}
                    said = calls[piece["index"]]["function"]
                    said["arguments"] += piece["function"]["arguments"]
    message = {"content": content or None, "tool_calls": calls}
    return {"message": message, "finish_reason": finish}


def check_arguments(call: Any) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_function_is_called_with_arguments_that_fit_its_schema(
    real: Worker, stream: bool, temperature: float
) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(4):
        reply = chat(real, tool_choice=choice, stream=stream, seed=seed, temperature=temperature)
        assert reply["finish_reason"] == "tool_calls"
        assert reply["message"]["content"] is None
        [call] = reply["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        check_arguments(call)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, None])
def test_a_required_call_is_made_by_every_seed(
    real: Worker, stream: bool, parallel: bool | None
) -> None:
    ids = set()
    for seed in range(6):
        reply = chat(real, tool_choice="required", stream=stream, seed=seed,
                     parallel_tool_calls=parallel, temperature=1.0, max_tokens=1500)  # fmt: skip
        assert reply["finish_reason"] == "tool_calls"
        calls = reply["message"]["tool_calls"]
        assert len(calls) == 1 if parallel is False else 1 <= len(calls) <= 16
        for call in calls:
            check_arguments(call)
        ids |= {call["id"] for call in calls}
    assert len(ids) >= 6


def test_a_stream_says_what_the_whole_reply_says(real: Worker) -> None:
    fields = {"tool_choice": "required", "seed": 3, "temperature": 1.0, "request_id": "same",
              "max_tokens": 1500}  # fmt: skip
    whole, streamed = chat(real, **fields), chat(real, **fields, stream=True)
    assert whole["message"]["tool_calls"] == streamed["message"]["tool_calls"]


def test_a_stream_of_calls_goes_on_elsewhere_from_any_token(real: Worker) -> None:
    fields = {"messages": ASKED, "tools": [WEATHER, NOW], "tool_choice": "required", "seed": 5,
              "temperature": 1.0, "max_tokens": 1500, "stream": True, "return_token_ids": True,
              "request_id": "moved"}  # fmt: skip
    chunks = real.post("/v1/chat/completions", fields).chunks
    prompt = next(c["prompt_token_ids"] for c in chunks if c.get("prompt_token_ids"))
    told = [c for c in chunks if c["choices"] and c["choices"][0].get("token_ids")]
    whole = joined(chunks)

    def resumed(cut: int) -> dict[str, Any]:
        tokens = [token for c in told[:cut] for token in c["choices"][0]["token_ids"]]
        body = fields | {"prompt_token_ids": prompt + tokens, "resume_tokens": len(tokens)}
        return joined([*told[:cut], *real.post("/v1/chat/completions", body).chunks])

    cuts = range(1, len(told), 17)
    with ThreadPoolExecutor(8) as pool:
        for cut, reply in zip(cuts, pool.map(resumed, cuts), strict=True):
            assert reply == whole, cut


def test_tools_may_be_used_of_the_models_own_accord(real: Worker) -> None:
    for stream in (False, True):
        reply = chat(real, stream=stream, temperature=0, max_tokens=20)
        assert "<tool_call>" not in (reply["message"]["content"] or "")
    assert chat(real, tool_choice="none", max_tokens=5)["message"].get("tool_calls") is None


def test_nothing_in_reasoning_is_a_call(real: Worker) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    said = f"<think>Perhaps {call}?</think>"
    for stream in (False, True):
        for text, calls in ((said + call, 1), (said, 0), (f"<think>{call}", 0)):
            reply = chat(real, stream=stream, structured_outputs={"choice": [text]})
            assert len(reply["message"].get("tool_calls") or []) == calls
            assert reply["message"]["content"] == text.removesuffix(call if calls else "")
            assert reply["finish_reason"] == ("tool_calls" if calls else "stop")
        final = {"role": "assistant", "content": "<think>I could"}
        reply = chat(
            real, stream=stream, structured_outputs={"choice": [f" {call}</think>{call}"]},
            messages=[*ASKED, final], add_generation_prompt=False, continue_final_message=True,
        )  # fmt: skip
        assert len(reply["message"]["tool_calls"]) == 1


def test_results_of_tools_reach_the_template(real: Worker) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}]  # fmt: skip
    body = {"messages": messages, "tools": [WEATHER]}
    tokens = real.post("/tokenize", body).json["tokens"]
    text = real.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in text
    assert "21 degrees" in text
    assert "<tools>" in text
    assert chat(real, messages=messages, max_tokens=4)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}],
          "tool_choice": "required"}, None),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": [1]}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x",
          "parameters": {"type": "no such type"}}}], "tool_choice": "required"}, "tools"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_faulty_tools_are_refused_by_name(
    real: Worker, fields: dict[str, Any], named: str | None
) -> None:
    body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 50} | fields
    reply = real.post("/v1/chat/completions", body)
    if named is None:
        assert reply.status == 200, reply.body
    else:
        assert reply.status == 400, reply.body
        assert reply.json["error"]["param"] == named
